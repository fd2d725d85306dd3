"""A server's shard: parameters in the memory that workers copy from, and updates of what these push.

Gradients are read where the transport put them: where numbers come as they are and one push is an update, the
optimizer steps on views of that memory, and nothing is copied.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trainwright.core.staleness import Outer
from trainwright.strategies.ps.shard_store import Push, Shard
from trainwright.strategies.torch.ps.gradient_layout import Form
from trainwright.strategies.torch.ps.server_shard import Served, named
from trainwright.strategies.torch.training.train_state import set_option, settings


class Bank:
    """One server's shard; `trainwright.strategies.ps.shard_store` says who calls what, and when.

    Args:
        replica: what this server was dealt.
        shard: the same, by place in the region.
        form: of what is pushed.
        outer: how differences of parameters are applied; None where gradients are pushed.
        where: the rank, for errors.
    """

    def __init__(self, replica: Served, shard: Shard, form: Form, outer: Outer | None, where: str) -> None:
        self.shard = shard
        self.replica, self.form, self._outer, self._where = replica, form, outer, where
        self._scratch: list[Tensor] = []
        self._buffers = [slot for slot in shard.slots if slot.kind == "buffer"]
        self._asked: tuple[Push, ...] = ()  # of what `_mean` is
        self._mean: list[Tensor] | None = None

    def attach(self, region: memoryview) -> None:
        """Let the parameters and buffers live in a region from now on."""
        held = dict(named(self.replica.model))
        for slot in self.shard.slots:
            tensor = held[slot.name]
            if tensor.numel():
                tensor.data = _there(region, slot.offset, tensor).copy_(tensor.detach())

    def rate(self, step: int) -> float:
        """The learning rate of a step, by the job's schedule. Raises UserCodeError."""
        return self.replica.set_rates(step, self._where)

    def check(self, push: Push) -> None:
        """Raise ValueError where the payload or the buffers of a push cannot be read."""
        buffers = self.shard.pulled_bytes - self.shard.trained_bytes
        if (len(push.payload), len(push.buffers)) != (self.form.size_bytes, buffers):
            sizes = f"{len(push.payload):,} bytes and {len(push.buffers):,} of buffers"
            raise ValueError(f"{sizes}, not {self.form.size_bytes:,} and {buffers:,}")
        for parameter in self.replica.trainable:
            self.form.check(push.payload, self.replica.names[parameter], parameter)

    def norm2(self, pushes: Sequence[Push]) -> float:
        """The squared norm of this shard of the pushes' mean; 0 where none has weight."""
        self._asked, self._mean = tuple(pushes), self._averaged(pushes)
        return sum(float(torch.linalg.vector_norm(each, dtype=_wide(each))) ** 2 for each in self._mean or ())

    def apply(self, pushes: Sequence[Push], *, step: int, rate_factor: float, clip_factor: float) -> None:
        """One update by the mean of the pushes by weight, summed in their order; none where none has weight.

        Raises:
            UserCodeError: the optimizer or the schedule raised; the shard is not sound then.
        """
        known = len(pushes) == len(self._asked) and all(map(operator.is_, pushes, self._asked))
        mean = self._mean if known else self._averaged(pushes)
        self._asked, self._mean = (), None
        self._take_buffers(pushes)
        if mean is None:
            return
        if clip_factor != 1.0:
            mean = [each * clip_factor for each in mean]
        if self._outer is None:
            self._step(mean, step, rate_factor)
        else:
            self.replica.take_outer(mean, self._outer)

    def _take_buffers(self, pushes: Sequence[Push]) -> None:
        """Those of the first push that counts and has some."""
        told = next((push.buffers for push in pushes if push.weight > 0 and len(push.buffers)), None)
        if told is not None:
            held = dict(self.replica.model.named_buffers())
            for slot in self._buffers:
                tensor = held[slot.name]
                if tensor.numel():
                    tensor.copy_(_there(told, slot.offset - self.shard.trained_bytes, tensor))

    def _step(self, gradients: Sequence[Tensor], step: int, rate_factor: float) -> None:
        """The job's optimizer's, on these gradients."""
        replica = self.replica
        replica.set_rates(step, self._where)
        for parameter, gradient in zip(replica.trainable, gradients, strict=True):
            parameter.grad = gradient
        with self._rated(rate_factor):
            replica.apply(step, self._where)
        for parameter in replica.trainable:
            parameter.grad = None

    def _averaged(self, pushes: Sequence[Push]) -> list[Tensor] | None:
        """The mean by weight of what was pushed for each parameter; None where nothing has weight."""
        replica, form, counted = self.replica, self.form, [push for push in pushes if push.weight > 0]
        if not counted:
            return None
        if len(counted) == 1 and form.plain:
            return [form.view(counted[0].payload, replica.names[each], each) for each in replica.trainable]
        if not self._scratch:
            self._scratch = [torch.empty_like(each, requires_grad=False) for each in replica.trainable]
        whole = math.fsum(push.weight for push in counted)
        for into, parameter in zip(self._scratch, replica.trainable, strict=True):
            for place, push in enumerate(counted):
                take = form.add if place else form.fill
                take(push.payload, replica.names[parameter], into, push.weight / whole)
        return self._scratch

    @contextmanager
    def _rated(self, factor: float) -> Iterator[None]:
        """Within, learning rates are multiplied."""
        groups = self.replica.optimizer.param_groups
        rates = [settings(group).get("lr") for group in groups] if factor != 1.0 else []
        try:
            for group, rate in zip(groups, rates, strict=False):
                if rate is not None:
                    set_option(group, "lr", rate * factor)
            yield
        finally:
            for group, rate in zip(groups, rates, strict=False):
                if rate is not None:
                    set_option(group, "lr", rate)


def _there(memory: memoryview, offset: int, like: Tensor) -> Tensor:
    """A tensor of this shape and type in memory of somebody else's."""
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=offset).view(like.shape)


def _wide(values: Tensor) -> torch.dtype:
    """Squares of half-precision numbers overflow, and sums of many squares lose what single precision has."""
    return torch.complex128 if values.is_complex() else torch.float64
