"""Any Ray Dataset as a source: streamed, kept in Ray's object store, or written as parquet once.

A data set is executed once in each pass and streamed into the workers; see `datasets.ray_data.block_stream`. A row is
known by its place in a pass. A run that starts again within a pass executes it from its start and drops the rows that
were trained on.

A materialised data set has rows by number instead. Its blocks belong to the process that made them. Recovery from a
failed worker replays them exactly. When that process ends, or a node with blocks that cannot be computed again is lost,
the blocks are lost: the next run resumes only where the blocks have the same rows at the same places; it is refused
otherwise. With `cache=` the driver writes the rows as parquet, and from then on the folder is the data set: any process
can replay it while the folder exists.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import pyarrow as pa
import ray
from ray import cloudpickle

from trainwright.core.data import FeedAssignment
from trainwright.core.errors import DataError
from trainwright.core.pickling import dumps, loads
from trainwright.datasets.data_source import (
    Arrays,
    Field,
    Index,
    Loader,
    RowAccess,
    RowGroup,
    SequentialSource,
    Source,
    hash_parts,
    require_same_fields,
    schema_of,
)
from trainwright.datasets.dataset import Dataset, parquet
from trainwright.datasets.formats.parquet_writer import is_complete, write_shards
from trainwright.datasets.formats.python_objects import hash_values
from trainwright.datasets.loading.sequential_rows import (
    Blocks,
    SequentialRows,
    block_rows,
    check_pass_rows,
    pass_index,
    refuse_pass_rows,
)
from trainwright.datasets.ray_data.block_stream import (
    Block,
    StreamSpec,
    block_arrays,
    block_table,
    execute,
    first_rows,
    is_plain_read,
    is_ray_dataset,
    known_rows,
    open_dataset,
    resource_needs,
    stream_arrays,
    whole_dataset,
)

_FILE = "Ray block"
_FIRST = ""  # trait of an index: a digest of the first rows; by column, there are the first rows themselves
_KEPT_BYTES = 1 << 20  # of these
_WINDOW_BYTES = 64 << 20
# Of the blocks that were executed before the run and are kept; and the part of the object store, which is less than a
# stream keeps while it is executed (`block_stream`).
_COUNTED_BYTES, _COUNTED_SHARE = 256 << 20, 0.2


@dataclass(frozen=True, kw_only=True)
class _BlockInfo:
    """A block's rows, decoded size, schema and `ends`, a digest of its first and last rows."""

    rows: int
    size_bytes: int
    schema: Mapping[str, Field]
    ends: str


