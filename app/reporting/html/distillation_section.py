"""Students beside their teachers, as a part of the report: tables, and pictures of soft targets and of calibration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from trainwright.distillation.scorecard import Mark, Verdict
from trainwright.reporting import formatting
from trainwright.reporting.html.templates import fill

if TYPE_CHECKING:
    from markupsafe import Markup

_CELL, _MARGIN = 26, 30
_NUMBERED = 10  # classes of which each cell has room for its number
_PLOT = 220
_SHARE = 0.01  # of all units that a bin has at least
_COLOURS = tuple(f"var(--series-{number})" for number in range(1, 8))


def verdict_html(facts: Mapping[str, Any]) -> Markup:
    """The part of the report that a verdict makes, from what the event `Judged` holds."""
    from markupsafe import Markup

    verdict = Verdict.read(facts)
    ordered = sorted(verdict.marks, key=lambda mark: mark.student)  # teachers first
    pictures = [(mark.name, Markup(soft_targets(mark, verdict.classes))) for mark in ordered if mark.soft]
    sure = [mark for mark in ordered if mark.reliability]
    return Markup(
        fill(
            "verdict.html.j2",
            sentences=verdict.sentences(),
            scope=verdict.scope,
            device=verdict.device,
            timed=any(mark.latency_s for mark in verdict.marks),
            tokens=verdict.kind == "language_model",
            header=verdict.header(),
            rows=verdict.table(),
            pair_header=verdict.pair_header(),
            pairs=verdict.pair_table(),
            pictures=pictures,
            labels=verdict.kind == "multi_label",
            reliability=Markup(reliability(sure)) if sure else "",
            names=[(mark.name, colour) for mark, colour in zip(sure, _COLOURS, strict=False)],
            seconds=formatting.duration(verdict.seconds),
        )
    )


def soft_targets(mark: Mark, classes: Sequence[int]) -> str:
    """What a model says on the mean of each class: a row for each true one, darker the more chance there is."""
    count = len(classes)
    side = count * _CELL
    parts = [_label(classes, along, number) for along in (True, False) for number in range(count)]
    for row, chances in enumerate(mark.soft):
        for column, chance in enumerate(chances):
            parts += _cell(row, column, chance, classes, numbered=count <= _NUMBERED)
    box = f"0 0 {side + _MARGIN + 2} {side + _MARGIN + 2}"
    name = escape(f"soft targets of {mark.name}")
    width = f"max-width:{side + _MARGIN + 2}px"
    return f'<svg class="figure" style="{width}" viewBox="{box}" role="img" aria-label="{name}">{"".join(parts)}</svg>'


def reliability(marks: Sequence[Mark]) -> str:
    """Accuracy by confidence, a line for each model; on the diagonal a model is right as often as it is sure."""
    box = f"-40 -10 {_PLOT + 60} {_PLOT + 50}"
    parts = list(_axes())
    for mark, colour in zip(marks, _COLOURS, strict=False):
        shown = [row for row in mark.reliability if row[2] >= _SHARE]
        line = " ".join(f"{sure * _PLOT:.1f},{(1 - right) * _PLOT:.1f}" for sure, right, _ in shown)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        for sure, right, share in shown:
            x, y = sure * _PLOT, (1 - right) * _PLOT
            told = escape(f"{mark.name}: {sure:.0%} sure, {right:.1%} right, {share:.1%} of all")
            radius = 1.5 + 6 * math.sqrt(share)
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}" fill-opacity=".75">'
                f"<title>{told}</title></circle>"
            )
    style = f"max-width:{2 * _PLOT}px"
    svg = f'<svg class="figure" style="{style}" viewBox="{box}" role="img" aria-label="reliability">'
    return f"{svg}{''.join(parts)}</svg>"


def _axes() -> Iterator[str]:
    for number in range(5):
        at, share = number * _PLOT / 4, number / 4
        yield f'<path d="M0 {_PLOT - at:g}H{_PLOT}" stroke="var(--grid)" stroke-width=".8"/>'
        yield _text(-8, _PLOT - at + 3.5, f"{share:.0%}", anchor="end")
        yield _text(at, _PLOT + 16, f"{share:.0%}")
    yield f'<path d="M0 {_PLOT}L{_PLOT} 0" stroke="var(--soft)" stroke-width="1" stroke-dasharray="4 3"/>'
    yield _text(_PLOT / 2, _PLOT + 32, "how sure it is")
    yield f'<g transform="translate(-34 {_PLOT / 2}) rotate(-90)">{_text(0, 0, "how often it is right")}</g>'


def _cell(row: int, column: int, chance: float, classes: Sequence[int], *, numbered: bool) -> Iterator[str]:
    shade = math.sqrt(max(chance, 0.0))  # so that what is unlikely is seen too
    x, y = _MARGIN + column * _CELL, _MARGIN + row * _CELL
    told = f"{classes[row]}: {chance:.2%} for {classes[column]}"
    yield f'<rect x="{x}" y="{y}" width="{_CELL - 1}" height="{_CELL - 1}" fill="var(--card)"/>'
    yield (
        f'<rect x="{x}" y="{y}" width="{_CELL - 1}" height="{_CELL - 1}" fill="var(--series-1)" '
        f'fill-opacity="{shade:.3f}"><title>{told}</title></rect>'
    )
    if numbered and chance >= 0.005:
        ink = "var(--paper)" if shade > 0.6 else "var(--ink)"
        yield _text(x + _CELL / 2 - 0.5, y + _CELL / 2 + 2.5, f"{100 * chance:.0f}", fill=ink)


def _label(classes: Sequence[int], along: bool, number: int) -> str:
    middle = _MARGIN + number * _CELL + _CELL / 2
    x, y = (middle, _MARGIN - 8) if along else (_MARGIN - 6, middle + 3)
    return _text(x, y, str(classes[number]), anchor="middle" if along else "end")


def _text(x: float, y: float, text: str, *, anchor: str = "middle", fill: str = "var(--soft)") -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="9.5"'
    return f'<text {at} fill="{fill}">{escape(text)}</text>'
