"""Samplers: in each epoch, draw other rows by weights, or put rows of similar length into batches.

Row i of a sampled data set is another row of the base data set in each epoch: a function of the run's seed, the epoch
and i, the same in every process. So a resumed run neither repeats nor omits a sample. Transforms get the number i, so
that repeats of a row are augmented differently.

Rows drawn by weights are numbered in the order of their storage, which keeps reading local; the sample order shuffles
them. Batches of similar length are in their final order, and their rows come from all over the storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.core.data import fold_seed
from trainwright.core.errors import DataError, nearest
from trainwright.datasets.data_source import Arrays, Index, Loader, PassResult, Rows, Source, even_groups, hash_parts
from trainwright.datasets.row_reader import Gather, RowReader
from trainwright.datasets.sample_order import MAX_PASSES, MEMORY_BYTES, apply_by_pass, split_mix

Floats = npt.NDArray[np.float64]

_GROUP_BYTES, _GROUP_ROWS = 16 << 20, 1024
_MEMORY_SHARE = 4  # rows of the base data set take at most a quarter of a reader's memory
_POOL_BATCHES = 100  # whose rows are sorted by length together; more give more similar lengths and less randomness


@dataclass(frozen=True, kw_only=True)
class WeightedSampler:
    """Draws rows with replacement, with probabilities proportional to their weights."""

    rows: int | None  # drawn in an epoch; None for as many as the data has
    batch_size: int = 0  # any: the sample order shuffles the rows

    def check(self, values: Floats, what: str) -> None:
        """Raise DataError for invalid weights."""
        if not (np.isfinite(values).all() and (values >= 0).all() and values.any()):
            raise DataError(f"{what} has weights that are negative or not finite, or only 0", remedy="give weights > 0")

    def order(self, values: Floats, seed: int, epoch: int) -> Rows:
        """Return the rows of an epoch in the order of their storage."""
        ends = np.cumsum(values)
        count = len(values) if self.rows is None else self.rows
        drawn = np.searchsorted(ends, _uniform(count, fold_seed(seed, epoch, 1)) * ends[-1], side="right")
        rows: Rows = np.sort(np.minimum(drawn, np.flatnonzero(values)[-1])).astype(np.int64)
        return rows


@dataclass(frozen=True, kw_only=True)
class LengthBucketSampler:
    """Puts rows of similar length into one batch; each row comes once in an epoch.

    The rows are shuffled, each hundred batches of them are sorted by length, and the batches are shuffled. The short
    last batch has rows of any length: with `drop_last`, other rows are left out in each epoch.
    """

    batch_size: int  # global, of the job
    rows: None = None

    def check(self, values: Floats, what: str) -> None:
        """Raise DataError for lengths that are not finite."""
        if not np.isfinite(values).all():
            raise DataError(f"{what} has lengths that are not finite", remedy="give a number for each row")

    def order(self, values: Floats, seed: int, epoch: int) -> Rows:
        """Return the rows of an epoch, batch by batch."""
        shuffled = np.argsort(_uniform(len(values), fold_seed(seed, epoch, 2)), kind="stable")
        full = len(values) // self.batch_size * self.batch_size
        in_batches, remainder = shuffled[:full], shuffled[full:]
        pools = np.arange(full) // (_POOL_BATCHES * self.batch_size)
        ordered = in_batches[np.lexsort((values[in_batches], pools))]
        batch_order = np.argsort(_uniform(full // self.batch_size, fold_seed(seed, epoch, 3)), kind="stable")
        batches = ordered.reshape(-1, self.batch_size)[batch_order].reshape(-1)
        rows: Rows = np.concatenate([batches, remainder]).astype(np.int64)
        return rows


Sampler = WeightedSampler | LengthBucketSampler


def _uniform(count: int, seed: int) -> Floats:
    """Return numbers in [0, 1), the same on every machine."""
    numbers = split_mix(np.arange(1, count + 1, dtype=np.uint64), seed) >> np.uint64(11)
    return numbers.astype(np.float64) * 2.0**-53


@dataclass(frozen=True, kw_only=True)
class _SampledIndex(Index):
    """Index of sampled rows."""

    values: bytes  # (rows of the base data set,) float64, as bytes: the weights or lengths


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledSource(Source):
    """Rows of a source as a sampler orders them."""

    whole: Source
    by: str | Floats  # a column of the source, or a value for each of its rows
    sampler: Sampler
    found: PassResult = field(default_factory=PassResult)  # the values

    def describe(self) -> str:
        """As the user wrote it, in short."""
        values = repr(self.by) if isinstance(self.by, str) else "..."
        if isinstance(self.sampler, WeightedSampler):
            return f"{self.whole.describe()}.weighted({values}, {self.sampler.rows})"
        return f"{self.whole.describe()}.bucketed({values}, {self.sampler.batch_size})"

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """All user functions that process the rows before they are sampled."""
        return self.whole.functions

    def index(self) -> _SampledIndex:
        """Index the base data set, and read the column once. Raises DataError for invalid values."""
        base = self.whole.index()
        value_bytes = self.found.get(base, lambda: self._values(base)).tobytes()
        rows = self.sampler.rows or base.rows
        return _SampledIndex(
            rows=rows,
            groups=even_groups("sampled", rows, max(_GROUP_BYTES // max(base.row_bytes, 1), _GROUP_ROWS)),
            schema=base.schema,
            row_bytes=base.row_bytes,
            hash=hash_parts([base.hash, self.sampler, value_bytes.hex()]),
            base=base,
            batch_size=self.sampler.batch_size,
            values=value_bytes,
        )

    def open(self, index: Index) -> _SampledLoader:
        """A loader for one process."""
        assert isinstance(index, _SampledIndex), "sampled rows are opened with an index of their own"
        return _SampledLoader(self, index)

    def _values(self, base: Index) -> Floats:
        values = self._column(base, self.by) if isinstance(self.by, str) else self.by
        if len(values) != base.rows:
            raise DataError(
                f"{len(values)} values for {base.rows} rows", where=self.describe(), remedy="give one for each row"
            )
        self.sampler.check(values, self.describe())
        return values

    def _column(self, base: Index, column: str) -> Floats:
        """Read the numbers of a column, or the lengths of its rows."""
        if column not in base.schema:
            remedy = f"{nearest(column, base.schema)} It must be a column of the source, before any .map"
            raise DataError(f"there is no column {column!r} to sample by", where=self.whole.describe(), remedy=remedy)
        loader = self.whole.open(base)
        values = np.concatenate([loader.load(number, (column,))[column] for number in range(len(base.groups))])
        if values.dtype == object:
            values = self._lengths(column, values)
        if values.ndim != 1 or values.dtype.kind not in "iufb":
            raise DataError(
                f"column {column!r} holds {base.schema[column]}", where=self.describe(), remedy="give one number a row"
            )
        return values.astype(np.float64)

    def _lengths(self, name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the lengths of texts or lists. Raises DataError if weights are needed."""
        if isinstance(self.sampler, WeightedSampler):
            raise DataError(
                f"column {name!r} holds no numbers but {type(values[0]).__name__}, such as {values[0]!r:.40} in row 0",
                where=self.describe(),
                remedy="give a column of numbers, or an array of the weights: .weighted(weights)",
            )
        return np.array([len(row) for row in values])


