"""Failures of a GPU: its errors, its memory, and a process that is killed while it holds it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gpu.lone import GPU, ONE_DEVICE, PARALLEL, Lone, Run, Task, trained
from tests.gpu.test_engines import SINGLE, assert_same
from tests.support.conformance import problems, torch_case
from tests.support.conformance.problems import PROBLEMS
from trainwright.core.errors import DeviceError, DeviceOutOfMemory, TrainwrightError, UserCodeError

pytestmark = pytest.mark.gpu(stand_in=False)

ANSWER_S, HELD_BYTES = 90.0, 4 << 30
FATAL = {"writes elsewhere": "*(volatile float*)8 = 1.0f;", "ends itself": 'asm("trap;");'}  # what a kernel does
Told = tuple[type[TrainwrightError], str]


class Fragile(nn.Module):
    """Runs a kernel in its third step in training; the throwaway micro-batches come first."""

    def __init__(self, body: str) -> None:
        super().__init__()
        self.net = nn.Linear(problems.FEATURES, problems.CLASSES)
        self.body, self.calls = body, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 5:
            if self.body == "assertion":
                torch.zeros(4, device=GPU)[torch.tensor([11], device=GPU)]
            else:
                code = f'extern "C" __global__ void broken() {{ {self.body} }}'
                torch.cuda._compile_kernel(code, "broken")((1, 1, 1), (1, 1, 1), ())
        outputs: Tensor = self.net(inputs)
        return outputs


def child(act: Callable[..., None], *arguments: Any) -> Any:
    """A process and this end of its pipe."""
    near, far = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=act, args=(far, *arguments), daemon=True)
    process.start()
    far.close()
    return process, near


@contextmanager
def running(act: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """A process, which is killed at the end."""
    process, pipe = child(act, *arguments)
    try:
        yield process, pipe
    finally:
        process.kill()
        process.join(ANSWER_S)
        pipe.close()


def answer(pipe: Connection) -> Any:
    assert pipe.poll(ANSWER_S), "no answer"
    return pipe.recv()


def break_device(pipe: Connection, body: str, engine: str) -> None:
    """Tell what the failing step raises, and what forming another group does."""
    spec = replace(torch_case.spec(SINGLE), model=lambda: Fragile(body), optimizer=torch.optim.SGD)
    lone = Lone(Task.of(SINGLE, engine, spec=spec), GPU)
    told = [caught(lambda: lone.train(0, 10))]
    lone.engine.leave()
    told.append(caught(lambda: lone.form(GPU)) if engine == PARALLEL else told[0])
    pipe.send(told)


def caught(work: Callable[[], object]) -> Told:
    try:
        work()
    except TrainwrightError as error:
        return type(error), str(error)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("engine", [ONE_DEVICE, PARALLEL], ids=["one device", "over NCCL"])
@pytest.mark.parametrize("body", FATAL)
def test_a_kernel_that_breaks_the_device(body: str, engine: str) -> None:
    with running(break_device, FATAL[body], engine) as (_, pipe):
        for kind, text in answer(pipe):
            assert kind is DeviceError and "the accelerator failed: CUDA error" in text, text


def test_an_assertion_of_a_kernel_is_the_jobs_error() -> None:
    with running(break_device, "assertion", PARALLEL) as (_, pipe):
        for kind, text in answer(pipe):
            assert kind is UserCodeError and "a label outside the classes" in text, text


class Hungry(nn.Module):
    """Wants more memory than any GPU has, while it is told to."""

    asks = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(problems.FEATURES, problems.CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs)
        return outputs + torch.zeros(1 << 45, device=GPU).sum() if Hungry.asks else outputs


def test_a_step_without_memory_changes_nothing_and_the_run_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(torch_case.spec(SINGLE), model=Hungry)
    task = Task.of(SINGLE, spec=spec)
    expected = trained(task, GPU)
    with Lone(task, GPU) as lone:
        reports = lone.train(0, 3)
        before = lone.files()
        monkeypatch.setattr(Hungry, "asks", True)
        with pytest.raises(DeviceOutOfMemory, match="out of memory"):
            lone.train(3, 4)
        monkeypatch.undo()
        assert lone.files() == before
        reports += lone.train(3, len(task.feeds))
        assert_same(Run(reports=reports, state=torch_case.state(lone.files())), expected)


def hold(pipe: Connection, task: Task) -> None:
    """Train, tell the state after ten steps, and keep memory of the GPU until the end comes."""
    with Lone(task, GPU) as lone:
        lone.train(0, 10)
        held = torch.zeros(HELD_BYTES, dtype=torch.uint8, device=GPU)
        pipe.send(lone.files())
        while True:
            lone.engine.snapshot()
            held.add_(1)


def test_a_killed_process_leaves_the_gpu_to_another() -> None:
    task = Task.of(PROBLEMS["clip"], PARALLEL)
    expected = trained(task, GPU)
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    with running(hold, task) as (process, pipe):
        files = answer(pipe)
        assert torch.cuda.mem_get_info()[0] < free - HELD_BYTES
        process.kill()
        begun = time.perf_counter()
        with Lone(task, GPU) as lone:
            lone.load(files)
            reports = lone.train(10, 11)
            took_s = time.perf_counter() - begun
            reports += lone.train(11, len(task.feeds))
            found = Run(reports=reports, state=torch_case.state(lone.files()))
        process.join(ANSWER_S)
    assert [report.loss for report in reports] == [report.loss for report in expected.reports[10:]]
    assert_same(replace(found, reports=()), replace(expected, reports=()))
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free - (64 << 20)
    print(f"from the kill to the end of the next step: {took_s:.3f} s")
