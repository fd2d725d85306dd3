"""Strategies: one file each with a pure `propose`, and the engines that carry them out.

A strategy is a module with a function `propose(question)` that yields plans and what makes others impossible, with
`FRAMEWORKS` whose models it is for, and with `ENGINES` by framework; a plan without an engine is shown and not chosen.
`OFFLOADS` says that it can keep the model's state in host memory, `ALONE` that its workers step alone. Where it can
walk Keras' `fit` it has `FIT`, the engine for that, or else `NO_FIT`, the reason. How many micro-batches there are and
what is computed again is left to the ranking. A new one is added to `STRATEGIES`; nothing else needs to know its name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import ModuleType

from trainwright.core.engine import Engine
from trainwright.core.frameworks import load_module
from trainwright.core.plan import Plan
from trainwright.strategies import (
    data_parallel,
    local_sgd,
    model_parallel,
    one_device,
    parameter_server,
    pipeline,
    sharded,
    tensor_parallel,
    tf_central_storage,
    tf_mirrored,
    tf_multi_worker_mirrored,
    tf_one_device,
    tf_parameter_server,
    tf_tpu,
)

STRATEGIES: Mapping[str, ModuleType] = {
    "one_device": one_device,
    "data_parallel": data_parallel,
    "sharded": sharded,
    "tensor_parallel": tensor_parallel,
    "pipeline": pipeline,
    "model_parallel": model_parallel,
    "parameter_server": parameter_server,
    "local_sgd": local_sgd,
    "tf_one_device": tf_one_device,
    "tf_mirrored": tf_mirrored,
    "tf_multi_worker_mirrored": tf_multi_worker_mirrored,
    "tf_central_storage": tf_central_storage,
    "tf_parameter_server": tf_parameter_server,
    "tf_tpu": tf_tpu,
}


MOVED = {
    "tensorflow.fit": "tensorflow.keras_fit",
    "tensorflow.central_storage": "tensorflow.strategy_engines",
    "tensorflow.mirrored": "tensorflow.strategy_engines",
    "tensorflow.multi_worker": "tensorflow.strategy_engines",
    "tensorflow.one_device:OneDevice": "tensorflow.strategy_engines:TensorFlowOneDevice",
    "tensorflow.parameter_server:ParameterServer": "tensorflow.ps.parameter_server:TensorFlowParameterServer",
    "tensorflow.ps.parameter_server:ParameterServer": "tensorflow.ps.parameter_server:TensorFlowParameterServer",
    "torch.data_parallel": "torch.engines.data_parallel",
    "torch.one_device": "torch.engines.one_device",
    "torch.parameter_server": "torch.engines.parameter_server",
    "torch.pipeline": "torch.engines.pipeline",
    "torch.sharded": "torch.engines.fsdp",
    "torch.tensor_parallel": "torch.engines.tensor_parallel",
}
"""Engines that older runs store, as `module` or `module:class`, and their place now, below `trainwright.strategies`."""


def current_engine(engine: str) -> str:
    """Return an engine's `module:class` in this version; an older version may have stored another place or name."""
    stored = engine.removeprefix(f"{__name__}.")
    module, _, name = stored.partition(":")
    found = MOVED.get(stored) or (f"{MOVED[module]}:{name}" if module in MOVED else stored)
    return f"{__name__}.{found}" if stored != engine else engine


def strategies_for(framework: str) -> Mapping[str, ModuleType]:
    """By name, those for models of a framework; without one, as of numbers alone, torch's."""
    return {name: module for name, module in STRATEGIES.items() if (framework or "torch") in module.FRAMEWORKS}


def engine_class(plan: Plan) -> type[Engine]:
    """The engine of a plan; imports its framework, and tells it of Keras' backend and of the TPU by the environment."""
    if plan.keras_backend:
        os.environ["KERAS_BACKEND"] = plan.keras_backend
    if plan.tpu:
        os.environ["TPU_NAME"] = plan.tpu
    module, name = plan.engine.split(":")
    engine: type[Engine] = getattr(load_module(module), name)
    return engine
