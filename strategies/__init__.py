"""Strategies: one file each with a pure `propose`, and the engines that carry them out.

A strategy is a module with a function `propose(profile, cluster, job) -> Plan | Infeasible` and with `ENGINES`, by the
framework of the models that it is for; where it can walk Keras' `fit`, also with `FIT`, the engine for that, or else
with `NO_FIT`, the reason. A new one is added to `STRATEGIES`; nothing else needs to know its name.

`OFFERS` are those that the ranking looks at, by a function `shapes(machine, profile)`, also before they have an engine.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from types import ModuleType

from trainwright.core.engine import Engine
from trainwright.core.plan import Plan
from trainwright.strategies import (
    data_parallel,
    one_device,
    pipeline,
    sharded,
    tensor_parallel,
    tf_central_storage,
    tf_mirrored,
    tf_multi_worker_mirrored,
    tf_one_device,
)

STRATEGIES: Mapping[str, ModuleType] = {
    "one_device": one_device,
    "data_parallel": data_parallel,
    "tf_one_device": tf_one_device,
    "tf_mirrored": tf_mirrored,
    "tf_multi_worker_mirrored": tf_multi_worker_mirrored,
    "tf_central_storage": tf_central_storage,
}
OFFERS: tuple[ModuleType, ...] = (one_device, data_parallel, sharded, tensor_parallel, pipeline)


def engine_class(plan: Plan) -> type[Engine]:
    """The engine of a plan; imports its framework, and sees to it that Keras has the backend of the plan's model."""
    if plan.keras_backend:
        os.environ["KERAS_BACKEND"] = plan.keras_backend
    module, name = plan.engine.split(":")
    engine: type[Engine] = getattr(importlib.import_module(module), name)
    return engine
