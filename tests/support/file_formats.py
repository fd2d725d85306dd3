"""Tables written as CSV, JSON lines and Arrow, and the sources that read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather as feather

from trainwright.datasets import Dataset, arrow, csv, json_lines

ROWS = 10_000


def frame(rows: int = ROWS, first: int = 0) -> pd.DataFrame:
    numbers = np.arange(first, first + rows)
    random = np.random.default_rng(first)
    return pd.DataFrame(
        {
            "id": numbers,
            "x": random.random(rows).round(6),
            "text": [f'said "{number}",\nthen é' if number % 3 else "" for number in numbers],
            "flag": numbers % 2 == 0,
        }
    )


def write_arrow_file(data: pd.DataFrame, path: Path) -> None:
    feather.write_feather(data, path, compression="lz4", chunksize=3000)


def write_stream(data: pd.DataFrame, path: Path) -> None:
    table = pa.Table.from_pandas(data, preserve_index=False)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=3000)


def write_csv(data: pd.DataFrame, path: Path) -> None:
    data.to_csv(path, index=False)


def write_json_lines(data: pd.DataFrame, path: Path) -> None:
    data.to_json(path, orient="records", lines=True, double_precision=15)


FORMATS: dict[str, tuple[Callable[..., Dataset], Callable[[pd.DataFrame, Path], None]]] = {
    "csv": (csv, write_csv),
    "jsonl": (json_lines, write_json_lines),
    "feather": (arrow, write_arrow_file),
    "arrow": (arrow, write_stream),
}
