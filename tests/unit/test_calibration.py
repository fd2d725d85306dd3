"""What the estimate knows of CPUs, and how measurements move it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import trainwright as tw
from trainwright.core.cluster import ACCELERATORS
from trainwright.core.model_profile import LayerCost, ModelProfile
from trainwright.strategies.cost_model.machine_model import CPU_CORE
from trainwright.strategies.cost_model.step_work import fsdp_units, planned_step_work

CORES = tw.Cluster.parse("2x1xCPU")
NUMBERS = tw.transformer_profile(hidden=64, layers=2, heads=4, sequence=8, vocabulary=100)


def test_measurements_move_a_speed_that_was_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of cores three times as quick in products as is assumed of any: what they give holds for other batches."""
    layer = LayerCost(name="0", parameters=10**6, parameter_bytes=4 * 10**6, flops=2e6, output_numbers=1000)
    profile = ModelProfile(framework="torch", layers=(layer,) * 8)
    about: dict[str, Any] = {"profile": profile, "cluster": CORES, "precision": "fp32"}
    plans = [tw.Plan.parse(text) for text in ("", "dp=2", "pp=2,schedule=1f1b,accumulation=4")]

    def steps(batch: int, calibration: tw.Calibration | None = None) -> list[float]:
        found = (tw.estimate(plan=plan, batch_size=batch, calibration=calibration, **about) for plan in plans)
        return [each.step_s for each in found]

    monkeypatch.setitem(ACCELERATORS, "CPU", replace(CPU_CORE, flops_per_s={"fp32": 3 * CPU_CORE.rate("fp32")}))
    batches = {batch: steps(batch) for batch in (64, 256, 1024)}
    monkeypatch.delitem(ACCELERATORS, "CPU")
    rows = [
        tw.Measurement(plan=plan, batch_size=batch, step_s=step_s, **about)
        for batch in (64, 1024)
        for plan, step_s in zip(plans, batches[batch], strict=True)
    ]
    assert min(assumed / true for assumed, true in zip(steps(256), batches[256], strict=True)) > 1.5
    assert steps(256, tw.calibrate(rows)) == pytest.approx(batches[256], rel=0.1)


def test_what_a_micro_batch_passes_over() -> None:
    """A table gives a gradient of all its rows, however few were looked up, and again for each micro-batch."""
    table = 10**7
    looked_up = LayerCost(name="0", parameters=table, parameter_bytes=4 * table, flops=0.0, matmuls=0)
    profile = ModelProfile(framework="torch", layers=(looked_up,))
    once, often = (
        tw.estimate(profile, CORES, tw.Plan.parse(text), batch_size=8, precision="fp32").terms["compute"]
        for text in ("", "accumulation=4")
    )
    assert once == pytest.approx(4 * table / CPU_CORE.memory_bytes_per_s / 0.8, rel=0.01)
    assert often == pytest.approx(4 * 4 * once, rel=0.01), "its own pass, and three to add it to those before"


def test_zeros_collectives_are_as_many_as_the_blocks_of_a_list() -> None:
    names = ("embed", "blocks.0.query", "blocks.0.out", "blocks.1.query", "blocks.1.out", "head")
    layer = LayerCost(name="", parameters=10, parameter_bytes=40, flops=20.0)
    profile = ModelProfile(framework="torch", layers=tuple(replace(layer, name=name) for name in names))
    assert fsdp_units(profile) == 3 and fsdp_units(NUMBERS) == len(NUMBERS.layers)
    zero2, zero3 = (
        planned_step_work(profile, CORES, replace(tw.Plan.parse(text), batch_size=2)).gathers
        for text in ("dp=2,zero=2", "fsdp=2")
    )
    assert (zero2, zero3) == (6, 9)
