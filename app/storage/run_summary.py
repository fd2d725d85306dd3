"""The summary of a run's events, which readers need instead of all events, and the records that it consists of.

Events are added one by one. A summary can be stored as JSON and continued from there later. Its table of steps has a
bounded number of rows: the newest steps one by one, older ones merged.
"""

from __future__ import annotations

import base64
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt

from trainwright.core import formatting
from trainwright.core.data import NoiseScale
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
    MemoryMeasured,
    Noted,
    Placed,
    Prefetched,
    Probed,
    Promoted,
    Replanned,
    RunEnded,
    RunStarted,
    Stacks,
    Stale,
    Steps,
    Straggling,
    TraceWritten,
    Waiting,
    from_json,
)
from trainwright.core.topology import StalenessCounts

MOST_ROWS = 8192
_RECENT, _OLD = 1024, 4096  # newest rows, never merged; most rows of older steps after a merge
_TYPES = {
    "first": "q", "step": "q", "count": "q", "epoch": "q", "loss": "d", "learning_rate": "d", "gradient_norm": "d",
    "samples": "q", "step_s": "d", "wait_s": "d", "generation": "q", "typical_s": "d",
}  # fmt: skip
_SUMS = ("count", "samples", "step_s", "wait_s")  # added up where rows are merged


_LOGGED = "logged/"  # begins the names of the columns of logged values, which are of type "d"


