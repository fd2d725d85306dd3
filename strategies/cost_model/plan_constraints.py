"""Plans that are impossible."""

from __future__ import annotations

from itertools import accumulate, pairwise
from numbers import Integral

from trainwright.core.errors import PlanError, nearest
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Plan, chunk_problem
from trainwright.strategies.cost_model.pipeline_schedules import SPLIT_BACKWARD

_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


def check_request(batch_size: object, precision: object) -> None:
    """Raise PlanError unless steps can have this batch, a whole number of samples, and this precision."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, Integral) or batch_size < 1:
        raise PlanError(
            f"batch_size={batch_size!r} must be a whole number of samples, 1 or more",
            where="batch_size",
            remedy="give the global batch of one step",
        )
    if precision not in _PRECISIONS:
        raise PlanError(
            f"precision={precision!r} cannot be predicted",
            where="precision",
            remedy=nearest(str(precision), _PRECISIONS),
        )


def too_few_micro_batches(plan: Plan, micro_batches: int) -> tuple[str, str]:
    """Return why too few micro-batches cannot fill a pipeline that does not drain, and a remedy."""
    stages = plan.mesh.pipeline
    reason = f"{micro_batches} micro-batches for the {stages} stages of schedule={plan.schedule}"
    return f"{reason}: they cannot fill the pipeline", f"use accumulation={stages} or more, or schedule=1f1b"


def invalid_staging(profile: ModelProfile, plan: Plan) -> tuple[str, str] | None:
    """Return why a model cannot run in a plan's stages, and a remedy; None where it can."""
    mesh, layers = plan.mesh, len(profile.layers)
    if mesh.pipeline > 1 and profile.untraced:
        return f"its layers cannot be put into stages: tracing the model raised {profile.untraced}", "use pp=1"
    if mesh.pipeline > layers:
        return f"{mesh.pipeline} stages for {layers} layers", f"use pp={layers} or fewer"
    if chunk_problem(plan.schedule, plan.chunks):
        return chunk_problem(plan.schedule, plan.chunks), "leave chunks= out"
    if plan.sections > layers:
        return f"{plan.sections} chunks for {layers} layers", "use schedule=1f1b, or fewer stages or chunks"
    if plan.stages and (sum(plan.stages) != layers or len(plan.stages) != plan.sections):
        return f"stages={plan.stages} do not cover {layers} layers in {plan.sections} parts", "leave out"
    if plan.stages and profile.trains and plan.chunks == 1:
        for stage, (first, stop) in enumerate(pairwise(accumulate(plan.stages, initial=0))):
            if not any(layer.trained for layer in profile.layers[first:stop]):
                return f"stage {stage} of stages={plan.stages} has no layer that is trained", "leave stages= out"
    micro_batches, _ = plan.micro_batches(plan.batch_size)
    if plan.streamed and micro_batches < mesh.pipeline:
        return too_few_micro_batches(plan, micro_batches)
    if plan.schedule == "interleaved" and micro_batches % mesh.pipeline:
        return f"{micro_batches} micro-batches are not a multiple of the {mesh.pipeline} stages", "use schedule=1f1b"
    return None


# --- Combinations that planner and engines refuse ---------------------------------------------------------------------


def invalid_combination(plan: Plan) -> tuple[str, str] | None:
    """Return why a plan's combination of choices is wrong, and a remedy; None where it is right."""
    mesh = plan.mesh
    if mesh.pipeline == 1 or mesh.shard == 1:
        return None
    if plan.schedule in SPLIT_BACKWARD:
        reason = f"with FSDP2, schedule={plan.schedule} gives wrong losses without an error in torch (off by 7e-2)"
        return reason, "use schedule=1f1b, gpipe or interleaved, or dp in the place of fsdp"
    if plan.streamed:
        reason = f"schedule={plan.schedule} keeps two versions of a stage's weights, and FSDP2 gathers one"
        return reason, "use dp in the place of fsdp, or schedule=1f1b"
    if plan.zero != 1:
        reason = f"a pipeline sums the gradients of all micro-batches whole, which is ZeRO-1 and not ZeRO-{plan.zero}"
        return reason, "use zero=1"
    return None


def invalid_compile(recompute: str, buffer: str) -> tuple[str, str] | None:
    """Return why a model that torch compiles cannot recompute activations this way, and a remedy; None where it can.

    Args:
        buffer: a buffer of the model's state inside a part that `full` recomputes; empty without one.
    """
    if recompute == "selective":
        reason = 'compile="inductor" chooses by itself what it computes again of attention'
        return reason, "leave recompute=selective out, or use recompute=full"
    if recompute == "full" and buffer:
        reason = f"buffer {buffer!r} is in the model's state, and recompute=full would change it twice where the model "
        hint = "leave compile= or recompute= out, or register what never changes with persistent=False"
        return f"{reason}is compiled", hint
    return None
