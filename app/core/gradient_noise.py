"""The gradient noise scale: the batch size up to which larger batches save steps (McCandlish et al. 2018, "An
Empirical Model of Large-Batch Training", appendix A.1).

It is tr(Sigma) / |G|^2, with G the mean gradient of a sample and Sigma the covariance of one sample's gradient. Both
are estimated from the gradients of a batch's shares: with s_i the sum of the gradients of share i's n_i samples, s the
sum of all k shares and n their samples, the analysis of variance gives

    tr(Sigma) = (sum |s_i|^2 / n_i - |s|^2 / n) / (k - 1)
    |G|^2     = (k |s|^2 / n - sum |s_i|^2 / n_i) / (n (k - 1))

whose expectations are exact for any shares, even ones or not; for even ones they are the paper's. Each is averaged over
steps before their ratio is taken, since the ratio of single estimates is biased.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

EVERY, EARLY, OFTEN = 64, 1024, 32  # steps between two samples, and those of the first EARLY steps
DECAY = 0.95  # of the averages from sample to sample: about the last 39 samples count
LEAST = 12  # samples before an average is trusted
SURE = 2.2  # standard deviations to either side: 19 of 20 of a few dozen samples
FAR = 4.0  # a batch of so many times the noise scale's upper end is too large
_WIDEST = 4.0  # from the lower to the upper end: more says nothing


def due(step: int, shares: int) -> bool:
    """Whether the gradients of a step, counted from 0, are looked at; the same on all ranks.

    Such a step takes a tenth longer, a quarter where it takes 2 ms (measured on a CPU, with two micro-batches).
    """
    every = OFTEN if step < EARLY else EVERY
    return shares > 1 and step % every == every - 1


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """What a step tells of its gradient's noise, in any one unit of gradients.

    Attributes:
        samples: n, in all shares.
        shares: k, of one sample or more each.
        parts: sum over the shares of |s_i|^2 / n_i.
        whole: |s|^2.
    """

    samples: float
    shares: float
    parts: float
    whole: float

    @property
    def known(self) -> bool:
        """Whether it tells anything: there are two shares, and no gradient overflowed."""
        return self.shares > 1.5 and self.samples > 0 and math.isfinite(self.parts) and math.isfinite(self.whole)

    def estimates(self) -> tuple[float, float]:
        """tr(Sigma) and |G|^2 without bias; either may come out negative."""
        mean = self.whole / self.samples
        trace = (self.parts - mean) / (self.shares - 1)
        return trace, (mean - trace) / self.samples


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The noise scale in samples, with an interval that holds it 19 times of 20.

    Attributes:
        batch: global batch size, in samples, that it was measured at.
        count: steps that were sampled.
    """

    scale: float
    low: float
    high: float
    batch: float
    count: int

    @property
    def advice(self) -> str:
        """What to do about a batch that is far too large; empty where it is not."""
        if self.batch <= FAR * self.high:
            return ""
        times = self.batch / self.high
        return (
            f"the batch of {self.batch:,.0f} samples is {times:.0f} times the upper end of the gradient noise scale "
            f"({self.text}): a smaller one comes to the same loss with fewer samples and hardly more steps, while more "
            "workers or a larger batch gain little"
        )

    @property
    def text(self) -> str:
        """`310 samples, 250 to 400`."""
        return f"{_figure(self.scale)} samples, {_figure(self.low)} to {_figure(self.high)}"


class NoiseAverage:
    """Exponential averages of both estimates with what their scatter says of the ratio's interval.

    Attributes:
        count: steps taken so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._weight = self._squares = 0.0  # sums of the samples' weights, and of their squares
        self._sums: tuple[float, ...] = (0.0,) * 6  # weighted, of trace, square, their products and the batch

    def add(self, scatter: Scatter) -> None:
        """Take one sampled step; one that tells nothing is left out."""
        if not scatter.known:
            return
        trace, square = scatter.estimates()
        new = (trace, square, trace * trace, trace * square, square * square, scatter.samples)
        self._sums = tuple(DECAY * old + value for old, value in zip(self._sums, new, strict=True))
        self._weight = DECAY * self._weight + 1.0
        self._squares = DECAY * DECAY * self._squares + 1.0
        self.count += 1

    def noise(self) -> Noise | None:
        """The noise scale; None before it can be trusted: too few samples, or an interval without an end or too wide.

        The interval is Fieller's (1954), for the ratio of two means that vary together.
        """
        if self.count < LEAST:
            return None
        trace, square, *products, batch = (value / self._weight for value in self._sums)
        means = (trace * trace, trace * square, square * square)
        left = self._squares / self._weight**2  # of a sample's variance in the average: 1 / their effective number
        if left >= 1.0 or square <= 0:
            return None
        spread = [SURE**2 * left / (1 - left) * (both - mean) for both, mean in zip(products, means, strict=True)]
        ends = _ends(means, spread)
        if ends is None or not ends[0] > 0 or ends[1] > _WIDEST * ends[0]:
            return None
        return Noise(scale=trace / square, low=ends[0], high=ends[1], batch=batch, count=self.count)


def _ends(means: tuple[float, float, float], spread: list[float]) -> tuple[float, float] | None:
    """Where (trace - ratio * square)^2 equals its variance; None where the ratio has no upper end."""
    first, half, last = (mean - variance for mean, variance in zip(means, spread, strict=True))
    root = half * half - first * last
    if last <= 0 or root < 0:
        return None
    return (half - math.sqrt(root)) / last, (half + math.sqrt(root)) / last


def _figure(samples: float) -> str:
    return f"{samples:,.0f}" if samples >= 10 else f"{samples:.2g}"
