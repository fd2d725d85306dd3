"""Strategies: ways to divide training over workers, with the engines that run them.

`search` declares the strategies and finds the best plan, `cost_model` predicts its time and memory, and the other
packages hold the engines of each framework.
"""

from __future__ import annotations

import os

from trainwright.core.engine import Engine, ModelSpec
from trainwright.core.frameworks import load_module
from trainwright.core.plan import Plan
from trainwright.core.topology import Generation, Group, Peer
from trainwright.strategies.search.registry import STRATEGIES as STRATEGIES
from trainwright.strategies.search.registry import strategies_for as strategies_for

_MOVED = {
    "tensorflow.fit": "tensorflow.keras_fit",
    "tensorflow.central_storage": "tensorflow.strategy_engines",
    "tensorflow.mirrored": "tensorflow.strategy_engines",
    "tensorflow.multi_worker": "tensorflow.strategy_engines",
    "tensorflow.one_device:OneDevice": "tensorflow.strategy_engines:TensorFlowOneDevice",
    "tensorflow.parameter_server:ParameterServer": "tensorflow.ps.parameter_server:TensorFlowParameterServer",
    "tensorflow.ps.parameter_server:ParameterServer": "tensorflow.ps.parameter_server:TensorFlowParameterServer",
    "torch.data_parallel": "torch.engines.data_parallel",
    "torch.engines.one_device": "torch.engines.base",
    "torch.one_device": "torch.engines.base",
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
    found = _MOVED.get(stored) or (f"{_MOVED[module]}:{name}" if module in _MOVED else stored)
    return f"{__name__}.{found}" if stored != engine else engine


def engine_class(plan: Plan) -> type[Engine]:
    """Import the engine class of a plan.

    The Keras backend and the name of the TPU are set in the environment first, where their frameworks read them. The
    class of a plan with `cross_device_ops` has them as an attribute, since it opens its strategy before it is built.
    """
    if plan.keras_backend:
        os.environ["KERAS_BACKEND"] = plan.keras_backend
    if plan.tpu:
        os.environ["TPU_NAME"] = plan.tpu
    module, name = plan.engine.split(":")
    engine: type[Engine] = getattr(load_module(module), name)
    return type(name, (engine,), {"cross_device_ops": plan.cross_device_ops}) if plan.cross_device_ops else engine


def single_rank_engine(spec: ModelSpec, plan: Plan, *, guest: bool = False) -> Engine:
    """Return an engine with one rank and its model, on the device of the plan.

    Args:
        spec: the model and the job's functions.
        plan: of one rank.
        guest: leave the number of threads of this process as it is.
    """
    engine = engine_class(plan)()
    alone = Generation(token=0, number=0)
    peer = Peer(rank=0, address=engine.reserve(alone, "worker"))
    devices = ("cuda:0",) if plan.placement.accelerator == "GPU" else ("cpu",)
    threads = 0 if guest else plan.placement.threads
    engine.form(Group(generation=alone, rank=0, peers=(peer,), devices=devices, threads=threads))
    engine.build(spec, plan)
    return engine
