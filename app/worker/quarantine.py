"""The quarantine beside a run: a small parquet file for the samples that were skipped together."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from trainwright.datasets.loading.bad_samples import Skipped
from trainwright.storage.store import Store

FOLDER = "quarantine"


class Quarantine:
    """Records skipped samples of one data set; `parquet(<storage>/<run>/quarantine)` reads them all.

    The name of a file is that of its samples, so that those met again, by another worker or after a recovery, are there
    once. What a call was given is stored when it returns.

    Args:
        data: `train` or `evaluate`.
    """

    def __init__(self, store: Store, run: str, data: str = "train") -> None:
        self._store, self._run, self._data = store, run, data
        self._known: set[int] = set()
        self.count = 0

    def __call__(self, skipped: Skipped) -> None:
        """Record one sample; raises StorageError."""
        self.add([skipped])

    def add(self, skipped: Sequence[Skipped]) -> None:
        """Record samples in one file, without those that this process has recorded; raises StorageError."""
        new = [entry for entry in skipped if entry.sample not in self._known]
        if not new:
            return
        columns = {name: [getattr(entry, name) for entry in new] for name in ("sample", "where", "error")}
        file = io.BytesIO()
        pq.write_table(pa.table({"data": [self._data] * len(new), **columns}), file)
        self._store.put(f"{self._run}/{FOLDER}/{self._name(columns['sample'])}.parquet", file.getvalue())
        self._known.update(columns["sample"])
        self.count += len(new)

    def _name(self, samples: list[int]) -> str:
        first = f"{self._data}-{samples[0]:012d}"
        return first if len(samples) == 1 else f"{first}-{hashlib.sha256(repr(samples).encode()).hexdigest()[:16]}"