@dataclass(frozen=True, kw_only=True, eq=False)
class _RaySource(Source):
    """Blocks in Ray's object store, in order."""

    blocks: tuple[_BlockInfo, ...]
    references: bytes  # to the blocks, pickled by Ray; a process that unpickles them borrows the blocks

    def describe(self) -> str:
        return f"from_ray({len(self.blocks)} blocks)"

    def index(self) -> Index:
        """Return the row counts of the blocks. Raises DataError if their columns differ."""
        schema, groups, first = self.blocks[0].schema, [], 0
        for number, block in enumerate(self.blocks):
            require_same_fields(block.schema, schema, "the first block", f"{_FILE} {number}")
            groups.append(RowGroup(file=_FILE, number=number, rows=block.rows, first=first))
            first += block.rows
        parts = [(name, field.dtype.str, field.shape) for name, field in sorted(schema.items())]
        return Index(
            rows=first,
            groups=tuple(groups),
            schema=schema,
            row_bytes=max(sum(block.size_bytes for block in self.blocks) // first, 1),
            hash=hash_parts([*parts, *((block.rows, block.ends) for block in self.blocks)]),
        )

    def open(self, index: Index) -> RayLoader:
        return RayLoader(cloudpickle.loads(self.references))


class RayLoader(Loader):
    """Gets blocks."""

    def __init__(self, references: Sequence[Any]) -> None:
        self._references = references

    def twin(self) -> RayLoader:
        """A loader of the same for another thread."""
        return RayLoader(self._references)

    def load(self, number: int, columns: Sequence[str]) -> Arrays:
        """Return columns of a block. Raises DataError if it is lost."""
        try:
            block = ray.get(self._references[number])
        except ray.exceptions.RayError as error:
            raise DataError(
                f"the block is gone: {type(error).__name__}",
                where=f"{_FILE} {number}",
                remedy="run again to compute it again, or give from_ray a cache= folder, which outlives the process "
                "that made the blocks",
            ) from error
        return block_arrays(block, columns, f"{_FILE} {number}")


@dataclass(frozen=True, kw_only=True, eq=False)
class _StreamSource(SequentialSource):
    """Rows of a Ray Dataset, executed in each pass. `from_ray` explains the fields."""

    make: Any
    rows: int | None = None
    replayable: bool = True
    streamed = True

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        return () if is_ray_dataset(self.make) else (self.make,)

    @property
    def needs(self) -> Mapping[str, tuple[float, float]]:
        return resource_needs(open_dataset(self.make, 0, self.describe()))

    @property
    def kind(self) -> str:
        return "a Ray Dataset"

    @property
    def reading(self) -> str:
        return "gets its share of each batch from Ray Data, which executes the data set once in each pass"

    @property
    def guarantee(self) -> str:
        if self.replayable:
            return "each row counts exactly once, as long as each execution gives the same rows in the same order"
        return "rows can count twice or never after a failure of the driver (replayable=False)"

    def describe(self) -> str:
        return f"from_ray({getattr(self.make, '__name__', 'Dataset')})"

    def index(self) -> Index:
        """Read the first block, and count the rows of all blocks if there is no cheaper way.

        Raises DataError, UserCodeError.
        """
        dataset = open_dataset(_portable(self.make), 0, self.describe())
        rows = self.rows or known_rows(dataset)
        first, rows = self._survey(dataset, rows, to_end=rows is None or (self.rows is None and self._is_plain_read))
        digest = hash_values([first])
        index = pass_index(self.describe(), schema_of(first), rows, first, digest if self.replayable else "")
        # copies of a few rows, so that reading one does not execute the data set
        sampled = {name: array[: max(_KEPT_BYTES // index.row_bytes, 1)].copy() for name, array in first.items()}
        window = min(rows, max(_WINDOW_BYTES // index.row_bytes, 1))
        return replace(index, traits={_FIRST: digest, **sampled}, window=window)

    def spec(self, index: Index, passes: int, *, keep: bool = False) -> StreamSpec:
        """Return the stream for some passes, with the blocks of an earlier execution; `keep` keeps them here too."""
        counted = (_COUNTED.get if keep else _COUNTED.pop)(self, [])
        return StreamSpec(
            make=dumps(self.make),
            rows=index.rows,
            passes=passes,
            exact=self.rows is None,
            first=index.traits[_FIRST] if self.replayable else "",
            name=self.describe(),
            counted=tuple(counted),
            counted_passes=passes if counted and self._is_plain_read else 1,  # it gives the same each time
        )

    @property
    def _is_plain_read(self) -> bool:
        return self.replayable and is_ray_dataset(self.make) and is_plain_read(self.make)

    def passes(
        self, index: Index, columns: Sequence[str], feeding: FeedAssignment | None = None, seed: int = 0
    ) -> RowAccess:
        """Return a reader that executes the data set in this process."""
        spec = self.spec(index, 1, keep=True)

        def open_pass(epoch: int, place: int) -> Blocks:
            if not epoch and not place:  # the first rows are known
                first_arrays = {name: index.traits[name] for name in columns}
                place = block_rows(first_arrays)
                yield first_arrays
            for block in spec.blocks(epoch):
                low = max(place - block.first % index.rows, 0)
                if low < block.rows:
                    arrays = stream_arrays(block, ray.get(block.reference), index, columns, self.describe())
                    yield {name: array[low : block.rows] for name, array in arrays.items()}

        return SequentialRows(open_pass, index, columns, where=self.describe(), aligned=index.window)

    def _survey(self, dataset: Any, row_count: int | None, *, to_end: bool) -> tuple[Arrays, int]:
        """Return the first rows of a Ray Dataset, and its number of rows.

        Args:
            row_count: its number of rows; None if only a whole execution can tell.
            to_end: whether to execute a small one to its end: its blocks are kept for the run's first pass, and for all
                passes if it only reads.
        """
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        most_bytes = min(_COUNTED_BYTES, _COUNTED_SHARE * resources.get("object_store_memory", math.inf))
        first: Arrays = {}
        rows = size_bytes = 0
        small_blocks, blocks = list[Block](), execute(dataset, self.describe())
        with contextlib.closing(blocks):
            for block in blocks:
                first = first or first_rows(ray.get(block.reference), self.describe())
                expected_bytes = block.size_bytes * (row_count or 0) / block.rows
                if row_count is not None and (not to_end or expected_bytes > most_bytes):
                    break
                rows, size_bytes = rows + block.rows, size_bytes + block.size_bytes
                small_blocks = [*small_blocks, block] if size_bytes <= most_bytes else []
                if row_count is not None and not small_blocks:
                    break
        if not first:
            raise DataError("the Ray Dataset has no rows", where=self.describe(), remedy="look at how it is made")
        if small_blocks:
            _COUNTED[self] = small_blocks
        return first, row_count or rows


_COUNTED: WeakKeyDictionary[_StreamSource, list[Block]] = WeakKeyDictionary()


def from_ray(dataset: Any, cache: str | None = None, *, rows: int | None = None, replayable: bool = True) -> Dataset:
    """Rows of a `ray.data.Dataset`, streamed: it is executed in each pass, and never in memory as a whole.

    Each pass is executed in order (`preserve_order`). A data set that only reads, and fits in 256 MiB and a fifth of
    the object store, is executed once for all passes. With the job's `shuffle`, rows are shuffled within a window of
    64 MiB, by (seed, epoch); for more, shuffle in the data set itself, with a seed. Rows have no numbers, so filters
    and packing belong in the data set. A materialised data set (`dataset.materialize()`) is not executed again and has
    rows by number, which allows all of this.

    After a worker failure, the blocks that are still in memory are delivered again. After a driver failure, the pass is
    executed from its start and the rows trained on are dropped. So each row counts exactly once if each execution gives
    the same rows in the same order, which is checked with the first rows.

    Args:
        dataset: any Ray Dataset; or a function (epoch) that returns one, for data sets that change with the epoch; or a
            shard from `ray.train.get_dataset_shard`, which stands for its whole data set.
        cache: folder or URI to write its rows to, as parquet, now. A complete folder is read, and nothing is executed:
            delete it when the data set has changed.
        rows: of a pass, if counting them would execute an expensive data set once more; a longer pass is cut after that
            number.
        replayable: whether each execution gives the same rows in the same order.

    Raises:
        DataError: `dataset` is something else, or `cache` has other files. When it is indexed: there is no row, a value
            is null, or a column has no type. When it is executed: its rows have changed.
    """
    dataset = whole_dataset(dataset)
    if not (is_ray_dataset(dataset) or callable(dataset)):
        raise DataError(
            f"a {type(dataset).__name__} is no Ray Dataset", where="from_ray", remedy="give a ray.data.Dataset"
        )
    check_pass_rows(rows, "from_ray")
    if cache is not None:
        if not is_complete(cache):
            write_shards(_batches(open_dataset(_portable(dataset), 0, "from_ray")), cache)
        return parquet(cache)
    if type(dataset).__name__ == "MaterializedDataset":
        refuse_pass_rows(rows, "from_ray")
        return Dataset(source=_stored_blocks(dataset))
    return Dataset(source=_StreamSource(make=dataset, rows=rows, replayable=replayable))


def _portable(make: Any) -> Any:
    """Return a copy whose functions Ray pickles by value: no other process can import a job file or its modules."""
    return loads(dumps(make))


def _stored_blocks(dataset: Any) -> _RaySource:
    """Return a source of the blocks of a materialised data set, from a task near each block."""
    references = [block.reference for block in execute(dataset, "from_ray")]
    look = ray.remote(num_cpus=0)(_block_info)
    try:
        blocks = ray.get([look.remote(reference, number) for number, reference in enumerate(references)])
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, DataError) else error from None
    if not blocks:
        raise DataError("the Ray Dataset has no rows", where="from_ray", remedy="look at how it was made")
    return _RaySource(blocks=tuple(blocks), references=cloudpickle.dumps(references))  # type: ignore[no-untyped-call]


def _batches(dataset: Any) -> Iterator[Arrays]:
    for number, block in enumerate(execute(dataset, "from_ray")):
        table = block_table(ray.get(block.reference))
        yield block_arrays(table, table.column_names, f"{_FILE} {number}")


def _block_info(block: Any, number: int) -> _BlockInfo:
    """Runs as a task of Ray, near the block."""
    table = block_table(block)
    both = pa.concat_tables([table.slice(0, 1), table.slice(table.num_rows - 1, 1)])
    ends = block_arrays(both, table.column_names, f"{_FILE} {number}")
    sums = hashlib.sha256()
    for name, array in sorted(ends.items()):
        sums.update(repr((name, array.tolist())).encode())
    schema = schema_of(ends)
    return _BlockInfo(rows=table.num_rows, size_bytes=table.nbytes, schema=schema, ends=sums.hexdigest())
