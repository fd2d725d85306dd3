"""The oracle: from what was delivered to a driver, which outcomes are right."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.simulation.processes import Process
from tests.simulation.scenario import Scenario, best_step, last_step, least_of
from tests.simulation.step_reports import SPIKE
from tests.simulation.store import Store, Violation
from trainwright.core import events
from trainwright.core.errors import (
    DamagedCheckpoint,
    DataError,
    HangError,
    LossSpike,
    NonFiniteLoss,
    ResourceError,
    RunConflict,
    StorageError,
    UserCodeError,
    WorkerLost,
)
from trainwright.core.job_consistency import CRASH_LOOP_FAILURES
from trainwright.core.plan import Plan
from trainwright.driver import messages as m
from trainwright.driver.run_policy import RunPolicy

if TYPE_CHECKING:
    from tests.simulation.world import Driver


class Facts:
    """What one driver was told, and what follows from it."""

    def __init__(self) -> None:
        self.high = 0  # highest step told of
        self.line = 0  # where the run stands, after being set back
        self.start = 0
        self.restored = False
        self.faults = 0  # since a new step was told of; each may count as one failure
        self.recovering = False
        self.lost: Exception | None = None
        self.user: list[Exception] = []
        self.plans: tuple[Plan, ...] = ()  # to choose from
        self.trying = False  # they are measured
        self.tried: list[Exception] = []  # what was raised then
        self.aside = False  # the one on trial was set aside
        self.storage_in_a_row = 0
        self.cuts: set[int] = set()  # generations cut without a death, not told of yet
        self.lost_peer = False  # a worker lost others, and nobody said why yet
        self.most_faults = 0
        self.passing: set[int] = set()
        self.spikes: set[int] = set()  # steps whose loss was told
        self.back = 0  # the one that the ranks are taken back before
        self.stop_now = False
        self.stop_at: int | None = None
        self.noticed = False  # a process was told that it will be ended, which may cost steps
        self.unquiet = False  # a fault came after the wish to stop
        self.evaluated: dict[int, dict[str, float]] = {}
        self.missing = (
            math.inf
        )  # the first evaluation that decisions depend on and that the driver before did not store
        self.release: m.ReleaseLease | None = None
        self.over_s = math.inf  # when the time of the run is over
        self.announces = False  # whether the driver knows that callbacks want to be told of checkpoints
        self.announced = 0  # step of the newest one that a call named
        self.untraced: set[int] = set()  # workers that just told of a recording, and were not asked for it yet
        self.traces = Counter[int]()  # asked for, and neither stored nor said to be lost yet, by rank

    def resumed(self, event: m.LeaseAcquired, settings: RunPolicy) -> None:
        """The driver begins, at a checkpoint where there is one."""
        self.start = self.high = self.line = event.head.step if event.head else 0
        self.evaluated = {known.step: known.metrics for known in event.evaluations}
        if settings.goals and settings.length.evaluate_steps is not None:
            steps = range(max(self.start, 1), settings.length.total_steps)
            due = (step for step in steps if step % settings.length.evaluate_steps == 0)
            self.missing = next((step for step in due if step not in self.evaluated), math.inf)
        self.plans = settings.world.layouts.plans if settings.world.layouts else ()
        self.trying = len(self.plans) > 1 and not (event.head or event.living or event.kept)

    def hear(self, event: m.DriverEvent) -> None:
        """Note what matters of a delivered event."""
        match event:
            case m.StepsCompleted():
                self._reached(event.step)
                first = event.step - len(event.losses) + 1
                self.spikes |= {step for step, loss in enumerate(event.losses, first) if loss == SPIKE}
                self.unquiet = self.unquiet or self.spiking
            case m.CallReturned(verb="run"):
                self._reached(event.value.step)
                self.announces = self.announces or event.value.announces
                if event.value.traced:
                    self.untraced.add(event.worker)
            case m.CallRaised(verb="trace"):
                pass  # it costs nothing but the trace
            case m.WorkerDied():
                self._fault()
            case m.CallRaised():
                self._raised(event)
            case m.PreemptionNoticed():
                self.noticed = True
            case m.LeaseLost():
                self.lost = event.error
            case m.CheckpointCommitted():
                self.storage_in_a_row = 0
            case m.CommitFailed():
                self.storage_in_a_row += 1
            case m.StopRequested():
                self.stop_now = self.stop_now or (event.now and self.release is None)
                if self.stop_at is None:
                    self.stop_at = self.line
                    self.unquiet = self.recovering or self.spiking

    @property
    def spiking(self) -> bool:
        """Whether a spike is in the state."""
        return bool(self.spikes - self.passing)

    def is_cut_short(self, now_s: float) -> bool:
        """Whether the run ends early because the user wants it or its time is over."""
        return self.stop_at is not None or now_s >= self.over_s

    def _reached(self, step: int) -> None:
        self.line = max(self.line, step)
        if step > self.high:
            self.high = step
            self.faults = min(self.faults, 1) if self.recovering else 0

    def _fault(self) -> None:
        self.faults += 1
        self.most_faults = max(self.most_faults, self.faults)
        self.recovering, self.unquiet, self.lost_peer = True, True, False

    def _raised(self, event: m.CallRaised) -> None:
        kind = event.failure.kind
        if self.trying and kind in ("user", "data", "internal"):
            self.tried.append(event.failure.error)
            self.recovering = self.unquiet = True
        elif event.verb == "upload" and kind == "storage":
            self.storage_in_a_row += 1
        elif kind in ("user", "data"):
            if self.release is None:
                self.user.append(event.failure.error)
                self.unquiet = True
        elif kind != "peer":
            self._fault()
        elif event.generation.number in self.cuts:
            self.cuts.remove(event.generation.number)
            self._fault()
        else:
            self.recovering = self.unquiet = self.lost_peer = True

    def ended(self, process: Process) -> None:
        """The driver ends a worker; one that had died before is why others lost it, and its death is told no more."""
        if self.lost_peer and not process.alive and not process.spare:
            self._fault()

    def _passed_by(self, steps: set[int]) -> None:
        """Batches are passed by from now on: of the step that failed again and again alone, and for good."""
        if not self.passing <= steps:
            raise Violation(f"the batches of {self.passing - steps} are no longer passed by")
        added = steps - self.passing
        self.back = min(added & self.spikes, default=self.back)
        added -= self.spikes
        if added and (self.faults < CRASH_LOOP_FAILURES or added != {self.high + 1}):
            raise Violation(f"{added} are passed by after {self.faults} faults at step {self.high}")
        self.passing = steps

    def expired(self, name: str) -> None:
        """A deadline passed because something hangs, or a pause is over."""
        if name == "backoff" and self.faults < 2:
            raise Violation("a first failure was not recovered from at once")
        if name in ("call", "hang", "upload", "apart"):
            self._fault()
        self.unquiet = self.unquiet or name != "trace"

    def called(self, call: m.CallWorker, leads: bool) -> None:
        """The driver calls a worker, or one who `leads` others."""
        if call.verb == "probe" and not self.trying:
            raise Violation("plans are tried although the run goes on with one")
        if call.verb == "reserve":
            self.aside = self.lost_peer = False
            self.trying = self.trying and call.argument.plan in self.plans  # or there are not the workers for those
        if call.verb == "trace":
            if call.worker not in self.untraced:
                raise Violation(f"worker {call.worker} is asked for a trace that it did not tell of")
            self.untraced.remove(call.worker)
            self.traces[call.argument] += 1
        if call.verb == "run":
            self.announced = max([self.announced, *(ref.step for ref in call.argument.checkpoints)])
            if self.stop_at is not None and leads and call.argument.steps:
                raise Violation("steps are begun after a wish to stop")
            self.recovering, self.back = False, 0
        if call.verb == "restore" and call.argument.source != "join":
            if call.argument.source == "replica":
                self._reached(call.argument.step)  # a survivor told of it
            self.line = call.argument.step
            if not self.restored:  # what was due before was seen to by the driver before, whose workers these may be
                self.start = max(self.start, call.argument.step - 1)
            self.restored = True
            self._passed_by({passed.step for passed in call.argument.passing})
            if 0 < self.back <= call.argument.step:
                raise Violation(f"the spike of step {self.back} is in the state of step {call.argument.step}")
        if self.stop_now and call.verb != "upload":
            raise Violation(f"{call.verb} is called after a wish to stop at once")

    def _traced(self, rank: int) -> None:
        """The user is told what became of a trace."""
        self.traces[rank] -= 1
        if self.traces[rank] < 0:
            raise Violation(f"more traces of rank {rank} are told of than were asked for")

    def emitted(self, event: events.Event) -> None:
        """The driver tells the user."""
        if isinstance(event, events.TraceWritten):
            self._traced(event.rank)
        elif isinstance(event, events.Noted) and event.text.startswith("the trace of rank "):
            self._traced(int(event.text.split()[4]))
        if isinstance(event, events.Evaluated):
            self.evaluated[event.step] = event.metrics
            self.missing = math.inf
        elif isinstance(event, events.Formed):
            self.evaluated = {step: known for step, known in self.evaluated.items() if step <= event.step}
        elif isinstance(event, events.Probed):
            self.trying = False
        elif isinstance(event, events.Noted) and " is set aside" in event.text:
            if self.aside:
                raise Violation(f"a plan that is not on trial is set aside: {event.text}")
            self.aside = True

    # --- the verdict --------------------------------------------------------------------------------------

    def judge(self, scenario: Scenario, driver: Driver, store: Store, now_s: float) -> None:
        """Raise Violation unless the outcome is one that the facts allow."""
        finish = driver.finish
        assert finish is not None
        self._judge_ends(driver, finish)
        if +self.traces:
            raise Violation(f"nobody was told what became of traces, by rank: {+self.traces}")
        over = now_s >= self.over_s
        if finish.outcome == "done":
            self._judge_done(scenario, store, finish, over=over)
        elif finish.outcome == "stopped":
            self._judge_stopped(finish, over=over)
        else:
            if isinstance(finish.error, DamagedCheckpoint) and store.sound:
                raise Violation(f"failed with {finish.error!r}, although {store.sound[-1].path} is whole")
            self._judge_failed(scenario, driver, finish, now_s)

    def _judge_ends(self, driver: Driver, finish: m.FinishRun) -> None:
        if self.lost is None and (self.release is None or self.release.outcome != finish.outcome):
            raise Violation(f"ended as {finish.outcome}, but released {self.release}")
        if (finish.outcome == "failed") != (finish.error is not None):
            raise Violation(f"ended as {finish.outcome} with {finish.error!r}")
        unkilled = [process for process in driver.living if not process.killed]
        at_once = self.stop_now and finish.outcome == "stopped" and driver.generation  # else it ended as it began
        ours = self.lost is not None and not isinstance(self.lost, RunConflict)
        if unkilled and (at_once or (ours and not self.release)):
            raise Violation(f"workers live on: {[process.worker for process in unkilled]}")

    def _judge_done(self, scenario: Scenario, store: Store, finish: m.FinishRun, *, over: bool) -> None:
        settings, end = scenario.settings, last_step(scenario)
        early = over and finish.step <= end
        known = {ref.step for ref in (*store.chain[-1:], *(store.sound[-1:] if early else ()))} or {0}
        if finish.step not in known or (finish.step != end and not early):
            raise Violation(f"done at step {finish.step} of {end} with {store.head}")
        if self.user:
            raise Violation(f"done although the user's code raised {self.user[0]!r}")
        if self.announces and self.announced < finish.step and not self.stop_now:
            raise Violation(f"done at step {finish.step}, but callbacks were last told of step {self.announced}")
        every = settings.length.evaluate_steps
        if every is None or self.start >= end or self.stop_now:
            return
        due = {step for step in range(self.start + 1, min(end, finish.step)) if step % every == 0}
        due = due if self.stop_at is None else {step for step in due if step in self.evaluated}
        best = best_step(scenario, (step for step in self.evaluated if step <= finish.step))
        if best and best not in {ref.step for ref in store.chain} | store.unsaved:
            raise Violation(f"the best evaluation, of step {best}, has no checkpoint: {store.chain}")
        for step in due | (set() if early else {end}):
            metrics = self.evaluated.get(step)
            if metrics is None or not _whole(metrics, settings):
                raise Violation(f"the evaluation of step {step} gave {metrics}")

    def _judge_stopped(self, finish: m.FinishRun, *, over: bool) -> None:
        if self.stop_at is None:
            if over:
                return
            raise Violation("stopped, but nobody asked for it")
        quiet = not (self.unquiet or self.noticed or self.stop_now or self.user or self.lost)
        if quiet and finish.step < self.stop_at:
            raise Violation(f"stopped at step {finish.step}, although step {self.stop_at} was complete")

    def _judge_failed(self, scenario: Scenario, driver: Driver, finish: m.FinishRun, now_s: float) -> None:
        error: Any = finish.error
        told = any(_is_told(error, raised, finish.step) for raised in self.user)
        if self.user and self.lost is None and not self._spent(scenario) and not told:
            raise Violation(f"failed with {error!r} instead of {self.user[0]!r}")
        if isinstance(error, (UserCodeError, NonFiniteLoss, DataError)):
            right = told or any(_is_told(error, raised, finish.step) for raised in self.tried[:1])
        elif isinstance(error, ResourceError):
            waiting = [p for p in driver.processes.values() if p.alive and not p.up]
            right = any(now_s + 1e-6 - p.born_s >= scenario.settings.deadlines.place_deadline_s for p in waiting)
        elif isinstance(error, RunConflict):
            right = self.lost is error
        elif isinstance(error, LossSpike):
            right = self.spiking
        elif isinstance(error, StorageError):
            right = error is self.lost or self._spent(scenario) or self._store_is_out(scenario)
        else:
            spent = isinstance(error, (WorkerLost, HangError, RuntimeError)) and self._spent(scenario)
            right = spent or error in self.tried[:1]
        if not right:
            raise Violation(f"failed with {error!r}, but {self.most_faults} faults were to be recovered from")

    def _spent(self, scenario: Scenario) -> bool:
        return self.most_faults > scenario.settings.limits.failures

    def _store_is_out(self, scenario: Scenario) -> bool:
        return self.storage_in_a_row >= scenario.settings.saving.storage_attempts


def _is_told(error: Any, raised: Exception, committed: int) -> bool:
    """Whether an error is the one that was raised; one of user code also says where a corrected job continues."""
    if error is raised:
        return True
    remedy = f"correct the job; with resume=True it continues from step {committed:,}"
    return type(error) is type(raised) is UserCodeError and vars(error) == {**vars(raised), "remedy": remedy}


def _whole(metrics: dict[str, float], settings: RunPolicy) -> bool:
    """Whether each rank of a world within its bounds was counted once; servers do not count."""
    right = abs(metrics["rank"] - (metrics["size"] + 1) / 2) < 1e-9
    least = 1 if settings.world.tolerates else least_of(settings)
    return right and least - 1e-9 <= metrics["size"] <= settings.world.most - settings.world.servers + 1e-9
