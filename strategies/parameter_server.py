"""Data parallelism against parameter servers: workers step alone (Dean et al., 2012; Li et al., OSDI 2014)."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.core.plan import InfeasiblePlan, Mesh, Plan
from trainwright.core.topology import Consistency, GradientCompression
from trainwright.strategies.ps.parameter_shards import count_busy_servers
from trainwright.strategies.search.plan_request import PlanRequest, engine_for

FRAMEWORKS = ("torch",)
ENGINES = {"torch": "trainwright.strategies.torch.engines.parameter_server:ParameterServer"}
ALONE = True
NO_FIT = "Keras' fit has all workers step together"
UNASKED = ("sync", "ssp(3)", "async")  # the other forms are for who asks for them
BARRIER = "workers wait for each other at checkpoints and evaluations alone"
COPIES = (
    "a worker may die, join or be slow; a server's death sends all back to the last copy (keeper_s, else a "
    "checkpoint), and what came since is computed again"
)
STALE = "gradients are of old parameters{0}, of which a part may be newer (as in Hogwild): no run is like another"
BACKUP = (
    "a step leaves out its {0} slowest parts, which are computed again later: that helps only against delays that are "
    "rare and large, and no run is like another"
)
ROUNDED = {
    "topk": "only the largest numbers of a gradient are pushed, the rest with later ones: not equal to one device",
    **{kind: f"gradients are rounded to {kind}: not equal to one device" for kind in ("fp16", "bf16", "int8")},
}


def propose(question: PlanRequest) -> Iterator[Plan | InfeasiblePlan]:
    """A worker on each rank; one server on each node, and more, while each could hold a part of its own.

    Where the job does not say how far apart workers may be: not at all, by three steps, and by any number.
    """
    if question.pins.choices.get("local_steps", 1) > 1:
        hint = "use strategy='local_sgd', or leave local_steps out"
        yield InfeasiblePlan(strategy="parameter_server", reason="its workers push each step", hint=hint)
        return
    refusal = refused("parameter_server", question)
    if refusal:
        yield refusal
        return
    pinned = question.pins.choices.get("consistency")
    for consistency in (pinned,) if pinned else UNASKED:
        yield from served("parameter_server", question, consistency)


def refused(strategy: str, question: PlanRequest) -> InfeasiblePlan | None:
    """Why workers cannot step alone; None where they can."""
    ranks, pins = question.ranks, question.pins
    if question.profile.keras_backend:
        hint = "use data_parallel, or for a model of TensorFlow tf_parameter_server"
        return InfeasiblePlan(
            strategy=strategy, reason="the model is Keras': servers hold no such variables", hint=hint
        )
    refusal = question.alone(strategy) or question.unequal(strategy, ranks) or question.without_engine(strategy)
    if refusal:
        return refusal
    if pins.mesh and pins.mesh != Mesh(data=ranks):
        hint = "leave the other degrees out"
        return InfeasiblePlan(
            strategy=strategy, reason="each worker holds the whole model: dp alone divides", hint=hint
        )
    backup = Consistency.parse(pins.choices.get("consistency", "sync")).backup
    if backup >= ranks:
        reason = f"sync(backup={backup}) waits for none of {ranks} workers"
        return InfeasiblePlan(strategy=strategy, reason=reason, hint=f"use backup={ranks - 1} or less, or more workers")
    servers = pins.choices.get("servers", 1)
    most = _filled(question, servers)
    if most < servers:
        idle = servers - count_busy_servers(question.profile.trained, servers)
        reason = f"{idle} of {servers} servers would hold nothing to train"
        return InfeasiblePlan(strategy=strategy, reason=reason, hint=f"use plan='servers={most}'")
    return None


def _filled(question: PlanRequest, servers: int) -> int:
    """The most servers up to so many that would all hold something to train; so many where that is not known."""
    trained = question.profile.trained
    if not trained:
        return servers
    return next((count for count in range(servers, 0, -1) if count_busy_servers(trained, count) == count), 1)


def served(
    strategy: str, question: PlanRequest, consistency: str, *, local_steps: int = 1, outer: str = ""
) -> Iterator[Plan]:
    """Plans that differ in how many servers there are."""
    ranks, engine = question.ranks, engine_for(ENGINES, question)
    wire = question.pins.choices.get("wire", "full")
    for servers in _servers(question):
        plan = question.plan(
            strategy, engine, Mesh(data=ranks), servers=servers, topology="independent", consistency=consistency,
            wire=wire, local_steps=local_steps, outer=outer,
        )  # fmt: skip
        yield plan.noted(*_notes(Consistency.parse(consistency), GradientCompression.parse(wire)))


def _servers(question: PlanRequest) -> list[int]:
    """As the job says; else one for each node, and twice as many as often as there are as many ranks.

    Where nodes may be taken back also fewer: the loss of one with a server is what all must go back for. Nowhere more
    than the model fills.
    """
    pinned = question.pins.choices.get("servers")
    if pinned:
        return [pinned]
    nodes = min(len(question.cluster.nodes), question.ranks)
    counts = [1] if question.cluster.preemptible else [nodes]
    while 2 * counts[-1] <= question.ranks:
        counts.append(2 * counts[-1])
    return sorted({_filled(question, count) for count in counts})


def _notes(consistency: Consistency, wire: GradientCompression) -> Iterator[str]:
    """What a user must know of workers that step alone."""
    if not consistency.waits:
        yield STALE.format("")
    elif consistency.bound:
        yield STALE.format(f", by {consistency.bound} steps at most")
    if consistency.backup:
        yield BACKUP.format(consistency.backup)
    if wire.kind in ROUNDED:
        yield ROUNDED[wire.kind]
    yield BARRIER
    yield COPIES
