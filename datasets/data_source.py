"""The index of a data set: how many rows, in which row groups of which files, with which columns."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainwright.core.data import FeedAssignment
from trainwright.core.errors import DataError, nearest

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """One row group."""

    file: str  # path of its file, as the file system names it; empty in memory
    number: int  # of the row group within the file
    rows: int  # in it
    first: int  # row number of its first row in the data set
    # first byte of its rows in the file, if a first pass recorded it; in a compressed file, an offset after unpacking
    start: int = 0
    stop: int = 0  # the byte after its last row


@dataclass(frozen=True, kw_only=True)
class Index:
    """Rows, row groups and columns of a data set. Picklable; the index and the seed determine the order of samples."""

    rows: int  # of all groups
    groups: tuple[RowGroup, ...]  # in row order
    schema: Mapping[str, Field]  # columns of the source, before any transform
    row_bytes: int  # mean decoded size of a row
    hash: str  # SHA-256 (hexadecimal) over all of it; another hash means that the data was changed
    base: Index | None = None  # of derived rows, the index of the original rows
    # by column, facts from a first pass that the source's loader needs; the schema follows from them
    traits: Mapping[str, Any] = field(default_factory=dict)
    # by file, its bytes at the time; empty where they are not compared
    sizes: Mapping[str, int] = field(default_factory=dict)
    in_order: bool = False  # whether the source fixes the order of rows, so that they are not shuffled
    window: int = 0  # consecutive rows that may still be shuffled among each other if `in_order`
    # rows of each batch if the source composes batches itself, so that rows are not shuffled; 0 if it does not
    batch_size: int = 0
    weight: str = ""  # column that the source gives as the samples' weights; empty for none
    classes: tuple[str, ...] = ()  # of images in a folder for each class, the names of the classes by label
    note: str = ""  # for the notes of a plan, after "train= is"; empty for none

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """First row of each row group."""
        return tuple(group.first for group in self.groups)

    def class_names(self) -> Iterator[tuple[str, ...]]:
        """Names of the classes by label, of each folder of images that the rows come from."""
        if self.classes:
            yield self.classes
        for origin in (self.base, *getattr(self, "sides", ()), *getattr(self, "parts", ())):
            if origin is not None:
                yield from origin.class_names()


class Loader(ABC):
    """An opened source. For one thread at a time."""

    @abstractmethod
    def load(self, number: int, columns: Sequence[str]) -> Arrays:
        """Return columns of row group `number` of the index. Raises DataError with file, row group and column."""

    def load_rows(self, number: int, columns: Sequence[str], rows: Rows) -> Arrays:
        """As `load`, of some rows, counted within the row group. Other rows are not read where the source allows it."""
        return {name: array[rows] for name, array in self.load(number, columns).items()}

    def fill(self, number: int, rows: range, into: Arrays) -> list[str]:
        """Read some rows of a row group into arrays. Returns the columns that `load` must still read: here all."""
        return list(into)

    def twin(self) -> Loader | None:
        """Return a loader of the same source for another thread; None if only one thread may read."""
        return None

    def begin(self, seed: int, epoch: int) -> None:  # noqa: B027  # most sources are the same in each epoch
        """Begin an epoch of a run with this seed; later loads belong to it."""

    @property
    def varying(self) -> bool:
        """Whether loaded rows were random, so that another epoch has other rows."""
        return False


class RowAccess(Protocol):
    """Random access to rows by number."""

    def gather(self, rows: npt.NDArray[np.int64], epoch: int = 0) -> Arrays:
        """Columns of the rows, in the order asked for: fresh arrays (rows, *shape). Raises DataError.

        Args:
            epoch: the pass of the rows, for sources whose rows differ between passes.
        """


class Source(ABC):
    """Where rows come from. Lazy and picklable."""

    streamed: ClassVar[bool] = False  # whether Ray Data executes the source, and a run delivers its rows to the workers

    @property
    def needs(self) -> Mapping[str, tuple[float, float]]:
        """CPUs and GPUs by name: the number that its actors of Ray Data reserve, and the need of its largest task."""
        return {}

    @property
    def plan_note(self) -> str:
        """How the rows reach the workers, for the notes of a plan; empty for an ordinary source."""
        return ""

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """All user functions that process the rows, in order."""
        return ()

    @abstractmethod
    def index(self) -> Index:
        """Index the source. Files without an index are read in a first pass. Raises DataError for any problem."""

    @abstractmethod
    def open(self, index: Index) -> Loader:
        """A loader for one process."""

    @abstractmethod
    def describe(self) -> str:
        """As the user wrote it, in short."""


class SequentialSource(Source):
    """A source that only yields rows one after the other, in a fixed order. A row is identified by its place."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """What it is, with an article, such as `a tf.data pipeline`."""

    @property
    @abstractmethod
    def reading(self) -> str:
        """What a worker reads of a pass and why, as the rest of the sentence `every worker ...`."""

    @property
    @abstractmethod
    def guarantee(self) -> str:
        """How often each row counts and why, as a sentence without its full stop."""

    @abstractmethod
    def passes(
        self, index: Index, columns: Sequence[str], feeding: FeedAssignment | None = None, seed: int = 0
    ) -> RowAccess:
        """A reader for one process.

        Args:
            feeding: data ranks whose rows it reads, if fewer rows save work; None for any.
            seed: of the run, for random rows or a random order.
        """

    def open(self, index: Index) -> NoReturn:
        """Raise DataError: there are no rows by number."""
        raise DataError(f"{self.kind} has no rows by number", where=self.describe(), remedy="read it in order")

    @property
    def plan_note(self) -> str:
        """How it reaches the workers, for the notes of a plan."""
        return f"{self.kind}: rows come in its own order, every worker {self.reading}, and {self.guarantee}"


def even_groups(file: str, rows: int, size: int) -> tuple[RowGroup, ...]:
    """Return row groups of `size` rows, the last one shorter."""
    return tuple(
        RowGroup(file=file, number=number, rows=min(size, rows - first), first=first)
        for number, first in enumerate(range(0, rows, size))
    )


@dataclass(kw_only=True)
class PassResult:
    """The cached result of a pass over the data. It is not pickled with the job."""

    found: dict[str, Any] = field(default_factory=dict)  # by the hash of the data

    def get(self, index: Index, make: Callable[[], _Result]) -> _Result:
        """Return the cached result, or compute it with `make`."""
        if index.hash not in self.found:
            self.found = {index.hash: make()}
        result: _Result = self.found[index.hash]
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {"found": {}}


def hash_parts(parts: Iterable[object]) -> str:
    """SHA-256 over the text of the parts, in order."""
    sums = hashlib.sha256()
    for part in parts:
        sums.update(f"{part}\n".encode())
    return sums.hexdigest()


# --- Columns ----------------------------------------------------------------------------------------------------------


Arrays = dict[str, npt.NDArray[Any]]
Rows = npt.NDArray[np.int64]
"""Row numbers, or byte offsets: (count,)."""
_LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)


NULL_REMEDY = "drop or fill them before training, or read other columns of files with columns=[...]"


class Field(NamedTuple):
    """A column as arrays show it: element type, and shape of one row (() for a scalar)."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Size of one row; of an object, its reference only."""
        return int(self.dtype.itemsize * np.prod(self.shape, dtype=np.int64))

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def schema_of(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Field]:
    """Return the fields of columns in memory: arrays (rows, *shape)."""
    return {name: Field(array.dtype, array.shape[1:]) for name, array in arrays.items()}


