"""Divide layers into contiguous stages so that the slowest stage is as fast as possible."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

_WHOLE = 2.0**60  # of all costs together
_Fits = Callable[[int, int, int], bool]


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """What layers take of a stage's memory.

    Attributes:
        fixed_bytes: of each layer, whatever is in flight.
        kept_bytes: of each layer, for each micro-batch in flight.
        working_bytes: of each layer; a stage needs those of its largest.
        in_flight: micro-batches of each stage; never more than of the stage before.
        room_bytes: of each stage.
    """

    fixed_bytes: Sequence[float]
    kept_bytes: Sequence[float]
    working_bytes: Sequence[float]
    in_flight: Sequence[float]
    room_bytes: float


def balanced_partition(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Sizes of contiguous, non-empty stages with the least maximum of summed costs.

    Args:
        costs: of each layer, not negative.
        stages: how many.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    found = partition_in_memory(costs, stages, None)
    assert found is not None  # only memory can forbid every division
    return found


def partition_in_memory(costs: Sequence[float], stages: int, room: MemoryLimit | None) -> tuple[int, ...] | None:
    """As `balanced_partition`, of the divisions whose stages all fit their memory; None where none does.

    Stages are filled from the last to the first, each with as many layers as a limit of cost and its memory allow. That
    finds a division wherever there is one: a run that fits a stage still fits without its last layers, so a stage that
    ends earlier need not begin later; and as no stage holds more micro-batches in flight than the one before, what fits
    a stage fits each after it, so none is left without a layer. (From the first to the last it would not: a layer may
    be too large for the stage that it falls to, and fit the next.) A limit that is too low says how much higher it must
    be for any stage to take another layer, so the search ends at the least one itself.

    Args:
        costs: of each layer, not negative.
        stages: how many.
        room: what memory allows; None for any division.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{stages} stages for {len(costs)} layers")
    unit = _WHOLE / (sum(costs) or 1.0)
    ends = [0, *accumulate(int(cost * unit) for cost in costs)]  # whole numbers: differences of sums are exact
    fits = _fits_memory(room) if room else None
    low, high, best = -(-ends[-1] // stages), ends[-1] + 1, None
    limit = ends[-1]
    while low < high:
        sizes, higher = _fill_stages(ends, stages, limit, fits)
        if sizes:
            best, high = sizes, max(ends[end] - ends[begin] for begin, end in pairwise([0, *accumulate(sizes)]))
        else:
            low = higher
        limit = (low + high) // 2
    return best


def _fill_stages(
    ends: Sequence[int], stages: int, limit: int, fits: _Fits | None
) -> tuple[tuple[int, ...] | None, int]:
    """Stages filled up to a limit, None where they are not enough; and the least limit that would fill any more.

    Args:
        ends: cost of all layers before each, and of all.
        fits: whether layers `begin` to `end` (exclusive) fit the memory of a stage: (stage, begin, end).
    """
    end, sizes, higher = len(ends) - 1, [], ends[-1] + 1
    for stage in range(stages - 1, -1, -1):
        begin = bisect_left(ends, ends[end] - limit, stage, end)
        if fits is not None and not fits(stage, begin, end):
            begin = _first(fits, stage, begin, end)
        elif begin > stage and (fits is None or fits(stage, begin - 1, end)):
            higher = min(higher, ends[end] - ends[begin - 1])
        if begin == end:
            return None, higher
        sizes.append(end - begin)
        end = begin
    return (tuple(reversed(sizes)), higher) if not end else (None, higher)


def _first(fits: _Fits, stage: int, begin: int, end: int) -> int:
    """The first layer from which a stage fits; `end` where none does."""
    return bisect_left(range(end), True, begin, end, key=lambda first: fits(stage, first, end))


def _fits_memory(room: MemoryLimit) -> _Fits:
    """Whether a run of layers fits a stage, asked in any order: sums and maxima of runs are prepared."""
    if any(after > before for before, after in pairwise(room.in_flight)):
        raise ValueError("a stage has more micro-batches in flight than the one before it")
    fixed, kept = ([0.0, *accumulate(each)] for each in (room.fixed_bytes, room.kept_bytes))
    flight, bytes_ = room.in_flight, room.room_bytes
    peak = _range_maximum(room.working_bytes)

    def fits(stage: int, begin: int, end: int) -> bool:
        held = fixed[end] - fixed[begin] + flight[stage] * (kept[end] - kept[begin])
        return held + peak(begin, end) <= bytes_

    return fits


def _range_maximum(values: Sequence[float]) -> Callable[[int, int], float]:
    """The largest of any run `begin` to `end` (exclusive), from those of all runs as long as a power of two."""
    if not any(values):
        return lambda begin, end: 0.0
    table = [np.array(values, float)]
    while (width := 2 ** (len(table) - 1)) * 2 <= len(values):
        table.append(np.maximum(table[-1][:-width], table[-1][width:]))
    rows = [row.tolist() for row in table]

    def peak(begin: int, end: int) -> float:
        if begin == end:
            return 0.0
        row = rows[(end - begin).bit_length() - 1]
        return max(row[begin], row[end - 2 ** ((end - begin).bit_length() - 1)])  # type: ignore[no-any-return]

    return peak
