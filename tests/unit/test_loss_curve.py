"""The curve of the loss that changes while a run trains."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from xml.etree import ElementTree

from trainwright.reporting.loss_curve import LossCurve


def curve(losses: Sequence[float]) -> LossCurve:
    made = LossCurve()
    made.add([*range(1, len(losses) + 1)], losses)
    return made


def lines(svg: str) -> list[list[tuple[float, float]]]:
    """The points of each line."""
    assert ElementTree.fromstring(svg).tag == "svg"
    found = re.findall(r'points="([^"]*)"', svg)
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in points.split())] for points in found]


def test_a_curve_needs_two_points() -> None:
    assert curve([]).svg(10) == curve([1.0]).svg(10) == curve([math.nan, 1.0]).svg(10) == ""


def test_training_and_evaluations_share_the_axes() -> None:
    made = curve([4.0, 3.0, 2.0, 1.0])
    made.evaluate(2, 3.5)
    made.evaluate(4, 1.5)
    made.evaluate(6, math.nan)
    training, evaluations = lines(made.svg(8))
    assert [x for x, _ in evaluations] == [training[1][0], training[3][0]]
    heights = [y for _, y in training]
    assert heights == sorted(heights) and training[1][1] < evaluations[0][1] + 40 < training[3][1] + 40
    assert "evaluation loss" in made.svg(8) and "evaluation" not in curve([2.0, 1.0]).svg(8)


def test_a_long_run_has_few_points_and_ends_at_its_last_step() -> None:
    made = LossCurve()
    for first in range(1, 100_001, 10):
        made.add([*range(first, first + 10)], [1.0 + 1 / first] * 10)
    (points,) = lines(made.svg(100_000))
    assert 150 <= len(points) <= 300 and max(x for x, _ in points) == points[-1][0] <= 628.0


def test_steps_that_are_done_again_replace_the_old_ones() -> None:
    made = curve([2.0] * 10 + [9.0] * 10)
    made.evaluate(10, 2.0)
    made.evaluate(20, 9.0)
    made.rewind(10)
    made.add([*range(11, 21)], [1.0] * 10)
    again = curve([2.0] * 10 + [1.0] * 10)
    again.evaluate(10, 2.0)
    assert made.svg(20) == again.svg(20)


def test_a_huge_first_loss_does_not_flatten_the_curve() -> None:
    (points,) = lines(curve([1e6, *(2.0 - number / 100 for number in range(100))]).svg(101))
    heights = [y for _, y in points]
    assert min(heights) >= 10.0 and max(heights) - sorted(heights)[1] > 100, "within the axes, and not flat"


def test_a_constant_loss_is_drawn() -> None:
    (points,) = lines(curve([0.0, 0.0, 0.0]).svg(3))
    assert len({y for _, y in points}) == 1
