"""Users' data sets and loaders of torch and Hugging Face. Duck-typed; no framework is imported.

Rows with numbers are read by number. Other objects are iterated in passes, and a row is identified by its place in a
pass. The rows of a pass are a function of the run's seed and the epoch: a pass starts with a fresh copy of the object
and seeds the random generators that the object uses.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from trainwright.core.data import FeedAssignment, fold_seed
from trainwright.core.errors import DataError, TrainwrightError, UserCodeError, user_code, user_traceback
from trainwright.core.pickling import dumps, loads
from trainwright.core.random_state import GENERATORS_LOCK, preserve_generators, save_generators, seed_generators
from trainwright.core.strict_model import qualified_bases
from trainwright.datasets.data_source import (
    Arrays,
    Field,
    Index,
    RowAccess,
    SequentialSource,
    select_columns,
)
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.python_objects import (
    LOCKED_S,
    ArrowAccess,
    ObjectSource,
    SampleAccess,
    field_of_rows,
    hash_block,
    named_values,
    require_same_names,
    sample_arrays,
    to_array_of,
    to_column,
)
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
    refuse_pass_rows,
    takes_epoch,
)

_LOADER, _ITERABLE = "torch.utils.data.dataloader.DataLoader", "torch.utils.data.dataset.IterableDataset"
_STREAMED = "datasets.iterable_dataset.IterableDataset"
_BLOCK_ROWS = 64

_LOADER_NOTE = (
    "a DataLoader whose rows have numbers: {}, each row counts exactly once, the batches are the job's, and its "
    "num_workers do not run, since each worker reads its own rows ahead (rows that are slow to compute: "
    ".map_batches(f, cpus=1))"
)
_EXACTLY_ONCE = (
    "each row counts exactly once as long as it gives the same rows in the same order each time it is iterated from "
    "the same seed; a run that resumes in the middle of a pass reads the pass's earlier rows again and drops them"
)


# --- The functions that users call ------------------------------------------------------------------------------------


def from_torch(
    dataset: Any, columns: Iterable[str] | None = None, *, rows: int | None = None, replayable: bool = True,
    ragged: Iterable[str] = (),
) -> Dataset:  # fmt: skip
    """Rows of a torch data set or loader: map-style Dataset, IterableDataset, DataLoader, StatefulDataLoader.

    A map-style data set is anything with `__len__` and `__getitem__`, or `__getitems__`. The object is pickled, and
    every worker reads from a copy. Its hash covers the type's name, the length and the content of a few evenly spaced
    rows: a change of other rows goes unnoticed.

    Random transforms inside it, such as torchvision's, are replayable: the global generators of torch, NumPy and Python
    are seeded by (seed, epoch, row) for each row. A row that uses them is computed again in each epoch, while no step
    runs; other rows are kept in memory if they fit. `.map(f)` has its own random numbers, and runs during steps.

    A DataLoader of a map-style data set with torch's own collate function and sampler (sequential, random,
    distributed) is replaced by its data set: the job's seed shuffles the rows unless the sampler is sequential.

    Every worker iterates an IterableDataset and any other DataLoader, with the sampler, collate function and loader
    processes that the user set up, and keeps its share of each batch. The batches are split into rows, in their order,
    and the job's `batch_size` makes new batches; `shuffle` of the job has no effect. Each pass starts with a fresh copy
    of the object, seeded by the run's seed and the epoch: `set_epoch(epoch)` of its data set or samplers is called, and
    a `torch.Generator` is seeded with its first seed plus the epoch.

    "Exactly once" refers to the place of a row in a pass. After a failure, and in a resumed run, the pass starts again
    and drops the rows that were trained on. The first rows are read twice to check that they are the same.

    Args:
        dataset: its samples may be dicts, tuples or single values, of tensors, arrays, images, numbers, text or bytes.
            Instead of an object that cannot be pickled, give a function () or (epoch) that makes an IterableDataset or
            a DataLoader; one with `epoch` determines each pass, and only the global generators are seeded.
        columns: names for the values of a sample, by default "0", "1" and so on; of dicts, the keys to keep.
        rows: of a pass, if an iterable has no length; a longer or endless one is cut after that number.
        replayable: whether a row of an epoch has the same values each time. False allows an object with a generator of
            its own: its rows are computed again in each epoch too, but a recovered run sees the same rows with other
            values. Rows of an iterable can then count twice or never.
        ragged: columns of arrays whose lengths differ, which become objects, as do columns whose sampled rows differ.

    Raises:
        DataError: the object is none of these, or cannot be pickled; when it is read: no rows, unknown length,
            inconsistent rows, or other rows each time.
    """
    names = None if columns is None else tuple(columns)
    kinds, note, ordered = qualified_bases(type(dataset)), "", False
    if _LOADER in kinds and (note := _row_number_note(dataset)):
        ordered, dataset = _is_sequential(dataset), dataset.dataset
    elif _LOADER in kinds or _ITERABLE in kinds or _is_function(dataset):
        return _iterable_dataset(dataset, "from_torch", names, rows, replayable, tuple(ragged))
    if not all(hasattr(dataset, name) for name in ("__len__", "__getitem__")):
        raise DataError(
            f"a {type(dataset).__name__} is not a map-style data set: it has no __len__ and __getitem__",
            remedy="give a function that makes an IterableDataset or a DataLoader, or write its samples as parquet",
        )
    refuse_pass_rows(rows, "from_torch")
    source = ObjectSource(
        access=SampleAccess(dataset=dataset, columns=names), name=type(dataset).__name__, call="from_torch",
        replayable=replayable, ragged=tuple(ragged), ordered=ordered, plan_note=note,
    )  # fmt: skip
    return Dataset(source=source)


def from_huggingface(
    dataset: Any, columns: Iterable[str] | None = None, *, rows: int | None = None, replayable: bool = True,
    ragged: Iterable[str] = (),
) -> Dataset:  # fmt: skip
    """Rows of a Hugging Face `datasets.Dataset`, or of a streamed one, `datasets.IterableDataset`.

    A Dataset is read as Arrow, without its row-by-row decoding. Its files must be at the same path on every node, since
    the pickled object refers to them. Its hash covers the type's name, the length and the content of a few evenly
    spaced rows. Fixed-size features become dimensions; lists, text and structs become objects, and an `Image` is a dict
    of its encoded `bytes` and its `path`.

    A streamed one is iterated in its own order like an IterableDataset in `from_torch`, with `set_epoch`. If a worker
    feeds one data rank, `split_dataset_by_node` drops the rows of other workers before they are decoded.

    Args:
        dataset: one split, or a function () or (epoch) that makes a streamed one.
        columns: read only these; by default all.
        rows, replayable, ragged: see `from_torch`. A streamed one has no length.

    Raises:
        DataError: it has several splits, or is formatted by a user function (`set_transform`); for a streamed one, as
            in `from_torch`.
    """
    kind = type(dataset).__name__
    if _STREAMED in qualified_bases(type(dataset)) or _is_function(dataset):
        names = None if columns is None else tuple(columns)
        return _iterable_dataset(dataset, "from_huggingface", names, rows, replayable, tuple(ragged))
    remedy = ""
    if isinstance(dataset, Mapping):
        remedy = f"name one of its splits: {', '.join(map(str, dataset))}"
    elif not all(hasattr(dataset, name) for name in ("with_format", "features")):
        remedy = "give a datasets.Dataset; other map-style objects go to from_torch(...)"
    elif not hasattr(dataset, "__len__"):
        remedy = "load it without streaming=True, or write it as parquet"
    elif (getattr(dataset, "format", None) or {}).get("type") == "custom":
        remedy = "give the function to .map(...) here, or the data set to from_torch(...), which calls it for each row"
    if remedy:
        raise DataError(f"this {kind} cannot be read by row number as Arrow", where="from_huggingface", remedy=remedy)
    refuse_pass_rows(rows, "from_huggingface")
    names = select_columns(dict.fromkeys(dataset.features), columns, f"from_huggingface({kind})")
    access = ArrowAccess(dataset=dataset.with_format("arrow", columns=list(names)))
    source = ObjectSource(
        access=access, name=kind, call="from_huggingface", replayable=replayable, ragged=tuple(ragged)
    )
    return Dataset(source=source)


def _iterable_dataset(
    value: Any, call: str, columns: tuple[str, ...] | None, rows: int | None, replayable: bool, ragged: tuple[str, ...]
) -> Dataset:
    check_pass_rows(rows, call)
    source = _IterableSource(given=value, call=call, columns=columns, rows=rows, replayable=replayable, ragged=ragged)
    return Dataset(source=source)


def _is_function(value: Any) -> bool:
    rows = hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    return callable(value) and (isinstance(value, type) or not rows)


def _is_torchs(thing: Any, *names: str) -> bool:
    """Return whether a class or function comes from torch or torchdata and has one of these names."""
    return (
        str(getattr(thing, "__module__", "")).partition(".")[0] in ("torch", "torchdata")
        and getattr(thing, "__qualname__", "") in names
    )


def _row_number_note(loader: Any) -> str:
    """Return the plan's note on a loader that is replaced by its data set; empty for a loader that is iterated."""
    sampler, kind = loader.sampler, type(loader.sampler)
    reads_each_once = _is_torchs(kind, "SequentialSampler", "DistributedSampler", "StatefulDistributedSampler") or (
        _is_torchs(kind, "RandomSampler") and not sampler.replacement and sampler.num_samples == len(loader.dataset)
    )
    plain = (
        _is_torchs(type(loader), "DataLoader", "StatefulDataLoader")
        and _ITERABLE not in qualified_bases(type(loader.dataset))
        and reads_each_once
        and _is_torchs(type(loader.batch_sampler), "BatchSampler")
        and _is_torchs(loader.collate_fn, "default_collate")
        and loader.worker_init_fn is None
    )
    order = "they come in its order" if _is_sequential(loader) else "the job's seed shuffles them, not its sampler"
    return _LOADER_NOTE.format(order) if plain else ""


