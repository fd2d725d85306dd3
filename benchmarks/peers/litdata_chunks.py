"""litdata, as its guide has it: chunks of its own format, read by its loader with workers.

It is no dependency of the project: it is measured where it is installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INSTALLED = importlib.util.find_spec("litdata") is not None


def write_chunks(table: str, folder: Path) -> None:
    """Write the rows of the float table, in order, as chunks of about 64 MB."""
    import numpy as np
    import pyarrow.parquet as pq
    from float_table import arrays, files_of
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir()
    writer, number = BinaryWriter(str(folder), chunk_bytes=1 << 26), 0
    for path in files_of(table)[1]:
        x, y = arrays(pq.read_table(path))
        for row, label in zip(x, y.tolist(), strict=True):
            writer.add_item(number, {"x": np.array(row), "y": label})
            number += 1
    writer.done()
    writer.merge()


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Its StreamingDataset, shuffled, behind its StreamingDataLoader."""

    folder: Path
    batch_size: int
    workers: int

    def epochs(self, count: int) -> Iterator[Iterator[int]]:
        """One loader; it starts anew with each epoch."""
        from litdata import StreamingDataLoader, StreamingDataset

        data = StreamingDataset(str(self.folder), shuffle=True)
        loader = StreamingDataLoader(data, batch_size=self.batch_size, num_workers=self.workers)
        for _ in range(count):
            yield (len(batch["y"]) for batch in loader)
