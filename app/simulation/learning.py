"""A small problem that the simulated workers learn, with the update code of the reference servers.

The noisy quadratic (Zhang et al., NeurIPS 2019): the loss is a sum of h * x^2 / 2 with curvatures h from 1 down, and a
gradient's noise has the curvatures as its covariance, divided by the samples. It has what decides between forms of
consistency, namely how large a learning rate stale updates bear and how noise averages out, and nothing else of a real
model. All learning rates are tried at once, as rows of one array.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainwright.core.asynchrony import Unit
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Mesh, Placement, Plan
from trainwright.simulation.scenario import Scenario
from trainwright.strategies.reference.model import Array
from trainwright.strategies.reference.optimizers import Arrays, Sgd
from trainwright.strategies.reference.program import Program
from trainwright.strategies.reference.shards import NumpyBank, part_of, read, shards_of
from trainwright.strategies.reference.state import State
from trainwright.strategies.servers.bank import Push

SIZE = 24  # numbers that are learnt
RATES = tuple(2.0**power for power in range(0, -8, -1))  # of an update of a whole step
_NOISE = 0.3  # of a batch of 512 samples at curvature 1: a standard deviation
_POOL = 65_521  # gradients' noises, of which each unit has its own; prime
_STRIDE = 40_503  # from one unit's to the next
_NONE = memoryview(b"")


class Quadratic:
    """The stand-in for a model: starts at 1 everywhere."""

    def __init__(self, rates: int) -> None:
        self.parameters: Arrays = {"x": np.ones((rates, SIZE))}
        self.training = True

    def initialize(self, seed: int) -> None:
        """Nothing is random."""

    def reseed(self, seed: int) -> None:
        """Nothing is random."""

    def __call__(self, *inputs: Array) -> Array:
        """It is never asked: gradients are the learner's."""
        raise NotImplementedError

    def backward(self, gradient: Array) -> dict[str, Array]:
        """Likewise."""
        raise NotImplementedError


class Learner:
    """One server's bank for all, as all apply the same pushes in the same order; workers' gradients at what they hold.

    Args:
        scenario: that is simulated.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        rule = scenario.consistency
        of_unit = 1.0 if rule.waits or rule.scaled or scenario.local_steps > 1 else 1.0 / scenario.workers
        self.rates = tuple(rate * of_unit for rate in RATES)
        self._steps = np.array(self.rates)[:, None]
        self._curvature = 1.0 / np.arange(1.0, SIZE + 1)
        samples = scenario.batch_size / scenario.workers
        scale = _NOISE * np.sqrt(self._curvature * 512.0 / samples)
        self._noise = np.random.default_rng(scenario.seed).standard_normal((_POOL, SIZE)) * scale
        self._weight = samples
        self._bank = _bank(scenario)
        self._region = memoryview(bytearray(self._bank.shard.size_bytes))
        self._bank.attach(self._region)
        self._x = read(self._bank.shard, self._region)["x"]

    @property
    def pulled(self) -> Array:
        """What a worker that pulls now computes on."""
        return self._x.copy()

    @property
    def losses(self) -> Array:
        """Without noise, by learning rate."""
        found: Array = 0.5 * (self._x * self._x) @ self._curvature
        return found

    def push(self, unit: Unit, x: Array) -> Push:
        """What a worker makes of a unit at these parameters."""
        if self._scenario.local_steps == 1:
            made = self._steps * (self._curvature * x + self._of(unit.step, unit.share))
        else:
            here = x
            for step in range(unit.step, unit.step + unit.steps):
                here = here - self._steps * (self._curvature * here + self._of(step, unit.share))
            made = here - x
        return Push(unit=unit, weight=self._weight, payload=made.data.cast("B"), buffers=_NONE)

    def apply(self, pushes: Sequence[Push], *, staleness: int = 0) -> None:
        """One update."""
        factor = 1.0 / max(1, staleness) if self._scenario.consistency.scaled else 1.0
        self._bank.apply(pushes, step=pushes[0].unit.step, rate_factor=factor, clip_factor=1.0)

    def copied(self) -> State:
        """The servers' state."""
        return State(parameters={"x": self._x.copy()}, slots=dict(self._bank.slots))

    def restore(self, state: State) -> None:
        """Go on from a copy."""
        self._bank.take(state)

    def _of(self, step: int, share: int) -> Array:
        """The noise of a share of a step, whoever computes it."""
        found: Array = self._noise[(step * self._scenario.workers + share) * _STRIDE % _POOL]
        return found


def _bank(scenario: Scenario) -> NumpyBank:
    spec = ModelSpec(
        model=lambda: Quadratic(len(RATES)), optimizer=lambda _: Sgd(learning_rate=1.0), total_steps=scenario.steps
    )
    plan = Plan(
        strategy="parameter_server", engine="", mesh=Mesh(data=scenario.workers), batch_size=scenario.batch_size,
        placement=Placement(cpus=1.0), servers=1, local_steps=scenario.local_steps,
        outer=str(scenario.outer) if scenario.local_steps > 1 else "",
    )  # fmt: skip
    program = Program(spec, "simulated")
    shard = shards_of(program.model.parameters, 1)[0]
    whole = program.initial()
    slots = (
        {f"outer/{name}": np.zeros_like(one) for name, one in whole.parameters.items()} if plan.outer else whole.slots
    )
    return NumpyBank(shard, program, plan, part_of(State(parameters=whole.parameters, slots=slots), shard))
