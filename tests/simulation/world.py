"""The world: drivers whose effects are carried out in virtual time, faults that strike, and a verdict at the end.

`simulate(scenario)` runs one schedule and raises Violation where an invariant breaks. What the verdict needs is
noted from what was *delivered* to a driver, never from what the driver thinks.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tests.simulation.calls import Labour
from tests.simulation.clock import Clock
from tests.simulation.faults import Strikes
from tests.simulation.oracle import Facts
from tests.simulation.plans import staged
from tests.simulation.processes import Process, Team, lineages
from tests.simulation.scenario import Scenario
from tests.simulation.store import Store, Violation
from trainwright.core import events
from trainwright.core.errors import FencedError, StorageError
from trainwright.driver import messages as m
from trainwright.driver import state_machine as real
from trainwright.driver.driver_state import STEADY_PHASES, DriverState, Phase

PATIENCE_S = 10.0  # without a heartbeat, before another driver takes the run over


class Driver:
    """One driver process and what it did."""

    def __init__(self, code: Any) -> None:
        self.code = code
        self.token = 0
        self.alive = True
        self.state: DriverState | None = None
        self.finish: m.FinishRun | None = None
        self.processes: dict[int, Process] = {}
        self.slots: dict[int, int] = {}
        self.teams: dict[int, Team] = {}
        self.timers: dict[str, int] = {}
        self.generation = 0
        self.facts = Facts()
        self.told = 0  # the last step whose loss was
        self.told_before = 0  # by the drivers before; 0 after the first group has formed
        self.unwritten: list[events.Event] = []  # emitted, and not stored yet
        self.acquired_s = self.last_s = 0.0  # when it took the run, and when it emitted last
        self.stalled = False
        self.missed: list[m.DriverEvent] = []  # while it was, which come before the timers that ran out
        self.expired: list[m.SetTimer] = []

    def team(self, number: int) -> Team:
        """The group of a generation."""
        if number not in self.teams:
            self.teams[number] = Team(number)
        return self.teams[number]

    @property
    def recovering(self) -> bool:
        """Whether it is gathering its workers."""
        return self.state is not None and self.state.phase is Phase.GATHERING

    @property
    def standing(self) -> bool:
        """Whether its workers are at work, and it goes on being so."""
        return self.state is not None and self.state.phase in STEADY_PHASES

    @property
    def living(self) -> list[Process]:
        """Its processes that run, and that no other driver has taken over."""
        return [process for process in self.processes.values() if process.alive and process.driver is self]


@dataclass
class Outcome:
    """What one schedule showed."""

    outcomes: list[str]
    step: int
    events: int
    seconds: float
    pairs: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    emitted: list[events.Event] = field(default_factory=list)


class World:
    """One schedule."""

    def __init__(
        self, scenario: Scenario, code: Any = real, pairs: Counter[tuple[str, str, str]] | None = None
    ) -> None:
        self.scenario, self.code = scenario, code
        self.rng, self.rng_writes = Random(scenario.seed + 1), Random(scenario.seed + 2)
        right = lineages(scenario.settings.length.total_steps + 1)
        self.clock = Clock()
        self.labour = Labour(scenario, self.rng, self.clock, None, right)  # type: ignore[arg-type]
        self.store = self.labour.store = Store(right, self.labour.is_whole)
        if scenario.settings.saving.best:
            self.store.keep = 1
        self.labour.deliver = self.deliver
        self.strikes = Strikes(self)
        self.drivers: list[Driver] = []
        self.pairs: Counter[tuple[str, str, str]] = Counter() if pairs is None else pairs
        self.emitted: list[events.Event] = []
        self.delivered = 0
        self._coming = 0
        self.heritage: Driver | None = None  # a dead driver whose workers live
        self._others: dict[type, Any] = {
            m.AcquireLease: self._acquire, m.CommitCheckpoint: self._commit, m.ExcludeNode: self._exclude_node,
            m.FinishRun: self._finish, m.KillWorker: self._kill, m.MarkComplete: self._seal,
            m.ReleaseLease: self._release, m.StartWorker: self._place,
        }  # fmt: skip

    def run(self) -> Outcome:
        """Until every driver has finished or died."""
        self.strikes.arm()
        self.start_driver()
        limit = 4000 + 400 * self.scenario.settings.world.workers
        while self._coming or any(driver.alive and driver.finish is None for driver in self.drivers):
            if not self.clock.tick():
                raise Violation(f"the driver waits for ever while {self.drivers[-1].state.phase}")  # type: ignore[union-attr]
            if self.delivered > limit or self.clock.now_s > 20_000:
                raise Violation(f"no end after {self.delivered} events and {self.clock.now_s:.0f} s")
        outcomes = [driver.finish.outcome if driver.finish else "killed" for driver in self.drivers]
        step = self.store.head.step if self.store.head else 0
        return Outcome(outcomes, step, self.delivered, self.clock.now_s, self.pairs, self.emitted)

    @property
    def driver(self) -> Driver:
        """The newest driver."""
        return self.drivers[-1]

    def begin_later(self, after_s: float) -> None:
        """The same command again, after a while."""
        self._coming += 1
        self.clock.after(after_s, self._begin_next)

    def _begin_next(self) -> None:
        self._coming -= 1
        self.start_driver()

    def start_driver(self) -> None:
        """Begin a driver on what the store holds."""
        driver = Driver(self.code)
        self.drivers.append(driver)
        state, effects = self.code.begin_run(self.scenario.settings, self.clock.now_s)
        driver.state = state
        self._carry_out(driver, effects)

    # --- events -------------------------------------------------------------------------------------------

    def deliver(self, driver: Driver, event: m.DriverEvent) -> None:
        """Let a driver decide about an event, and carry out what it wants."""
        if not driver.alive:
            return
        if driver.stalled:
            driver.missed.append(event)
            return
        if 0 < driver.token < self.store.owner and driver.finish is None and not isinstance(event, m.LeaseLost):
            event = m.LeaseLost(
                error=FencedError("another driver has the run")
            )  # its lease is checked before each event
        state = driver.state
        assert state is not None
        self.delivered += 1
        stale = driver.code.is_stale(state, event)
        if not stale:
            kind, detail = driver.code.event_kind(event)
            self.pairs[state.phase.value, kind.__name__, detail] += 1
        if driver.finish is None and not (isinstance(event, m.WorkerDied) and driver.processes[event.worker].harmless):
            driver.facts.hear(event)
        driver.state, effects = driver.code.decide(state, event, self.clock.now_s)
        self._check_tolerance(state, driver.state, event)
        if driver.finish is not None and effects:
            raise Violation(f"effects after the end: {effects}")
        self._carry_out(driver, effects)
        if driver.facts.untraced and not stale:
            raise Violation(f"workers {driver.facts.untraced} were not asked for their traces")
        driver.facts.untraced.clear()

    def _check_tolerance(self, before: DriverState, after: DriverState, event: m.DriverEvent) -> None:
        """The end of one that the others do without ends no generation."""
        if (
            not isinstance(event, m.WorkerDied)
            or before.phase not in STEADY_PHASES
            or after.phase is not Phase.GATHERING
        ):
            return
        rank = before.membership.rank_of.get(event.worker)
        if rank is not None and self.scenario.settings.world.spares_rank(rank):
            raise Violation(f"the generation ended with worker {event.worker}, which the others do without")

    # --- effects ------------------------------------------------------------------------------------------

    def _carry_out(self, driver: Driver, effects: tuple[m.Effect, ...]) -> None:
        for effect in effects:
            kind = type(effect)
            if kind is m.CallWorker:
                self._call(driver, effect)  # type: ignore[arg-type]
            elif kind is m.SetTimer:
                driver.timers[effect.name] = effect.number  # type: ignore[union-attr]
                self.clock.after(effect.after_s, self._expire, driver, effect)  # type: ignore[union-attr]
            elif kind is m.CancelTimer:
                driver.timers.pop(effect.name, None)  # type: ignore[union-attr]
            elif kind is m.EmitEvent:
                self._emit(driver, effect.event)  # type: ignore[union-attr]
            else:
                self._others[kind](driver, effect)

    def _expire(self, driver: Driver, timer: m.SetTimer) -> None:
        if driver.finish is not None or not driver.alive or driver.timers.get(timer.name) != timer.number:
            return
        if driver.stalled:
            driver.expired.append(timer)
            return
        del driver.timers[timer.name]
        there = [process for process in driver.processes.values() if not process.told]
        stuck = [process for process in there if process.hung or process.deaf or process.upload_hung or process.adrift]
        if timer.name == "trace":
            stuck = [process for process in there if process.trace_hung]
        fenced = driver.token < self.store.owner  # another driver hears its workers
        if timer.name in ("call", "hang", "leave", "trace") and not (stuck or fenced):
            raise Violation(f"the timer {timer.name!r} ran out although nobody hangs")
        driver.facts.expired(timer.name)
        self.deliver(driver, m.TimerExpired(name=timer.name, number=timer.number))

    def _call(self, driver: Driver, call: m.CallWorker) -> None:
        process = driver.processes.get(call.worker)
        if process is not None and process.told and driver.missed:
            return  # it is about to hear of that death
        if process is None or not process.up or process.killed or process.told:
            raise Violation(f"{call.verb} is asked of worker {call.worker}, which is not there")
        number = call.generation.number
        if call.generation.token != driver.token or number < driver.generation:
            raise Violation(f"{call.verb} is asked for generation {call.generation}, which is over")
        driver.generation = number
        if call.verb == "restore" and call.argument.source != "join":
            driver.told = min(driver.told, call.argument.step) if driver.facts.restored else call.argument.step
        driver.facts.called(call, self.labour.shop is None or process.rank == 0)
        if call.verb == "restore":
            self.labour.memory.check(call.argument, driver)
        process.spare = process.spare and call.verb != "reserve"  # its death counts from now on, if it was not before
        if process.alive:
            self.labour.begin(process, call)
            self.strikes.after_call(process, call)

    def _acquire(self, driver: Driver, effect: m.AcquireLease) -> None:
        patience_s = PATIENCE_S if self.heritage is not None and self.heritage.stalled else 0.0
        self.clock.after(patience_s + self.labour.between(0.05, 0.5), self._acquired, driver)

    def _acquired(self, driver: Driver) -> None:
        if self.strikes.log_lost:
            self.deliver(driver, m.LeaseLost(error=StorageError("the log cannot be reached")))
        elif driver.alive and driver.finish is None:
            event = self.store.acquire()
            driver.token = event.token
            driver.told_before = max((other.told for other in self.drivers[:-1]), default=0)
            spent_s = sum(other.last_s - other.acquired_s for other in self.drivers[:-1])
            event = replace(event, told=driver.told_before, spent_s=spent_s, **self._inherit(driver))
            driver.acquired_s = driver.last_s = self.clock.now_s
            driver.facts.over_s = self.clock.now_s + (self.scenario.settings.length.max_time_s or math.inf) - spent_s
            driver.facts.resumed(event, self.scenario.settings)
            self.deliver(driver, event)

    def _inherit(self, driver: Driver) -> dict[str, Any]:
        """What outlived the driver before, where the cluster did: its workers let go of their group."""
        before, self.heritage = self.heritage, None
        if before is None:
            return {}
        answering = [process for process in before.living if process.up and not process.killed]
        living = [process for process in answering if not process.hung and not process.deaf]
        for process in living:
            self.labour.let_go(process)
            process.driver = driver
            driver.processes[process.worker] = process
            if not process.beside:
                driver.slots[process.slot] = process.worker
        for process in before.living:  # those that do not answer are ended
            process.alive = False
            process.ticket += 1
        kept = self.labour.memory.sealed.get(before.token)
        return {"living": tuple(self._living(process) for process in living), "kept": kept}

    def _living(self, process: Process) -> m.SurvivingWorker:
        slot = None if process.spare and process.beside else process.slot
        node = f"node-{process.slot // 4}"
        rank = -1 if process.spare else process.rank
        plan, step = (process.plan, process.step) if process.trained and not process.tried else (None, 0)
        world = self.scenario.settings.world
        if step and self.scenario.layout == "replicated" and world.reform == "new_process" and not world.tolerates:
            plan = plan or staged(1, world.workers)
        return m.SurvivingWorker(
            worker=process.worker, node=node, pid=1000 + process.worker, slot=slot, waiting=process.spare, rank=rank,
            plan=plan, step=step,
        )  # fmt: skip

    def _seal(self, driver: Driver, effect: m.MarkComplete) -> None:
        self.labour.memory.sealed[driver.token] = effect.kept

    def _place(self, driver: Driver, effect: m.StartWorker) -> None:
        if not effect.beside:
            self._take_slot(driver, effect.slot, effect.worker)
        if driver.facts.stop_now or effect.worker in driver.processes:
            raise Violation(f"worker {effect.worker} is placed, which cannot be")
        process = Process(driver, effect, self.clock.now_s)
        driver.processes[effect.worker] = process
        self._count(driver)
        self.clock.after(effect.after_s, self.strikes.start, process)

    def _count(self, driver: Driver) -> None:
        settings = self.scenario.settings
        spares = [other for other in driver.living if other.spare and other.beside and not other.killed]
        if len(spares) > settings.world.spares:
            raise Violation(f"{len(spares)} spares where {settings.world.spares} were wanted")
        if not all(0 <= slot < settings.world.most for slot in driver.slots):
            raise Violation(f"slots {sorted(driver.slots)} where {settings.world.most} workers are the most")

    def _take_slot(self, driver: Driver, slot: int, worker: int) -> None:
        """One process at a time holds a rank."""
        old = driver.processes.get(driver.slots.get(slot, -1))
        if old is not None and old.worker != worker and not old.killed and not old.told:
            raise Violation(f"slot {slot} is given to worker {worker} while worker {old.worker} holds it")
        driver.slots[slot] = worker

    def started(self, process: Process) -> None:
        """A placed process is up."""
        if process.alive and process.driver.alive:
            process.up = True
            event = m.WorkerStarted(worker=process.worker, node=f"node-{process.slot // 4}", pid=1000 + process.worker)
            self.deliver(process.driver, event)

    def _kill(self, driver: Driver, effect: m.KillWorker) -> None:
        process = driver.processes[effect.worker]
        if process.driver is not driver:
            raise Violation(f"worker {effect.worker} is killed, which another driver has taken over")
        if process.told and driver.missed:
            return
        if process.killed or process.told:
            raise Violation(f"worker {effect.worker} is killed twice or after its death was told")
        if driver.recovering and self._saves_survivors(driver) and not process.guilty:
            raise Violation(f"worker {effect.worker} is killed, although it only waited for others")
        settings = self.scenario.settings
        needed = [
            other for other in driver.living if settings.world.tolerates and not settings.world.spares_rank(other.rank)
        ]
        stuck = any(other.hung for other in needed)
        spent = (
            settings.world.reform == "new_process"
            and settings.world.tolerates
            and (process.adrift or not process.member)
        )
        ailing = process.guilty or process.deaf or stuck or spent  # a frozen server makes others silent
        if driver.standing and not ailing:
            raise Violation(f"worker {effect.worker} is killed, although nothing ails it")
        process.killed = True
        driver.facts.ended(process)
        self.clock.after(self.labour.between(0.01, 0.3), self.labour.die, process, 0.1)

    def _exclude_node(self, driver: Driver, effect: m.ExcludeNode) -> None:
        if effect.worker not in driver.processes:
            raise Violation(f"the node of worker {effect.worker}, which was never there, is excluded")

    def _saves_survivors(self, driver: Driver) -> bool:
        """Whether a survivor's process is worth keeping: not where all must begin anew, since no state is whole."""
        in_place = self.scenario.settings.world.reform == "in_place" and self.scenario.layout == "replicated"
        usable = all(process.sound and process.step <= driver.facts.missing for process in driver.living)
        return in_place and not driver.facts.spiking and usable

    def _write(self, driver: Driver) -> None:
        """Store the events so far."""
        if self.store.owner == driver.token:
            self.store.tell(driver.unwritten)
            driver.unwritten = []

    def _commit(self, driver: Driver, commit: m.CommitCheckpoint) -> None:
        self._write(driver)
        before_s, after_s = self.strikes.commit_delays()
        self.clock.after(before_s, self._commit_arrives, driver, commit, after_s)

    def _commit_arrives(self, driver: Driver, commit: m.CommitCheckpoint, after_s: float) -> None:
        """A commit under way may still succeed when its driver has just died."""
        if not driver.alive and self.rng.random() < 0.5:
            return
        answer: m.DriverEvent
        if self.store.owner != driver.token or self.strikes.log_lost:
            kind = FencedError if self.store.owner != driver.token else StorageError
            answer = m.LeaseLost(error=kind("the log is not ours"))
        elif self.strikes.commit_fails():
            answer = m.CommitFailed(step=commit.step, error=StorageError("the store did not answer"))
        elif driver.facts.release is not None:
            raise Violation(f"step {commit.step} was committed after the log was given back")
        else:
            ref = self.store.commit(driver.token, commit)
            answer = m.CheckpointCommitted(checkpoint=ref, older=tuple(self.store.chain[:-1]))
            self.strikes.after_commit(driver)
        self.clock.after(after_s, self.deliver, driver, answer)

    def _release(self, driver: Driver, effect: m.ReleaseLease) -> None:
        driver.facts.release = effect
        fenced = self.store.owner != driver.token
        known = {ref.step for ref in (*self.store.chain[-1:], *self.store.sound[-1:])} or {0}
        if not fenced and effect.step not in known:
            raise Violation(f"released at step {effect.step}, but the head is {self.store.head}")
        answer: m.DriverEvent = m.LeaseLost(error=FencedError("the log is not ours")) if fenced else m.LeaseReleased()
        self.clock.after(self.labour.between(0.05, 0.3), self.deliver, driver, answer)

    def _emit(self, driver: Driver, event: events.Event) -> None:
        self.emitted.append(event)
        driver.facts.emitted(event)
        driver.unwritten.append(event)
        driver.last_s = self.clock.now_s
        if isinstance(event, events.CheckpointSkipped):
            self.store.lost.add(event.step)
        elif isinstance(event, events.Noted) and event.text.startswith("continuing before step "):
            self.store.lost.add(int(event.text.split()[3].rstrip(",").replace(",", "")))
        if self.rng_writes.random() < 0.1:
            self._write(driver)
        if isinstance(event, events.Formed):
            if event.steps_lost < driver.told_before - event.step:
                raise Violation(f"{event.steps_lost} steps lost, but step {driver.told_before} was told before")
            driver.told_before = 0
        if isinstance(event, events.Promoted):
            self._take_slot(driver, event.slot, event.worker)
            driver.processes[event.worker].spare = False
            driver.processes[event.worker].slot = event.slot

    def _finish(self, driver: Driver, finish: m.FinishRun) -> None:
        driver.finish = finish
        driver.facts.judge(self.scenario, driver, self.store, self.clock.now_s)
        for process in driver.living:
            self.labour.die(process)

    def stall(self, driver: Driver, for_s: float) -> None:
        """The driver stands still for a while, and so hears of nothing."""
        driver.stalled = True
        if for_s > PATIENCE_S:
            self.heritage = driver
        self.clock.after(for_s, self._go_on, driver)

    def _go_on(self, driver: Driver) -> None:
        driver.stalled = False
        while driver.missed:
            self.deliver(driver, driver.missed.pop(0))
        expired, driver.expired = driver.expired, []
        for timer in expired:
            self._expire(driver, timer)
        if driver.finish is None and 0 < driver.token < self.store.owner:
            self.deliver(driver, m.LeaseLost(error=FencedError("its processes belong to another driver")))

    def crash(self, driver: Driver) -> None:
        """The driver dies, and Ray ends its workers, unless the cluster lives on without it."""
        driver.alive = False
        if self.rng.random() < 0.5:
            self.heritage = driver
            return
        for process in driver.living:
            process.alive = False
            process.ticket += 1


def simulate(scenario: Scenario, code: Any = real, pairs: Counter[tuple[str, str, str]] | None = None) -> Outcome:
    """Run one schedule to its end; raises Violation (or the driver's own AssertionError)."""
    return World(scenario, code, pairs).run()
