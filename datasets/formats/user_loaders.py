"""The user's own data sets and loaders of torch and Hugging Face. Duck-typed; no framework is imported.

Where rows have numbers, they are read by number. Everything else is iterated, one pass after the other: a row is known
by its place in a pass. What a pass gives is a function of the run's seed and the epoch: it begins with a fresh copy of
the object, and the random generators that the object draws from are seeded.
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

    A map-style data set is anything with `__len__` and `__getitem__`, or `__getitems__`. The object travels by pickle
    and is asked in every worker. It is recognised by its type's name, its length and the content of a few rows spread
    over it, not by all rows: a change elsewhere goes unnoticed.

    Random transforms inside it, such as torchvision's, are right and replayable: the global generators of torch, NumPy
    and Python are seeded by (seed, epoch, row) for each row. A row that draws from them is computed again in each
    epoch, while no step runs; rows that draw nothing are kept in memory where they fit. `.map(f)` has random numbers of
    its own, and runs beside steps.

    A DataLoader of a map-style data set with torch's own collate function and sampler (sequential, random,
    distributed) is taken as its data set: rows are shuffled by the job's seed unless the sampler is sequential.

    Any other DataLoader and an IterableDataset are iterated by every worker, with the sampler, collate function and
    loader processes that the user set up; each worker keeps its share of each batch. The batches are taken apart into
    rows, in their order: the job's `batch_size` makes the batches, and `shuffle` of the job has no say. Each pass
    begins with a fresh copy of the object, seeded by the run's seed and the epoch: `set_epoch(epoch)` is called where
    its data set or samplers have it, and a `torch.Generator` is seeded with its first seed plus the epoch.

    What exactly once means there: a row is known by its place in a pass. After a failure, and in a resumed run, the
    pass begins again and drops the rows that were trained on. The first rows are read twice to check that they are the
    same.

    Args:
        dataset: its samples may be dicts, tuples or single values, of tensors, arrays, images, numbers, text or bytes.
            What cannot be pickled is given as a function () or (epoch) that makes an IterableDataset or a DataLoader;
            with `epoch` it says what each pass is, and only the global generators are seeded.
        columns: names for the values of a sample, by default "0", "1" and so on; of dicts, the keys to keep.
        rows: of a pass, where an iterable does not know it; of a longer or endless one it takes the first so many.
        replayable: whether a row of an epoch has the same values each time. False allows an object that draws from a
            generator of its own: its rows are computed again in each epoch too, but a recovered run sees the same rows
            with other values. Of an iterable, rows can then count twice or never.
        ragged: columns of arrays whose lengths differ, which become objects; others do if sampled rows differ in that.

    Raises:
        DataError: the object is none of these, or cannot be pickled; when it is read: no rows, unknown length, rows
            that do not fit, or other rows each time.
    """
    names = None if columns is None else tuple(columns)
    kinds, note, ordered = qualified_bases(type(dataset)), "", False
    if _LOADER in kinds and (note := _numbered(dataset)):
        ordered, dataset = _is_sequential(dataset), dataset.dataset
    elif _LOADER in kinds or _ITERABLE in kinds or _is_function(dataset):
        return _iterated(dataset, "from_torch", names, rows, replayable, tuple(ragged))
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

    A Dataset is read as Arrow, without its row-by-row decoding. Its files must be at the same path on every node: the
    object travels by pickle, which names them. It is recognised by its type's name, its length and the content of a few
    rows spread over it. Fixed-size features become dimensions; lists, text and structs become objects, and an `Image`
    is a dict of its encoded `bytes` and its `path`.

    A streamed one is iterated in its own order, as `from_torch` says it of an IterableDataset, with `set_epoch`. Where
    a worker feeds one data rank, `split_dataset_by_node` leaves the rows of other workers out, before they are decoded.

    Args:
        dataset: one split, or a function () or (epoch) that makes a streamed one.
        columns: read only these; by default all.
        rows, replayable, ragged: see `from_torch`. A streamed one does not know its number of rows.

    Raises:
        DataError: it is several splits, or formatted by a function of the user's (`set_transform`); of a streamed one,
            as `from_torch`.
    """
    kind = type(dataset).__name__
    if _STREAMED in qualified_bases(type(dataset)) or _is_function(dataset):
        names = None if columns is None else tuple(columns)
        return _iterated(dataset, "from_huggingface", names, rows, replayable, tuple(ragged))
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


def _iterated(
    given: Any, call: str, columns: tuple[str, ...] | None, rows: int | None, replayable: bool, ragged: tuple[str, ...]
) -> Dataset:
    check_pass_rows(rows, call)
    source = _IterableSource(given=given, call=call, columns=columns, rows=rows, replayable=replayable, ragged=ragged)
    return Dataset(source=source)


def _is_function(given: Any) -> bool:
    rows = hasattr(given, "__iter__") or hasattr(given, "__getitem__")
    return callable(given) and (isinstance(given, type) or not rows)


def _is_torchs(thing: Any, *names: str) -> bool:
    """Whether a class or function is one of torch's own of these names, or torchdata's."""
    return (
        str(getattr(thing, "__module__", "")).partition(".")[0] in ("torch", "torchdata")
        and getattr(thing, "__qualname__", "") in names
    )


def _numbered(loader: Any) -> str:
    """The plan's note on a loader whose data set is read by number in its place; empty for one that is iterated."""
    sampler, kind = loader.sampler, type(loader.sampler)
    whole = _is_torchs(kind, "SequentialSampler", "DistributedSampler", "StatefulDistributedSampler") or (
        _is_torchs(kind, "RandomSampler") and not sampler.replacement and sampler.num_samples == len(loader.dataset)
    )
    plain = (
        _is_torchs(type(loader), "DataLoader", "StatefulDataLoader")
        and _ITERABLE not in qualified_bases(type(loader.dataset))
        and whole
        and _is_torchs(type(loader.batch_sampler), "BatchSampler")
        and _is_torchs(loader.collate_fn, "default_collate")
        and loader.worker_init_fn is None
    )
    order = "they come in its order" if _is_sequential(loader) else "the job's seed shuffles them, not its sampler"
    return _LOADER_NOTE.format(order) if plain else ""