def field_of(kind: pa.DataType) -> Field:
    """What a column of this Arrow type becomes."""
    value, shape = _tensor(kind)
    if pa.types.is_dictionary(value):
        value = value.value_type
    return Field(pa.array([], value).to_numpy(zero_copy_only=False).dtype, shape)


def to_array(column: pa.ChunkedArray, where: str) -> npt.NDArray[Any]:
    """An Arrow column as an array (rows, *shape), without a copy where the memory allows.

    Fixed-shape tensors and fixed-size lists become dimensions; text, bytes, lists and structs become objects.
    Raises DataError, naming `where`, for nulls, those within lists and dictionaries included.
    """
    flat = joined_chunks(column)
    rows, (_, shape) = len(flat), _tensor(flat.type)
    if isinstance(flat, pa.ExtensionArray):
        flat = flat.storage
    require_no_nulls(flat, where)
    while pa.types.is_fixed_size_list(flat.type):
        flat = flat.flatten()
    if pa.types.is_dictionary(flat.type):
        flat = flat.dictionary_decode()
    return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(rows, *shape)


def joined_chunks(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array; text and bytes of several chunks with offsets that go beyond 2 GiB."""
    if column.num_chunks == 1:
        return column.chunk(0)  # `combine_chunks` copies even one
    narrow = ((pa.string(), pa.large_string()), (pa.binary(), pa.large_binary()))
    wide = next((large for small, large in narrow if column.type == small), None)  # not all types can be hashed
    return (column if wide is None else column.cast(wide)).combine_chunks()


def object_array(values: Sequence[Any] | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Values as an array of objects (rows,), whatever they are."""
    return np.fromiter(values, dtype=object, count=len(values))


_SIZED_OBJECTS = 8  # whose content stands for that of all others


def content_bytes(array: npt.NDArray[Any]) -> int:
    """Size of an array; the content of objects is estimated from a few of them."""
    return int(array.nbytes) + (_objects_bytes(array.reshape(-1)) if array.dtype == object else 0)


def _objects_bytes(values: Sequence[Any] | npt.NDArray[Any]) -> int:
    sampled = values[:: -(-len(values) // _SIZED_OBJECTS) or 1]
    return sum(map(_object_bytes, sampled)) * len(values) // max(len(sampled), 1)


def _object_bytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return 100 + content_bytes(value)
    if isinstance(value, str | bytes):
        return 50 + len(value)
    if isinstance(value, list | tuple):
        return 60 + 8 * len(value) + _objects_bytes(value)
    return 60 + (_objects_bytes([*value, *value.values()]) if isinstance(value, Mapping) else 0)


def stack_rows(values: list[Any], what: str) -> npt.NDArray[Any]:
    """One value a row as one array (rows, *shape). Raises DataError, naming `what`, where shapes or types differ."""
    try:
        arrays = [np.asarray(value) for value in values]
    except (ValueError, TypeError) as error:
        raise DataError(f"{what} makes no array: {error}", remedy="give every row one shape, or pad it") from error
    first = arrays[0]
    if first.dtype.kind in "OUS":
        return object_array(values)
    for array in arrays:
        if array.shape != first.shape or array.dtype != first.dtype:
            raise DataError(
                f"{what} is {first.dtype} of shape {first.shape} in one row and {array.dtype} of shape {array.shape} "
                "in another",
                remedy="give every row the same type and shape: convert, crop, resize or pad",
            )
    return np.stack(arrays)


def require_same_fields(
    fields: Mapping[str, Field],
    others: Mapping[str, Field],
    what: str,
    where: str,
    remedy: str = "give every row the same columns, types and shapes",
) -> None:
    """Raise DataError, naming `where`, for a column that differs from `others`, which the error calls `what`."""
    for name in sorted({*fields, *others}):
        if fields.get(name) != others.get(name):
            own_field, other_field = fields.get(name, "missing"), others.get(name, "missing")
            raise DataError(
                f"column {name!r} is {own_field} here and {other_field} in {what}", where=where, remedy=remedy
            )


def select_columns(columns: Mapping[str, Any], names: Iterable[str] | None, where: str = "") -> tuple[str, ...]:
    """Return `names`, or all columns for None. Raises DataError with the nearest name for a missing column."""
    chosen = tuple(columns) if names is None else tuple(names)
    for name in chosen:
        if name not in columns:
            raise DataError(f"there is no column {name!r}", where=where, remedy=nearest(name, columns))
    return chosen


def _tensor(kind: pa.DataType) -> tuple[pa.DataType, tuple[int, ...]]:
    """Value type and shape of one row."""
    shape: tuple[int, ...] = ()
    if isinstance(kind, pa.FixedShapeTensorType):
        if kind.permutation is not None and list(kind.permutation) != sorted(kind.permutation):
            raise DataError(
                f"the tensors of {kind} are not in row-major order", remedy="write them without a permutation"
            )
        return kind.value_type, tuple(kind.shape)
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    while pa.types.is_fixed_size_list(kind):
        shape, kind = (*shape, kind.list_size), kind.value_type
    return kind, shape


def require_no_nulls(array: pa.Array, where: str) -> None:
    """Raise DataError for nulls in the array, in nested lists, or in a dictionary."""
    if array.null_count:
        raise DataError(
            f"{array.null_count} of {len(array)} values are null",
            where=where,
            remedy=NULL_REMEDY,
        )
    if any(is_list(array.type) for is_list in _LISTS):
        require_no_nulls(array.flatten(), where)
    elif pa.types.is_dictionary(array.type) and array.dictionary.null_count:
        require_no_nulls(array.dictionary_decode(), where)


# --- Tables in memory as a source -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class TableSource(Source):
    """Arrays in memory, of one length; they travel with the job. Made by `arrays_from_table`."""

    arrays: Arrays

    def describe(self) -> str:
        """As the user wrote it, in short."""
        return f"table({', '.join(self.arrays)})"

    def index(self) -> Index:
        """Count the rows and sum the bytes."""
        rows = len(next(iter(self.arrays.values())))
        fields = schema_of(self.arrays)
        return Index(
            rows=rows,
            groups=(RowGroup(file="", number=0, rows=rows, first=0),),
            schema=fields,
            row_bytes=sum(field.row_bytes for field in fields.values()),
            hash=hash_parts(
                (name, self.arrays[name].dtype.str, _array_digest(self.arrays[name])) for name in sorted(self.arrays)
            ),
        )

    def open(self, index: Index) -> _TableLoader:
        """A loader for one process."""
        return _TableLoader(self.arrays)


class _TableLoader(Loader):
    """Returns the arrays of the table without a copy."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def load(self, number: int, columns: Sequence[str]) -> Arrays:
        """All rows of the columns; there is one group only."""
        return {name: self._arrays[name] for name in columns}


def arrays_from_table(data: Any) -> Arrays:
    """Arrays of one length from a mapping, a pandas DataFrame or an Arrow table; DataError for anything else."""
    if isinstance(data, pa.Table):
        arrays = {name: to_array(data.column(name), f"column {name!r}") for name in unique_names(data.column_names)}
    elif isinstance(data, Mapping):
        pairs = zip(unique_names(data), data.values(), strict=True)
        arrays = {name: _array(value, f"column {name!r}") for name, value in pairs}
    elif hasattr(data, "columns") and hasattr(data, "to_numpy"):
        pairs = zip(unique_names(data.columns), data.columns, strict=True)
        arrays = {name: _array_from_pandas(data[key], f"column {name!r}") for name, key in pairs}
    else:
        raise DataError(
            f"a {type(data).__name__} is not a table",
            remedy="give a dict of arrays, a pandas DataFrame or a pyarrow.Table",
        )
    lengths = {name: len(array) for name, array in arrays.items()}
    if not lengths or not max(lengths.values()):
        raise DataError("the table has no rows", remedy="give at least one column with at least one row")
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name!r} {count}" for name, count in lengths.items())
        raise DataError(f"the columns differ in length: {counts}", remedy="give every column the same number of rows")
    return arrays


def unique_names(names: Iterable[Any], where: str = "") -> list[str]:
    """Return column names as text. Raises DataError, naming `where`, for a duplicate name."""
    texts = [str(name) for name in names]
    for name, count in Counter(texts).items():
        if count > 1:
            raise DataError(f"column {name!r} comes twice", where=where, remedy="give every column its own name")
    return texts


def _array(value: Any, where: str) -> npt.NDArray[Any]:
    array = _to_numpy(value, where)
    if not array.ndim:
        raise DataError("the column is a single value", where=where, remedy="give one value for each row")
    if array.dtype.kind in "US":
        array = array.astype(object)
    if array.dtype == object and any(value is None for value in array.flat):
        raise DataError("some values are None", where=where, remedy="drop or fill them before training")
    return array


def _to_numpy(value: Any, where: str) -> npt.NDArray[Any]:
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise DataError("masked values have no meaning", where=where, remedy="fill or drop them before training")
    try:
        return np.asarray(value)
    except ValueError as error:
        try:  # rows that differ in length, which `pad=` or `collate=` of a job brings to one shape
            return object_array([np.asarray(row) for row in value])
        except ValueError:
            what = f"the values make no array: {error}"
            raise DataError(what, where=where, remedy="give every row one shape") from error
    except (RuntimeError, TypeError) as error:  # of tensors that track gradients, are bfloat16 or lie on a device
        raise DataError(
            f"the values make no array: {error}",
            where=where,
            remedy="give a tensor that numpy can hold: .detach(), .cpu(), and .float() for bfloat16",
        ) from error


def _array_from_pandas(series: Any, where: str) -> npt.NDArray[Any]:
    """A pandas column. NaN in a float column is a number like any other; elsewhere a missing value is refused."""
    floats = isinstance(series.dtype, np.dtype) and series.dtype.kind == "f"
    missing = 0 if floats else int(series.isna().sum())
    if missing:
        raise DataError(f"{missing} of {len(series)} values are missing", where=where, remedy="drop or fill them")
    values = series.to_numpy()
    if values.dtype == object and hasattr(series.dtype, "numpy_dtype"):
        values = values.astype(series.dtype.numpy_dtype)
    return _array(values, where)


def _array_digest(array: npt.NDArray[Any]) -> str:
    """SHA-256 over shape and content."""
    sums = hashlib.sha256(repr(array.shape).encode())
    if array.dtype != object:
        sums.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)  # such as data[:, 0] is strided
        return sums.hexdigest()
    for item in array.reshape(-1):  # repr shortens long arrays
        sums.update(
            f"{item.dtype.str}{_array_digest(item)}".encode() if isinstance(item, np.ndarray) else repr(item).encode()
        )
    return sums.hexdigest()
