"""`tf.distribute.MirroredStrategy`: one worker drives all devices of a node, a replica on each."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.core.plan import InfeasiblePlan, Plan
from trainwright.strategies.one_device import one_worker
from trainwright.strategies.search.plan_request import PlanRequest, engine_for

FRAMEWORKS = ("tensorflow",)
ENGINES = {"tensorflow": "trainwright.strategies.tensorflow.strategy_engines:Mirrored"}
FIT = "trainwright.strategies.tensorflow.keras_fit:FitMirrored"


def propose(question: PlanRequest) -> Iterator[Plan | InfeasiblePlan]:
    """A data rank for each device of one node."""
    if question.run == "fit" and question.batch_size % question.own_devices:
        reason = f"Keras' fit would weigh the rows of batch_size={question.batch_size} differently on each device"
        yield InfeasiblePlan(strategy="tf_mirrored", reason=reason, hint="use a batch_size that the devices divide")
        return
    engine = FIT if question.run == "fit" else engine_for(ENGINES, question)
    yield one_node("tf_mirrored", engine, question)


def one_node(strategy: str, engine: str, question: PlanRequest) -> Plan | InfeasiblePlan:
    """A plan for one worker with all devices of its node."""
    devices = question.own_devices
    if devices == 1:
        hint = "use tf_one_device; on a CPU, devices=2 makes two logical ones"
        return InfeasiblePlan(strategy=strategy, reason="there is one device on a node", hint=hint)
    return one_worker(strategy, engine, question, devices)
