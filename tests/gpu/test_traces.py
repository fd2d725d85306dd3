"""What is seen of steps on a GPU: kernels in a trace, and the peak of the memory."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from tests.gpu.lone import GPU, ONE_DEVICE, PARALLEL, Lone, Task
from tests.gpu.test_engines import ATTENTIVE, WIDE
from trainwright.strategies.torch.step_trace import TorchTraceRecorder

pytestmark = pytest.mark.gpu(stand_in=False)


@pytest.mark.parametrize("engine", [ONE_DEVICE, PARALLEL], ids=["one device", "over NCCL"])
def test_a_trace_has_the_kernels_of_its_steps(engine: str, tmp_path: Path) -> None:
    with Lone(Task.of(ATTENTIVE, engine, spec=WIDE), GPU) as lone:
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


def test_the_peak_is_that_of_the_allocator() -> None:
    with Lone(Task.of(ATTENTIVE, spec=WIDE), GPU) as lone:
        lone.train(0, 3)
        peak = lone.engine.peak_memory()
        assert peak is not None
        assert 0 < torch.cuda.memory_allocated() <= peak.allocated_bytes <= peak.reserved_bytes
        assert peak.allocated_bytes == torch.cuda.max_memory_allocated()
