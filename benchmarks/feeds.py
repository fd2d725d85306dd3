"""trainwright's side of the data benchmarks: a stream for one rank, as a worker makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import trainwright as tw
from trainwright.core.data import Feed, FeedAssignment
from trainwright.datasets.loading.batch_loader import BatchLoader

ONE_RANK = FeedAssignment(data_ranks=range(1), total=1)


def rows_of(feed: Feed) -> int:
    """Rows that the one rank is fed."""
    return sum(batch.rows for part in feed.parts for batch in part)


@dataclass(frozen=True, kw_only=True)
class LightStream:
    """A parquet folder, shuffled, read in the consumer's process."""

    path: str
    batch_size: int

    def stream(self, epochs: int) -> BatchLoader:
        """A new stream; it looks up the index."""
        dataset = tw.datasets.parquet(self.path)
        return BatchLoader(dataset, batch_size=self.batch_size, epochs=epochs, feeding=ONE_RANK)

    def epochs(self, count: int) -> Iterator[Iterator[int]]:
        """One stream over all epochs."""
        yield from epochs_of(self.stream(count), count)


@dataclass(frozen=True, kw_only=True)
class HeavyStream:
    """A parquet folder with a heavy transform on Ray Data; a cluster must be up."""

    path: str
    batch_size: int
    function: Callable[[dict[str, Any]], dict[str, Any]]
    cpus: float

    def stream(self, epochs: int) -> tuple[BatchLoader, Any]:
        """A new stream, and its fetcher, to be closed."""
        from trainwright.datasets.ray_data.ray_fetcher import make_pipeline_spec, start_delivery

        dataset = tw.datasets.parquet(self.path).map_batches(self.function, cpus=1)
        index = dataset.index()
        shared: dict[str, Any] = {"batch_size": self.batch_size, "epochs": epochs}
        (fetcher,) = start_delivery([make_pipeline_spec(dataset, index, **shared)], cpus=self.cpus)
        return BatchLoader(dataset, index, feeding=ONE_RANK, fetcher=fetcher, **shared), fetcher

    def epochs(self, count: int) -> Iterator[Iterator[int]]:
        """One feeder over all epochs."""
        stream, fetcher = self.stream(count)
        try:
            yield from epochs_of(stream, count)
        finally:
            fetcher.close()


@dataclass(frozen=True, kw_only=True)
class RayStream:
    """A Ray Dataset over a parquet folder as `train=` takes it, streamed; a cluster must be up.

    Attributes:
        function, function_rows: of map_batches, with one CPU for each call; None for none.
        blocks: to read the folder as; None leaves it to Ray Data.
    """

    path: str
    batch_size: int
    cpus: float
    function: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    function_rows: int = 128
    blocks: int | None = None

    def epochs(self, count: int) -> Iterator[Iterator[int]]:
        """One actor over all epochs."""
        import ray.data

        from trainwright.datasets.ray_data.block_stream import start_streams

        data = ray.data.read_parquet(self.path, override_num_blocks=self.blocks)
        if self.function is not None:
            data = data.map_batches(self.function, batch_size=self.function_rows, num_cpus=1)
        dataset = tw.datasets.from_ray(data)
        index = dataset.index()
        handle, (rows,) = start_streams([(dataset, index, count)], None, {"CPU": self.cpus, "GPU": 0.0})
        stream = BatchLoader(
            dataset, index, batch_size=self.batch_size, epochs=count, feeding=ONE_RANK, rows=rows, columns=None
        )
        try:
            yield from epochs_of(stream, count)
        finally:
            handle.close()


def epochs_of(stream: BatchLoader, count: int) -> Iterator[Iterator[int]]:
    """Rows of each batch, epoch by epoch."""
    with stream.feeds() as feeds:
        for _ in range(count):
            yield (rows_of(feed) for feed in islice(feeds, stream.schedule.steps_per_epoch))
