"""What the torch engines measure beside the step: the noise of its gradients and the time of its phases."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.rank_processes import Exchange, formed, run_ranks
from tests.support.torch_engines import Net, batch, double, feed, loss, one_device, plan, saved, spec
from trainwright.core import data
from trainwright.core.data import SAMPLE_EVERY_EARLY, Batch, Feed, GradientScatter, StepReport
from trainwright.strategies.torch import step_trace
from trainwright.strategies.torch.checkpoint.safetensors_files import load_weights
from trainwright.strategies.torch.step_trace import PhaseTimer

SAMPLED = SAMPLE_EVERY_EARLY - 1  # the first step that is


def still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def empty(given: Batch) -> Batch:
    return dataclasses.replace(given, weights=np.zeros(given.rows))


def scatter_by_hand(weights: Any, shares: Sequence[Batch]) -> GradientScatter:
    """From the gradient of each share's summed loss."""
    model = double()
    model.load_state_dict(weights)
    sums, rows = [], []
    for share in shares:
        chosen = share.weights > 0
        model.zero_grad()
        outputs = model(torch.from_numpy(share.columns["x"][chosen]))
        loss(outputs, torch.from_numpy(share.columns["y"][chosen])).sum().backward()
        sums.append(torch.cat([item.grad.reshape(-1) for item in model.parameters() if item.grad is not None]))
        rows.append(int(chosen.sum()))
    whole = sum(sums[1:], start=sums[0])
    parts = sum(float(one @ one) / count for one, count in zip(sums, rows, strict=True) if count)
    return GradientScatter(samples=sum(rows), shares=sum(map(bool, rows)), parts=parts, whole=float(whole @ whole))


def test_micro_batches_of_one_device_tell_the_noise_in_the_step_after() -> None:
    shares = [batch(5, dtype=np.float64), batch(9, first=7, dtype=np.float64), empty(batch(2, dtype=np.float64))]
    job = spec(model=double, optimizer=still)
    engine = one_device(job, plan(accumulation=3))
    expected = scatter_by_hand(load_weights(saved(engine)), shares)
    reports = [engine.train_step(feed(*shares, step=step)) for step in range(SAMPLED - 1, SAMPLED + 3)]
    assert [report.scatter is not None for report in reports] == [False, False, True, False]
    assert dataclasses.asdict(_told(reports[2])) == pytest.approx(dataclasses.asdict(expected), rel=1e-10)
    assert all(report.gradient_norm is None for report in reports)


def test_one_share_tells_nothing() -> None:
    engine = one_device(spec(model=double, optimizer=still))
    for step in range(SAMPLED, SAMPLED + 3):
        assert engine.train_step(feed(batch(8, dtype=np.float64), step=step)).scatter is None


def test_a_step_of_no_weight_or_no_finite_loss_tells_nothing() -> None:
    engine = one_device(spec(model=double, optimizer=still), plan(accumulation=2))
    shares = [empty(batch(4, dtype=np.float64))] * 2
    engine.train_step(feed(*shares, step=SAMPLED, rows=8))
    assert engine.train_step(feed(*shares, step=SAMPLED + 1, rows=8)).scatter is None


def part_of(rank: int, step: int, *, micros: int, dtype: type) -> Feed:
    """Uneven shares; the last micro-batch of rank 1 has no sample of its own."""
    shares = [batch(3 + rank + 2 * micro, first=100 * step + 10 * rank + micro, dtype=dtype) for micro in range(micros)]
    if rank == 1:
        shares[-1] = empty(shares[-1])
    return feed(*shares, step=step, rank=rank, rows=0)


def global_feed(rank: int, world: int, step: int, *, micros: int, dtype: type = np.float64) -> tuple[Feed, list[Batch]]:
    feeds = [part_of(each, step, micros=micros, dtype=dtype) for each in range(world)]
    shares = [share for one in feeds for share in one.parts[0]]
    rows = sum(int(share.weights.sum()) for share in shares)
    return dataclasses.replace(feeds[rank], rows=rows, total=world), shares


def _scattered(micros: int, rank: int, world: int, exchange: Exchange) -> tuple[Any, Any]:
    engine = formed(rank, exchange, spec(model=double, optimizer=still))
    weights, (_, shares) = load_weights(saved(engine)), global_feed(rank, world, SAMPLED, micros=micros)
    reports = [engine.train_step(global_feed(rank, world, SAMPLED + ahead, micros=micros)[0]) for ahead in range(3)]
    assert reports[0].scatter is None and reports[2].scatter is None
    return dataclasses.asdict(_told(reports[1])), dataclasses.asdict(scatter_by_hand(weights, shares))


