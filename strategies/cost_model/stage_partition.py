"""Divide layers into contiguous stages so that the slowest stage is as fast as possible."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

_WHOLE = 2.0**60  # of all costs together
_Fits = Callable[[int, int, int], bool]


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """Memory of layers in a stage."""

    fixed_bytes: Sequence[float]  # of each layer
    kept_bytes: Sequence[float]  # of each layer and each micro-batch in flight
    working_bytes: Sequence[float]  # of each layer; a stage needs that of its largest layer
    in_flight: Sequence[float]  # micro-batches of each stage; never more than the stage before has
    room_bytes: float  # of each stage


def balanced_partition(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the sizes of contiguous, non-empty stages with the least maximum of summed costs.

    Args:
        costs: of each layer, not negative.
        stages: number of stages.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    found = partition_in_memory(costs, stages, None)
    assert found is not None  # only memory can forbid every division
    return found


def partition_in_memory(costs: Sequence[float], stages: int, room: MemoryLimit | None) -> tuple[int, ...] | None:
    """Return the best of the divisions whose stages all fit their memory, as `balanced_partition`; None without one.

    Stages are filled from the last to the first, each with as many layers as a limit of cost and its memory allow. That
    finds a division wherever there is one: layers that fit a stage still fit without the last of them, so a stage that
    ends earlier need not begin later; and as no stage holds more micro-batches in flight than the one before, layers
    that fit a stage fit each later stage, so no stage stays empty. (From the first to the last it would fail: a layer
    may be too large for one stage and fit the next.) A limit that is too low gives the next higher limit at which some
    stage takes another layer, so the search ends at the least limit itself.

    Args:
        costs: of each layer, not negative.
        stages: number of stages.
        room: memory of the stages; None for any division.

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
    """Return stages filled up to a limit, None where layers are left; and the least limit that fills any stage more.

    `ends` has the cost of all layers before each layer, and of all. `fits(stage, begin, end)`: the end is exclusive.
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
    """Return the first layer from which a stage fits; `end` where none does."""
    return bisect_left(range(end), True, begin, end, key=lambda first: fits(stage, first, end))


def _fits_memory(room: MemoryLimit) -> _Fits:
    """Return a function that says whether layers fit a stage, from prepared sums."""
    if any(after > before for before, after in pairwise(room.in_flight)):
        raise ValueError("a stage has more micro-batches in flight than the one before it")
    fixed, kept = ([0.0, *accumulate(each)] for each in (room.fixed_bytes, room.kept_bytes))

    def fits(stage: int, begin: int, end: int) -> bool:
        held = fixed[end] - fixed[begin] + room.in_flight[stage] * (kept[end] - kept[begin])
        return held + max(room.working_bytes[begin:end], default=0.0) <= room.room_bytes

    return fits
