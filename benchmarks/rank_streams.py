"""Stream data to one rank in the data benchmarks, as trainwright's worker does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import trainwright as tw
from trainwright.core.data import Feed, FeedAssignment
from trainwright.datasets.loading.batch_loader import BatchLoader

ONE_RANK = FeedAssignment(data_ranks=range(1), total=1)


def count_rows(feed: Feed) -> int:
    """Return the number of rows of a feed."""
    return sum(batch.rows for part in feed.parts for batch in part)


@dataclass(frozen=True, kw_only=True)
class LightStream:
    """A loader of a parquet folder, shuffled, which reads in the consumer's process."""

    path: str
    batch_size: int

    def stream(self, epochs: int) -> BatchLoader:
        """Return a new stream; it reads the index of the folder."""
        dataset = tw.datasets.parquet(self.path)
        return BatchLoader(dataset, batch_size=self.batch_size, epochs=epochs, feeding=ONE_RANK)

    def epochs(self, count: int) -> Iterator[Iterator[int]]:
        """Yield the rows of each batch, epoch by epoch, from one stream."""
        yield from iterate_epochs(self.stream(count), count)


@dataclass(frozen=True, kw_only=True)
class HeavyStream:
    """A loader of a parquet folder with a heavy transform on Ray Data. It needs a running cluster."""

    path: str
    batch_size: int
    function: Callable[[dict[str, Any]], dict[str, Any]]
    cpus: float

    def stream(self, epochs: int) -> tuple[BatchLoader, Any]:
        """Return a new stream and its fetcher, which the caller closes."""
        from trainwright.datasets.ray_data.ray_fetcher import make_pipeline_spec, start_delivery

        dataset = tw.datasets.parquet(self.path).map_batches(self.function, cpus=1)
        index = dataset.index()
        shared: dict[str, Any] = {"batch_size": self.batch_size, "epochs": epochs}
        (fetcher,) = start_delivery([make_pipeline_spec(dataset, index, **shared)], cpus=self.cpus)
        return BatchLoader(dataset, index, feeding=ONE_RANK, fetcher=fetcher, **shared), fetcher

    def epochs(self, count: int) -> Iterator[Iterator[int]]:
        """Yield the rows of each batch, epoch by epoch, from one fetcher."""
        stream, fetcher = self.stream(count)
        try:
            yield from iterate_epochs(stream, count)
        finally:
            fetcher.close()


@dataclass(frozen=True, kw_only=True)
class RayStream:
    """A loader of a Ray Dataset over a parquet folder, streamed as for `train=`. It needs a running cluster.

    Attributes:
        path: of the folder.
        batch_size: in rows.
        cpus: of the actor that streams.
        function: of map_batches, with one CPU for each call of 128 rows; None for no map_batches.
        blocks: in which Ray Data reads the folder; None for its default.
    """

    path: str
    batch_size: int
    cpus: float
    function: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    blocks: int | None = None

    def epochs(self, count: int) -> Iterator[Iterator[int]]:
        """Yield the rows of each batch, epoch by epoch, from one actor."""
        import ray.data

        from trainwright.datasets.ray_data.block_stream import start_streams

        data = ray.data.read_parquet(self.path, override_num_blocks=self.blocks)
        if self.function is not None:
            data = data.map_batches(self.function, batch_size=128, num_cpus=1)
        dataset = tw.datasets.from_ray(data)
        index = dataset.index()
        (rows,) = start_streams([(dataset, index, count)], None, {"CPU": self.cpus, "GPU": 0.0})
        stream = BatchLoader(
            dataset, index, batch_size=self.batch_size, epochs=count, feeding=ONE_RANK, rows=rows, columns=None
        )
        try:
            yield from iterate_epochs(stream, count)
        finally:
            rows.close()


def iterate_epochs(stream: BatchLoader, count: int) -> Iterator[Iterator[int]]:
    """Yield the rows of each batch of a stream, epoch by epoch."""
    with stream.feeds() as feeds:
        for _ in range(count):
            yield (count_rows(feed) for feed in islice(feeds, stream.schedule.steps_per_epoch))
