"""A pipeline's stage divided by torch's FSDP2, driven by hand as torch's own pipelining does.

FSDP2 works in hooks around modules' calls, which a stage that is entered and left in the middle of a forward does not
make as a whole. So the stage's parameters are gathered before a step, gradients of all micro-batches add up in them,
and each rank gets its part of the sum at the end (ZeRO-2).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from trainwright.strategies.torch.distributed.device_groups import Place
from trainwright.strategies.torch.distributed.fsdp_wrap import divide, gathered, released
from trainwright.strategies.torch.torch_compat import FsdpState, forget_gradient
from trainwright.strategies.torch.training.train_state import Replica


class Shards:
    """The parameters of a stage, of which each rank holds a part between steps.

    Args:
        stage: the modules; they are divided.
        mesh: of one dimension, or of replicas and shards.
        where: the rank, for errors.

    Raises:
        JobError: the modules cannot be divided.
    """

    def __init__(self, stage: nn.Module, mesh: DeviceMesh, where: str) -> None:
        divide(stage, mesh, zero=2, offload=False, where=where)
        self._stage = stage
        states = [FsdpState(module) for module in gathered(stage)]
        for state in states:
            state.remove_forward_hooks()
        self._root = states[0]
        self._root.initialize_root()
        self._groups: list[Any] = [group for state in states for group in state.groups]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Parameters are whole from here on, without gradients of an earlier step; afterwards too, unless it fails."""
        for module in gathered(self._stage):
            module.unshard()
        for one in self._each():
            forget_gradient(one)
        try:
            yield
        except BaseException:
            self.released()
            raise

    def released(self) -> None:
        """Hold this rank's parts alone."""
        released(self._stage)

    def reduce(self, replica: Replica, place: Place) -> None:
        """Give each parameter this rank's part of the mean gradient; none where no rank has one. Releases them."""
        named = [(one, one.sharded_param) for one in self._each() if one.sharded_param in replica.names]
        flags = [one.unsharded_param.grad is not None for one, _ in named]
        used = torch.tensor(flags, dtype=torch.float32, device=replica.device)
        for group in (place.shards, place.replicas):
            if group is not None:
                distributed.all_reduce(used, group=group)
        for group in self._groups:
            group.post_backward()
        self._root.finish_backward()
        for (_, parameter), count in zip(named, used.tolist(), strict=True):
            if not count:
                parameter.grad = None

    def _each(self) -> Iterator[Any]:
        """FSDP2's own view of each parameter."""
        for group in self._groups:
            yield from group.fsdp_params
