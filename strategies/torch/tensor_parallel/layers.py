"""Layers divided over the ranks of a tensor-parallel group, in the modules' own forward (Shoeybi et al., 2019).

Each rank holds plain tensors and computes with them as one device would. torch's `parallelize_module` is not used: it
makes DTensors of some parameters, which optimizers refuse beside plain ones (`_foreach_mul_ got mixed torch.Tensor and
DTensor`), and it communicates in hooks, which a model that is cut into sections would run outside its section.

With sequence parallelism a row layer ends with a reduce-scatter over tokens instead of an all-reduce, and the input of
a column layer is gathered; backward does the reverse. Between the layers each rank has its own tokens as a
`ShardedTensor`, on which residual sums, norms and dropout run. The gathered input of a column layer is not kept, but
gathered again in backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.errors import JobError
from trainwright.strategies.torch.shard_layout import ShardSlice, hook_problem
from trainwright.strategies.torch.tensor_parallel.sharded_tensor import (
    ShardedTensor,
    check_first_order,
    exchange,
    from_local,
    full_gradient,
    is_sharded,
)
from trainwright.strategies.torch.tensor_parallel.tensor_group import TensorParallelGroup


def reduce_scatter_tokens(partial: Tensor, group: TensorParallelGroup) -> Tensor:
    """Return the sum over the ranks, sharded by tokens."""
    return exchange(partial, lambda held: _local_tokens(held, group, max(held.dim() - 2, 0)), full_gradient)


@dataclass(kw_only=True)
class _BackwardGather:
    """Gathers tokens in backward, once for all layers that share an input."""

    group: TensorParallelGroup
    width: int  # number of tokens of all ranks
    shard_dim: int
    layers: int = 0  # number of layers that will ask
    _asked: int = 0
    _whole: Tensor | None = None

    def of(self, part: Tensor) -> Tensor:
        """Return all tokens; they are kept until the last of the layers has asked for them."""
        whole = self.group.all_gather(part, self.width, self.shard_dim) if self._whole is None else self._whole
        self._asked += 1
        self._whole = whole if self._asked % self.layers else None
        return whole


@dataclass(kw_only=True)
class GatheredTokens:
    """The gathered input of column layers: gathered once in forward and once in backward for all of them."""

    whole: Tensor  # all tokens, in the graph; its gradient is this rank's share of a sum
    part: Tensor  # this rank's tokens
    again: _BackwardGather  # gathers all tokens in backward

    @classmethod
    def of(cls, given: Tensor, group: TensorParallelGroup) -> GatheredTokens:
        """Gather a tensor in the type that linear layers compute in."""
        kind = given.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind) and given.dtype != torch.float64:
            given = given.to(torch.get_autocast_dtype(kind))
        assert isinstance(given, ShardedTensor), "each rank holds some of the tokens"
        along, width = given.shard_dim, given.shape[given.shard_dim]
        whole = exchange(
            given,
            lambda held: group.all_gather(held.local, width, along),  # type: ignore[attr-defined]
            lambda gradient: _local_tokens(gradient, group, along),
        )
        again = _BackwardGather(group=group, width=width, shard_dim=along)
        return cls(whole=whole, part=given.local, again=again)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute a linear layer of the gathered tokens; `weight` is (outputs, inputs)."""
        made: Tensor = _TokenShardedLinear.apply(self.whole, weight, bias, self.part, self.again)  # type: ignore[no-untyped-call]
        return made


def _local_tokens(partial: Tensor, group: TensorParallelGroup, along: int) -> Tensor:
    claim = torch.empty(partial.shape, dtype=partial.dtype, device="meta")
    return ShardedTensor.of(group.reduce_scatter(partial, along), group, along, claim)


class _TokenShardedLinear(torch.autograd.Function):
    """A linear layer that keeps only this rank's tokens of its input for backward."""

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, weight: Tensor, bias: Tensor | None, part: Tensor, again: _BackwardGather
    ) -> Tensor:
        ctx.again, ctx.biased = again, bias is not None
        again.layers += ctx.needs_input_grad[1]
        ctx.save_for_backward(weight, part)
        return nn.functional.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        check_first_order()
        (gradient,), (weight, part) = gradients, ctx.saved_tensors
        given, weighted, biased, *_ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        whole = ctx.again.of(part) if weighted else None
        return (
            gradient @ weight.to(gradient.dtype) if given else None,
            (rows.mT @ whole.flatten(0, -2).to(gradient.dtype)).to(weight.dtype) if whole is not None else None,
            rows.sum(0).to(weight.dtype) if biased and ctx.biased else None,
            None,
            None,
        )


