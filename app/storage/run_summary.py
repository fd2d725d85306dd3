"""The summary of a run's events, which readers need instead of all events.

Events are added one by one. A summary can be stored as JSON and continued from there later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, TypeVar

from trainwright.core.errors import escape_control_characters
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
    from_json,
)
from trainwright.storage.run_records import (
    MOST_ROWS,
    DriverSession,
    RecoveryRecord,
    StepTable,
    TimeAccount,
    TimeTotals,
    staleness_of,
)

_EventKind = TypeVar("_EventKind", bound=Event)
RunState = Literal["running", "done", "stopped", "failed", "interrupted"]
STATE_BY_OUTCOME: dict[str, RunState] = {"done": "done", "stopped": "stopped", "failed": "failed"}
_MOST_MEASUREMENTS = 2_000  # measurements; also reports of staleness
_FORMAT = 1  # of stored facts; increased where the same events give another summary
_SINGLE = ("start", "prefetch", "probed", "waiting", "end", "judged", "cause")
_LISTS = ("failures", "resumes", "skipped", "notes", "measured", "stale")
_NUMBERS = (
    "step", "told", "steps_lost", "last_s", "formed",
)  # fmt: skip


def epoch_of(step: int, steps_per_epoch: int) -> int:
    """Return the epoch, from 1, of the completed step `step`."""
    return (max(step, 1) - 1) // steps_per_epoch + 1 if steps_per_epoch > 0 else 1


class RunSummary:
    """Summarizes events, added one by one, in bounded memory.

    Old steps are merged (`StepTable`). Every second measurement is dropped when there are more than 2,000, and older
    reports of staleness are summed. All other events that reports show are kept.

    Args:
        most_rows: limit of rows for steps; None keeps each step.

    Attributes:
        start: the job, plan and versions of the newest driver, with the plan as it is now.
        time: sessions of drivers, and where their time went.
        steps: the completed steps. Steps lost in a failure are missing until they are repeated.
        evaluations: the last evaluation of each step.
        recoveries: every rendezvous after a failure.
        resumes: the first rendezvous of each session that started from a checkpoint or after step 0.
        nodes: the ranks on each node at the newest rendezvous; see `core.plan.ranks_by_node`.
        processes: the running workers, by number; a worker that replaces a failed one has a new number.
        prefetch: how far data is read ahead; None before the first segment has ended.
        probed: how plans were measured; None where they were not.
        measured: measured steps of the newest plan, in order of time.
        waiting: what the run waits for now; None while it steps.
        stale: staleness of the updates of asynchronous workers, in order of steps.
        judged: the newest comparison of students with their teachers; None where there is none.
        formed: whether the current session had a rendezvous.
        cause: the first failure since the newest rendezvous.
        told: the newest step of the newest `Steps` event; 0 for none.
        steps_lost: completed steps that had to be repeated.
        last_s: time of the newest event, in seconds since the epoch.
    """

    def __init__(self, most_rows: int | None = MOST_ROWS) -> None:
        self._most_rows = most_rows
        self.start = RunStarted()
        self.steps = StepTable(most_rows)
        self.evaluations: dict[int, Evaluated] = {}
        self.failures: list[Failed] = []
        self.recoveries: list[RecoveryRecord] = []
        self.resumes: list[Formed] = []
        self.skipped: list[CheckpointSkipped] = []
        self.notes: list[Noted] = []
        self.nodes: Mapping[str, str] = {}
        self.processes: dict[int, Placed] = {}
        self.time = TimeAccount()
        self.prefetch: Prefetched | None = None
        self.probed: Probed | None = None
        self.measured: list[Measured] = []
        self.waiting: Waiting | None = None
        self.end: RunEnded | None = None
        self.stale: list[Stale] = []
        self.judged: Judged | None = None
        self.formed = False
        self.cause: Failed | None = None
        self.step = self.told = self.steps_lost = 0
        self.last_s = 0.0

    def add(self, event: Event) -> None:
        """Add one event."""
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
                self._add_steps(event)
            case Prefetched():
                self.prefetch = event
            case Measured():
                self.measured.append(event)
                if len(self.measured) > _MOST_MEASUREMENTS:
                    self.measured = self.measured[::-2][::-1]
            case Evaluated():
                self.evaluations[event.step] = event
                self.time.evaluation_s += event.seconds
            case Checkpointed() | Kept():
                self.time.checkpoint_s += event.blocked_s
            case CheckpointSkipped():
                self.skipped.append(event)
            case Failed():
                self.failures.append(event)
                self.processes.pop(event.worker, None)
                self.cause = self.cause or event
            case Stacks() if self.failures:
                stack = f"stack of rank {event.rank} ({event.node}):\n{event.text}"
                last = self.failures[-1]
                self.failures[-1] = replace(last, detail="\n".join(part for part in (last.detail, stack) if part))
            case Replanned() | Probed():
                self._replanned(event)
            case Stale():
                self._add_staleness(event)
            case Leaving() | Straggling() | Joined():
                self.notes.append(Noted(time_s=event.time_s, text=event.text))
            case Noted():
                self.notes.append(event)
            case Judged():
                self.judged = event
                return  # it comes after the session
            case RunEnded():
                self.end, self.waiting = event, None
        self.time.extend_session(event)

    def _started(self, event: RunStarted) -> None:
        if event.fresh:
            told = self.told
            self.__dict__.update(RunSummary(self._most_rows).__dict__)
            self.told = told
        self.time.start_s = self.time.start_up_s(formed=self.formed)
        if event.plan != self.start.plan:
            self.measured.clear()
        self.start, self.end, self.waiting, self.cause, self.formed = event, None, None, None, False
        self.processes.clear()
        self.time.sessions.append(DriverSession(token=event.token, started_s=event.time_s, ended_s=event.time_s))

    def _replanned(self, event: Replanned | Probed) -> None:
        """Change the plan. Other measured plans become rejected ones, with their measured times as the reason."""
        self.notes.append(Noted(time_s=event.time_s, text=event.text))
        rejected = list(self.start.rejected)
        if isinstance(event, Probed):
            self.probed = event
            names = {row["name"].partition(" ")[0] for row in event.rows}
            left = [item for item in rejected if item.get("strategy") not in names]
            others = [row for row in event.rows if row["name"] != event.name]
            rejected = [{"plan": row["name"], "reason": event.told(row)} for row in others] + left
        self.start = replace(self.start, plan=event.plan, rejected=rejected)
        self.measured.clear()

    def _formed(self, event: Formed) -> None:
        lost, seconds = self.steps.cut(event.step)
        self.time.recovery_s += seconds
        for step in [step for step in self.evaluations if step > event.step]:
            del self.evaluations[step]
        self.stale = [item for item in self.stale if item.step <= event.step]
        self.steps_lost += max(event.steps_lost, lost)
        if self.formed:
            self.recoveries.append(RecoveryRecord(formed=event, failure=self.cause))
            self.time.recovery_s += event.seconds
        else:
            sessions = self.time.sessions
            self.time.start_s += event.time_s - sessions[-1].started_s if sessions else event.seconds
            if event.source == "checkpoint" or event.step:
                self.resumes.append(event)
        self.formed, self.cause, self.waiting, self.step = True, None, None, event.step
        self.nodes = event.nodes

    def _add_steps(self, event: Steps) -> None:
        self.waiting = None
        self.steps.add(event, [epoch_of(step, self.start.steps_per_epoch) for step in event.step])
        if event.step:
            self.step = self.told = event.step[-1]

    def _add_staleness(self, event: Stale) -> None:
        self.stale.append(event)
        if len(self.stale) > _MOST_MEASUREMENTS:
            old, self.stale = self.stale[: _MOST_MEASUREMENTS // 2], self.stale[_MOST_MEASUREMENTS // 2 :]
            sums = staleness_of(old)
            counts = [[age, count] for age, count in sorted(sums.counts.items())]
            self.stale.insert(0, replace(old[-1], counts=counts, dropped=sums.dropped, again=sums.again))

    def state(self, owner_alive: bool) -> RunState:
        """Return the state of the run by its events."""
        if self.end is not None:
            return STATE_BY_OUTCOME.get(self.end.outcome, "failed")
        return "running" if owner_alive else "interrupted"

    def totals(self) -> TimeTotals:
        """Return where the time of all sessions went so far."""
        return self.time.totals(self.steps, formed=self.formed)

    # --- storage ------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        return {
            "format": _FORMAT,
            "steps": self.steps.facts(),
            "evaluations": [event.to_json() for event in self.evaluations.values()],
            "recoveries": [[r.formed.to_json(), r.failure.to_json() if r.failure else None] for r in self.recoveries],
            **self.time.facts(),
            "processes": [event.to_json() for event in self.processes.values()],
            "nodes": dict(self.nodes),
            **{name: [event.to_json() for event in getattr(self, name)] for name in _LISTS},
            **{name: event.to_json() if (event := getattr(self, name)) else None for name in _SINGLE},
            **{name: getattr(self, name) for name in _NUMBERS},
        }

    @property
    def brief(self) -> RunSummary:
        """The part that a list of runs shows: the newest step and evaluation.

        More events can be added to it, until steps before `exact_from` are lost.
        """
        found = RunSummary()
        whole = self.start
        found.start = RunStarted(
            time_s=whole.time_s, run=whole.run, token=whole.token, total_steps=whole.total_steps,
            steps_per_epoch=whole.steps_per_epoch,
        )  # fmt: skip
        found.steps = StepTable.of(self.steps.facts(newest=1))
        found.evaluations = {step: self.evaluations[step] for step in sorted(self.evaluations)[-1:]}
        found.end, found.formed, found.step, found.told = self.end, self.formed, self.step, self.told
        found.last_s, found.time.sessions = self.last_s, self.time.sessions[-1:]
        return found

    @property
    def exact_from(self) -> int:
        """The oldest step to which a brief summary can go back."""
        return max([self.steps.last, *self.evaluations])

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """Rebuild a summary from its `facts`. Raises KeyError, TypeError or ValueError for anything else."""
        if facts["format"] != _FORMAT:
            raise ValueError("another format version")
        found = cls()
        found.steps = StepTable.of(facts["steps"])
        found.evaluations = {event.step: event for event in _events(facts["evaluations"], Evaluated)}
        found.processes = {event.worker: event for event in _events(facts["processes"], Placed)}
        found.time = TimeAccount.of(facts)
        found.nodes = escape_control_characters(dict(facts["nodes"]))
        for formed, failure in facts["recoveries"]:
            cause = _events([failure], Failed)[0] if failure else None
            found.recoveries.append(RecoveryRecord(formed=_events([formed], Formed)[0], failure=cause))
        for name in _LISTS:
            setattr(found, name, _events(facts[name], Event))
        for name in _SINGLE:
            setattr(found, name, from_json(facts[name]) if facts[name] else None)
        for name in _NUMBERS:
            setattr(found, name, facts[name])
        return found


def _events(lines: Sequence[str], kind: type[_EventKind]) -> list[_EventKind]:
    found = [event for event in map(from_json, lines) if isinstance(event, kind)]
    if len(found) < len(lines):
        raise ValueError(f"an event is not a {kind.__name__}")
    return found
