"""Simulate asynchronous training of hundreds of workers on a virtual clock, with the real lease table and admission.

Pure: no real clock, no threads. All servers hold equal parts and get the same pushes in the same order, so that one
admission, one state and one set of queues stand for all of them.

A unit is leased; pulled through the servers' outgoing link and the worker's link; computed; pushed through the worker's
link and the servers' incoming link; and applied in the servers' memory. Transfers and computation do not overlap, so
that the simulation is a little slower than real runs.

The noisy quadratic (Zhang et al., NeurIPS 2019): the loss is a sum of h * x^2 / 2 with curvatures h from 1 down, and a
gradient's noise has the curvatures as its covariance, divided by the samples. It has what decides between forms of
consistency, namely how large a learning rate stale updates bear and how noise averages out, and nothing else of a real
model. All learning rates are tried at once, as rows of one array, and what is pushed is computed when it is applied.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import PlanError
from trainwright.core.topology import Consistency, GradientCompression, OuterOptimizer, StalenessCounts, WorkUnit
from trainwright.strategies.ps.lease_table import ClosedRound, Grant, LeaseTable
from trainwright.strategies.ps.update_applier import UpdateAdmission


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A hypothetical cluster and its work."""

    consistency: Consistency = field(default_factory=Consistency)  # how far workers may be apart
    # workers, servers: how many
    workers: int = 8
    servers: int = 1
    parameter_bytes: float = 1e8  # of the model
    batch_size: int = 512  # global, in samples
    steps: int = 200  # global ones
    compute_s: float = 0.1  # that a unit of one step takes a worker of usual speed
    spread: float = 0.05  # standard deviation of the logarithm of each unit's own time
    between_s: float = 0.0  # that a worker takes from a push to its next pull beside messages: to have its next batch
    unequal: float = 0.0  # standard deviation of the logarithm of each worker's usual time
    slow: tuple[float, ...] = ()  # worker numbers from 0 on, as many as there are factors by which they take longer
    # worker_bytes_per_s, server_bytes_per_s: of their links, one direction
    worker_bytes_per_s: float = 1.25e9
    server_bytes_per_s: float = 1.25e9
    latency_s: float = 2e-4  # of a message, one way
    update_bytes_per_s: float = 1e10  # of a server's memory, in its updates
    failures_per_hour: float = 0.0  # deaths of each worker; it is back after `recover_s`
    # deaths of each server; all go back to their last copy, and on after `recover_s`
    server_failures_per_hour: float = 0.0
    recover_s: float = 30.0  # until a worker or server that failed is back
    copy_s: float = 10.0  # between two copies of the servers' state
    # wire, local_steps, outer: as in `Job`
    wire: GradientCompression = field(default_factory=GradientCompression)
    local_steps: int = 1
    outer: OuterOptimizer = field(default_factory=OuterOptimizer)
    seed: int = 0  # of everything random

    def __post_init__(self) -> None:
        """Check the values. Raises PlanError for values that make no sense."""
        for name in ("workers", "servers", "parameter_bytes", "batch_size", "steps", "compute_s", "local_steps"):
            if getattr(self, name) <= 0:
                raise PlanError(f"{name}={getattr(self, name)} must be above 0", where=name, remedy="give another")
        if self.batch_size < self.workers:
            what = f"batch_size={self.batch_size} is smaller than the {self.workers} workers"
            raise PlanError(what, where="batch_size", remedy=f"give {self.workers} or more")
        if self.consistency.backup >= self.workers:
            what = f"{self.consistency} waits for none of {self.workers} workers"
            raise PlanError(what, where="consistency", remedy="give fewer backup workers")
        if len(self.slow) > self.workers:
            what = f"{len(self.slow)} of {self.workers} workers cannot be slow"
            raise PlanError(what, where="slow", remedy="give fewer, or more workers")


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """Figures of one scenario, in virtual seconds."""

    scenario: Scenario  # that was simulated
    seconds: float  # until the last step was applied
    waited_s: float  # that workers waited for others: for units and for parameters as fresh as they must be
    busy: float  # part of the time that the busiest of a server's link in, link out and memory was at work
    busiest: str  # which of these that was: `link in`, `link out` or `memory`
    staleness: StalenessCounts  # of what was applied
    lost: tuple[int, int] = (0, 0)  # workers' deaths; servers' deaths
    # (seconds, step, loss at each of `rates`), at most some hundred
    curve: tuple[tuple[float, int, tuple[float, ...]], ...] = ()
    rates: tuple[float, ...] = ()  # learning rates that were tried

    @property
    def steps_per_s(self) -> float:
        """Global steps."""
        return self.scenario.steps / self.seconds

    @property
    def waited(self) -> float:
        """Waiting share of the workers' time."""
        return self.waited_s / (self.seconds * self.scenario.workers)

    @property
    def best(self) -> int:
        """Index of the learning rate with the least final loss; the largest rate without learning."""
        last = self.curve[-1][2] if self.curve else (0.0,)
        return min(range(len(last)), key=lambda number: (not last[number] < float("inf"), last[number]))

    @property
    def losses(self) -> list[tuple[float, float]]:
        """Seconds and loss, at the best learning rate."""
        return [(seconds, losses[self.best]) for seconds, _, losses in self.curve]

    def reaches(self, loss: float) -> float | None:
        """Return the seconds to a loss at the fastest learning rate; None if it is never reached."""
        return next((seconds for seconds, _, losses in self.curve if min(losses) <= loss), None)


