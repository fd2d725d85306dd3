"""Fashion-MNIST, and random images in its form, as parquet files."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import sample_data
from sample_data import Splits, fashion_mnist

__all__ = ["Splits", "fashion_mnist", "sample_data", "write_splits"]
GROUP_ROWS = 1250


def write_splits(folder: Path, train: int, test: int) -> Splits:
    """Write so many rows for each split into the files that `fashion_mnist(folder)` takes as already fetched."""
    rng = np.random.default_rng(0)
    for name, rows in (("train", train), ("test", test)):
        images = rng.integers(0, 256, (rows, 28, 28), dtype=np.uint8)
        columns = {
            "image": pa.FixedShapeTensorArray.from_numpy_ndarray(images),
            "label": rng.integers(0, 10, rows),
            "id": np.arange(rows),
        }
        (folder / name).mkdir(parents=True)
        pq.write_table(pa.table(columns), folder / name / "part-0.parquet", row_group_size=GROUP_ROWS)
    return Splits(train=str(folder / "train"), test=str(folder / "test"))