class _SampledLoader(Loader):
    """Loads rows of the base data set in the order of an epoch."""

    def __init__(self, source: SampledSource, index: _SampledIndex) -> None:
        self._source, self._index = source, index
        self._seed = self._epoch = 0
        self._order = lru_cache(maxsize=1)(self._ordered)
        self._readers: dict[tuple[str, ...], tuple[RowReader, RowReader]] = {}  # the latter for repeats

    @property
    def varying(self) -> bool:
        return True

    def begin(self, seed: int, epoch: int) -> None:
        self._seed, self._epoch = seed, epoch

    def load(self, number: int, columns: Sequence[str]) -> Arrays:
        group = self._index.groups[number]
        places = np.arange(group.first, group.first + group.rows, dtype=np.int64)
        return self._sampled(places, columns, RowReader.gather)

    def load_rows(self, number: int, columns: Sequence[str], rows: Rows) -> Arrays:
        return self._sampled(self._index.groups[number].first + rows, columns, RowReader.gather_skipping_bad)

    def _sampled(self, places: Rows, columns: Sequence[str], gather: Gather) -> Arrays:
        """Return the rows at these places of the epoch's order."""
        names = tuple(columns)
        if names not in self._readers:
            self._readers[names] = self._reader(names), self._reader(names)
        reader, repeats_reader = self._readers[names]
        rows, repeats = (array[places] for array in self._order(self._seed, self._epoch))
        varying = reader.varying

        def compute(mask: npt.NDArray[np.bool_], repeat: int) -> Arrays:
            epoch = self._epoch * MAX_PASSES + repeat
            return repeats_reader.gather_alone(rows[mask], epoch) if repeat else gather(reader, rows[mask], epoch)

        result = apply_by_pass(repeats if varying else np.zeros_like(repeats), compute)
        # the first read may show that rows are random, so that repeats differ
        return result if reader.varying == varying else self._sampled(places, columns, gather)

    def _reader(self, names: tuple[str, ...]) -> RowReader:
        base = self._index.base
        assert base is not None, "an index of sampled rows has a base"
        loader = self._source.whole.open(base)
        return RowReader(loader, base, names, memory_bytes=MEMORY_BYTES // _MEMORY_SHARE, seed=self._seed)

    def _ordered(self, seed: int, epoch: int) -> tuple[Rows, Rows]:
        """Return the rows of an epoch, and for each the number of its earlier repeats."""
        rows = self._source.sampler.order(np.frombuffer(self._index.values, dtype=np.float64), seed, epoch)
        by_row = np.argsort(rows, kind="stable")
        repeats = np.empty_like(rows)
        repeats[by_row] = np.arange(len(rows)) - np.searchsorted(rows[by_row], rows[by_row])
        return rows, repeats
