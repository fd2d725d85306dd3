"""The quality of shuffling, against a perfect permutation and against none."""

from __future__ import annotations

import numpy as np
import pytest

import trainwright as tw
from trainwright.datasets.data_source import Rows
from trainwright.datasets.dataset_tools import ShuffleQuality, shuffle_quality
from trainwright.datasets.loading.batch_loader import make_schedule
from trainwright.datasets.sample_order import Lanes, SampleOrder, choose_lanes


class Perfect(SampleOrder):
    """A permutation of all rows at once."""

    def rows_at(self, epoch: int, positions: Rows) -> Rows:
        return np.random.default_rng([self.seed, epoch]).permutation(self.lanes.rows)[positions]


def perfect(rows: int, seed: int) -> SampleOrder:
    return Perfect(lanes=Lanes(rows=rows), seed=seed)


def test_a_perfect_permutation_is_measured_as_one() -> None:
    found = [shuffle_quality(perfect(20_000, seed), 256) for seed in range(8)]
    assert np.mean([quality.scatter for quality in found]) == pytest.approx(1.0, abs=0.01)
    assert np.mean([quality.clumping for quality in found]) == pytest.approx(1.0, abs=0.05)
    assert np.mean([quality.memory for quality in found]) == pytest.approx(0.0, abs=0.01)


def test_no_shuffle_is_measured_as_none() -> None:
    quality = shuffle_quality(SampleOrder(lanes=Lanes(rows=20_000), shuffle=False), 256)
    assert quality.scatter < 0.001 and quality.clumping > 10 and quality.memory == pytest.approx(1.0)


@pytest.mark.parametrize("batch_size", [8, 50, 256])
@pytest.mark.parametrize(("rows", "groups"), [(60_000, 12), (200_000, 40), (200_000, 1)])
def test_what_fits_the_memory_of_a_reader_is_shuffled_as_by_a_perfect_permutation(
    rows: int, groups: int, batch_size: int
) -> None:
    firsts = tuple(range(0, rows, rows // groups))
    quality = shuffle_quality(SampleOrder(lanes=choose_lanes(rows, 1024, groups=firsts), seed=1), batch_size)
    assert quality.scatter > 0.95
    assert quality.clumping < 1.05, "batches are at least as even as chance makes them"
    assert abs(quality.memory) < 0.05


@pytest.mark.parametrize("groups", [100, 1])
def test_what_does_not_is_shuffled_within_that_memory(groups: int) -> None:
    """4 GB and 512 MiB: neighbours are scattered over an eighth of the epoch, wherever in it that is."""
    firsts = tuple(range(0, 1_000_000, 1_000_000 // groups))
    lanes = choose_lanes(1_000_000, 4096, groups=firsts)
    quality = shuffle_quality(SampleOrder(lanes=lanes, seed=1), 256)
    held = lanes.count * lanes.window / lanes.rows
    assert 0.1 < 0.8 * held < quality.scatter < 1.1 * held
    assert quality.clumping < 3.0
    assert abs(quality.memory) < 0.2


def test_a_small_window_shuffles_less_and_says_so() -> None:
    def quality(window: int) -> ShuffleQuality:
        return shuffle_quality(SampleOrder(lanes=Lanes(rows=50_000, count=4, window=window), seed=1), 256)

    small, large = quality(64), quality(12_500)
    assert small.scatter < 0.1 < 0.9 < large.scatter
    assert small.clumping > 3 * large.clumping


def test_the_window_of_a_job_reaches_its_schedule() -> None:
    """By default all of so small a table is mixed."""
    data = tw.datasets.table({"x": np.arange(4800)})
    index = data.index()

    def quality(window: int | None) -> ShuffleQuality:
        job = tw.Job(
            name="n", model=dict, optimizer=list, train=data, loss=max, inputs="x", batch_size=8, shuffle_window=window
        )
        return shuffle_quality(make_schedule(index, **job.ordering()).order, job.batch_size)

    assert quality(8).scatter < 0.5 * quality(None).scatter
