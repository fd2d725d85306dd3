"""What a benchmark found, as a table for the terminal and as a page to keep."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

RESAMPLES = 10_000
HEADINGS = ("benchmark", "what", "trainwright", "peer", "ratio (95% interval)", "n", "target")


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The median ratio of the pairs, and the ends of its 95% confidence interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured comparison.

    Attributes:
        benchmark: its name.
        what: what was measured, against whom.
        unit: of `ours` and `peer`, which are medians, and of their 95th percentiles.
        ratio: ours over the peer's; None where a ratio says nothing.
        pairs: how many measurements of each.
        target: what the ratio must not exceed; None without a target.
        strict: the upper end of the interval must keep to the target, not only the median.
        count: the values are counts, shares or differences, which may be 0; times, rates and sizes may not.
    """

    benchmark: str
    what: str
    unit: str
    ours: float
    peer: float
    pairs: int
    ratio: Ratio | None = None
    target: float | None = None
    strict: bool = False
    ours_p95: float | None = None
    peer_p95: float | None = None
    count: bool = False

    @property
    def faults(self) -> list[str]:
        """Why the values cannot be right: not finite, negative, or 0 where that is impossible; empty if they can."""
        found = [
            f"{self.what}: {name} is {value:g} {self.unit}".rstrip()
            for name, value in (("trainwright", self.ours), ("peer", self.peer))
            if not math.isfinite(value) or value < 0 or (value == 0 and not self.count)
        ]
        if self.ratio is not None and math.isnan(self.ratio.median):
            found.append(f"{self.what}: the ratio is not a number")
        return found

    @property
    def met(self) -> bool | None:
        """Whether the target was met; None without one."""
        if self.target is None or self.ratio is None:
            return None
        return (self.ratio.high if self.strict else self.ratio.median) <= self.target

    @property
    def cells(self) -> tuple[str, ...]:
        """One row of the table, under `HEADINGS`."""
        ours, peer = self._value(self.ours, self.ours_p95), self._value(self.peer, self.peer_p95)
        return self.benchmark, self.what, ours, peer, self._ratio, str(self.pairs), self._target

    def _value(self, median: float, p95: float | None) -> str:
        tail = f", 95%: {p95:.4g} {self.unit}" if p95 is not None else ""
        return f"{median:.4g} {self.unit}{tail}"

    @property
    def _ratio(self) -> str:
        if self.ratio is None:
            return "-"
        interval = f"{self.ratio.low:.3f} to {self.ratio.high:.3f}" if self.pairs > 1 else "one pair, no interval"
        return f"{self.ratio.median:.3f} ({interval})"

    @property
    def _target(self) -> str:
        if self.target is None or self.met is None:
            return "none yet"
        return f"{'upper end' if self.strict else 'ratio'} <= {self.target:g}: {'met' if self.met else 'MISSED'}"


def compare(
    benchmark: str,
    what: str,
    unit: str,
    ours: Sequence[float],
    peers: Sequence[float],
    *,
    ratio: bool = True,
    target: float | None = None,
    strict: bool = False,
    tails: bool = False,
    count: bool = False,
) -> Figure:
    """The figure of interleaved pairs: `ours[i]` was measured next to `peers[i]`; with 95th percentiles on request."""
    return Figure(
        benchmark=benchmark,
        what=what,
        unit=unit,
        ours=float(np.median(ours)),
        peer=float(np.median(peers)),
        pairs=len(ours),
        ratio=ratio_of(ours, peers) if ratio else None,
        target=target,
        strict=strict,
        ours_p95=float(np.percentile(ours, 95)) if tails else None,
        peer_p95=float(np.percentile(peers, 95)) if tails else None,
        count=count,
    )


def ratio_of(ours: Sequence[float], peers: Sequence[float]) -> Ratio:
    """Return the ratio of ours over the peer's, pair by pair; the interval is a percentile bootstrap (Efron 1979).

    With fewer than six pairs no resampling can give a 95% interval: it is then no wider than the ratios themselves.
    """
    ratios = np.asarray(ours, dtype=float) / np.asarray(peers, dtype=float)
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, size=(RESAMPLES, len(ratios))), axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return Ratio(median=float(np.median(ratios)), low=float(low), high=float(high))


