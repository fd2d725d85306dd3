"""Samplers: rows drawn by weights, or put into batches of similar length, anew in each epoch.

Both give a data set whose row i is another row of the whole in each epoch: a function of the run's seed, the epoch and
i, the same in every process. So a resumed run repeats no sample and leaves none out. Transforms see the number i, so
that rows drawn twice are augmented differently.

Rows that are drawn by weights are numbered in the order of their storage, which keeps reading local; the sample order
shuffles them. Batches of similar length are in their final order, and their rows come from all over the storage.
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
_MEMORY_SHARE = 4  # of the memory of a reader goes to the rows of the whole
_POOL_BATCHES = 100  # that are filled from as many shuffled rows, sorted by length: more are more alike and less random


@dataclass(frozen=True, kw_only=True)
class WeightedSampler:
    """Draws rows with replacement, each with a probability in proportion to its weight."""

    rows: int | None  # drawn in an epoch; None for as many as the data has
    batch_size: int = 0  # any: the sample order shuffles the rows

    def check(self, values: Floats, what: str) -> None:
        """Raise DataError for weights that are no weights."""
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

    batch_size: int  # global, the job's
    rows: None = None

    def check(self, values: Floats, what: str) -> None:
        """Raise DataError for lengths that are not finite."""
        if not np.isfinite(values).all():
            raise DataError(f"{what} has lengths that are not finite", remedy="give a number for each row")

    def order(self, values: Floats, seed: int, epoch: int) -> Rows:
        """Return the rows of an epoch, batch after batch."""
        shuffled = np.argsort(_uniform(len(values), fold_seed(seed, epoch, 2)), kind="stable")
        full = len(values) // self.batch_size * self.batch_size
        whole, rest = shuffled[:full], shuffled[full:]
        pools = np.arange(full) // (_POOL_BATCHES * self.batch_size)
        ordered = whole[np.lexsort((values[whole], pools))]
        turns = np.argsort(_uniform(full // self.batch_size, fold_seed(seed, epoch, 3)), kind="stable")
        batches = ordered.reshape(-1, self.batch_size)[turns].reshape(-1)
        rows: Rows = np.concatenate([batches, rest]).astype(np.int64)
        return rows


Sampler = WeightedSampler | LengthBucketSampler


def _uniform(count: int, seed: int) -> Floats:
    """Return numbers in [0, 1), the same on every machine."""
    numbers = split_mix(np.arange(1, count + 1, dtype=np.uint64), seed) >> np.uint64(11)
    return numbers.astype(np.float64) * 2.0**-53


@dataclass(frozen=True, kw_only=True)
class _SampledIndex(Index):
    """Index of sampled rows."""

    values: bytes  # (rows of the whole,) float64, as bytes: the weights or lengths


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledSource(Source):
    """Rows of a source as a sampler orders them."""

    whole: Source
    by: str | Floats  # a column of the source, or a value for each of its rows
    sampler: Sampler
    found: PassResult = field(default_factory=PassResult)  # the values

    def describe(self) -> str:
        """As the user wrote it, in short."""
        by = repr(self.by) if isinstance(self.by, str) else "..."
        if isinstance(self.sampler, WeightedSampler):
            return f"{self.whole.describe()}.weighted({by}, {self.sampler.rows})"
        return f"{self.whole.describe()}.bucketed({by}, {self.sampler.batch_size})"

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """All functions of the user's that the rows go through before."""
        return self.whole.functions

    def index(self) -> _SampledIndex:
        """Index the whole, and read the column once. Raises DataError for values that do not fit."""
        whole = self.whole.index()
        held = self.found.get(whole, lambda: self._values(whole)).tobytes()
        rows = self.sampler.rows or whole.rows
        return _SampledIndex(
            rows=rows,
            groups=even_groups("sampled", rows, max(_GROUP_BYTES // max(whole.row_bytes, 1), _GROUP_ROWS)),
            schema=whole.schema,
            row_bytes=whole.row_bytes,
            hash=hash_parts([whole.hash, self.sampler, held.hex()]),
            base=whole,
            batch_size=self.sampler.batch_size,
            values=held,
        )

    def open(self, index: Index) -> _SampledLoader:
        """A loader for one process."""
        assert isinstance(index, _SampledIndex), "sampled rows are opened with an index of their own"
        return _SampledLoader(self, index)

    def _values(self, whole: Index) -> Floats:
        values = self._column(whole, self.by) if isinstance(self.by, str) else self.by
        if len(values) != whole.rows:
            raise DataError(
                f"{len(values)} values for {whole.rows} rows", where=self.describe(), remedy="give one for each row"
            )
        self.sampler.check(values, self.describe())
        return values

    def _column(self, whole: Index, by: str) -> Floats:
        """Read the numbers of a column, or the lengths of its rows."""
        if by not in whole.schema:
            remedy = f"{nearest(by, whole.schema)} It must be a column of the source, before any .map"
            raise DataError(f"there is no column {by!r} to sample by", where=self.whole.describe(), remedy=remedy)
        loader = self.whole.open(whole)
        values = np.concatenate([loader.load(number, (by,))[by] for number in range(len(whole.groups))])
        if values.dtype == object:
            values = self._lengths(by, values)
        if values.ndim != 1 or values.dtype.kind not in "iufb":
            raise DataError(
                f"column {by!r} holds {whole.schema[by]}", where=self.describe(), remedy="give one number for each row"
            )
        return values.astype(np.float64)

    def _lengths(self, by: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the lengths of texts or lists. Raises DataError where they would be taken for weights."""
        if isinstance(self.sampler, WeightedSampler):
            raise DataError(
                f"column {by!r} holds no numbers but {type(values[0]).__name__}, such as {values[0]!r:.40} in row 0",
                where=self.describe(),
                remedy="give a column of numbers, or an array of the weights: .weighted(weights)",
            )
        return np.array([len(row) for row in values])


class _SampledLoader(Loader):
    """Loads rows of the whole in the order of an epoch."""

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
        return self._sampled(self._index.groups[number].first + rows, columns, RowReader.salvage)

    def _sampled(self, places: Rows, columns: Sequence[str], gather: Gather) -> Arrays:
        """Rows at these places of the epoch's order."""
        names = tuple(columns)
        if names not in self._readers:
            self._readers[names] = self._reader(names), self._reader(names)
        reader, repeats_reader = self._readers[names]
        rows, repeats = (array[places] for array in self._order(self._seed, self._epoch))
        varying = reader.varying

        def compute(which: npt.NDArray[np.bool_], repeat: int) -> Arrays:
            epoch = self._epoch * MAX_PASSES + repeat
            return repeats_reader.gather_alone(rows[which], epoch) if repeat else gather(reader, rows[which], epoch)

        found = apply_by_pass(repeats if varying else np.zeros_like(repeats), compute)
        # the first read may find out that rows are random, and so that repeats differ
        return found if reader.varying == varying else self._sampled(places, columns, gather)

    def _reader(self, names: tuple[str, ...]) -> RowReader:
        whole = self._index.base
        assert whole is not None, "it has a whole"
        loader = self._source.whole.open(whole)
        return RowReader(loader, whole, names, memory_bytes=MEMORY_BYTES // _MEMORY_SHARE, seed=self._seed)

    def _ordered(self, seed: int, epoch: int) -> tuple[Rows, Rows]:
        """Return the rows of an epoch, and how often each came before in it."""
        rows = self._source.sampler.order(np.frombuffer(self._index.values, dtype=np.float64), seed, epoch)
        by_row = np.argsort(rows, kind="stable")
        repeats = np.empty_like(rows)
        repeats[by_row] = np.arange(len(rows)) - np.searchsorted(rows[by_row], rows[by_row])
        return rows, repeats
