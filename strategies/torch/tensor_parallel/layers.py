"""Layers divided over the ranks of a tensor-parallel group, in the modules' own forward (Shoeybi et al., 2019).

Each rank holds plain tensors, which it computes with as one device would: torch's `parallelize_module` makes DTensors
of some parameters, which optimizers refuse beside plain ones (`_foreach_mul_ got mixed torch.Tensor and DTensor`), and
communicates in hooks, which a model that is cut into sections runs where it should pass by. Here a stage, FSDP2 and an
optimizer see nothing of the division.

A row ends with a reduce-scatter over tokens in place of its all-reduce, and what a column is given is gathered;
backward does the same the other way round. What lies between is taken for whole (see `apart`): residual sums, norms
and dropout are done on a rank's own tokens, and of what they learn the gradient is added up over the ranks where it
is made. A column's input is gathered again in backward, not kept. What needs all tokens gathers them first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from trainwright.core.data import fold_seed
from trainwright.core.errors import JobError
from trainwright.strategies.torch.checkpoint.shard_layout import ShardSlice, hook_problem
from trainwright.strategies.torch.tensor_parallel.sharded_tensor import (
    ShardedTensor,
    ShardedTensorBase,
    check_first_order,
    from_local,
)


def reduce_scatter_tokens(partial: Tensor, ring: TensorParallelGroup) -> Tensor:
    """This rank's tokens of the sum over the ranks, to be taken for all of it."""
    made: Tensor = _ReduceScatterTokens.apply(partial, ring)  # type: ignore[no-untyped-call]
    return made


def _is_token_sharded(tensor: Tensor) -> bool:
    """Whether each rank holds some of its tokens, and not of its last dimension."""
    return isinstance(tensor, ShardedTensorBase) and tensor.apart and tensor.along != tensor.dim() - 1


@dataclass(kw_only=True)
class _BackwardGather:
    """Gathers tokens in backward, once for all layers that were given them; until then it holds none.

    Attributes:
        width: tokens of all ranks.
        along: their dimension.
        layers: how many will ask.
    """

    ring: TensorParallelGroup
    width: int
    along: int
    layers: int = 0
    _asked: int = 0
    _whole: Tensor | None = None

    def of(self, part: Tensor) -> Tensor:
        """All tokens, of which this rank has a part; kept until the last of the layers has asked."""
        whole = self.ring.joined(part, self.width, self.along) if self._whole is None else self._whole
        self._asked += 1
        self._whole = whole if self._asked % self.layers else None
        return whole


