"""A server's shard in torch: parameters in shared memory, and updates from the workers' pushes.

Gradients are read in the memory of the transport. If they are uncompressed and one push is an update, the optimizer
uses views of that memory, and nothing is copied.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.plan import Plan
from trainwright.core.topology import OuterOptimizer
from trainwright.strategies.ps.parameter_shards import (
    GradientPush,
    ParameterShard,
    ShardSlot,
    TensorKind,
    place_tensors,
)
from trainwright.strategies.torch.checkpoint.host_state import OUTER_MOMENTUM
from trainwright.strategies.torch.ps.gradient_compression import GradientLayout
from trainwright.strategies.torch.shard_layout import ModelPart, ShardSlice
from trainwright.strategies.torch.training.learning_rates import set_group_option
from trainwright.strategies.torch.training.train_state import TorchReplica, is_elementwise

SPARSE_REFUSED = (
    'has sparse gradients, which parameter servers do not take: leave sparse=True out, or use strategy="data_parallel"'
)


class TorchShardStore:
    """One server's shard; `trainwright.strategies.ps.parameter_shards` documents the calls.

    Args:
        spec: the job's functions.
        plan: with the number of servers, the compression, and how differences of parameters are applied.
        server: the number of this one.
        where: the rank, for errors.

    Raises:
        JobError, UserCodeError: the model cannot be built, or not be divided.
    """

    def __init__(self, spec: ModelSpec, plan: Plan, server: int, where: str) -> None:
        self.replica = _ServedReplica(spec, plan, where, ModelPart(server=server, servers=plan.servers))
        self.shard = server_shards(spec, plan, self.replica.model, where)[server]
        self.replica.keep({slot.name: slot.rows for slot in self.shard.slots})
        self.form, self._where = GradientLayout(self.shard, plan.wire), where
        self._outer = OuterOptimizer.parse(plan.outer) if plan.local_steps > 1 else None
        self._scratch: list[Tensor] = []
        self._buffers = [slot for slot in self.shard.slots if slot.kind == "buffer"]
        self._mean_pushes: tuple[GradientPush, ...] = ()  # the pushes whose mean `_mean` is
        self._mean: list[Tensor] | None = None

    def attach(self, region: memoryview) -> None:
        """Move the parameters and buffers into a region."""
        tensors = dict(named_tensors(self.replica.model))
        for slot in self.shard.slots:
            tensor = tensors[slot.name]
            if tensor.numel():
                tensor.data = _view_memory(region, slot.offset, tensor).copy_(tensor.detach())

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, by the job's schedule. Raises UserCodeError."""
        return self.replica.rates.begin(step, None, self._where)

    def check(self, push: GradientPush) -> None:
        """Raise ValueError if payload or buffers of a push cannot be decoded."""
        buffers = self.shard.pulled_bytes - self.shard.trained_bytes
        if (len(push.payload), len(push.buffers)) != (self.form.size_bytes, buffers):
            sizes = f"{len(push.payload):,} bytes and {len(push.buffers):,} of buffers"
            raise ValueError(f"{sizes}, not {self.form.size_bytes:,} and {buffers:,}")
        for parameter in self.replica.trainable:
            self.form.check(push.payload, self.replica.names[parameter], parameter)

    def norm2(self, pushes: Sequence[GradientPush]) -> float:
        """Return the squared norm of the pushes' mean over this shard; 0 without any weight."""
        self._mean_pushes, self._mean = tuple(pushes), self._average(pushes)
        return sum(
            float(torch.linalg.vector_norm(each, dtype=_accumulation_dtype(each))) ** 2 for each in self._mean or ()
        )

    def apply(self, pushes: Sequence[GradientPush], *, step: int, rate_factor: float, clip_factor: float) -> None:
        """Apply one update: the weighted mean of the pushes, summed in order; nothing without any weight.

        Raises:
            UserCodeError: the optimizer or the schedule raised; the shard is not sound then.
        """
        is_cached = len(pushes) == len(self._mean_pushes) and all(map(operator.is_, pushes, self._mean_pushes))
        mean = self._mean if is_cached else self._average(pushes)
        self._mean_pushes, self._mean = (), None
        self._take_buffers(pushes)
        if mean is None:
            return
        if clip_factor != 1.0:
            mean = [each * clip_factor for each in mean]
        if self._outer is None:
            self._step(mean, step, rate_factor)
        else:
            self.replica.take_outer(mean, self._outer)

    def _take_buffers(self, pushes: Sequence[GradientPush]) -> None:
        """Take the buffers of the first push with weight that has them."""
        values = next((push.buffers for push in pushes if push.weight > 0 and len(push.buffers)), None)
        if values is not None:
            own_buffers = dict(self.replica.model.named_buffers())
            for slot in self._buffers:
                tensor = own_buffers[slot.name]
                if tensor.numel():
                    tensor.copy_(_view_memory(values, slot.offset - self.shard.trained_bytes, tensor))

    def _step(self, gradients: Sequence[Tensor], step: int, rate_factor: float) -> None:
        """Step the job's optimizer with these gradients."""
        replica = self.replica
        self.rate(step)
        for parameter, gradient in zip(replica.trainable, gradients, strict=True):
            parameter.grad = gradient
        with self._scaled_rates(rate_factor):
            replica.apply(step, self._where)
        for parameter in replica.trainable:
            parameter.grad = None

    def _average(self, pushes: Sequence[GradientPush]) -> list[Tensor] | None:
        """Return the weighted mean of the pushed gradients of each parameter; None without any weight."""
        replica, form, weighted = self.replica, self.form, [push for push in pushes if push.weight > 0]
        if not weighted:
            return None
        if len(weighted) == 1 and form.plain:
            return [form.view(weighted[0].payload, replica.names[each], each) for each in replica.trainable]
        if not self._scratch:
            self._scratch = [torch.empty_like(each, requires_grad=False) for each in replica.trainable]
        weight = math.fsum(push.weight for push in weighted)
        for into, parameter in zip(self._scratch, replica.trainable, strict=True):
            for place, push in enumerate(weighted):
                take = form.add if place else form.fill
                take(push.payload, replica.names[parameter], into, push.weight / weight)
        return self._scratch

    @contextmanager
    def _scaled_rates(self, factor: float) -> Iterator[None]:
        """Multiply learning rates within the block."""
        groups = self.replica.optimizer.param_groups if factor != 1.0 else []
        rates = [(group, float(group["lr"])) for group in groups if group.get("lr") is not None]
        try:
            for group, rate in rates:
                set_group_option(group, "lr", rate * factor)
            yield
        finally:
            for group, rate in rates:
                set_group_option(group, "lr", rate)


