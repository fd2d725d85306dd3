"""Data sets: where rows come from and what is done to each. Lazy, frozen and picklable."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainwright.core.data import Batch, FeedAssignment
from trainwright.core.errors import DataError, HangError, TrainwrightError, UserCodeError
from trainwright.core.pickling import dumps, loads
from trainwright.datasets.data_source import (
    Arrays,
    Field,
    Index,
    RowAccess,
    Rows,
    SequentialSource,
    Source,
    TableSource,
    arrays_from_table,
    schema_of,
    select_columns,
)
from trainwright.datasets.formats.file_system import absolute_path
from trainwright.datasets.formats.parquet import ParquetSource
from trainwright.datasets.ops.derived_dataset import (
    BatchFilter,
    BatchPredicate,
    Derivation,
    DerivedSource,
    Filter,
    FlatMap,
    Pack,
    RowPredicate,
    RowsFunction,
)
from trainwright.datasets.ops.row_transforms import (
    BatchFunction,
    BatchMap,
    Counters,
    RowFunction,
    RowMap,
    StatefulFunction,
    Tokenize,
    Transform,
    apply,
    check_arguments,
    function_name,
)
from trainwright.datasets.ops.samplers import LengthBucketSampler, SampledSource, Sampler, WeightedSampler
from trainwright.datasets.ops.zip_columns import zip_datasets
from trainwright.datasets.row_reader import RowReader, read_single_rows
from trainwright.datasets.sample_order import MEMORY_BYTES

__all__ = ["Dataset", "Field", "Index", "first_batch", "first_row", "parquet", "table", "transformed_fields"]


_HASHED_ROWS = 8  # each may read a whole row group


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A source of rows and the transforms that are applied to them in turn. Nothing is read before it is needed."""

    source: Source
    transforms: tuple[Transform, ...] = ()

    def __repr__(self) -> str:
        calls = [f".{'map' if isinstance(step, RowMap) else 'map_batches'}(...)" for step in self.transforms]
        return self.source.describe() + "".join(calls)

    def map(self, function: RowFunction) -> Dataset:
        """Apply `function(row, rng) -> row` to each row.

        A row is a dict of values by column name; `rng` is seeded by (seed, epoch, sample), so that a row changes in the
        same way in every process and after a restart. Each row gives one row; all have the same types and shapes.

        Raises:
            DataError: the function cannot be called with (row, rng). Other methods check their functions likewise.
        """
        check_arguments(function, "map")
        return replace(self, transforms=(*self.transforms, RowMap(function=function)))

    def map_batches(
        self,
        function: BatchFunction | type,
        cpus: float = 0.0,
        gpus: float = 0.0,
        *,
        fn_constructor_args: Sequence[Any] = (),
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
    ) -> Dataset:
        """Apply `function(columns) -> columns` to many rows at once.

        `columns` are arrays by name, of any number of rows. The function treats each row independently and returns as
        many rows in the same order.

        Give a class instead of a function where opening is slow, such as for a model. Each process creates one object,
        calls it for all batches, and calls its `close()`, if any, at the end. A heavy class runs on as many actors as
        fit into the CPUs or GPUs that the plan leaves; each actor reserves `cpus` and `gpus`. An actor is replaced if
        it dies, or is silent for ten times as long as the slowest batch took (15 s at least, and at most half of the
        job's `hang_deadline_s`, by default 5 minutes).

        Args:
            function: from columns to columns, or a class whose objects are such functions.
            cpus, gpus: resources of each call; above 0 the function is heavy and runs on Ray Data.
            fn_constructor_args, fn_constructor_kwargs: arguments of the class.

        Raises:
            DataError: the function cannot be called with (columns), or `cpus` or `gpus` is negative.
        """
        for name, need in (("cpus", cpus), ("gpus", gpus)):
            if not (need >= 0 and math.isfinite(need)):
                raise DataError(
                    f"{name}={need} is not a number of {name}", remedy="use 0 to run in the worker, or more than 0"
                )
        if (cpus or gpus) and not isinstance(self.source, SampledSource):
            self.need_rows_by_number("map_batches on Ray Data")
        if isinstance(function, type) and StatefulFunction.fits(function):
            function = StatefulFunction.of(function, tuple(fn_constructor_args), fn_constructor_kwargs or {})
        elif fn_constructor_args or fn_constructor_kwargs:
            raise DataError(
                f"the transform {function_name(function)} is not a class whose objects can be called",
                where="fn_constructor_args, fn_constructor_kwargs",
                remedy="give a class with a method __call__(columns), not an object of it; or use functools.partial",
            )
        else:
            check_arguments(function, "map_batches")
        return replace(self, transforms=(*self.transforms, BatchMap(function=function, cpus=cpus, gpus=gpus)))

    def filter(self, function: RowPredicate) -> Dataset:
        """Keep the rows for which `function(row)` is true; `datasets.ops.derived_dataset` explains the cost.

        Raises DataError if an earlier transform runs on Ray Data; so do `filter_batches`, `flat_map` and `pack`.
        """
        check_arguments(function, "filter")
        return self._derived(Filter(function=function))

    def filter_batches(self, function: BatchPredicate) -> Dataset:
        """Keep the rows for which `function(columns)` is true; it returns one boolean for each of many rows."""
        check_arguments(function, "filter_batches")
        return self._derived(BatchFilter(function=function))

    def flat_map(self, function: RowsFunction) -> Dataset:
        """Turn each row into any number of rows, which `function(row)` returns or yields."""
        check_arguments(function, "flat_map")
        return self._derived(FlatMap(function=function))

    def tokenize(
        self, tokenizer: Any = None, column: str = "text", *, to: str = "tokens", end: Any = "auto", cpus: float = 0.0
    ) -> Dataset:
        """Replace a text by its tokens: an array (tokens,) of int32 for each row.

        Args:
            tokenizer: name for `transformers.AutoTokenizer`, a tokeniser of `transformers` or `tokenizers`, or a
                function from text to a list of token numbers; by default the bytes of UTF-8.
            column: column of the text; it is dropped.
            to: column of the tokens.
            end: token that ends each document; None adds none, and `auto` adds the tokeniser's own `eos_token_id` where
                its output does not end with it.
            cpus: as for `map_batches`.

        Raises:
            DataError: when rows are read, the column is missing or holds no text.
        """
        return self.map_batches(Tokenize(tokenizer=tokenizer, column=column, to=to, end=end), cpus)

    def pack(self, length: int, column: str = "tokens", *, split: bool = True) -> Dataset:
        """Concatenate documents and cut them into sequences of one length.

        Each row is then a sequence of four columns, all of shape (length,): the tokens, `mask` (1 where there is a
        token), `segment` (the document, counted from 1, 0 for padding) and `position` (of a token in its piece of the
        document). The last sequence of each row group is padded.

        Args:
            length: of a sequence, in tokens.
            column: arrays of tokens, one document a row.
            split: whether a document may continue in the next sequence; otherwise a document that does not fit starts
                a new sequence, and a document longer than `length` is cut.

        Raises:
            DataError: `length` is below 1, or a transform before it runs on Ray Data.
        """
        if length < 1:
            raise DataError(f"length={length} holds no token", remedy="give the length of a sequence, 1 or more")
        return self._derived(Pack(column=column, length=length, split=split))

    def beside(self, other: Dataset) -> Dataset:
        """Add the columns of a data set with as many rows, such as the predictions of `tw.predict` for this one.

        The column `sample` of `other` holds row numbers of this data set, and is dropped. Filters and packs renumber
        rows. The order stays the order of this data set. Earlier transforms see only the columns of their own data set;
        the transforms of `other` get the same seeds as the transforms of this data set.

        Raises:
            DataError: a data set has no rows by number. When rows are read: a row is missing in `other`, comes twice
                or does not exist in this data set, or both have a column of one name.
        """
        source, transforms = zip_datasets(self, other)
        return replace(self, source=source, transforms=transforms)

    def weighted(self, by: Any, samples_per_epoch: int | None = None) -> Dataset:
        """Draw other rows in each epoch, with replacement and with probabilities proportional to their weights.

        An epoch has `samples_per_epoch` rows, by default as many as the data. They are a function of the job's seed
        and the epoch. Earlier transforms are applied to the drawn rows.

        Args:
            by: a column of the source (before any `map`) or an array, with a weight of 0 or more for each row. The
                weights take 8 bytes a row in each process.

        Raises:
            DataError: the data has no rows by number or is sampled already. When it is indexed: weights do not fit.
        """
        if samples_per_epoch is not None and samples_per_epoch < 1:
            raise DataError(f"samples_per_epoch={samples_per_epoch} draws no row", remedy="give 1 or more")
        return self._sampled("weighted", by, WeightedSampler(rows=samples_per_epoch))

    def bucketed(self, by: Any, batch_size: int) -> Dataset:
        """Put rows of similar length into one batch, which saves padding; each row comes once in an epoch.

        The rows are shuffled, each hundred batches of them are sorted by length, and the batches are shuffled. The
        order depends on the job's seed and the epoch, not on its `shuffle`. The short last batch comes last. The rows
        of a batch come from all over the data, so reading is slow beyond a reader's memory (128 MiB decoded).

        Args:
            by: a column of the source (before any `map`) with numbers, or with texts or lists, whose lengths count; or
                an array of lengths. The lengths take 8 bytes a row in each process.
            batch_size: of the job.

        Raises:
            DataError: the data has no rows by number or is sampled already. When it is indexed: lengths do not fit.
        """
        if batch_size < 1:
            raise DataError(f"batch_size={batch_size} holds no row", remedy="give the job's batch_size")
        return self._sampled("bucketed", by, LengthBucketSampler(batch_size=batch_size))

    def _sampled(self, word: str, by: Any, sampler: Sampler) -> Dataset:
        self.need_rows_by_number(word)
        values = by if isinstance(by, str) else np.asarray(by, dtype=np.float64).reshape(-1)
        return replace(self, source=SampledSource(whole=self.source, by=values, sampler=sampler))

    def need_rows_by_number(self, word: str) -> None:
        """Raise DataError, naming the operation, if rows have a fixed order, or each epoch has other rows."""
        if isinstance(self.source, SampledSource):
            raise DataError(
                f"{word} comes after weighted or bucketed, whose rows are others in each epoch",
                where=repr(self),
                remedy=f"call {word} first",
            )
        if isinstance(self.source, SequentialSource):
            raise DataError(
                f"{word} needs rows by number, and {self.source.kind} has none",
                where=repr(self),
                remedy="do it in there, or write its rows as parquet once and read those",
            )

    def _derived(self, derivation: Derivation) -> Dataset:
        self.need_rows_by_number(derivation.word)
        if self.heavy:
            raise DataError(
                f"{derivation.word} comes after a transform that runs on Ray Data",
                where=repr(self),
                remedy=f"call {derivation.word} first, or write the transformed rows as parquet once and read those",
            )
        return Dataset(source=DerivedSource(base=self, derivation=derivation))

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """All user functions that process the rows, in order."""
        return (*self.source.functions, *(step.function for step in self.transforms))

    @property
    def heavy(self) -> bool:
        """Whether a transform requests CPUs or GPUs, and therefore runs on Ray Data."""
        return any(step.heavy for step in self.transforms)

    @property
    def streamed(self) -> bool:
        """Whether Ray Data executes the source."""
        return self.source.streamed

    @property
    def stateful(self) -> bool:
        """Whether a heavy transform is slow to open, so that only actors of Ray Data may open it."""
        return any(step.heavy and isinstance(step, BatchMap) and step.stateful for step in self.transforms)

    @property
    def needs(self) -> dict[str, float]:
        """The most CPUs and GPUs that one call of a transform requests."""
        steps = [step for step in self.transforms if isinstance(step, BatchMap)]
        return {
            "CPU": max((step.cpus for step in steps), default=0.0),
            "GPU": max((step.gpus for step in steps), default=0.0),
        }

    def index(self) -> Index:
        """Return rows, row groups and columns of the source. Raises DataError for any problem of the source."""
        return self.source.index()

    def sampled_hash(self, index: Index, columns: Iterable[str] | None) -> str:
        """Return a SHA-256 over the content of a few evenly spaced rows of the source.

        The hash of an index covers the names and sizes of files, which can stay the same when files are rewritten. For
        filtered, packed or sampled data, the hash covers rows of the original data. It is empty if rows are random,
        have no numbers or are in Ray.

        Args:
            index: of this data set.
            columns: to hash; None for all.

        Raises:
            DataError: a row cannot be read.
        """
        source = self.source
        if isinstance(source, DerivedSource) and index.base is not None:
            return source.base.sampled_hash(index.base, None)
        if isinstance(source, SampledSource) and index.base is not None:
            return replace(self, source=source.whole).sampled_hash(index.base, columns)
        if source.streamed or isinstance(source, SequentialSource):
            return ""
        loader, names = source.open(index), self.source_columns(index, columns)
        rows = np.unique(np.linspace(0, index.rows - 1, _HASHED_ROWS).astype(np.int64))
        sampled_rows = TableSource(arrays=read_single_rows(loader, index, names, rows))
        return "" if loader.varying else sampled_rows.index().hash

    def source_columns(self, index: Index, columns: Iterable[str] | None) -> tuple[str, ...]:
        """Return the source columns that `columns` need. Raises DataError for a missing column."""
        return tuple(index.schema) if self.transforms else select_columns(index.schema, columns, repr(self))

    def reader(
        self,
        index: Index,
        columns: Iterable[str] | None,
        blocks: Rows | None = None,
        memory_bytes: int = MEMORY_BYTES,
        seed: int = 0,
        feeding: FeedAssignment | None = None,
    ) -> RowAccess:
        """Return a reader of the source's rows, before any transform.

        Args:
            index: of this data set.
            columns: to read; None for all.
            blocks: first rows of the blocks that are kept in memory; None for row groups.
            memory_bytes: limit of the kept blocks.
            seed: for random rows of the source.
            feeding: data ranks whose rows are read, if fewer rows save work; None for any.
        """
        names = self.source_columns(index, columns)
        if isinstance(self.source, SequentialSource):
            return self.source.passes(index, names, feeding, seed)
        return RowReader(self.source.open(index), index, names, blocks=blocks, memory_bytes=memory_bytes, seed=seed)

    def transform(self, arrays: Arrays, samples: Rows, counters: Counters, columns: Iterable[str] | None) -> Arrays:
        """Apply all transforms and keep `columns`."""
        arrays = apply(self.transforms, arrays, samples, counters)
        return {name: arrays[name] for name in select_columns(arrays, columns, repr(self))}

    def read(
        self,
        index: Index,
        rows: Sequence[int] | Rows,
        columns: Iterable[str] | None = None,
        *,
        seed: int = 0,
        epoch: int = 0,
    ) -> Arrays:
        """Return rows by number, transformed, in the order asked for: arrays `(rows, *shape)` by column name."""
        names = None if columns is None else tuple(columns)
        samples = np.asarray(rows, dtype=np.int64)
        if len(samples) and not (samples.min() >= 0 and samples.max() < index.rows):
            raise DataError(f"rows go from 0 to {index.rows - 1}", where=repr(self), remedy="ask for such rows")
        counters = Counters(seed=seed, epoch=epoch)
        return self.transform(self.reader(index, names, seed=seed).gather(samples, epoch), samples, counters, names)


