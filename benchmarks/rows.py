"""Write the figures in results/ into the tables of README and docs/comparison.md.

    python benchmarks/rows.py

`make bench` does it too. The last cell of such a row has the benchmark and, in a comment, the name of the figure. The
first cell names a target that was missed; the reason behind it is written by hand and stays while the target is missed.
"""

from __future__ import annotations

import re
from pathlib import Path

from figures import Figure, read_sections

HERE = Path(__file__).resolve().parent
PAGES = ("README.md", "docs/comparison.md")
ROW = re.compile(
    r"^\| (?P<what>.+?)(?: \(\*\*target \S+ missed\*\*(?P<why>: .+?)?\))? \|.+"
    r"\| `(?P<benchmark>\w+)` <!-- (?P<name>.+) --> \|$",
    re.MULTILINE,
)


def filled(page: str) -> str:
    """Return a page with the figures of its rows; a row whose figure is not in results/ stays as it is."""
    benchmarks = sorted({found["benchmark"] for found in ROW.finditer(page)})
    figures = {
        (section.name, figure.what): figure
        for section in read_sections(HERE / "results", benchmarks)
        for figure in section.figures
    }

    def fill(row: re.Match[str]) -> str:
        figure = figures.get((row["benchmark"], row["name"]))
        if figure is None:
            return row[0]  # a peer that was not installed
        missed = f" (**target {figure.target:.3g} missed**{row['why'] or ''})" if figure.met is False else ""
        ours, peer = (_value(value, figure.unit) for value in (figure.ours, figure.peer))
        source = f"`{row['benchmark']}` <!-- {row['name']} -->"
        return f"| {row['what']}{missed} | {ours} | {peer} | {_ratio(figure)} | {source} |"

    return ROW.sub(fill, page)


def write_rows() -> None:
    """Write the rows of all pages again."""
    for name in PAGES:
        path = HERE.parent / name
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


def _value(value: float, unit: str) -> str:
    return f"{value:.0f} {unit}" if value >= 100 or unit == "steps" else f"{value:#.3g} {unit}"


def _ratio(figure: Figure) -> str:
    if figure.ratio is None or figure.pairs == 1:
        return ""
    return f"{figure.ratio.median:.3f} ({figure.ratio.low:.3f} to {figure.ratio.high:.3f})"


if __name__ == "__main__":
    write_rows()