def _is_sequential(loader: Any) -> bool:
    return _is_torchs(type(loader.sampler), "SequentialSampler")


# --- Iterated objects -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _IterableSource(SequentialSource):
    """Rows of an iterable, or of an iterable that a function makes. `from_torch` explains the fields."""

    given: Any
    call: str
    columns: tuple[str, ...] | None
    rows: int | None
    replayable: bool
    ragged: tuple[str, ...]

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        return (self.given,) if _is_function(self.given) else ()

    @property
    def kind(self) -> str:
        if _is_function(self.given):
            return f"what {self._name} returns"
        return "a streamed Hugging Face data set" if self.call == "from_huggingface" else f"a {self._name}"

    @property
    def reading(self) -> str:
        if self._splits:
            return "that feeds one data rank leaves the rows of others out before they are decoded"
        processes = 0 if _is_function(self.given) else getattr(self.given, "num_workers", 0)
        return f"iterates all of them{f', in {processes} loader processes,' * bool(processes)} and keeps its share"

    @property
    def guarantee(self) -> str:
        return _EXACTLY_ONCE if self.replayable else NOT_REPLAYABLE

    def describe(self) -> str:
        return f"{self.call}({self._name})"

    @property
    def _name(self) -> str:
        named = self.given if _is_function(self.given) else type(self.given)
        return str(getattr(named, "__name__", "function"))

    @property
    def _splits(self) -> bool:
        """Whether a process can skip the rows of others; older releases of `datasets` cannot split by examples."""
        return self.call == "from_huggingface" and "strategy" in inspect.signature(_split_by_node()).parameters

    def index(self) -> Index:
        """Read the first rows twice. Raises DataError if there are none, or if they differ."""
        schema, first = self._sample_rows()
        if self.replayable and hash_block(first) != hash_block(self._sample_rows()[1]):
            raise DataError(
                f"it gives other rows among its first {SAMPLED_ROWS} each time it is iterated",
                where=self.describe(),
                remedy="draw random numbers from the global generators of torch, NumPy or Python, which are seeded for "
                "each pass, or seed the generator; or pass replayable=False: then a recovered run may count some rows "
                "twice and others never",
            )
        digest = hash_block(first) if self.replayable else ""
        return pass_index(self.describe(), schema, self._length(), first, digest, call=self.call)

    def passes(
        self, index: Index, columns: Sequence[str], feeding: FeedAssignment | None = None, seed: int = 0
    ) -> RowAccess:
        """Return a reader for one process: of all rows, or of its data rank's rows if the object can be split."""

        def reader(part: RowPart) -> SequentialRows:
            def open_pass(epoch: int, place: int) -> Blocks:
                return _Pass(self, seed, epoch, part).blocks(index.schema, place)

            return SequentialRows(
                open_pass, index, columns, where=self.describe(), part=part, what="the pass", exact=self.rows is None,
                remedy="give each pass as many rows (loader processes each their own: see get_worker_info), or pass "
                "the number as rows=",
            )  # fmt: skip

        if feeding is None or len(feeding.data_ranks) != 1 or feeding.total == 1 or not self._splits:
            return reader(ALL_ROWS)
        return PartRows(reader(RowPart(first=feeding.data_ranks.start, total=feeding.total)), reader(ALL_ROWS))

    def _sample_rows(self) -> tuple[dict[str, Field], Arrays]:
        """Return the columns and the first rows, of two batches at least."""
        samples: list[_Values] = []
        with closing(_Pass(self, 0, 0).chunks()) as chunks:
            for number, (first, chunk) in enumerate(chunks):
                rows = range(block_rows(chunk))
                samples += [{name: values[row : row + 1] for name, values in chunk.items()} for row in rows]
                if number and first + len(rows) >= SAMPLED_ROWS:
                    break
        if not samples:
            raise DataError("it gives no row", where=self.describe(), remedy="look at how it is made")
        schema = {name: field_of_rows(name, samples, self.describe(), self.ragged) for name in samples[0]}
        first_rows = {
            name: np.concatenate([to_column(name, row[name], field, self.describe(), range(1)) for row in samples])
            for name, field in schema.items()
        }
        return schema, first_rows

    def _length(self) -> int:
        counted = _Pass(self, 0, 0).length()
        if self.rows and counted and self.rows > counted:
            raise DataError(f"rows={self.rows}, and a pass has {counted}", where=self.describe(), remedy="leave it out")
        if not (self.rows or counted):
            raise DataError(
                "it does not know how many rows it gives in a pass",
                where=self.describe(),
                remedy=f"pass {self.call}(..., rows=): a pass of a longer or endless one has that many rows",
            )
        return self.rows or counted or 0


