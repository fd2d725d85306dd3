"""What a search found: each setting's figures over the seeds, and what was confirmed on the test set."""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, Literal

from markupsafe import Markup
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.core import formatting
from trainwright.reporting.html.templates import render_template

BASELINE = "alone"  # the student without teachers
_SIGNIFICANT_DEVIATIONS = 2.0  # a gain of so many deviations counts


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
        mean = formatting.metric(self.mean)
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
        if self.name == BASELINE:
            return "student alone"
        values = [("T", self.temperature), ("alpha", self.alpha)]
        return ", ".join(f"{name} = {value:g}" for name, value in values if value is not None)


@dataclass(frozen=True, kw_only=True)
class ModelCost:
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
class SearchResult:
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
    student: ModelCost
    teachers: tuple[ModelCost, ...]
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
        return self.gain > _SIGNIFICANT_DEVIATIONS * self.deviation

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
        if self.gain < -_SIGNIFICANT_DEVIATIONS * self.deviation:
            return f"Distillation made it worse: {figures}, {times} the larger deviation."
        how = f"{times} the larger deviation, and less than {_SIGNIFICANT_DEVIATIONS:g} times is chance"
        return f"Distillation did not help: {figures}; they differ by {how}."

    def encode(self) -> bytes:
        """As JSON, with what follows from it beside."""
        told = {"sentence": self.sentence, "helped": self.helped, "gain": self.gain, "kept": self.kept}
        return json.dumps({**asdict(self), "told": _finite(told)}, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes) -> SearchResult:
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
        console.print(_result_table(self))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _repr_html_(self) -> str:

        return _result_html(self)


def _result_table(found: SearchResult) -> RenderableType:
    """For the terminal."""
    head = Text(found.sentence, style="bold green" if found.helped else "bold yellow")
    tables = [Padding(_table(*rows), (1, 0, 0, 2)) for rows in (_setting_rows(found), _model_rows(found))]
    return Group(head, *tables, Padding(Text(_notes(found), style="dim"), (1, 0, 0, 2)))


_Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]


def _setting_rows(found: SearchResult) -> _Rows:
    """Headings, and a row for each setting."""
    heads = ("setting", f"{found.metric}, validation", "test", "")
    rows: list[tuple[str, ...]] = []
    for each in (*found.settings, found.alone):
        test = {found.chosen: str(found.test), BASELINE: str(found.test_alone)}.get(each.name, "")
        note = f"stopped after {formatting.count(each.steps, 'step')}" if each.stopped else ""
        rows.append((each.text, str(each.validation), test, "chosen" if each.name == found.chosen else note))
    return heads, rows


def _model_rows(found: SearchResult) -> _Rows:
    """Headings, and a row for the student and each teacher."""
    sizes = sorted({rows for model in (found.student, *found.teachers) for rows in model.latency_s})
    heads = ("model", f"{found.metric}, test", "kept", "parameters", "size", *(f"batch of {rows}" for rows in sizes))
    rows: list[tuple[str, ...]] = []
    for model in (found.student, *found.teachers):
        own = model is found.student
        figure = str(found.test) if own else formatting.metric(model.test) if model.test is not None else "-"
        latency = [formatting.duration(model.latency_s[rows]) if rows in model.latency_s else "-" for rows in sizes]
        kept = f"{found.kept:.1%}" if own and math.isfinite(found.kept) else ""
        rows.append((model.name, figure, kept, f"{model.parameters:,}", formatting.size(model.size_bytes), *latency))
    if found.together is not None:
        rows.append(("teachers together", formatting.metric(found.together), *[""] * (len(heads) - 2)))
    return heads, rows


def _notes(found: SearchResult) -> str:
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


def _model(facts: dict[str, Any]) -> ModelCost:
    return ModelCost(**{**facts, "latency_s": {int(rows): seconds for rows, seconds in facts["latency_s"].items()}})


# --- What a search found as HTML --------------------------------------------------------------------------------------


_WIDE, _LEFT, _RIGHT, _LANE, _TOP, _FOOT = 960.0, 190.0, 900.0, 26.0, 8.0, 44.0
_TICKS = 5
_ALONE, _OWN, _CHOSEN = "var(--series-4,#d9920f)", "var(--series-5,#7c8fa6)", "var(--series-1,#3f7fdd)"
_INK, _SOFT, _GRID = "var(--ink,currentColor)", "var(--soft,#7b8694)", "var(--grid,#8a94a033)"


