"""Which ways of dividing and computing a model do not go together, for planner and engines alike."""

from __future__ import annotations

from trainwright.core.plan import Plan

HALVING = ("zero_bubble", "zbv")  # orders that compute gradients of parameters later


def combination(plan: Plan) -> tuple[str, str] | None:
    """Why what a plan combines cannot be right, and what can; None where it can."""
    mesh = plan.mesh
    if mesh.pipeline == 1 or mesh.shard == 1:
        return None
    if plan.schedule in HALVING:
        reason = f"with FSDP2, schedule={plan.schedule} gives wrong losses without an error in torch (off by 7e-2)"
        return reason, "use schedule=1f1b, gpipe or interleaved, or dp in the place of fsdp"
    if plan.streamed:
        reason = f"schedule={plan.schedule} keeps two versions of a stage's weights, and FSDP2 gathers one"
        return reason, "use dp in the place of fsdp, or schedule=1f1b"
    if plan.zero != 2:
        reason = f"a pipeline gathers a stage's parameters once a step, which is ZeRO-2 and not ZeRO-{plan.zero}"
        return reason, "use zero=2"
    return None


def compiled(recompute: str, buffer: str) -> tuple[str, str] | None:
    """Why a model that torch compiles cannot be computed again so, and what can be; None where it can.

    Args:
        buffer: of the model's state, inside of what `full` computes again; empty where there is none.
    """
    if recompute == "selective":
        reason = 'compile="inductor" chooses by itself what it computes again of attention'
        return reason, "leave recompute=selective out, or use recompute=full"
    if recompute == "full" and buffer:
        reason = f"buffer {buffer!r} is in the model's state, and recompute=full would change it twice where the model "
        hint = "leave compile= or recompute= out, or register what never changes with persistent=False"
        return f"{reason}is compiled", hint
    return None