class StepTable:
    """Columns of completed steps, in order of steps; about 100 bytes a row.

    Besides those of `_TYPES` there is a column for each value of `tw.log`, NaN in a step that did not log it.

    With more than `most_rows` rows, all but the newest 1,024 are merged with their neighbours. A merged row has the
    sums of samples and seconds, the means of losses, rates, gradient norms and logged values, and the seconds of one of
    its steps, for medians. The contents depend only on the added steps, not on when the table was stored.

    Args:
        most_rows: limit of rows; None keeps one row for each step.
    """

    def __init__(self, most_rows: int | None = MOST_ROWS) -> None:
        self._most_rows, self._width = most_rows, 1
        self._columns: dict[str, array[Any]] = {name: array(kind) for name, kind in _TYPES.items()}

    def __len__(self) -> int:
        return len(self._columns["step"])

    def column(self, name: str) -> Sequence[Any]:
        """Return one column, by the names of `StepRecord`; a missing gradient norm is NaN."""
        return self._columns[name]

    @property
    def logged(self) -> dict[str, Sequence[float]]:
        """The columns of logged values, by their names."""
        return {name.removeprefix(_LOGGED): self._columns[name] for name in self._columns if name not in _TYPES}

    @property
    def last(self) -> int:
        """The newest step; 0 before the first."""
        return int(self._columns["step"][-1]) if len(self) else 0

    @property
    def records(self) -> tuple[StepRecord, ...]:
        """All rows."""
        names = [name for name in _TYPES if name != "first"]
        rows = zip(*(self._columns[name] for name in names), strict=True)
        records = [dict(zip(names, row, strict=True)) for row in rows]
        logged = self.logged
        for place, row in enumerate(records):
            row["gradient_norm"] = None if math.isnan(row["gradient_norm"]) else row["gradient_norm"]
            row["logged"] = {name: values[place] for name, values in logged.items()}
        return tuple(StepRecord(**row) for row in records)

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        return math.fsum(self._columns["step_s"])

    @property
    def waited_s(self) -> float:
        """Seconds that steps waited for data, where they report it."""
        return math.fsum(value for value in self._columns["wait_s"] if math.isfinite(value))

    # --- changes ------------------------------------------------------------------------------------------

    def add(self, event: Steps, epochs: Sequence[int]) -> None:
        """Add steps. A step that exists is replaced; one that is part of a merged row is ignored."""
        if not event.step:
            return
        norms = event.gradient_norm or [None] * len(event.step)
        columns: dict[str, Sequence[Any]] = {
            "first": event.step, "step": event.step, "count": [1] * len(event.step), "epoch": epochs,
            "loss": event.loss, "learning_rate": event.learning_rate,
            "gradient_norm": [math.nan if norm is None else norm for norm in norms], "samples": event.samples,
            "step_s": event.step_s, "wait_s": event.wait_s, "generation": [event.generation] * len(event.step),
            "typical_s": event.step_s, **{_LOGGED + name: values for name, values in event.logged.items()},
        }  # fmt: skip
        if any(len(values) != len(event.step) for values in columns.values()):
            raise ValueError(f"an event of steps {event.step[0]} to {event.step[-1]} has columns of unequal lengths")
        added, row_count = len(event.step), len(self)
        for name in columns:
            if name not in self._columns:
                self._columns[name] = array("d", [math.nan]) * row_count
        for name, column in self._columns.items():
            column.extend(columns.get(name) or [math.nan] * added)
        if any(earlier >= later for earlier, later in pairwise(self._columns["step"][-added - 1 :])):
            self._replace(len(self) - added)
        if self._most_rows is not None and len(self) > self._most_rows:
            self._merge()

    def cut(self, step: int) -> tuple[int, float]:
        """Remove the steps after `step`. Returns their number and seconds.

        A merged row that contains `step` keeps a proportional share of its sums.
        """
        columns = self._columns
        start = bisect_right(columns["step"], step)
        count, seconds = sum(columns["count"][start:]), math.fsum(columns["step_s"][start:])
        if start < len(self) and columns["first"][start] <= step:
            first, last = columns["first"][start], columns["step"][start]
            share = (step - first + 1) / (last - first + 1)
            columns["step"][start] = step
            for name in ("count", "samples"):
                columns[name][start] = max(1, round(columns[name][start] * share))
            for name in ("step_s", "wait_s"):
                columns[name][start] *= share
            count, seconds = count - columns["count"][start], seconds - columns["step_s"][start]
            start += 1
        for column in columns.values():
            del column[start:]
        return count, seconds

    def _replace(self, new: int) -> None:
        """Sort the rows from place `new` on into the table; they replace older rows of the same step."""
        columns = self._columns
        merged = [(columns["first"][row], columns["step"][row]) for row in range(new) if columns["count"][row] > 1]
        places: dict[int, int] = {}
        for row, step in enumerate(columns["step"]):
            if row < new or not any(first <= step <= last for first, last in merged):
                places[step] = row
        order = [places[step] for step in sorted(places)]
        for name, column in columns.items():
            self._columns[name] = array(column.typecode, [column[row] for row in order])

    def _merge(self) -> None:
        """Merge the older rows, `width` steps each; double the width where there would be too many rows."""
        old = len(self) - _RECENT
        groups = self._groups(old)
        while len(groups) > _OLD:
            self._width *= 2
            fewer = self._groups(old)
            groups = fewer if len(fewer) < len(groups) else self._groups(old, separate_waits=False)
        merge_start = next((row for row, group in enumerate(groups) if group.stop - group.start > 1), len(groups))
        for name, merged in self._merged(groups[merge_start:]).items():
            self._columns[name][merge_start:old] = merged

    def _groups(self, old: int, *, separate_waits: bool = True) -> list[slice]:
        """Return the rows to merge: neighbours of `width` steps together.

        With `separate_waits`, all rows of a group have waiting times, or none: a mixed group has no known mean.
        """
        counts, waits = self._columns["count"], self._columns["wait_s"]
        groups, start, step_count = list[slice](), 0, 0
        for row in range(old):
            mixed = separate_waits and row > start and math.isfinite(waits[row]) != math.isfinite(waits[start])
            if mixed or step_count >= self._width:
                groups.append(slice(start, row))
                start, step_count = row, 0
            step_count += counts[row]
        return [*groups, slice(start, old)]

    def _merged(self, groups: Sequence[slice]) -> dict[str, array[Any]]:
        """Return the columns of the merged rows. With numpy: a run may log hundreds of values."""
        start, stop = groups[0].start, groups[-1].stop
        first = np.array([group.start - start for group in groups])
        size = np.array([group.stop - group.start for group in groups])
        last = first + size - 1
        columns = {name: np.array(column[start:stop]) for name, column in self._columns.items()}
        # A pseudo-random one of them: with a fixed place, regularly slow steps could distort the medians.
        typical = first + columns["step"][last] * 40_503 % 65_537 % size
        places = {"first": first, "step": last, "epoch": last, "generation": last, "typical_s": typical}
        merged_columns = {}
        for name, values in columns.items():
            if name in places:
                merged = values[places[name]]
            elif name in _SUMS:
                merged = np.add.reduceat(values, first)
            else:
                merged = np.where(size == 1, values[first], _means(values, columns["count"], first))
            merged_columns[name] = array(_TYPES.get(name, "d"), merged.tobytes())
        return merged_columns

    # --- storage ------------------------------------------------------------------------------------------

    def facts(self, newest: int | None = None) -> dict[str, Any]:
        """Return the table, or its newest rows, as JSON values."""
        start = 0 if newest is None else max(0, len(self) - newest)
        return {"width": self._width, **{name: _encoded(column[start:]) for name, column in self._columns.items()}}

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """Rebuild a table from its `facts`. Raises KeyError, TypeError or ValueError for anything else."""
        table = cls()
        table._width = int(facts["width"])
        kinds = {**_TYPES, **{name: "d" for name in facts if name.startswith(_LOGGED)}}
        table._columns = {name: _decoded(facts[name], kind) for name, kind in kinds.items()}
        if len({len(column) for column in table._columns.values()}) > 1:
            raise ValueError("columns of unequal lengths")
        return table