def _result_html(found: SearchResult) -> str:
    """The sentence, the settings as a picture and a table, and the models; light and dark, nothing fetched."""
    return render_template(
        "found.html.j2",
        title=found.name,
        sentence=found.sentence,
        helped=found.helped,
        picture=Markup(settings_svg(found)),
        metric=found.metric,
        tables=[_setting_rows(found), _model_rows(found)],
        notes=_notes(found),
    )


def result_page(found: SearchResult) -> str:
    """The same as a whole page."""
    return render_template("page.html.j2", title=f"{found.name}: search", body=Markup(_result_html(found)))


def settings_svg(found: SearchResult) -> str:
    """A lane for each setting: a dot for each seed on the validation set, a bar of mean and deviation.

    A band goes through all lanes: the student alone, with the deviation of its seeds to both sides.
    """
    lanes = [*sorted(found.settings, key=lambda each: each.validation.mean, reverse=found.mode == "max"), found.alone]
    scale = _Scale.of(lanes)
    foot = _TOP + _LANE * len(lanes)
    parts = [*_band(found.alone.validation, scale, foot), *_axis(found, scale, foot)]
    for number, each in enumerate(lanes):
        colour = _CHOSEN if each.name == found.chosen else _ALONE if each is found.alone else _OWN
        parts += _lane(each, scale, _TOP + _LANE * (number + 0.5), colour, bold=each.name == found.chosen)
    high = foot + _FOOT
    label = f"{escape(found.metric)} of each setting on the validation set"
    opening = f'<svg class="figure" viewBox="0 0 {_WIDE:g} {high:g}" role="img" aria-label="{label}" font-size="12.5">'
    return opening + "".join(parts) + "</svg>"


class _Scale:
    """From a metric's value to a place."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    @classmethod
    def of(cls, lanes: list[Setting]) -> _Scale:
        """That shows all of them."""
        shown = [value for each in lanes for value in _extent(each.validation)]
        low, high = min(shown), max(shown)
        margin = 0.06 * (high - low) or 0.01 * abs(high) or 1.0
        return cls(low - margin, high + margin)

    def x(self, value: float) -> float:
        """Where it is."""
        return _LEFT + (_RIGHT - _LEFT) * (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values in it."""
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / _TICKS))
        step *= next(times for times in (1, 2, 5, 10) if (self.high - self.low) / (step * times) <= _TICKS)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [number * step for number in range(first, last + 1)]


def _extent(score: Score) -> list[float]:
    """Its values, and its mean with the deviation to both sides."""
    spread = score.deviation if math.isfinite(score.deviation) else 0.0
    return [*score.values, score.mean - spread, score.mean + spread]


def _band(alone: Score, scale: _Scale, foot: float) -> Iterator[str]:
    *_, low, high = _extent(alone)
    left, wide = scale.x(low), max(scale.x(high) - scale.x(low), 1.0)
    yield f'<rect x="{left:.1f}" y="0" width="{wide:.1f}" height="{foot:g}" fill="{_ALONE}" opacity="0.16"/>'


def _axis(found: SearchResult, scale: _Scale, foot: float) -> Iterator[str]:
    for value in scale.ticks():
        x = scale.x(value)
        yield f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{foot:g}" stroke="{_GRID}"/>'
        yield f'<text x="{x:.1f}" y="{foot + 17:g}" text-anchor="middle" fill="{_SOFT}">{value:.10g}</text>'
    middle = (_LEFT + _RIGHT) / 2
    said = f"{escape(found.metric)} on the validation set; band: student alone"
    yield f'<text x="{middle:g}" y="{foot + 36:g}" text-anchor="middle" fill="{_SOFT}">{said}</text>'


def _lane(each: Setting, scale: _Scale, y: float, colour: str, *, bold: bool) -> Iterator[str]:
    weight = ' font-weight="650"' if bold else ""
    name = escape(each.text) + (", stopped" if each.stopped else "")
    yield f'<text x="{_LEFT - 14:g}" y="{y + 4:g}" text-anchor="end" fill="{_INK}"{weight}>{name}</text>'
    *values, low, high = _extent(each.validation)
    if high > low:
        yield f'<line x1="{scale.x(low):.1f}" y1="{y:g}" x2="{scale.x(high):.1f}" y2="{y:g}" stroke="{colour}"/>'
    for value in values:
        said = f"<title>{formatting.metric(value)}</title>"
        yield f'<circle cx="{scale.x(value):.1f}" cy="{y:g}" r="3" fill="{colour}" opacity="0.55">{said}</circle>'
    x, said = scale.x(each.validation.mean), f"<title>{escape(each.text)}: {escape(str(each.validation))}</title>"
    yield f'<rect x="{x - 2:.1f}" y="{y - 8:g}" width="4" height="16" rx="1.5" fill="{colour}">{said}</rect>'
