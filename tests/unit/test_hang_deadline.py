"""When silence is a hang: in proportion to what batches took so far."""

from __future__ import annotations

import asyncio

import pytest

from trainwright.datasets.ray_data.actor_pools import _InFlight
from trainwright.datasets.ray_data.hang_timeout import CHECK_INTERVAL_S, BatchDurations, SilenceTimer


@pytest.mark.parametrize(
    ("taken_s", "lost", "limit_s"),
    [
        ((), 0, 300.0),  # nothing is known
        ((), 2, 300.0),
        ((0.1,), 0, 15.0),  # the floor
        ((2.0, 4.0, 0.1), 0, 40.0),  # the longest counts, not the last
        ((50.0,), 0, 300.0),  # no more than the job says
        ((0.1,), 1, 150.0),  # rows that are slow have more time when they come again
        ((0.1,), 2, 300.0),
        ((2.0,), 1, 200.0),
    ],
)
def test_batches_are_given_ten_times_what_the_longest_took(
    taken_s: tuple[float, ...], lost: int, limit_s: float
) -> None:
    pace = BatchDurations(most_s=300.0)
    for each in taken_s:
        pace.took(each)
    assert pace.limit_s(lost) == limit_s


def test_the_job_s_deadline_holds_where_it_is_shorter_than_the_floor() -> None:
    pace = BatchDurations(most_s=4.0)
    pace.took(1.0)
    assert pace.limit_s() == pace.limit_s(2) == 4.0


def test_what_is_usual_is_told_where_it_is_known() -> None:
    pace = BatchDurations(most_s=300.0)
    assert pace.usual == ""
    pace.took(0.1234)
    assert pace.usual == ", and no batch took more than 0.12 s before"


def test_silence_lasts_until_something_is_heard() -> None:
    silence = SilenceTimer(looked_s=100.0)
    assert [silence.look(100.0 + CHECK_INTERVAL_S * count) for count in (1, 2, 3)] == [
        CHECK_INTERVAL_S,
        2 * CHECK_INTERVAL_S,
        3 * CHECK_INTERVAL_S,
    ]
    assert silence.end(100.0 + 3.5 * CHECK_INTERVAL_S) == 3.5 * CHECK_INTERVAL_S
    assert silence.seconds == 0.0 and silence.look(100.0 + 4 * CHECK_INTERVAL_S) == 0.5 * CHECK_INTERVAL_S


def test_a_listener_that_stood_still_blames_nobody() -> None:
    silence = SilenceTimer(looked_s=100.0)
    assert silence.look(100.0 + 3600.0) == 2 * CHECK_INTERVAL_S
    assert silence.look(100.0 + 3601.0) == 2 * CHECK_INTERVAL_S + 1.0
    pace = BatchDurations(most_s=300.0)
    pace.took(SilenceTimer(looked_s=0.0).end(3600.0))
    assert pace.limit_s() == 10 * 2 * CHECK_INTERVAL_S, "nor is it what a batch takes"


def test_an_actor_without_work_is_not_silent() -> None:
    pace = BatchDurations(most_s=0.0)

    async def waits() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_InFlight().silent(pace), timeout=0.05)

    asyncio.run(waits())