def versus(
    benchmark: str, what: str, unit: str, measured: float, predicted: float, *, target: float | None = None
) -> Figure:
    """One value that was measured beside what was predicted of it; the ratio is the larger's over the smaller's."""
    apart = max(measured, predicted) / min(measured, predicted)
    ratio = Ratio(median=apart, low=apart, high=apart)
    return Figure(
        benchmark=benchmark, what=what, unit=unit, ours=measured, peer=predicted, pairs=1, ratio=ratio, target=target
    )


def apart(
    benchmark: str, what: str, unit: str, ours: Sequence[float], peers: Sequence[float], *, target: float | None = None
) -> Figure:
    """As `compare`, of values that should be equal: the ratio is the larger median's over the smaller's."""
    found = compare(benchmark, what, unit, ours, peers, target=target)
    if found.ratio is None or found.ratio.median >= 1:
        return found
    return replace(found, ratio=ratio_of(peers, ours))


def shortfall(ours: Sequence[float], peers: Sequence[float]) -> Ratio:
    """How far the mean of ours lies below the peers', in the peers' standard deviations over the seeds."""
    below = max(0.0, float(np.mean(peers) - np.mean(ours)))
    spread = deviation(peers)
    found = below / spread if spread else math.inf if below else 0.0
    return Ratio(median=found, low=found, high=found)


def deviation(values: Sequence[float]) -> float:
    """The sample's standard deviation; 0 of a single value, as a smoke run has it."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def write_figures(path: Path, figures: Sequence[Figure]) -> None:
    """Hand figures from the process that measured to the one that reports."""
    path.write_text(json.dumps([asdict(figure) for figure in figures]), encoding="utf-8")


def read_figures(path: Path) -> list[Figure]:
    """The figures that `write_figures` wrote."""
    return [_figure(entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def table(figures: Sequence[Figure]) -> str:
    """Columns of equal width, for a terminal."""
    rows = [HEADINGS, *(figure.cells for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


@dataclass(frozen=True, kw_only=True)
class Section:
    """The newest whole run of one benchmark.

    Attributes:
        name: of the benchmark.
        facts: date, command, machine, versions, load.
        note: how it was measured.
        figures: what was found.
    """

    name: str
    facts: Mapping[str, str]
    note: str
    figures: Sequence[Figure]


def write_section(folder: Path, section: Section) -> None:
    """Keep a benchmark's newest results in a file of its name."""
    folder.mkdir(exist_ok=True)
    (folder / f"{section.name}.json").write_text(json.dumps(asdict(section), indent=1) + "\n", encoding="utf-8")


def read_sections(folder: Path, names: Sequence[str]) -> list[Section]:
    """What `write_section` kept, in the order of the names."""
    entries = [json.loads((folder / f"{name}.json").read_text("utf-8")) for name in names if _kept(folder, name)]
    return [Section(**{**entry, "figures": [_figure(item) for item in entry["figures"]]}) for entry in entries]


def page(sections: Sequence[Section]) -> str:
    """RESULTS.md: for each benchmark its figures, how it was measured, and when and where."""
    lines = [
        "# Benchmark results",
        "",
        "Written by `make bench` (`ARGS=NAME` runs one benchmark); do not edit. Every figure was measured, on the "
        "machine and at the time named with it; none is a promise for another machine.",
        "",
        "Values are medians, `95%` is the 95th percentile. Ratios are trainwright's over the peer's, pair by pair: "
        "below 1 trainwright is faster. n counts pairs; below six pairs the interval is only the range of the ratios.",
    ]
    for section in sections:
        lines += ["", f"## {section.name}", "", section.note, ""]
        lines += [_row(HEADINGS[1:]), _row(["---"] * len(HEADINGS[1:]))]
        lines += [_row(figure.cells[1:]) for figure in section.figures]
        lines += ["", *(f"- {name}: {value}" for name, value in section.facts.items())]
    return "\n".join([*lines, ""])


def _kept(folder: Path, name: str) -> bool:
    return (folder / f"{name}.json").exists()


def _figure(entry: Mapping[str, Any]) -> Figure:
    return Figure(**{**entry, "ratio": Ratio(**entry["ratio"]) if entry["ratio"] else None})


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
