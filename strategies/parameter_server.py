"""Data parallelism against parameter servers: workers step alone (Dean et al., 2012; Li et al., OSDI 2014)."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.core.asynchrony import Consistency, Wire
from trainwright.core.plan import Infeasible, Mesh, Plan
from trainwright.strategies.question import Question, engine_for

FRAMEWORKS = ("torch", "reference")
ENGINES = {
    "torch": "trainwright.strategies.torch.parameter_server:ParameterServer",
    "reference": "trainwright.strategies.reference.independent:Independent",
}
ALONE = True
NO_FIT = "Keras' fit has all workers step together"
UNASKED = ("sync", "ssp(3)", "async")  # the other forms are for who asks for them
BARRIER = "all workers wait for each other at checkpoints and evaluations alone, for about the time of one unit"
COPIES = (
    "a worker may die, join or slow down at any time; a server's death sends all servers back to their last copy, so "
    "that what was acknowledged since, keeper_s seconds at most in memory, is computed again"
)
STALE = "updates come from parameters that are other workers' updates old: not equal to one device, nor twice the same"
HOGWILD = "a worker may read parameters of which some hold an update that others do not yet (as in Hogwild)"
ROUNDED = {
    "topk": "only the largest numbers of a gradient are sent, the rest with later ones: not equal to one device",
    "int8": "gradients are rounded to int8, and what that leaves over is sent later: not equal to one device",
    "fp16": "gradients are rounded to fp16, and what that leaves over is sent later: not equal to one device",
    "bf16": "gradients are rounded to bf16, and what that leaves over is sent later: not equal to one device",
}


def propose(question: Question) -> Iterator[Plan | Infeasible]:
    """A worker on each rank; one server on each node, and more, while each could hold a part of its own.

    Where the job does not say how far apart workers may be: not at all, by three steps, and by any number.
    """
    if question.pins.choices.get("local_steps", 1) > 1:
        hint = "use strategy='local_sgd', or leave local_steps out"
        yield Infeasible(strategy="parameter_server", reason="its workers push each step", hint=hint)
        return
    refusal = refused("parameter_server", question)
    if refusal:
        yield refusal
        return
    pinned = question.pins.choices.get("consistency")
    for consistency in (pinned,) if pinned else UNASKED:
        yield from served("parameter_server", question, consistency)


def refused(strategy: str, question: Question) -> Infeasible | None:
    """Why workers cannot step alone; None where they can."""
    ranks, pins = question.ranks, question.pins
    if question.profile.keras_backend:
        hint = "use data_parallel, or for a model of TensorFlow tf_parameter_server"
        return Infeasible(strategy=strategy, reason="the model is Keras': servers hold no such variables", hint=hint)
    refusal = question.alone(strategy) or question.unequal(strategy, ranks) or question.without_engine(strategy)
    if refusal:
        return refusal
    if pins.mesh and pins.mesh != Mesh(data=ranks):
        hint = "leave the other degrees out"
        return Infeasible(strategy=strategy, reason="each worker holds the whole model: dp alone divides", hint=hint)
    backup = Consistency.parse(pins.choices.get("consistency", "sync")).backup
    if backup >= ranks:
        reason = f"sync(backup={backup}) waits for none of {ranks} workers"
        return Infeasible(strategy=strategy, reason=reason, hint=f"use backup={ranks - 1} or less, or more workers")
    return None


def served(
    strategy: str, question: Question, consistency: str, *, local_steps: int = 1, outer: str = ""
) -> Iterator[Plan]:
    """Plans that differ in how many servers there are."""
    ranks, engine = question.ranks, engine_for(ENGINES, question)
    wire = question.pins.choices.get("wire", "full")
    for servers in _servers(question):
        plan = question.plan(
            strategy, engine, Mesh(data=ranks), servers=servers, topology="independent", consistency=consistency,
            wire=wire, local_steps=local_steps, outer=outer,
        )  # fmt: skip
        yield plan.noted(*_notes(Consistency.parse(consistency), Wire.parse(wire)))


def _servers(question: Question) -> list[int]:
    """As the job says; else one for each node, and twice as many as often as there are as many ranks.

    Where nodes may be taken back also fewer: the loss of one with a server is what all must go back for.
    """
    pinned = question.pins.choices.get("servers")
    if pinned:
        return [pinned]
    nodes = min(len(question.cluster.nodes), question.ranks)
    counts = [1] if question.cluster.preemptible else [nodes]
    while 2 * counts[-1] <= question.ranks:
        counts.append(2 * counts[-1])
    return counts


def _notes(consistency: Consistency, wire: Wire) -> Iterator[str]:
    """What a user must know of workers that step alone."""
    if not consistency.waits:
        yield STALE
    elif consistency.bound:
        yield f"{STALE}; by {consistency.bound} steps at most"
    if not consistency.waits or consistency.bound:
        yield HOGWILD
    if consistency.backup:
        yield (
            f"each step goes on without its slowest {consistency.backup}, whose samples come again with a later step: "
            "which these are is chance, so no run is like another"
        )
    if wire.kind in ROUNDED:
        yield ROUNDED[wire.kind]
    yield BARRIER
    yield COPIES
