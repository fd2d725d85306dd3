"""The order of samples: exactly once, the same for any number of workers, and stable for ever."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.streams import place
from trainwright.core.data import fold_seed
from trainwright.core.errors import DataError
from trainwright.datasets.sample_order import (
    HIGHLY_COMPOSITE,
    Lanes,
    SampleOrder,
    StepSchedule,
    choose_lanes,
    steps_per_epoch,
)

MASK = (1 << 64) - 1
GOLDEN = [692, 329, 850, 479, 36, 659, 206, 780, 415, 929, 525, 151]


@st.composite
def orders(draw: st.DrawFn) -> SampleOrder:
    rows = draw(st.integers(1, 400))
    cuts = draw(st.sets(st.integers(1, rows), max_size=12))
    lanes = Lanes(
        rows=rows,
        count=draw(st.integers(1, min(rows, 30))),
        window=draw(st.integers(1, 120)),
        groups=(0, *sorted(cut for cut in cuts if cut < rows)),
    )
    return SampleOrder(lanes=lanes, seed=draw(st.integers(0, 1 << 40)), shuffle=draw(st.booleans()))


@given(orders(), st.integers(0, 5))
def test_every_row_comes_exactly_once_per_epoch(order: SampleOrder, epoch: int) -> None:
    rows = order.rows_of(epoch, 0, order.lanes.rows)
    assert sorted(rows.tolist()) == list(range(order.lanes.rows))


@given(orders(), st.integers(0, 3), st.data())
def test_direct_access_equals_walking(order: SampleOrder, epoch: int, data: st.DataObject) -> None:
    walked = [int(order.rows_of(epoch, position, position + 1)[0]) for position in range(order.lanes.rows)]
    start = data.draw(st.integers(0, order.lanes.rows))
    stop = data.draw(st.integers(start, order.lanes.rows))
    fresh = pickle.loads(pickle.dumps(order))
    assert fresh.rows_of(epoch, start, stop).tolist() == walked[start:stop]


@settings(max_examples=60)
@given(orders(), st.integers(1, 50), st.booleans())
def test_a_global_batch_is_the_same_for_any_number_of_ranks(order: SampleOrder, batch_size: int, late: bool) -> None:
    start = order.lanes.rows // 2 if late else 0
    stop = min(start + batch_size, order.lanes.rows)
    batch = dict(zip(range(start, stop), order.rows_of(1, start, stop).tolist(), strict=True))
    for total in (1, 2, 3, 4, 5, 6, 7, 40):
        union: dict[int, int] = {}
        for rank in range(total):
            positions, rows = order.share(1, start, stop, rank, total)
            assert len(rows) <= order.largest_share(total, batch_size)
            assert not union.keys() & set(positions.tolist())
            union.update(zip(positions.tolist(), rows.tolist(), strict=True))
        assert union == batch


@given(orders())
def test_lanes_are_contiguous_and_differ_by_at_most_one_row(order: SampleOrder) -> None:
    lanes = order.lanes
    ends = np.append(np.sort(lanes.starts), lanes.rows)
    sizes = ends[np.searchsorted(ends, lanes.starts) + 1] - lanes.starts
    assert sizes.sum() == lanes.rows
    assert set(sizes[: lanes.rows % lanes.count]) <= {lanes.rows // lanes.count + 1}
    assert set(sizes[lanes.rows % lanes.count :]) <= {lanes.rows // lanes.count}


@given(orders(), st.integers(1, 40))
def test_a_rank_reads_only_its_lanes(order: SampleOrder, total: int) -> None:
    if order.shuffle and total <= order.lanes.count:
        for rank in range(min(total, 3)):
            _, rows = order.share(0, 0, order.lanes.rows, rank, total)
            stored = np.argsort(order.lanes.starts)
            lanes = stored[np.searchsorted(order.lanes.starts[stored], rows, "right") - 1]
            assert set((lanes % total).tolist()) <= {rank}


@given(orders())
def test_windows_are_bounded_and_whole_row_groups_where_these_fit(order: SampleOrder) -> None:
    lanes = order.lanes
    assert np.diff(lanes.edges).max() <= lanes.window
    assert set(lanes.starts.tolist()) <= set(lanes.edges.tolist())
    allowed = {*lanes.groups, *lanes.starts.tolist(), lanes.rows}
    bounds = sorted(allowed)
    for edge in set(lanes.edges.tolist()) - allowed:
        place = next(index for index, bound in enumerate(bounds) if bound > edge)
        assert bounds[place] - bounds[place - 1] > lanes.window


@given(orders(), st.integers(0, 399), st.integers(1, 60))
def test_a_stand_in_is_a_row_of_the_rank_itself(order: SampleOrder, position: int, total: int) -> None:
    position %= order.lanes.rows
    owners = order.owners(np.arange(order.lanes.rows), total)
    for rank in {0, total - 1}:
        found = order.stand_in(position, rank, total)
        assert 0 <= found < order.lanes.rows
        assert owners[found] == rank or rank not in owners


def test_epochs_and_seeds_differ_and_mix() -> None:
    order = SampleOrder(lanes=Lanes(rows=10_000, count=12, window=250, groups=tuple(range(0, 10_000, 500))))
    first, second = order.rows_of(0, 0, 10_000), order.rows_of(1, 0, 10_000)
    other = SampleOrder(lanes=order.lanes, seed=1).rows_of(0, 0, 10_000)
    assert (first == second).mean() < 0.01
    assert (first == other).mean() < 0.01
    lane = first[::12]
    assert abs(np.corrcoef(np.arange(len(lane)), lane)[0, 1]) < 0.35


def test_without_shuffle_rows_come_as_they_are_stored() -> None:
    order = SampleOrder(lanes=Lanes(rows=100, count=12), shuffle=False)
    assert order.rows_of(3, 10, 20).tolist() == list(range(10, 20))
    assert [len(order.share(0, 0, 100, rank, 7)[0]) for rank in range(7)] == [15, 15, 14, 14, 14, 14, 14]


def _mixed(state: int, turns: int) -> int:
    state = (state + turns * 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_the_order_is_what_plain_integers_give() -> None:
    order = SampleOrder(lanes=Lanes(rows=23, count=3, window=4, groups=(0, 6, 14)), seed=7)
    lanes = []
    edges = order.lanes.edges.tolist()
    for start, stop in ((0, 8), (15, 23), (8, 15)):
        windows = [number for number, edge in enumerate(edges[:-1]) if start <= edge < stop]
        windows.sort(key=lambda window: _mixed(fold_seed(7, 2), window + 1))
        lane: list[int] = []
        for window in windows:
            size = edges[window + 1] - edges[window]
            keys = [_mixed(fold_seed(7, 2, window), row + 1) for row in range(size)]
            lane.extend(edges[window] + row for row in sorted(range(size), key=keys.__getitem__))
        lanes.append(lane)
    assert order.rows_of(2, 0, 23).tolist() == [lanes[i % 3][i // 3] for i in range(23)]


def test_the_order_never_changes() -> None:
    order = SampleOrder(lanes=Lanes(rows=1000, count=12, window=40, groups=tuple(range(0, 1000, 70))), seed=42)
    assert order.rows_of(3, 500, 512).tolist() == GOLDEN
    assert order.lanes.edges[:8].tolist() == [0, 35, 70, 84, 112, 140, 167, 188]


@pytest.mark.parametrize("rows", [1, 5, 31, 100, 60_000, 10_000_000])
@pytest.mark.parametrize("row_bytes", [0, 8, 800, 150_000])
def test_chosen_lanes_are_composite_and_fit_the_memory(rows: int, row_bytes: int) -> None:
    groups = tuple(range(0, rows, 5000))
    lanes = choose_lanes(rows, row_bytes, groups=groups)
    assert lanes.count in HIGHLY_COMPOSITE
    if rows * row_bytes > 512 << 20:
        assert lanes.count * lanes.window * row_bytes <= 512 << 20
        assert lanes.count >= 24


def test_a_window_of_ones_own_is_kept() -> None:
    assert choose_lanes(60_000, 800, window=100).window == 100


def test_imbalance_says_how_much_longer_the_slowest_rank_works() -> None:
    order = SampleOrder(lanes=Lanes(rows=60_000, count=12))
    assert [order.largest_share(total, 240) * total for total in (1, 2, 3, 4, 6, 12)] == [240] * 6
    assert order.largest_share(5, 240) == 1.25 * 240 / 5
    assert order.largest_share(8, 240) * 8 == pytest.approx(240 * 4 / 3)
    assert SampleOrder(lanes=order.lanes, shuffle=False).largest_share(5, 240) == 240 / 5


def test_lanes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="4 lanes"):
        Lanes(rows=3, count=4)


@pytest.mark.parametrize(("rows", "batch", "drop", "steps"), [(10, 3, False, 4), (10, 3, True, 3), (9, 3, False, 3)])
def test_steps_of_an_epoch(rows: int, batch: int, drop: bool, steps: int) -> None:
    assert steps_per_epoch(rows, batch, drop) == steps


def test_a_run_without_a_single_step_is_refused() -> None:
    with pytest.raises(DataError, match="5 rows, less than a batch of 8"):
        StepSchedule(order=SampleOrder(lanes=Lanes(rows=5)), batch_size=8, drop_last=True)


@settings(max_examples=60)
@given(orders(), st.integers(1, 90), st.integers(1, 9), st.integers(1, 5), st.booleans())
def test_shares_hold_every_sample_of_every_step_once(
    order: SampleOrder, batch_size: int, total: int, length: int, drop_last: bool
) -> None:
    if drop_last and batch_size > order.lanes.rows:
        batch_size = order.lanes.rows
    schedule = StepSchedule(order=order, batch_size=batch_size, epochs=2, drop_last=drop_last)
    step = schedule.total_steps // 2
    steps = schedule.chunk(step, length)
    assert step in steps
    shares = [schedule.share(steps, rank, total) for rank in range(total)]
    assert schedule.share_rows(steps, total).tolist() == [len(share.samples) for share in shares]
    for at, number in enumerate(steps):
        turn, position = place(schedule, number)
        expected = order.rows_of(turn, position, position + schedule.size(number))
        parts = [share.samples[share.bounds[at] : share.bounds[at + 1]] for share in shares]
        assert all(len(part) for part in parts)
        real = [part for part, share in zip(parts, shares, strict=True) if share.real[at]]
        assert sorted(np.concatenate(real).tolist()) == sorted(expected.tolist())
