"""Values that pass between data, engine and core: batches, feeds, terms, sums and the cursor.

The gradient noise scale (McCandlish et al., 2018) is tr(Sigma) / |G|^2, with G the mean gradient of a sample and Sigma
the covariance of one sample's gradient. Both are estimated from the gradients of a batch's shares: with s_i the sum of
the gradients of share i's n_i samples, s the sum of all k shares and n their samples, the analysis of variance gives

    tr(Sigma) = (sum |s_i|^2 / n_i - |s|^2 / n) / (k - 1)
    |G|^2     = (k |s|^2 / n - sum |s_i|^2 / n_i) / (n (k - 1))

whose expectations are exact for any shares, even ones or not; for even ones they are the paper's. Each is averaged over
steps before their ratio is taken, since the ratio of single estimates is biased.

A phase is a place of a step, or several that an engine cannot tell apart, joined by `+`:

    forward     losses of all micro-batches, their conversion to tensors included
    backward    their gradients, until the last of this rank's is there, with the part of the reduction that it hides
    wait        from then until the gradients are reduced over all ranks; in a pipeline also for what other stages send
    optimizer   gradient norm, scaling, clipping and the update
    other       what is left of a step besides waiting for data: the loop, checks, records
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import DataError

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
    """One micro-batch of one data rank."""

    columns: Columns  # arrays whose first dimension is rows, by column name
    weights: npt.NDArray[np.float64]  # (rows,) float64; 0 marks a real sample repeated to fill an empty share
    samples: npt.NDArray[np.int64]  # (rows,) int64, the row number in the data set
    on_device: Any = field(default=None, compare=False)  # the columns as its engine copied them to the device ahead

    @property
    def rows(self) -> int:
        """Rows in the micro-batch, those of weight 0 included."""
        return len(self.samples)

    def counted(self) -> Batch:
        """Return the rows whose weight is not 0, or all of them where every weight is 0."""
        if np.count_nonzero(self.weights) in (0, self.rows):
            return self
        real = self.weights != 0.0
        columns = {name: array[real] for name, array in self.columns.items()}
        return Batch(columns=columns, weights=self.weights[real], samples=self.samples[real])


def repeat_row(batch: Batch, rows: int) -> Batch:
    """Return so many copies of the first row of a batch, as a batch."""
    return Batch(
        columns={name: np.repeat(column[:1], rows, axis=0) for name, column in batch.columns.items()},
        weights=np.ones(rows),
        samples=np.repeat(batch.samples[:1], rows),
    )


def copy_objects(columns: Columns) -> dict[str, npt.NDArray[Any]]:
    """Copy the objects in columns, since a function may change them in place and the reader may give them again.

    Raises:
        DataError: an object cannot be copied.
    """
    return {
        name: np.fromiter((_copied(name, value) for value in array), object, len(array))
        if array.dtype == object and array.ndim == 1
        else array
        for name, array in columns.items()
    }


def _copied(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy() if value.flags.writeable else value
    if isinstance(value, str | bytes | int | float | None):
        return value
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise DataError(
            f"column {name!r} holds {type(value).__name__}, which cannot be copied: {type(error).__name__}: {error}",
            where=f"column {name!r}",
            remedy="store what the object is made from, such as a file name, and make it in the function that needs it",
        ) from error


@dataclass(frozen=True, kw_only=True)
class Feed:
    """The feed of one rank for one global step."""

    step: int  # index of the step, from 0: the number of steps completed before it
    # one tuple of micro-batches for each data rank of the actor, in the order of `data_ranks`. Every data rank has
    # the same number of micro-batches, none is empty.
    parts: tuple[tuple[Batch, ...], ...]
    data_ranks: range  # the data ranks fed, of `total`
    total: int  # number of data ranks
    rows: int  # real samples in the global batch, over all data ranks
    stop_requested: bool = False  # this rank asks to stop; that travels in the reduction that carries the weights
    # the feed of the step after, which may have one too: where the plan's steps may begin before the one before them
    # ends, and these are sure to be asked for next; on all ranks or on none
    following: Feed | None = None
    # of the evaluation after `step` completed steps; None where there was none
    metrics: Mapping[str, float] | None = None


def single_rank_feed(batch: Batch) -> Feed:
    """Return a micro-batch as the feed of the only rank, for step 0."""
    return Feed(step=0, parts=((batch,),), data_ranks=range(1), total=1, rows=batch.rows)


def zero_weight(feed: Feed) -> Feed:
    """Return the same feed with all weights 0."""
    parts = tuple(tuple(replace(batch, weights=np.zeros(batch.rows)) for batch in part) for part in feed.parts)
    return replace(feed, parts=parts)


@dataclass(frozen=True, kw_only=True)
class MetricSums:
    """Sums and counts by metric name; never means of means."""

    totals: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # sum of weighted values and sum of weights
    # pickled metrics with state, in the order of ranks; see `core.metric_states`
    states: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)
    awaited: bool = False  # rank 0 has callbacks, which are to get the metrics of all ranks

    def __add__(self, other: MetricSums) -> MetricSums:
        merged, states = dict(self.totals), dict(self.states)
        for name, (value, weight) in other.totals.items():
            old_value, old_weight = merged.get(name, (0.0, 0.0))
            merged[name] = (old_value + value, old_weight + weight)
        for name, pieces in other.states.items():
            states[name] = states.get(name, ()) + pieces
        return MetricSums(totals=merged, states=states, awaited=self.awaited or other.awaited)

    def means(self) -> dict[str, float]:
        """Weighted means; NaN where nothing was counted."""
        return {name: value / weight if weight else float("nan") for name, (value, weight) in self.totals.items()}


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The result of a step; the same on every rank of a collective."""

    step: int  # completed steps, this one included
    loss: float  # weighted mean over the global batch
    weight: float  # sum of weights over the global batch
    learning_rate: float  # of the first parameter group, as used
    gradient_norm: float | None = None  # global norm before clipping; None when the job does not clip
    stop_requested: bool = False  # some rank asked to stop
    overflowed: bool = False  # nothing was applied, because the gradient was too large for `fp16`
    finished: bool = False  # nothing is left to train, though steps may be left, as a callback of Keras' may decide
    logged: MetricSums = field(default_factory=MetricSums)  # sums of the values of `tw.log` over the global batch
    # what this rank took before it waited for others; None where the engine cannot tell
    own_s: float | None = field(default=None, compare=False)
    # seconds of a late step, this one or one shortly before, by phase (see `STEP_PHASES`); None where none was
    # measured
    phases: Mapping[str, float] | None = field(default=None, compare=False)
    # of the gradients of such a step; None where none was sampled
    scatter: GradientScatter | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class PrefetchDepth:
    """How far data is prefetched, as tuned so far."""

    chunks: int  # ready ahead, at most
    chunk_steps: int  # steps that are read at once
    chunk_bytes: int  # size of the largest chunk


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """The most memory that a rank has used of its device so far, under its plan."""

    allocated_bytes: int  # by tensors
    reserved_bytes: int = 0  # by the framework; 0 where it does not tell


