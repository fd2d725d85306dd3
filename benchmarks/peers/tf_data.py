"""tf.data from TFRecord files, as TensorFlow's guide on input performance has it: everything left to AUTOTUNE."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUFFER_ROWS = 16_384


def write_records(table: str, folder: Path) -> None:
    """Write a TFRecord file for each file of a float table. The floats of a row are one byte string, quick to parse."""
    import pyarrow.parquet as pq
    from float_table import arrays, files_of

    tf = _tensorflow()
    folder.mkdir()
    for number, path in enumerate(files_of(table)[1]):
        x, y = arrays(pq.read_table(path))
        with tf.io.TFRecordWriter(str(folder / f"part-{number:04}.tfrecord")) as writer:
            for floats, label in zip(x, y.tolist(), strict=True):
                features = {
                    "x": tf.train.Feature(bytes_list=tf.train.BytesList(value=[floats.tobytes()])),
                    "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())


@dataclass(frozen=True, kw_only=True)
class Records:
    """Files interleaved, rows shuffled in a buffer while they are still serialized, then parsed by the batch."""

    folder: Path
    batch_size: int

    def epochs(self, count: int) -> Iterator[Iterator[int]]:
        """One pipeline; it starts anew with each epoch."""
        tf = _tensorflow()
        files = sorted(str(path) for path in self.folder.iterdir())
        schema = {"x": tf.io.FixedLenFeature([], tf.string), "y": tf.io.FixedLenFeature([], tf.int64)}

        def parse(records: Any) -> tuple[Any, Any]:
            parsed = tf.io.parse_example(records, schema)
            return tf.io.decode_raw(parsed["x"], tf.float32), parsed["y"]

        data = (
            tf.data.Dataset.from_tensor_slices(files)
            .shuffle(len(files))
            .interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
            .shuffle(BUFFER_ROWS)
            .batch(self.batch_size)
            .map(parse, num_parallel_calls=tf.data.AUTOTUNE)
            .prefetch(tf.data.AUTOTUNE)
        )
        for _ in range(count):
            yield (int(labels.shape[0]) for _, labels in data)


def _tensorflow() -> Any:
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    import tensorflow

    return tensorflow
