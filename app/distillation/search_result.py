"""What a search found: each setting's metric over the seeds, and the comparison on the test set."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, Literal

from pydantic import TypeAdapter
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.core import formatting
from trainwright.reporting.scorecard import Scorecard

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
        """The mean; NaN without values."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """The sample's standard deviation (n - 1); NaN of fewer than two values."""
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan

    def __str__(self) -> str:
        mean = formatting.metric(self.mean)
        return f"{mean} ± {self.deviation:.4f}" if math.isfinite(self.deviation) else mean


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A temperature and a share of the hard loss, or the student alone, with its score.

    Attributes:
        name: the name of its runs, without the seed.
        temperature: None in regression, and for the student alone.
        alpha: None for the student alone.
        validation: the metric after the last step, for each seed that was trained.
    """

    name: str
    temperature: float | None = None
    alpha: float | None = None
    validation: Score = Score()

    @property
    def text(self) -> str:
        """The setting for people: `T = 2, alpha = 0.1`."""
        if self.name == BASELINE:
            return "student alone"
        values = [("T", self.temperature), ("alpha", self.alpha)]
        return ", ".join(f"{name} = {value:g}" for name, value in values if value is not None)


@dataclass(frozen=True, kw_only=True, repr=False)
class SearchResult:
    """What a search found. Prints as a table.

    Attributes:
        name: of the search.
        metric: by which settings are compared.
        mode: whether more or less of it is better.
        seeds: of the student alone, and of each setting that was trained with all seeds.
        settings: all, in the order in which they were given.
        alone: the student without teachers, on the same rows.
        chosen: name of the setting that is best on the validation set.
        test: score of the chosen setting's students on the test set.
        test_alone: the same of the students without teachers.
        scorecard: the student of the chosen setting and the first seed beside its teachers, on the test set.
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
    scorecard: Scorecard
    uri: str

    @property
    def best(self) -> Setting:
        """The setting that was chosen."""
        return next(each for each in self.settings if each.name == self.chosen)

    @property
    def gain(self) -> float:
        """By how much students with teachers are better on the test set than those without."""
        more = self.test.mean - self.test_alone.mean
        return more if self.mode == "max" else -more

    @property
    def deviation(self) -> float:
        """The larger standard deviation of both over the seeds; NaN of one seed."""
        both = (self.test.deviation, self.test_alone.deviation)
        return max(both) if all(map(math.isfinite, both)) else math.nan

    @property
    def helped(self) -> bool:
        """Whether the gain is more than twice the deviation. False for one seed."""
        return self.gain > _SIGNIFICANT_DEVIATIONS * self.deviation

    @property
    def sentence(self) -> str:
        """Whether distillation helped, in a sentence."""
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
        """Return the result as JSON, with the conclusion beside it."""
        gain = self.gain if math.isfinite(self.gain) else None  # JSON has no NaN
        told = {"sentence": self.sentence, "helped": self.helped, "gain": gain}
        return json.dumps({**asdict(self), "told": told}, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes) -> SearchResult:
        """Return the result from what `encode` gave."""
        facts: dict[str, Any] = json.loads(data)
        del facts["told"]
        return TypeAdapter(cls).validate_python(facts)

    def __repr__(self) -> str:
        verdicts = (line.rstrip() for line in str(self.scorecard).splitlines())
        return "\n".join([formatting.plain_text(_result_table(self), 120), "", *verdicts])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"


def _result_table(found: SearchResult) -> RenderableType:
    """The conclusion, and a row for each setting, for the terminal."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for heading in ("setting", f"{found.metric}, validation", "test", ""):
        table.add_column(heading, no_wrap=True)
    for each in (*found.settings, found.alone):
        test = {found.chosen: str(found.test), BASELINE: str(found.test_alone)}.get(each.name, "")
        note = "chosen" if each.name == found.chosen else ""
        note = note or ("first seed only" if len(each.validation.values) == 1 < len(found.seeds) else "")
        table.add_row(each.text, str(each.validation), test, note, style="bold" if note == "chosen" else "")
    head = Text(found.sentence, style="bold green" if found.helped else "bold yellow")
    scope = f"mean ± standard deviation of {formatting.count(len(found.seeds), 'seed')}"
    return Group(head, Padding(table, (1, 0, 0, 2)), Padding(Text(scope, style="dim"), (1, 0, 0, 2)))
