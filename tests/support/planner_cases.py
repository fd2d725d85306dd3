"""Clusters, model profiles and jobs for tests of the planner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import trainwright as tw
from trainwright.core.cluster import Cluster, Node
from trainwright.core.model_profile import LayerCost, ModelProfile
from trainwright.planning.decision import Decision
from trainwright.planning.planner import choose

PROFILE = ModelProfile(
    framework="torch", layers=(LayerCost(name="l", parameters=1000, parameter_bytes=4000, flops=1e6),)
)
LAPTOP = Cluster(nodes=(Node(name="a", cpus=2, memory_bytes=0),))
GPUS = Cluster(nodes=tuple(Node(name=n, cpus=8, memory_bytes=0, accelerators=1, accelerator="GPU") for n in "ab"))


def job(**fields: Any) -> tw.Job:
    data = tw.datasets.table({"x": [[1.0]]})
    given = {"name": "n", "model": dict, "optimizer": list, "train": data, "loss": max, "inputs": "x"}
    return tw.Job(**{**given, "batch_size": 64, **fields})


def decide(cluster: Cluster = LAPTOP, profile: ModelProfile = PROFILE, **fields: Any) -> Decision:
    return choose(profile, cluster, job(**fields))


LAYERS = tuple(
    LayerCost(name=f"layers.{number}", parameters=100_000, parameter_bytes=400_000, flops=1e7, cut_numbers=64.0)
    for number in range(8)
)
DEEP = replace(PROFILE, layers=LAYERS)
