"""Pipelines: contiguous stages of layers (Huang et al., 2019), with tensor ranks and replicas of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from trainwright.core.plan import STREAMED_SCHEDULES, InfeasiblePlan, Mesh, Plan
from trainwright.strategies.search.plan_request import PlanRequest, divisors, engine_for
from trainwright.strategies.tensor_parallel import degrees

FRAMEWORKS = ("torch",)
ENGINES: Mapping[str, str] = {"torch": "trainwright.strategies.torch.engines.pipeline:Pipeline"}
STALE = "gradients are one step stale (2BW): each step's are taken at the weights that the last update started from"
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zbv", 2), ("gpipe", 1), ("pipedream", 1))


def propose(question: PlanRequest) -> Iterator[Plan | InfeasiblePlan]:
    """Numbers of stages that divide the ranks, with each tensor degree, plain or with ZeRO, in each schedule.

    No engine divides the optimizer's state alone (ZeRO-1).
    """
    meshes = list(stages_of(question))
    refusal = whole("pipeline", question)
    if refusal or not meshes:
        yield refusal or indivisible("pipeline", question)
        return
    for mesh in meshes:
        refusal = question.unequal("pipeline", mesh.data)
        if refusal:
            yield refusal
            continue
        for schedule, chunks in _schedules(question):
            if chunks * mesh.pipeline <= question.profile.most_stages:
                yield from _plans(question, mesh, schedule, chunks)


def _schedules(question: PlanRequest) -> Iterator[tuple[str, int]]:
    """Each schedule with its chunks, of interleaved ones as many as the job says; stale ones if it asks."""
    choices = question.pins.choices
    for schedule, chunks in SCHEDULES:
        if schedule not in STREAMED_SCHEDULES or schedule == choices.get("schedule"):
            yield schedule, choices.get("chunks", chunks) if schedule == "interleaved" else chunks


def stages_of(question: PlanRequest) -> Iterator[Mesh]:
    """Meshes with several stages over all ranks."""
    ranks, layers = question.ranks, question.profile.most_stages
    for tensor in degrees(question):
        for stages in divisors(ranks // tensor):
            if 1 < stages <= layers and not ranks % (tensor * stages):
                yield Mesh(pipeline=stages, data=ranks // tensor // stages, tensor=tensor)


def whole(strategy: str, question: PlanRequest) -> InfeasiblePlan | None:
    """Why a model cannot run in stages, whatever they are."""
    refusal = question.alone(strategy) or question.without_engine(strategy)
    if refusal:
        return refusal
    reason = hint = ""
    if question.own_step:
        reason = "step= calls the model as a whole"
        hint = "give the job inputs=, targets= and loss= instead"
    elif question.profile.keras_backend:
        reason = "Keras calls its layers in a way that cannot be followed and left in the middle"
        hint = 'use strategy="sharded" or "data_parallel"'
    elif question.profile.untraced:
        reason = "the model's forward cannot be followed, so that there is no saying where it may be cut"
        hint = f"it raised {question.profile.untraced}"
    elif question.profile.uncut:
        reason, _, hint = question.profile.uncut.rpartition(": ")
    elif question.pins.mesh and question.pins.mesh.pipeline > question.profile.most_stages:
        reason = f"{question.pins.mesh.pipeline} stages for {_counted(question)}"
        hint = f"use pp={question.profile.most_stages} or fewer"
    return InfeasiblePlan(strategy=strategy, reason=reason, hint=hint) if reason else None


def indivisible(strategy: str, question: PlanRequest) -> InfeasiblePlan:
    """No number of stages that the ranks allow can be made of the layers."""
    reason = f"a model of {_counted(question)} cannot be divided for {question.ranks} ranks"
    return InfeasiblePlan(
        strategy=strategy, reason=reason, hint="build the model of more modules, or use fewer workers"
    )


def _counted(question: PlanRequest) -> str:
    """Layers that may be stages, in words."""
    most, layers = question.profile.most_stages, len(question.profile.layers)
    counted = "one layer" if most == 1 else f"{most} layers"
    return counted if most == layers else f"{counted} that {'is' if most == 1 else 'are'} trained, of {layers}"


def _plans(question: PlanRequest, mesh: Mesh, schedule: str, chunks: int) -> Iterator[Plan]:
    engine = engine_for(ENGINES, question)
    plain = question.plan("pipeline", engine, mesh, schedule=schedule, chunks=chunks)
    yield replace(plain, notes=(*plain.notes, STALE)) if plain.streamed else plain
    if mesh.data > 1:
        divided = Mesh(pipeline=mesh.pipeline, shard=mesh.data, tensor=mesh.tensor)
        for zero in (1, 2):
            named = engine if zero == 2 else ""
            yield question.plan("pipeline", named, divided, zero=zero, schedule=schedule, chunks=chunks)
    pinned = question.pins.mesh
    if pinned and pinned.shard > 1 and pinned.data > 1 and replace(pinned, data=pinned.data_ranks, shard=1) == mesh:
        yield question.plan("pipeline", engine, pinned, zero=2, schedule=schedule, chunks=chunks)
