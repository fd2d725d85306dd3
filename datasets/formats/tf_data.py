"""A user's own `tf.data` pipeline as a data source, read in its own order. Duck-typed; TensorFlow is not imported.

Such a pipeline has no rows by number. So every worker iterates it from its start in each pass and keeps its share of
each global batch; a run that resumes in the middle of a pass skips the earlier rows. Where the user's function takes
`shard`, a worker drops the rows of other workers and the earlier rows there, before they are decoded. The pipeline
shuffles, augments and prefetches for itself, and a run knows a row by its place in a pass only. Hence each row counts
exactly once if the pipeline repeats itself; see `from_tf`.
"""

from __future__ import annotations

import atexit
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainwright.core.data import FeedAssignment
from trainwright.core.errors import DataError, user_code
from trainwright.datasets.data_source import (
    Arrays,
    Field,
    Index,
    RowAccess,
    SequentialSource,
    object_array,
)
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.python_objects import hash_block, hash_values
from trainwright.datasets.loading.sequential_rows import (
    ALL_ROWS,
    NOT_REPLAYABLE,
    SAMPLED_ROWS,
    Blocks,
    PartRows,
    RowPart,
    SequentialRows,
    block_rows,
    check_pass_rows,
    pass_index,
    takes_epoch,
)

_BLOCK_ROWS = 256
END_S = 0.5  # for running functions of the pipeline when its iterator is closed
_AUTOTUNE, _INFINITE, _UNKNOWN = -1, -1, -2  # as tf.data has them
_PARTS = ("x", "y", "weight")
# Classes of tf.data; their input is `_input_dataset`.
_BATCHES = ("_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset", "_MapAndBatchDataset")
_SAME_ELEMENTS = (
    "CacheDataset", "_AssertCardinalityDataset", "_OptionsDataset", "_PrefetchDataset", "_RepeatDataset",
    "_ShuffleDataset", "_SkipDataset", "_TakeDataset",
)  # fmt: skip
_UNBATCHED = "leave .batch() out, or append .unbatch(): the job's batch_size says what a batch is"
_SHARD = "shard"  # argument of the user's function
_UNSHARDED = (
    "computes all of them, since only the pipeline's author knows from where on a row depends on no other "
    "(see shard of from_tf)"
)
_EXACTLY_ONCE = (
    "each row counts exactly once as long as it gives the same rows in the same order each time it is iterated"
)
_SAME_EPOCHS = (
    "all epochs have the same order and random numbers, also with shuffle(seed=...), since its function takes no "
    "epoch: take (epoch) and give seed=epoch for others in each"
)
_open: dict[int, _OpenIterator] = {}  # iterators that are read, by any thread


_CHECKED = RowPart(first=3, total=7)  # compared with the whole pipeline