# --- Layers -----------------------------------------------------------------------------------------------------------


ROLES = ("column", "row", "gathered", "vocabulary")


@dataclass(frozen=True, kw_only=True)
class TensorParallelPlan:
    """How a model is divided."""

    # by module: `column` (some of the outputs of each rank), `row` (some of the inputs), `gathered` (some of the
    # outputs, which are gathered where they are needed whole) or `vocabulary` (some of a table's rows)
    roles: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[tuple[str, ...], ...] = ()  # modules between which values are divided, so that no cut may lie there
    # integer attributes of modules that are divided, with each rank's value
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    # column layers from which on each rank draws its own random numbers, until the next row layer
    random: frozenset[str] = frozenset()

    def joined(self, other: TensorParallelPlan) -> TensorParallelPlan:
        """Return this plan and another one, of other layers, as one."""
        return TensorParallelPlan(
            roles={**self.roles, **other.roles},
            groups=self.groups + other.groups,
            attributes={
                name: {**self.attributes.get(name, {}), **other.attributes.get(name, {})}
                for name in (*self.attributes, *other.attributes)
            },
            random=self.random | other.random,
        )


def shard_layers(
    model: nn.Module, split: TensorParallelPlan, group: TensorParallelGroup, where: str
) -> dict[str, ShardSlice]:
    """Keep this rank's part of each divided layer, and let the layers' forwards communicate.

    Args:
        model: in host memory; what of it another stage holds may be gone.

    Returns:
        What is kept of each parameter that was divided, by all of its names.

    Raises:
        JobError: a parameter has hooks.
    """
    for name, attributes in split.attributes.items():
        for key, value in attributes.items():
            setattr(model.get_submodule(name), key, value)
    disable_fast_path(model, split.roles)
    parts: dict[nn.Parameter, tuple[nn.Parameter, ShardSlice]] = {}
    for name, role in split.roles.items():
        module = model.get_submodule(name)
        if module._parameters.get("weight") is None:
            continue  # another stage's
        for key, dimension in shard_dims(module, role).items():
            whole = module._parameters[key]
            if whole is not None and whole not in parts:
                if problem := hook_problem(f"{name}.{key}", whole):
                    raise JobError([problem], where=where)
                box = ShardSlice.share(whole.shape, dimension, group.index, group.size)
                held = whole.detach()[box.inside(ShardSlice.all_of(whole.shape))]
                held = held.clone(memory_format=torch.contiguous_format)
                part = nn.Parameter(held, requires_grad=whole.requires_grad)
                part.__dict__.update(whole.__dict__)  # what an optimizer may ask for
                parts[whole] = part, box
        forward: Callable[..., Tensor] = partial(_FORWARDS[role], group, module, weight_is_transposed(module))
        module.forward = partial(forward, opens=name in split.random) if role == "column" else forward
    boxes = {}
    for path, parameter in [*model.named_parameters(remove_duplicate=False)]:
        if parameter in parts:
            owner, _, key = path.rpartition(".")
            model.get_submodule(owner)._parameters[key], boxes[path] = parts[parameter]
    return boxes


def weight_is_transposed(module: nn.Module) -> bool | None:
    """Return whether a linear layer's weight is (inputs, outputs); None for a module that is not a linear layer."""
    weight, own = module._parameters.get("weight"), set(module._parameters)
    if weight is None or weight.dim() != 2 or own - {"weight", "bias"} or next(module.children(), None) is not None:
        return None
    if type(module) is nn.Linear:
        return False
    if isinstance(module, nn.Embedding) or module._buffers or (weight.is_meta and weight.shape[0] == weight.shape[1]):
        return None
    numbers = {key: _probe_values(held.shape, held) for key, held in module._parameters.items() if held is not None}
    for turned, width in ((False, weight.shape[1]), (True, weight.shape[0])):
        given = _probe_values((2, width), weight)
        try:
            with torch.no_grad():
                made = torch.func.functional_call(module, numbers, (given,))
                meant = _linear(given, numbers["weight"], numbers.get("bias"), turned)
                if made.shape == meant.shape if weight.is_meta else torch.allclose(made, meant):
                    return turned
        except (RuntimeError, TypeError):
            continue
    return None