@dataclass(kw_only=True)
class GatheredTokens:
    """What columns are given, gathered once for all of them, and once for all of their backwards.

    Attributes:
        whole: all tokens, of the graph: its gradient is this rank's share of a sum.
        part: this rank's tokens.
        again: all tokens in backward.
    """

    whole: Tensor
    part: Tensor
    again: _BackwardGather

    @classmethod
    def of(cls, given: Tensor, ring: TensorParallelGroup) -> GatheredTokens:
        """In the type that linear layers compute in."""
        kind = given.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind) and given.dtype != torch.float64:
            given = given.to(torch.get_autocast_dtype(kind))
        assert isinstance(given, ShardedTensorBase), "each rank holds some of the tokens"
        whole: Tensor = _AllGatherTokens.apply(given, ring)  # type: ignore[no-untyped-call]
        again = _BackwardGather(ring=ring, width=given.shape[given.along], along=given.along)
        return cls(whole=whole, part=given.held, again=again)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Some outputs of a linear layer; `weight` is (outputs, inputs)."""
        made: Tensor = _TokenShardedLinear.apply(self.whole, weight, bias, self.part, self.again)  # type: ignore[no-untyped-call]
        return made


def _full_gradient(gradient: Tensor) -> Tensor:
    return gradient.whole() if isinstance(gradient, ShardedTensorBase) else gradient


def _local_tokens(partial: Tensor, ring: TensorParallelGroup, along: int) -> Tensor:
    claim = torch.empty(partial.shape, dtype=partial.dtype, device="meta")
    return ShardedTensor.of(ring.scattered(partial, along), ring, along, claim)


class _ReduceScatterTokens(torch.autograd.Function):
    """Each rank has a part of a sum, and then some tokens of it."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, ring: TensorParallelGroup) -> Tensor:
        return _local_tokens(partial, ring, max(partial.dim() - 2, 0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        check_first_order()
        return _full_gradient(gradients[0]), None


class _AllGatherTokens(torch.autograd.Function):
    """Each rank has some tokens, and then all, and gives a part of their gradient."""

    @staticmethod
    def forward(ctx: Any, given: ShardedTensorBase, ring: TensorParallelGroup) -> Tensor:
        ctx.ring, ctx.along = ring, given.along
        return ring.joined(given.held, given.shape[given.along], given.along)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        check_first_order()
        return _local_tokens(gradients[0], ctx.ring, ctx.along), None


class _TokenShardedLinear(torch.autograd.Function):
    """A linear layer that keeps a rank's tokens of its input."""

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


_Key = tuple[Callable[..., Any], int, bool]
ROLES = ("column", "row", "gathered", "vocabulary")


@dataclass(frozen=True, kw_only=True)
class TensorParallelPlan:
    """How a model is divided.

    Attributes:
        roles: by module: `column` (some of the outputs of each rank), `row` (some of the inputs), `gathered` (some of
            the outputs, which are gathered where they are needed whole) or `vocabulary` (some of a table's rows).
        groups: modules between which values are divided, so that no cut may lie there.
        attributes: of modules, that are another number on each rank.
        random: columns from which on each rank draws its own random numbers, until the next row.
        sequence: between these layers each rank holds some of the tokens, in training.
    """

    roles: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[tuple[str, ...], ...] = ()
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    random: frozenset[str] = frozenset()
    sequence: bool = False

    def joined(self, other: TensorParallelPlan) -> TensorParallelPlan:
        """Both."""
        return TensorParallelPlan(
            roles={**self.roles, **other.roles},
            groups=self.groups + other.groups,
            attributes={
                name: {**self.attributes.get(name, {}), **other.attributes.get(name, {})}
                for name in (*self.attributes, *other.attributes)
            },
            random=self.random | other.random,
        )


@dataclass(kw_only=True)
class TensorParallelGroup:
    """The ranks that hold a layer together.

    Attributes:
        index, of: this one's place.
        group: in which they communicate; another one after each formation.
        sequence: each holds some of the tokens between divided regions, in training.
    """

    index: int
    of: int
    group: distributed.ProcessGroup | None = None
    sequence: bool = False
    _shared: list[tuple[torch.device, Tensor]] | None = None
    _copies: dict[_Key, tuple[Tensor, int, Any]] = field(default_factory=dict)  # what was given, and its version then

    def copied(self, tensor: Tensor) -> Tensor:
        """The tensor, whose gradient is the sum over the ranks.

        Layers that are given the same tensor share it until a row ends their block: autograd adds up on each rank, and
        the ranks once.
        """
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        copy: Tensor = self._once(_CopyToGroup.apply, tensor)
        return copy

    def streamed(self, tensor: Tensor) -> GatheredTokens | None:
        """All tokens of what each rank holds some of; likewise shared. None where this rank has all of them."""
        if not _is_token_sharded(tensor):
            return None
        found: GatheredTokens = self._once(GatheredTokens.of, tensor)
        return found

    def _once(self, make: Callable[[Tensor, TensorParallelGroup], Any], tensor: Tensor) -> Any:
        """What was made of a tensor, with a graph or without one, as long as nobody has changed it."""
        key = make, id(tensor), torch.is_grad_enabled()
        _, version, made = self._copies.get(key, (None, -1, None))
        if version != tensor._version:
            made = make(tensor, self)
            self._copies[key] = tensor, tensor._version, made
        return made

    def forget(self) -> None:
        """What was shared is not asked for any more."""
        self._copies.clear()

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks."""
        total = tensor.contiguous().clone()
        distributed.all_reduce(total, group=self.group)
        return total

    def highest(self, tensor: Tensor) -> Tensor:
        """The highest of all ranks, number by number."""
        top = tensor.contiguous().clone()
        distributed.all_reduce(top, distributed.ReduceOp.MAX, group=self.group)
        return top

    def joined(self, tensor: Tensor, width: int, along: int = -1) -> Tensor:
        """What the ranks hold along a dimension, one after the other."""
        own = _padded(tensor, -(-width // self.of), along).contiguous()
        pieces = [torch.empty_like(own) for _ in range(self.of)]
        distributed.all_gather(pieces, own, group=self.group)
        return torch.cat(pieces, dim=along).narrow(along, 0, width)

    def scattered(self, tensor: Tensor, along: int) -> Tensor:
        """This rank's share, along a dimension, of the sum over the ranks."""
        width = tensor.shape[along]
        each = -(-width // self.of)
        whole = _padded(tensor, each * self.of, along).movedim(along, 0).contiguous()
        own = whole.new_empty((each, *whole.shape[1:]))
        distributed.reduce_scatter_tensor(own, whole, group=self.group)
        return own[: ShardSlice.share((width,), 0, self.index, self.of).count].movedim(0, along)

    def asked(self, func: Any) -> None:
        """An operation is about to gather what is held apart."""

    def enter(self, device: torch.device) -> None:
        """From here on each rank draws its own random numbers: what it computes no other rank does."""
        devices = [torch.device("cpu"), *([device] if device.type == "cuda" else [])]
        seed = int(torch.randint(2**62, ()))
        self._shared = [(one, _rng_state(one)) for one in devices]
        for one, _ in self._shared:
            _generator(one).manual_seed(fold_seed(seed, self.index))

    def leave(self) -> None:
        """All draw the same again."""
        for device, state in self._shared or ():
            _generator(device).set_state(state)
        self._shared = None


def _padded(tensor: Tensor, width: int, along: int) -> Tensor:
    """With zeros up to a width along a dimension."""
    shape = [*tensor.shape]
    shape[along] = width - shape[along]
    return torch.cat((tensor, tensor.new_zeros(shape)), dim=along) if shape[along] else tensor


def shard_layers(
    model: nn.Module, split: TensorParallelPlan, ring: TensorParallelGroup, where: str
) -> dict[str, ShardSlice]:
    """Keep this rank's part of each layer that is divided, and let their forwards communicate.

    Args:
        model: in host memory; what of it another stage holds may be gone.
        split: of the whole model.
        where: the rank, for errors.

    Returns:
        What is kept of each parameter that was divided, by all of its names.

    Raises:
        JobError: a parameter has hooks.
    """
    for name, attributes in split.attributes.items():
        for key, value in attributes.items():
            setattr(model.get_submodule(name), key, value)
    _without_fast_path(model, split)
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
                box = ShardSlice.share(whole.shape, dimension, ring.index, ring.of)
                held = whole.detach()[box.inside(ShardSlice.all_of(whole.shape))].clone(
                    memory_format=torch.contiguous_format
                )
                part = nn.Parameter(held, requires_grad=whole.requires_grad)
                part.__dict__.update(whole.__dict__)  # what an optimizer may ask for
                parts[whole] = part, box
        forward: Callable[..., Tensor] = partial(_FORWARDS[role], ring, module, weight_is_transposed(module))
        module.forward = partial(forward, opens=name in split.random) if role == "column" else forward
    boxes = {}
    for path, owner, key, parameter in _parameter_sites(model):
        if parameter in parts:
            owner._parameters[key], boxes[path] = parts[parameter]
    return boxes


def weight_is_transposed(module: nn.Module) -> bool | None:
    """Whether a linear layer's weight is (inputs, outputs) rather than the other way; None for any other module."""
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
    """Other numbers than a module's own, which may be zero or symmetric; all above zero, so that sums are precise."""
    return torch.linspace(0.5, 1.0, math.prod(shape), dtype=like.dtype, device=like.device).view(*shape)


def shard_dims(module: nn.Module, role: str) -> dict[str, int]:
    """Along which dimension each parameter of a module is divided."""
    outputs = 1 if role in ("column", "row") and weight_is_transposed(module) else 0
    if role == "row":
        return {"weight": 1 - outputs}
    return {"weight": outputs} | ({"bias": 0} if module._parameters.get("bias") is not None else {})


def _parameter_sites(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Each name of each parameter, and where it is held."""
    for path, owner in model.named_modules(remove_duplicate=False):
        for key, parameter in [*owner._parameters.items()]:
            if parameter is not None:
                yield f"{path}.{key}" if path else key, owner, key, parameter


def _without_fast_path(model: nn.Module, split: TensorParallelPlan) -> None:
    """Let torch's encoder layers call their modules also in evaluation, where they would take the weights instead."""
    for name in split.roles:
        parent = model.get_submodule(name.rpartition(".")[0])
        if isinstance(parent, nn.TransformerEncoderLayer):
            parent.activation_relu_or_gelu = 0


def _column(ring: TensorParallelGroup, module: Any, turned: bool, given: Tensor, *, opens: bool) -> Tensor:
    """Some of the outputs of a linear layer."""
    if opens and module.training:
        ring.enter(given.device)
    return _outputs(ring, module, turned, given)


def _outputs(ring: TensorParallelGroup, module: Any, turned: bool, given: Tensor) -> Tensor:
    """Of a linear layer of which each rank has some outputs."""
    if (stream := ring.streamed(given)) is not None:
        return stream.linear(module.weight.T if turned else module.weight, module.bias)
    return _linear(ring.copied(given), module.weight, module.bias, turned)


def _row(ring: TensorParallelGroup, module: Any, turned: bool, given: Tensor) -> Tensor:
    """A linear layer of which each rank is given some of the inputs."""
    ring.leave()
    ring.forget()
    made = _reduce_output(ring, _linear(given, module.weight, None, turned))
    return made if module.bias is None else made + module.bias.to(made.dtype)


def _gathered(ring: TensorParallelGroup, module: Any, turned: bool, given: Tensor) -> Tensor:
    """A linear layer whose outputs are wanted whole; in training they are gathered by who needs them so."""
    part = _outputs(ring, module, turned, given)
    ring.forget()
    if torch.is_grad_enabled():
        return from_local(part, ring, module.out_features)
    return ring.joined(part, module.out_features)


def _vocabulary(ring: TensorParallelGroup, module: Any, _turned: bool, given: Tensor) -> Tensor:
    """A table of which each rank has some of the rows."""
    first = ShardSlice.share((module.num_embeddings,), 0, ring.index, ring.of).start[0]
    count = len(module.weight)
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
    return _reduce_output(ring, found)


def _reduce_output(ring: TensorParallelGroup, partial: Tensor) -> Tensor:
    """The sum over the ranks: all of it, or this rank's tokens of it."""
    if ring.sequence and torch.is_grad_enabled():
        return reduce_scatter_tokens(partial, ring)
    whole: Tensor = _ReduceFromGroup.apply(partial, ring)  # type: ignore[no-untyped-call]
    return whole


_FORWARDS: Mapping[str, Callable[..., Tensor]] = {
    "column": _column,
    "row": _row,
    "gathered": _gathered,
    "vocabulary": _vocabulary,
}


def _linear(given: Tensor, weight: Tensor, bias: Tensor | None, turned: bool) -> Tensor:
    return nn.functional.linear(given, weight.T if turned else weight, bias)


class _CopyToGroup(torch.autograd.Function):
    """Every rank has it, and each gives a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ring: TensorParallelGroup) -> Tensor:
        ctx.ring = ring
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        check_first_order()
        return ctx.ring.summed(gradients[0]), None


class _ReduceFromGroup(torch.autograd.Function):
    """Each rank has a part of it, and every one has its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ring: TensorParallelGroup) -> Tensor:
        return ring.summed(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        check_first_order()
        return gradients[0], None


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _rng_state(device: torch.device) -> Tensor:
    return _generator(device).get_state()