@dataclass(frozen=True, kw_only=True, eq=False)
class _PipelineSource(SequentialSource):
    """Rows of a pipeline. `from_tf` explains the fields."""

    make: Callable[..., Any]
    rows: int | None = None
    replayable: bool = True

    @property
    def sharded(self) -> bool:
        """Whether the user's function takes `shard`, which drops the rows of other workers."""
        return _SHARD in inspect.signature(self.make).parameters

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        return (self.make,)

    @property
    def kind(self) -> str:
        return "a tf.data pipeline"

    @property
    def reading(self) -> str:
        return "computes only its own rows after shard" if self.sharded else _UNSHARDED

    @property
    def guarantee(self) -> str:
        if not self.replayable:
            return NOT_REPLAYABLE
        return _EXACTLY_ONCE if self._takes_epoch else f"{_EXACTLY_ONCE}; {_SAME_EPOCHS}"

    @property
    def _takes_epoch(self) -> bool:
        return takes_epoch(self.make, _SHARD)

    def describe(self) -> str:
        return f"from_tf({getattr(self.make, '__name__', 'pipeline')})"

    def index(self) -> Index:
        """Read the first rows twice. Raises DataError if there are none, or if they differ."""
        pipeline = self.opened(0)
        schema, rows = self._schema(pipeline), self._length(pipeline)
        first, again = self._first_rows(pipeline, schema), self._first_rows(self.opened(0), schema)
        if self.replayable and hash_block(first) != hash_block(again):
            raise DataError(
                f"the pipeline gives other rows among its first {SAMPLED_ROWS} each time it is iterated",
                where=self.describe(),
                remedy="seed its shuffle (take (epoch) and give seed=epoch for another order in each epoch), keep it "
                "deterministic, or pass replayable=False: then a recovered run may count some rows twice and others "
                "never",
            )
        if self.sharded and self.replayable:
            self._check_part(pipeline, schema, first)
        digest = hash_values([first]) if self.replayable else ""  # of row 0
        weight = _PARTS[2] if isinstance(pipeline.element_spec, tuple) and _PARTS[2] in schema else ""
        return pass_index(self.describe(), schema, rows, first, digest, weight=weight)

    def passes(
        self, index: Index, columns: Sequence[str], feeding: FeedAssignment | None = None, seed: int = 0
    ) -> RowAccess:
        """Return a reader for one process: of its data ranks' rows if the pipeline is sharded, else of all rows."""
        all_rows = self._reader(index, columns, ALL_ROWS)
        if feeding is None or not (self.sharded and feeding.data_ranks):
            return all_rows
        ranks = feeding.data_ranks
        part = RowPart(first=ranks.start, count=len(ranks), total=feeding.total)
        return PartRows(self._reader(index, columns, part), all_rows)

    def _reader(self, index: Index, columns: Sequence[str], part: RowPart) -> SequentialRows:
        where = self.describe()
        if part.total > 1:
            where += f", counted in the rows of data rank {part.first} of {part.total}"

        def open_pass(epoch: int, place: int) -> Blocks:
            return read_blocks(self.opened(epoch, part, place), index.schema, where, place)

        return SequentialRows(open_pass, index, columns, where=self.describe(), part=part)

    def opened(self, epoch: int, part: RowPart = ALL_ROWS, place: int = 0) -> Any:
        """Return the pipeline of an epoch: the rows of a part, from a place on.

        Raises UserCodeError, DataError.
        """
        calls = 0

        def shard(rows: Any) -> Any:
            nonlocal calls
            calls += 1
            return _part_of(rows, part, place)

        named = {_SHARD: shard} if self.sharded else {}
        with user_code("the function given to from_tf", "correct the function", self.describe()):
            pipeline = self.make(epoch, **named) if self._takes_epoch else self.make(**named)
        if not (hasattr(pipeline, "element_spec") and hasattr(pipeline, "cardinality")):
            raise DataError(
                f"the function returned a {type(pipeline).__name__}",
                where=self.describe(),
                remedy="return a tf.data.Dataset",
            )
        if self.sharded and not calls:
            raise DataError(
                "the function takes shard and does not call it",
                where=self.describe(),
                remedy="call rows = shard(rows) before the rows are decoded, or leave the argument out",
            )
        return pipeline if self.sharded else _part_of(pipeline, part, place)

    def _check_part(self, pipeline: Any, schema: Mapping[str, Field], first: Arrays) -> None:
        """Compare a part of the pipeline with the same rows of the whole pipeline. Raises DataError."""
        part, total_rows = self.opened(0, _CHECKED), int(pipeline.cardinality())
        rows = {name: array[_CHECKED.first :: _CHECKED.total] for name, array in first.items()}
        part_rows = self._first_rows(part, schema, block_rows(rows)) if block_rows(rows) else rows
        length = max(-(-(total_rows - _CHECKED.first) // _CHECKED.total), 0)
        if hash_block(part_rows) != hash_block(rows) or (total_rows >= 0 and int(part.cardinality()) != length):
            raise DataError(
                "after shard, the pipeline does not give one row for each row",
                where=self.describe(),
                remedy="call shard after shuffle, filter, interleave, flat_map, repeat and assert_cardinality; only "
                "steps such as map and prefetch may follow it",
            )

    def _length(self, pipeline: Any) -> int:
        length = int(pipeline.cardinality())
        if self.rows is not None:
            return self.rows
        if length == _INFINITE:
            raise DataError(
                "the pipeline has no end",
                where=self.describe(),
                remedy="leave .repeat() out (epochs= of the job says how often), or pass rows= for a pass of that many",
            )
        if length == _UNKNOWN:
            raise DataError(
                "the pipeline does not know how many rows it gives",
                where=self.describe(),
                remedy="pass rows=, or apply tf.data.experimental.assert_cardinality",
            )
        if not length:
            raise DataError("the pipeline has no rows", where=self.describe(), remedy="look at how it is made")
        return length

    def _schema(self, pipeline: Any) -> dict[str, Field]:
        """Return the columns of the pipeline's element spec; values whose shape differs between rows are objects."""
        spec = pipeline.element_spec
        columns = _named_components(spec, self.describe())
        shapes = [component.shape for component in columns.values()]
        if len(shapes) > 1 and all(shape.rank and shape[0] is None for shape in shapes):
            raise DataError(
                f"every part of an element begins with a dimension of any size: {spec}",
                where=self.describe(),
                remedy=_UNBATCHED,
            )
        if len(shapes) > 1 and _is_batched(pipeline):
            raise DataError(
                f"the pipeline ends in .batch(), so that its elements are batches: {spec}",
                where=self.describe(),
                remedy=f"{_UNBATCHED}; where several elements are one row, append .map() after .batch()",
            )
        return {name: _field_of(component) for name, component in columns.items()}

    def _first_rows(self, pipeline: Any, schema: Mapping[str, Field], count: int = SAMPLED_ROWS) -> Arrays:
        for block in read_blocks(pipeline.take(count), schema, self.describe()):
            return block
        raise DataError("the pipeline gives no row", where=self.describe(), remedy="look at how it is made")


def _is_batched(pipeline: Any) -> bool:
    """Return whether the last transformation that changes elements of a tf.data.Dataset makes batches."""
    while type(pipeline).__name__ in _SAME_ELEMENTS:
        pipeline = pipeline._input_dataset
    return type(pipeline).__name__ in _BATCHES


def _part_of(pipeline: Any, part: RowPart, place: int) -> Any:
    """Return the rows of a part of a tf.data.Dataset, from a place on."""
    cycles, remainder = divmod(place, part.count)
    pipeline = pipeline.skip(cycles * part.total) if cycles else pipeline
    if part.count == part.total:
        rows = pipeline
    elif part.count == 1:
        rows = pipeline.shard(part.total, part.first)
    else:
        numbered = pipeline.enumerate().filter(lambda row, _: (row - part.first) % part.total < part.count)
        rows = numbered.map(lambda _, row: row)
    return rows.skip(remainder) if remainder else rows


def from_tf(make: Callable[..., Any], *, rows: int | None = None, replayable: bool = True) -> Dataset:
    """Rows of a `tf.data.Dataset` of your own, in its own order.

    It travels as the function that makes it, because a data set cannot be sent to other processes. Each pass makes it
    again and iterates it from the start: `make(epoch)` may shuffle and augment each epoch differently, by seed=epoch. A
    function without `epoch` gives all epochs the same order, also with `shuffle(seed=42)`, of which Keras' `fit` would
    make another order in each epoch. Give single rows: the job's `batch_size` makes the batches, `epochs` the passes;
    `shuffle` of the job has no say. Elements are dicts of columns, or (x, y) or (x, y, weight), which become the
    columns `x`, `y` and `weight` (dicts among them keep their names); a job names the last one:
    `sample_weight="weight"`.
    Every worker iterates the whole pipeline and keeps its share of each batch: what the pipeline computes is computed
    by each of them, as with AutoShardPolicy.DATA. If the function takes an argument `shard`, it calls it where rows of
    other workers are to be dropped, and each worker computes only its own rows after that, in the same order:

        def make(epoch, shard):
            rows = tf.data.TFRecordDataset(files).shuffle(10_000, seed=epoch, reshuffle_each_iteration=False)
            return shard(rows).map(decode, num_parallel_calls=tf.data.AUTOTUNE)

    After `shard`, each row must give one row that depends on this row alone: `map` and `prefetch` can follow. Whole
    files are not dealt to workers, as AutoShardPolicy.FILE does: then the rows of a batch would depend on the number of
    workers. A resumed run skips the earlier rows at `shard` too.

    What exactly once means here: a row is known by its place in a pass. After a failure, and in a resumed run, the pass
    begins again and skips the rows that were trained on. A pipeline that repeats itself (a seeded shuffle, no
    `deterministic=False`) therefore counts each row once, in any number of workers, and a recovered run ends as an
    uninterrupted one; its first rows are read twice to check that. `replayable=False` leaves the check out: then
    workers disagree on the order of rows, and rows can count twice or never, with or without failures.

    Args:
        make: () or (epoch) -> tf.data.Dataset, and with an argument `shard`: tf.data.Dataset -> tf.data.Dataset.
        rows: of a pass, where the pipeline does not know it; of a longer or endless one it takes the first so many.
        replayable: whether the pipeline gives the same rows in the same order each time it is iterated.

    Raises:
        DataError: it is a tf.data.Dataset itself; when it is looked at: no rows, unknown length, batches, other rows
            each time, or not one row for each row after `shard`.
    """
    if not callable(make):
        raise DataError(
            f"a {type(make).__name__} cannot be sent to the workers",
            where="from_tf",
            remedy="give the function that makes the data set: from_tf(lambda: tf.data.Dataset...)",
        )
    check_pass_rows(rows, "from_tf")
    return Dataset(source=_PipelineSource(make=make, rows=rows, replayable=replayable))


def read_blocks(pipeline: Any, schema: Mapping[str, Field], where: str, first: int = 0) -> Blocks:
    """Arrays of consecutive rows.

    Args:
        first: number of the first row, for messages.

    Raises:
        DataError: the pipeline failed.
    """
    ragged = any(field.dtype == np.dtype(object) for field in schema.values())
    batched = pipeline.ragged_batch(_BLOCK_ROWS) if ragged else pipeline.batch(_BLOCK_ROWS)
    opened = _OpenIterator(iter(batched.prefetch(_AUTOTUNE)))
    try:
        while True:
            try:
                element = next(opened.references[0])
            except StopIteration:
                return
            except Exception as error:  # TensorFlow's errors, which cannot be named here, have one class for each cause
                raise DataError(
                    f"the pipeline raised {type(error).__name__}: {error}",
                    where=f"{where}, rows {first} to {first + _BLOCK_ROWS}",
                    remedy="correct the data or the function, or append .ignore_errors() and pass rows=",
                ) from error
            columns = _named_components(element, where)
            block = {name: _array(columns[name], field) for name, field in schema.items()}
            first += block_rows(block)
            yield block
    finally:
        opened.close()


class _OpenIterator:
    """An iterator of tf.data, and the thread that closes it.

    Closing waits for the autotuner's thread. TensorFlow 2.21 wakes that thread before it marks it as cancelled, so the
    thread can sleep again until its next look at the pipeline: minutes, on a busy machine. The closing thread starts
    here, because Python 3.12 starts none while it ends.
    """

    def __init__(self, iterator: Any) -> None:
        self.references = [iterator]
        self._close_requested = threading.Event()
        self._end = threading.Thread(target=self._close_on_request, name="trainwright-pipeline-end", daemon=True)
        self._end.start()
        _open[id(self)] = self

    def close(self) -> None:
        """Close the iterator, and wait up to END_S for the functions that it runs."""
        if not self._close_requested.is_set():
            _open.pop(id(self), None)
            self._close_requested.set()
            self._end.join(END_S)

    def _close_on_request(self) -> None:
        self._close_requested.wait()
        self.references.clear()


@atexit.register
def _close_iterators() -> None:
    """Close all iterators before the interpreter ends: after that no thread runs, and closing would hang."""
    for opened in [*_open.values()]:
        opened.close()


def _named_components(element: Any, where: str) -> dict[str, Any]:
    """Return the parts of an element by column name."""
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
    """Return a batch of one column as an array; ragged values become an array for each row."""
    if hasattr(values, "row_lengths"):
        return object_array([row.numpy() for row in values])
    array = values.numpy()
    return array if field.dtype != np.dtype(object) or array.ndim == 1 else object_array(list(array))
