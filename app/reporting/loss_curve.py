"""The loss of a run as a small SVG, drawn again and again while the run trains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from trainwright.core import formatting

_MOST_POINTS = 300
_WIDTH, _HEIGHT = 640.0, 160.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 628.0, 10.0, 136.0  # of the axes
_OUTLIERS = 0.02  # this share of the largest losses may leave the axes
_FEW = 20  # with fewer losses, all are within the axes

_Point = tuple[float, float]


class LossCurve:
    """Losses of training and evaluations by step. It keeps at most 300 points of training, means of equally many steps.

    Drawing takes about a millisecond, since it happens on the thread that drives the run.
    """

    def __init__(self) -> None:
        self._width = 1  # steps of a bin
        self._bins: dict[int, tuple[float, int]] = {}  # sum and number of losses
        self._evaluations: dict[int, float] = {}

    def add(self, steps: Sequence[int], losses: Sequence[float]) -> None:
        """Add losses of training."""
        for step, loss in zip(steps, losses, strict=True):
            if math.isfinite(loss):
                self._put(max(step - 1, 0) // self._width, loss, 1)
        while len(self._bins) > _MOST_POINTS:
            old, self._bins, self._width = self._bins, {}, 2 * self._width
            for number, (total, count) in old.items():
                self._put(number // 2, total, count)

    def evaluate(self, step: int, loss: float) -> None:
        """Add the loss of an evaluation; one that is not finite is left out."""
        if math.isfinite(loss):
            self._evaluations[step] = loss
        if len(self._evaluations) > _MOST_POINTS:
            self._evaluations = dict([*self._evaluations.items()][1::2])

    def rewind(self, step: int) -> None:
        """Remove what is after a step: a recovery computes it again."""
        self._bins = {number: each for number, each in self._bins.items() if number * self._width < step}
        self._evaluations = {at: loss for at, loss in self._evaluations.items() if at <= step}

    def svg(self, total_steps: int) -> str:
        """Return the drawing; empty before there are two points of training. Colours are CSS variables of the page."""
        training = [((number + 1) * self._width, total / count) for number, (total, count) in self._bins.items()]
        if len(training) < 2:
            return ""
        evaluations = [*self._evaluations.items()]
        last = max(total_steps, training[-1][0], 1)
        low, high = _limits([loss for _, loss in training], [loss for _, loss in evaluations])

        def place(points: Iterable[_Point]) -> list[_Point]:
            return [
                (
                    _LEFT + (_RIGHT - _LEFT) * min(step / last, 1.0),
                    _BOTTOM - (_BOTTOM - _TOP) * min((loss - low) / (high - low), 1.0),
                )
                for step, loss in points
            ]

        parts = [
            *_axes(last, low, high),
            _line(place(training), "series-1"),
            *([_line(place(evaluations), "series-2")] if evaluations else []),
            *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="var(--series-2)"/>' for x, y in place(evaluations)),
            *_legend(["training", *["evaluation"] * bool(evaluations)]),
        ]
        return (
            f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="loss by step" font-size="11" '
            f'style="display:block;width:100%;max-width:{_WIDTH:g}px">{"".join(parts)}</svg>'
        )

    def _put(self, number: int, total: float, count: int) -> None:
        before, already = self._bins.get(number, (0.0, 0))
        self._bins[number] = (before + total, already + count)


def _limits(training: Sequence[float], evaluations: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the y axis, which are different. A few huge losses at the start do not flatten the curve."""
    ordered = sorted(training)
    most = ordered[-1] if len(ordered) < _FEW else ordered[int((1 - _OUTLIERS) * (len(ordered) - 1))]
    low, high = min([ordered[0], *evaluations]), max([most, *evaluations])
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - margin, high + margin


def _axes(last: int, low: float, high: float) -> Iterator[str]:
    """Draw three lines with their losses, and the first and the last step."""
    for part in (0.0, 0.5, 1.0):
        y, loss = _BOTTOM - part * (_BOTTOM - _TOP), low + part * (high - low)
        yield f'<path d="M{_LEFT:g} {y:g}H{_RIGHT:g}" stroke="var(--grid)"/>'
        yield _text(_LEFT - 6, y + 4, formatting.metric(loss), "end")
    yield _text(_LEFT, _BOTTOM + 16, "0", "middle")
    yield _text(_RIGHT, _BOTTOM + 16, f"step {last:,}", "end")


def _line(points: Iterable[_Point], colour: str) -> str:
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{drawn}" fill="none" stroke="var(--{colour})" stroke-width="1.6"/>'


def _legend(names: Sequence[str]) -> Iterator[str]:
    for number, name in enumerate(names):
        x = (_LEFT + _RIGHT) / 2 + 130 * (number - len(names) / 2)
        yield f'<path d="M{x:g} {_BOTTOM + 12:g}h14" stroke="var(--series-{number + 1})" stroke-width="3"/>'
        yield _text(x + 20, _BOTTOM + 16, f"{name} loss", "start")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="var(--soft)">{text}</text>'