@dataclass(frozen=True, kw_only=True)
class FeedAssignment:
    """Which data ranks a worker is fed, from `plan.feed_of(rank)`."""

    data_ranks: range
    total: int
    inputs: bool = True


def clipping_factor(norm: float, largest: float) -> float:
    """Return the factor that clips a gradient of this norm, as `torch.nn.utils.clip_grad_norm_` does."""
    return min(1.0, largest / (norm + 1e-6))


def fold_seed(*numbers: int) -> int:
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


# --- The gradient noise scale -----------------------------------------------------------------------------------------


_SAMPLE_EVERY, SAMPLE_EVERY_EARLY = 64, 32  # steps between two samples; the latter in the first `_EARLY_STEPS`
_EARLY_STEPS = 1024
_AVERAGE_DECAY = 0.95  # of the averages from sample to sample: about the last 39 samples count
LEAST_NOISE_SAMPLES = 12  # samples before an average is trusted
_DEVIATIONS = 2.2  # standard deviations to either side: 19 of 20 of a few dozen samples
OVERSIZED_BATCH_FACTOR = 4.0  # a batch of so many times the noise scale's upper end is too large
_WIDEST_INTERVAL = 4.0  # from the lower to the upper end: more says nothing


def noise_is_due(step: int, shares: int) -> bool:
    """Return whether gradients of a step, counted from 0, are sampled; the same on all ranks.

    Such a step takes a tenth longer, a quarter where it takes 2 ms (measured on a CPU, with two micro-batches).
    """
    every = SAMPLE_EVERY_EARLY if step < _EARLY_STEPS else _SAMPLE_EVERY
    return shares > 1 and step % every == every - 1


@dataclass(frozen=True, kw_only=True)
class GradientScatter:
    """A sample of gradient noise from one step, in any unit of gradients."""

    samples: float  # n, in all shares
    shares: float  # k, of one sample or more each
    parts: float  # sum over the shares of |s_i|^2 / n_i
    whole: float  # |s|^2

    @property
    def known(self) -> bool:
        """Whether it is usable: there are two shares, and no gradient overflowed."""
        return self.shares > 1.5 and self.samples > 0 and math.isfinite(self.parts) and math.isfinite(self.whole)

    def estimates(self) -> tuple[float, float]:
        """Return unbiased estimates of tr(Sigma) and |G|^2; either may be negative."""
        mean = self.whole / self.samples
        trace = (self.parts - mean) / (self.shares - 1)
        return trace, (mean - trace) / self.samples


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """The noise scale in samples, with a 95% confidence interval."""

    scale: float
    low: float
    high: float
    batch: float  # global batch size, in samples, that it was measured at
    count: int  # steps that were sampled

    @property
    def advice(self) -> str:
        """Return advice on a batch that is far too large; empty for another batch."""
        if self.batch <= OVERSIZED_BATCH_FACTOR * self.high:
            return ""
        times = self.batch / self.high
        return (
            f"the batch of {self.batch:,.0f} samples is {times:.0f} times the upper end of the gradient noise scale "
            f"({self.text}): a smaller one comes to the same loss with fewer samples and hardly more steps, while more "
            "workers or a larger batch gain little"
        )

    @property
    def text(self) -> str:
        """Return a text such as `310 samples, 250 to 400`."""
        return f"{_format_samples(self.scale)} samples, {_format_samples(self.low)} to {_format_samples(self.high)}"


