"""What a search found: each setting's figures over the seeds, and what was confirmed on the test set."""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.reporting import formatting

ALONE = "alone"  # the student without teachers
TIMES = 2.0  # a gain of so many deviations counts


@dataclass(frozen=True, kw_only=True)
class Score:
    """A metric over the seeds.

    Attributes:
        values: one for each seed.
    """

    values: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """NaN where there is none."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """The sample's standard deviation (n - 1); NaN of fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan

    def __str__(self) -> str:
        mean = formatting.figure(self.mean)
        return f"{mean} ± {self.deviation:.4f}" if math.isfinite(self.deviation) else mean


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A temperature and a share of the hard loss, or the student alone, and how it did.

    Attributes:
        name: as its runs are named, before the seed.
        temperature: None in regression, and of the student alone.
        alpha: None of the student alone.
        validation: the metric after the last step, of each seed that was trained to the end.
        steps: of how many of its seed that went furthest.
        stopped: it was behind others after these steps, and left.
    """

    name: str
    temperature: float | None = None
    alpha: float | None = None
    validation: Score = Score()
    steps: int = 0
    stopped: bool = False

    @property
    def text(self) -> str:
        """For people."""
        if self.name == ALONE:
            return "student alone"
        values = [("T", self.temperature), ("alpha", self.alpha)]
        return ", ".join(f"{name} = {value:g}" for name, value in values if value is not None)


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a model costs, and how good it is on the test set.

    Attributes:
        name: `student`, or a teacher's.
        parameters: of it.
        size_bytes: of them.
        latency_s: seconds of a batch, by its rows; where it was measured.
        test: its metric; None where that is told elsewhere.
    """

    name: str
    parameters: int
    size_bytes: int
    latency_s: Mapping[int, float] = field(default_factory=dict)
    test: float | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Found:
    """What a search found. Prints as a table; shows as a page in a notebook.

    Attributes:
        name: of the search.
        metric: by which settings are compared.
        mode: whether more or less of it is better.
        seeds: that each setting which was not stopped was trained with, and the student alone.
        settings: all, in the order in which they were given.
        alone: the student without teachers, on the same rows.
        chosen: name of the setting that is best on the validation set.
        test: its students on the test set, one for each seed.
        test_alone: those without teachers.
        together: several teachers' mixture on the test set; None of one.
        student: what it costs.
        teachers: what they cost, and their own metric on the test set.
        machine: on which latencies were measured.
        uri: of the search's folder.
    """

    name: str
    metric: str
    mode: Literal["max", "min"]
    seeds: tuple[int, ...]
    settings: tuple[Setting, ...]
    alone: Setting
    chosen: str
    test: Score
    test_alone: Score
    together: float | None
    student: Model
    teachers: tuple[Model, ...]
    machine: str
    uri: str

    @property
    def best(self) -> Setting:
        """The setting that was chosen."""
        return next(each for each in self.settings if each.name == self.chosen)

    @property
    def gain(self) -> float:
        """By how much its students are better than those alone, on the test set."""
        more = self.test.mean - self.test_alone.mean
        return more if self.mode == "max" else -more

    @property
    def deviation(self) -> float:
        """The larger of both over the seeds; NaN of one seed."""
        both = (self.test.deviation, self.test_alone.deviation)
        return max(both) if all(map(math.isfinite, both)) else math.nan

    @property
    def helped(self) -> bool:
        """Whether the gain is more than twice the deviation. False where one seed tells none."""
        return self.gain > TIMES * self.deviation

    @property
    def teacher(self) -> float:
        """The metric of the best teacher, or of all together where that is better."""
        told = [each.test for each in self.teachers if each.test is not None]
        told += [] if self.together is None else [self.together]
        return (max if self.mode == "max" else min)(told, default=math.nan)

    @property
    def kept(self) -> float:
        """Which share of that the students keep."""
        ours, theirs = (self.test.mean, self.teacher) if self.mode == "max" else (self.teacher, self.test.mean)
        return ours / theirs if theirs else math.nan

    @property
    def sentence(self) -> str:
        """Whether it was worth it."""
        figures = f"{self.metric} {self.test} on the test set with {self.best.text}, {self.test_alone} alone"
        if not math.isfinite(self.deviation):
            return f"One seed cannot tell whether distillation helped: {figures}."
        times = f"{abs(self.gain) / self.deviation:.1f} times" if self.deviation else "more than 0 times"
        if self.helped:
            return f"Distillation helped: {figures}, better by {times} the larger deviation."
        if self.gain < -TIMES * self.deviation:
            return f"Distillation made it worse: {figures}, {times} the larger deviation."
        how = f"{times} the larger deviation, and less than {TIMES:g} times is chance"
        return f"Distillation did not help: {figures}; they differ by {how}."

    def encode(self) -> bytes:
        """As JSON, with what follows from it beside."""
        told = {"sentence": self.sentence, "helped": self.helped, "gain": self.gain, "kept": self.kept}
        return json.dumps({**asdict(self), "told": _finite(told)}, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes) -> Found:
        """Of what `encode` gave."""
        facts = json.loads(data)
        del facts["told"]
        settings = tuple(map(_setting, facts.pop("settings")))
        teachers = tuple(map(_model, facts.pop("teachers")))
        test, test_alone = (Score(values=tuple(facts.pop(name)["values"])) for name in ("test", "test_alone"))
        alone, student = _setting(facts.pop("alone")), _model(facts.pop("student"))
        seeds = tuple(facts.pop("seeds"))
        return cls(
            settings=settings, teachers=teachers, alone=alone, student=student, seeds=seeds, test=test,
            test_alone=test_alone, **facts,
        )  # fmt: skip

    def __repr__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=120, color_system=None, force_terminal=False, force_jupyter=False)
        console.print(table(self))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _repr_html_(self) -> str:
        from trainwright.distillation.search_view import found_html

        return found_html(self)


