"""The float table of the data benchmarks: 256 float32 features and a label, in parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

FEATURES, GROUP_ROWS, FILE_GROUPS = 256, 8192, 5
ROW_BYTES = 4 * FEATURES + 8


def write_table(folder: Path, groups: int, *, plain: bool = True) -> None:
    """Write so many row groups, a few to a file.

    `plain`: without compression and dictionaries, which do nothing for random floats; otherwise as pyarrow does it by
    default, with both.
    """
    options = {"compression": "none", "use_dictionary": False} if plain else {}
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for first in range(0, groups, FILE_GROUPS):
        rows = min(FILE_GROUPS, groups - first) * GROUP_ROWS
        x = pa.FixedSizeListArray.from_arrays(rng.standard_normal(rows * FEATURES, dtype=np.float32), FEATURES)
        table = pa.table({"x": x, "y": rng.integers(0, 10, rows)})
        path = folder / f"part-{first:04}.parquet"
        pq.write_table(table, path, row_group_size=GROUP_ROWS, **options)


def files_of(path: str) -> tuple[pafs.FileSystem, list[str]]:
    """The file system and the files of a folder, local or on S3, in order."""
    system, folder = pafs.FileSystem.from_uri(path)
    return system, sorted(info.path for info in system.get_file_info(pafs.FileSelector(folder)))


def arrays(table: pa.Table) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Columns x (rows, 256) and y (rows,), without a copy where the table is in one piece."""
    x = [chunk.flatten().to_numpy().reshape(-1, FEATURES) for chunk in table.column("x").chunks]
    y = [chunk.to_numpy() for chunk in table.column("y").chunks]
    return (x[0], y[0]) if len(x) == len(y) == 1 else (np.concatenate(x), np.concatenate(y))
