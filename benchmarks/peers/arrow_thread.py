"""The limit of reading parquet: pyarrow in one thread, row group after row group, in the order of the files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ArrowThread:
    """Batches are slices of the decoded row groups, without a copy; nothing is shuffled."""

    path: str
    batch_size: int

    def epochs(self, count: int) -> Iterator[Iterator[int]]:
        """Reads everything again in each epoch."""
        for _ in range(count):
            yield self._epoch()

    def _epoch(self) -> Iterator[int]:
        import pyarrow.parquet as pq
        from float_table import arrays, files_of

        system, files = files_of(self.path)
        for path in files:
            with pq.ParquetFile(path, filesystem=system, memory_map=True) as file:
                for group in range(file.num_row_groups):
                    x, y = arrays(file.read_row_group(group, use_threads=False))
                    for first in range(0, len(y), self.batch_size):
                        batch = x[first : first + self.batch_size], y[first : first + self.batch_size]
                        yield len(batch[0])