_Values = Mapping[str, Any]
"""By column, one value for each row: an array (rows, *shape) or a list."""


class _Pass:
    """A pass over an iterable: a fresh copy of the object, or the function's result, seeded for the epoch."""

    def __init__(self, source: _IterableSource, seed: int, epoch: int, part: RowPart = ALL_ROWS) -> None:
        self._source, self._part = source, part
        self._where = f"{source.describe()}, epoch {epoch}"
        self._randomness = _PassRandomness(fold_seed(seed, epoch))
        self._sampling = _PassRandomness(fold_seed(seed, epoch, 1))  # of the sampler of a loader with processes
        with self._randomness.seeded():
            self._object = self._open_object(epoch)
        kinds = qualified_bases(type(self._object))
        self._loader = _LOADER in kinds
        if not kinds & ({_STREAMED} if source.call == "from_huggingface" else {_LOADER, _ITERABLE, _STREAMED}):
            raise DataError(
                f"the function returned a {type(self._object).__name__}",
                where=source.describe(),
                remedy="return an IterableDataset, of torch also in a DataLoader; a map-style data set is given itself",
            )
        if self._loader:  # its processes end with this pass: where garbage collection ends them, it waits 5 s for each
            object.__setattr__(self._object, "persistent_workers", False)
        self._batched = self._loader and self._object.batch_sampler is not None

    def length(self) -> int | None:
        """Count the rows of the pass; None if that is unknown. For a pass that is not read."""
        if not self._loader:
            return len(self._object) if hasattr(self._object, "__len__") else None
        loader, size = self._object, self._object.batch_size
        iterable = _ITERABLE in qualified_bases(type(loader.dataset))
        sized = loader.dataset if iterable else loader.sampler if size else loader.batch_sampler or loader.sampler
        if not hasattr(sized, "__len__") or (iterable and loader.drop_last and loader.num_workers > 1):
            return None
        if self._batched and not size:
            with self._randomness.seeded():
                return sum(map(len, sized))
        return len(sized) // size * size if loader.drop_last else len(sized)

    def blocks(self, schema: Mapping[str, Field], place: int) -> Blocks:
        """Yield arrays of consecutive rows of the part, from a place on. Raises UserCodeError, DataError."""
        with closing(self.chunks(place)) as chunks:
            for first, chunk in chunks:
                names = select_columns(chunk, schema, self._where)
                rows = range(first, first + block_rows(chunk))
                yield {name: to_column(name, chunk[name], schema[name], self._where, rows) for name in names}

    def chunks(self, place: int = 0) -> Generator[tuple[int, _Values], None, None]:
        """Yield consecutive rows from a place on, each chunk with the place of its first row."""
        count, pending, columns = 0, list[dict[str, Any]](), self._source.columns
        with closing(self._elements()) as elements:
            for element in elements:
                where = f"{self._where}, row {self._part.row(count)}"
                if self._batched:
                    chunk = _rows_of_batch(element, columns, where)
                    low, count = max(place - count, 0), count + block_rows(chunk)
                    if count > place:
                        tail = {name: values[low:] for name, values in chunk.items()}
                        yield max(place, count - block_rows(chunk)), tail
                    continue
                pending += [sample_arrays(element, columns, where)] if count >= place else []
                count += 1
                if len(pending) == _BLOCK_ROWS:
                    yield count - len(pending), _columns_of(pending, where)
                    pending = []
            if pending:
                yield count - len(pending), _columns_of(pending, self._where)

    def _open_object(self, epoch: int) -> Any:
        value, where = self._source.given, self._source.describe()
        if _is_function(value):
            wants_epoch = takes_epoch(value)
            with user_code(f"the function given to {self._source.call}", "correct the function", where):
                iterable = value(epoch) if wants_epoch else value()
        else:
            wants_epoch, iterable = False, _pickled_copy(value, where)
        for part in _parts_of(iterable):
            _refuse_share(part, where)
        if self._part.total > 1:
            iterable = _split_by_node()(iterable, self._part.first, self._part.total, strategy="examples")
        if not wants_epoch:
            _begin_epoch(_parts_of(iterable), epoch)
        return iterable

    def _elements(self) -> Generator[Any, None, None]:
        """Yield the object's elements. An object of this process computes while no step draws random numbers."""
        in_process = not (self._loader and self._object.num_workers)
        if not in_process and _ITERABLE not in qualified_bases(type(self._object.dataset)):
            name = "batch_sampler" if self._batched else "sampler"
            object.__setattr__(self._object, name, _SeededSampler(getattr(self._object, name), self._sampling))
        number = 0
        iterator: Iterator[Any] | None = None
        failure: Exception | None = None
        try:
            while failure is None:
                elements: list[Any] = []
                deadline_s = time.monotonic() + LOCKED_S
                try:
                    with self._randomness.seeded() if in_process or iterator is None else nullcontext():
                        if iterator is None:
                            iterator = iter(self._object)
                            continue
                        elements.append(next(iterator))
                        while in_process and len(elements) < _BLOCK_ROWS and time.monotonic() < deadline_s:
                            elements.append(next(iterator))
                except Exception as error:
                    failure = error
                yield from elements
                number += len(elements)
            if not isinstance(failure, StopIteration):
                raise self._element_error(failure, number) from None
        finally:
            iterator = None
            if failure is not None:
                failure.__traceback__ = None  # it holds the iterator too, and with it the processes of a loader

    def _element_error(self, error: Exception, number: int) -> TrainwrightError:
        """Return the error of an element, without the traceback that torch adds to errors of loader processes."""
        size = self._object.batch_size if self._batched else None
        row = f"row {self._part.row(number)}" if not self._batched else f"batch {number}"
        row += f", rows from {number * size} on" if size else ""
        lines = str(error).strip().splitlines() or [""]
        message = lines[-1] if lines[0].startswith("Caught ") else f"{type(error).__name__}: {lines[0]}"
        return UserCodeError(
            f"{self._source.kind} raised {message}",
            where=f"{self._where}, {row}",
            remedy="correct it, or the data that it reads",
            detail=user_traceback(error),
        )


