"""Sharded data parallelism: what each rank would hold whole is divided (ZeRO; Rajbhandari et al., 2020)."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.core.plan import Mesh
from trainwright.core.profile import ModelProfile
from trainwright.strategies.shapes import Shape
from trainwright.strategies.work import Machine


def shapes(machine: Machine, profile: ModelProfile) -> Iterator[Shape]:
    """Each stage of ZeRO over all devices, and hybrid shard: ZeRO-3 inside a node, replicas between nodes."""
    if machine.devices == 1:
        return
    for zero in (1, 2, 3):
        yield Shape(mesh=Mesh(shard=machine.devices), zero=zero)
    nodes, rest = divmod(machine.devices, machine.per_node)
    if nodes > 1 and machine.per_node > 1 and not rest:
        yield Shape(mesh=Mesh(data=nodes, shard=machine.per_node), zero=3)
