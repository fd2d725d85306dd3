"""`tf.distribute.experimental.CentralStorageStrategy`: the variables stay in the host's memory, devices share them."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.core.plan import InfeasiblePlan, Plan
from trainwright.strategies.search.plan_request import PlanRequest, engine_for
from trainwright.strategies.tf_mirrored import one_node

FRAMEWORKS = ("tensorflow",)
ENGINES = {"tensorflow": "trainwright.strategies.tensorflow.strategy_engines:CentralStorage"}
NO_FIT = "Keras' fit trains right with central storage, but reports wrong metrics"


def propose(question: PlanRequest) -> Iterator[Plan | InfeasiblePlan]:
    """A data rank for each device of one node."""
    yield one_node("tf_central_storage", engine_for(ENGINES, question), question)
