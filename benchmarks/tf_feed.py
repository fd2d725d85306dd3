"""Rows a second as TensorFlow's tensors: the stream and its conversion, against tf.data over the same arrays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}

import numpy as np
import tensorflow as tf
from figures import Figure, compare
from processes import Rounds, run_interleaved
from rank_streams import ONE_RANK

import trainwright as tw
from trainwright.core.engine import Collation
from trainwright.datasets.loading.batch_loader import BatchLoader
from trainwright.strategies.tensorflow.training.tensor_conversion import column_tensors

ROWS, FEATURES, BATCH, TARGET = 200_000, 32, 256, 1 / 0.9
NOTE = (
    f"{ROWS:,} rows of {FEATURES} floats and a label in memory, batches of {BATCH}, shuffled over all rows, an epoch "
    "at a time in turn, in one process: trainwright's stream and the conversion of its batches to tensors, against "
    "`from_tensor_slices`, `shuffle` of all rows, `batch` and `prefetch(AUTOTUNE)`. Figures are time for each row; "
    "the target of 0.9 of native tf.data's rate is a ratio of 1.11. The first pair is not counted."
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    pairs, size = (1, 10 * BATCH) if smoke else (20, ROWS)
    rng = np.random.default_rng(0)
    columns = {"x": rng.standard_normal((size, FEATURES), dtype=np.float32), "y": rng.integers(0, 10, size)}
    table = tw.datasets.table(columns)
    own, native = Epochs(table, size), _native(columns)
    turns = {"ours": partial(_row_us, own.rows, size), "native": partial(_row_us, native.__iter__, size)}
    found = run_interleaved(turns, Rounds(counted=pairs))
    what = "stream to tensors, against native tf.data"
    return [compare("tf_feed", what, "us/row", found["ours"], found["native"], target=TARGET)]


def _row_us(rows: Callable[[], Iterator[tuple[tf.Tensor, tf.Tensor]]], size: int) -> float:
    """Return the microseconds of a row of an epoch."""
    begun = time.perf_counter()
    count = sum(int(y.shape[0]) for _, y in rows())
    assert count == size, f"{count} rows"
    return 1e6 * (time.perf_counter() - begun) / size


class Epochs:
    """The stream, an epoch after the other."""

    def __init__(self, table: tw.datasets.Dataset, rows: int) -> None:
        self._stream = BatchLoader(table, table.index(), batch_size=BATCH, epochs=1000, seed=0, feeding=ONE_RANK)
        self._steps = -(-rows // BATCH)
        self._epoch = 0

    def rows(self) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        """The batches of the next epoch."""
        begin = self._epoch * self._steps
        self._epoch += 1
        with self._stream.feeds(begin) as feeds:
            for _, feed in zip(range(self._steps), feeds, strict=False):
                found = column_tensors(Collation(), feed.parts[0][0], ("x", "y"))
                yield found["x"], found["y"]


def _native(columns: dict[str, np.ndarray]) -> tf.data.Dataset:
    rows = tf.data.Dataset.from_tensor_slices((columns["x"], columns["y"]))
    return rows.shuffle(len(columns["y"])).batch(BATCH).prefetch(tf.data.AUTOTUNE)
