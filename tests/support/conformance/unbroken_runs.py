"""Unbroken runs of each engine, and the comparison of states with theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.support.conformance.cases import Case
from tests.support.conformance.harness import Pool, World
from tests.support.conformance.problems import PROBLEMS
from trainwright.core.data import StepReport

# Everything that could be carried from step to step: dropout, momenta, a schedule, clipping. Uneven shares and a short
# last batch, in micro-batches of two sizes: TensorFlow compiles each.
PROBLEM = replace(PROBLEMS["weights"], name="all", batch_size=21, rows=104, dropout=0.3, schedule=True, clip=True)
PART, WHOLE = 5, 9


@dataclass(frozen=True, kw_only=True)
class Unbroken:
    """What an unbroken run came to: its checkpoint after PART steps, all reports since, and its last state."""

    files: Mapping[str, bytes]
    reports: list[list[StepReport]]
    end: Mapping[str, Any]


_UNBROKEN: dict[tuple[str, int], Unbroken] = {}


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Two states are the same, bit by bit; says where they are not."""
    assert one.keys() == other.keys()
    different = [name for name in one if not np.array_equal(one[name], other[name])]
    assert not different, f"different: {different}"


def unbroken(pool: Pool, case: Case, workers: int) -> Unbroken:
    """An unbroken run of PROBLEM; one for all tests, since equal runs are equal bit by bit."""
    key = (case.name, workers)
    if key not in _UNBROKEN:
        feeds = case.feeds(PROBLEM, workers, range(WHOLE))
        with case.world(pool, PROBLEM, workers) as world:
            world.start(feeds[0])
            world.train(feeds[:PART])
            files = world.files()
            reports = world.train(feeds[PART:])
            _UNBROKEN[key] = Unbroken(files=files, reports=reports, end=state_of(case, world))
    return _UNBROKEN[key]


def state_of(case: Case, world: World) -> Mapping[str, Any]:
    """Rank 0's state, which every rank shares."""
    states = [case.code.state(files) for files in world.each_files()]
    for state in states:
        assert_same(states[0], state)
    return states[0]
