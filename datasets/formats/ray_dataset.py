"""Any Ray Dataset as a source: kept in Ray's object store, or written as parquet once.

A Ray Dataset promises neither the order of its rows nor their place in a block, so it is executed once, and the run
reads the result.

In the object store the blocks belong to the process that made them. Recovery from a failed worker replays them exactly.
When that process ends, or a node with blocks that cannot be computed again is lost, the blocks are lost: the next run
executes the data set again, and resumes only where the blocks have the same rows at the same places; it is refused
otherwise. With `cache=` the driver writes the rows as parquet, and from then on the folder is the data set: any process
can replay it while the folder exists.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from trainwright.core.errors import DataError
from trainwright.datasets.data_source import (
    Arrays,
    Field,
    Index,
    Loader,
    RowGroup,
    Source,
    hash_parts,
    require_same_fields,
    schema_of,
    select_columns,
)
from trainwright.datasets.dataset import Dataset, parquet
from trainwright.datasets.formats.parquet_writer import is_complete, write_shards
from trainwright.datasets.formats.python_objects import arrow_array

_FILE = "Ray block"


@dataclass(frozen=True, kw_only=True)
class _BlockInfo:
    """A block's rows, decoded size, schema (empty without rows) and `ends`, a digest of its first and last rows."""

    rows: int
    size_bytes: int
    schema: Mapping[str, Field]
    ends: str


@dataclass(frozen=True, kw_only=True, eq=False)
class _RaySource(Source):
    """Blocks in Ray's object store, in order, without the empty ones."""

    blocks: tuple[_BlockInfo, ...]
    references: bytes  # to the blocks, pickled by Ray; a process that unpickles them borrows the blocks

    def describe(self) -> str:
        return f"from_ray({len(self.blocks)} blocks)"

    def index(self) -> Index:
        """The row counts of the blocks. Raises DataError where their columns differ."""
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
        from ray import cloudpickle

        return RayLoader(cloudpickle.loads(self.references))


class RayLoader(Loader):
    """Gets blocks."""

    def __init__(self, references: Sequence[Any]) -> None:
        self._references = references

    def twin(self) -> RayLoader:
        """A loader of the same for another thread."""
        return RayLoader(self._references)

    def load(self, number: int, columns: Sequence[str]) -> Arrays:
        """Columns of a block; DataError where it is gone."""
        import ray

        try:
            block = ray.get(self._references[number])
        except ray.exceptions.RayError as error:
            raise DataError(
                f"the block is gone: {type(error).__name__}",
                where=f"{_FILE} {number}",
                remedy="run again to compute it again, or give from_ray a cache= folder, which outlives the process "
                "that made the blocks",
            ) from error
        return _arrays(_table(block), columns, f"{_FILE} {number}")


def from_ray(dataset: Any, cache: str | None = None) -> Dataset:
    """Rows of a `ray.data.Dataset`. It is executed now.

    The module says what can be replayed: with a cache everything, without one everything but the end of this process.

    Args:
        dataset: any Ray Dataset.
        cache: folder or URI to write its rows to, as parquet. Where that has been done before, nothing is executed and
            the folder is read: delete it when the data set was changed. Without it the blocks stay in the object
            store, which needs room for them (Ray spills the rest to disk).

    Raises:
        DataError: there is no row, a value is null, a column has no type, or `cache` holds something else.
    """
    if not hasattr(dataset, "iter_internal_ref_bundles"):
        raise DataError(
            f"a {type(dataset).__name__} is no Ray Dataset", where="from_ray", remedy="give a ray.data.Dataset"
        )
    if cache is None:
        return Dataset(source=_materialize(dataset))
    if not is_complete(cache):
        write_shards(_batches(dataset), cache)
    return parquet(cache)


def _materialize(dataset: Any) -> _RaySource:
    """Execute a data set and look at each of its blocks, where it lies."""
    import ray
    from ray import cloudpickle

    with _preserve_order(dataset):
        bundles = list(dataset.materialize().iter_internal_ref_bundles())
    references = [reference for bundle in bundles for reference in bundle.block_refs]
    look = ray.remote(num_cpus=0)(_block_info)
    try:
        blocks = ray.get([look.remote(reference, number) for number, reference in enumerate(references)])
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, DataError) else error from None
    filled = [(block, reference) for block, reference in zip(blocks, references, strict=True) if block.rows]
    if not filled:
        raise DataError("the Ray Dataset has no rows", where="from_ray", remedy="look at how it was made")
    found, kept = zip(*filled, strict=True)
    return _RaySource(blocks=found, references=cloudpickle.dumps(kept))  # type: ignore[no-untyped-call]


def _batches(dataset: Any) -> Iterator[Arrays]:
    with _preserve_order(dataset):
        for number, table in enumerate(dataset.iter_batches(batch_size=None, batch_format="pyarrow")):
            if table.num_rows:
                yield _arrays(table, table.column_names, f"{_FILE} {number}")


@contextlib.contextmanager
def _preserve_order(dataset: Any) -> Iterator[None]:
    """Ask Ray Data to keep the order of blocks while the data set is executed."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        yield
    finally:
        options.preserve_order = before


def _block_info(block: Any, number: int) -> _BlockInfo:
    """Runs as a task of Ray, near the block."""
    table = _table(block)
    rows = table.num_rows
    if not rows:
        return _BlockInfo(rows=0, size_bytes=0, schema={}, ends="")
    both = pa.concat_tables([table.slice(0, 1), table.slice(rows - 1, 1)])
    ends = _arrays(both, table.column_names, f"{_FILE} {number}")
    sums = hashlib.sha256()
    for name, array in sorted(ends.items()):
        sums.update(repr((name, array.tolist())).encode())
    schema = schema_of(ends)
    return _BlockInfo(rows=rows, size_bytes=table.nbytes, schema=schema, ends=sums.hexdigest())


def _table(block: Any) -> pa.Table:
    from ray.data.block import BlockAccessor

    return BlockAccessor.for_block(block).to_arrow()


def _arrays(table: pa.Table, columns: Sequence[str], where: str) -> Arrays:
    select_columns(dict.fromkeys(table.column_names), columns, where)
    return {name: arrow_array(table.column(name), f"{where}, column {name!r}") for name in columns}
