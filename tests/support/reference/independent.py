"""The independent topology in numpy float64: the executable meaning of `core.engine.Independent`.

The servers' side and the workers' are `trainwright.strategies.ps`'; here are a shard, and what a worker computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from tests.support.reference.model import Array, Arrays
from tests.support.reference.reference_engine import PREFIX, SUFFIX, ReferenceEngine, zero_weighted
from tests.support.reference.state import ReferenceState, row_slice_name
from tests.support.reference.user_functions import ReferenceProgram, SummedGradients
from trainwright.core.data import Columns, Feed, MetricSums, StepReport
from trainwright.core.engine import MetricStates, ModelSpec, StateSnapshot
from trainwright.core.errors import TrainwrightError
from trainwright.core.plan import Plan
from trainwright.core.topology import (
    Address,
    Capabilities,
    Group,
    OuterOptimizer,
    Peer,
    Role,
    StalenessCounts,
    StateTag,
    WorkUnit,
)
from trainwright.strategies.common.socket_transport import SocketListener, own_host
from trainwright.strategies.ps.parameter_client import ParameterClient
from trainwright.strategies.ps.parameter_shards import (
    GradientPush,
    ParameterShard,
    ShardSlot,
    place_tensors,
)
from trainwright.strategies.ps.server_roles import FollowerServer, LeadServer
from trainwright.strategies.ps.shard_server import ShardServer
from trainwright.strategies.ps.update_applier import ServerConfig


@dataclass(kw_only=True)
class _UnitProgress:
    """What a worker has done of its unit.

    Attributes:
        pulled: the parameters that it began with.
        now: those that its local steps came to.
        sums: of each step: weighted sum of losses, sum of weights.
        norms: of each step's gradient, before clipping.
    """

    pulled: Arrays
    now: Arrays
    sums: list[tuple[float, float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


class Independent(ReferenceEngine):
    """One rank of the independent topology; its role in the group says whether it is a server or a worker.

    A server holds one of the pieces `shard-0` ... `shard-(n-1)`, in rank order of the n servers. A worker holds none;
    with local steps its optimizer's state is its own, and goes when it goes.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(topology="independent", tolerates=frozenset({"worker"}))

    def __init__(self, *, host: str | None = None) -> None:
        super().__init__(host=host)
        self._listener: SocketListener | None = None
        self._plan: Plan | None = None
        self._bank: _NumpyShardStore | None = None
        self._shards: tuple[ParameterShard, ...] = ()
        self._sound = True
        self._own_slots: Arrays | None = None
        self._work: _UnitProgress | None = None
        self._rules: ServerConfig
        self._parameters: Arrays = {}

    def reserve(self, role: Role) -> Address:
        """Listen on a port that the system chooses, under which servers are found."""
        self.leave()
        self._listener = SocketListener(self._host or own_host())
        return self._listener.address

    def form(self, group: Group) -> StateTag:
        """A server opens its desk; a worker, at any time, reaches every server. Raises PeerLost."""
        assert self._listener is not None, "reserve comes first"
        listener, self._listener, self._group = self._listener, None, group
        if self._serving:
            kind = LeadServer if self._index == 0 else FollowerServer
            self._connections = kind(listener, group, self._servers)
        else:
            listener.close()
            self._connections = clients = ParameterClient(group, self._servers)
            with self._acting():
                clients.open()
        if self._program is not None:
            self._program.where = self._where()
            self._equip()
        return self._tag()

    def build(self, spec: ModelSpec, plan: Plan) -> StateTag:
        """Make model and optimizer, the same on every rank for one seed; step None."""
        self._plan = plan
        super().build(spec, plan)
        self._equip()
        return self._tag()

    def snapshot(self) -> StateSnapshot:
        """A deep copy of a server's shard, between two calls of `serve`."""
        if not isinstance(self._connections, ShardServer):
            return super().snapshot()
        self._connections.check()
        with self._connections.lock:
            return super().snapshot()

    def warm(self, feed: Feed) -> None:
        """A worker's throwaway step: pull and compute, push nothing."""
        if not self._serving:
            self._computed(zero_weighted(feed), self._newest())

    def serve(self, until: int, stop_requested: Callable[[], bool]) -> Iterator[StepReport]:
        """Let the workers take the steps before `until`."""
        assert self._bank is not None, "build comes first"
        self._settle(self.state)
        with self._busy:
            yield from self.server.serve(self.state.step or 0, until, stop_requested)
        self._state = ReferenceState(parameters=self._bank.parameters, slots=self._bank.slots, step=self.server.step)

    def staleness(self) -> StalenessCounts:
        """Of what was applied at this server since it was asked last."""
        return self.server.staleness()

    def lease(self, first: int) -> WorkUnit | None:
        """A worker's next unit; None when the servers' `serve` from step `first` on is over."""
        with self._busy:
            self._work, grant = None, self.clients.lease(first)
        return None if grant is None else grant.unit

    def train_step(self, feed: Feed) -> StepReport:
        """One step of the unit that was leased last: its first begins with a pull, its last ends with a push.

        Raises:
            PeerLost: a server is gone or did not answer within the deadline.
            NonFiniteLoss, JobError, UserCodeError: nothing was pushed.
        """
        with self._busy:
            unit, work = self._going_on(feed)
            totals, rate = self._computed(feed, work.now), self.program.rate(feed.step)
            gradients, norm = self._gradients(totals, feed.step)
            if gradients and _has_local_steps(self.plan):
                slots = self._own_slots or self.program.optimizer.initial(work.now)
                work.now, self._own_slots = self.program.update(work.now, gradients, slots, rate)
            work.sums.append((totals.loss, totals.weight))
            work.norms.append(norm)
            if len(work.sums) == unit.steps:
                self._push(work, gradients)
        return StepReport(
            step=feed.step + 1,
            loss=totals.loss / totals.weight if totals.weight > 0 else 0.0,
            weight=totals.weight,
            learning_rate=rate,
            gradient_norm=None if self.program.spec.clip_norm is None else norm,
            stop_requested=feed.stop_requested,
        )

    def evaluate_step(self, feed: Feed, states: MetricStates | None = None) -> MetricSums:
        """Sums at the servers' newest parameters, in a worker."""
        return self.program.evaluate(self._newest(), feed)

    def predict_step(self, feed: Feed) -> Columns:
        """Outputs at the servers' newest parameters, in a worker."""
        return self.program.predict(self._newest(), feed)

    def interrupt(self, deadline_s: float) -> bool:
        """Cut all connections, so that a blocked call raises; True when no call is left within the deadline."""
        if self._listener is not None:
            self._listener.cut()
        ended = super().interrupt(deadline_s)
        return ended and (not isinstance(self._connections, ShardServer) or self._connections.join(deadline_s))

    def leave(self) -> None:
        """End the group and keep the state."""
        if isinstance(self._connections, ShardServer):
            self._connections.cut()
            self._sound = self._sound and self._connections.updates.sound
        super().leave()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # --- the group ---

    @property
    def _servers(self) -> tuple[Peer, ...]:
        return tuple(peer for peer in self.group.peers if peer.role == "server")

    @property
    def _serving(self) -> bool:
        return self.group.peers[self.group.rank].role == "server"

    @property
    def _index(self) -> int:
        """Place of this server among the servers."""
        return [peer.rank for peer in self._servers].index(self.group.rank)

    @property
    def server(self) -> ShardServer:
        """The server of this rank, once it has formed its group."""
        assert isinstance(self._connections, ShardServer), "form comes first"
        return self._connections

    @property
    def clients(self) -> ParameterClient:
        """Connections of this worker to the servers, once it has formed its group."""
        assert isinstance(self._connections, ParameterClient), "form comes first"
        return self._connections

    @property
    def plan(self) -> Plan:
        """The plan; `build` comes first."""
        assert self._plan is not None, "build comes first"
        return self._plan

    # --- the state ---

    def _equip(self) -> None:
        """What this group needs of the state: a server's shard where others reach it, a worker's room for all."""
        self._shards = model_shards(self.program.initial().parameters, len(self._servers))
        self._rules, self._own_slots = ServerConfig.of(self.plan, self.program.spec), None
        if not self._serving:
            self.clients.lay(self._shards, [shard.trained_bytes for shard in self._shards])
            return
        fresh = self._part(self._initial())
        if self.state.parameters.keys() != fresh.parameters.keys():  # it held another piece, or none
            self._state = fresh
        self._bank = _NumpyShardStore(self._shards[self._index], self.program, self.plan, self.state)
        self.server.open(self._bank, self._rules)
        self._state = replace(self.state, parameters=self._bank.parameters)

    def _initial(self) -> ReferenceState:
        return _initial_state(self.program, self.plan)

    def _part(self, whole: ReferenceState) -> ReferenceState:
        """A server keeps its shard, a worker nothing."""
        if not self._serving:
            return ReferenceState(parameters={}, slots={}, step=whole.step)
        return shard_state(whole, model_shards(whole.parameters, len(self._servers))[self._index])

    def _hold(self, state: ReferenceState) -> None:
        """A server's workers pull this from now on."""
        self._state, self._sound = state, True
        if self._bank is not None and isinstance(self._connections, ShardServer):
            with self._connections.lock:
                self._bank.take(state)
                self._connections.renewed()
            self._state = replace(state, parameters=self._bank.parameters)

    def _tag(self) -> StateTag:
        count = len(self._servers)
        return StateTag(
            step=None if self._state is None else self._state.step,
            layout=f"sharded-{count}",
            pieces=frozenset({f"shard-{self._index}"} if self._serving else ()),
            total=count,
            sound=self._sound and (not isinstance(self._connections, ShardServer) or self._connections.updates.sound),
        )

    def _file(self) -> str:
        return f"{PREFIX}-{self.group.rank:05d}{SUFFIX}"

    # --- a worker's steps ---

    def _going_on(self, feed: Feed) -> tuple[WorkUnit, _UnitProgress]:
        """The unit that this step is of, and what was done of it; it begins with a pull."""
        grant = self.clients.grant
        done = 0 if self._work is None else len(self._work.sums)
        if grant is None or feed.step != grant.unit.step + done or tuple(feed.data_ranks) != (grant.unit.share,):
            raise TrainwrightError(
                f"fed step {feed.step} of data ranks {list(feed.data_ranks)} after {done} steps of {grant}",
                where=self._where(),
            )
        if self._work is None:
            pulled = self._pulled(grant.needs)
            self._work = _UnitProgress(pulled=pulled, now=pulled)
        return grant.unit, self._work

    def _pulled(self, needs: int) -> Arrays:
        """The servers' newest parameters, which hold the updates of so many rounds at least."""
        if self.clients.pull(needs):
            shapes = {name: value.shape for name, value in self.program.model.parameters.items()}
            self._parameters = _gather_parameters(self._shards, self.clients.memory, shapes)
        return self._parameters

    def _newest(self) -> Arrays:
        with self._busy:
            return self._pulled(0)

    def _computed(self, feed: Feed, parameters: Arrays) -> SummedGradients:
        """Sums over this worker's feed."""
        vectors = [
            self.program.share(parameters, part, step=feed.step, data_rank=data_rank)
            for data_rank, part in zip(feed.data_ranks, feed.parts, strict=True)
        ]
        return self.program.totals(sum(vectors[1:], start=vectors[0]))

    def _gradients(self, totals: SummedGradients, step: int) -> tuple[Arrays, float]:
        """The mean gradient, and its norm before clipping; none where there is no weight."""
        if totals.weight <= 0:
            return {}, 0.0
        return self.program.mean_gradients(totals, step, clip=not self._rules.clips)

    def _push(self, work: _UnitProgress, gradients: Arrays) -> None:
        """Push the gradient of a step, or how far local steps went."""
        weight = sum(weight for _, weight in work.sums)
        if weight > 0:
            went = {name: work.now[name] - value for name, value in work.pulled.items()}
            for shard, outbox in zip(self._shards, self.clients.outbox, strict=True):
                _write_shard(shard, went if _has_local_steps(self.plan) else gradients, outbox)
        self.clients.push(weight=weight, sums=work.sums, norm=sum(work.norms) / len(work.norms))


