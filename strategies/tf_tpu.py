"""`tf.distribute.TPUStrategy`: all chips of a slice, a data rank on each. Not verified on hardware."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainwright.core.plan import InfeasiblePlan, Mesh, Plan
from trainwright.strategies.search.plan_request import PlanRequest

FRAMEWORKS = ("tensorflow",)
ENGINE, NAMED = "trainwright.strategies.tensorflow.tpu:TPU", "trainwright.strategies.tensorflow.tpu:NamedTPU"
NO_FIT = "Keras' fit has not been walked on TPUs"
TWO_CORES = ("TPU-V2", "TPU-V3")  # each chip of which is two devices to TensorFlow
UNVERIFIED = "not verified on hardware: its parts were tested without a TPU"
STATIC = "every micro-batch has the same number of rows: what is short is filled with rows of weight 0"


def propose(question: PlanRequest) -> Iterator[Plan | InfeasiblePlan]:
    """A worker on each host of one slice; the first steps for all."""
    refusal = refused(question)
    if refusal:
        yield refusal
        return
    nodes, chips = question.cluster.nodes, question.own_devices
    hosts = question.workers or len(nodes)
    plan = question.plan(
        "tf_tpu", NAMED if question.tpu else ENGINE, Mesh(data=hosts * chips), devices=chips, topology="coordinator",
        tpu=question.tpu or "",
    )  # fmt: skip
    head = next((node.head for node in nodes if node.head), "")
    yield replace(plan, placement=replace(plan.placement, head=head)).noted(UNVERIFIED, STATIC)


def refused(question: PlanRequest) -> InfeasiblePlan | None:
    """Why it cannot be; None where it can."""
    name, cluster = "tf_tpu", question.cluster
    if cluster.accelerator != "TPU":
        return InfeasiblePlan(strategy=name, reason="the cluster has no TPU", hint="add nodes with Ray's resource TPU")
    old = [kind for kind in cluster.kinds if kind.upper().startswith(TWO_CORES)]
    if old:
        reason = f"each chip of a {old[0]} is two devices to TensorFlow, and one to Ray"
        return InfeasiblePlan(strategy=name, reason=reason, hint="use a TPU v4 or later")
    if question.elastic:
        hint = "leave min_workers and max_workers out"
        return InfeasiblePlan(strategy=name, reason="a slice has as many hosts as it has", hint=hint)
    hosts = question.workers or len(cluster.nodes)
    if hosts > 1 and not question.tpu:
        hint = "name the slice: tpu=, or set workers=1 for the chips of one host"
        return InfeasiblePlan(
            strategy=name, reason=f"the chips of {hosts} hosts are found by the slice's name", hint=hint
        )
    if hosts > 1 and hosts != len(cluster.nodes):
        reason = f"workers={hosts} is pinned, and the slice has {len(cluster.nodes)} hosts"
        return InfeasiblePlan(strategy=name, reason=reason, hint=f"set workers={len(cluster.nodes)} or leave it out")
    return question.unequal(name, hosts * question.own_devices)