def delivery_of(data: Dataset, choice: str = "auto") -> tuple[str, str]:
    """Return how rows reach the workers, `direct` or `ray_data`, and why.

    Raises:
        DataError: `direct` for a Ray Dataset, which only Ray Data can execute.
    """
    if data.streamed:
        if choice == "direct":
            raise DataError(
                "delivery='direct' reads in the workers, and a Ray Dataset is executed by Ray Data",
                where=repr(data),
                remedy="leave delivery= out, or materialise the data set",
            )
        return "ray_data", "it executes the data set"
    if choice != "auto":
        return choice, f"delivery={choice!r}"
    asking = [function_name(step.function) for step in data.transforms if step.heavy]
    if asking:
        return "ray_data", f"{' and '.join(dict.fromkeys(asking))} asks for CPUs or GPUs of its own"
    return "direct", "no transform asks for CPUs or GPUs of its own"


def parquet(path: str | os.PathLike[str], columns: Iterable[str] | None = None) -> Dataset:
    """Rows of parquet files.

    Args:
        path: a file, a folder or a glob; local or a URI: `s3://`, `gs://`, `az://`, or another one of pyarrow.fs.
        columns: read only these; by default all.
    """
    return Dataset(source=ParquetSource(path=absolute_path(path), columns=None if columns is None else tuple(columns)))