# --- A server's shard in numpy float64, and the state of a replica cut into such shards -------------------------------


_OUTER = "outer/"  # slots of the servers' own method, before the parameter's name


def model_shards(parameters: Arrays, servers: int) -> tuple[ParameterShard, ...]:
    """The deal of a model's parameters."""
    tensors = [
        ShardSlot(name=name, shape=one.shape, dtype="float64", size=8 * one.size) for name, one in parameters.items()
    ]
    return place_tensors(tensors, servers)


def _has_local_steps(plan: Plan) -> bool:
    """Whether workers take steps by themselves, and push how far those went."""
    return plan.local_steps > 1 or bool(plan.outer)


def _initial_state(program: ReferenceProgram, plan: Plan) -> ReferenceState:
    """The whole state that the servers hold before the first step."""
    whole = program.initial()
    if not _has_local_steps(plan):
        return whole
    moving = OuterOptimizer.parse(plan.outer).momentum > 0
    slots = {f"{_OUTER}{name}": np.zeros_like(value) for name, value in whole.parameters.items() if moving}
    return ReferenceState(parameters=whole.parameters, slots=slots)


def shard_state(whole: ReferenceState, shard: ParameterShard) -> ReferenceState:
    """The part of a state that belongs to a shard; slots of no parameter, such as a count, belong to every one."""
    return ReferenceState(
        parameters={_key(slot): _rows(whole.parameters[slot.name], slot) for slot in shard.slots},
        slots={
            **{name: value for name, value in whole.slots.items() if not name.partition("/")[2]},
            **{
                f"{kind}/{_key(slot)}": _rows(value, slot)
                for slot in shard.slots
                for kind, value in _slots_of_parameter(whole.slots, slot.name).items()
            },
        },
        step=whole.step,
    )


