"""Steps on a GPU: those of the CPU in float64, near them in half precision, and the same bits after a checkpoint."""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from tests.gpu.lone import CPU, GPU, ONE_DEVICE, PARALLEL, Lone, Run, Task, trained
from tests.support import aborting_backend
from tests.support.conformance import torch_case
from tests.support.conformance.attention_model import HALF, JOB, Attentive, bent
from tests.support.conformance.harness import Pool
from tests.support.conformance.problems import PROBLEMS, Problem
from tests.support.conformance.server_processes import Served
from trainwright.core.data import STEP_PHASES, Batch, Feed, MetricSums
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import PeerLost
from trainwright.strategies.torch.distributed import process_group
from trainwright.strategies.torch.step_trace import PhaseTimer
from trainwright.strategies.torch.training.objective import DevicePrefetcher, JobFunctions

pytestmark = pytest.mark.gpu

ABORTS = 12 if GPU == CPU else 100  # each took a second on an H100
KEPT = 4  # open files and threads that may stay of all of them
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


@pytest.mark.parametrize("engine", ENGINES)
def test_batches_that_are_copied_ahead_give_the_same_bits(engine: str) -> None:
    task = Task.of(SINGLE, ENGINES[engine], spec=replace(HALF, model=partial(Attentive, torch.float32, dropout=0.3)))
    with Lone(task, GPU) as lone:
        prefetcher = lone.engine.prefetcher() or on_host(task)
        reports = [lone.engine.train_step(feed) for feed in ahead(prefetcher, task.feeds)]
        found = Run(reports=reports, state=torch_case.state(lone.files()))
    assert_same(found, trained(task, GPU))


def ahead(prefetcher: DevicePrefetcher, feeds: Iterable[Feed]) -> Iterator[Feed]:
    """Each feed as a thread copies it while the step before runs."""
    with ThreadPoolExecutor(1) as pool:
        going = deque[Future[Feed]]()
        for feed in feeds:
            going.append(pool.submit(prefetcher, feed))
            if len(going) > 1:
                yield going.popleft().result()
        yield from (future.result() for future in going)


def on_host(task: Task) -> DevicePrefetcher:
    """For the CPU that stands in for a GPU."""
    return DevicePrefetcher(JobFunctions.on_host(task.spec, task.plan, "rank 0"), torch.device(GPU))


class Convolved(nn.Module):
    """Takes longer to compute than its images take to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Conv2d(3 if not turn else 64, 64, 3, padding=1) for turn in range(6)))
        self.last = nn.Linear(64, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.net(image).mean((2, 3)))
        return found


def resources_after_abort(lone: Lone) -> tuple[int, ...]:
    """Form a group, use and abort it; return open files, threads and, on a GPU, bytes in use of the whole device."""
    lone.form(GPU)
    lone.engine.verify()
    assert lone.engine.interrupt(10.0)
    lone.engine.leave()
    gc.collect()
    counts = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    if GPU == CPU:
        return counts
    free, total = torch.cuda.mem_get_info()
    return *counts, total - free


def test_a_group_that_was_aborted_takes_no_step_and_forms_again(monkeypatch: pytest.MonkeyPatch) -> None:
    if GPU == CPU:
        monkeypatch.setattr(process_group, "_BACKENDS", {})
        aborting_backend.install()
    task = Task.of(PROBLEMS["ragged"], PARALLEL)
    expected = trained(task, GPU)
    with Lone(task, GPU) as lone:
        reports = lone.train(0, 3)
        before = lone.files()
        assert lone.engine.interrupt(10.0)
        with pytest.raises(PeerLost):
            lone.train(3, 4)
        lone.engine.leave()
        assert lone.files() == before
        used = [resources_after_abort(lone) for _ in range(ABORTS)]
        growth = [after - before for before, after in zip(used[2], used[-1], strict=True)]
        assert max(growth[:2]) < KEPT and sum(growth[2:]) < 64 << 20, used
        lone.form(GPU)
        reports += lone.train(3, len(task.feeds))
        assert_same(Run(reports=reports, state=torch_case.state(lone.files())), expected)


@pytest.mark.gpu(stand_in=False)
def test_copies_run_beside_the_step_before() -> None:
    """Most of the time of the copies lies within that of kernels, which without copies ahead none of it does."""
    rng = np.random.default_rng(0)
    plan = Task.of(SINGLE).plan

    def feed(step: int) -> Feed:
        columns = {"image": rng.random((256, 3, 160, 160), dtype=np.float32), "y": rng.integers(0, 10, 256)}
        batch = Batch(columns=columns, weights=np.ones(256), samples=np.arange(256))
        return Feed(step=step, parts=((batch,),), data_ranks=range(1), total=1, rows=256)

    spec = replace(torch_case.spec(SINGLE), model=Convolved, inputs=("image",), targets=("y",))
    shares = []
    for beside_steps in (True, False):
        with Lone(Task(spec=spec, plan=plan, feeds=()), GPU) as lone:
            prefetcher = lone.engine.prefetcher()
            assert prefetcher is not None
            feeds = [feed(step) for step in range(8)]
            lone.engine.warm(feeds[0])
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
                for one in ahead(prefetcher, feeds) if beside_steps else feeds:
                    lone.engine.train_step(one)
                torch.cuda.synchronize()
        spans = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        copies = [span for span in spans if "HtoD" in span[0] and span[2] - span[1] > 200]  # us: those of images
        kernels = [span for span in spans if "Mem" not in span[0]]
        beside = sum(
            max(min(end, stop) - max(begin, start), 0) for _, begin, end in copies for _, start, stop in kernels
        )
        shares.append(beside / sum(end - begin for _, begin, end in copies))
    assert shares[0] > 0.5 > shares[1], shares
