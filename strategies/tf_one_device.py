"""`tf.distribute.OneDeviceStrategy`: the floor that every other plan for TensorFlow is held against."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.core.plan import InfeasiblePlan, Plan
from trainwright.strategies.one_device import one_worker
from trainwright.strategies.search.plan_request import PlanRequest, engine_for

FRAMEWORKS = ("tensorflow",)
ENGINES = {"tensorflow": "trainwright.strategies.tensorflow.strategy_engines:TensorFlowOneDevice"}
FIT = "trainwright.strategies.tensorflow.keras_fit:FitOneDevice"


def propose(question: PlanRequest) -> Iterator[Plan | InfeasiblePlan]:
    """The whole global batch on one device of one worker."""
    engine = FIT if question.run == "fit" else engine_for(ENGINES, question)
    yield one_worker("tf_one_device", engine, question)