def table(data: Any) -> Dataset:
    """Rows in memory: a dict of arrays, a pandas DataFrame or a pyarrow.Table. It travels with the job."""
    return Dataset(source=TableSource(arrays=arrays_from_table(data)))


# --- One transformed row, computed before a run -----------------------------------------------------------------------


_TRIED_ROWS = 4  # where the first row cannot be read
_DEADLINE_S = 600.0  # to open the transforms and compute a row
_COMPUTED: dict[tuple[Any, ...], Arrays] = {}  # rows of this process


def transformed_fields(dataset: Dataset, index: Index) -> Mapping[str, Field]:
    """Return the columns after the transforms; with transforms, one row is read and transformed."""
    return schema_of(first_row(dataset, index)) if dataset.transforms else index.schema


def first_batch(dataset: Dataset, index: Index, columns: Iterable[str] | None = None) -> Batch:
    """Return the row of `first_row` as a batch. Raises as `first_row`."""
    return Batch(columns=first_row(dataset, index, columns), weights=np.ones(1), samples=np.zeros(1, dtype=np.int64))


def first_row(dataset: Dataset, index: Index, columns: Iterable[str] | None = None) -> Arrays:
    """Return one transformed row: the first, or another where the first cannot be read.

    A slow transform, such as a model on a GPU, is opened by a task of Ray only, once for each calling process.

    Raises:
        DataError, UserCodeError: none of a few rows can be read, or a transform cannot be opened.
        HangError: the task of Ray did not end in time.
    """
    if not dataset.stateful:
        return _first_readable_row(dataset, index, columns)
    key = (index.hash, repr(dataset), *(getattr(step.function, "key", id(step)) for step in dataset.transforms))
    if key not in _COMPUTED:
        _COMPUTED[key] = _row_of_task(dataset, index) or _first_readable_row(dataset, index, None)
    row = _COMPUTED[key]
    return {name: row[name] for name in select_columns(row, columns, repr(dataset))}


