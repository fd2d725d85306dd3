"""Pauses between attempts: growing, jittered, and ending with their time."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.support.run_logs import Clock
from trainwright.core.retry import FIRST_PAUSE_S, LONGEST_PAUSE_S, Backoff


def pauses_of(total_s: float, jitter: object) -> list[float]:
    clock, slept = Clock(), [0.0]
    pauses = Backoff(total_s, clock=clock, sleep=clock.sleep, jitter=jitter)  # type: ignore[arg-type]
    while pauses.wait():
        slept.append(clock.now_s)
    return [after - before for before, after in itertools.pairwise(slept)]


def test_pauses_double_up_to_a_bound_and_end_in_time() -> None:
    bounds = pauses_of(30.0, lambda: 1.0)
    assert bounds == pytest.approx([min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S) for number in range(len(bounds))])
    assert 30.0 - LONGEST_PAUSE_S < sum(bounds) <= 30.0


def test_jitter_is_full() -> None:
    rng = random.Random(1)
    many = [pauses_of(30.0, rng.random) for _ in range(200)]
    thirds = [pauses[3] / (FIRST_PAUSE_S * 8) for pauses in many]
    assert min(thirds) < 0.05 and max(thirds) > 0.95 and 0.4 < sum(thirds) / len(thirds) < 0.6


def test_no_time_is_no_second_attempt() -> None:
    assert pauses_of(0.0, lambda: 0.5) == []