def _pickled_copy(value: Any, where: str) -> Any:
    try:
        pickled = dumps(value)
    except Exception as error:  # cloudpickle raises whatever the object's own pickling raises
        raise DataError(
            f"this {type(value).__name__} cannot be sent to the workers: {type(error).__name__}: {error}",
            where=where,
            remedy="give a function that makes it",
        ) from error
    return loads(pickled)


def _parts_of(iterable: Any) -> list[Any]:
    """Return the object, its data set and its samplers, without duplicates."""
    parts = [iterable, *(getattr(iterable, name, None) for name in ("dataset", "sampler", "batch_sampler"))]
    parts.append(getattr(parts[-1], "sampler", None))
    return list({id(part): part for part in parts if part is not None}.values())


def _refuse_share(part: Any, where: str) -> None:
    """Raise DataError for a sampler or data set that yields only the rows of one rank."""
    if getattr(part, "num_replicas", 1) > 1 or getattr(getattr(part, "_distributed", None), "world_size", 1) > 1:
        raise DataError(
            f"its {type(part).__name__} gives the rows of one rank only",
            where=where,
            remedy="leave DistributedSampler and split_dataset_by_node out: each worker keeps its share of each batch",
        )


def _begin_epoch(parts: Sequence[Any], epoch: int) -> None:
    generators = {id(part.generator): part.generator for part in parts if hasattr(part, "generator")}
    for generator in generators.values():
        if hasattr(generator, "initial_seed"):
            generator.manual_seed(generator.initial_seed() + epoch)
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def _split_by_node() -> Any:
    return importlib.import_module("datasets.distributed").split_dataset_by_node


