"""What engines measure beside the training: the noise of gradients, exactly, and the time of phases."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from tests.support.conformance import problems
from tests.support.conformance.cases import CASES, Case, label
from tests.support.conformance.harness import Pool
from tests.support.conformance.problems import PROBLEMS, Problem
from trainwright.core.data import SAMPLE_EVERY_EARLY, STEP_PHASES

FRAMEWORKS = ("torch", "tensorflow")
SHARED = [  # a divided model's gradient of one share is nowhere whole
    (case, workers, PROBLEMS[name])
    for case in CASES
    if case.framework in FRAMEWORKS and not case.variant and not case.copies
    for workers in (case.workers[-1],)
    for name in ("ragged", "empty_shares")
]
TIMED = [(case, case.workers[0]) for case in CASES if case.topology == "collective" and not case.variant]


@pytest.mark.parametrize(("case", "workers", "problem"), SHARED, ids=label)
def test_a_sampled_step_tells_the_norms_of_all_shares(pool: Pool, case: Case, workers: int, problem: Problem) -> None:
    feeds = case.feeds(problem, workers, range(SAMPLE_EVERY_EARLY - 2, SAMPLE_EVERY_EARLY + 1))
    with case.world(pool, problem, workers) as world:
        world.start(feeds[0])
        world.train(feeds[:1])
        start = case.code.parameters(world.files())
        reports = world.train(feeds[1:])
    data = problems.columns(problem)
    shares = [batch.samples for feed in feeds[1] for part in feed.parts for batch in part if batch.weights.any()]
    norms = [case.code.by_hand(problem, start, [ids], data)[1][0] for ids in shares]
    whole = problems.batches(problem, SAMPLE_EVERY_EARLY)[-1]
    norm = case.code.by_hand(problem, start, [whole], data)[1][0]
    expected = {
        "samples": len(whole),
        "shares": len(shares),
        "parts": sum(len(ids) * one**2 for ids, one in zip(shares, norms, strict=True)),
        "whole": (len(whole) * norm) ** 2,
    }
    for told in reports:
        (scatter,) = [report.scatter for report in told if report.scatter]
        assert asdict(scatter) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(("case", "workers", "problem"), SHARED[::2], ids=label)
def test_a_sampled_step_trains_to_the_same_bits(pool: Pool, case: Case, workers: int, problem: Problem) -> None:
    feeds = case.feeds(problem, workers, range(3))
    found = []
    for first in (SAMPLE_EVERY_EARLY - 2, SAMPLE_EVERY_EARLY):
        numbered = [[replace(feed, step=first + step) for feed in each] for step, each in enumerate(feeds)]
        with case.world(pool, problem, workers) as world:
            world.start(numbered[0])
            told = [any(report.scatter for report in reports) for reports in world.train(numbered)]
            found.append({name: value.tobytes() for name, value in case.code.parameters(world.files()).items()})
            assert all(told) == (first < SAMPLE_EVERY_EARLY)
    assert found[0] == found[1]


@pytest.mark.parametrize(("case", "workers"), TIMED, ids=label)
def test_every_part_of_a_step_is_timed_once(pool: Pool, case: Case, workers: int) -> None:
    feeds = case.feeds(PROBLEMS["dividing"], workers, range(3))
    with case.world(pool, PROBLEMS["dividing"], workers) as world:
        world.start(feeds[0])
        for report in world.train(feeds)[0]:
            assert report.phases is not None and all(seconds >= 0 for seconds in report.phases.values())
            timed = [place for phase in report.phases for place in phase.split("+")]
            assert len(timed) == len(set(timed)) and {"forward", "backward", "optimizer"} <= set(timed) < set(
                STEP_PHASES
            )