def _view_memory(memory: memoryview, offset: int, like: Tensor) -> Tensor:
    """Return a tensor with the shape and type of `like` in the memory."""
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=offset).view(like.shape)


def _accumulation_dtype(values: Tensor) -> torch.dtype:
    """Return the double-precision type for a squared norm: squares of half-precision numbers overflow."""
    return torch.complex128 if values.is_complex() else torch.float64


# --- What a parameter server holds of a model -------------------------------------------------------------------------


_Rows = tuple[int, int] | None  # start and end in a tensor's first dimension; None for the whole tensor


class _ServedReplica(TorchReplica):
    """A replica reduced to this server's shard. Its model never runs.

    The job's optimizer is made for the whole model, so that its groups do not depend on the number of servers. It is
    then reduced to the tensors of this server.
    """

    def __init__(self, spec: ModelSpec, plan: Plan, where: str, part: ModelPart) -> None:
        super().__init__(spec, plan, torch.device("cpu"), where, part=part)
        self.scale = None  # each worker has its own loss scale
        self.outer = plan.local_steps > 1

    def keep(self, dealt: Mapping[str, _Rows]) -> None:
        """Drop all parameters and persistent buffers except these, by full name, and the other rows of split ones."""
        first_names = {tensor: name for name, tensor in named_tensors(self.model)}
        self._cut = {
            name: _row_slice(tensor, rows)
            for name, tensor in self.model.named_parameters(remove_duplicate=False)
            if (rows := dealt.get(first_names[tensor])) is not None
        }
        for module in self.model.modules():
            for members in (module._parameters, module._buffers):
                for key, tensor in members.items():
                    if tensor is not None and first_names.get(tensor, "") not in dealt:
                        members[key] = None
        for tensor, name in first_names.items():
            rows = dealt.get(name)
            if rows is not None:
                self._narrow(tensor, rows)
        self._drop({tensor for tensor, name in first_names.items() if name in dealt})

    def take_outer(self, differences: Sequence[Tensor], outer: OuterOptimizer) -> None:
        """Change the parameters by the mean change of local steps, as `torch.optim.SGD` with Nesterov momentum does."""
        self.sound = False
        with torch.no_grad():
            for parameter, difference in zip(self.trainable, differences, strict=True):
                parameter.add_(difference, alpha=outer.rate)
                if outer.momentum:
                    entries = self.optimizer.state[parameter]
                    momentum = entries.setdefault(OUTER_MOMENTUM, torch.zeros_like(parameter, requires_grad=False))
                    momentum.mul_(outer.momentum).add_(difference)
                    parameter.add_(momentum, alpha=outer.rate * outer.momentum)
        self.sound = True

    def _place(self, model: nn.Module) -> Mapping[str, ShardSlice]:
        """Keep the model in host memory, and never compile it."""
        model.to(self.device)
        return {}

    def _narrow(self, tensor: Tensor, rows: tuple[int, int]) -> None:
        """Keep only some rows of a parameter, and of the state that its optimizer was created with."""
        full_shape = tensor.shape
        tensor.data = tensor.detach()[rows[0] : rows[1]].clone()
        for key, value in self.optimizer.state.get(tensor, {}).items():
            if isinstance(value, Tensor) and value.shape == full_shape:
                self.optimizer.state[tensor][key] = value[rows[0] : rows[1]].clone()

    def _drop(self, parameters: set[Tensor]) -> None:
        """Train only these parameters."""
        self.trainable = [parameter for parameter in self.trainable if parameter in parameters]
        self.names = {parameter: self.names[parameter] for parameter in self.trainable}
        for group in self.optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in parameters]
        for parameter in [parameter for parameter in self.optimizer.state if parameter not in parameters]:
            del self.optimizer.state[parameter]


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter and persistent buffer once, by its first name, in the model's order: parameters first."""
    yield from model.named_parameters()
    persistent_names = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent_names)


