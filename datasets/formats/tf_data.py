"""A user's own `tf.data` pipeline as a data source, read in its own order. Duck-typed; TensorFlow is not imported.

Such a pipeline has no rows by number. So every worker iterates it from its start in each pass and keeps its share of
each global batch; a run that resumes in the middle of a pass skips the earlier rows. The pipeline shuffles, augments
and prefetches for itself, and a run knows a row by its place in a pass only. Hence each row counts exactly once if the
pipeline repeats itself; see `from_tf`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from trainwright.core.errors import DataError, UserCodeError
from trainwright.datasets.data_source import Arrays, Field, Index, RowGroup, Rows, hash_parts
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.python_objects import hash_values, object_array

_SAMPLED_ROWS = 64  # rows that are read twice
_BLOCK_ROWS = 256
END_S = 0.5  # for running functions of the pipeline when its iterator is closed
_AUTOTUNE, _INFINITE, _UNKNOWN = -1, -1, -2  # as tf.data has them
_PARTS = ("x", "y", "weight")


@dataclass(frozen=True, kw_only=True, eq=False)
class _PipelineSource:
    """Rows of a pipeline. `from_tf` says what the fields mean."""

    make: Callable[..., Any]
    rows: int | None = None
    replayable: bool = True

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The user's function."""
        return (self.make,)

    def describe(self) -> str:
        """As the user wrote it, in short."""
        return f"from_tf({getattr(self.make, '__name__', 'pipeline')})"

    def index(self) -> Index:
        """Look at the first rows, twice. Raises DataError where there is none, or where they differ."""
        pipeline = self.opened(0)
        schema, rows = self._schema(pipeline.element_spec), self._length(pipeline)
        first, again = self._first_rows(pipeline, schema), self._first_rows(self.opened(0), schema)
        if self.replayable and hash_values([first]) != hash_values([again]):
            raise DataError(
                f"the pipeline gives other rows among its first {_SAMPLED_ROWS} each time it is iterated",
                where=self.describe(),
                remedy="seed its shuffle (a function of the epoch may give each another one), keep it deterministic, "
                "or pass replayable=False: then a recovered run may count some rows twice and others never",
            )
        named = sorted((name, field.dtype.str, field.shape) for name, field in schema.items())
        looked_at = len(next(iter(first.values())))
        return Index(
            rows=rows,
            groups=(RowGroup(file=self.describe(), number=0, rows=rows, first=0),),
            schema=schema,
            row_bytes=max(sum(array.nbytes for array in first.values()) // looked_at, 1),
            hash=hash_parts([rows, *named, hash_values([first]) if self.replayable else ""]),
            in_order=True,
            weight=_PARTS[2] if isinstance(pipeline.element_spec, tuple) and _PARTS[2] in schema else "",
        )

    def open(self, index: Index) -> NoReturn:
        """There are no rows by number. Raises DataError."""
        raise DataError("a tf.data pipeline has no rows by number", where=self.describe(), remedy="read it in order")

    def passes(self, index: Index, columns: Sequence[str]) -> _PipelineRows:
        """A reader for one process."""
        return _PipelineRows(self, index, columns)

    def opened(self, epoch: int) -> Any:
        """The pipeline of an epoch. Raises UserCodeError, DataError."""
        try:
            wants_epoch = bool(inspect.signature(self.make).parameters)
            pipeline = self.make(epoch) if wants_epoch else self.make()
        except Exception as error:
            raise UserCodeError(
                f"the function given to from_tf raised {type(error).__name__}: {error}", where=self.describe()
            ) from error
        if not (hasattr(pipeline, "element_spec") and hasattr(pipeline, "cardinality")):
            raise DataError(
                f"the function returned a {type(pipeline).__name__}",
                where=self.describe(),
                remedy="return a tf.data.Dataset",
            )
        return pipeline

    def _length(self, pipeline: Any) -> int:
        known = int(pipeline.cardinality())
        if self.rows is not None:
            return self.rows
        if known == _INFINITE:
            raise DataError(
                "the pipeline has no end",
                where=self.describe(),
                remedy="leave .repeat() out (epochs= of the job says how often), or pass rows= for a pass of so many",
            )
        if known == _UNKNOWN:
            raise DataError(
                "the pipeline does not know how many rows it gives",
                where=self.describe(),
                remedy="pass rows=, or apply tf.data.experimental.assert_cardinality",
            )
        if not known:
            raise DataError("the pipeline has no rows", where=self.describe(), remedy="look at how it is made")
        return known

    def _schema(self, spec: Any) -> dict[str, Field]:
        """Columns as the pipeline declares them; values whose shape differs from row to row are objects."""
        columns = _named_components(spec, self.describe())
        shapes = [component.shape for component in columns.values()]
        if len(shapes) > 1 and all(shape.rank and shape[0] is None for shape in shapes):
            raise DataError(
                f"every part of an element begins with a dimension of any size: {spec}",
                where=self.describe(),
                remedy="leave .batch() out, or append .unbatch(): the job's batch_size says what a batch is",
            )
        return {name: _field_of(component) for name, component in columns.items()}

    def _first_rows(self, pipeline: Any, schema: Mapping[str, Field]) -> Arrays:
        for block in read_blocks(pipeline.take(_SAMPLED_ROWS), schema, self.describe()):
            return block
        raise DataError("the pipeline gives no row", where=self.describe(), remedy="look at how it is made")


class _PipelineRows:
    """Reads one pass after the other; an earlier row restarts the pass. Safe to use from several threads."""

    def __init__(self, source: _PipelineSource, index: Index, columns: Sequence[str]) -> None:
        self._source, self._index, self._columns = source, index, columns
        self._lock = threading.Lock()
        self._epoch = -1
        self._blocks: Iterator[Arrays] = iter(())
        self._kept: list[Arrays] = []
        self._first = self._next = 0  # row of the first one kept, and the row after the last

    def gather(self, rows: Rows, epoch: int = 0) -> Arrays:
        """Columns of the rows of a pass, in the order asked for: fresh arrays (rows, *shape). Raises DataError."""
        if not len(rows):
            return {name: np.empty((0, *field.shape), field.dtype) for name, field in self._fields()}
        low, high = int(rows.min()), int(rows.max()) + 1
        with self._lock:
            if epoch != self._epoch or low < self._first:
                self._begin(epoch, low)
            while self._next < high:
                self._read(low)
            return {
                name: np.concatenate([block[name] for block in self._kept])[rows - self._first]
                for name, _ in self._fields()
            }

    def _fields(self) -> Iterator[tuple[str, Field]]:
        return ((name, self._index.schema[name]) for name in self._columns)

    def _begin(self, epoch: int, row: int) -> None:
        pipeline = self._source.opened(epoch).skip(row)
        self._blocks = read_blocks(pipeline, self._index.schema, self._source.describe(), row)
        self._kept, self._epoch, self._first, self._next = [], epoch, row, row

    def _read(self, wanted: int) -> None:
        """Read another block; blocks that end before the row wanted are dropped, except the last of them."""
        block = next(self._blocks, None)
        if block is None:
            raise DataError(
                f"the pipeline ended before row {self._next} of {self._index.rows}",
                where=f"{self._source.describe()}, epoch {self._epoch}",
                remedy="give it as many rows in each epoch, or pass the number as rows=",
            )
        self._kept.append(block)
        self._next += _rows(block)
        while len(self._kept) > 1 and self._first + _rows(self._kept[0]) + _rows(self._kept[1]) <= wanted:
            self._first += _rows(self._kept.pop(0))


def from_tf(make: Callable[..., Any], *, rows: int | None = None, replayable: bool = True) -> Dataset:
    """Rows of a `tf.data.Dataset` of your own, in its own order.

    It travels as the function that makes it, because a data set cannot be sent to other processes. Each pass iterates
    it from the start: `make(epoch)` may shuffle and augment each epoch differently. Give single rows: the job's
    `batch_size` makes the batches, `epochs` the passes; `shuffle` of the job has no say. Elements are dicts of columns,
    or (x, y) or (x, y, weight), which become the columns `x`, `y` and `weight` (dicts among them keep their names); a
    job names the last one: `sample_weight="weight"`.
    Every worker iterates the whole pipeline and keeps its share of each batch: what the pipeline computes is computed
    by each of them; `parquet`, `tfrecord` and the like share the work.

    What exactly once means here: a row is known by its place in a pass. After a failure, and in a resumed run, the pass
    begins again and skips the rows that were trained on. A pipeline that repeats itself (a seeded shuffle, no
    `deterministic=False`) therefore counts each row once, in any number of workers, and a recovered run ends as an
    uninterrupted one; its first rows are read twice to check that. `replayable=False` leaves the check out: then
    workers disagree on the order of rows, and rows can count twice or never, with or without failures.

    Args:
        make: () or (epoch) -> tf.data.Dataset.
        rows: of a pass, where the pipeline does not know it; of a longer or endless one it takes the first so many.
        replayable: whether the pipeline gives the same rows in the same order each time it is iterated.

    Raises:
        DataError: it is a tf.data.Dataset itself; when it is looked at: no rows, unknown length, batches, other rows
            each time.
    """
    if not callable(make):
        raise DataError(
            f"a {type(make).__name__} cannot be sent to the workers",
            where="from_tf",
            remedy="give the function that makes the data set: from_tf(lambda: tf.data.Dataset...)",
        )
    if rows is not None and rows < 1:
        raise DataError(f"rows={rows} is no length of a pass", where="from_tf", remedy="give 1 or more")
    return Dataset(source=_PipelineSource(make=make, rows=rows, replayable=replayable))


def read_blocks(pipeline: Any, schema: Mapping[str, Field], where: str, first: int = 0) -> Iterator[Arrays]:
    """Arrays of consecutive rows.

    Args:
        first: number of the first row, for messages.

    Raises:
        DataError: the pipeline failed.
    """
    ragged = any(field.dtype == np.dtype(object) for field in schema.values())
    batched = pipeline.ragged_batch(_BLOCK_ROWS) if ragged else pipeline.batch(_BLOCK_ROWS)
    held = [iter(batched.prefetch(_AUTOTUNE))]
    try:
        while True:
            try:
                element = next(held[0])
            except StopIteration:
                return
            except Exception as error:  # TensorFlow's errors, which cannot be named here, have one class for each cause
                raise DataError(
                    f"the pipeline raised {type(error).__name__}: {error}",
                    where=f"{where}, rows {first} to {first + _BLOCK_ROWS}",
                    remedy="mend the data or the function, or append .ignore_errors() and pass rows=",
                ) from error
            columns = _named_components(element, where)
            block = {name: _array(columns[name], field) for name, field in schema.items()}
            first += _rows(block)
            yield block
    finally:
        _close_iterator(held)


def _close_iterator(held: list[Any]) -> None:
    """Close an iterator, and wait up to END_S for the functions that it runs.

    Closing waits for the autotuner's thread. TensorFlow 2.21 wakes that thread before it marks it as cancelled, so the
    thread can sleep again until its next look at the pipeline: minutes, on a busy machine.
    """
    end = threading.Thread(target=held.clear, name="trainwright-pipeline-end", daemon=True)
    end.start()
    end.join(END_S)


def _named_components(element: Any, where: str) -> dict[str, Any]:
    """The parts of an element by column name."""
    if isinstance(element, Mapping):
        return dict(element)
    parts: Sequence[Any] = element if isinstance(element, tuple) else (element,)
    if len(parts) > len(_PARTS):
        raise DataError(
            f"an element has {len(parts)} parts", where=where, remedy="map the elements to dicts of named columns"
        )
    columns: dict[str, Any] = {}
    for name, part in zip(_PARTS, parts, strict=False):
        columns |= part if isinstance(part, Mapping) else {name: part}
    nested = [name for name, part in columns.items() if isinstance(part, Mapping | tuple)]
    if nested:
        raise DataError(
            f"part {nested[0]!r} of an element has parts of its own", where=where,
            remedy="map the elements to dicts of named columns",
        )  # fmt: skip
    return columns


def _field_of(spec: Any) -> Field:
    kind = np.dtype(spec.dtype.as_numpy_dtype)
    fixed = spec.shape.is_fully_defined() and kind != np.dtype(object)
    return Field(kind, tuple(spec.shape)) if fixed else Field(np.dtype(object), ())


def _array(values: Any, field: Field) -> Any:
    """A batch of one column; of ragged values, an array for each row."""
    if hasattr(values, "row_lengths"):
        return object_array([row.numpy() for row in values])
    array = values.numpy()
    return array if field.dtype != np.dtype(object) or array.ndim == 1 else object_array(list(array))


def _rows(block: Arrays) -> int:
    return len(next(iter(block.values())))
