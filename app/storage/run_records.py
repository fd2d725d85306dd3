"""The completed steps of a run in a bounded number of rows: the newest one by one, older ones merged."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Self

from trainwright.core import formatting
from trainwright.core.data import NoiseScale
from trainwright.core.events import Failed, Formed, Measured, Stale, Steps
from trainwright.core.topology import StalenessCounts

MOST_ROWS = 8192
_RECENT, _OLD = 1024, 4096  # rows of one step that stay, and the most rows of older steps after a merge
_TYPES = {
    "first": "q", "step": "q", "count": "q", "epoch": "q", "loss": "d", "learning_rate": "d", "gradient_norm": "d",
    "samples": "q", "step_s": "d", "wait_s": "d", "generation": "q", "typical_s": "d",
}  # fmt: skip


class StepTable:
    """Columns of completed steps, in order of steps; at about 100 bytes a row.

    With more than `most_rows`, all but the newest 1,024 rows are merged with their neighbours. A merged row holds the
    sums of samples and seconds, the means of losses, learning rates and gradient norms, and the seconds of one of its
    steps, for medians. What the table holds depends on the steps that were added alone, not on when it was stored.

    Args:
        most_rows: None keeps each step as a row.
    """

    def __init__(self, most_rows: int | None = MOST_ROWS) -> None:
        self._most_rows, self._width = most_rows, 1
        self._columns: dict[str, array[Any]] = {name: array(kind) for name, kind in _TYPES.items()}

    def __len__(self) -> int:
        return len(self._columns["step"])

    def column(self, name: str) -> Sequence[Any]:
        """One column, by the names of `StepRecord`; a missing gradient norm is NaN."""
        return self._columns[name]

    @property
    def last(self) -> int:
        """The newest step; 0 before the first."""
        return int(self._columns["step"][-1]) if len(self) else 0

    @property
    def records(self) -> tuple[StepRecord, ...]:
        """All rows."""
        names = [name for name in _TYPES if name != "first"]
        rows = zip(*(self._columns[name] for name in names), strict=True)
        found = [dict(zip(names, row, strict=True)) for row in rows]
        for row in found:
            row["gradient_norm"] = None if math.isnan(row["gradient_norm"]) else row["gradient_norm"]
        return tuple(StepRecord(**row) for row in found)

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return math.fsum(self._columns["step_s"])

    @property
    def waited_s(self) -> float:
        """Seconds that steps waited for data, of those that tell it."""
        return math.fsum(value for value in self._columns["wait_s"] if math.isfinite(value))

    # --- changes ------------------------------------------------------------------------------------------

    def add(self, event: Steps, epochs: Sequence[int]) -> None:
        """Add steps; one that is there already is replaced, or where it is part of a merged row, left.

        Args:
            epochs: of each of the steps.
        """
        if not event.step:
            return
        norms = event.gradient_norm or [None] * len(event.step)
        found: dict[str, Sequence[Any]] = {
            "first": event.step, "step": event.step, "count": [1] * len(event.step), "epoch": epochs,
            "loss": event.loss, "learning_rate": event.learning_rate,
            "gradient_norm": [math.nan if norm is None else norm for norm in norms], "samples": event.samples,
            "step_s": event.step_s, "wait_s": event.wait_s, "generation": [event.generation] * len(event.step),
            "typical_s": event.step_s,
        }  # fmt: skip
        if any(len(values) != len(event.step) for values in found.values()):
            raise ValueError(f"an event of steps {event.step[0]} to {event.step[-1]} has columns of unequal lengths")
        for name, values in found.items():
            self._columns[name].extend(values)
        added = len(event.step)
        if any(one >= other for one, other in pairwise(self._columns["step"][-added - 1 :])):
            self._replace(len(self) - added)
        if self._most_rows is not None and len(self) > self._most_rows:
            self._merge()

    def cut(self, step: int) -> tuple[int, float]:
        """Forget the steps after `step`; returns how many these were, and their seconds.

        Of a row that is cut in two, a share of its sums is forgotten.
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
        """Put the rows from place `new` on where they belong, in place of older ones of the same step."""
        columns = self._columns
        merged = [(columns["first"][row], columns["step"][row]) for row in range(new) if columns["count"][row] > 1]
        places: dict[int, int] = {}
        for row, step in enumerate(columns["step"]):
            if row < new or not any(first <= step <= last for first, last in merged):
                places[step] = row
        order = [places[step] for step in sorted(places)]
        for name, column in columns.items():
            self._columns[name] = array(_TYPES[name], [column[row] for row in order])

    def _merge(self) -> None:
        """Merge the older rows into ones of as many steps, twice as many where there would be too many rows."""
        old = len(self) - _RECENT
        groups = self._groups(old)
        while len(groups) > _OLD:
            self._width *= 2
            groups = self._groups(old)
        alone = next((row for row, group in enumerate(groups) if group.stop - group.start > 1), len(groups))
        for name, values in self._merged(groups[alone:]).items():
            self._columns[name][alone:old] = array(_TYPES[name], values)

    def _groups(self, old: int) -> list[slice]:
        """Rows to be merged: neighbours of `width` steps together, which all tell of their waiting or do not."""
        counts, told = self._columns["count"], self._columns["wait_s"]
        groups, start, held = list[slice](), 0, 0
        for row in range(old):
            mixed = row > start and math.isfinite(told[row]) != math.isfinite(told[start])
            if mixed or held >= self._width:
                groups.append(slice(start, row))
                start, held = row, 0
            held += counts[row]
        return [*groups, slice(start, old)]

    def _merged(self, groups: Iterable[slice]) -> Mapping[str, list[Any]]:
        columns, found = self._columns, {name: list[Any]() for name in _TYPES}
        for group in groups:
            part = {name: column[group] for name, column in columns.items()}
            counts = part["count"]
            found["first"].append(part["first"][0])
            for name in ("step", "epoch", "generation"):
                found[name].append(part[name][-1])
            for name in ("count", "samples"):
                found[name].append(sum(part[name]))
            for name in ("step_s", "wait_s"):
                found[name].append(part[name][0] if len(counts) == 1 else math.fsum(part[name]))
            for name in ("loss", "learning_rate", "gradient_norm"):
                found[name].append(part[name][0] if len(counts) == 1 else _mean(part[name], counts))
            # Any of them, but not always one in the same place: every thousandth step may be a slow one.
            found["typical_s"].append(part["typical_s"][part["step"][-1] * 40_503 % 65_537 % len(counts)])
        return found

    # --- storage ------------------------------------------------------------------------------------------

    def facts(self, newest: int | None = None) -> dict[str, Any]:
        """The table, or its newest rows, as JSON holds it."""
        start = 0 if newest is None else max(0, len(self) - newest)
        return {"width": self._width, **{name: column[start:].tolist() for name, column in self._columns.items()}}

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """The table that gave these facts. Raises KeyError, TypeError or ValueError for anything else."""
        found = cls()
        found._width = int(facts["width"])
        found._columns = {name: array(kind, facts[name]) for name, kind in _TYPES.items()}
        if len({len(column) for column in found._columns.values()}) > 1:
            raise ValueError("columns of unequal lengths")
        return found


