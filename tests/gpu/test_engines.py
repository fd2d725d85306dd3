"""Steps on a GPU: those of the CPU in float64, near them in half precision, and the same bits after a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tests.gpu.lone import CPU, GPU, ONE_DEVICE, PARALLEL, Lone, Run, Task, trained
from tests.support.conformance import torch_case
from tests.support.conformance.attention_model import HALF, JOB, Attentive, bent
from tests.support.conformance.harness import Pool
from tests.support.conformance.problems import PROBLEMS, Problem
from tests.support.conformance.server_processes import Served
from trainwright.core.data import STEP_PHASES, MetricSums
from trainwright.core.engine import ModelSpec
from trainwright.strategies.torch.training.train_state import PhaseTimer

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-9  # over 50 steps in float64
ENGINES = {"one device": ONE_DEVICE, "over NCCL": PARALLEL}
ATTENTIVE = replace(PROBLEMS["ragged"], inputs=("x",))
SINGLE = replace(ATTENTIVE, dtype="float32")
WIDE: ModelSpec = replace(JOB, model=partial(Attentive, torch.float64, dropout=0.3))
NARROW: ModelSpec = replace(HALF, loss=torch_case.cross_entropy, optimizer=partial(torch.optim.AdamW, lr=0.003))
NEAR = {"bf16": 1e-2, "fp16": 2e-3}  # about five times and ten times what a CPU's half precision is apart


def assert_near(found: Run, expected: Run) -> None:
    """Losses, norms and all that training changed."""
    for ours, theirs in zip(found.reports, expected.reports, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=TOLERANCE)
        norms = [report.gradient_norm or 0.0 for report in (ours, theirs)]
        assert norms[0] == pytest.approx(norms[1], rel=TOLERANCE)
    for key in expected.state.keys() - {"state.json"}:
        np.testing.assert_allclose(found.state[key], expected.state[key], rtol=TOLERANCE, atol=TOLERANCE, err_msg=key)


def assert_same(found: Run, expected: Run) -> None:
    """The same, bit by bit."""
    assert [report.loss for report in found.reports] == [report.loss for report in expected.reports]
    assert found.state.keys() == expected.state.keys()
    for key, value in expected.state.items():
        assert found.state[key].tobytes() == value.tobytes(), key


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_fifty_steps_are_those_of_the_cpu(name: str, engine: str) -> None:
    expected = trained(Task.of(PROBLEMS[name]), CPU)
    assert_near(trained(Task.of(PROBLEMS[name], ENGINES[engine]), GPU), expected)


@pytest.mark.parametrize(("first", "second"), [(GPU, CPU), (CPU, GPU)])
@pytest.mark.parametrize("name", ["clip", "schedule"])
def test_a_checkpoint_goes_on_on_the_other_device(name: str, first: str, second: str) -> None:
    task = Task.of(PROBLEMS[name])
    assert_near(trained(task, first, moved_to=second, at=20), trained(task, CPU))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_checkpoint_goes_on_to_the_same_bits(precision: str) -> None:
    """Dropout and the scale of losses included."""
    job = WIDE if precision == "fp32" else replace(HALF, model=partial(Attentive, torch.float32, dropout=0.3))
    task = Task.of(ATTENTIVE if precision == "fp32" else SINGLE, spec=job, precision=precision)
    assert_same(trained(task, GPU, moved_to=GPU, at=20), trained(task, GPU))


def test_a_snapshot_taken_back_goes_on_to_the_same_bits() -> None:
    task = Task.of(ATTENTIVE, spec=WIDE)
    with Lone(task, GPU) as lone:
        lone.train(0, 20)
        kept = lone.engine.snapshot()
        expected = lone.train(20, 30), lone.files()
        lone.engine.restore(kept)
        assert (lone.train(20, 30), lone.files()) == expected


@pytest.mark.parametrize("precision", NEAR)
def test_half_precision_stays_near(precision: str) -> None:
    found, expected = (trained(Task.of(SINGLE, spec=NARROW, precision=kind), GPU) for kind in (precision, "fp32"))
    losses, exact = (np.array([report.loss for report in run.reports]) for run in (found, expected))
    assert losses[-5:].mean() < losses[:5].mean()
    assert not np.array_equal(losses, exact)  # it is another precision
    np.testing.assert_allclose(losses, exact, rtol=NEAR[precision])


def test_losses_are_scaled_until_nothing_overflows() -> None:
    over = [report.overflowed for report in trained(Task.of(SINGLE, spec=HALF, precision="fp16"), GPU).reports]
    assert over[0] and not over[-1]


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_what_is_computed_again_draws_the_same_dropout(recompute: str) -> None:
    found = trained(Task.of(ATTENTIVE, spec=WIDE, recompute=recompute), GPU)
    assert_near(found, trained(Task.of(ATTENTIVE, spec=WIDE), GPU))


@pytest.mark.filterwarnings("default")  # the compiler warns of itself
def test_a_compiled_model_is_near() -> None:
    job = replace(JOB, model=bent)
    found = trained(Task.of(ATTENTIVE, spec=replace(job, compile="inductor")), GPU)
    assert_near(found, trained(Task.of(ATTENTIVE, spec=job), GPU))


@pytest.mark.gpu(stand_in=False)  # a CPU is timed in every step
def test_phases_are_told_in_the_step_after_those_that_are_timed() -> None:
    problem: Problem = replace(ATTENTIVE, steps=PhaseTimer.FIRST + PhaseTimer.EVERY + 3)
    reports = trained(Task.of(problem, spec=replace(WIDE, total_steps=problem.steps)), GPU).reports
    told = {number: report.phases for number, report in enumerate(reports) if report.phases is not None}
    assert [*told] == [PhaseTimer.FIRST + 1, PhaseTimer.FIRST + PhaseTimer.EVERY + 1]
    for phases in told.values():
        assert phases.keys() == {"forward", "backward", "optimizer"} <= set(STEP_PHASES)
        assert all(0 < seconds < 10 for seconds in phases.values())


def test_evaluation_and_prediction_are_those_of_the_cpu() -> None:
    task = Task.of(PROBLEMS["dividing"])
    found: list[tuple[MetricSums, dict[str, np.ndarray]]] = []
    for device in (GPU, CPU):
        with Lone(task, device) as lone:
            lone.train(0, 5)
            found.append((lone.engine.evaluate_step(task.feeds[5]), lone.engine.predict_step(task.feeds[5])))
    (sums, outputs), (expected, exact) = found
    assert sums.totals.keys() == expected.totals.keys() == {"loss", "accuracy"}
    for name, total in expected.totals.items():
        assert sums.totals[name] == pytest.approx(total, rel=TOLERANCE)
    np.testing.assert_allclose(outputs["output"], exact["output"], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Processes for servers and workers."""
    pytest.importorskip("pydantic", reason="parameter servers check calls with pydantic, which is not installed here")
    shared = Pool(("torch.nn.parallel", torch_case.__name__))
    yield shared
    shared.close()


@pytest.mark.parametrize("plan", [{}, {"consistency": "ssp(0)"}], ids=["sync", "ssp(0)"])
def test_workers_on_a_gpu_push_to_servers_in_host_memory(pool: Pool, plan: dict[str, str]) -> None:
    steps = 12
    with Served(pool, "torch", replace(PROBLEMS["weights"], steps=steps), 2, 2, device=GPU, **plan) as own:
        start, reports = own.parameters(), own.run(steps)
        losses, _, parameters = own.by_hand(start, steps)
        np.testing.assert_allclose([report.loss for report in reports], losses, rtol=TOLERANCE)
        for name, value in own.parameters().items():
            np.testing.assert_allclose(value, parameters[name], rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
