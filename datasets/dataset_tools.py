"""Inspect a data set (columns, sizes, samples, skew, warnings), and convert it to parquet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from trainwright.core.errors import DataError, nearest
from trainwright.datasets.data_source import Arrays, Field, Index, Loader, Rows, schema_of
from trainwright.datasets.dataset import Dataset, delivery_of
from trainwright.datasets.formats.file_system import absolute_path, filter_files, list_files, resolve_file_system
from trainwright.datasets.formats.parquet import ParquetSource
from trainwright.datasets.formats.parquet_writer import SHARD_BYTES, WrittenShards, write_shards
from trainwright.datasets.ops.row_transforms import Counters
from trainwright.datasets.sample_order import SampleOrder, choose_lanes

_COUNTED_ROWS = 1_000_000
_SHUFFLED_ROWS = 2_000_000  # measuring the shuffle of larger data takes too long
_MAX_CLASSES = 100
_HUGE_BYTES, _SINGLE_GROUP_BYTES = 512 << 20, 64 << 20
_TINY_BYTES, _MANY_FILES = 1 << 20, 1000
_UNEVEN_RATIO, _SKEWED_RATIO = 4.0, 20.0
_MAX_TEXT_CHARS = 60


@dataclass(frozen=True, kw_only=True)
class _Distribution:
    """Least, median and most of some numbers."""

    least: float
    median: float
    most: float


@dataclass(frozen=True, kw_only=True)
class _FileStatistics:
    """The files of a data set."""

    count: int  # of them
    size_bytes: int  # of all
    # by column with nulls, from the statistics in the files (parquet, columns of single values)
    nulls: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The result of `inspect`."""

    source: str  # as the user wrote it
    rows: int  # of the data set
    row_bytes: int  # mean decoded size of a row
    groups: int  # row groups
    group_rows: _Distribution  # of a row group
    group_bytes: _Distribution  # decoded size of a row group
    columns: Mapping[str, Field]  # after the transforms, by name
    files: _FileStatistics | None  # None where the rows do not come from files
    delivery: tuple[str, str]  # how rows reach the workers, `direct` or `ray_data`, and why
    samples: tuple[Mapping[str, Any], ...]  # the first rows; values as numbers, text, or words about an array
    # by integer column of few values: rows of each value, the most frequent first
    classes: Mapping[str, Mapping[int, int]]
    counted_rows: int  # rows that `classes` was counted over
    # how well training shuffles the rows; None if it does not, or if there are too many rows to measure
    shuffle: ShuffleQuality | None
    problems: tuple[str, ...]  # sentences about unreadable rows, columns or files

    @property
    def imbalance(self) -> float:
        """Rows of the largest row group over the mean: 1.0 is even."""
        return self.group_rows.most * self.groups / self.rows

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about problems, each with a remedy."""
        return tuple(_warnings(self))


def inspect(
    dataset: Dataset,
    sample_rows: int = 3,
    *,
    batch_size: int = 256,
    window: int | None = None,
    shuffled: bool = True,
    delivery: str = "auto",
) -> Inspection:
    """Look at a data set. Reads its index, the first rows, and integer columns of up to a million rows.

    Args:
        sample_rows: rows to show.
        batch_size: of the training whose shuffle is measured.
        window: its `shuffle_window`.
        shuffled: False where it is read in the order of storage.
        delivery: of the job.

    Raises:
        DataError: there is no index; `problems` has the errors of single rows.
    """
    index = dataset.index()
    lanes = choose_lanes(index.rows, index.row_bytes, groups=index.firsts, window=window)
    problems: list[str] = []
    stride = max(-(-index.rows // _COUNTED_ROWS), 1)  # of the row groups that classes are counted over
    counted_groups = [] if index.in_order else list(range(0, len(index.groups), stride))
    shuffled = shuffled and not index.in_order and index.rows <= _SHUFFLED_ROWS
    rows = np.array([group.rows for group in index.groups])
    columns, samples = _samples(dataset, index, sample_rows, problems)
    return Inspection(
        source=repr(dataset),
        rows=index.rows,
        row_bytes=index.row_bytes,
        groups=len(index.groups),
        group_rows=_distribution(rows),
        group_bytes=_distribution(rows * index.row_bytes),
        columns=columns,
        files=_files(dataset, index, problems),
        delivery=delivery_of(dataset, delivery),
        samples=samples,
        classes=_classes(dataset, index, counted_groups, problems),
        counted_rows=sum(index.groups[number].rows for number in counted_groups),
        shuffle=shuffle_quality(SampleOrder(lanes=lanes), batch_size) if shuffled else None,
        problems=tuple(problems),
    )


def _distribution(numbers: Any) -> _Distribution:
    return _Distribution(least=float(numbers.min()), median=float(np.median(numbers)), most=float(numbers.max()))


def _samples(
    dataset: Dataset, index: Index, rows: int, problems: list[str]
) -> tuple[Mapping[str, Field], tuple[Mapping[str, Any], ...]]:
    try:
        arrays = dataset.read(index, range(min(max(rows, 1), index.rows)))
    except DataError as error:
        problems.append(f"the first rows cannot be read: {error.summary}")
        return index.schema, ()
    fields = schema_of(arrays)
    samples = ({name: _value(array[row]) for name, array in arrays.items()} for row in range(min(rows, index.rows)))
    return fields, tuple(samples)


def _value(value: Any) -> Any:
    """Return a value that can be printed and written as JSON."""
    if isinstance(value, np.ndarray):
        if value.size and value.dtype.kind in "iufb":
            return f"{value.dtype} {list(value.shape)}, {value.min():g} to {value.max():g}"
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    text = value if isinstance(value, str) else None if isinstance(value, int | float) else str(value)
    if text is None:
        return value
    return text if len(text) <= _MAX_TEXT_CHARS else f"{text[: _MAX_TEXT_CHARS - 1]}…"


def _classes(dataset: Dataset, index: Index, groups: list[int], problems: list[str]) -> Mapping[str, Mapping[int, int]]:
    if not groups:
        return {}
    loader = dataset.source.open(index)
    integers = [name for name, field in index.schema.items() if not field.shape and field.dtype.kind in "iub"]
    counts: dict[str, Counter[int]] = {name: Counter() for name in integers}
    for number in groups:
        arrays = _readable_columns(loader, number, list(counts), problems)
        for name in list(counts):
            values, rows = np.unique(arrays.get(name, ()), return_counts=True)
            if name in arrays and len(values) <= _MAX_CLASSES:
                counts[name].update(dict(zip(map(int, values), map(int, rows), strict=True)))
            if name not in arrays or max(len(values), len(counts[name])) > _MAX_CLASSES:
                del counts[name]
    return {name: dict(counter.most_common()) for name, counter in counts.items()}


def _readable_columns(loader: Loader, number: int, names: list[str], problems: list[str]) -> Arrays:
    """Return the readable columns of a row group."""
    if not names:
        return {}
    try:
        return loader.load(number, names)
    except DataError as error:
        if len(names) == 1:
            problems.append(f"column {names[0]!r} cannot be counted: {error.summary}")
            return {}
    arrays: Arrays = {}
    for name in names:
        arrays |= _readable_columns(loader, number, [name], problems)
    return arrays


def _files(dataset: Dataset, index: Index, problems: list[str]) -> _FileStatistics | None:
    path = getattr(dataset.source, "path", None)
    if not isinstance(path, str):
        return None
    names = list(dict.fromkeys(group.file for group in index.groups))
    try:
        system, _ = resolve_file_system(path)
        sizes = [info.size or 0 for info in system.get_file_info(names)]
        parquet = isinstance(dataset.source, ParquetSource)
        nulls = _nulls(system, names[:_MANY_FILES], index) if parquet else {}
    except (OSError, pa.ArrowException) as error:
        problems.append(f"the files cannot be looked at: {error}")
        return None
    return _FileStatistics(count=len(names), size_bytes=sum(sizes), nulls=nulls)


def _nulls(system: pafs.FileSystem, names: list[str], index: Index) -> Mapping[str, int]:
    counts: Counter[str] = Counter()
    for name in names:
        with system.open_input_file(name) as file:
            footer = pq.read_metadata(file)
        for number in range(footer.num_row_groups):
            group = footer.row_group(number)
            for column in range(group.num_columns):
                chunk = group.column(column)
                if chunk.is_stats_set and chunk.statistics.has_null_count:
                    counts[chunk.path_in_schema] += chunk.statistics.null_count  # of lists: the path of an element
    return {name: count for name, count in counts.items() if count and name in index.schema}


def _warnings(inspection: Inspection) -> Iterator[str]:
    convert = "write it again with `trainwright data convert`"
    yield from inspection.problems
    if inspection.group_bytes.most > _HUGE_BYTES:
        yield (
            f"the largest row group decodes to {inspection.group_bytes.most / 2**20:,.0f} MiB, which every reader of a "
            f"part of it must hold: {convert}"
        )
    elif inspection.groups == 1 and inspection.group_bytes.most > _SINGLE_GROUP_BYTES:
        yield f"all rows are in one row group, which every worker must decode whole: {convert}"
    files = inspection.files
    if files is not None and files.count >= _MANY_FILES:
        mean = files.size_bytes / files.count
        if mean < _TINY_BYTES:
            yield f"{files.count:,} files of {mean / 1024:,.0f} KiB each are slow to open one by one: {convert}"
    if inspection.groups > 1 and inspection.imbalance > _UNEVEN_RATIO:
        yield f"the largest row group has {inspection.imbalance:.1f} times the rows of the mean: {convert}"
    for name, count in files.nulls.items() if files is not None else ():
        yield f"column {name!r} has {count:,} nulls: drop or fill them, reading them stops a run"
    for name, counts in inspection.classes.items():
        most, least = max(counts.values()), min(counts.values())
        if len(counts) > 1 and most > _SKEWED_RATIO * least:
            yield (
                f"the values of {name!r} are skewed: the most frequent comes {most / least:,.0f} times as often as "
                "the rarest; weigh the loss, or mix by class"
            )


# --- How well an order shuffles, measured against a perfect permutation -----------------------------------------------


_BLOCKS = 20


@dataclass(frozen=True, kw_only=True)
class ShuffleQuality:
    """Statistics of an order. A perfect permutation has about 1 for the first two, and about 0 for the third."""

    # mean distance, in positions of an epoch, between rows that are stored next to each other, divided by the distance
    # in a perfect permutation, a third of the rows. Below 1, neighbours stay together.
    scatter: float
    # chi-square of the rows that batches have from each of 20 equal parts of the storage, divided by its expectation.
    # Above 1, batches are less even than random ones; below 1 they are more even, like stratified samples.
    clumping: float
    # rank correlation (Spearman) of the rows' positions in two epochs. Above 0, rows come at similar times.
    memory: float


def shuffle_quality(order: SampleOrder, batch_size: int) -> ShuffleQuality:
    """Measure an order over two epochs, in the memory of a few numbers a row."""
    rows = order.lanes.rows
    first, second = (order.rows_of(epoch, 0, rows) for epoch in range(2))
    place, later = np.empty_like(first), np.empty_like(second)
    place[first], later[second] = np.arange(rows), np.arange(rows)
    neighbours = float(np.abs(np.diff(place)).mean()) if rows > 1 else 0.0
    return ShuffleQuality(
        scatter=neighbours / ((rows + 1) / 3),
        clumping=_block_clumping(first, batch_size),
        memory=float(np.corrcoef(place, later)[0, 1]) if rows > 2 else 0.0,
    )


def _block_clumping(rows: Rows, batch_size: int) -> float:
    """Return the mean chi-square statistic of full batches, divided by its mean for draws without replacement."""
    total = len(rows)
    size = min(batch_size, total - 1)
    batches = total // size if size else 0
    blocks = min(_BLOCKS, total)
    if not batches or blocks < 2:
        return 1.0
    share = rows[: batches * size].reshape(batches, size) * blocks // total
    counts = np.stack([np.bincount(batch, minlength=blocks) for batch in share])
    expected_counts = size * np.bincount(np.arange(total) * blocks // total, minlength=blocks) / total
    expected = (blocks - 1) * (total - size) / (total - 1)
    return float((((counts - expected_counts) ** 2) / expected_counts).sum(1).mean() / expected)


# --- Conversion to parquet, and the format of files -------------------------------------------------------------------


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


def detect_format(path: str) -> str:
    """Return the format of a file, a folder or a glob by suffixes; names that begin with `_` or `.` do not count.

    Raises DataError for an unknown suffix, or for files of several formats.
    """
    text = absolute_path(path)
    if _format(text):
        return _format(text)
    system, root = resolve_file_system(text)
    root = root.rstrip("/")
    _, _, files = list_files(system, root, path)
    names = (_format(info.path) for info in filter_files(files, root, ("",)))
    formats = Counter(name for name in names if name)
    if len(formats) == 1:
        return next(iter(formats))
    choices = f"name one with --format: {', '.join(_FORMATS)}"
    if formats:
        words = ", ".join(f"{count} {name}" for name, count in sorted(formats.items()))
        raise DataError(f"files of several formats lie here: {words}", where=path, remedy=f"name a glob, or {choices}")
    suffixes = ", ".join(suffix for group in _FORMATS.values() for suffix in group)
    raise DataError("the format is not known by the suffix", where=path, remedy=f"use {suffixes}, or {choices}")


def open_dataset(path: str, kind: str | None = None) -> Dataset:
    """The data set at a path: by `kind`, the name of a function of `trainwright.datasets`, or else by suffix."""
    import trainwright.datasets as constructors

    name = kind or detect_format(path)
    if name not in _FORMATS:
        raise DataError(f"there is no format {name!r}", where=path, remedy=nearest(name, _FORMATS))
    dataset = getattr(constructors, name)(path)
    assert isinstance(dataset, Dataset)
    return dataset


def convert(
    dataset: Dataset,
    out: str,
    *,
    rows_per_group: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    report: Callable[[int, int], object] = lambda rows, total: None,
) -> WrittenShards:
    """Write a data set, transforms included, as well-sized parquet shards into a new folder.

    Args:
        dataset: to read, row group by row group, in order.
        out: folder or URI, which must be missing or empty. It appears once all shards are written.
        rows_per_group: rows of a row group; by default about 12 MiB of decoded data.
        shard_bytes: size of a file, about.
        report: called as report(rows, total) with the rows done after each piece, and those of the source.

    Raises:
        DataError: the source cannot be read, a column has no Arrow type, or `out` is taken.
    """
    index = dataset.index()

    def pieces() -> Iterator[Arrays]:
        rows = 0
        for arrays in _transformed_batches(dataset, index):
            yield arrays
            rows += len(next(iter(arrays.values())))
            report(rows, index.rows)

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
    stem = name.lower()
    for suffix in _COMPRESSED:
        stem = stem.removesuffix(suffix)
    return next((kind for kind, suffixes in _FORMATS.items() if stem.endswith(suffixes)), "")
