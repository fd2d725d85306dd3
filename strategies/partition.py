"""Layers divided into contiguous stages so that the slowest is as quick as can be, with or without replicas."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np


def divided(costs: Sequence[float], stages: int, limits: Sequence[float] | None = None) -> tuple[int, ...]:
    """Sizes of contiguous, non-empty stages with the least maximum of summed costs.

    The least maximum is the sum of some run of layers, so a search over these sums is exact.

    Args:
        costs: of each layer, not negative.
        stages: how many.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{stages} stages for {len(costs)} layers")
    ends = [0.0, *accumulate(costs)]
    low, high = max(max(costs), ends[-1] / stages), ends[-1]
    sizes = _packed(ends, stages, high)
    for _ in range(60):
        middle = (low + high) / 2
        tried = _packed(ends, stages, middle)
        low, high, sizes = (low, middle, tried) if tried else (middle, high, sizes)
        if high - low <= 1e-12 * high:
            break
    return tuple(sizes or _packed(ends, stages, ends[-1]) or ())


def _packed(ends: Sequence[float], stages: int, limit: float) -> list[int] | None:
    """Stages filled one after the other up to a limit; None where they are not enough. No stage is left empty."""
    total, begin, sizes = len(ends) - 1, 0, []
    for stage in range(stages):
        most = total - (stages - 1 - stage)
        end = min(bisect_right(ends, ends[begin] + limit * (1 + 1e-12)) - 1, most)
        if end <= begin:
            return None
        sizes.append(end - begin)
        begin = end
    return sizes if begin == total else None


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Layers `begin` to `end` (exclusive) on so many replicas."""

    begin: int
    end: int
    replicas: int


def replicated(
    seconds: Sequence[float],
    weight_bytes: Sequence[float],
    output_bytes: Sequence[float],
    devices: int,
    bytes_per_s: float,
) -> tuple[Stage, ...]:
    """Stages of a pipeline that is never flushed, with replicas: the slowest takes the least time for one micro-batch.

    The dynamic programme of PipeDream (Narayanan et al., 2019, section 3.1) on devices joined by links of one speed: m
    replicas of a stage do m micro-batches in the time of one, or of a ring all-reduce of their weights if it is longer;
    a cut costs its activations and their gradients. A device that would make nothing quicker is not used.

    Args:
        seconds: forward and backward of each layer.
        weight_bytes: of each layer.
        output_bytes: what travels if the cut is behind the layer.
        devices: how many.
        bytes_per_s: of each link.

    Raises:
        ValueError: there is no layer or no device.
    """
    count = len(seconds)
    if not count or devices < 1:
        raise ValueError("there must be a layer and a device")
    time, weight = (np.concatenate(([0.0], np.cumsum(values))) for values in (seconds, weight_bytes))
    cut = 2 * np.array([0.0, *output_bytes[:-1], 0.0]) / bytes_per_s
    best = np.full((count + 1, devices + 1), np.inf)
    chosen: dict[tuple[int, int], tuple[int, int]] = {}
    best[0, 0] = 0.0
    for end in range(1, count + 1):
        for used in range(1, devices + 1):
            for replicas in range(1, used + 1):
                compute = (time[end] - time[:end]) / replicas
                reduced = 2 * (replicas - 1) * (weight[end] - weight[:end]) / (replicas**2 * bytes_per_s)
                slowest = np.maximum(np.maximum(compute, reduced), np.maximum(best[:end, used - replicas], cut[:end]))
                begin = int(np.argmin(slowest))
                if slowest[begin] < best[end, used]:
                    best[end, used], chosen[end, used] = slowest[begin], (begin, replicas)
    stages: list[Stage] = []
    end, used = count, int(np.argmin(best[count].round(12)))
    while end:
        begin, replicas = chosen[end, used]
        stages.append(Stage(begin=begin, end=end, replicas=replicas))
        end, used = begin, used - replicas
    return tuple(reversed(stages))
