"""Pipelines: contiguous stages of layers (Huang et al., 2019), with tensor ranks and replicas of each."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.core.plan import Mesh
from trainwright.core.profile import ModelProfile
from trainwright.strategies.shapes import Shape, divisors
from trainwright.strategies.tensor_parallel import degrees
from trainwright.strategies.work import Machine


def shapes(machine: Machine, profile: ModelProfile) -> Iterator[Shape]:
    """Numbers of stages that divide the devices, with each tensor degree, plain or with ZeRO-1, in each schedule.

    GPipe's is left out: 1F1B takes as long and holds less.
    """
    for tensor in degrees(machine, profile):
        for stages in divisors(machine.devices // tensor):
            if stages == 1 or stages > len(profile.layers) or machine.devices % (tensor * stages):
                continue
            data = machine.devices // tensor // stages
            for schedule, chunks in (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)):
                if chunks * stages > len(profile.layers):
                    continue
                plain = Mesh(pipeline=stages, data=data, tensor=tensor)
                yield Shape(mesh=plain, schedule=schedule, chunks=chunks)
                if data > 1:
                    divided = Mesh(pipeline=stages, shard=data, tensor=tensor)
                    yield Shape(mesh=divided, zero=1, schedule=schedule, chunks=chunks)
