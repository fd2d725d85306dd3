"""What a run has been through, folded from its events: the same events give the same history."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from trainwright.core.events import (
    Checkpointed,
    CheckpointSkipped,
    Evaluated,
    Event,
    Failed,
    Formed,
    Joined,
    Judged,
    Kept,
    Leaving,
    Measured,
    Noted,
    Placed,
    Prefetched,
    Probed,
    Replanned,
    RunEnded,
    RunStarted,
    Stacks,
    Stale,
    Steps,
    Straggling,
    Waiting,
)
from trainwright.core.noise import Noise
from trainwright.core.phases import Phases, merged
from trainwright.journal import read_events
from trainwright.liveness import owner_alive
from trainwright.log import RunLog
from trainwright.parts import Recovery, Session, StepRecord, Totals, noise_of
from trainwright.store import Store

if TYPE_CHECKING:
    import pandas

State = Literal["running", "done", "stopped", "failed", "interrupted"]
STEP_COLUMNS = (
    "step", "epoch", "loss", "learning_rate", "gradient_norm", "samples_per_s", "wait_share", "generation",
)  # fmt: skip
_OUTCOMES: dict[str, State] = {"done": "done", "stopped": "stopped", "failed": "failed"}


@dataclass(frozen=True, kw_only=True)
class History:
    """A run as its readers need it.

    Attributes:
        start: what the newest driver said of job, plan and versions.
        records: the last record of each step, in order; steps that were lost are gone until they are done again.
        evaluated: the last evaluation of each step, in order.
        failures: all, in order of time.
        recoveries: each formation after a failure.
        resumes: the first formation of each session that did not begin at step 0, or began from a checkpoint.
        checkpoints: all that were committed; retention may have removed some since.
        nodes: the ranks that each node holds, as last told; see `core.arranging.ranges_of`.
        processes: the workers that are up, by number; a worker that takes a failed one's rank has a new number.
        prefetch: how far data is read ahead, as last told; None before the first segment has ended.
        measured: what the steps of the newest plan took, in order of time.
        waiting: what the run waits for at this moment; None while it steps.
        steps_lost: completed steps that had to be done again.
        stale: what workers that step alone pushed, in order of steps.
        judged: what was said last of students beside their teachers; None where nothing was.
        last_s: time of the newest event, seconds since the epoch.
    """

    start: RunStarted = field(default_factory=RunStarted)
    state: State = "running"
    step: int = 0
    records: tuple[StepRecord, ...] = ()
    evaluated: tuple[Evaluated, ...] = ()
    failures: tuple[Failed, ...] = ()
    recoveries: tuple[Recovery, ...] = ()
    resumes: tuple[Formed, ...] = ()
    checkpoints: tuple[Checkpointed, ...] = ()
    skipped: tuple[CheckpointSkipped, ...] = ()
    notes: tuple[Noted, ...] = ()
    nodes: Mapping[str, str] = field(default_factory=dict)
    processes: tuple[Placed, ...] = ()
    sessions: tuple[Session, ...] = ()
    prefetch: Prefetched | None = None
    measured: tuple[Measured, ...] = ()
    waiting: Waiting | None = None
    error: str = ""
    steps_lost: int = 0
    stale: tuple[Stale, ...] = ()
    judged: Judged | None = None
    totals: Totals = field(default_factory=Totals)
    last_s: float = 0.0

    @classmethod
    def fold(cls, events: Iterable[Event], *, owner_alive: bool = True, state: State | None = None) -> History:
        """Fold events in order.

        Args:
            owner_alive: tells a running driver from one that died without a word.
            state: what the run's log says of the state, where it knows better than the events.
        """
        folding = Folding()
        for event in events:
            folding.add(event)
        return folding.history(state or folding.state(owner_alive))

    @property
    def metrics(self) -> dict[str, float]:
        """Of the newest evaluation; empty before the first."""
        return dict(self.evaluated[-1].metrics) if self.evaluated else {}

    @property
    def loss(self) -> float:
        """Training loss of the last step; NaN before the first."""
        return self.records[-1].loss if self.records else math.nan

    @property
    def samples_per_s(self) -> float:
        """Throughput while stepping, over all steps that count; NaN before the first."""
        seconds = sum(record.step_s for record in self.records)
        return sum(record.samples for record in self.records) / seconds if seconds > 0 else math.nan

    @property
    def wait_share(self) -> float:
        """Share of the steps' time that waited for data, from 0 to 1; NaN where no step tells it."""
        told = [record for record in self.records if math.isfinite(record.wait_s)]
        seconds = sum(record.step_s for record in told)
        return sum(record.wait_s for record in told) / seconds if seconds > 0 else math.nan

    @property
    def median_step_s(self) -> float:
        """Median duration of a step, which start-up and recovery do not bend; NaN before the first."""
        ordered = sorted(record.step_s for record in self.records)
        return ordered[len(ordered) // 2] if ordered else math.nan

    @property
    def phases(self) -> Phases | None:
        """Median seconds of a step's phases with the last world size; None where none were timed."""
        alike = [item for item in self.measured if item.workers == self.measured[-1].workers]
        return merged([Phases(steps=item.steps, medians=item.phases, data_s=item.data_s) for item in alike])

    @property
    def noise(self) -> tuple[int, Noise] | None:
        """The step at which the gradient noise scale was last known, and what it was; None where it never was."""
        found = ((event.step, noise_of(event)) for event in reversed(self.measured))
        return next(((step, noise) for step, noise in found if noise is not None), None)

    @cached_property
    def steps(self) -> pandas.DataFrame:
        """One row a completed step, in the order of `STEP_COLUMNS`."""
        import pandas

        columns = {
            "step": [record.step for record in self.records],
            "epoch": [record.epoch for record in self.records],
            "loss": [record.loss for record in self.records],
            "learning_rate": [record.learning_rate for record in self.records],
            "gradient_norm": [math.nan if (r.gradient_norm is None) else r.gradient_norm for r in self.records],
            "samples_per_s": [record.samples_per_s for record in self.records],
            "wait_share": [r.wait_s / r.step_s if r.step_s > 0 else 0.0 for r in self.records],
            "generation": [record.generation for record in self.records],
        }
        return pandas.DataFrame(columns, columns=list(STEP_COLUMNS))

    @cached_property
    def evaluations(self) -> pandas.DataFrame:
        """One row an evaluation: step, epoch, each metric by name, seconds."""
        import pandas

        names = sorted({name for evaluation in self.evaluated for name in evaluation.metrics})
        columns: dict[str, list[float]] = {
            "step": [e.step for e in self.evaluated],
            "epoch": [epoch_of(e.step, self.start.steps_per_epoch) for e in self.evaluated],
            **{name: [e.metrics.get(name, math.nan) for e in self.evaluated] for name in names},
            "seconds": [e.seconds for e in self.evaluated],
        }
        return pandas.DataFrame(columns)


def read_history(store: Store, run: str) -> History:
    """A run's history from storage, its state from the log. Raises StorageError."""
    head = RunLog(store, run).head()
    alive = owner_alive(store, run, head)
    events = read_events(store, run)
    tokens = [event.token for event in events if isinstance(event, RunStarted)]
    state: State | None = None
    if head is not None and not head.owned:
        state = _OUTCOMES.get(head.outcome)
    elif head is not None and head.token > max(tokens, default=0):
        state = "running" if alive else "interrupted"  # a new driver, which has not written events yet
    return History.fold(events, owner_alive=alive, state=state)


def epoch_of(step: int, steps_per_epoch: int) -> int:
    """Epoch, from 1, that completed step `step` belongs to."""
    return (max(step, 1) - 1) // steps_per_epoch + 1 if steps_per_epoch > 0 else 1


class Folding:
    """Takes events one by one, for `History.fold` and for who counts while a run goes."""

    def __init__(self) -> None:
        self.start = RunStarted()
        self.steps: dict[int, StepRecord] = {}
        self.evaluations: dict[int, Evaluated] = {}
        self.failures: list[Failed] = []
        self.recoveries: list[Recovery] = []
        self.resumes: list[Formed] = []
        self.checkpoints: dict[str, Checkpointed] = {}
        self.kept_s = 0.0  # that steps lost to copies in memory
        self.skipped: list[CheckpointSkipped] = []
        self.notes: list[Noted] = []
        self.nodes: Mapping[str, str] = {}
        self.processes: dict[int, Placed] = {}
        self.sessions: list[Session] = []
        self.prefetch: Prefetched | None = None
        self.measured: list[Measured] = []
        self.waiting: Waiting | None = None
        self.end: RunEnded | None = None
        self.stale: list[Stale] = []
        self.judged: Judged | None = None
        self.formed = False
        self.cause: Failed | None = None
        self.step = self.steps_lost = 0
        self.start_s = self.recovery_s = self.last_s = self.evaluation_s = 0.0

    def add(self, event: Event) -> None:
        """Fold one event in."""
        self.last_s = max(self.last_s, event.time_s)
        match event:
            case RunStarted():
                self._started(event)
            case Waiting():
                self.waiting = event
            case Placed():
                self.processes[event.worker] = event
            case Formed():
                self._formed(event)
            case Steps():
                self._stepped(event)
            case Prefetched():
                self.prefetch = event
            case Measured():
                self.measured.append(event)
            case Evaluated():
                self.evaluations[event.step] = event
                self.evaluation_s += event.seconds
            case Checkpointed():
                self.checkpoints[event.path] = event
            case Kept():
                self.kept_s += event.blocked_s
            case CheckpointSkipped():
                self.skipped.append(event)
            case Failed():
                self.failures.append(event)
                self.processes.pop(event.worker, None)
                self.cause = self.cause or event
            case Stacks() if self.failures:
                stood = f"rank {event.rank} ({event.node}) stood at:\n{event.text}"
                last = self.failures[-1]
                self.failures[-1] = replace(last, detail="\n".join(part for part in (last.detail, stood) if part))
            case Replanned() | Probed():
                self._replanned(event)
            case Stale():
                self.stale.append(event)
            case Leaving() | Straggling() | Joined():
                self.notes.append(Noted(time_s=event.time_s, text=event.text))
            case Noted():
                self.notes.append(event)
            case Judged():
                self.judged = event
                return  # the session was over
            case RunEnded():
                self.end, self.waiting = event, None
        self._extend(event)

    def _extend(self, event: Event) -> None:
        if self.sessions:
            last = self.sessions[-1]
            outcome = event.outcome if isinstance(event, RunEnded) else last.outcome
            ended_s = max(last.ended_s, event.time_s)
            self.sessions[-1] = Session(token=last.token, started_s=last.started_s, ended_s=ended_s, outcome=outcome)

    def _started(self, event: RunStarted) -> None:
        if event.fresh:
            self.__dict__.update(Folding().__dict__)
        self._close_start()
        if event.plan != self.start.plan:
            self.measured.clear()
        self.start, self.end, self.waiting, self.cause, self.formed = event, None, None, None, False
        self.processes.clear()
        self.sessions.append(Session(token=event.token, started_s=event.time_s, ended_s=event.time_s))

    def _replanned(self, event: Replanned | Probed) -> None:
        """Another plan from now on. Of what was measured beside it, its figures are why it was not chosen."""
        self.notes.append(Noted(time_s=event.time_s, text=event.text))
        rejected = list(self.start.rejected)
        if isinstance(event, Probed):
            names = {row["name"].partition(" ")[0] for row in event.rows}
            left = [item for item in rejected if item.get("strategy") not in names]
            others = [row for row in event.rows if row["name"] != event.name]
            rejected = [{"plan": row["name"], "reason": event.told(row)} for row in others] + left
        self.start = replace(self.start, plan=event.plan, rejected=rejected)
        self.measured.clear()

    def _close_start(self) -> None:
        """Count a session that never formed as start-up."""
        if self.sessions and not self.formed:
            self.start_s += self.sessions[-1].ended_s - self.sessions[-1].started_s

    def _formed(self, event: Formed) -> None:
        lost = [step for step in self.steps if step > event.step]
        self.recovery_s += sum(self.steps.pop(step).step_s for step in lost)
        for step in [step for step in self.evaluations if step > event.step]:
            del self.evaluations[step]
        self.stale = [item for item in self.stale if item.step <= event.step]
        self.steps_lost += max(event.steps_lost, len(lost))
        if self.formed:
            self.recoveries.append(Recovery(formed=event, failure=self.cause))
            self.recovery_s += event.seconds
        else:
            self.start_s += event.time_s - self.sessions[-1].started_s if self.sessions else event.seconds
            if event.source == "checkpoint" or event.step:
                self.resumes.append(event)
        self.formed, self.cause, self.waiting, self.step = True, None, None, event.step
        self.nodes = event.nodes

    def _stepped(self, event: Steps) -> None:
        self.waiting = None
        norms = event.gradient_norm or [None] * len(event.step)
        rows = zip(
            event.step, event.loss, event.learning_rate, norms, event.samples, event.step_s, event.wait_s, strict=True
        )
        for step, loss, rate, norm, samples, step_s, wait_s in rows:
            self.step = step
            self.steps[step] = StepRecord(
                step=step,
                epoch=epoch_of(step, self.start.steps_per_epoch),
                loss=loss,
                learning_rate=rate,
                gradient_norm=norm,
                samples=samples,
                step_s=step_s,
                wait_s=wait_s,
                generation=event.generation,
            )

    def state(self, owner_alive: bool) -> State:
        """What the events say of the state."""
        if self.end is not None:
            return _OUTCOMES.get(self.end.outcome, "failed")
        return "running" if owner_alive else "interrupted"

    def totals(self) -> Totals:
        """Where the time went so far."""
        start_s = self.start_s
        if self.sessions and not self.formed:
            start_s += self.sessions[-1].ended_s - self.sessions[-1].started_s
        wall_s = sum(session.ended_s - session.started_s for session in self.sessions)
        data_s = sum(record.wait_s for record in self.steps.values() if math.isfinite(record.wait_s))
        computing_s = sum(record.step_s for record in self.steps.values()) - data_s
        checkpoint_s = self.kept_s + sum(item.blocked_s for item in self.checkpoints.values())
        parts_s = computing_s + data_s + start_s + self.recovery_s + checkpoint_s + self.evaluation_s
        return Totals(
            wall_s=max(wall_s, parts_s),
            computing_s=computing_s,
            data_s=data_s,
            start_s=start_s,
            recovery_s=self.recovery_s,
            checkpoint_s=checkpoint_s,
            evaluation_s=self.evaluation_s,
            other_s=max(wall_s - parts_s, 0.0),
        )

    def history(self, state: State) -> History:
        """What has been folded so far."""
        return History(
            start=self.start, state=state, step=self.step, steps_lost=self.steps_lost, prefetch=self.prefetch,
            records=tuple(self.steps[step] for step in sorted(self.steps)),
            evaluated=tuple(self.evaluations[step] for step in sorted(self.evaluations)),
            failures=tuple(self.failures), recoveries=tuple(self.recoveries), resumes=tuple(self.resumes),
            checkpoints=tuple(self.checkpoints.values()), skipped=tuple(self.skipped), notes=tuple(self.notes),
            nodes=self.nodes, processes=tuple(self.processes[worker] for worker in sorted(self.processes)),
            sessions=tuple(self.sessions), measured=tuple(self.measured), stale=tuple(self.stale),
            waiting=self.waiting, error=self.end.error if self.end else "", judged=self.judged,
            totals=self.totals(), last_s=self.last_s,
        )  # fmt: skip