# --- Simulation -------------------------------------------------------------------------------------------------------


_CURVE_POINTS = 200  # of a curve
_RANDOM_BLOCK = 65_536  # random numbers at once

_SERVED, _COMPUTED, _APPLIED, _RECHECK, _DEAD, _BACK, _DOWN = range(7)


@dataclass(kw_only=True, slots=True)
class _Worker:
    number: int
    unit_s: float
    life: int = 0
    key: str = ""
    grant: Grant | None = None
    seen: int = 0
    push: ComputedPush | None = None
    idle_s: float | None = None  # since when it waits


@dataclass(kw_only=True, slots=True)
class _Queue:
    """A queue that serves requests one after the other."""

    free_s: float = 0.0
    busy_s: float = 0.0

    def add(self, now_s: float, seconds: float) -> float:
        """Return the end of a request that arrives now and takes a number of seconds."""
        self.free_s = max(self.free_s, now_s) + seconds
        self.busy_s += seconds
        return self.free_s


@dataclass(kw_only=True)
class _Copy:
    """A copy of the servers' state."""

    step: int = 0
    at_s: float = 0.0
    held: _ServerState | None = None


class _UnitTimes:
    """Seconds of a unit's parts, where nobody else is in the way."""

    def __init__(self, scenario: Scenario) -> None:
        rule, part = scenario.consistency, scenario.wire.part
        shard_bytes = scenario.parameter_bytes / scenario.servers
        link_s = scenario.parameter_bytes / scenario.worker_bytes_per_s
        self.latency_s = scenario.latency_s
        # The lease, there and back, the batch, and word of what is pulled.
        self.asked_s = 2 * scenario.latency_s + scenario.between_s
        self.shard_out_s = shard_bytes / scenario.server_bytes_per_s
        self.pulled_s = max(self.shard_out_s, link_s) + scenario.latency_s
        self.shard_in_s, self.pushed_s = self.shard_out_s * part, link_s * part
        self.update_s = 7 * shard_bytes / scenario.update_bytes_per_s  # Adam: 28 bytes for each 4 of a parameter
        added_s = 3 * shard_bytes / scenario.update_bytes_per_s if rule.waits or rule.pushes > 1 else 0.0
        # Of a server's memory for a push: to add it to others, and in `async` its part of the update that follows.
        self.handled_s = added_s if rule.waits else added_s + self.update_s / rule.pushes