def _mean(values: Sequence[float], counts: Sequence[int]) -> float:
    """Of the finite ones, each counted so often; NaN where there is none."""
    finite = [(value, count) for value, count in zip(values, counts, strict=True) if math.isfinite(value)]
    whole = sum(count for _, count in finite)
    return math.fsum(value * count for value, count in finite) / whole if whole else math.nan


# --- What a run's history is made of ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One completed step, or in a long run several older ones: then sums of samples and seconds, and means.

    Attributes:
        step: from 1, this one included; of several, the last.
        epoch: from 1.
        generation: number of the formation that made it, within its driver.
        gradient_norm: global norm before clipping; None when the job does not clip.
        samples: real samples in the global batch.
        step_s: the whole step; `wait_s` of it waited for data, NaN where that is not told (`core.events.Steps`).
        count: of the steps.
        typical_s: seconds of one of them, for medians.
    """

    step: int
    epoch: int
    loss: float
    learning_rate: float
    gradient_norm: float | None
    samples: int
    step_s: float
    wait_s: float
    generation: int
    count: int
    typical_s: float

    @property
    def samples_per_s(self) -> float:
        """Samples of the global batch by seconds of the step; NaN where the step took no time."""
        return self.samples / self.step_s if self.step_s > 0 else math.nan


@dataclass(frozen=True, kw_only=True)
class DriverSession:
    """One driver's life: from the time it took the run until it let go, or until its last event."""

    token: int
    started_s: float
    ended_s: float
    outcome: str = ""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The group formed again after a failure. `failure` is the first cause, None where it was not told."""

    formed: Formed
    failure: Failed | None = None


@dataclass(frozen=True, kw_only=True)
class TimeTotals:
    """Where the time of all sessions went, in seconds. The parts add up to `wall_s`.

    Attributes:
        wall_s: sessions together; time between two sessions is not counted.
        computing_s: steps that count, without their waiting for data where that is told.
        data_s: waiting for data in steps that count.
        start_s: from taking the run to the first step being possible, in every session.
        recovery_s: from each failure to the group being formed again, and steps that had to be done again.
        checkpoint_s: what the steps lost to checkpoints and copies in memory.
        evaluation_s: evaluations.
        other_s: the rest.
    """

    wall_s: float = 0.0
    computing_s: float = 0.0
    data_s: float = 0.0
    start_s: float = 0.0
    recovery_s: float = 0.0
    checkpoint_s: float = 0.0
    evaluation_s: float = 0.0
    other_s: float = 0.0

    @property
    def goodput(self) -> float:
        """Share of the time spent computing steps that count; NaN before any time passed."""
        return self.computing_s / self.wall_s if self.wall_s > 0 else math.nan


def noise_of(event: Measured) -> NoiseScale | None:
    """The noise scale that an event tells; None where it was not known."""
    if not event.noise:
        return None
    told = dict(event.noise)
    return NoiseScale(count=int(told.pop("count")), **told)


def staleness_of(events: Iterable[Stale]) -> StalenessCounts:
    """How stale what was pushed was, over all of them."""
    whole = StalenessCounts()
    for event in events:
        counts = {int(age): int(count) for age, count in event.counts}
        unit: Literal["updates", "steps"] = "steps" if event.unit == "steps" else "updates"
        whole += StalenessCounts(counts=counts, unit=unit, dropped=event.dropped, again=event.again)
    return whole


def staleness_text(staleness: StalenessCounts) -> str:
    """`mean 6.8 updates, at most 19; 3 pushes dropped, 2 units handed out again`; empty where nothing was pushed."""
    if not staleness.counts:
        return ""
    most = max(staleness.counts)
    return (
        f"mean {staleness.mean:.1f} {staleness.unit}, at most {most}; "
        f"{staleness.dropped:,} {'push' if staleness.dropped == 1 else 'pushes'} dropped, "
        f"{formatting.count(staleness.again, 'unit')} handed out again"
    )