def _encoded(column: array[Any]) -> str:
    """Return a column as base64 of little-endian numbers. As JSON, millions of numbers stop all threads for seconds."""
    return base64.b64encode(np.array(column, f"<{column.typecode}").tobytes()).decode()


def _decoded(text: str, kind: str) -> array[Any]:
    """Return the column that `_encoded` made a text of. Raises TypeError or ValueError for anything else."""
    return array(kind, np.frombuffer(base64.b64decode(text, validate=True), f"<{kind}").astype(kind).tobytes())


def _means(
    values: npt.NDArray[np.float64], counts: npt.NDArray[np.int64], first: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return the weighted means of the finite values of groups that begin at `first`; NaN where there is none."""
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore", over="ignore"):  # 0 / 0 is NaN
        sums = np.add.reduceat(np.where(finite, values, 0.0) * counts, first)
        return sums / np.add.reduceat(np.where(finite, counts, 0), first)


# --- records ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One completed step; in a long run also several older steps with sums of samples and seconds, and means."""

    step: int  # number of the step, from 1; the last of several
    epoch: int  # from 1
    loss: float
    learning_rate: float
    gradient_norm: float | None  # global norm before clipping; None when the job does not clip
    samples: int  # real samples in the global batch
    step_s: float
    wait_s: float  # part of it that waited for data; NaN where it is not reported (`core.events.Steps`)
    generation: int  # rendezvous epoch in which the step was made, within its driver
    count: int
    typical_s: float  # duration of one of the steps, for medians
    # values of `tw.log` by name; NaN where the step did not log it
    logged: Mapping[str, float] = field(default_factory=dict)

    @property
    def samples_per_s(self) -> float:
        """Samples of the global batch per second of the step; NaN where the step took no time."""
        return self.samples / self.step_s if self.step_s > 0 else math.nan


@dataclass(frozen=True, kw_only=True)
class _DriverSession:
    """The session of one driver: from acquiring the run to releasing it, or to its last event."""

    token: int
    started_s: float
    ended_s: float
    outcome: str = ""


@dataclass(frozen=True, kw_only=True)
class RecoveryRecord:
    """A rendezvous after a failure. Times are in seconds since the epoch, 0 where they are not known."""

    formed: Formed
    failure: Failed | None = None  # the first cause; None where no cause was reported
    arrivals: tuple[Placed | Promoted, ...] = ()  # processes that started or took a rank before the rendezvous
    last_step_s: float = 0.0  # when the driver heard of the last step before the failure
    first_step_s: float = 0.0  # end of the first step after it


@dataclass(frozen=True, kw_only=True)
class TimeTotals:
    """Where the time of all sessions went, in seconds. The parts add up to `wall_s`."""

    wall_s: float = 0.0  # all sessions; time between two sessions is not counted
    computing_s: float = 0.0  # steps that count, without waiting for data where that is reported
    data_s: float = 0.0  # waiting for data in steps that count
    start_s: float = 0.0  # from acquiring the run to the first rendezvous, in every session
    recovery_s: float = 0.0  # from each failure to the next rendezvous, and repeated steps
    checkpoint_s: float = 0.0  # time that steps waited for checkpoints and in-memory checkpoints
    evaluation_s: float = 0.0
    other_s: float = 0.0

    @property
    def goodput(self) -> float:
        """Share of the time that computed steps that count; NaN before any time passed."""
        return self.computing_s / self.wall_s if self.wall_s > 0 else math.nan


@dataclass(kw_only=True)
class _TimeAccount:
    """Sessions of drivers, and seconds of them by what they were spent on; see `TimeTotals`."""

    sessions: list[_DriverSession] = field(default_factory=list)
    start_s: float = 0.0
    recovery_s: float = 0.0
    checkpoint_s: float = 0.0
    evaluation_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """Seconds of all sessions."""
        return sum(session.ended_s - session.started_s for session in self.sessions)

    def extend_session(self, event: Event) -> None:
        """Let the newest session last at least until an event."""
        if self.sessions:
            last = self.sessions[-1]
            outcome = event.outcome if isinstance(event, RunEnded) else last.outcome
            self.sessions[-1] = replace(last, ended_s=max(last.ended_s, event.time_s), outcome=outcome)

    def start_up_s(self, *, formed: bool) -> float:
        """Return the seconds of start-up. A newest session without a rendezvous (`formed`) counts as start-up."""
        if formed or not self.sessions:
            return self.start_s
        return self.start_s + self.sessions[-1].ended_s - self.sessions[-1].started_s

    def totals(self, steps: StepTable, *, formed: bool) -> TimeTotals:
        """Return where the time of all sessions went so far."""
        wall_s = self.wall_s
        parts_s = {
            "data_s": steps.waited_s,
            "computing_s": steps.seconds - steps.waited_s,
            "start_s": self.start_up_s(formed=formed),
            "recovery_s": self.recovery_s,
            "checkpoint_s": self.checkpoint_s,
            "evaluation_s": self.evaluation_s,
        }
        spent_s = sum(parts_s.values())
        return TimeTotals(wall_s=max(wall_s, spent_s), other_s=max(wall_s - spent_s, 0.0), **parts_s)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """Rebuild an account from its `asdict`, which may have other keys too. Raises KeyError or TypeError."""
        values = {item.name: facts[item.name] for item in fields(cls)}
        sessions = [_DriverSession(**escape_control_characters(session)) for session in facts["sessions"]]
        return cls(**{**values, "sessions": sessions})


def noise_of(event: Measured) -> NoiseScale | None:
    """Return the gradient noise scale of an event; None where it is not known."""
    if not event.noise:
        return None
    told = dict(event.noise)
    return NoiseScale(count=int(told.pop("count")), **told)


def staleness_of(events: Iterable[Stale]) -> StalenessCounts:
    """Return the staleness counts of all events together."""
    whole = StalenessCounts()
    for event in events:
        counts = {int(age): int(count) for age, count in event.counts}
        unit: Literal["updates", "steps"] = "steps" if event.unit == "steps" else "updates"
        whole += StalenessCounts(counts=counts, unit=unit, dropped=event.dropped, again=event.again)
    return whole


def staleness_text(staleness: StalenessCounts) -> str:
    """`mean 6.8 updates, at most 19; 3 pushes dropped, 2 units handed out again`; empty without pushes."""
    if not staleness.counts:
        return ""
    most = max(staleness.counts)
    return (
        f"mean {staleness.mean:.1f} {staleness.unit}, at most {most}; "
        f"{staleness.dropped:,} {'push' if staleness.dropped == 1 else 'pushes'} dropped, "
        f"{formatting.count(staleness.again, 'unit')} handed out again"
    )


# --- The summary ------------------------------------------------------------------------------------------------------


_EventKind = TypeVar("_EventKind", bound=Event)
RunState = Literal["running", "done", "stopped", "failed", "interrupted"]
STATE_BY_OUTCOME: dict[str, RunState] = {"done": "done", "stopped": "stopped", "failed": "failed"}
_MOST_MEASUREMENTS = 2_000  # measurements; also reports of staleness
_MOST_LINES, _MOST_ARRIVALS = 200, 32
_FORMAT = 6  # of stored facts; increased where the same events give another summary
_SINGLE = ("start", "prefetch", "probed", "waiting", "end", "judged", "cause", "memory")
_LISTS = ("failures", "resumes", "skipped", "notes", "measured", "stale", "newest", "arrivals")
_NUMBERS = ("step", "told", "steps_lost", "last_s", "formed", "workers", "last_step_s")
_NO_LINE = (Steps, Kept, Measured, Prefetched, Stale, Stacks, MemoryMeasured)


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
        memory: the newest peaks of memory of the newest plan; None where no device reported one.
        traces: written traces of steps, by path.
        judged: the newest comparison of students with their teachers; None where there is none.
        formed: whether the current session had a rendezvous.
        cause: the first failure since the newest rendezvous.
        arrivals: processes that started or took a rank since that failure, at most 32: the first ones and the newest.
        newest: the newest 200 events that `logs` has a line for, without steps, in-memory checkpoints and measurements.
        last_step_s: when the driver heard of the newest step before that failure.
        workers: at the newest rendezvous, without servers.
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
        self.time = _TimeAccount()
        self.prefetch: Prefetched | None = None
        self.probed: Probed | None = None
        self.measured: list[Measured] = []
        self.waiting: Waiting | None = None
        self.end: RunEnded | None = None
        self.stale: list[Stale] = []
        self.judged: Judged | None = None
        self.memory: MemoryMeasured | None = None
        self.traces: dict[str, TraceWritten] = {}
        self.formed = False
        self.cause: Failed | None = None
        self.arrivals: list[Placed | Promoted] = []
        self.newest: list[Event] = []
        self.last_step_s = 0.0
        self.step = self.told = self.steps_lost = self.workers = 0
        self.last_s = 0.0

    def add(self, event: Event) -> None:
        """Add one event."""
        self.last_s = max(self.last_s, event.time_s)
        self._add(event)
        if not isinstance(event, _NO_LINE):
            self.newest = [*self.newest[1 - _MOST_LINES :], _short(event)]

    def _add(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._started(event)
            case Waiting():
                self.waiting = event
            case Placed() | Promoted():
                self._arrived(event)
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
                if isinstance(event, Joined) and self.cause is not None and event.rank == self.cause.rank:
                    self.cause, self.arrivals = None, []  # nobody waited for it
            case Noted():
                self.notes.append(event)
            case MemoryMeasured():
                self.memory = event
            case TraceWritten():
                traces = {**self.traces, event.path: event}
                self.traces = dict(sorted(traces.items(), key=lambda item: (item[1].first, item[1].rank)))
            case Judged():
                self.judged = event
                return  # it comes after the session
            case RunEnded():
                self.end, self.waiting = event, None
        self.time.extend_session(event)

    def _started(self, event: RunStarted) -> None:
        if event.fresh:
            self.__dict__.update(RunSummary(self._most_rows).__dict__)
            self.last_s = event.time_s
        self.time.start_s = self.time.start_up_s(formed=self.formed)
        if event.plan != self.start.plan:
            self.measured.clear()
            self.memory = None
        self.start, self.end, self.waiting, self.cause, self.formed = event, None, None, None, False
        self.processes.clear()
        self.arrivals, self.last_step_s = [], 0.0
        self.time.sessions.append(_DriverSession(token=event.token, started_s=event.time_s, ended_s=event.time_s))

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
        self.memory = None

    def _formed(self, event: Formed) -> None:
        lost, seconds = self.steps.cut(event.step)
        self.time.recovery_s += seconds
        for step in [step for step in self.evaluations if step > event.step]:
            del self.evaluations[step]
        self.stale = [item for item in self.stale if item.step <= event.step]
        self.steps_lost += max(event.steps_lost, lost)
        if self.formed:
            self.recoveries.append(
                RecoveryRecord(
                    formed=event, failure=self.cause, arrivals=tuple(self.arrivals), last_step_s=self.last_step_s
                )
            )
            self.time.recovery_s += event.seconds
        else:
            sessions = self.time.sessions
            self.time.start_s += event.time_s - sessions[-1].started_s if sessions else event.seconds
            if event.source == "checkpoint" or event.step:
                self.resumes.append(event)
        self.formed, self.cause, self.waiting, self.step = True, None, None, event.step
        self.arrivals, self.last_step_s = [], 0.0
        self.nodes, self.workers = event.nodes, event.workers

    def _arrived(self, event: Placed | Promoted) -> None:
        if isinstance(event, Placed):
            self.processes[event.worker] = event
        elif event.worker in self.processes:
            self.processes[event.worker] = replace(self.processes[event.worker], spare=False)
        if self.cause is not None:
            self.arrivals = [*self.arrivals[: _MOST_ARRIVALS - 1], event]

    def _add_steps(self, event: Steps) -> None:
        self.waiting = None
        if event.step and self.cause is None:
            self._time_first_step(event)
            self.last_step_s = event.time_s
        self.steps.add(event, [epoch_of(step, self.start.steps_per_epoch) for step in event.step])
        if event.step:
            self.step = self.told = event.step[-1]

    def _time_first_step(self, event: Steps) -> None:
        """Note when the first step after the newest recovery ended; an event has the time of its last step alone."""
        recovery = self.recoveries[-1] if self.recoveries else None
        if recovery is None or self.last_step_s or recovery.first_step_s:
            return
        sessions = self.time.sessions
        if recovery.formed.time_s >= (sessions[-1].started_s if sessions else 0.0):
            end_s = max(event.time_s - math.fsum(event.step_s[1:]), recovery.formed.time_s)
            self.recoveries[-1] = replace(recovery, first_step_s=end_s)

    def _add_staleness(self, event: Stale) -> None:
        self.stale.append(event)
        if len(self.stale) > _MOST_MEASUREMENTS:
            old, self.stale = self.stale[: _MOST_MEASUREMENTS // 2], self.stale[_MOST_MEASUREMENTS // 2 :]
            sums = staleness_of(old)
            counts = [[age, count] for age, count in sorted(sums.counts.items())]
            self.stale.insert(0, replace(old[-1], counts=counts, dropped=sums.dropped, again=sums.again))

    @property
    def ordered_evaluations(self) -> tuple[Evaluated, ...]:
        """The last evaluation of each step, in order of steps."""
        return tuple(event for _, event in sorted(self.evaluations.items()))

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
            "recoveries": [_recovery_facts(recovery) for recovery in self.recoveries],
            **asdict(self.time),
            "processes": [event.to_json() for event in self.processes.values()],
            "traces": [event.to_json() for event in self.traces.values()],
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
        found.traces = {event.path: event for event in _events(facts["traces"], TraceWritten)}
        found.time = _TimeAccount.of(facts)
        found.nodes = escape_control_characters(dict(facts["nodes"]))
        found.recoveries = [_recovery(each) for each in facts["recoveries"]]
        for name in _LISTS:
            setattr(found, name, _events(facts[name], Event))
        for name in _SINGLE:
            setattr(found, name, from_json(facts[name]) if facts[name] else None)
        for name in _NUMBERS:
            setattr(found, name, facts[name])
        return found


def _short(event: Event) -> Event:
    """Return the event without what only the report of the run needs: of a driver's start, its first line is left."""
    if isinstance(event, RunStarted):
        return replace(event, job={}, plan={}, rejected=[], timeline="", versions={}, dashboard={})
    if isinstance(event, Judged):
        return replace(event, verdict={})
    return replace(event, detail="") if isinstance(event, Failed) else event


def _recovery_facts(recovery: RecoveryRecord) -> dict[str, Any]:
    return {
        "formed": recovery.formed.to_json(),
        "failure": recovery.failure.to_json() if recovery.failure else None,
        "arrivals": [event.to_json() for event in recovery.arrivals],
        "last_step_s": recovery.last_step_s,
        "first_step_s": recovery.first_step_s,
    }


def _recovery(facts: Mapping[str, Any]) -> RecoveryRecord:
    return RecoveryRecord(
        formed=_events([facts["formed"]], Formed)[0],
        failure=_events([facts["failure"]], Failed)[0] if facts["failure"] else None,
        arrivals=tuple(event for event in _events(facts["arrivals"], Event) if isinstance(event, Placed | Promoted)),
        last_step_s=facts["last_step_s"],
        first_step_s=facts["first_step_s"],
    )


def _events(lines: Sequence[str], kind: type[_EventKind]) -> list[_EventKind]:
    found = [event for event in map(from_json, lines) if isinstance(event, kind)]
    if len(found) < len(lines):
        raise ValueError(f"an event is not a {kind.__name__}")
    return found