def _first_readable_row(dataset: Dataset, index: Index, columns: Iterable[str] | None) -> Arrays:
    failure: TrainwrightError | None = None
    for row in dict.fromkeys([0, *np.linspace(0, index.rows - 1, _TRIED_ROWS).astype(np.int64).tolist()]):
        try:
            return dataset.read(index, [row], columns)
        except (DataError, UserCodeError) as error:
            failure = failure or error
    assert failure is not None, "an index has a row"
    raise failure


def _row_of_task(dataset: Dataset, index: Index) -> Arrays | None:
    """Compute the row in a task with the resources of the transforms; None where Ray is not connected."""
    import ray
    from ray.exceptions import GetTimeoutError, RayTaskError

    if not ray.is_initialized():
        return None
    needs = dataset.needs
    task: Any = ray.remote(num_cpus=needs["CPU"], num_gpus=needs["GPU"], max_calls=1)(_compute_row)
    try:
        row: Arrays | TrainwrightError = ray.get(task.remote(dumps((dataset, index))), timeout=_DEADLINE_S)
    except GetTimeoutError as error:
        resources = ", ".join(f"{number:g} {name}s" for name, number in needs.items() if number)
        raise HangError(
            f"no process with {resources} computed the first row of {dataset!r} within {_DEADLINE_S:g} s",
            remedy="see what holds them, or declare less",
        ) from error
    except RayTaskError as error:
        raise DataError(
            f"{dataset!r} cannot be opened where Ray Data runs",
            remedy="install what its functions import on every node",
            detail=str(error),
        ) from error
    if isinstance(row, TrainwrightError):
        raise row
    return row


def _compute_row(pickled: bytes) -> Arrays | TrainwrightError:
    """Run as the task. An error is returned, because Ray would wrap a raised one."""
    dataset, index = loads(pickled)
    try:
        return _first_readable_row(dataset, index, None)
    except TrainwrightError as error:
        return error
