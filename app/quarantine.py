"""The quarantine beside a run: one small parquet file for each sample that was skipped."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq

from trainwright.datasets.salvage import Skipped
from trainwright.store import Store

FOLDER = "quarantine"


class Quarantine:
    """Records skipped samples of one data set; `parquet(<storage>/<run>/quarantine)` reads them all.

    The name of a file is its sample, so that a sample met again, by another worker or after a recovery, is there once.

    Args:
        data: `train` or `evaluate`.
    """

    def __init__(self, store: Store, run: str, data: str = "train") -> None:
        self._store, self._run, self._data = store, run, data
        self.count = 0

    def __call__(self, skipped: Skipped) -> None:
        """Record one sample; raises StorageError."""
        row = pa.table(
            {"data": [self._data], "sample": [skipped.sample], "where": [skipped.where], "error": [skipped.error]}
        )
        file = io.BytesIO()
        pq.write_table(row, file)
        self._store.put(f"{self._run}/{FOLDER}/{self._data}-{skipped.sample:012d}.parquet", file.getvalue())
        self.count += 1