def _probe_values(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return positive test values of a shape; a module's own values may be zero or symmetric."""
    return torch.linspace(0.5, 1.0, math.prod(shape), dtype=like.dtype, device=like.device).view(*shape)


def shard_dims(module: nn.Module, role: str) -> dict[str, int]:
    """Return the dimension along which each parameter of a module is divided."""
    outputs = 1 if role in ("column", "row") and weight_is_transposed(module) else 0
    if role == "row":
        return {"weight": 1 - outputs}
    return {"weight": outputs} | ({"bias": 0} if module._parameters.get("bias") is not None else {})


def disable_fast_path(model: nn.Module, names: Iterable[str]) -> None:
    """Let torch's encoder layers call these modules in evaluation too, not a fused kernel that takes their weights."""
    for name in names:
        parent = model.get_submodule(name.rpartition(".")[0])
        if isinstance(parent, nn.TransformerEncoderLayer):
            parent.activation_relu_or_gelu = 0


def _column(group: TensorParallelGroup, module: Any, turned: bool, given: Tensor, *, opens: bool) -> Tensor:
    """Compute this rank's outputs of a column layer."""
    if opens and module.training:
        group.fork_rng(given.device)
    return _outputs(group, module, turned, given)


def copy_to_group(group: TensorParallelGroup, tensor: Tensor) -> Tensor:
    """Return the tensor; its gradient is the sum over the ranks.

    Layers that are given the same tensor share the result until a row layer ends their block: autograd adds up their
    gradients on each rank, and the ranks communicate once.
    """
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    copy: Tensor = group.once(_copied, tensor)
    return copy


def _copied(tensor: Tensor, group: TensorParallelGroup) -> Tensor:
    return exchange(tensor, backward=group.all_reduce)


def gather_tokens(group: TensorParallelGroup, tensor: Tensor) -> GatheredTokens | None:
    """Return all tokens of a tensor of which each rank holds some, shared likewise; None where it is not divided so."""
    if not is_sharded(tensor) or tensor.shard_dim == tensor.dim() - 1:
        return None
    found: GatheredTokens = group.once(GatheredTokens.of, tensor)
    return found


def _outputs(group: TensorParallelGroup, module: Any, turned: bool, given: Tensor) -> Tensor:
    """Compute this rank's outputs of a linear layer."""
    if (stream := gather_tokens(group, given)) is not None:
        return stream.linear(module.weight.T if turned else module.weight, module.bias)
    return _linear(copy_to_group(group, given), module.weight, module.bias, turned)


def _row(group: TensorParallelGroup, module: Any, turned: bool, given: Tensor) -> Tensor:
    """Compute a row layer from this rank's inputs, and sum over the ranks."""
    group.restore_rng()
    group.clear_shared_inputs()
    made = _reduce_output(group, _linear(given, module.weight, None, turned))
    return made if module.bias is None else made + module.bias.to(made.dtype)


def _gathered(group: TensorParallelGroup, module: Any, turned: bool, given: Tensor) -> Tensor:
    """Compute a linear layer with whole outputs; in training they stay sharded until something gathers them."""
    part = _outputs(group, module, turned, given)
    group.clear_shared_inputs()
    if torch.is_grad_enabled():
        return from_local(part, group, module.out_features)
    return group.all_gather(part, module.out_features)


def _vocabulary(group: TensorParallelGroup, module: Any, _turned: bool, given: Tensor) -> Tensor:
    """Look rows up in an embedding table of which each rank holds some rows."""
    first, count = group.own_range(module.num_embeddings)
    places = given - first
    # What no rank has the first or the last one looks up, which raises as on one device.
    elsewhere = (places < 0) & (first > 0) | (places >= count) & (first + count < module.num_embeddings)
    padding = None if module.padding_idx is None else module.padding_idx - first
    if count:
        inside = padding is not None and 0 <= padding < count
        found = nn.functional.embedding(places.masked_fill(elsewhere, 0), module.weight, padding if inside else None)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
    else:
        found = module.weight.new_zeros(*given.shape, module.embedding_dim) + module.weight.sum()
    return _reduce_output(group, found)


def _reduce_output(group: TensorParallelGroup, partial: Tensor) -> Tensor:
    """Return the sum over the ranks: all of it, or sharded by tokens with sequence parallelism."""
    if group.sequence and torch.is_grad_enabled():
        return reduce_scatter_tokens(partial, group)
    return exchange(partial, group.all_reduce)


_FORWARDS: Mapping[str, Callable[..., Tensor]] = {
    "column": _column,
    "row": _row,
    "gathered": _gathered,
    "vocabulary": _vocabulary,
}


def _linear(given: Tensor, weight: Tensor, bias: Tensor | None, turned: bool) -> Tensor:
    return nn.functional.linear(given, weight.T if turned else weight, bias)
