"""A rank alone in its group, in this process, on whichever device."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.gpu import STAND_IN
from tests.support.conformance import problems, torch_case
from tests.support.conformance.problems import Problem
from tests.support.conformance.rank import Files
from trainwright.core.data import Feed, StepReport
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Plan
from trainwright.core.topology import Generation, Group, Peer

GPU, CPU = os.environ.get(STAND_IN, "cuda:0"), "cpu"
TORCH = "trainwright.strategies.torch"
ONE_DEVICE, PARALLEL = (
    f"{TORCH}.engines.base:OneDevice",
    f"{TORCH}.engines.data_parallel:DataParallel",
)  # over NCCL on a GPU
GENERATION = Generation(token=1, number=1)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, and how.

    Attributes:
        spec: the job.
        plan: of one worker.
        feeds: of each step.
    """

    spec: ModelSpec
    plan: Plan
    feeds: Sequence[Feed]

    @classmethod
    def of(cls, problem: Problem, engine: str = ONE_DEVICE, spec: ModelSpec | None = None, **choices: Any) -> Task:
        """All steps of a problem of the conformance suite, with its job or another one on its columns."""
        plan = replace(problems.plan_of(problem, engine, 1, 1, "collective"), **choices)
        data, ids = problems.columns(problem), problems.batches(problem)
        feeds = [problems.feeds(problem, plan, step, rows, data)[0] for step, rows in enumerate(ids)]
        return cls(spec=spec or torch_case.spec(problem), plan=plan, feeds=feeds)


class Lone:
    """An engine that has built."""

    def __init__(self, task: Task, device: str) -> None:
        module, _, name = task.plan.engine.partition(":")
        self.engine = getattr(importlib.import_module(module), name)()
        self.form(device)
        self.engine.build(task.spec, task.plan)
        self.engine.transfer(())
        self._feeds = task.feeds

    def form(self, device: str) -> None:
        """A group of its own."""
        peer = Peer(rank=0, address=self.engine.reserve("worker"))
        self.engine.form(Group(generation=GENERATION, rank=0, peers=(peer,), devices=(device,)))

    def train(self, first: int, until: int) -> list[StepReport]:
        """The steps from `first` on and before `until`."""
        return [self.engine.train_step(feed) for feed in self._feeds[first:until]]

    def files(self) -> dict[str, bytes]:
        """A checkpoint."""
        files = Files()
        self.engine.save(self.engine.snapshot(), files)
        return files.files

    def load(self, files: dict[str, bytes]) -> None:
        """Take a checkpoint."""
        self.engine.load(Files(files))

    def __enter__(self) -> Lone:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.leave()


@dataclass(frozen=True, kw_only=True)
class Run:
    """Steps that were taken, and all that training had changed after them."""

    reports: Sequence[StepReport]
    state: dict[str, Any]


def trained(task: Task, device: str, *, moved_to: str = "", at: int = 0) -> Run:
    """All steps of a task; with `moved_to` through a checkpoint before step `at`, which another device goes on from."""
    steps = len(task.feeds)
    with Lone(task, device) as first:
        reports = first.train(0, at if moved_to else steps)
        files = first.files()
    if moved_to:
        with Lone(task, moved_to) as second:
            second.load(files)
            reports += second.train(at, steps)
            files = second.files()
    return Run(reports=reports, state=torch_case.state(files))