def _read_shard(shard: ParameterShard, region: memoryview) -> dict[str, Array]:
    """The arrays of a shard where they lie in its region, by name; `a[2:5]` are rows 2 to 4 of `a`."""
    return {
        _key(slot): np.frombuffer(region, np.float64, slot.size // 8, slot.offset).reshape(slot.shape)
        for slot in shard.slots
    }


def _gather_parameters(
    shards: Sequence[ParameterShard], regions: Sequence[memoryview], shapes: Mapping[str, tuple[int, ...]]
) -> Arrays:
    """Copies of all parameters, in the model's order."""
    found = {name: np.empty(shape) for name, shape in shapes.items()}
    for shard, region in zip(shards, regions, strict=True):
        for slot, values in zip(shard.slots, _read_shard(shard, region).values(), strict=True):
            _rows(found[slot.name], slot)[...] = values
    return found


def _write_shard(shard: ParameterShard, values: Arrays, region: memoryview) -> None:
    """The shard's part of whole arrays, into a region or an outbox."""
    for slot, place in zip(shard.slots, _read_shard(shard, region).values(), strict=True):
        place[...] = _rows(values[slot.name], slot)


class _NumpyShardStore:
    """A shard in float64, with the job's optimizer, or with what the plan says of local steps.

    Args:
        shard: that it holds.
        program: the job's functions.
        plan: says whether what is pushed are gradients.
        state: what it holds; `shard_state` of something.
    """

    def __init__(self, shard: ParameterShard, program: ReferenceProgram, plan: Plan, state: ReferenceState) -> None:
        self.shard, self._program = shard, program
        self._outer = OuterOptimizer.parse(plan.outer) if _has_local_steps(plan) else None
        self.parameters: Arrays = state.parameters
        self.slots: Arrays = state.slots

    def attach(self, region: memoryview) -> None:
        """The parameters live in this region from now on."""
        placed = _read_shard(self.shard, region)
        for name, place in placed.items():
            place[...] = self.parameters[name]
        self.parameters = placed

    def take(self, state: ReferenceState) -> None:
        """Hold another state of the same shard."""
        for name, value in state.parameters.items():
            self.parameters[name][...] = value
        self.slots = state.slots

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return self._program.rate(step)

    def check(self, push: GradientPush) -> None:
        """Raise ValueError where a payload is not as long as the shard."""
        if len(push.payload) != self.shard.trained_bytes:
            raise ValueError(f"{len(push.payload):,} bytes, not {self.shard.trained_bytes:,}")

    def norm2(self, pushes: Sequence[GradientPush]) -> float:
        """Squared norm of the mean."""
        return sum(float(np.vdot(value, value)) for value in self._mean(pushes).values())

    def apply(self, pushes: Sequence[GradientPush], *, step: int, rate_factor: float, clip_factor: float) -> None:
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

    def _moved(self, mean: Arrays, outer: OuterOptimizer, rate_factor: float) -> Arrays:
        """By the mean of what local steps came to, Nesterov's method where the plan has a momentum."""
        if outer.momentum:
            speeds = {name: outer.momentum * self.slots[f"{_OUTER}{name}"] + value for name, value in mean.items()}
            self.slots = {f"{_OUTER}{name}": value for name, value in speeds.items()}
            mean = {name: value + outer.momentum * speeds[name] for name, value in mean.items()}
        rate = outer.rate * rate_factor
        return {name: self.parameters[name] + (value if rate == 1.0 else rate * value) for name, value in mean.items()}

    def _mean(self, pushes: Sequence[GradientPush]) -> dict[str, Array]:
        """The mean by weights, added up in the order given; nothing where there is no weight."""
        counted = [push for push in pushes if push.weight > 0]
        total = sum(push.weight for push in counted)
        mean: dict[str, Array] = {}
        for push in counted:
            for name, value in _read_shard(self.shard, push.payload).items():
                part = value * (push.weight / total)
                mean[name] = mean[name] + part if name in mean else part
        return mean


def _key(slot: ShardSlot) -> str:
    """The name of what a slot holds."""
    return slot.name if slot.rows is None else row_slice_name(slot.name, *slot.rows)


def _rows(value: Array, slot: ShardSlot) -> Array:
    return value if slot.rows is None else value[slice(*slot.rows)]


def _slots_of_parameter(slots: Arrays, name: str) -> Arrays:
    """The optimizer's slots of a parameter, by kind."""
    keys = {key: key.partition("/") for key in slots}
    return {kind: slots[key] for key, (kind, _, own) in keys.items() if own == name}
