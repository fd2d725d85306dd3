"""Feeds of units that are leased: the same as the stream of each share gives, in whatever order they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trainwright.core.data import Feed, FeedAssignment
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.core.topology import WorkUnit
from trainwright.datasets.dataset import table
from trainwright.datasets.loading.batch_loader import BatchLoader, LeasedFeeds

ROWS, BATCH, SHARES, STEPS = 203, 24, 3, 18


def stream(share: int, **job: Any) -> BatchLoader:
    data = table({"id": np.arange(ROWS)})
    feeding = FeedAssignment(data_ranks=range(share, share + 1), total=SHARES)
    return BatchLoader(data, batch_size=BATCH, epochs=2, seed=3, feeding=feeding, **job)


def rows(feed: Feed) -> tuple[int, range, list[int], list[float]]:
    ((batch,),) = feed.parts
    return feed.step, feed.data_ranks, batch.columns["id"].tolist(), batch.weights.tolist()


@pytest.mark.parametrize(
    "units",
    [
        [(0, 1, 1), (1, 1, 1), (2, 1, 1)],  # its own, in order
        [(0, 1, 1), (4, 1, 1), (9, 1, 1), (2, 1, 1), (10, 1, 1)],  # some done by others, one handed out again
        [(3, 0, 1), (3, 2, 1), (4, 1, 1), (17, 2, 1)],  # those of others
        [(0, 1, 4), (4, 1, 4), (4, 2, 4), (16, 1, 2)],  # of several steps
    ],
)
def test_whoever_reads_a_unit_reads_the_same(units: list[tuple[int, int, int]]) -> None:
    with LeasedFeeds(stream(1), lambda: stream(1)) as own:
        for step, share, steps in units:
            found = [rows(feed) for feed in own.feeds(WorkUnit(step=step, share=share, steps=steps))]
            with stream(share).feeds(step) as feeds:
                assert found == [rows(next(feeds)) for _ in range(steps)]


@pytest.mark.parametrize("job", [{}, {"drop_last": True}, {"epoch_samples": 77}], ids=["plain", "drop_last", "virtual"])
def test_units_in_any_order_are_the_samples_of_one_device(job: dict[str, Any]) -> None:
    """Each step's, whole or left out at an epoch's end as the job says; virtual epochs end where they do."""
    data = table({"id": np.arange(ROWS)})
    whole = BatchLoader(
        data, batch_size=BATCH, epochs=2, seed=3, feeding=FeedAssignment(data_ranks=range(1), total=1), **job
    )
    units = [WorkUnit(step=step, share=share) for step in range(whole.schedule.total_steps) for share in range(SHARES)]
    found: dict[int, list[int]] = {}
    with LeasedFeeds(stream(1, **job), lambda: stream(1, **job)) as own:
        for unit in np.random.default_rng(1).permutation(len(units)):
            for feed in own.feeds(units[unit]):
                _, _, ids, weights = rows(feed)
                found.setdefault(feed.step, []).extend(one for one, weight in zip(ids, weights, strict=True) if weight)
    with whole.feeds(0) as feeds:
        for feed in feeds:
            assert sorted(found.pop(feed.step)) == sorted(rows(feed)[2])
    assert not found


def test_its_own_share_is_read_ahead_by_one_thread_and_others_are_opened_once() -> None:
    opened = list[int]()

    def others() -> BatchLoader:
        opened.append(1)
        return stream(1)

    with LeasedFeeds(stream(1), others) as own:
        assert own.prefetch is None
        for step in range(4):
            list(own.feeds(WorkUnit(step=step, share=1)))
        prefetch = own.prefetch
        assert prefetch is not None and prefetch.chunk_steps > 1 and not opened
        for share in (0, 2, 0):
            list(own.feeds(WorkUnit(step=1, share=share)))
        assert opened == [1]
    assert own.prefetch is None


def _plan(servers: int, topology: str) -> Plan:
    return Plan(
        strategy="s", engine="m:E", mesh=Mesh(data=3), batch_size=24, placement=WorkerResources(cpus=1),
        servers=servers,
        topology=topology,  # type: ignore[arg-type]
    )  # fmt: skip


def test_servers_are_fed_nothing_and_workers_beyond_the_shares_begin_again() -> None:
    plan = _plan(2, "independent")
    fed = [plan.feed_of(rank).data_ranks for rank in range(7)]
    assert [len(ranks) for ranks in fed] == [0, 0, 1, 1, 1, 1, 1]
    assert [ranks.start for ranks in fed[2:]] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("open_stream", [stream])
def test_a_step_of_any_share_is_read_on_its_own(open_stream: Callable[[int], BatchLoader]) -> None:
    """Shares of a step together are its batch."""
    feeds = [open_stream(0).feed(8, share) for share in range(SHARES)]
    ids = [sample for feed in feeds for sample in rows(feed)[2]]
    assert sorted(ids) == sorted(set(ids)) and len(ids) == feeds[0].rows == ROWS % BATCH
