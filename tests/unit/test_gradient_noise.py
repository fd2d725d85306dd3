"""The gradient noise scale from synthetic gradients whose noise scale is known."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core.data import (
    LEAST_NOISE_SAMPLES,
    OVERSIZED_BATCH_FACTOR,
    GradientScatter,
    NoiseScale,
    NoiseScaleAverage,
)


def scatter_of(sums: npt.NDArray[np.float64], rows: list[int]) -> GradientScatter:
    """By the definition, from each share's sum of gradients (shares, parameters)."""
    parts = sum(float(one @ one) / count for one, count in zip(sums, rows, strict=True) if count)
    whole = sums.sum(axis=0)
    return GradientScatter(samples=sum(rows), shares=sum(map(bool, rows)), parts=parts, whole=float(whole @ whole))


class Synthetic:
    """Samples' gradients are normal around G with a covariance that differs by direction."""

    def __init__(self, seed: int, *, scale: float, size: int = 200) -> None:
        self.random = np.random.default_rng(seed)
        self.mean = self.random.normal(size=size)
        self.deviation = self.random.uniform(0.2, 2.0, size)
        self.deviation *= math.sqrt(scale * float(self.mean @ self.mean) / float(self.deviation @ self.deviation))

    def step(self, rows: list[int]) -> GradientScatter:
        noise = self.random.normal(size=(len(rows), len(self.mean))) * self.deviation
        counts = np.array(rows, float)[:, None]
        return scatter_of(counts * self.mean + np.sqrt(counts) * noise, rows)


SHARES = st.lists(st.integers(0, 64), min_size=2, max_size=8).filter(lambda rows: sum(map(bool, rows)) > 1)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), rows=SHARES, scale=st.floats(0.5, 200.0))
def test_both_estimates_are_without_bias_for_any_shares(seed: int, rows: list[int], scale: float) -> None:
    world = Synthetic(seed, scale=scale)
    found = np.array([world.step(rows).estimates() for _ in range(600)])
    truth = np.array([float(world.deviation @ world.deviation), float(world.mean @ world.mean)])
    assert np.all(np.abs(found.mean(axis=0) - truth) <= 5.5 * found.std(axis=0) / math.sqrt(len(found)))


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(8, 256), shares=st.integers(2, 8), scale=st.floats(20, 400))
def test_even_shares_give_the_papers_estimators(seed: int, rows: int, shares: int, scale: float) -> None:
    scatter = Synthetic(seed, scale=scale).step([rows] * shares)
    small, big = float(rows), float(rows * shares)
    one, all_of = scatter.parts / big, scatter.whole / big**2  # mean |g_small|^2, |g_big|^2
    square = (big * all_of - small * one) / (big - small)
    trace = (one - all_of) / (1 / small - 1 / big)
    assert scatter.estimates() == pytest.approx((trace, square), rel=1e-9, abs=1e-9 * one)


@pytest.mark.parametrize(
    ("scale", "rows"), [(30.0, [16, 16]), (300.0, [64, 64, 64, 64]), (300.0, [10, 90, 0, 33]), (2000.0, [256] * 8)]
)
def test_the_interval_holds_the_truth_and_is_narrow(scale: float, rows: list[int]) -> None:
    inside = 0
    for seed in range(60):
        world, average = Synthetic(seed, scale=scale), NoiseScaleAverage()
        for _ in range(80):
            average.add(world.step(rows))
        noise = average.noise()
        assert noise is not None and noise.low < noise.scale < noise.high
        assert noise.batch == pytest.approx(sum(rows)) and noise.count == 80
        inside += noise.low <= scale <= noise.high
    assert inside >= 52  # of 60; 57 expected


def test_the_average_follows_training() -> None:
    average = NoiseScaleAverage()
    for scale, steps in ((20.0, 60), (200.0, 120)):
        world = Synthetic(3, scale=scale)
        for _ in range(steps):
            average.add(world.step([32, 32, 32]))
    noise = average.noise()
    assert noise is not None and noise.low <= 200 <= noise.high


def test_nothing_is_said_before_it_can_be_trusted() -> None:
    world, average = Synthetic(1, scale=50.0), NoiseScaleAverage()
    for _ in range(LEAST_NOISE_SAMPLES - 1):
        average.add(world.step([32, 32]))
    assert average.noise() is None
    average.add(world.step([32, 32]))
    assert average.noise() is not None


def test_a_gradient_that_is_all_noise_gives_no_figure() -> None:
    world, average = Synthetic(2, scale=1e7), NoiseScaleAverage()
    for _ in range(100):
        average.add(world.step([8, 8]))
    assert average.noise() is None


@pytest.mark.parametrize(
    "scatter",
    [
        GradientScatter(samples=8, shares=1, parts=3.0, whole=1.0),
        GradientScatter(samples=8, shares=2, parts=math.inf, whole=1.0),
        GradientScatter(samples=8, shares=2, parts=3.0, whole=math.nan),
        GradientScatter(samples=0, shares=2, parts=0.0, whole=0.0),
    ],
)
def test_steps_that_tell_nothing_are_left_out(scatter: GradientScatter) -> None:
    average = NoiseScaleAverage()
    for _ in range(2 * LEAST_NOISE_SAMPLES):
        average.add(scatter)
    assert average.noise() is None


def test_equal_gradients_have_no_noise_and_no_figure() -> None:
    average = NoiseScaleAverage()
    for _ in range(2 * LEAST_NOISE_SAMPLES):
        average.add(scatter_of(np.array([[2.0, 4.0], [1.0, 2.0]]), [2, 1]))
    assert average.noise() is None


def test_advice_comes_with_a_batch_far_above_alone() -> None:
    near = NoiseScale(scale=100.0, low=80.0, high=128.0, batch=OVERSIZED_BATCH_FACTOR * 128, count=40)
    assert near.advice == ""
    far = NoiseScale(scale=100.0, low=80.0, high=128.0, batch=1024, count=40)
    assert "1,024 samples is 8 times" in far.advice and "100 samples, 80 to 128" in far.advice
