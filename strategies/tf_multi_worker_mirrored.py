"""`tf.distribute.MultiWorkerMirroredStrategy`: one worker for each node, a replica on each of its devices."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.core.plan import InfeasiblePlan, Plan
from trainwright.strategies.data_parallel import replicas
from trainwright.strategies.search.plan_request import PlanRequest, engine_for

FRAMEWORKS = ("tensorflow",)
ENGINES = {"tensorflow": "trainwright.strategies.tensorflow.strategy_engines:MultiWorkerMirrored"}
NO_FIT = "Keras' fit raises on several workers: it takes values of several replicas for tensors"
GIVEN = "trainwright.strategies.tensorflow.strategy_engines:AtGivenAddresses"


def propose(question: PlanRequest) -> Iterator[Plan | InfeasiblePlan]:
    """A data rank for each device of each worker."""
    devices = question.own_devices
    if devices > 1 and not question.cluster.accelerators:
        reason = "MultiWorkerMirroredStrategy has one device in each worker of a CPU cluster"
        hint = "leave devices out, set workers="
        yield InfeasiblePlan(strategy="tf_multi_worker_mirrored", reason=reason, hint=hint)
        return
    engine = GIVEN if question.tf_config == "environment" else engine_for(ENGINES, question)
    yield replicas("tf_multi_worker_mirrored", engine, question, devices)
