"""What is to be said of students beside their teachers: figures by name, and plain sentences. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from trainwright.core import formatting

MAIN_SCORE = {"regression": "R2"}  # the score that tells how much was kept; of all others the first
_TOP = "top-1"
_UNITS = {"classification": "samples", "multi_label": "labels", "language_model": "tokens", "regression": "samples"}


@dataclass(frozen=True, kw_only=True)
class ModelScore:
    """What one model is worth.

    Attributes:
        name: of the student or teacher.
        student: whether it is one.
        metrics: of the student's job, of what this model says: its `loss` is the hard one.
        scores: `top-1` (share that is right), `NLL` (nats) and `ECE` of units; `RMSE` and `R2` in regression.
        reliability: of each bin of confidence: its mean, the accuracy, the share of all units.
        parameters: how many; 0 where that is not known, as of several teachers together.
        size_bytes: of the parameters.
        latency_s: seconds of a call by rows in it; none where it was not measured.
        soft: for each class shown as the true one, the mean chances of those.
    """

    name: str
    student: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    reliability: list[list[float]] = field(default_factory=list)
    parameters: int = 0
    size_bytes: int = 0
    latency_s: Mapping[str, float] = field(default_factory=dict)
    soft: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class StudentTeacherScore:
    """A student beside one of its teachers.

    Attributes:
        scores: `agreement` (share of units of which both say the same) and `KL` (teacher || student, nats, at
            temperature 1); `RMSE between` in regression.
        kept: the student's main score as a share of the teacher's; None where that says nothing.
    """

    student: str
    teacher: str
    scores: Mapping[str, float] = field(default_factory=dict)
    kept: float | None = None


@dataclass(frozen=True, kw_only=True)
class Scorecard:
    """Students beside their teachers, on the evaluation set.

    Attributes:
        kind: of the loss: what is a unit.
        rows: of the evaluation set that were looked at, of so many.
        units: samples, labels or tokens of them, weighted.
        step: of the run, at which the students were judged.
        tokens: of a row; 1 where it is one thing.
        device: on which latencies were measured.
        classes: those in the picture of soft targets.
        commonest: the class that most units are of, and its share; None where there are none.
        marks: of the students, then of the teachers, last of all teachers together where there are several.
        pairs: of each student with its teachers.
        notes: what could not be said, and why.
        seconds: that it took.
    """

    kind: str
    rows: int
    of_rows: int
    units: float
    step: int = 0
    tokens: int = 1
    device: str = ""
    classes: list[int] = field(default_factory=list)
    commonest: list[float] | None = None
    marks: list[ModelScore] = field(default_factory=list)
    pairs: list[StudentTeacherScore] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Self:
        """What `facts` gave, from storage too."""
        marks, pairs = (
            [ModelScore(**each) for each in facts["marks"]],
            [StudentTeacherScore(**each) for each in facts["pairs"]],
        )
        return cls(**{**facts, "marks": marks, "pairs": pairs})

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @property
    def main(self) -> str:
        """The score that tells how much was kept."""
        return MAIN_SCORE.get(self.kind, _TOP)

    def mark(self, name: str) -> ModelScore:
        """Of a student or teacher. Raises KeyError."""
        found = [mark for mark in self.marks if mark.name == name]
        if not found:
            raise KeyError(name)
        return found[0]

    def students(self) -> list[ModelScore]:
        """Their marks."""
        return [mark for mark in self.marks if mark.student]

    def sentences(self) -> list[str]:
        """What it comes to, in plain words."""
        return [line for mark in self.students() for line in self._of(mark)] + self.notes

    def _of(self, mark: ModelScore) -> Iterator[str]:
        pairs = [pair for pair in self.pairs if pair.student == mark.name]
        own = mark.scores.get(self.main, math.nan)
        best = max(pairs, key=lambda pair: self.mark(pair.teacher).scores.get(self.main, -math.inf), default=None)
        if best is not None:
            yield _compared(mark, self.mark(best.teacher), best, own, self.main)
        name, share = self.commonest or (0, math.nan)
        if self.kind in ("classification", "language_model") and own <= share:
            yield (
                f"{mark.name} is no better than always saying class {name:.0f}, which is right for {share:.1%} of the "
                f"{_UNITS[self.kind]}"
            )

    def header(self) -> list[str]:
        """Of the table."""
        scores = dict.fromkeys(name for mark in self.marks for name in mark.scores)
        metrics = dict.fromkeys(name for mark in self.marks for name in mark.metrics)
        kept = ["kept"] if self._kept() else []
        return ["", *metrics, *scores, *kept, "parameters", "size", *dict.fromkeys(self._times(None))]

    def table(self) -> list[list[str]]:
        """A row for each model: metrics, scores, the share kept of the best teacher's, size, seconds of a call."""
        columns = self.header()
        return [self._row(mark, columns) for mark in self.marks]

    def _row(self, mark: ModelScore, columns: list[str]) -> list[str]:
        kept = self._kept().get(mark.name, math.nan)
        cells = {
            "": mark.name if mark.student else f"{mark.name} (teacher)" if mark.parameters else mark.name,
            "kept": f"{kept:.1%}" if math.isfinite(kept) else "",
            "parameters": f"{mark.parameters:,}" if mark.parameters else "",
            "size": formatting.size(mark.size_bytes) if mark.parameters else "",
        }
        cells |= {name: formatting.metric(value) for name, value in {**mark.scores, **mark.metrics}.items()}
        cells |= {name: formatting.duration(seconds) for name, seconds in self._times(mark).items()}
        return [cells.get(name, "") for name in columns]

    def _times(self, one: ModelScore | None) -> dict[str, float]:
        """Seconds of one model's calls, or of anyone's, by column; of a token in the call with most rows."""
        found: dict[str, float] = {}
        for mark in self.marks if one is None else [one]:
            found |= {
                f"time, {formatting.count(int(rows), 'row')}": seconds for rows, seconds in mark.latency_s.items()
            }
            if self.tokens > 1 and mark.latency_s:
                most = max(mark.latency_s, key=int)
                found["time, a token"] = mark.latency_s[most] / (int(most) * self.tokens)
        return found

    def _kept(self) -> dict[str, float]:
        """Of each student the least share that it keeps of a teacher's score: that of the best teacher."""
        told = [(pair.student, pair.kept) for pair in self.pairs if pair.kept is not None]
        return {name: min(kept for each, kept in told if each == name) for name, _ in told}

    def pair_header(self) -> list[str]:
        """Of the table of pairs."""
        return ["student", "teacher", *dict.fromkeys(name for pair in self.pairs for name in pair.scores), "kept"]

    def pair_table(self) -> list[list[str]]:
        """A row for each student and teacher: agreement and distance."""
        names = self.pair_header()[2:-1]
        rows = []
        for pair in self.pairs:
            kept = f"{pair.kept:.1%}" if pair.kept is not None else ""
            figures = [f"{pair.scores[name]:.1%}" if name == "agreement" else formatting.metric(pair.scores[name])
                       for name in names]  # fmt: skip
            rows.append([pair.student, pair.teacher, *figures, kept])
        return rows

    @property
    def scope(self) -> str:
        """What was looked at: `10,000 rows of the evaluation set (98,310 tokens)`."""
        rows = (
            formatting.count(self.rows, "row")
            if self.rows == self.of_rows
            else f"{self.rows:,} of {self.of_rows:,} rows"
        )
        units = f" ({self.units:,.0f} {_UNITS[self.kind]})" if self.kind in ("multi_label", "language_model") else ""
        return f"{rows} of the evaluation set{units}"

    def __str__(self) -> str:
        rows = [self.header(), *self.table()]
        widths = [max(len(row[number]) for row in rows) for number in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if not number else cell.rjust(width)
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([f"judged on {self.scope}", *lines, *self.sentences()])


def retained_share(own: float, theirs: float) -> float | None:
    """A score as a share of another; None where that says nothing."""
    told = math.isfinite(own) and math.isfinite(theirs) and own >= 0 and theirs > 0
    return own / theirs if told else None


def _compared(mark: ModelScore, best: ModelScore, pair: StudentTeacherScore, own: float, main: str) -> str:
    """A student beside the best of its teachers."""
    theirs = best.scores.get(main, math.nan)
    if not (math.isfinite(own) and math.isfinite(theirs)):
        text = f"{mark.name} beside {best.name}: there are no labels to judge by"
    elif own > theirs:
        text = f"{mark.name} is better than {best.name}: {main} {own:.4f} against {theirs:.4f}"
    elif pair.kept is None:
        text = f"{mark.name} keeps nothing of {best.name}: {main} {own:.4f} against {theirs:.4f}"
    else:
        text = f"{mark.name} keeps {pair.kept:.1%} of the {main} of {best.name} ({own:.4f} of {theirs:.4f})"
    if mark.parameters and best.parameters:
        text += f", with {mark.parameters / best.parameters:.1%} of its parameters"
    agreed = pair.scores.get("agreement")
    return text + (f"; both say the same of {agreed:.1%}" if agreed is not None else "")
