"""What a search found as HTML: in a notebook, and as a page of its own; the settings as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from markupsafe import Markup

from trainwright.distillation.search_result import Found, Score, Setting, model_rows, notes, setting_rows
from trainwright.reporting import formatting
from trainwright.reporting.html.templates import fill

_WIDE, _LEFT, _RIGHT, _LANE, _TOP, _FOOT = 960.0, 190.0, 900.0, 26.0, 8.0, 44.0
_TICKS = 5
_ALONE, _OWN, _CHOSEN = "var(--series-4,#d9920f)", "var(--series-5,#7c8fa6)", "var(--series-1,#3f7fdd)"
_INK, _SOFT, _GRID = "var(--ink,currentColor)", "var(--soft,#7b8694)", "var(--grid,#8a94a033)"


def found_html(found: Found) -> str:
    """The sentence, the settings as a picture and a table, and the models; light and dark, nothing fetched."""
    return fill(
        "found.html.j2",
        title=found.name,
        sentence=found.sentence,
        helped=found.helped,
        picture=Markup(settings_svg(found)),
        metric=found.metric,
        tables=[setting_rows(found), model_rows(found)],
        notes=notes(found),
    )


def found_page(found: Found) -> str:
    """The same as a whole page."""
    return fill("page.html.j2", title=f"{found.name}: search", body=Markup(found_html(found)))


def settings_svg(found: Found) -> str:
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


def _axis(found: Found, scale: _Scale, foot: float) -> Iterator[str]:
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
        said = f"<title>{formatting.figure(value)}</title>"
        yield f'<circle cx="{scale.x(value):.1f}" cy="{y:g}" r="3" fill="{colour}" opacity="0.55">{said}</circle>'
    x, said = scale.x(each.validation.mean), f"<title>{escape(each.text)}: {escape(str(each.validation))}</title>"
    yield f'<rect x="{x - 2:.1f}" y="{y - 8:g}" width="4" height="16" rx="1.5" fill="{colour}">{said}</rect>'
