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
    peer = Peer(rank=0, address=engine.reserve("worker"))
    devices = ("cuda:0",) if plan.placement.accelerator == "GPU" else ("cpu",)
    threads = 0 if guest else plan.placement.threads
    engine.form(Group(generation=alone, rank=0, peers=(peer,), devices=devices, threads=threads))
    engine.build(spec, plan)
    return engine
