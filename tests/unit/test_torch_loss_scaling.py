"""Half precision with scaled losses: torch's own rules, steps that overflow, and what a checkpoint keeps of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.torch_engines import Files, Net, batch, feed, loss, one_device, plan, saved, spec
from trainwright.core.data import StepReport
from trainwright.core.errors import JobError, NonFiniteLoss
from trainwright.strategies.torch.engines.base import OneDevice
from trainwright.strategies.torch.training.train_state import LossScale

HALF = plan(precision="fp16")
LARGE = 300.0  # times the loss: as much too large as a few halvings mend


def large(outputs: Tensor, targets: Tensor) -> Tensor:
    return LARGE * loss(outputs.float(), targets)


def too_large(outputs: Tensor, targets: Tensor) -> Tensor:
    return 1e12 * loss(outputs.float(), targets)


def steps(engine: OneDevice, numbers: range) -> list[StepReport]:
    return [engine.train_step(feed(batch(first=step * 100), step=step)) for step in numbers]


def scale_of(files: Files) -> Any:
    return json.loads(files.files["state.json"])["scale"]


def test_the_rules_are_torchs_own() -> None:
    scale, factor, since = LossScale(), torch.full((), 2.0**16), torch.zeros((), dtype=torch.int32)
    for step in range(9000):
        bad = step % 4500 in (0, 1, 2100)
        scale = scale.overflowed() if bad else scale.applied()
        torch._amp_update_scale_(factor, since, torch.tensor(float(bad)), 2.0, 0.5, 2000)
        assert (scale.factor, scale.since) == (factor.item(), since.item())
    own = torch.amp.GradScaler("cpu")
    assert (own.get_scale(), own.get_growth_factor(), own.get_backoff_factor()) == (2.0**16, 2.0, 0.5)
    assert own.get_growth_interval() == 2000


def test_a_step_that_overflows_changes_nothing_and_halves_the_scale() -> None:
    engine = one_device(spec(loss=large, clip_norm=1.0), HALF)
    before = saved(engine).files["model.safetensors"]
    reports = steps(engine, range(12))
    over = [report.overflowed for report in reports]
    assert over[:3] == [True] * 3 and over.count(False) >= 4
    assert [report.step for report in reports] == [*range(1, 13)]
    assert all((report.gradient_norm is None) == report.overflowed for report in reports)
    assert scale_of(saved(engine)) == [2.0 ** (16 - sum(over)), over[::-1].index(True)]
    plain = one_device(spec(loss=large, clip_norm=1.0))
    applied = [one for one in reports if not one.overflowed]
    expected = [steps(plain, range(one.step - 1, one.step))[0] for one in applied]
    assert [one.loss for one in applied] == pytest.approx([one.loss for one in expected], rel=1e-2)
    norms = [one.gradient_norm for one in expected]
    assert [one.gradient_norm for one in applied] == pytest.approx(norms, rel=1e-2)
    other = one_device(spec(loss=large, clip_norm=1.0), HALF)
    steps(other, range(3))
    assert saved(other).files["model.safetensors"] == before


def test_a_checkpoint_keeps_the_scale() -> None:
    engine = one_device(spec(loss=large), HALF)
    steps(engine, range(7))
    files = saved(engine)
    other = one_device(spec(loss=large), HALF)
    other.load(files)
    assert scale_of(saved(other)) == scale_of(files) != [2.0**16, 0]
    assert steps(engine, range(7, 9)) == steps(other, range(7, 9)) and saved(engine).files == saved(other).files
    plain = one_device(spec(loss=large))
    plain.load(files)
    other.load(saved(plain))
    assert scale_of(saved(other)) == [2.0**16, 0]


def test_a_gradient_too_large_without_a_scale_is_told() -> None:
    engine = one_device(spec(loss=too_large), HALF)
    reports = steps(engine, range(16))
    assert all(report.overflowed for report in reports) and scale_of(saved(engine)) == [1.0, 0]
    with pytest.raises(NonFiniteLoss, match="the gradient's norm became"):
        steps(engine, range(16, 17))


def test_a_loss_of_many_values_for_each_sample_finds_its_scale_below_one() -> None:
    """Such as that of pixels: backward computes their sum, and divides afterwards."""

    def dense(outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(outputs.float(), targets).unsqueeze(1).expand(-1, 2**18)

    engine = one_device(spec(loss=dense, clip_norm=1.0), HALF)
    over = [report.overflowed for report in steps(engine, range(24))]
    assert over.count(True) > 16 and not any(over[-4:])
    with pytest.raises(NonFiniteLoss, match="the gradient's norm became"):
        steps(one_device(spec(loss=lambda o, t: 1e12 * dense(o, t)), HALF), range(17 + 18))


def test_a_loss_that_is_not_finite_is_no_overflow() -> None:
    engine = one_device(spec(loss=lambda outputs, targets: loss(outputs, targets) * float("inf")), HALF)
    with pytest.raises(NonFiniteLoss, match="the loss became inf"):
        steps(engine, range(1))
    assert scale_of(saved(engine)) == [2.0**16, 0]


def test_a_model_in_half_precision_is_refused() -> None:
    with pytest.raises(JobError, match="small updates are lost: return the model in float32"):
        one_device(spec(model=lambda: Net(dtype=torch.float16)), HALF)
