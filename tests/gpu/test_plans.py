"""Engines that divide a model, with one rank: each runs its own code on the device, and its collectives over NCCL."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.gpu.lone import CPU, GPU, TORCH, Lone, Run, Task, trained
from tests.gpu.test_engines import ATTENTIVE, NEAR, SINGLE, WIDE, assert_near, assert_same
from tests.support import aborting_backend
from tests.support.conformance import torch_case
from tests.support.conformance.attention_model import HALF, Attentive
from tests.support.conformance.problems import CLASSES, FEATURES
from trainwright.core.errors import PeerLost
from trainwright.core.plan import Mesh
from trainwright.strategies.torch.distributed import process_group
from trainwright.strategies.torch.step_trace import TorchTraceRecorder

pytestmark = pytest.mark.gpu

SHARDED = f"{TORCH}.engines.fsdp:Sharded"
DIVIDED: dict[str, tuple[str, dict[str, Any]]] = {
    "zero-1": (SHARDED, {"zero": 1}),
    "zero-2": (SHARDED, {"zero": 2}),
    "zero-3": (SHARDED, {"zero": 3, "mesh": Mesh(shard=1)}),
    "offloaded": (SHARDED, {"zero": 2, "offload": True}),
    "tensor": (f"{TORCH}.engines.tensor_parallel:TensorParallel", {}),
    "pipeline": (f"{TORCH}.engines.pipeline:Pipeline", {"schedule": "1f1b"}),
}


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the CPU stands in for a GPU, something stands in for NCCL."""
    if GPU == CPU:
        monkeypatch.setattr(process_group, "_BACKENDS", {})
        aborting_backend.install()


def divided(name: str, problem: Any = ATTENTIVE, **given: Any) -> Task:
    engine, choices = DIVIDED[name]
    return Task.of(problem, engine, **{**choices, **given})


@pytest.mark.parametrize("name", DIVIDED)
def test_fifty_steps_are_those_of_one_device(name: str) -> None:
    job = replace(WIDE, model=partial(Attentive, torch.float64, dropout=0.0))
    assert_near(trained(divided(name, spec=job), GPU), trained(Task.of(ATTENTIVE, spec=job), CPU))


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize("precision", NEAR)
def test_in_half_precision_they_are_near_one_device(name: str, precision: str) -> None:
    job = replace(HALF, loss=torch_case.cross_entropy, model=partial(Attentive, torch.float32, dropout=0.0))
    found = trained(divided(name, SINGLE, spec=job, precision=precision), GPU)
    expected = trained(Task.of(SINGLE, spec=job, precision=precision), GPU)
    losses, others = ([report.loss for report in run.reports if not report.overflowed] for run in (found, expected))
    assert losses[-5:] != losses[:5]
    assert losses == pytest.approx(others, rel=NEAR[precision])


@pytest.mark.parametrize("name", DIVIDED)
def test_a_checkpoint_and_a_snapshot_go_on_to_the_same_bits(name: str) -> None:
    task = divided(name, spec=WIDE)
    expected = trained(task, GPU)
    assert_same(trained(task, GPU, moved_to=GPU, at=20), expected)
    with Lone(task, GPU) as lone:
        lone.train(0, 20)
        kept = lone.engine.snapshot()
        lone.train(20, 23)
        lone.engine.restore(kept)
        reports = [*expected.reports[:20], *lone.train(20, len(task.feeds))]
        assert_same(Run(reports=reports, state=torch_case.state(lone.files())), expected)


@pytest.mark.parametrize("name", DIVIDED)
def test_after_an_abort_the_group_forms_again_and_goes_on_to_the_same_bits(name: str) -> None:
    task = divided(name, spec=WIDE)
    expected = trained(task, GPU)
    with Lone(task, GPU) as lone:
        reports = lone.train(0, 3)
        for _ in range(2):
            before = lone.files()
            assert lone.engine.interrupt(10.0)
            with pytest.raises(PeerLost):
                lone.train(len(reports), len(reports) + 1)
            lone.engine.leave()
            assert lone.files() == before
            lone.form(GPU)
            lone.engine.transfer(())
            reports += lone.train(len(reports), len(reports) + 2)
        reports += lone.train(len(reports), len(task.feeds))
        assert_same(Run(reports=reports, state=torch_case.state(lone.files())), expected)


def large() -> nn.Module:
    """Layers of 16 MiB, which a rank that shards builds one after the other."""
    return nn.Sequential(
        nn.Linear(FEATURES, 2048), *(nn.Linear(2048, 2048) for _ in range(8)), nn.Linear(2048, CLASSES)
    )


@pytest.mark.parametrize("name", ["zero-3", "tensor", "pipeline"])
def test_what_is_built_in_parts_has_the_bits_of_one_device(name: str) -> None:
    task = divided(name, SINGLE, spec=replace(torch_case.spec(SINGLE), model=large))
    with Lone(replace(task, plan=Task.of(SINGLE).plan), CPU) as whole, Lone(task, GPU) as lone:
        found, expected = (torch_case.state(each.files()) for each in (lone, whole))
    assert found.keys() == expected.keys()
    for key in found.keys() - {"state.json"}:
        assert found[key].tobytes() == expected[key].tobytes(), key


@pytest.mark.gpu(stand_in=False)
@pytest.mark.parametrize("make", [lambda: Task.of(ATTENTIVE, spec=WIDE), lambda: divided("zero-3", spec=WIDE)])
def test_a_trace_has_the_kernels_of_its_steps(make: Callable[[], Task], tmp_path: Path) -> None:
    with Lone(make(), GPU) as lone:
        lone.train(0, 3)
        recorder = TorchTraceRecorder()
        recorder.start()
        for number in (3, 4):
            with recorder.step(number):
                lone.train(number, number + 1)
        torch.cuda.synchronize()
        recorder.stop()
        recorder.save(tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert {"ProfilerStep#3", "ProfilerStep#4"} <= {event.get("name") for event in events}
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert len(kernels) > 50 and all(event["dur"] > 0 for event in kernels)


@pytest.mark.gpu(stand_in=False)
def test_the_peak_is_that_of_the_allocator() -> None:
    with Lone(divided("zero-3", spec=WIDE), GPU) as lone:
        lone.train(0, 3)
        peak = lone.engine.peak_memory()
        assert peak is not None
        assert 0 < torch.cuda.memory_allocated() <= peak.allocated_bytes <= peak.reserved_bytes
        assert peak.allocated_bytes == torch.cuda.max_memory_allocated()