def _rows_of_batch(batch: Any, columns: Sequence[str] | None, where: str) -> _Values:
    """Return the rows of a batch: of collated columns, as in torch, or of a list of samples. Raises DataError."""
    if isinstance(batch, list) and batch and isinstance(batch[0], Mapping | tuple):
        return _columns_of([sample_arrays(sample, columns, where) for sample in batch], where)
    texts = isinstance(batch, list) and batch and isinstance(batch[0], str | bytes)
    named = named_values(tuple(batch) if isinstance(batch, list) and not texts else batch, columns, where)
    arrays: dict[str, Any] = {}
    for name, values in named.items():
        place = f"{where}, column {name!r}"
        if isinstance(values, list | tuple):
            arrays[name] = [to_array_of(value, place) for value in values]
        else:
            arrays[name] = np.array(to_array_of(values, place))  # a copy: the memory may be the user's or a process's
    counts = {name: len(values) if isinstance(values, list) or values.ndim else 0 for name, values in arrays.items()}
    if len(set(counts.values())) != 1 or not all(counts.values()):
        words = ", ".join(f"{name!r} {count}" for name, count in counts.items())
        raise DataError(
            f"the columns of a batch differ in their number of rows: {words}",
            where=where,
            remedy="collate dicts or tuples whose values have one row for each sample",
        )
    return arrays