def _is_sequential(loader: Any) -> bool:
    return _is_torchs(type(loader.sampler), "SequentialSampler")


# --- What is iterated -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _IterableSource(SequentialSource):
    """Rows of an iterable, or of the one that a function makes. `from_torch` says what the fields mean."""

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
        given = self.given if _is_function(self.given) else type(self.given)
        return str(getattr(given, "__name__", "function"))

    @property
    def _splits(self) -> bool:
        """Whether a process can leave out the rows of others: with a release of `datasets` that splits by examples."""
        return self.call == "from_huggingface" and "strategy" in inspect.signature(_split_by_node()).parameters

    def index(self) -> Index:
        """Read the first rows, twice. Raises DataError where there is none, or where they differ."""
        schema, first = self._sampled()
        if self.replayable and hash_block(first) != hash_block(self._sampled()[1]):
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
        """A reader for one process: of all rows, or of those of its data rank where the object can be split."""

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

    def _sampled(self) -> tuple[dict[str, Field], Arrays]:
        """Columns, and the first rows, of two batches at least."""
        found: list[_Values] = []
        with closing(_Pass(self, 0, 0).chunks()) as chunks:
            for number, (first, chunk) in enumerate(chunks):
                rows = range(block_rows(chunk))
                found += [{name: values[row : row + 1] for name, values in chunk.items()} for row in rows]
                if number and first + len(rows) >= SAMPLED_ROWS:
                    break
        if not found:
            raise DataError("it gives no row", where=self.describe(), remedy="look at how it is made")
        schema = {name: field_of_rows(name, found, self.describe(), self.ragged) for name in found[0]}
        first_rows = {
            name: np.concatenate([to_column(name, row[name], field, self.describe(), range(1)) for row in found])
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
    """A pass over an iterable: a fresh copy of the object, or what the function makes, seeded for the epoch."""

    def __init__(self, source: _IterableSource, seed: int, epoch: int, part: RowPart = ALL_ROWS) -> None:
        self._source, self._part = source, part
        self._where = f"{source.describe()}, epoch {epoch}"
        self._randomness = _PassRandomness(fold_seed(seed, epoch))
        self._sampling = _PassRandomness(fold_seed(seed, epoch, 1))  # of the sampler of a loader with processes
        with self._randomness.drawn():
            self._object = self._made(epoch)
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
        """Count the rows of the pass; None where that is not known. For a pass that is not read."""
        if not self._loader:
            return len(self._object) if hasattr(self._object, "__len__") else None
        loader, size = self._object, self._object.batch_size
        iterable = _ITERABLE in qualified_bases(type(loader.dataset))
        sized = loader.dataset if iterable else loader.sampler if size else loader.batch_sampler or loader.sampler
        if not hasattr(sized, "__len__") or (iterable and loader.drop_last and loader.num_workers > 1):
            return None
        if self._batched and not size:
            with self._randomness.drawn():
                return sum(map(len, sized))
        return len(sized) // size * size if loader.drop_last else len(sized)

    def blocks(self, schema: Mapping[str, Field], place: int) -> Blocks:
        """Arrays of consecutive rows of the part, from a place on. Raises UserCodeError, DataError."""
        with closing(self.chunks(place)) as chunks:
            for first, chunk in chunks:
                names = select_columns(chunk, schema, self._where)
                rows = range(first, first + block_rows(chunk))
                yield {name: to_column(name, chunk[name], schema[name], self._where, rows) for name in names}

    def chunks(self, place: int = 0) -> Generator[tuple[int, _Values], None, None]:
        """Consecutive rows from a place on, and the place of the first of them."""
        at, held, columns = 0, list[dict[str, Any]](), self._source.columns
        with closing(self._elements()) as elements:
            for element in elements:
                where = f"{self._where}, row {self._part.row(at)}"
                if self._batched:
                    chunk = _rows_of_batch(element, columns, where)
                    low, at = max(place - at, 0), at + block_rows(chunk)
                    if at > place:
                        yield max(place, at - block_rows(chunk)), {name: values[low:] for name, values in chunk.items()}
                    continue
                held += [sample_arrays(element, columns, where)] if at >= place else []
                at += 1
                if len(held) == _BLOCK_ROWS:
                    yield at - len(held), _columns_of(held, where)
                    held = []
            if held:
                yield at - len(held), _columns_of(held, self._where)

    def _made(self, epoch: int) -> Any:
        given, where = self._source.given, self._source.describe()
        if _is_function(given):
            wants_epoch = takes_epoch(given)
            with user_code(f"the function given to {self._source.call}", "correct the function", where):
                made = given(epoch) if wants_epoch else given()
        else:
            wants_epoch, made = False, _copied(given, where)
        for each in _parts_of(made):
            _refuse_share(each, where)
        if self._part.total > 1:
            made = _split_by_node()(made, self._part.first, self._part.total, strategy="examples")
        if not wants_epoch:
            _begin_epoch(_parts_of(made), epoch)
        return made

    def _elements(self) -> Generator[Any, None, None]:
        """What the object gives. Where it computes in this process, it does so while no step draws random numbers."""
        here = not (self._loader and self._object.num_workers)
        if not here and _ITERABLE not in qualified_bases(type(self._object.dataset)):
            name = "batch_sampler" if self._batched else "sampler"
            object.__setattr__(self._object, name, _SeededSampler(getattr(self._object, name), self._sampling))
        number = 0
        iterator: Iterator[Any] | None = None
        failure: Exception | None = None
        try:
            while failure is None:
                found: list[Any] = []
                until = time.monotonic() + LOCKED_S
                try:
                    with self._randomness.drawn() if here or iterator is None else nullcontext():
                        if iterator is None:
                            iterator = iter(self._object)
                            continue
                        found.append(next(iterator))
                        while here and len(found) < _BLOCK_ROWS and time.monotonic() < until:
                            found.append(next(iterator))
                except Exception as error:
                    failure = error
                yield from found
                number += len(found)
            if not isinstance(failure, StopIteration):
                raise self._failed(failure, number) from None
        finally:
            iterator = None
            if failure is not None:
                failure.__traceback__ = None  # it holds the iterator too, and with it the processes of a loader

    def _failed(self, error: Exception, number: int) -> TrainwrightError:
        """The error of an element, in words; of a loader process, torch puts its whole traceback into the message."""
        size = self._object.batch_size if self._batched else None
        row = f"row {self._part.row(number)}" if not self._batched else f"batch {number}"
        row += f", rows from {number * size} on" if size else ""
        said = str(error).strip().splitlines() or [""]
        told = said[-1] if said[0].startswith("Caught ") else f"{type(error).__name__}: {said[0]}"
        return UserCodeError(
            f"{self._source.kind} raised {told}",
            where=f"{self._where}, {row}",
            remedy="correct it, or the data that it reads",
            detail=user_traceback(error),
        )


def _copied(given: Any, where: str) -> Any:
    try:
        pickled = dumps(given)
    except Exception as error:  # cloudpickle raises whatever the object's own pickling raises
        raise DataError(
            f"this {type(given).__name__} cannot be sent to the workers: {type(error).__name__}: {error}",
            where=where,
            remedy="give a function that makes it",
        ) from error
    return loads(pickled)


def _parts_of(made: Any) -> list[Any]:
    """The object and what it reads from, each once."""
    parts = [made, *(getattr(made, name, None) for name in ("dataset", "sampler", "batch_sampler"))]
    parts.append(getattr(parts[-1], "sampler", None))
    return list({id(part): part for part in parts if part is not None}.values())


def _refuse_share(part: Any, where: str) -> None:
    """Raise DataError for a sampler or data set that gives the rows of one rank only."""
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
    """Rows of a batch: of one value for each row by column, as torch collates, or of samples. Raises DataError."""
    if isinstance(batch, list) and batch and isinstance(batch[0], Mapping | tuple):
        return _columns_of([sample_arrays(sample, columns, where) for sample in batch], where)
    texts = isinstance(batch, list) and batch and isinstance(batch[0], str | bytes)
    named = named_values(tuple(batch) if isinstance(batch, list) and not texts else batch, columns, where)
    found: dict[str, Any] = {}
    for name, values in named.items():
        told = f"{where}, column {name!r}"
        if isinstance(values, list | tuple):
            found[name] = [to_array_of(value, told) for value in values]
        else:
            found[name] = np.array(to_array_of(values, told))  # a copy: the memory may be the user's or a process's
    counts = {name: len(values) if isinstance(values, list) or values.ndim else 0 for name, values in found.items()}
    if len(set(counts.values())) != 1 or not all(counts.values()):
        listed = ", ".join(f"{name!r} {count}" for name, count in counts.items())
        raise DataError(
            f"the columns of a batch differ in their number of rows: {listed}",
            where=where,
            remedy="collate dicts or tuples whose values have one row for each sample",
        )
    return found


def _columns_of(rows: Sequence[Mapping[str, Any]], where: str) -> _Values:
    require_same_names(rows, where)
    return {name: [row[name] for row in rows] for name in rows[0]}


class _PassRandomness:
    """The states of the global generators that a pass draws from, which differ from those that steps draw from."""

    def __init__(self, seed: int) -> None:
        self._restore: Callable[[], None] = partial(seed_generators, seed)

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Let the pass draw where it drew last; no step draws meanwhile."""
        with GENERATORS_LOCK, preserve_generators("cpu"):
            self._restore()
            yield
            self._restore = save_generators("cpu")


class _SeededSampler:
    """A sampler that draws from generators of its own. A loader with processes asks for its numbers between steps."""

    def __init__(self, sampler: Any, randomness: _PassRandomness) -> None:
        self._sampler, self._randomness = sampler, randomness

    def __iter__(self) -> Iterator[Any]:
        with self._randomness.drawn():
            numbers = iter(self._sampler)
        while True:
            found: list[Any] = []  # several at a time: the lock may be held for a whole step
            until = time.monotonic() + LOCKED_S
            with self._randomness.drawn():
                for item in islice(numbers, _BLOCK_ROWS):
                    found.append(item)
                    if time.monotonic() > until:
                        break
            if not found:
                return
            yield from found

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)
