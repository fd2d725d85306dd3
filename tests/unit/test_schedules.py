"""Schedules: known values, ends, and what holds for all of them."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright import lr_schedules

ALL = [
    lr_schedules.constant,
    lr_schedules.linear_warmup,
    lr_schedules.linear,
    lr_schedules.cosine,
    lr_schedules.one_cycle,
    lr_schedules.warmup_stable_decay,
    lr_schedules.step_decay,
    lr_schedules.inverse_sqrt,
]


@pytest.mark.parametrize("schedule", ALL)
@given(step=st.integers(-5, 10_050), total=st.integers(1, 10_000))
def test_factors_are_shares_of_the_learning_rate(schedule: lr_schedules.Schedule, step: int, total: int) -> None:
    assert 0.0 <= schedule(step, total) <= 1.0 + 1e-12


@pytest.mark.parametrize("schedule", ALL)
def test_travels_by_pickle(schedule: lr_schedules.Schedule) -> None:
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
        assert lr_schedules.one_cycle(step, total, rise=rise) == pytest.approx(theirs.get_last_lr()[0], abs=1e-9)
        optimizer.step()
        if step + 1 < total:
            theirs.step()


def test_linear_warmup_then_another() -> None:
    schedule = partial(lr_schedules.linear_warmup, warmup=0.4, then=lr_schedules.cosine)
    assert [schedule(step, 10) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert schedule(4, 10) == pytest.approx(1.0)
    assert schedule(9, 10) == pytest.approx(0.0)


def test_linear_and_cosine_end_where_they_are_told() -> None:
    for schedule in (lr_schedules.linear, lr_schedules.cosine):
        assert schedule(0, 11) == pytest.approx(1.0)
        assert schedule(5, 11, end=0.2) == pytest.approx(0.6)
        assert schedule(10, 11, end=0.2) == schedule(99, 11, end=0.2) == pytest.approx(0.2)


def test_warmup_stable_decay_has_three_parts() -> None:
    factors = [lr_schedules.warmup_stable_decay(step, 10, warmup=0.2, decay=0.4) for step in range(10)]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_step_decay() -> None:
    assert [lr_schedules.step_decay(step, 8) for step in (0, 3, 4, 6)] == pytest.approx([1.0, 1.0, 0.1, 0.01])


def test_inverse_sqrt_peaks_at_the_end_of_the_warm_up() -> None:
    factors = [lr_schedules.inverse_sqrt(step, 100, warmup=0.1) for step in range(100)]
    assert factors.index(max(factors)) == 9 and factors[39] == pytest.approx(0.5)


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="warmup=5 is a share of the run: use a number from 0 to 1"):
        lr_schedules.cosine(0, 10, warmup=5)


@given(
    reference=st.integers(1, 512),
    times=st.integers(1, 64),
    warmup_steps=st.integers(0, 50),
    step=st.integers(-3, 200),
    total=st.integers(50, 150),
)
def test_linear_scaling_reaches_the_ratio_of_the_batches_in_a_straight_line(
    reference: int, times: int, warmup_steps: int, step: int, total: int
) -> None:
    factor = lr_schedules.linear_scaling(
        step, total, batch_size=reference * times, reference=reference, warmup_steps=warmup_steps
    )
    done = min(max(step, 0) + 1, warmup_steps) / warmup_steps if warmup_steps else 1.0
    assert factor == pytest.approx(1.0 + (times - 1.0) * done)


def test_linear_scaling_then_another_and_downwards() -> None:
    up = partial(
        lr_schedules.linear_scaling,
        batch_size=2048,
        reference=256,
        warmup_steps=4,
        then=partial(lr_schedules.linear, end=0),
    )
    assert [up(step, 8) for step in (0, 3, 4, 7)] == pytest.approx([1 + 7 / 4, 8.0, 8.0, 0.0])
    down = partial(lr_schedules.linear_scaling, batch_size=64, reference=256, warmup_steps=4)
    assert [down(step, 8) for step in (0, 3, 7)] == pytest.approx([0.25] * 3)


@pytest.mark.parametrize(
    ("given", "named"),
    [({"reference": 0}, "reference=0"), ({"warmup_steps": -1}, "warmup_steps=-1"), ({"warmup_steps": 11}, "0 to 10")],
)
def test_linear_scaling_refuses_nonsense(given: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        lr_schedules.linear_scaling(0, 10, **{"batch_size": 8, "reference": 4, "warmup_steps": 2, **given})
