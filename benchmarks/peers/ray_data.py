"""Ray Data's streaming_split, as its guide on loading data for training has it: one consumer, a local shuffle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StreamingSplit:
    """A parquet folder, shuffled in a buffer of the consumer.

    Attributes:
        function: of map_batches, with one CPU for each call of 128 rows; None for none.
        blocks: to read the folder as; None leaves it to Ray Data.
    """

    path: str
    batch_size: int
    buffer_rows: int
    function: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    blocks: int | None = None

    def epochs(self, count: int) -> Iterator[Iterator[int]]:
        """One split; each epoch is an execution of its own."""
        import ray.data

        ray.data.DataContext.get_current().enable_progress_bars = False
        data = ray.data.read_parquet(self.path, override_num_blocks=self.blocks)
        if self.function is not None:
            data = data.map_batches(self.function, batch_size=128, num_cpus=1)
        (shard,) = data.streaming_split(1)
        for _ in range(count):
            batches = shard.iter_batches(batch_size=self.batch_size, local_shuffle_buffer_size=self.buffer_rows)
            yield (len(next(iter(batch.values()))) for batch in batches)
