"""The scorecard of a distillation: scores of students and teachers, their comparison, and sentences about it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from trainwright.core import formatting

MAIN_SCORE = {"regression": "R2"}  # the score that is compared; top-1 for all other kinds
_TOP = "top-1"
_UNITS = {"classification": "samples", "multi_label": "labels", "language_model": "tokens", "regression": "samples"}


@dataclass(frozen=True, kw_only=True)
class ModelScore:
    """The scores of one model."""

    name: str
    student: bool
    # the metrics of the student's job for this model's outputs; `loss` is the loss against labels
    metrics: Mapping[str, float] = field(default_factory=dict)
    # `top-1` (accuracy), `NLL` (nats) and `ECE` of units; `RMSE` and `R2` in regression
    scores: Mapping[str, float] = field(default_factory=dict)
    # for each bin of confidence its mean, the accuracy and the share of all units
    reliability: list[list[float]] = field(default_factory=list)
    parameters: int = 0  # number of parameters; 0 where it is not known, as of several teachers together
    size_bytes: int = 0
    # seconds of a call, by number of rows; empty where it was not measured
    latency_s: Mapping[str, float] = field(default_factory=dict)
    # for each true class shown, the mean probabilities of the classes shown
    soft: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class StudentTeacherScore:
    """A student compared with one of its teachers."""

    student: str
    teacher: str
    # `agreement` (share of units with equal predictions) and `KL` (teacher || student, nats, at temperature 1); `RMSE
    # between` in regression
    scores: Mapping[str, float] = field(default_factory=dict)
    kept: float | None = None  # the student's main score as a share of the teacher's; None where it has no meaning


@dataclass(frozen=True, kw_only=True)
class Scorecard:
    """Scores of students and teachers on the evaluation set."""

    kind: str  # kind of the loss, which decides what a unit is
    rows: int
    of_rows: int
    units: float  # weighted number of samples, labels or tokens
    step: int = 0  # step of the run at which the students were evaluated
    tokens: int = 1  # tokens of a row; 1 where a row is one unit
    device: str = ""  # device on which latencies were measured
    classes: list[int] = field(default_factory=list)  # the classes in the chart of soft targets
    commonest: list[float] | None = None  # the most frequent class and its share; None where there are no classes
    # scores of the students, then of the teachers, last of all teachers together where there are several
    marks: list[ModelScore] = field(default_factory=list)
    pairs: list[StudentTeacherScore] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be evaluated, and why
    seconds: float = 0.0

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Self:
        """Rebuild a scorecard from its `facts`."""
        marks, pairs = (
            [ModelScore(**each) for each in facts["marks"]],
            [StudentTeacherScore(**each) for each in facts["pairs"]],
        )
        return cls(**{**facts, "marks": marks, "pairs": pairs})

    def facts(self) -> dict[str, Any]:
        """Return the scorecard as JSON values."""
        return asdict(self)

    @property
    def main(self) -> str:
        """The score that is compared."""
        return MAIN_SCORE.get(self.kind, _TOP)

    def mark(self, name: str) -> ModelScore:
        """Return the scores of a student or teacher. Raises KeyError."""
        found = [mark for mark in self.marks if mark.name == name]
        if not found:
            raise KeyError(name)
        return found[0]

    def students(self) -> list[ModelScore]:
        """Return the scores of the students."""
        return [mark for mark in self.marks if mark.student]

    def sentences(self) -> list[str]:
        """Return the comparison in sentences, then the notes."""
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
                f"{mark.name} is no better than always predicting class {name:.0f}, which is right for {share:.1%} "
                f"of the {_UNITS[self.kind]}"
            )

    def header(self) -> list[str]:
        """Return the header of `table`."""
        scores = dict.fromkeys(name for mark in self.marks for name in mark.scores)
        metrics = dict.fromkeys(name for mark in self.marks for name in mark.metrics)
        kept = ["kept"] if self._kept() else []
        return ["", *metrics, *scores, *kept, "parameters", "size", *dict.fromkeys(self._times(None))]

    def table(self) -> list[list[str]]:
        """Return a row for each model: metrics, scores, kept share of the best teacher's score, size, latencies."""
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
        """Return latencies by column, of one model or of all; also per token for the call with most rows."""
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
        """Return for each student the smallest kept share, which is that of the best teacher."""
        told = [(pair.student, pair.kept) for pair in self.pairs if pair.kept is not None]
        return {name: min(kept for each, kept in told if each == name) for name, _ in told}

    def pair_header(self) -> list[str]:
        """Return the header of `pair_table`."""
        return ["student", "teacher", *dict.fromkeys(name for pair in self.pairs for name in pair.scores), "kept"]

    def pair_table(self) -> list[list[str]]:
        """Return a row for each student and teacher: agreement and distance."""
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
        """The evaluated data: `10,000 rows of the evaluation set (98,310 tokens)`."""
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
        return "\n".join([f"evaluated on {self.scope}", *lines, *self.sentences()])


def retained_share(own: float, theirs: float) -> float | None:
    """Return a score as a share of another; None where it has no meaning."""
    told = math.isfinite(own) and math.isfinite(theirs) and own >= 0 and theirs > 0
    return own / theirs if told else None


def _compared(mark: ModelScore, best: ModelScore, pair: StudentTeacherScore, own: float, main: str) -> str:
    """Return a sentence that compares a student with the best of its teachers."""
    theirs = best.scores.get(main, math.nan)
    if not (math.isfinite(own) and math.isfinite(theirs)):
        text = f"{mark.name} and {best.name} cannot be compared: there are no labels"
    elif own > theirs:
        text = f"{mark.name} is better than {best.name}: {main} {own:.4f} against {theirs:.4f}"
    elif pair.kept is None:
        text = f"{mark.name} keeps nothing of {best.name}: {main} {own:.4f} against {theirs:.4f}"
    else:
        text = f"{mark.name} keeps {pair.kept:.1%} of the {main} of {best.name} ({own:.4f} of {theirs:.4f})"
    if mark.parameters and best.parameters:
        text += f", with {mark.parameters / best.parameters:.1%} of its parameters"
    agreed = pair.scores.get("agreement")
    return text + (f"; their predictions agree on {agreed:.1%}" if agreed is not None else "")
