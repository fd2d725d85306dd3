"""Tensor parallelism: each layer divided over the ranks of a node (Shoeybi et al., 2019), and replicas of that."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.core.plan import Mesh
from trainwright.core.profile import ModelProfile
from trainwright.strategies.shapes import Shape, divisors
from trainwright.strategies.work import Machine


def shapes(machine: Machine, profile: ModelProfile) -> Iterator[Shape]:
    """Degrees that divide the heads and fit a node, alone, with replicas and with ZeRO-1 over these."""
    for tensor in degrees(machine, profile):
        data = machine.devices // tensor
        if tensor > 1 and data * tensor == machine.devices:
            yield Shape(mesh=Mesh(data=data, tensor=tensor))
            if data > 1:
                yield Shape(mesh=Mesh(shard=data, tensor=tensor), zero=1)


def degrees(machine: Machine, profile: ModelProfile) -> Iterator[int]:
    """Tensor degrees that this model and a node allow."""
    if not any(layer.splits for layer in profile.layers):
        yield 1
        return
    yield from (each for each in divisors(machine.per_node) if not profile.heads % each)
