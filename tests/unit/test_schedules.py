"""Schedules: known values, ends, and what holds for all of them."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright import schedules

ALL = [
    schedules.constant,
    schedules.linear_warmup,
    schedules.linear,
    schedules.cosine,
    schedules.one_cycle,
    schedules.warmup_stable_decay,
    schedules.step_decay,
    schedules.inverse_sqrt,
]


@pytest.mark.parametrize("schedule", ALL)
@given(step=st.integers(-5, 10_050), total=st.integers(1, 10_000))
def test_factors_are_shares_of_the_learning_rate(schedule: schedules.Schedule, step: int, total: int) -> None:
    assert 0.0 <= schedule(step, total) <= 1.0 + 1e-12


@pytest.mark.parametrize("schedule", ALL)
def test_travels_by_pickle(schedule: schedules.Schedule) -> None:
    assert pickle.loads(pickle.dumps(partial(schedule)))(3, 10) == schedule(3, 10)


@pytest.mark.parametrize("total", [13, 100, 705])
@pytest.mark.parametrize("rise", [0.1, 0.3, 0.5])
def test_one_cycle_is_torchs(total: int, rise: float) -> None:
    from torch import nn, optim

    optimizer = optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    theirs = optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1.0, total_steps=total, pct_start=rise, cycle_momentum=False
    )
    for step in range(total):
        assert schedules.one_cycle(step, total, rise=rise) == pytest.approx(theirs.get_last_lr()[0], abs=1e-9)
        optimizer.step()
        if step + 1 < total:
            theirs.step()


def test_linear_warmup_then_another() -> None:
    schedule = partial(schedules.linear_warmup, warmup=0.4, then=schedules.cosine)
    assert [schedule(step, 10) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert schedule(4, 10) == pytest.approx(1.0)
    assert schedule(9, 10) == pytest.approx(0.0)


def test_linear_and_cosine_end_where_they_are_told() -> None:
    for schedule in (schedules.linear, schedules.cosine):
        assert schedule(0, 11) == pytest.approx(1.0)
        assert schedule(5, 11, end=0.2) == pytest.approx(0.6)
        assert schedule(10, 11, end=0.2) == schedule(99, 11, end=0.2) == pytest.approx(0.2)


def test_warmup_stable_decay_has_three_parts() -> None:
    factors = [schedules.warmup_stable_decay(step, 10, warmup=0.2, decay=0.4) for step in range(10)]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_step_decay() -> None:
    assert [schedules.step_decay(step, 8) for step in (0, 3, 4, 6)] == pytest.approx([1.0, 1.0, 0.1, 0.01])


def test_inverse_sqrt_peaks_at_the_end_of_the_warm_up() -> None:
    factors = [schedules.inverse_sqrt(step, 100, warmup=0.1) for step in range(100)]
    assert factors.index(max(factors)) == 9 and factors[39] == pytest.approx(0.5)


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="warmup=5 is a share of the run: use a number from 0 to 1"):
        schedules.cosine(0, 10, warmup=5)
