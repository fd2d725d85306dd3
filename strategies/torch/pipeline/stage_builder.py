"""A rank's stage of a model: what a pipeline refuses, which sections the stage has, and how it is cut out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.plan import Plan, chunk_problem, section_of
from trainwright.strategies.cost_model.plan_constraints import invalid_combination, too_few_micro_batches
from trainwright.strategies.torch.pipeline.p2p import StageLinks
from trainwright.strategies.torch.pipeline.split import SplitModel
from trainwright.strategies.torch.pipeline.stage_executor import StageExecutor
from trainwright.strategies.torch.shard_layout import ShardSlice
from trainwright.strategies.torch.tensor_parallel.layer_sharding import LayerSharding
from trainwright.strategies.torch.tensor_parallel.layers import TensorParallelPlan
from trainwright.strategies.torch.training.model_blocks import compile_blocks
from trainwright.strategies.torch.training.objective import JobFunctions, Objective
from trainwright.strategies.torch.training.train_state import TorchReplica


def stage_problems(spec: ModelSpec, plan: Plan) -> list[str]:
    """Return what of a job or plan a pipeline cannot do."""
    found = []
    if spec.step is not None or not spec.inputs:
        found.append(
            "a pipeline runs the model stage by stage, so that it cannot call step=: give the job inputs=, targets= "
            "and loss="
        )
    if chunk_problem(plan.schedule, plan.chunks):
        found.append(chunk_problem(plan.schedule, plan.chunks))
    if len(plan.cuts) + 1 != plan.sections:
        counts = f"{len(plan.cuts)} cuts for {plan.sections} sections"
        found.append(f"the plan has {counts}: a plan has one cut fewer than sections")
    if plan.streamed and plan.accumulation < plan.mesh.pipeline:
        found.append(": ".join(too_few_micro_batches(plan, plan.accumulation)))
    refused = invalid_combination(plan)
    return [*found, *([": ".join(refused)] if refused else []), *spec.collation.static_problems()]


def _stage_sections(plan: Plan, stage: int) -> list[int]:
    """Return the sections of a stage, by chunk."""
    stages = plan.mesh.pipeline
    return [section_of(plan.schedule, stage=stage, stages=stages, chunk=chunk) for chunk in range(plan.chunks)]


def layout_hash(plan: Plan) -> str:
    """Return a short hash of the cuts and of the stages that hold the sections between them."""
    order = [section for stage in range(plan.mesh.pipeline) for section in _stage_sections(plan, stage)]
    return hashlib.sha256("\n".join((*plan.cuts, str(order))).encode()).hexdigest()[:8]


@dataclass(frozen=True, kw_only=True)
class PipelineStage:
    """One rank's stage.

    Attributes:
        plan: the job's.
        model: the model in sections, of which this rank keeps its own.
        slices: what this rank holds of each parameter that tensor parallelism divides.
    """

    plan: Plan
    model: SplitModel
    slices: Mapping[str, ShardSlice]

    @classmethod
    def cut_from(
        cls,
        model: nn.Module,
        stage: int,
        spec: ModelSpec,
        plan: Plan,
        layers: LayerSharding,
        layer_plan: TensorParallelPlan,
        *,
        device: torch.device,
        where: str,
    ) -> PipelineStage:
        """Keep one stage of a whole model, or this rank's part of it, and move that to the device.

        Args:
            model: whole, in host memory; other stages lose their parameters.
            stage: this rank's.
            layers: divides layers; by `layer_plan`.
            device: where the stage is to live.
            where: the rank, for errors.

        Raises:
            JobError: the model cannot be cut there, or the stage has nothing to train.
        """
        assert spec.sample is not None, "a job has a sample"
        functions = JobFunctions.on_host(spec, plan, where)
        columns = functions.inputs(spec.sample())
        slices: dict[str, ShardSlice] = {}

        def forward(module: nn.Module, tensors: Sequence[Tensor]) -> Any:
            with functions.precision():
                return functions.called(module, tensors)

        def prepare(module: nn.Module, users: Mapping[str, frozenset[int]]) -> None:
            if spec.compile == "inductor":
                compile_blocks(module, device=device, cuts=plan.cuts)
            _check_groups(layer_plan, users, where)
            slices.update(layers.shard(module, layer_plan))

        given = [columns[name] for name in spec.inputs]
        split = SplitModel(model, plan.cuts, _stage_sections(plan, stage), given, forward, where, prepare)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise JobError(
                [f"stage {stage} has no parameter to train: cut the model elsewhere, or into fewer stages"],
                where=where,
            )
        model.to(device)
        return cls(plan=plan, model=split, slices=slices)

    def executor(self, links: StageLinks, objective: Objective, replica: TorchReplica) -> StageExecutor:
        """Return what runs the steps of this stage."""
        return StageExecutor.of(self.plan, self.model, links, objective, replica)


def _check_groups(layer_plan: TensorParallelPlan, users: Mapping[str, frozenset[int]], where: str) -> None:
    """Raise JobError where a cut lies between two layers that are divided together."""
    for group in layer_plan.groups:
        used = {name: users.get(f"{name}.weight", frozenset()) for name in group}
        if len(frozenset().union(*used.values())) > 1:
            raise JobError(
                [
                    f"modules {', '.join(map(repr, group))} are divided together by tensor parallelism, and a cut "
                    "lies between them: cut the model before the first or after the last of them"
                ],
                where=where,
            )
