"""A run's events folded one by one into what its readers need; it can be stored in between, and goes on from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
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
from trainwright.storage.run_records import MOST_ROWS, DriverSession, Recovery, StepTable, TimeTotals, staleness_of

_EventKind = TypeVar("_EventKind", bound=Event)
RunState = Literal["running", "done", "stopped", "failed", "interrupted"]
STATE_BY_OUTCOME: dict[str, RunState] = {"done": "done", "stopped": "stopped", "failed": "failed"}
_MOST_MEASUREMENTS = 2_000  # measurements, and reports of staleness
_FORMAT = 1  # of stored facts; another number where the same events fold to something else
_SINGLE = ("start", "prefetch", "probed", "waiting", "end", "judged", "cause")
_LISTS = ("failures", "resumes", "skipped", "notes", "measured", "stale")
_NUMBERS = (
    "step", "told", "steps_lost", "start_s", "recovery_s", "checkpoint_s", "evaluation_s", "last_s", "formed",
)  # fmt: skip


def epoch_of(step: int, steps_per_epoch: int) -> int:
    """Epoch, from 1, that completed step `step` belongs to."""
    return (max(step, 1) - 1) // steps_per_epoch + 1 if steps_per_epoch > 0 else 1


class RunSummary:
    """Takes events one by one. Old steps are merged (`StepTable`), so that a long run takes no more memory.

    Of more than 2,000 measurements every second one is dropped, and older reports of staleness are added up. All other
    events that a report tells of are kept.

    Args:
        most_rows: of steps; None keeps each step.

    Attributes:
        told: the newest step that the last event of steps told of, 0 for none.
        probed: how plans were measured, where they were.
    """

    def __init__(self, most_rows: int | None = MOST_ROWS) -> None:
        self._most_rows = most_rows
        self.start = RunStarted()
        self.steps = StepTable(most_rows)
        self.evaluations: dict[int, Evaluated] = {}
        self.failures: list[Failed] = []
        self.recoveries: list[Recovery] = []
        self.resumes: list[Formed] = []
        self.skipped: list[CheckpointSkipped] = []
        self.notes: list[Noted] = []
        self.nodes: Mapping[str, str] = {}
        self.processes: dict[int, Placed] = {}
        self.sessions: list[DriverSession] = []
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
        self.start_s = self.recovery_s = self.last_s = self.evaluation_s = 0.0
        self.checkpoint_s = 0.0  # that steps lost to checkpoints and to copies in memory

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
                if len(self.measured) > _MOST_MEASUREMENTS:
                    self.measured = self.measured[::-2][::-1]
            case Evaluated():
                self.evaluations[event.step] = event
                self.evaluation_s += event.seconds
            case Checkpointed() | Kept():
                self.checkpoint_s += event.blocked_s
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
                self._aged(event)
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
            self.sessions[-1] = DriverSession(
                token=last.token, started_s=last.started_s, ended_s=ended_s, outcome=outcome
            )

    def _started(self, event: RunStarted) -> None:
        if event.fresh:
            told = self.told
            self.__dict__.update(RunSummary(self._most_rows).__dict__)
            self.told = told
        self._close_start()
        if event.plan != self.start.plan:
            self.measured.clear()
        self.start, self.end, self.waiting, self.cause, self.formed = event, None, None, None, False
        self.processes.clear()
        self.sessions.append(DriverSession(token=event.token, started_s=event.time_s, ended_s=event.time_s))

    def _replanned(self, event: Replanned | Probed) -> None:
        """Another plan from now on. Of what was measured beside it, its figures are why it was not chosen."""
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

    def _close_start(self) -> None:
        """Count a session that never formed as start-up."""
        if self.sessions and not self.formed:
            self.start_s += self.sessions[-1].ended_s - self.sessions[-1].started_s

    def _formed(self, event: Formed) -> None:
        lost, seconds = self.steps.cut(event.step)
        self.recovery_s += seconds
        for step in [step for step in self.evaluations if step > event.step]:
            del self.evaluations[step]
        self.stale = [item for item in self.stale if item.step <= event.step]
        self.steps_lost += max(event.steps_lost, lost)
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
        self.steps.add(event, [epoch_of(step, self.start.steps_per_epoch) for step in event.step])
        if event.step:
            self.step = self.told = event.step[-1]

    def _aged(self, event: Stale) -> None:
        self.stale.append(event)
        if len(self.stale) > _MOST_MEASUREMENTS:
            old, self.stale = self.stale[: _MOST_MEASUREMENTS // 2], self.stale[_MOST_MEASUREMENTS // 2 :]
            sums = staleness_of(old)
            counts = [[age, count] for age, count in sorted(sums.counts.items())]
            self.stale.insert(0, replace(old[-1], counts=counts, dropped=sums.dropped, again=sums.again))

    def state(self, owner_alive: bool) -> RunState:
        """What the events say of the state."""
        if self.end is not None:
            return STATE_BY_OUTCOME.get(self.end.outcome, "failed")
        return "running" if owner_alive else "interrupted"

    def totals(self) -> TimeTotals:
        """Where the time went so far."""
        start_s = self.start_s
        if self.sessions and not self.formed:
            start_s += self.sessions[-1].ended_s - self.sessions[-1].started_s
        wall_s = sum(session.ended_s - session.started_s for session in self.sessions)
        data_s = self.steps.waited_s
        computing_s = self.steps.seconds - data_s
        parts_s = computing_s + data_s + start_s + self.recovery_s + self.checkpoint_s + self.evaluation_s
        return TimeTotals(
            wall_s=max(wall_s, parts_s),
            computing_s=computing_s,
            data_s=data_s,
            start_s=start_s,
            recovery_s=self.recovery_s,
            checkpoint_s=self.checkpoint_s,
            evaluation_s=self.evaluation_s,
            other_s=max(wall_s - parts_s, 0.0),
        )

    # --- storage ------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """All of it as JSON holds it."""
        return {
            "format": _FORMAT,
            "steps": self.steps.facts(),
            "evaluations": [event.to_json() for event in self.evaluations.values()],
            "recoveries": [[r.formed.to_json(), r.failure.to_json() if r.failure else None] for r in self.recoveries],
            "sessions": [asdict(session) for session in self.sessions],
            "processes": [event.to_json() for event in self.processes.values()],
            "nodes": dict(self.nodes),
            **{name: [event.to_json() for event in getattr(self, name)] for name in _LISTS},
            **{name: event.to_json() if (event := getattr(self, name)) else None for name in _SINGLE},
            **{name: getattr(self, name) for name in _NUMBERS},
        }

    @property
    def brief(self) -> RunSummary:
        """What a list of runs shows, and no more: the newest step and evaluation.

        It goes on like the whole one until steps before `exact_from` are lost.
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
        found.last_s, found.sessions = self.last_s, self.sessions[-1:]
        return found

    @property
    def exact_from(self) -> int:
        """The oldest step to which a brief one can be taken back."""
        return max([self.steps.last, *self.evaluations])

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """What gave these facts. Raises KeyError, TypeError or ValueError for anything else."""
        if facts["format"] != _FORMAT:
            raise ValueError("of another version")
        found = cls()
        found.steps = StepTable.of(facts["steps"])
        found.evaluations = {event.step: event for event in _events(facts["evaluations"], Evaluated)}
        found.processes = {event.worker: event for event in _events(facts["processes"], Placed)}
        found.sessions = [DriverSession(**escape_control_characters(session)) for session in facts["sessions"]]
        found.nodes = escape_control_characters(dict(facts["nodes"]))
        for formed, failure in facts["recoveries"]:
            cause = _events([failure], Failed)[0] if failure else None
            found.recoveries.append(Recovery(formed=_events([formed], Formed)[0], failure=cause))
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
        raise ValueError(f"an event is no {kind.__name__}")
    return found
