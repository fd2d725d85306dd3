"""Strategies: one file each with a pure `propose`, and the engines that carry them out.

A strategy is a function `propose(profile, cluster, job) -> Plan | Infeasible`. A new one is added to `STRATEGIES`;
nothing else needs to know its name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from trainwright.core.cluster import Cluster
from trainwright.core.engine import Engine
from trainwright.core.plan import Infeasible, Plan
from trainwright.core.profile import ModelProfile
from trainwright.strategies import data_parallel, one_device

Propose = Callable[[ModelProfile, Cluster, Any], Plan | Infeasible]

STRATEGIES: Mapping[str, Propose] = {
    "one_device": one_device.propose,
    "data_parallel": data_parallel.propose,
}


def engine_class(plan: Plan) -> type[Engine]:
    """The engine of a plan; imports its framework."""
    module, name = plan.engine.split(":")
    engine: type[Engine] = getattr(importlib.import_module(module), name)
    return engine
