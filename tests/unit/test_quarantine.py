"""Samples of a step that is passed by are recorded in one file, before the step is taken."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from trainwright.core.data import Feed, FeedAssignment, StepReport
from trainwright.core.errors import NonFiniteLoss
from trainwright.datasets import table
from trainwright.datasets.loading.bad_samples import SkippedSample
from trainwright.datasets.loading.batch_loader import BatchLoader
from trainwright.storage.object_store import Store, open_store
from trainwright.worker.loaders import Quarantine, StepSkipper

WHY = "step 3 failed 3 times"


class Puts(Store):
    """Counts what is written."""

    count = 0

    def put(self, path: str, *pieces: bytes | memoryview, sync: bool = True) -> None:
        """Write a file."""
        self.count += 1
        super().put(path, *pieces, sync=sync)


@pytest.fixture
def store(tmp_path: Path) -> Puts:
    return Puts(str(tmp_path))


class Killed(BaseException):
    """The end of a worker."""


class Deadly:
    """An engine in whose first step the worker dies."""

    def train_step(self, feed: Feed) -> StepReport:
        """Take no step."""
        raise Killed


class NotFinite:
    """An engine whose loss is NaN while a batch counts."""

    def train_step(self, feed: Feed) -> StepReport:
        """Take a step of weight 0 alone."""
        (batch,) = feed.parts[0]
        if batch.weights.any():
            error = NonFiniteLoss("the loss became nan")
            error.samples = tuple(batch.samples.tolist())
            raise error
        return StepReport(step=feed.step + 1, loss=0.0, weight=0.0, learning_rate=0.1)


def stream(rank: int, total: int = 2) -> BatchLoader:
    feeding = FeedAssignment(data_ranks=range(rank, rank + 1), total=total)
    return BatchLoader(table({"id": np.arange(100)}), batch_size=16, epochs=3, seed=4, feeding=feeding)


def kept(store: Store) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = pq.read_table(f"{store.uri}/run/quarantine").to_pydict()
    return found


def test_a_batch_told_of_is_one_file_that_is_there_when_its_worker_dies(store: Puts) -> None:
    for rank in (1, 0):
        quarantine = Quarantine(store, "run")
        passing = StepSkipper(quarantine)
        source = stream(rank)
        passing.begin({1: "long ago", 3: WHY}, source, 2)
        job: Any = None
        with pytest.raises(Killed):
            passing.step(Deadly(), job, source.feed(3, rank))  # type: ignore[arg-type]
        assert store.count == quarantine.count / 16 == (rank == 0)
    batch = [feed.parts[0][0].samples.tolist() for feed in (source.feed(3, 0), source.feed(3, 1))]
    found = kept(store)
    assert sorted(found["sample"]) == sorted(batch[0] + batch[1])
    assert set(found["where"]) == {"step 4"} and set(found["error"]) == {WHY}


def test_whoever_records_a_batch_again_finds_it_recorded(store: Puts) -> None:
    for total in (2, 3):
        passing = StepSkipper(Quarantine(store, "run"))
        for step in (3, 2):  # after a recovery, too
            passing.begin({3: WHY}, stream(0, total), step)
    assert len(kept(store)["sample"]) == 16 and store.count == 2


def test_a_loss_that_is_not_finite_takes_one_file(store: Puts) -> None:
    quarantine = Quarantine(store, "run")
    passing, source = StepSkipper(quarantine), stream(1)
    job: Any = SimpleNamespace(recovery=SimpleNamespace(on_nonfinite="skip", skip_limit=5))
    passing.begin({}, source, 0)
    for _ in range(2):
        report = passing.step(NotFinite(), job, source.feed(0, 1))  # type: ignore[arg-type]
        assert np.isnan(report.loss) and report.step == 1
    samples = source.feed(0, 1).parts[0][0].samples.tolist()
    assert kept(store)["sample"] == samples and store.count == 1 and quarantine.count == len(samples)


def test_samples_recorded_one_by_one_are_there_once(tmp_path: Path) -> None:
    for _ in range(2):
        quarantine = Quarantine(open_store(str(tmp_path)), "run", "evaluate")
        for sample in (7, 5, 7):
            quarantine(SkippedSample(sample=sample, where="a file", error="torn"))
        assert quarantine.count == 2
    found = kept(open_store(str(tmp_path)))
    assert sorted(found["sample"]) == [5, 7] and found["data"] == ["evaluate"] * 2
