"""MosaicML Streaming and litdata, as their guides have it: shards of their own format, DataLoader with workers.

Neither is a dependency of the project: they are measured where they are installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INSTALLED = {name: importlib.util.find_spec(name) is not None for name in ("streaming", "litdata")}


@dataclass(frozen=True, kw_only=True)
class WriteShards:
    """Writes the float table once more as MDS shards or litdata chunks of about 64 MB."""

    table: str
    folder: Path
    library: str

    def __call__(self) -> None:
        """All rows, in order."""
        {"streaming": self._mosaic, "litdata": self._litdata}[self.library]()

    def _rows(self) -> Iterator[dict[str, Any]]:
        import pyarrow.parquet as pq
        from float_table import arrays, files_of

        for path in files_of(self.table)[1]:
            x, y = arrays(pq.read_table(path))
            yield from ({"x": row, "y": int(label)} for row, label in zip(x, y, strict=True))

    def _mosaic(self) -> None:
        from float_table import FEATURES
        from streaming import MDSWriter

        columns = {"x": f"ndarray:float32:{FEATURES}", "y": "int"}
        with MDSWriter(out=str(self.folder), columns=columns, size_limit=1 << 26) as writer:
            for row in self._rows():
                writer.write(row)

    def _litdata(self) -> None:
        import numpy as np
        from litdata.streaming.writer import BinaryWriter

        self.folder.mkdir()
        writer = BinaryWriter(str(self.folder), chunk_bytes=1 << 26)
        for number, row in enumerate(self._rows()):
            writer.add_item(number, {"x": np.array(row["x"]), "y": row["y"]})
        writer.done()
        writer.merge()


@dataclass(frozen=True, kw_only=True)
class Streamer:
    """Either library's StreamingDataset, shuffled, behind a loader with workers."""

    folder: Path
    library: str
    batch_size: int
    workers: int

    def epochs(self, count: int) -> Iterator[Iterator[int]]:
        """The workers live as long as the loader."""
        loader = {"streaming": self._mosaic, "litdata": self._litdata}[self.library]()
        for _ in range(count):
            yield (len(batch["y"]) for batch in loader)

    def _mosaic(self) -> Any:
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory
        from torch.utils.data import DataLoader

        clean_stale_shared_memory()
        data = StreamingDataset(local=str(self.folder), shuffle=True, batch_size=self.batch_size)
        return DataLoader(data, self.batch_size, num_workers=self.workers, persistent_workers=True)

    def _litdata(self) -> Any:
        from litdata import StreamingDataLoader, StreamingDataset

        data = StreamingDataset(str(self.folder), shuffle=True)
        return StreamingDataLoader(data, batch_size=self.batch_size, num_workers=self.workers)


def installed(make: Callable[[str], Any]) -> dict[str, Any]:
    """What `make` gives for each library that is here, by its name."""
    titles = {"streaming": "MosaicML Streaming", "litdata": "litdata"}
    return {titles[name]: make(name) for name, here in INSTALLED.items() if here}
