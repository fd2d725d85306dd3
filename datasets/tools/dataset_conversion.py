"""Writing a data set anew: the format of what is there, the sizes of shards and row groups, and the conversion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import pyarrow.fs as pafs

from trainwright.core.errors import DataError, nearest
from trainwright.datasets.data_source import Arrays, Index
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.file_system import absolute_path, glob_base, resolve_file_system
from trainwright.datasets.formats.parquet_writer import SHARD_BYTES, WrittenShards, write_shards
from trainwright.datasets.ops.row_transforms import Counters

_FORMATS = {
    "parquet": (".parquet", ".parq", ".pq"),
    "csv": (".csv", ".tsv"),
    "json_lines": (".jsonl", ".ndjson"),
    "arrow": (".arrow", ".feather", ".ipc"),
    "tfrecord": (".tfrecord", ".tfrecords"),
    "webdataset": (".tar",),
    "images": (".jpg", ".jpeg", ".png", ".webp", ".bmp"),
}
_COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
_PIECE_ROWS = 4096  # transformed at a time


def _format_of(names: Iterable[str], where: str) -> str:
    """The format of files, by their suffixes; names that begin with `_` or `.` do not count.

    Raises DataError where no suffix is known, or where files of several formats lie together.
    """
    found = Counter(_format(name) for name in names if not PurePosixPath(name).name.startswith(("_", ".")))
    known = {name: count for name, count in found.items() if name}
    if len(known) == 1:
        return next(iter(known))
    choices = f"name one with --format: {', '.join(_FORMATS)}"
    if known:
        words = ", ".join(f"{count} {name}" for name, count in sorted(known.items()))
        raise DataError(f"files of several formats lie here: {words}", where=where, remedy=f"name a glob, or {choices}")
    suffixes = ", ".join(suffix for group in _FORMATS.values() for suffix in group)
    raise DataError("the format is not known by the suffix", where=where, remedy=f"use {suffixes}, or {choices}")


def detect_format(path: str) -> str:
    """The format of a file, a folder or a glob. Raises DataError."""
    text = absolute_path(path)
    if _format(text):
        return _format(text)
    system, root = resolve_file_system(text)
    if glob_base(root) != root:
        return _format_of([text], path)
    root = root.rstrip("/")
    found = system.get_file_info(root)
    if found.type == pafs.FileType.NotFound:
        raise DataError("there is nothing at this path", where=path, remedy="check the path, or fetch the data first")
    if found.type == pafs.FileType.File:
        return _format_of([root], path)
    listed = system.get_file_info(pafs.FileSelector(root, recursive=True))
    return _format_of([info.path for info in listed if info.type == pafs.FileType.File], path)


def open_dataset(path: str, kind: str | None = None) -> Dataset:
    """The data set at a path: by `kind`, the name of a function of `trainwright.datasets`, or else by suffix."""
    import trainwright.datasets as constructors

    name = kind or detect_format(path)
    if name not in _FORMATS:
        raise DataError(f"there is no format {name!r}", where=path, remedy=nearest(name, _FORMATS))
    made = getattr(constructors, name)(path)
    assert isinstance(made, Dataset)
    return made


@dataclass(frozen=True, kw_only=True)
class ConversionProgress:
    """How far a conversion is.

    Attributes:
        rows: read and handed to the writer.
        total: rows of the source.
    """

    rows: int
    total: int


def convert(
    dataset: Dataset,
    out: str,
    *,
    rows_per_group: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    report: Callable[[ConversionProgress], None] = lambda progress: None,
) -> WrittenShards:
    """Write a data set, transforms included, as well-sized parquet shards into a new folder.

    Args:
        dataset: to read, row group by row group, in order.
        out: folder or URI; it appears whole, and must not be there or be empty.
        rows_per_group: rows of a row group; by default about 12 MiB of decoded data.
        shard_bytes: size of a file, about.
        report: called after each piece.

    Raises:
        DataError: the source cannot be read, a column has no Arrow type, or `out` is taken.
    """
    index = dataset.index()

    def pieces() -> Iterator[Arrays]:
        rows = 0
        for arrays in _transformed_batches(dataset, index):
            yield arrays
            rows += len(next(iter(arrays.values())))
            report(ConversionProgress(rows=rows, total=index.rows))

    return write_shards(pieces(), out, rows=index.rows, rows_per_group=rows_per_group, shard_bytes=shard_bytes)


def _transformed_batches(dataset: Dataset, index: Index) -> Iterator[Arrays]:
    """All rows in order, as they are stored, transformed with the random numbers of seed 0 and epoch 0."""
    loader, names = dataset.source.open(index), dataset.source_columns(index, None)
    for number, group in enumerate(index.groups):
        arrays = loader.load(number, names)
        for start in range(0, group.rows, _PIECE_ROWS):
            stop = min(start + _PIECE_ROWS, group.rows)
            samples = np.arange(group.first + start, group.first + stop, dtype=np.int64)
            piece = {name: array[start:stop] for name, array in arrays.items()}
            yield dataset.transform(piece, samples, Counters(), None)


def _format(name: str) -> str:
    """The format of one file; empty where its suffix is not known."""
    plain = name.lower()
    for suffix in _COMPRESSED:
        plain = plain.removesuffix(suffix)
    return next((kind for kind, suffixes in _FORMATS.items() if plain.endswith(suffixes)), "")