def _columns_of(rows: Sequence[Mapping[str, Any]], where: str) -> _Values:
    require_same_names(rows, where)
    return {name: [row[name] for row in rows] for name in rows[0]}


class _PassRandomness:
    """The states of the global random generators for a pass, which differ from the states for steps."""

    def __init__(self, seed: int) -> None:
        self._restore: Callable[[], None] = partial(seed_generators, seed)

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Use the states of the pass inside the block, while no step uses the generators."""
        with GENERATORS_LOCK, preserve_generators("cpu"):
            self._restore()
            yield
            self._restore = save_generators("cpu")


class _SeededSampler:
    """A sampler with its own generator states, for a loader with processes, which samples between steps."""

    def __init__(self, sampler: Any, randomness: _PassRandomness) -> None:
        self._sampler, self._randomness = sampler, randomness

    def __iter__(self) -> Iterator[Any]:
        with self._randomness.seeded():
            numbers = iter(self._sampler)
        while True:
            items: list[Any] = []  # several at a time: the lock may be held for a whole step
            deadline_s = time.monotonic() + LOCKED_S
            with self._randomness.seeded():
                for item in islice(numbers, _BLOCK_ROWS):
                    items.append(item)
                    if time.monotonic() > deadline_s:
                        break
            if not items:
                return
            yield from items

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)