class NoiseScaleAverage:
    """Exponential averages of both estimates, and the interval of their ratio from their scatter."""

    def __init__(self) -> None:
        self.count = 0  # steps taken so far
        self._weight = self._squares = 0.0  # sums of the samples' weights, and of their squares
        self._sums: tuple[float, ...] = (0.0,) * 6  # weighted, of trace, square, their products and the batch

    def add(self, scatter: GradientScatter) -> None:
        """Add one sampled step; an unusable sample is ignored."""
        if not scatter.known:
            return
        trace, square = scatter.estimates()
        new = (trace, square, trace * trace, trace * square, square * square, scatter.samples)
        self._sums = tuple(_AVERAGE_DECAY * old + value for old, value in zip(self._sums, new, strict=True))
        self._weight = _AVERAGE_DECAY * self._weight + 1.0
        self._squares = _AVERAGE_DECAY * _AVERAGE_DECAY * self._squares + 1.0
        self.count += 1

    def noise(self) -> NoiseScale | None:
        """Return the noise scale; None while it is unreliable: too few samples, or an unbounded or too wide interval.

        The interval is Fieller's (1954), for the ratio of two means that vary together.
        """
        if self.count < LEAST_NOISE_SAMPLES:
            return None
        trace, square, *products, batch = (value / self._weight for value in self._sums)
        means = (trace * trace, trace * square, square * square)
        variance = self._squares / self._weight**2  # in the average, of a sample's variance: 1 / effective number
        if variance >= 1.0 or square <= 0:
            return None
        scale = _DEVIATIONS**2 * variance / (1 - variance)
        spread = [scale * (product - mean) for product, mean in zip(products, means, strict=True)]
        ends = _interval_ends(means, spread)
        if ends is None or not ends[0] > 0 or ends[1] > _WIDEST_INTERVAL * ends[0]:
            return None
        return NoiseScale(scale=trace / square, low=ends[0], high=ends[1], batch=batch, count=self.count)


def _interval_ends(means: tuple[float, float, float], spread: list[float]) -> tuple[float, float] | None:
    """Solve (trace - ratio * square)^2 = variance for the ratio; None where it has no upper bound."""
    first, half, last = (mean - variance for mean, variance in zip(means, spread, strict=True))
    root = half * half - first * last
    if last <= 0 or root < 0:
        return None
    return (half - math.sqrt(root)) / last, (half + math.sqrt(root)) / last


def _format_samples(samples: float) -> str:
    return f"{samples:,.0f}" if samples >= 10 else f"{samples:.2g}"


# --- The phases of a step that engines time, and what of them a plan's terms foretell ---------------------------------


STEP_PHASES = ("forward", "backward", "wait", "optimizer", "other")
COMPILED_PHASE = "forward+backward+wait+optimizer"  # of an engine whose step is one function


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """Median seconds by phase over a number of steps of one rank, and their wait for data."""

    steps: int
    medians: Mapping[str, float] = field(default_factory=dict)
    data_s: float = 0.0

    @property
    def own_s(self) -> float:
        """Seconds of the rank's own work before it waited for others, where known."""
        return self.data_s + sum(seconds for phase, seconds in self.medians.items() if "wait" not in phase.split("+"))


def merge_phase_times(times: Sequence[PhaseTimes]) -> PhaseTimes | None:
    """Merge the times with the same phases as the last one: medians weighted by steps."""
    alike = [phases for phases in times if phases.medians.keys() == times[-1].medians.keys()]
    if not alike:
        return None
    weights = [phases.steps for phases in alike]

    def median(values: list[float]) -> float:
        return float(np.quantile(values, 0.5, weights=weights, method="inverted_cdf"))

    return PhaseTimes(
        steps=sum(weights),
        medians={name: median([phases.medians[name] for phases in alike]) for name in alike[-1].medians},
        data_s=median([phases.data_s for phases in alike]),
    )


def slowest_phase_times(times: Iterable[PhaseTimes]) -> PhaseTimes | None:
    """Return the phases of the rank whose own part of a step takes longest: the other ranks wait for it."""
    return max(times, key=lambda phases: phases.own_s, default=None)


def least_resources(needs: Iterable[Mapping[str, tuple[float, float]]], name: str) -> float:
    """Return the CPUs or GPUs without which Ray Data cannot execute several data sets at the same time.

    Args:
        needs: of each data set, by resource, the amounts of its actors and of its largest task. Actors stay, and tasks
            can take turns.
        name: of the resource, `CPU` or `GPU`.
    """
    least = [each.get(name, (0.0, 0.0)) for each in needs]
    return sum(actors for actors, _ in least) + max((task for _, task in least), default=0.0)
