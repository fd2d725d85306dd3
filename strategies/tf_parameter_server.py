"""`tf.distribute.ParameterServerStrategy`: a chief deals shares to workers, whose updates servers apply at once."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from trainwright.core.plan import InfeasiblePlan, Mesh, Plan
from trainwright.strategies.search.plan_request import PlanRequest, engine_for

FRAMEWORKS = ("tensorflow",)
ENGINES = {"tensorflow": "trainwright.strategies.tensorflow.ps.parameter_server:TensorFlowParameterServer"}
ALONE = True
NO_FIT = "Keras' fit raises with parameter servers: it makes a data set on each worker"
PIECE_BYTES = 1 << 20  # of parameters; a server with less waits for messages and not for bytes
IN_FLIGHT = 3  # steps: while one ends, its workers are busy with the next, and nothing is older than that
STALE = (
    "each part of a step is an update of its own, from old parameters: not equal to one device, nor twice the same; at "
    f"most {IN_FLIGHT} steps are under way"
)
CLIPPED = "clip_norm is of a share's gradient; learning rates go by steps, an optimizer's own counts go by shares"
AGAIN = (
    "a worker may die: its part is computed again, and where it was applied already, whole or not, is applied twice; "
    "another joins on the same host, once no other is missing"
)
ENDS = "a server's or the chief's death sends all back to the last checkpoint"


def propose(question: PlanRequest) -> Iterator[Plan | InfeasiblePlan]:
    """A worker on each rank, and beside them a chief and servers, on CPUs alone."""
    refusal = refused(question)
    if refusal:
        yield refusal
        return
    plan = question.plan(
        "tf_parameter_server", engine_for(ENGINES, question), Mesh(data=question.ranks), servers=servers_of(question),
        topology="coordinator", consistency="async", in_flight=IN_FLIGHT,
    )  # fmt: skip
    yield plan.noted(STALE, CLIPPED, AGAIN, ENDS)


def servers_of(question: PlanRequest) -> int:
    """As the job says; else one for each node, whose links they share, while each has enough to send.

    More servers than workers would wait for each other's requests, and more than one on a node share its link.
    """
    pinned: int | None = question.pins.choices.get("servers")
    worth = ceil(sum(layer.parameter_bytes for layer in question.profile.layers) / PIECE_BYTES)
    return pinned or max(1, min(len(question.cluster.nodes), question.ranks, worth))


def refused(question: PlanRequest) -> InfeasiblePlan | None:
    """Why it cannot be; None where it can."""
    name, choices = "tf_parameter_server", question.pins.choices
    if question.devices not in (None, 1):
        hint = "leave devices out: each worker has one"
        return InfeasiblePlan(strategy=name, reason=f"devices={question.devices} is pinned", hint=hint)
    if question.tf_config == "environment":
        hint = "leave tf_config out: the chief learns where the others listen"
        return InfeasiblePlan(strategy=name, reason="its addresses are chosen as processes start", hint=hint)
    if question.compile == "eager":
        return InfeasiblePlan(
            strategy=name, reason="its workers run compiled functions", hint='leave compile="eager" out'
        )
    if question.profile.loss_scale:
        hint = "use mixed_bfloat16, or another strategy"
        return InfeasiblePlan(strategy=name, reason="mixed_float16 scales the loss of whole steps", hint=hint)
    if choices.get("consistency", "async") != "async":
        hint = 'set consistency="async" or leave it out; tf_multi_worker_mirrored steps together'
        reason = f"consistency={choices['consistency']!r}: TensorFlow's servers apply each update at once"
        return InfeasiblePlan(strategy=name, reason=reason, hint=hint)
    if choices.get("wire", "full") != "full" or choices.get("local_steps", 1) > 1:
        return InfeasiblePlan(
            strategy=name,
            reason="TensorFlow sends whole gradients of each share",
            hint="leave wire and local_steps out",
        )
    return question.alone(name) or question.unequal(name, question.ranks) or question.without_engine(name)
