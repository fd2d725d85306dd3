"""Data sets: where rows come from and what is done to each. Lazy, frozen and picklable."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainwright.core.errors import DataError
from trainwright.datasets.columns import Arrays, Field, select
from trainwright.datasets.files import ParquetSource, absolute
from trainwright.datasets.index import Group, Index, Source
from trainwright.datasets.order import MEMORY_BYTES, Rows
from trainwright.datasets.reader import Reader
from trainwright.datasets.tables import TableSource, arrays_of
from trainwright.datasets.transforms import BatchFunction, BatchMap, Counters, RowFunction, RowMap, Transform, apply

__all__ = ["Dataset", "Field", "Group", "Index", "parquet", "table"]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A source and the transforms over it. Nothing is read before it is asked for.

    Attributes:
        source: of the rows.
        transforms: applied in turn.
    """

    source: Source
    transforms: tuple[Transform, ...] = ()

    def __repr__(self) -> str:
        calls = [f".{'map' if isinstance(step, RowMap) else 'map_batches'}(...)" for step in self.transforms]
        return self.source.describe() + "".join(calls)

    def map(self, function: RowFunction) -> Dataset:
        """Apply `function(row, rng) -> row` to each row.

        A row is a dict of values by column name; `rng` is counted from (seed, epoch, sample), so that a row is changed
        in the same way wherever and however often it is computed. Every row gives one row, of one type and shape.
        """
        return replace(self, transforms=(*self.transforms, RowMap(function=function)))

    def map_batches(self, function: BatchFunction, cpus: float = 0.0) -> Dataset:
        """Apply `function(columns) -> columns` to many rows at once.

        `columns` are arrays by name, of any number of rows; the function treats each row by itself and gives as many
        rows in the same order. `cpus` > 0 declares it heavy: it runs on Ray Data with that many CPUs for each call.
        """
        if not cpus >= 0:
            raise DataError(f"cpus={cpus} is no number of CPUs", remedy="use 0 to run in the consumer, or 1 or more")
        return replace(self, transforms=(*self.transforms, BatchMap(function=function, cpus=cpus)))

    @property
    def heavy(self) -> bool:
        """Whether a transform asks for CPUs of its own, and so for Ray Data."""
        return any(step.cpus > 0 for step in self.transforms)

    def index(self) -> Index:
        """Look at the source: rows, row groups, columns. Raises DataError for anything wrong with it."""
        return self.source.index()

    def fields(self, index: Index) -> Mapping[str, Field]:
        """Columns after the transforms; with transforms, the first row is read and transformed."""
        if not self.transforms:
            return index.schema
        return {name: Field(array.dtype, array.shape[1:]) for name, array in self.read(index, [0]).items()}

    def source_columns(self, index: Index, columns: Iterable[str] | None) -> tuple[str, ...]:
        """Columns to read so that `columns` can be given; DataError for one that is not there."""
        return tuple(index.schema) if self.transforms else select(index.schema, columns, repr(self))

    def reader(
        self, index: Index, columns: Iterable[str] | None, blocks: Rows | None = None, memory_bytes: int = MEMORY_BYTES
    ) -> Reader:
        """Random access to the source's rows, before any transform."""
        names = self.source_columns(index, columns)
        return Reader(self.source.open(index), index, names, blocks=blocks, memory_bytes=memory_bytes)

    def transform(self, arrays: Arrays, samples: Rows, counters: Counters, columns: Iterable[str] | None) -> Arrays:
        """Apply all transforms and keep `columns`."""
        arrays = apply(self.transforms, arrays, samples, counters)
        return {name: arrays[name] for name in select(arrays, columns, repr(self))}

    def read(
        self,
        index: Index,
        rows: Sequence[int] | Rows,
        columns: Iterable[str] | None = None,
        *,
        seed: int = 0,
        epoch: int = 0,
    ) -> Arrays:
        """Some rows by number, transformed, in the order asked for: arrays (rows, *shape) by column name."""
        names = None if columns is None else tuple(columns)
        samples = np.asarray(rows, dtype=np.int64)
        if len(samples) and not (samples.min() >= 0 and samples.max() < index.rows):
            raise DataError(f"rows go from 0 to {index.rows - 1}", where=repr(self), remedy="ask for such rows")
        counters = Counters(seed=seed, epoch=epoch)
        return self.transform(self.reader(index, names).gather(samples), samples, counters, names)


def parquet(path: str | os.PathLike[str], columns: Iterable[str] | None = None) -> Dataset:
    """Rows of parquet files.

    Args:
        path: a file, a folder or a glob; local or a URI that pyarrow.fs understands (`s3://`, `gs://`, `abfs://`).
        columns: read only these; by default all.
    """
    return Dataset(source=ParquetSource(path=absolute(path), columns=None if columns is None else tuple(columns)))


def table(data: Any) -> Dataset:
    """Rows in memory: a dict of arrays, a pandas DataFrame or a pyarrow.Table. It travels with the job."""
    return Dataset(source=TableSource(arrays=arrays_of(data)))