def persistent_buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return each persistent buffer with each module that holds it, and its name in the module."""
    tensors = {tensor for _, tensor in named_tensors(model)}
    places = [(module, key, buffer) for module in model.modules() for key, buffer in module._buffers.items()]
    return [(module, key, buffer) for module, key, buffer in places if buffer in tensors and buffer is not None]


def server_shards(spec: ModelSpec, plan: Plan, model: nn.Module, where: str) -> tuple[ParameterShard, ...]:
    """Return each server's shard of a model; tensors are not split for optimizers that need whole ones.

    Raises:
        JobError: there are more servers than the model keeps busy, or an embedding has sparse gradients.
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    sparse = [name for name, module in model.named_modules() if isinstance(module, kinds) and module.sparse]
    if sparse:
        raise JobError([f"parameter {f'{sparse[0]}.weight'!r} {SPARSE_REFUSED}"], where=where)
    needs_whole = not is_elementwise(spec)
    dealt = place_tensors([*_tensors(model)], plan.servers, cut=not needs_whole)
    idle = sum(not shard.trained_bytes for shard in dealt)
    if idle:
        why = ": the optimizer does not work number by number, so that tensors cannot be cut" if needs_whole else ""
        raise JobError(
            [f"{idle} of {plan.servers} servers would hold nothing to train{why}: use servers={plan.servers - idle}"],
            where=where,
        )
    return dealt


def _tensors(model: nn.Module) -> Iterator[ShardSlot]:
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = {name for name, _ in model.named_parameters()} - trained
    for name, tensor in named_tensors(model):
        kind: TensorKind = "trained" if name in trained else "frozen" if name in frozen else "buffer"
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield ShardSlot(name=name, shape=tuple(tensor.shape), dtype=dtype, size=tensor.nbytes, kind=kind)


def _row_slice(tensor: Tensor, rows: tuple[int, int]) -> ShardSlice:
    """Return rows of a tensor."""
    full = ShardSlice.all_of(tensor.shape)
    return ShardSlice(shape=full.shape, start=(rows[0], *full.start[1:]), stop=(rows[1], *full.stop[1:]))
