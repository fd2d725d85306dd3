"""A server's shard in numpy float64, and the state of a replica cut into such shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trainwright.core.plan import Plan
from trainwright.core.staleness import Outer
from trainwright.strategies.ps.shard_store import Push, Shard, Slot
from trainwright.strategies.ps.tensor_placement import Tensor, deal
from trainwright.strategies.reference.model import Array
from trainwright.strategies.reference.optimizers import Arrays
from trainwright.strategies.reference.state import State, cut_name
from trainwright.strategies.reference.user_functions import Program

OUTER = "outer/"  # slots of the servers' own method, before the parameter's name


def shards_of(parameters: Arrays, servers: int) -> tuple[Shard, ...]:
    """The deal of a model's parameters."""
    tensors = [Tensor(name=name, shape=one.shape, dtype="float64", item_bytes=8) for name, one in parameters.items()]
    return deal(tensors, servers)


def local(plan: Plan) -> bool:
    """Whether workers take steps by themselves, and push how far those went."""
    return plan.local_steps > 1 or bool(plan.outer)


def beginning(program: Program, plan: Plan) -> State:
    """The whole state that the servers hold before the first step."""
    whole = program.initial()
    if not local(plan):
        return whole
    moving = Outer.parse(plan.outer).momentum > 0
    slots = {f"{OUTER}{name}": np.zeros_like(value) for name, value in whole.parameters.items() if moving}
    return State(parameters=whole.parameters, slots=slots)


def part_of(whole: State, shard: Shard) -> State:
    """The part of a state that belongs to a shard; slots of no parameter, such as a count, belong to every one."""
    return State(
        parameters={_key(slot): _rows(whole.parameters[slot.name], slot) for slot in shard.slots},
        slots={
            **{name: value for name, value in whole.slots.items() if not name.partition("/")[2]},
            **{
                f"{kind}/{_key(slot)}": _rows(value, slot)
                for slot in shard.slots
                for kind, value in _of(whole.slots, slot.name).items()
            },
        },
        step=whole.step,
    )


def read(shard: Shard, region: memoryview) -> dict[str, Array]:
    """The arrays of a shard where they lie in its region, by name; `a[2:5]` are rows 2 to 4 of `a`."""
    return {
        _key(slot): np.frombuffer(region, np.float64, slot.size // 8, slot.offset).reshape(slot.shape)
        for slot in shard.slots
    }


def whole_of(shards: Sequence[Shard], regions: Sequence[memoryview], shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """Copies of all parameters, in the model's order."""
    found = {name: np.empty(shape) for name, shape in shapes.items()}
    for shard, region in zip(shards, regions, strict=True):
        for slot, values in zip(shard.slots, read(shard, region).values(), strict=True):
            _rows(found[slot.name], slot)[...] = values
    return found


def write(shard: Shard, values: Arrays, region: memoryview) -> None:
    """The shard's part of whole arrays, into a region or an outbox."""
    for slot, place in zip(shard.slots, read(shard, region).values(), strict=True):
        place[...] = _rows(values[slot.name], slot)


class NumpyBank:
    """A shard in float64, with the job's optimizer, or with what the plan says of local steps.

    Args:
        shard: that it holds.
        program: the job's functions.
        plan: says whether what is pushed are gradients.
        state: what it holds; `part_of` of something.
    """

    def __init__(self, shard: Shard, program: Program, plan: Plan, state: State) -> None:
        self.shard, self._program = shard, program
        self._outer = Outer.parse(plan.outer) if local(plan) else None
        self.parameters: Arrays = state.parameters
        self.slots: Arrays = state.slots

    def attach(self, region: memoryview) -> None:
        """The parameters live in this region from now on."""
        placed = read(self.shard, region)
        for name, place in placed.items():
            place[...] = self.parameters[name]
        self.parameters = placed

    def take(self, state: State) -> None:
        """Hold another state of the same shard."""
        for name, value in state.parameters.items():
            self.parameters[name][...] = value
        self.slots = state.slots

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return self._program.rate(step)

    def check(self, push: Push) -> None:
        """Raise ValueError where a payload is not as long as the shard."""
        if len(push.payload) != self.shard.trained_bytes:
            raise ValueError(f"{len(push.payload):,} bytes, not {self.shard.trained_bytes:,}")

    def norm2(self, pushes: Sequence[Push]) -> float:
        """Squared norm of the mean."""
        return sum(float(np.vdot(value, value)) for value in self._mean(pushes).values())

    def apply(self, pushes: Sequence[Push], *, step: int, rate_factor: float, clip_factor: float) -> None:
        """One update of the mean."""
        mean = self._mean(pushes)
        if not mean:
            return
        if clip_factor != 1.0:
            mean = {name: value * clip_factor for name, value in mean.items()}
        if self._outer is None:
            rate = self._program.rate(step) * rate_factor
            moved, self.slots = self._program.update(self.parameters, mean, self.slots, rate)
        else:
            moved = self._moved(mean, self._outer, rate_factor)
        for name, value in moved.items():
            self.parameters[name][...] = value

    def _moved(self, mean: Arrays, outer: Outer, rate_factor: float) -> Arrays:
        """By the mean of what local steps came to, Nesterov's method where the plan has a momentum."""
        if outer.momentum:
            speeds = {name: outer.momentum * self.slots[f"{OUTER}{name}"] + value for name, value in mean.items()}
            self.slots = {f"{OUTER}{name}": value for name, value in speeds.items()}
            mean = {name: value + outer.momentum * speeds[name] for name, value in mean.items()}
        rate = outer.rate * rate_factor
        return {name: self.parameters[name] + (value if rate == 1.0 else rate * value) for name, value in mean.items()}

    def _mean(self, pushes: Sequence[Push]) -> dict[str, Array]:
        """The mean by weights, added up in the order given; nothing where there is no weight."""
        counted = [push for push in pushes if push.weight > 0]
        total = sum(push.weight for push in counted)
        mean: dict[str, Array] = {}
        for push in counted:
            for name, value in read(self.shard, push.payload).items():
                part = value * (push.weight / total)
                mean[name] = mean[name] + part if name in mean else part
        return mean


def _key(slot: Slot) -> str:
    """The name of what a slot holds."""
    return slot.name if slot.rows is None else cut_name(slot.name, *slot.rows)


def _rows(value: Array, slot: Slot) -> Array:
    return value if slot.rows is None else value[slice(*slot.rows)]


def _of(slots: Arrays, name: str) -> Arrays:
    """The optimizer's slots of a parameter, by kind."""
    keys = {key: key.partition("/") for key in slots}
    return {kind: slots[key] for key, (kind, _, own) in keys.items() if own == name}
