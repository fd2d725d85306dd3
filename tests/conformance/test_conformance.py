"""The suite that every engine passes: its steps are those of one device on the global batch.

To add an engine, name it in `cases.CASES`. An engine of a new framework also needs a module `<framework>_case.py` with
the four functions of `cases.Framework`, and in `cases.IMPORTS` what its processes should import beforehand:

- `spec(problem)`: the problem as a job, with a two-layer tanh network, loss, optimizer and, for classes, `accuracy`;
- `by_hand(problem, start, steps, data)`: a plain loop over whole global batches, without anything of ours;
- `parameters(files)` and `state(files)`: the parameters, and all that training changes, from what the engine saved.

Everything else is the suite's: problems and the deal of rows to ranks (`problems.py`), processes and the order of calls
(`harness.py`, `rank.py`). The other files of the suite are `test_state.py` (randomness, snapshots, checkpoints,
transfers), `test_failures.py` (deaths, errors, interrupts), `test_asynchronous.py` (ranks that step alone) and
`test_sharded.py` (divided models).
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.conformance import problems
from tests.support.conformance.cases import CASES, Case, label, several, sizes
from tests.support.conformance.harness import Pool, World
from tests.support.conformance.problems import CLIP, PROBLEMS, RATE, Problem
from trainwright.core.data import Feed, MetricSums, StepReport

_FOUND: dict[tuple[str, Problem, str], tuple[Any, Any, Any]] = {}
TOLERANCE = 1e-9  # over 50 steps in float64

# With many numbers of workers each problem is tried with every other one: 2 and 4, where shares are empty, or 1 and 3.
EQUAL = [
    (case, workers, PROBLEMS[name])
    for case in CASES
    for workers in case.workers
    for name in case.problems
    if len(case.workers) == 1 or (workers + list(PROBLEMS).index(name)) % 2 == 0
]


@pytest.mark.parametrize(("case", "workers", "problem"), EQUAL, ids=label)
def test_50_steps_equal_one_device(pool: Pool, case: Case, workers: int, problem: Problem) -> None:
    _compare(pool, case, workers, problem)


@pytest.mark.parametrize(("case", "workers"), several(2, 3, 4), ids=label)
def test_a_rank_of_weight_zero(pool: Pool, case: Case, workers: int) -> None:
    zero = replace(PROBLEMS["dividing"], loss="weighted", zero_rank_of=workers * case.devices, steps=20)
    data, ids = problems.columns(zero), problems.batches(zero)
    assert all(data["w"][batch[1 :: zero.zero_rank_of]].sum() == 0 < data["w"][batch].sum() for batch in ids)
    _compare(pool, case, workers, zero)


@pytest.mark.parametrize(
    ("case", "workers"), [(case, n) for case, n in sizes(1, 2, 3, 4) if case.framework == "torch"], ids=label
)
def test_10_losses_in_float32(pool: Pool, case: Case, workers: int) -> None:
    single = replace(PROBLEMS["ragged"], dtype="float32", steps=10)
    _compare(pool, case, workers, single, tolerance=1e-5)


@pytest.mark.parametrize(("case", "workers"), sizes(2, 3), ids=label)
def test_a_step_without_any_weight_applies_nothing(pool: Pool, case: Case, workers: int) -> None:
    silent = PROBLEMS["silent_step"]
    feeds = case.feeds(silent, workers, range(3))
    with case.world(pool, silent, workers) as world:
        world.start(feeds[0])
        world.train(feeds[:1])
        before = case.code.parameters(world.files())
        (report, *_) = world.train(feeds[1:2])[0]
        after = case.code.parameters(world.files())
        assert (report.step, report.loss, report.weight) == (2, 0.0, 0.0)
        assert all(np.array_equal(before[name], after[name]) for name in before)
        (report, *_) = world.train(feeds[2:])[0]
        assert report.weight > 0 and report.loss > 0
        assert any(not np.array_equal(value, after[name]) for name, value in _parameters(case, world).items())


@pytest.mark.parametrize(("case", "workers"), sizes(2, 3), ids=label)
def test_a_wish_of_one_rank_is_heard_by_all_in_the_same_step(pool: Pool, case: Case, workers: int) -> None:
    problem = PROBLEMS["ragged"]
    feeds = case.feeds(problem, workers, range(3))
    feeds[1][-1] = replace(feeds[1][-1], stop_requested=True)
    with case.world(pool, problem, workers) as world:
        world.start(feeds[0])
        for reports in world.train(feeds):
            assert [report.stop_requested for report in reports] == [False, True, False]


@pytest.mark.parametrize(("case", "workers"), sizes(1, 2, 3, 4), ids=label)
def test_evaluation_sums_merge_to_the_mean_of_the_whole_set(pool: Pool, case: Case, workers: int) -> None:
    problem = replace(PROBLEMS["ragged"], batch_size=29, dropout=0.5)
    feeds = case.feeds(problem, workers, range(-(-problem.rows // problem.batch_size)))
    with case.world(pool, problem, workers) as world:
        world.form()
        sums = sum(world.every("evaluate", lambda rank: ([step[rank] for step in feeds],)), start=MetricSums())
        outputs = _predicted(world, [_whole(problem)] * workers)[0]
    y = problems.columns(problem)["y"]
    losses = np.log(np.exp(outputs).sum(axis=1)) - outputs[np.arange(problem.rows), y]
    assert sums.totals["loss"] == pytest.approx((losses.sum(), problem.rows), rel=1e-12)
    assert sums.totals["accuracy"] == (float((outputs.argmax(axis=1) == y).sum()), problem.rows)


@pytest.mark.parametrize(("case", "workers"), sizes(3), ids=label)
def test_predictions_are_in_the_order_of_the_feed(pool: Pool, case: Case, workers: int) -> None:
    problem = PROBLEMS["empty_shares"]
    feeds = case.feeds(problem, workers, range(1))
    with case.world(pool, problem, workers) as world:
        world.form()
        whole = _predicted(world, [_whole(problem)] * workers)[0]
        assert whole.shape == (problem.rows, problems.CLASSES)
        for feed, predicted in zip(feeds[0], _predicted(world, feeds[0]), strict=False):
            assert np.allclose(predicted, whole[problems.rows_of(feed)], rtol=0, atol=1e-12)


def _compare(pool: Pool, case: Case, workers: int, problem: Problem, tolerance: float = TOLERANCE) -> None:
    """Train with the engine and by hand from the same start, and compare reports and parameters."""
    feeds = case.feeds(problem, workers, range(problem.steps))
    with case.world(pool, problem, workers) as world:
        world.start(feeds[0])
        start = _parameters(case, world)
        reports = world.train(feeds)
        ends = [case.code.parameters(files) for files in world.each_files()]
    losses, norms, parameters = _by_hand(case, problem, start)
    assert all(own == reports[0] for own in reports), "ranks report differently"
    assert [report.loss for report in reports[0]] == pytest.approx(losses, rel=tolerance, abs=tolerance)
    assert parameters.keys() == start.keys()
    for end in ends:
        assert all(np.array_equal(end[name], ends[0][name]) for name in end), "ranks hold different parameters"
    for name, value in parameters.items():
        assert np.allclose(ends[0][name], value, rtol=tolerance, atol=tolerance), name
        assert not np.array_equal(start[name], value), f"{name} was not trained"
    _check_facts(problem, reports[0], norms, tolerance)


def _by_hand(case: Case, problem: Problem, start: dict[str, np.ndarray]) -> tuple[Any, Any, Any]:
    """What the loop by hand makes of a start; once for all engines of a framework that begin alike."""
    parts = [f"{name} {value.dtype} {value.shape}".encode() + value.tobytes() for name, value in sorted(start.items())]
    key = (case.framework, problem, hashlib.sha256(b"".join(parts)).hexdigest())
    if key not in _FOUND:
        data, ids = problems.columns(problem), problems.batches(problem)
        _FOUND[key] = case.code.by_hand(problem, start, ids, data)
    return _FOUND[key]


def _check_facts(problem: Problem, reports: list[StepReport], norms: list[float], tolerance: float) -> None:
    """Steps, weights, learning rates and norms of a run."""
    data, ids = problems.columns(problem), problems.batches(problem)
    weights = {"cross_entropy": np.ones(problem.rows), "weighted": data["w"], "tokens": data["m"]}[problem.loss]
    factors = [problems.schedule(step, problem.steps) if problem.schedule else 1.0 for step in range(problem.steps)]
    assert [report.step for report in reports] == list(range(1, problem.steps + 1))
    assert [report.weight for report in reports] == pytest.approx([weights[batch].sum() for batch in ids], rel=1e-6)
    assert [report.learning_rate for report in reports] == pytest.approx([RATE * factor for factor in factors])
    assert not any(report.stop_requested for report in reports)
    if problem.clip:
        found = [report.gradient_norm or 0.0 for report in reports]
        assert found == pytest.approx(norms, rel=tolerance, abs=tolerance)
        assert max(norms) > 2 * CLIP, "clipping does not bite"
    else:
        assert all(report.gradient_norm is None for report in reports)


def _predicted(world: World, feeds: list[Feed]) -> list[np.ndarray]:
    """Outputs of the ranks that have them, all at once."""
    return [outputs["output"] for outputs in world.every("predict", lambda rank: (feeds[rank],)) if outputs]


def _parameters(case: Case, world: object) -> dict[str, np.ndarray]:
    return case.code.parameters(world.files())  # type: ignore[attr-defined]


def _whole(problem: Problem):
    """The whole data set as the feed of one rank."""
    plan = problems.plan_of(replace(problem, accumulation=1), "", 1, 1, "collective")
    return problems.feeds(problem, plan, 0, np.arange(problem.rows), problems.columns(problem))[0]