def table(found: Found) -> RenderableType:
    """For the terminal."""
    head = Text(found.sentence, style="bold green" if found.helped else "bold yellow")
    tables = [Padding(_table(*rows), (1, 0, 0, 2)) for rows in (setting_rows(found), model_rows(found))]
    return Group(head, *tables, Padding(Text(notes(found), style="dim"), (1, 0, 0, 2)))


Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]


def setting_rows(found: Found) -> Rows:
    """Headings, and a row for each setting."""
    heads = ("setting", f"{found.metric}, validation", "test", "")
    rows: list[tuple[str, ...]] = []
    for each in (*found.settings, found.alone):
        test = {found.chosen: str(found.test), ALONE: str(found.test_alone)}.get(each.name, "")
        note = f"stopped after {formatting.count(each.steps, 'step')}" if each.stopped else ""
        rows.append((each.text, str(each.validation), test, "chosen" if each.name == found.chosen else note))
    return heads, rows


def model_rows(found: Found) -> Rows:
    """Headings, and a row for the student and each teacher."""
    sizes = sorted({rows for model in (found.student, *found.teachers) for rows in model.latency_s})
    heads = ("model", f"{found.metric}, test", "kept", "parameters", "size", *(f"batch of {rows}" for rows in sizes))
    rows: list[tuple[str, ...]] = []
    for model in (found.student, *found.teachers):
        own = model is found.student
        figure = str(found.test) if own else formatting.figure(model.test) if model.test is not None else "-"
        latency = [formatting.duration(model.latency_s[rows]) if rows in model.latency_s else "-" for rows in sizes]
        kept = f"{found.kept:.1%}" if own and math.isfinite(found.kept) else ""
        rows.append((model.name, figure, kept, f"{model.parameters:,}", formatting.size(model.size_bytes), *latency))
    if found.together is not None:
        rows.append(("teachers together", formatting.figure(found.together), *[""] * (len(heads) - 2)))
    return heads, rows


def notes(found: Found) -> str:
    """What is to be known of the figures."""
    seeds = formatting.count(len(found.seeds), "seed")
    latency = f", latencies on {found.machine}" if found.student.latency_s else ""
    return f"mean ± standard deviation of {seeds}; kept: of the best teacher, or of all together{latency}"


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    drawn = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for head in heads:
        drawn.add_column(head, no_wrap=True)
    for row in rows:
        drawn.add_row(*row, style="bold" if row[-1] == "chosen" else "")
    return drawn


def _finite(facts: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in facts.items()
    }


def _setting(facts: dict[str, Any]) -> Setting:
    return Setting(**{**facts, "validation": Score(values=tuple(facts["validation"]["values"]))})


def _model(facts: dict[str, Any]) -> Model:
    return Model(**{**facts, "latency_s": {int(rows): seconds for rows, seconds in facts["latency_s"].items()}})
