"""The engines under test and how many workers each is tried with."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tests.support.conformance import problems
from tests.support.conformance.harness import Pool, World
from tests.support.conformance.problems import Ids, Problem
from trainwright.core.data import Columns, Feed
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Mesh, Plan


class Framework(Protocol):
    """What a new framework provides, as a module `tests/support/conformance/<framework>_case.py`."""

    def spec(self, problem: Problem) -> ModelSpec:
        """The problem as a job of the framework. Its functions are found by name in the module, so they can be sent."""

    def by_hand(
        self, problem: Problem, start: Mapping[str, Any], steps: Sequence[Ids], data: Columns
    ) -> tuple[list[float], list[float], Mapping[str, Any]]:
        """Losses, gradient norms before clipping and last parameters of a plain loop over whole global batches."""

    def parameters(self, files: Mapping[str, bytes]) -> dict[str, Any]:
        """Parameters by name, from the files that the engine saved."""

    def state(self, files: Mapping[str, bytes]) -> dict[str, Any]:
        """All that training changes, as numpy arrays by name, from the files that the engine saved."""


STAGES = 2  # of a pipeline
IMPORTS = {
    "reference": (),
    "torch": (
        "torch.nn.parallel",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "trainwright.strategies.torch.tensor_parallel.plan_search",
    ),
    "tensorflow": ("tensorflow", "keras"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine.

    Attributes:
        name: in the tests' ids.
        framework: names the module that knows its jobs and files.
        engine: import path, `module:Class`.
        workers: numbers of workers to try.
        devices: data ranks of one worker.
        topology: of the engine.
        in_place: whether a new generation forms in the same processes.
        interruptible: whether `interrupt` frees a blocked call; one that answers False has its process killed.
        variant: it differs too little from another case to be part of every test.
        problems: names of the problems to try; all by default.
        copies: ranks that hold each part of a divided model; 0 where the model is not divided.
        zero: what is divided.
        schedule: of a pipeline of two stages; empty where there is none.
        mesh: of a product.
        tensor_plan: of the job.
    """

    name: str
    framework: str
    engine: str
    workers: tuple[int, ...] = (1, 2, 3, 4)
    devices: int = 1
    topology: str = "collective"
    in_place: bool = True
    interruptible: bool = True
    variant: bool = False
    problems: tuple[str, ...] = tuple(problems.PROBLEMS)
    copies: int = 0
    zero: int = 0
    schedule: str = ""
    mesh: Mesh | None = None
    tensor_plan: Mapping[str, str] = field(default_factory=dict)

    def losing(self, workers: int) -> range:
        """Ranks that compute a loss."""
        return range(workers - workers // STAGES, workers) if self.schedule and workers > 1 else range(workers)

    @property
    def imports(self) -> tuple[str, ...]:
        """Modules that its processes need and that take time to import."""
        return (
            self.engine.partition(":")[0],
            f"tests.support.conformance.{self.framework}_case",
            *IMPORTS[self.framework],
        )

    @property
    def code(self) -> Framework:
        """The framework's module."""
        return importlib.import_module(f"tests.support.conformance.{self.framework}_case")  # type: ignore[return-value]

    def plan(self, problem: Problem, workers: int) -> Plan:
        """The plan for so many workers."""
        plan = problems.plan_of(problem, self.engine, workers, self.devices, self.topology)
        if self.mesh and workers > 1:
            cuts = ("second",) if self.mesh.pipeline > 1 else ()
            return replace(plan, mesh=self.mesh, schedule=self.schedule, cuts=cuts, zero=self.zero)
        if self.schedule and workers > 1:
            mesh = Mesh(pipeline=STAGES, data=workers // STAGES)
            return replace(plan, mesh=mesh, schedule=self.schedule, cuts=("second",))
        if self.schedule:
            return plan
        mesh = Mesh(data=self.copies, shard=workers // self.copies) if self.copies else plan.mesh
        return replace(plan, mesh=mesh, zero=self.zero)

    def world(self, pool: Pool, problem: Problem, workers: int, *, fresh: bool = False) -> World:
        """Processes for it."""
        plan, spec = self.plan(problem, workers), replace(self.code.spec(problem), tensor_plan=self.tensor_plan)
        return World(pool, self.framework, plan, spec, reusable=self.in_place, fresh=fresh)

    def feeds(self, problem: Problem, workers: int, steps: range) -> list[list[Feed]]:
        """For each step, each worker's feed."""
        plan, data, ids = self.plan(problem, workers), problems.columns(problem), problems.batches(problem, steps.stop)
        return [problems.feeds(problem, plan, step, ids[step], data) for step in steps]


REFERENCE, TENSORFLOW = "tests.support.reference", "trainwright.strategies.tensorflow"
KERAS: dict[str, Any] = {"framework": "tensorflow", "in_place": False, "interruptible": False}
CASES = (
    Case(name="reference", framework="reference", engine=f"{REFERENCE}.collective:Reference", workers=(2,)),
    Case(
        name="torch-one-device",
        framework="torch",
        engine="trainwright.strategies.torch.engines.base:OneDevice",
        interruptible=False,
        workers=(1,),
    ),
    Case(
        name="torch-data-parallel",
        framework="torch",
        engine="trainwright.strategies.torch.engines.data_parallel:DataParallel",
    ),
    Case(
        name="torch-sharded",
        framework="torch",
        engine="trainwright.strategies.torch.engines.fsdp:Sharded",
        workers=(3,),
        problems=("ragged", "empty_shares", "clip"),
        copies=1,
        zero=3,
    ),
    Case(
        name="torch-zero-1",
        framework="torch",
        engine="trainwright.strategies.torch.engines.fsdp:Sharded",
        workers=(2,),
        variant=True,
        problems=("ragged", "clip", "weights", "empty_shares"),
        copies=1,
        zero=1,
    ),
    Case(
        name="torch-zero-2",
        framework="torch",
        engine="trainwright.strategies.torch.engines.fsdp:Sharded",
        workers=(2,),
        variant=True,
        problems=("weights",),
        copies=1,
        zero=2,
    ),
    Case(
        name="torch-hybrid-shard",
        framework="torch",
        engine="trainwright.strategies.torch.engines.fsdp:Sharded",
        workers=(4,),
        variant=True,
        problems=("clip",),
        copies=2,
        zero=3,
    ),
    Case(
        name="torch-pipeline",
        framework="torch",
        engine="trainwright.strategies.torch.engines.pipeline:Pipeline",
        workers=(2,),
        copies=1,
        schedule="1f1b",
    ),
    Case(
        name="torch-pipelines",
        framework="torch",
        engine="trainwright.strategies.torch.engines.pipeline:Pipeline",
        workers=(4,),
        problems=("ragged", "clip", "weights"),
        copies=2,
        schedule="gpipe",
    ),
    Case(
        name="torch-zero-bubble",
        framework="torch",
        engine="trainwright.strategies.torch.engines.pipeline:Pipeline",
        workers=(2,),
        variant=True,
        problems=("ragged", "empty_shares"),
        copies=1,
        schedule="zero_bubble",
    ),
    Case(
        name="torch-tensor-parallel",
        framework="torch",
        engine="trainwright.strategies.torch.engines.tensor_parallel:TensorParallel",
        workers=(2,),
        problems=("ragged", "weights", "empty_shares"),
        copies=1,
        mesh=Mesh(tensor=2),
    ),
    Case(
        name="torch-dp-x-tp",
        framework="torch",
        engine="trainwright.strategies.torch.engines.tensor_parallel:TensorParallel",
        workers=(4,),
        variant=True,
        problems=("clip",),
        copies=2,
        mesh=Mesh(data=2, tensor=2),
    ),
    Case(
        name="torch-fsdp-x-tp",
        framework="torch",
        engine="trainwright.strategies.torch.engines.fsdp:Sharded",
        workers=(4,),
        variant=True,
        problems=("ragged",),
        copies=1,
        mesh=Mesh(shard=2, tensor=2),
        zero=3,
    ),
    Case(
        name="torch-fsdp-x-pp",
        framework="torch",
        engine="trainwright.strategies.torch.engines.pipeline:Pipeline",
        workers=(4,),
        variant=True,
        problems=("empty_shares",),
        copies=1,
        mesh=Mesh(pipeline=2, shard=2),
        schedule="1f1b",
        zero=1,
    ),
    Case(
        name="torch-pp-x-tp",
        framework="torch",
        engine="trainwright.strategies.torch.engines.pipeline:Pipeline",
        workers=(4,),
        variant=True,
        problems=("weights",),
        copies=1,
        mesh=Mesh(pipeline=2, tensor=2),
        schedule="gpipe",
        tensor_plan={"first": "gathered", "second": "gathered"},  # a block of two would be cut apart
    ),
    Case(
        name="tf-one-device",
        engine=f"{TENSORFLOW}.strategy_engines:TensorFlowOneDevice",
        workers=(1,),
        variant=True,  # those of TensorFlow differ in their strategy alone: the one of several workers stands for all
        problems=("ragged", "tokens"),
        **KERAS,
    ),
    Case(
        name="tf-mirrored",
        engine=f"{TENSORFLOW}.strategy_engines:Mirrored",
        workers=(1,),
        devices=2,
        variant=True,
        problems=("ragged", "weights", "clip", "tokens"),
        **KERAS,
    ),
    Case(
        name="tf-central-storage",
        engine=f"{TENSORFLOW}.strategy_engines:CentralStorage",
        workers=(1,),
        devices=2,
        variant=True,
        problems=("ragged", "clip"),
        **KERAS,
    ),
    Case(
        name="tf-multi-worker-mirrored",
        engine=f"{TENSORFLOW}.strategy_engines:MultiWorkerMirrored",
        workers=(2,),
        problems=("ragged", "weights", "schedule", "silent_step"),  # the other two of sums are in three workers
        **KERAS,
    ),
    Case(
        name="tf-three-workers-mirrored",
        engine=f"{TENSORFLOW}.strategy_engines:MultiWorkerMirrored",
        workers=(3,),
        variant=True,
        problems=("empty_shares", "tokens"),
        **KERAS,
    ),
)


def sizes(*wanted: int, in_place: bool = False, copied: bool = False) -> list[tuple[Case, int]]:
    """Cases with each wanted number of workers that they are tried with; the largest that they have where none fits.

    Args:
        in_place: only those whose processes form one group after the other.
        copied: only those in which another rank holds what a rank holds.
    """
    return [
        (case, workers)
        for case in CASES
        if not case.variant and (case.in_place or not in_place) and (case.copies != 1 or not copied)
        for workers in case.workers
        if workers in wanted or (workers == case.workers[-1] and not set(wanted) & set(case.workers))
    ]


def several(*wanted: int, **only: bool) -> list[tuple[Case, int]]:
    """Like `sizes`, without cases that have one worker only."""
    return [(case, workers) for case, workers in sizes(*wanted, **only) if workers > 1]


def new_process() -> list[tuple[Case, int]]:
    """Cases whose new generation needs new processes, without variants."""
    return [(case, case.workers[0]) for case in CASES if not case.in_place and not case.variant]


def variants() -> list[tuple[Case, int]]:
    """Cases that `sizes` leaves out."""
    return [(case, workers) for case in CASES if case.variant for workers in case.workers]


def label(value: object) -> str | None:
    """Test ids."""
    if isinstance(value, Case):
        return value.name
    return value.name if isinstance(value, Problem) else None