class Simulation:
    """A simulation of one scenario; `run` returns the outcome.

    Args:
        scenario: to simulate.
        learn: whether workers learn a small problem, which takes longer.
    """

    def __init__(self, scenario: Scenario, *, learn: bool = True) -> None:
        self._scenario = scenario
        self._times = _UnitTimes(scenario)
        self._random = np.random.default_rng(scenario.seed)
        self._normals: list[float] = []
        self._learner = QuadraticProblem(scenario) if learn else None
        self._queues = {"link in": _Queue(), "link out": _Queue(), "memory": _Queue()}
        self._into, self._out, self._memory = self._queues.values()
        self._events: list[tuple[float, int, int, int, int]] = []  # time, serial, kind, worker, its life
        self._serial, self._now_s, self._again_s = 0, 0.0, math.inf
        self._idle: dict[str, _Worker] = {}
        self._parked: list[tuple[int, int]] = []  # heap: version that is needed, worker
        self._staleness, self._waited_s = StalenessCounts(), 0.0
        self._lost = [0, 0]
        self._curve: list[tuple[float, int, tuple[float, ...]]] = []
        self._copy = _Copy()
        self._begin(0)
        usual = np.exp(scenario.unequal * self._random.standard_normal(scenario.workers))
        factors = [*scenario.slow, *[1.0] * (scenario.workers - len(scenario.slow))]
        pairs = zip(usual, factors, strict=True)
        self._workers = [
            _Worker(number=number, unit_s=scenario.compute_s * float(one) * factor, key=f"{number}.0")
            for number, (one, factor) in enumerate(pairs)
        ]

    def run(self) -> SimulationResult:
        """Run until all steps are applied."""
        scenario = self._scenario
        for worker in self._workers:
            self._fails(_DEAD, worker.number, worker.life, scenario.failures_per_hour)
            self._lease(worker)
        self._fails(_DOWN, 0, 0, scenario.server_failures_per_hour * scenario.servers)
        self._copy = _Copy(held=self._learner.held if self._learner else None)
        self._point()
        act = {
            _SERVED: self._served, _COMPUTED: self._computed, _APPLIED: self._applied, _BACK: self._lease,
            _DEAD: self._dead,
        }  # fmt: skip
        events, workers = self._events, self._workers
        while True:
            self._now_s, _, kind, number, life = heapq.heappop(events)
            if kind == _DOWN:
                self._down()
            elif kind == _RECHECK:
                self._again_s = math.inf
                self._wake()
            elif life == workers[number].life:
                act[kind](workers[number])
                if kind == _APPLIED and self._lease_table.over:
                    return self._outcome()

    # --- a worker's unit ---

    def _lease(self, worker: _Worker) -> None:
        if worker.idle_s is None:
            worker.idle_s = self._now_s
        worker.grant = self._lease_table.lease(worker.key, worker.number, self._now_s)
        if worker.grant is None:
            self._idle[worker.key] = worker
            self._look_again()
            return
        if self._admission.version < worker.grant.needs:
            heapq.heappush(self._parked, (worker.grant.needs, worker.number))
            return
        self._pull(worker, max(self._now_s, self._memory.free_s) if self._waits else self._now_s)

    def _pull(self, worker: _Worker, ready_s: float) -> None:
        """Request the parameters, and wait for admission."""
        assert worker.idle_s is not None, "it waited from when it asked for the unit"
        self._waited_s += ready_s - worker.idle_s
        worker.idle_s = None
        asked_s = ready_s + self._times.asked_s
        begin_s = max(self._out.free_s, asked_s)
        self._out.add(asked_s, self._times.shard_out_s)
        self._at(begin_s, _SERVED, worker)

    def _served(self, worker: _Worker) -> None:
        """Send the current parameters to the worker, which then computes."""
        assert worker.grant is not None, "it pulls for a unit"
        worker.seen = self._admission.version
        if self._learner:
            worker.push = ComputedPush(worker.grant.unit, self._learner.held.x)
        computed_s = worker.unit_s * worker.grant.unit.steps * self._noise()
        self._at(self._now_s + self._times.pulled_s + computed_s, _COMPUTED, worker)

    def _computed(self, worker: _Worker) -> None:
        times = self._times
        assert worker.grant is not None, "it computed a unit"
        there_s = max(self._into.add(self._now_s, times.shard_in_s), self._now_s + times.pushed_s)
        self._at(self._memory.add(there_s + times.latency_s, times.handled_s), _APPLIED, worker)

    def _applied(self, worker: _Worker) -> None:
        """Receive a push on the servers; the worker asks for the next unit."""
        grant, key = worker.grant, worker.key
        assert grant is not None, "it pushed a unit"
        verdict = self._admission.offer(key, grant.unit, grant.at, worker.seen)
        if verdict == "keep":
            self._admission.keep(key, grant.unit, grant.at, worker.seen, worker.push)
        elif verdict == "apply":
            self._apply_gathered(worker.push, staleness=self._admission.version - worker.seen)
        self._lease_table.done(key, grant.unit, grant.at, self._now_s)
        closings = self._lease_table.closings()
        if closings:
            if self._waits:
                self._close(closings)
            self._stepped()
        self._lease(worker)
        if self._idle:
            self._wake()

    def _apply_gathered(self, *last: ComputedPush | None, staleness: int = 0) -> None:
        """Apply an update of the pushes that `async` gathers, and the last one."""
        kept = (*self._admission.gathered, *last)
        pushes = [push for push in kept if push is not None]
        if self._learner and pushes:
            self._learner.apply(pushes, staleness=staleness)
        if kept:
            self._admission.applied_gathered()

    def _close(self, closings: Sequence[ClosedRound]) -> None:
        """Apply rounds that are complete."""
        for closing in closings:
            self._admission.close(closing)
        while update := self._admission.due():
            pushes = [push for push in update.pushes if push is not None]
            if self._learner and pushes:
                self._learner.apply(pushes)
            self._memory.add(self._now_s, self._times.update_s)
            self._admission.applied(update)
        while self._parked and self._parked[0][0] <= self._admission.version:
            self._pull(self._workers[heapq.heappop(self._parked)[1]], max(self._now_s, self._memory.free_s))

    def _wake(self) -> None:
        """Let idle workers ask again where there is work."""
        while (key := self._lease_table.first(self._idle, self._now_s)) is not None:
            self._lease(self._idle.pop(key))
        self._look_again()

    def _look_again(self) -> None:
        """Schedule the time at which a lease is overdue, where a worker is idle."""
        due_s = self._lease_table.due_s()
        if self._idle and due_s is not None and max(due_s, self._now_s) < self._again_s:
            self._again_s = max(due_s, self._now_s)
            self._put(self._again_s, _RECHECK, 0, 0)

    # --- what goes wrong ---

    def _dead(self, worker: _Worker) -> None:
        """Lose a worker: others get its unit, and it returns later as a new process."""
        self._lost[0] += 1
        self._lease_table.lost(worker.key)
        self._forget(worker)
        self._at(self._now_s + self._scenario.recover_s, _BACK, worker)
        self._fails(_DEAD, worker.number, worker.life, self._scenario.failures_per_hour, self._scenario.recover_s)
        self._wake()

    def _down(self) -> None:
        """Lose a server: all servers return to their last copy."""
        scenario = self._scenario
        self._lost[1] += 1
        self._told()
        if self._learner:
            assert self._copy.held is not None, "there is one from the beginning"
            self._learner.held = self._copy.held
        self._now_s += scenario.recover_s
        self._begin(self._copy.step)
        for queue in self._queues.values():
            queue.free_s = self._now_s
        self._idle.clear()
        self._parked.clear()
        for worker in self._workers:
            self._forget(worker)
            self._fails(_DEAD, worker.number, worker.life, scenario.failures_per_hour)
            self._lease(worker)
        self._fails(_DOWN, 0, 0, scenario.server_failures_per_hour * scenario.servers)

    def _forget(self, worker: _Worker) -> None:
        """Discard the work of a process; its next work is that of a new process."""
        number = worker.number
        self._idle.pop(worker.key, None)
        self._parked = [entry for entry in self._parked if entry[1] != number]
        heapq.heapify(self._parked)
        worker.life += 1
        worker.key, worker.grant, worker.push, worker.idle_s = f"{number}.{worker.life}", None, None, None

    def _fails(self, kind: int, number: int, life: int, per_hour: float, after_s: float = 0.0) -> None:
        if per_hour:
            self._put(self._now_s + after_s + float(self._random.exponential(3600.0 / per_hour)), kind, number, life)

    # --- bookkeeping ---

    def _begin(self, step: int) -> None:
        """Make a new lease table and admission, as each rendezvous epoch of servers has."""
        scenario = self._scenario
        rule = scenario.consistency
        self._waits = rule.waits
        self._lease_table = LeaseTable(
            shares=scenario.workers, start=step, consistency=rule, local_steps=scenario.local_steps
        )
        self._lease_table.extend(scenario.steps)
        self._admission: UpdateAdmission[ComputedPush | None] = UpdateAdmission(
            shares=scenario.workers, consistency=rule
        )

    def _stepped(self) -> None:
        copies = self._now_s - self._copy.at_s >= self._scenario.copy_s and self._scenario.server_failures_per_hour
        if copies or self._lease_table.over:
            self._apply_gathered()
        if copies:
            held = self._learner.held if self._learner else None
            self._copy = _Copy(step=self._lease_table.step, at_s=self._now_s, held=held)
        last = self._curve[-1][1] if self._curve else 0
        if self._lease_table.step - last >= max(1, self._scenario.steps // _CURVE_POINTS) or self._lease_table.over:
            self._point()

    def _point(self) -> None:
        if self._learner:
            losses = np.nan_to_num(self._learner.losses, nan=math.inf)
            self._curve.append((self._now_s, self._lease_table.step, tuple(losses.tolist())))

    def _told(self) -> None:
        """Add up the counts of the epoch's admission and lease table."""
        self._staleness += replace(self._admission.staleness(), again=self._lease_table.again)

    def _outcome(self) -> SimulationResult:
        self._told()
        busiest = max(self._queues, key=lambda name: self._queues[name].busy_s)
        return SimulationResult(
            scenario=self._scenario, seconds=self._now_s, waited_s=self._waited_s,
            busy=min(self._queues[busiest].busy_s / self._now_s, 1.0), busiest=busiest,
            staleness=self._staleness, lost=(self._lost[0], self._lost[1]), curve=tuple(self._curve),
            rates=self._learner.rates if self._learner else (),
        )  # fmt: skip

    def _noise(self) -> float:
        """Return a random factor of a unit's time."""
        spread = self._scenario.spread
        if not spread:
            return 1.0
        if not self._normals:
            drawn = np.exp(spread * self._random.standard_normal(_RANDOM_BLOCK) - spread**2 / 2)
            self._normals = drawn.tolist()
        return self._normals.pop()

    def _at(self, seconds: float, kind: int, worker: _Worker) -> None:
        self._put(seconds, kind, worker.number, worker.life)

    def _put(self, seconds: float, kind: int, number: int, life: int) -> None:
        self._serial += 1
        heapq.heappush(self._events, (seconds, self._serial, kind, number, life))


# --- Toy problem ------------------------------------------------------------------------------------------------------


_Array = npt.NDArray[np.float64]
_PARAMETERS = 24  # of the simulated model
_LEARNING_RATES = tuple(2.0**power for power in range(0, -8, -1))  # of an update of a whole step
_NOISE_SCALE = 0.3  # of a batch of 512 samples at curvature 1: a standard deviation
_NOISE_POOL = 65_521  # gradients' noises, of which each unit has its own; prime
_NOISE_STRIDE = 40_503  # from one unit's to the next


class ComputedPush(NamedTuple):
    """A unit, and the parameters that it was computed on, of shape (rates, _PARAMETERS)."""

    unit: WorkUnit
    x: _Array


class _ServerState(NamedTuple):
    """What all servers together hold: parameters and the outer optimizer's velocity, each (rates, _PARAMETERS)."""

    x: _Array
    speed: _Array


class QuadraticProblem:
    """What the servers hold, and what units come to; nothing is written in place, so that workers may hold it too.

    Args:
        scenario: that is simulated.

    Attributes:
        held: starts at 1 everywhere.
        rates: learning rates, one a row.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        rule = scenario.consistency
        whole = rule.waits or rule.scaled or scenario.local_steps > 1
        of_unit = 1.0 if whole else min(1.0, rule.pushes / scenario.workers)
        self.rates = tuple(rate * of_unit for rate in _LEARNING_RATES)
        self._rates = np.array(self.rates)[:, None]
        self._curvature = 1.0 / np.arange(1.0, _PARAMETERS + 1)
        scale = _NOISE_SCALE * np.sqrt(self._curvature * 512.0 * scenario.workers / scenario.batch_size)
        self._noise = np.random.default_rng(scenario.seed).standard_normal((_NOISE_POOL, _PARAMETERS)) * scale
        self.held = _ServerState(
            np.ones((len(_LEARNING_RATES), _PARAMETERS)), np.zeros((len(_LEARNING_RATES), _PARAMETERS))
        )

    @property
    def losses(self) -> _Array:
        """Return the loss without noise, by learning rate."""
        found: _Array = 0.5 * (self.held.x * self.held.x) @ self._curvature
        return found

    def apply(self, pushes: Sequence[ComputedPush], *, staleness: int = 0) -> None:
        """Apply one update by the mean of units with equal samples and steps."""
        x, speed = self.held
        factor = 1.0 / max(1, staleness) if self._scenario.consistency.scaled else 1.0
        if self._scenario.local_steps == 1:
            self.held = _ServerState(x - factor * self._rates * self._gradient(pushes), speed)
            return
        outer, went = self._scenario.outer, self._went(pushes)
        speed = outer.momentum * speed + went
        self.held = _ServerState(x + outer.rate * (went + outer.momentum * speed), speed)

    def _gradient(self, pushes: Sequence[ComputedPush]) -> _Array:
        """Return the mean gradient of pushes."""
        places = [self._place(unit.step, unit.share) for unit, _ in pushes]
        x, noise = pushes[0].x, self._noise[places[0]]
        if len(pushes) > 1:
            x, noise = np.mean([push.x for push in pushes], axis=0), self._noise[places].mean(axis=0)
        found: _Array = self._curvature * x + noise
        return found

    def _went(self, pushes: Sequence[ComputedPush]) -> _Array:
        """Return the mean difference of local steps."""
        begun = np.stack([x for _, x in pushes])
        here = begun
        for step in range(pushes[0].unit.steps):
            places = [self._place(unit.step + step, unit.share) for unit, _ in pushes]
            here = here - self._rates * (self._curvature * here + self._noise[places][:, None, :])
        found: _Array = (here - begun).mean(axis=0)
        return found

    def _place(self, step: int, share: int) -> int:
        """Return where the noise of a share of a step begins in the pool, the same for every worker."""
        return (step * self._scenario.workers + share) * _NOISE_STRIDE % _NOISE_POOL
