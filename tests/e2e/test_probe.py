"""Accelerators measured where they are."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import trainwright as tw
from trainwright.cli.main import app
from trainwright.core.cluster import ACCELERATORS, Accelerator, Cluster, Node
from trainwright.core.errors import ResourceError
from trainwright.planning import profiler
from trainwright.planning.profiler import _benchmark, _unknown_kinds


def test_a_core_is_measured_and_plans_know_it(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "ACCELERATORS", measured := {})
    done = CliRunner().invoke(app, ["probe", "--all"])
    assert done.exit_code == 0, done.output
    core = measured["CPU"]
    assert 1e9 < core.flops_per_s["fp32"] < 1e12 and 1e9 < core.memory_bytes_per_s < 1e12
    read: dict[str, Accelerator] = {}
    exec(done.stdout.replace("import ACCELERATORS, ", "import "), {"ACCELERATORS": read})
    assert read["CPU"].flops_per_s["fp32"] == pytest.approx(core.flops_per_s["fp32"], rel=0.01)
    gpt = tw.transformer_profile(hidden=256, layers=2, heads=4, sequence=128, vocabulary=1000)
    cpus, plan = tw.Cluster.parse("4xCPU"), tw.Plan.parse("dp=2")
    steps = []
    for speed in (1, 10):
        quicker = {name: rate * speed for name, rate in core.flops_per_s.items()}
        monkeypatch.setitem(ACCELERATORS, "CPU", Accelerator(**{**vars(core), "flops_per_s": quicker}))
        steps.append(tw.estimate(gpt, cpus, plan, batch_size=64, precision="fp32").terms["compute"])
    assert steps[0] > 2 * steps[1]


def test_a_device_that_torch_cannot_use_is_said(ray_cluster: None) -> None:
    with pytest.raises(ResourceError, match="a TPU cannot be measured yet"):
        _benchmark("TPU-V9", "TPU")
    unnamed = Node(name="a", cpus=4, memory_bytes=0, accelerators=1, accelerator="GPU")
    with pytest.raises(ResourceError, match="Ray does not say which GPU"):
        _unknown_kinds(Cluster(nodes=(unnamed,)), False)
    assert _unknown_kinds(tw.Cluster.parse("2xA100-80GB + 4xL4"), False) == []
    assert _unknown_kinds(tw.Cluster.parse("2xA100-80GB"), True) == [("A100-80GB", "GPU"), ("CPU", "CPU")]
