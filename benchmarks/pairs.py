"""Compute the ratio of paired measurements, with its confidence interval. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The median ratio of the pairs, and the ends of its 95% confidence interval."""

    median: float
    low: float
    high: float


def ratio_of(ours: Sequence[float], peers: Sequence[float]) -> Ratio:
    """Return the ratio of ours over the peer's, pair by pair; the interval is a percentile bootstrap (Efron 1979).

    With fewer than six pairs no resampling can give a 95% interval: it is then no wider than the ratios themselves.
    """
    ratios = np.asarray(ours, dtype=float) / np.asarray(peers, dtype=float)
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, size=(RESAMPLES, len(ratios))), axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return Ratio(median=float(np.median(ratios)), low=float(low), high=float(high))
