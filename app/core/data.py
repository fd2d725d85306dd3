"""What travels between data, engine and core: batches, feeds, terms, sums and the cursor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainwright.core.gradient_noise import Scatter

Columns = Mapping[str, npt.NDArray[Any]]


class Terms(NamedTuple):
    """A loss or metric as terms: both of shape (samples,) or (samples, k), in the framework's own tensors.

    The step's loss is sum(values * weights) / sum(weights) over the whole global batch, so that masks,
    tokens, uneven shards and micro-batches all give the gradient of one device.
    """

    values: Any
    weights: Any


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch of one data rank.

    Attributes:
        columns: arrays whose first dimension is rows, by column name.
        weights: (rows,) float64; 0 marks a real sample repeated to fill an empty share.
        samples: (rows,) int64, the row number in the data set.
    """

    columns: Columns
    weights: npt.NDArray[np.float64]
    samples: npt.NDArray[np.int64]

    @property
    def rows(self) -> int:
        """Rows in the micro-batch, those of weight 0 included."""
        return len(self.samples)


@dataclass(frozen=True, kw_only=True)
class Feed:
    """What one rank is fed for one global step.

    Attributes:
        step: index of the step, from 0: the number of steps completed before it.
        parts: one tuple of micro-batches for each data rank of the actor, in the order of `data_ranks`.
            Every data rank has the same number of micro-batches, none is empty.
        data_ranks: the data ranks fed, of `total`.
        total: number of data ranks.
        rows: real samples in the global batch, over all data ranks.
        wish: this rank's wish to stop; it travels in the reduction that carries the weights.
        following: the feed of the step after, which may have one too: where the plan's steps may begin before the one
            before them ends, and these are sure to be asked for next; on all ranks or on none.
    """

    step: int
    parts: tuple[tuple[Batch, ...], ...]
    data_ranks: range
    total: int
    rows: int
    wish: bool = False
    following: Feed | None = None


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a step gives back; the same on every rank of a collective.

    Attributes:
        step: completed steps, this one included.
        loss: weighted mean over the global batch.
        weight: sum of weights over the global batch.
        learning_rate: of the first parameter group, as used.
        gradient_norm: global norm before clipping; None when the job does not clip.
        wish: some rank wished to stop.
        overflowed: nothing was applied, because the gradient was too large for `fp16`.
        finished: nothing is left to train, though steps may be left, as a callback of Keras' may decide.
        own_s: what this rank took before it waited for others; None where the engine cannot tell.
        phases: seconds of a late step, this one or one shortly before, by phase (see `core.step_phases`); None where
            none was measured.
        scatter: of the gradients of such a step; None where none was sampled.
    """

    step: int
    loss: float
    weight: float
    learning_rate: float
    gradient_norm: float | None = None
    wish: bool = False
    overflowed: bool = False
    finished: bool = False
    own_s: float | None = field(default=None, compare=False)
    phases: Mapping[str, float] | None = field(default=None, compare=False)
    scatter: Scatter | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Sums and counts by metric name; never means of means."""

    totals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __add__(self, other: Sums) -> Sums:
        merged = dict(self.totals)
        for name, (value, weight) in other.totals.items():
            old_value, old_weight = merged.get(name, (0.0, 0.0))
            merged[name] = (old_value + value, old_weight + weight)
        return Sums(totals=merged)

    def means(self) -> dict[str, float]:
        """Weighted means; NaN where nothing was counted."""
        return {name: value / weight if weight else float("nan") for name, (value, weight) in self.totals.items()}


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Where the next batch starts; saved with every checkpoint.

    Attributes:
        epoch: from 0.
        position: samples of this epoch already consumed by committed steps.
        lanes: number of canonical lanes of the index.
        carry: state of packers and filters by lane; empty for one-to-one transforms.
    """

    epoch: int = 0
    position: int = 0
    lanes: int = 1
    carry: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """How far data is read ahead of the steps, as it was tuned so far.

    Attributes:
        chunks: ready ahead, at most.
        chunk_steps: steps that are read at once.
        chunk_bytes: size of the largest chunk.
    """

    chunks: int
    chunk_steps: int
    chunk_bytes: int


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """Who is fed what: the answer of `plan.feed_of(rank)`."""

    data_ranks: range
    total: int
    inputs: bool = True
    targets: bool = True


def fold(*numbers: int) -> int:
    """Fold counters into one 63-bit seed: randomness is counted, never carried.

    The order matters: `fold(seed, step, micro_batch, data_rank, stage)`. SplitMix64 (Steele et al. 2014)
    is applied after each number, so that neighbouring counters give unrelated seeds.
    """
    state = 0x9E3779B97F4A7C15
    mask = (1 << 64) - 1
    for number in numbers:
        state = (state ^ (number & mask)) & mask
        state = (state + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1
