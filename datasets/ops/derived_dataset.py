"""Data sets whose rows are made of another's: filtered, one-to-many, packed.

How many rows come of a row group is counted once, by a first pass, before the run begins, and kept beside the run;
where that takes long, it runs as tasks on the Ray cluster. From then on such a data set is like any other: its length
is known, every epoch is exact, and any batch is computed directly, by each rank for itself. So nothing but the cursor
needs to be saved, and no failure or resize has anything to replay.

The price is that what comes of a row may not change with the epoch: random functions before a filter, a `flat_map` or
a `pack` are counted by the sample alone. Augmentation belongs after them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from trainwright.core.errors import DataError
from trainwright.datasets.formats.arrow_columns import Arrays, Field, select
from trainwright.datasets.formats.file_metadata import current, with_run
from trainwright.datasets.index import Group, Index, Loader, digest
from trainwright.datasets.ops.first_pass import first_pass
from trainwright.datasets.ops.transforms import Counters, owned
from trainwright.datasets.sampling.sampler import Rows

if TYPE_CHECKING:
    from trainwright.datasets.dataset import Dataset


class Derivation(Protocol):
    """How the rows of one row group become others."""

    @property
    def word(self) -> str:
        """Name of the method that made it."""

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The user's functions in it."""

    def derive(self, columns: Arrays, samples: Rows) -> Arrays:
        """The rows that come of these, in order; a function of its arguments alone."""


@dataclass(frozen=True, kw_only=True)
class DerivedSource:
    """Rows made of another data set's, row group by row group.

    Attributes:
        base: where they come from, with transforms of its own.
        derivation: what is done to each row group.
    """

    base: Dataset
    derivation: Derivation

    def describe(self) -> str:
        """As the user wrote it, in short."""
        return f"{self.base!r}.{self.derivation.word}(...)"

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """All functions of the user's that the rows go through."""
        return (*self.base.functions, *self.derivation.functions)

    def index(self) -> Index:
        """Derive every row group once and count. Raises DataError where no row is left."""
        base = self.base.index()
        counted = self._counted(base)
        groups: list[Group] = []
        schema: Mapping[str, Field] = {}
        first = size_bytes = 0
        for number, (group, found) in enumerate(zip(base.groups, counted, strict=True)):
            if not found.rows:
                continue
            schema = schema or found.schema
            _check_schema(schema, found.schema, group, self.describe())
            groups.append(replace(group, number=number, rows=found.rows, first=first))
            first += found.rows
            size_bytes += found.size_bytes
        if not groups:
            raise DataError(
                f"none of {base.rows} rows is left",
                where=self.describe(),
                remedy=f"look at the function given to {self.derivation.word}",
            )
        return Index(
            rows=first,
            groups=tuple(groups),
            schema=schema,
            row_bytes=-(-size_bytes // first),
            hash=digest([base.hash, self.derivation.word, *((group.number, group.rows) for group in groups)]),
            base=base,
        )

    def _counted(self, base: Index) -> list[_Counted]:
        """What comes of each row group: as it was counted when the run was started, by the same code, or now."""

        def count() -> list[_Counted]:
            return first_pass(_Counting(source=self, base=base), range(len(base.groups)))

        fingerprint = current().fingerprint
        if fingerprint is None:
            return count()
        return with_run((fingerprint(self), base.hash), count, pack=_packed, unpack=_unpacked)

    def open(self, index: Index) -> Loader:
        """A loader for one process."""
        assert index.base is not None, "an index of derived rows keeps that of the rows they come from"
        return _DerivedLoader(_Deriving(self, index.base), index, self.describe())


class _Deriving:
    """Loads row groups of the base and derives them."""

    def __init__(self, source: DerivedSource, base: Index) -> None:
        self._source, self._base = source, base
        self._names = source.base.source_columns(base, None)
        self._loader = source.base.source.open(base)

    def derived(self, number: int) -> Arrays:
        """What comes of row group `number` of the base."""
        group = self._base.groups[number]
        samples = np.arange(group.first, group.first + group.rows, dtype=np.int64)
        loaded = {name: array.copy() for name, array in owned(self._loader.load(number, self._names)).items()}
        columns = self._source.base.transform(loaded, samples, Counters(), None)
        return self._source.derivation.derive(columns, samples)


class _Counted(NamedTuple):
    """What comes of a row group."""

    rows: int
    schema: Mapping[str, Field]
    size_bytes: int


def _packed(counted: Sequence[_Counted]) -> Any:
    """Counts as JSON, each schema once."""
    schemas: list[Any] = []
    groups = []
    for found in counted:
        schema = [[name, field.dtype.str, list(field.shape)] for name, field in found.schema.items()]
        if schema not in schemas:
            schemas.append(schema)
        groups.append([found.rows, schemas.index(schema), found.size_bytes])
    return [schemas, groups]


def _unpacked(stored: Any) -> list[_Counted]:
    schemas = [
        {str(name): Field(np.dtype(kind), tuple(map(int, shape))) for name, kind, shape in schema}
        for schema in stored[0]
    ]
    return [_Counted(int(rows), schemas[schema], int(size_bytes)) for rows, schema, size_bytes in stored[1]]


@dataclass(frozen=True, kw_only=True)
class _Counting:
    """The first pass over single row groups of the base, in any process."""

    source: DerivedSource
    base: Index

    def __call__(self, number: int) -> _Counted:
        arrays = self._deriving.derived(number)
        return _Counted(_rows(arrays), _schema(arrays), sum(array.nbytes for array in arrays.values()))

    @cached_property
    def _deriving(self) -> _Deriving:
        return _Deriving(self.source, self.base)

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "base": self.base}  # another process opens the files for itself


class _DerivedLoader:
    """Gives derived row groups, as many rows as were counted."""

    def __init__(self, deriving: _Deriving, index: Index, where: str) -> None:
        self._deriving, self._index, self._where = deriving, index, where

    def load(self, number: int, columns: Sequence[str]) -> Arrays:
        """Columns of row group `number`; DataError where it has other rows than in the first pass."""
        group = self._index.groups[number]
        arrays = self._deriving.derived(group.number)
        if _rows(arrays) != group.rows:
            raise DataError(
                f"row group {group.number} gave {_rows(arrays)} rows now and {group.rows} when the run began",
                where=f"{self._where}, {group.file}",
                remedy="make the function depend on the row alone: no clock, no random numbers of its own, no counter",
            )
        return {name: arrays[name] for name in select(arrays, columns, self._where)}


def _rows(arrays: Arrays) -> int:
    return len(next(iter(arrays.values()))) if arrays else 0


def _schema(arrays: Arrays) -> dict[str, Field]:
    return {name: Field(array.dtype, array.shape[1:]) for name, array in arrays.items()}


def _check_schema(first: Mapping[str, Field], found: Mapping[str, Field], group: Group, where: str) -> None:
    for name in sorted({*first, *found}):
        if first.get(name) != found.get(name):
            here, there = _shown(found.get(name)), _shown(first.get(name))
            raise DataError(
                f"column {name!r} is {here} in one row group and {there} in another",
                where=f"{where}, {group.file}, row group {group.number}",
                remedy="give every row the same columns, types and shapes",
            )


def _shown(field: Field | None) -> str:
    return "missing" if field is None else f"{field.dtype} {list(field.shape)}"