@pytest.mark.parametrize(("world", "micros"), [(2, 1), (3, 2)])
def test_ranks_tell_the_noise_of_all_shares_alike(world: int, micros: int) -> None:
    found = run_ranks(partial(_scattered, micros), world)
    for told, expected in found:
        assert told == pytest.approx(expected, rel=1e-10)
        assert told == found[0][0]


def _trained(every: int, rank: int, world: int, exchange: Exchange) -> bytes:
    data.SAMPLE_EVERY_EARLY = every
    engine = formed(rank, exchange, spec(model=double, clip_norm=0.5))
    for step in range(6):
        given, _ = global_feed(rank, world, step, micros=2)
        engine.train_step(given)
    return saved(engine).files["model.safetensors"]


def test_sampling_changes_no_bit_of_the_training() -> None:
    often = run_ranks(partial(_trained, 1), 3)
    never = run_ranks(partial(_trained, 10**9), 3)
    assert often == never and len(set(often)) == 1 and len(often[0]) > 100


def _told(report: StepReport) -> GradientScatter:
    assert report.scatter is not None
    return report.scatter


class Backwards(Net):
    """Its first parameter is used last, so that its gradient comes first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.0 * self.last.sum()

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Parameter(torch.ones(1))
        self._parameters = {"last": self._parameters["last"]}


@pytest.mark.parametrize("model", [Net, Backwards])
def test_the_phases_of_each_step_on_a_cpu_add_up_to_less_than_the_step(model: Any) -> None:
    engine = one_device(spec(model=model), plan(accumulation=2))
    shares = []
    for step in range(3):
        given, begun = feed(batch(), batch(first=1), step=step), time.perf_counter()
        report = engine.train_step(given)
        took = time.perf_counter() - begun
        assert report.phases is not None and set(report.phases) == {"forward", "backward", "optimizer"}
        assert all(seconds > 0 for seconds in report.phases.values())
        shares.append(sum(report.phases.values()) / took)
        assert report.own_s is not None and report.own_s <= report.phases["forward"] + report.phases["backward"] + 1e-4
    assert 0.2 < max(shares) <= 1, "in the step that other processes held up least"
    assert engine.train_step(feed(batch(), batch(first=1), step=SAMPLED)).phases is None


def slow_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    time.sleep(0.2 * int(torch.distributed.get_rank()))
    return loss(outputs, targets)


def _waited(model: Any, rank: int, world: int, exchange: Exchange) -> dict[str, float]:
    engine = formed(rank, exchange, spec(model=model, loss=slow_loss))
    for step in range(2):
        given, _ = global_feed(rank, world, step, micros=1, dtype=np.float32)
        report = engine.train_step(given)
    assert report.phases is not None
    return dict(report.phases)


@pytest.mark.parametrize("model", [Net, Backwards])
def test_waiting_for_a_slow_rank_is_told_from_computing(model: Any) -> None:
    quick, slow = run_ranks(partial(_waited, model), 2)
    assert set(quick) == set(slow) == {"forward", "backward", "wait", "optimizer"}
    assert slow["forward"] > 0.2 > quick["forward"]
    assert quick["wait"] > 0.1 > slow["wait"]
    assert quick["backward"] < 0.1


class Event:
    """An event of a device whose clock goes on by 2 ms from one to the next."""

    made = 0

    def __init__(self) -> None:
        Event.made += 1
        self.ms = 2.0 * Event.made

    def elapsed_time(self, other: Event) -> float:
        return other.ms - self.ms


def test_on_a_gpu_events_of_some_steps_are_read_in_the_step_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_trace, "_event", Event)
    timer, found = PhaseTimer(torch.device("cuda")), {}
    for step in range(PhaseTimer.FIRST + PhaseTimer.EVERY + 2):
        timer.begin(step)
        for reduced in (False, True):
            timer.forward()
            timer.own()
            timer.backward(reduced=reduced)
        timer.optimizer()
        found[step] = timer.ended()
        assert timer.own_s is None
    known = {step: phases for step, phases in found.items() if phases}
    expected = pytest.approx({"forward": 0.004, "backward": 0.006, "wait": 0.002, "optimizer": 0.002})
    assert known == {PhaseTimer.FIRST + 1: expected, PhaseTimer.FIRST + PhaseTimer.EVERY + 1: expected}
    assert Event.made == 2 * 8
