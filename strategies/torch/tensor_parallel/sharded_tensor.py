"""A tensor that looks whole to user code while each rank of a tensor-parallel group holds a part of it.

A job's loss is a function of whole logits. It gets a `ShardedTensor`, below which autograd's operations run on the
parts where a rule exists: views, pointwise operations, norms and dropout, and of cross-entropy the log-softmax and the
choice of targets, which reduce a few numbers of each token over the ranks (Shoeybi et al., 2019, section 3). Gradients
are sharded in the same way. A rule returns None where it cannot work on parts; such operations, and those without a
rule, gather the tensor first. torch's `loss_parallel` has the same formulas for DTensors, which cannot be combined with
the plain tensors of a loss, and raise for operations without a rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from trainwright.core.errors import JobError
from trainwright.strategies.torch.tensor_parallel.tensor_group import TensorParallelGroup
from trainwright.strategies.torch.torch_compat import (
    DisableTorchFunctionSubclass,
    assert_on_device,
    tree_leaves,
    tree_map,
    wrapper_subclass,
)

_View = Callable[[Tensor], Tensor]


@dataclass(kw_only=True, eq=False)
class _ShardStorage:
    """The memory that a sharded tensor and its views share.

    It stays gathered once it was, so that changes in place reach all views.
    """

    group: TensorParallelGroup
    global_meta: Tensor  # shape, strides and type of the whole, on the meta device
    shard_dim: int
    held: Tensor  # this rank's part; the whole once it was gathered
    is_sharded: bool = True

    def gather(self) -> None:
        """Hold the whole tensor; every rank calls it."""
        if self.is_sharded:
            shape, strides = self.global_meta.shape, self.global_meta.stride()
            joined = self.group.all_gather(self.held, shape[self.shard_dim], self.shard_dim)
            if joined.stride() != strides:
                joined = torch.empty_strided(shape, strides, dtype=joined.dtype, device=joined.device).copy_(joined)
            self.held, self.is_sharded = joined, False


class ShardedTensor(Tensor):
    """A tensor with the shape of the whole, of which this rank holds a part along one dimension.

    An operation with a rule in `_RULES` computes on the part; every other one gathers the tensor first. A rule is asked
    where at least one of the arguments is sharded.
    """

    shard_storage: _ShardStorage  # the memory, shared with views
    _views: tuple[_View, ...]
    global_meta: Tensor  # shape, strides and type of this view, on the meta device
    shard_dim: int  # the dimension of this view along which the ranks hold parts

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Put a node into the graph before plain tensors with a gradient, which gives them a plain gradient."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if torch.is_grad_enabled() and not (name.startswith("__") or name.endswith("_")):
            args, kwargs = tree_map(_with_full_gradient, (args, kwargs))
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        rule = _RULES.get(packet)
        if rule is None and torch.Tag.pointwise in func.tags and "out" not in kwargs:
            rule = _in_place_rule if func._schema.is_mutable else _pointwise_rule
        made = None
        if rule is not None and any(map(is_sharded, tree_leaves((args, kwargs)))):
            made = rule(func, args, kwargs)
        return _run_on_full(func, args, kwargs) if made is None else made

    @staticmethod
    def __new__(
        cls: type[ShardedTensor],
        shard_storage: _ShardStorage,
        views: tuple[_View, ...],
        global_meta: Tensor,
        shard_dim: int,
    ) -> ShardedTensor:
        """Make a view of the memory."""
        made: ShardedTensor = wrapper_subclass(cls, global_meta, shard_storage.held.device)
        made.shard_storage, made._views, made.global_meta, made.shard_dim = shard_storage, views, global_meta, shard_dim
        return made

    @classmethod
    def of(cls, local: Tensor, group: TensorParallelGroup, shard_dim: int, global_meta: Tensor) -> ShardedTensor:
        """Return a sharded tensor of this rank's part, in memory of its own."""
        strides = global_meta.stride()
        order = sorted(range(global_meta.dim()), key=lambda each: -strides[each])  # in memory, so that views are alike
        local = local.permute(order).contiguous().permute([order.index(each) for each in range(global_meta.dim())])
        storage = _ShardStorage(group=group, global_meta=global_meta, shard_dim=shard_dim, held=local)
        return cls(storage, (), global_meta, shard_dim)

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds only its part: the tensor has not been gathered."""
        return self.shard_storage.is_sharded

    @property
    def local(self) -> Tensor:
        """This rank's part, seen through the views; the whole tensor once it was gathered."""
        made = self.shard_storage.held
        for view in self._views:
            made = view(made)
        return made

    @property
    def local_range(self) -> tuple[int, int]:
        """Start and length of this rank's part along the sharded dimension."""
        return self.shard_storage.group.own_range(self.shape[self.shard_dim])

    def whole(self) -> Tensor:
        """Gather and return the whole tensor, without a graph; every rank calls it."""
        self.shard_storage.gather()
        return self.local

    def viewed(self, view: _View, claim: Tensor, along: int) -> ShardedTensor:
        """Return a view of this tensor."""
        return ShardedTensor(self.shard_storage, (*self._views, view), claim, along)

    def like(self, part: Tensor, claim: Tensor, along: int | None = None) -> ShardedTensor:
        """Return another tensor with the same sharding, of which this rank holds `part`."""
        return ShardedTensor.of(part, self.shard_storage.group, self.shard_dim if along is None else along, claim)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # gathers nothing
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, apart={self.is_sharded})"

    def _plain(self) -> Tensor:
        return self.whole().detach().requires_grad_(self.requires_grad)

    def numpy(self, *, force: bool = False) -> Any:
        """As of any tensor."""
        return self._plain().numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._plain().__array__(*args, **kwargs)  # type: ignore[no-untyped-call]

    def tolist(self) -> Any:
        """As of any tensor."""
        return self._plain().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Any:
        return deepcopy(self._plain(), memo)

    def data_ptr(self) -> int:
        """As of any tensor."""
        return self.whole().data_ptr()


def is_sharded(value: Any) -> TypeGuard[ShardedTensor]:
    """Return whether a value is a tensor of which this rank holds only its part."""
    return isinstance(value, ShardedTensor) and value.is_sharded


def check_first_order() -> None:
    """Raise JobError where a backward builds a graph: second derivatives are not supported."""
    if torch.is_grad_enabled():
        raise JobError(
            [
                "second derivatives through tensor-parallel layers are not supported (create_graph=True): use tp=1, "
                "or a loss without a gradient in it"
            ]
        )


class _Exchange(torch.autograd.Function):
    """Applies one function to a tensor, and another one to its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: _View | None, backward: _View | None) -> Tensor:
        ctx.backward_of = backward
        return tensor.view_as(tensor) if forward is None else forward(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        check_first_order()
        return gradients[0] if ctx.backward_of is None else ctx.backward_of(gradients[0]), None, None


def exchange(tensor: Tensor, forward: _View | None = None, backward: _View | None = None) -> Tensor:
    """Return `forward(tensor)`, whose gradient goes through `backward`; without a function each passes unchanged."""
    made: Tensor = _Exchange.apply(tensor, forward, backward)  # type: ignore[no-untyped-call]
    return made


def full_gradient(gradient: Tensor) -> Tensor:
    """Return the gradient, gathered where it is sharded."""
    return gradient.whole() if isinstance(gradient, ShardedTensor) else gradient


def _with_full_gradient(each: Any) -> Any:
    if isinstance(each, ShardedTensor) or not isinstance(each, Tensor) or not each.requires_grad:
        return each
    made: Any = exchange(each, backward=full_gradient)
    made.met = True
    return made


def _local_operand(tensor: ShardedTensor, other: Tensor) -> Tensor | None:
    """Return the part of `other` that fits this rank's part of `tensor`; None where there is none."""
    width, place = tensor.shape[tensor.shard_dim], other.dim() - tensor.dim() + tensor.shard_dim
    if isinstance(other, ShardedTensor):
        if other.is_sharded:
            return other.local if place == other.shard_dim and other.shape[place] == width else None
        other = other.whole()
    if place < 0 or other.shape[place] == 1:
        return other
    if other.requires_grad and torch.is_grad_enabled() and not hasattr(other, "met"):
        return None  # its gradient has to be a plain tensor
    return other.narrow(place, *tensor.local_range)


def _local_operands(tensor: ShardedTensor, values: Sequence[Any]) -> list[Any] | None:
    """Return the values with the part of each tensor that fits; None where one of them has no such part."""
    given = [_local_operand(tensor, each) if isinstance(each, Tensor) else each for each in values]
    missing = any(part is None and value is not None for part, value in zip(given, values, strict=True))
    return None if missing else given


# --- Rules: cross-entropy over a sharded vocabulary -------------------------------------------------------------------


_MEAN, _SUM = 1, 2  # reductions, as torch numbers them


def _log_softmax_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """Log-softmax over the sharded dimension: maximum and sum are reduced over the ranks."""
    tensor, dimension, wider = args
    if dimension % tensor.dim() != tensor.shard_dim:
        return None
    along, group, numbers = tensor.shard_dim, tensor.shard_storage.group, _at_least_fp32(tensor.local)
    least = numbers.new_full(_with_size(numbers.shape, along, 1), -math.inf)
    numbers = numbers - group.all_reduce_max(numbers.amax(along, keepdim=True) if numbers.shape[along] else least)
    made = numbers - group.all_reduce(numbers.exp().sum(along, keepdim=True)).log()
    return _sharded_like(tensor, made.to(torch.float32 if wider else tensor.dtype))


def _log_softmax_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Its gradient."""
    gradient, tensor, dimension, kind = args
    if not is_sharded(tensor) or dimension % tensor.dim() != tensor.shard_dim:
        return None
    slopes = _local_operand(tensor, gradient)
    if slopes is None:
        return None
    slopes, along = _at_least_fp32(slopes), tensor.shard_dim
    whole = tensor.shard_storage.group.all_reduce(slopes.sum(along, keepdim=True))
    made = slopes - _at_least_fp32(tensor.local).exp() * whole
    return _sharded_like(tensor, made.to(kind))


def _nll_loss(func: Any, args: Any, kwargs: Any) -> Any:
    """NLL loss: each target's log-probability comes from the rank that holds it."""
    tensor, targets, weight, reduction, ignored = args
    along = min(tensor.dim() - 1, 1)
    if not is_sharded(tensor) or tensor.shard_dim != along:
        return None
    targets = targets.long()  # bytes have no -100, and index as a mask
    _check_targets(targets, tensor.shape[along], ignored)
    counts, here, places = _target_positions(tensor, targets, ignored)
    held = tensor.local if tensor.local_range[1] else tensor.local.new_zeros(_with_size(tensor.shape, along, 1))
    found = held.gather(along, places.unsqueeze(along)).squeeze(along).masked_fill(~here, 0.0)
    weights = _target_weights(tensor, weight, targets, counts)
    values = -tensor.shard_storage.group.all_reduce(found) * weights
    values = values.masked_fill(~counts, 0.0)
    if reduction not in (_MEAN, _SUM) and tensor.dim() > 1:
        return values, tensor.local.new_zeros(())
    total = weights.sum()
    return (values.sum() / total if reduction == _MEAN else values.sum()), total


def _nll_loss_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Its gradient."""
    gradient, tensor, targets, weight, reduction, ignored, total = args
    along = min(tensor.dim() - 1, 1)
    if not is_sharded(tensor) or tensor.shard_dim != along:
        return None
    targets = targets.long()
    counts, here, places = _target_positions(tensor, targets, ignored)
    slopes = -gradient * _target_weights(tensor, weight, targets, counts) / (total if reduction == _MEAN else 1.0)
    made = torch.zeros_like(tensor.local, memory_format=torch.contiguous_format)
    if tensor.local_range[1]:
        made.scatter_(along, places.unsqueeze(along), slopes.masked_fill(~here, 0.0).to(made.dtype).unsqueeze(along))
    return _sharded_like(tensor, made)


def _target_positions(tensor: ShardedTensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return which targets count, which of them this rank holds, and where in its part; 0 for others."""
    first, count = tensor.local_range
    counts = targets != ignored
    here = counts & (targets >= first) & (targets < first + count)
    return counts, here, (targets - first).masked_fill(~here, 0)


def _target_weights(tensor: ShardedTensor, weight: Tensor | None, targets: Tensor, counts: Tensor) -> Tensor:
    """Return the weight of each target; 0 where it does not count."""
    if weight is None:
        return counts.to(tensor.dtype)
    return weight[targets.masked_fill(~counts, 0)].masked_fill(~counts, 0.0)


def _check_targets(targets: Tensor, width: int, ignored: int) -> None:
    """Raise IndexError, as on one device, for a target that is not in the vocabulary."""
    if targets.is_meta:
        return
    wrong = (targets != ignored) & ((targets < 0) | (targets >= width))
    if targets.is_cuda:
        assert_on_device(~wrong.any())
    elif bool(wrong.any()):
        raise IndexError(f"Target {int(targets[wrong].flatten()[0])} is out of bounds.")


def _at_least_fp32(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 at least, in which torch's own kernels add up."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _with_size(shape: Sequence[int], place: int, size: int) -> list[int]:
    made = [*shape]
    made[place] = size
    return made


# --- Rules: norms and dropout of tensors sharded by tokens ------------------------------------------------------------


def _layer_norm_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """Layer norm and RMS norm over dimensions that are not sharded."""
    tensor, over, *rest = args
    if not _norm_is_local(tensor, over) or any(isinstance(each, ShardedTensor) for each in rest):
        return None
    made = func(tensor.local, over, *rest, **kwargs)
    return tuple(_sharded_like(tensor, each) for each in made)


def _layer_norm_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Backward of layer norm; gradients of the norm's parameters are summed over the ranks."""
    gradient, tensor, over, *rest = args
    if not _norm_is_local(tensor, over):
        return None
    given = _local_operands(tensor, (gradient, *rest))
    if given is None:
        return None
    made, *learned = func(given[0], tensor.local, over, *given[1:], **kwargs)
    group = tensor.shard_storage.group
    sums = [
        each if each is None else group.all_reduce(each if tensor.local_range[1] else torch.zeros_like(each))
        for each in learned
    ]
    return (None if made is None else _sharded_like(tensor, made), *sums)


def _dropout_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """Dropout: every rank draws the mask of the whole tensor and takes its part."""
    tensor, share, training = args
    ones = torch.ones((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape).contiguous()
    _, mask = func(ones, share, training, **kwargs)
    mask = mask.narrow(tensor.shard_dim, *tensor.local_range).contiguous()
    scale = 0.0 if share == 1.0 else 1.0 / (1.0 - share)
    made = tensor.local * mask * scale if training else tensor.local.clone()
    return _sharded_like(tensor, made), _sharded_like(tensor, mask)


def _norm_is_local(tensor: Tensor, over: Any) -> TypeGuard[ShardedTensor]:
    """Return whether a tensor is sharded, but not along the normalized dimensions."""
    return is_sharded(tensor) and tensor.shard_dim < tensor.dim() - len(over)


def _sharded_like(tensor: ShardedTensor, part: Tensor) -> Tensor:
    """Return a part as a tensor sharded like another one; other dimensions may differ."""
    shape = _with_size(part.shape, tensor.shard_dim, tensor.shape[tensor.shard_dim])
    return tensor.like(part, torch.empty(shape, dtype=part.dtype, device="meta"))


# --- Rules: views, copies, pointwise operations and reductions --------------------------------------------------------


_aten = torch.ops.aten


def from_local(part: Tensor, group: TensorParallelGroup, width: int) -> Tensor:
    """Return a tensor of `width` along the last dimension, of which this rank holds `part`."""

    def shard(part: Tensor) -> Tensor:
        claim = torch.empty((*part.shape[:-1], width), dtype=part.dtype, device="meta")
        return ShardedTensor.of(part.detach(), group, part.dim() - 1, claim)

    def own_part(gradient: Tensor) -> Tensor:
        if is_sharded(gradient) and gradient.shard_dim == gradient.dim() - 1:
            return gradient.local
        return full_gradient(gradient).narrow(-1, *group.own_range(width)).contiguous()

    return exchange(part, shard, own_part)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor, with its graph; every rank calls it. A plain tensor is returned as it is."""
    if not isinstance(tensor, ShardedTensor):
        return tensor

    def gathered(held: Any) -> Tensor:
        whole: Tensor = held.whole()
        return whole.view_as(whole)

    return exchange(tensor, gathered)


# --- Running operations -----------------------------------------------------------------------------------------------


def _run_on_full(func: Any, args: Any, kwargs: Any) -> Any:
    """Gather all sharded arguments and run an operation on them; changes in place are kept."""
    held: dict[int, ShardedTensor] = {}

    def opened(each: Any) -> Any:
        if not isinstance(each, ShardedTensor):
            return each
        if each.is_sharded:
            each.shard_storage.group.before_gather(func)
        whole = each.whole()
        held[id(whole)] = each
        return whole

    given = tree_map(opened, (args, kwargs))
    made = func(*given[0], **given[1])
    return tree_map(lambda each: held.get(id(each), each), made)


def _global_meta(func: Any, args: Any, kwargs: Any, width: int | None = None) -> Any:
    """Run an operation on the meta device with global shapes, or with another width of the sharded dimension."""

    def bare(each: Any) -> Any:
        if isinstance(each, ShardedTensor):
            if width is None:
                return each.global_meta
            return each.global_meta.new_empty(_with_size(each.shape, each.shard_dim, width))
        return torch.empty_like(each, device="meta") if isinstance(each, Tensor) else each

    given = tree_map(bare, (args, {**kwargs, "device": "meta"} if "device" in kwargs else kwargs))
    return func(*given[0], **given[1])


def _view_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """A view that keeps or moves the sharded dimension."""
    tensor = args[0]
    claim, width = _global_meta(func, args, kwargs), tensor.shape[tensor.shard_dim]
    other = _global_meta(func, args, kwargs, width - 1)
    differing = [each for each, sizes in enumerate(zip(claim.shape, other.shape, strict=True)) if len({*sizes}) > 1]
    if len(differing) != 1 or (claim.shape[differing[0]], other.shape[differing[0]]) != (width, width - 1):
        return None
    return tensor.viewed(lambda held: func(held, *args[1:], **kwargs), claim, differing[0])


def _reshape_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """A reshape that keeps the sharded dimension as one dimension."""
    tensor = args[0]
    claim, along, width = _global_meta(func, args, kwargs), tensor.shard_dim, tensor.shape[tensor.shard_dim]
    before = math.prod(tensor.shape[:along])
    found = (each for each, size in enumerate(claim.shape) if (math.prod(claim.shape[:each]), size) == (before, width))
    place = next(found, None)
    if place is None:
        return None
    return _viewed_as(func, tensor, claim, place)


def _expand_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """An expand of other dimensions than the sharded one."""
    tensor, claim = args[0], _global_meta(func, args, kwargs)
    place = claim.dim() - tensor.dim() + tensor.shard_dim
    if claim.shape[place] != tensor.shape[tensor.shard_dim] or claim.shape[place] == 1:
        return None
    return _viewed_as(func, tensor, claim, place)


def _viewed_as(func: Any, tensor: ShardedTensor, claim: Tensor, place: int) -> ShardedTensor:
    """Return a tensor in another global shape, whose dimension `place` is the sharded one."""
    along = tensor.shard_dim
    return tensor.viewed(lambda held: func(held, _with_size(claim.shape, place, held.shape[along])), claim, place)


def _copy_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """A copy of another type or memory order."""
    (tensor, *_), claim = args, _global_meta(func, args, kwargs)
    if kwargs.get("device") not in (None, tensor.device) or not claim.is_floating_point():
        return None
    return tensor.like(func(tensor.local, *args[1:], **kwargs), claim)


def _index_select_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """An index_select along another dimension than the sharded one."""
    tensor, dimension, *_ = args
    if not is_sharded(tensor) or dimension % tensor.dim() == tensor.shard_dim:
        return None
    return tensor.like(func(tensor.local, *args[1:], **kwargs), _global_meta(func, args, kwargs))


def _new_tensor_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """A new plain tensor of the global shape."""
    stand_in = torch.empty((), dtype=args[0].dtype, device=args[0].device).expand(args[0].shape)
    return func(stand_in, *args[1:], **kwargs)


def _pointwise_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """A pointwise operation; of plain tensors each rank takes its part."""
    flat = tree_leaves((args, kwargs))
    tensor = next(filter(is_sharded, flat))
    parts = {id(each): _local_operand(tensor, each) for each in flat if isinstance(each, Tensor)}
    if any(each is None for each in parts.values()):
        return None
    claim = _global_meta(func, args, kwargs)
    if not isinstance(claim, Tensor) or not claim.is_floating_point():
        return None
    given = tree_map(lambda each: parts.get(id(each), each), (args, kwargs))
    return tensor.like(func(*given[0], **given[1]), claim, claim.dim() - tensor.dim() + tensor.shard_dim)


def _in_place_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """A pointwise operation in place."""
    tensor, *rest = args
    if not is_sharded(tensor):
        return None
    given = _local_operands(tensor, rest)
    if given is None:
        return None
    func(tensor.local, *given, **kwargs)
    return tensor


def _reduction_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """A sum or mean; over the sharded dimension, sums are reduced over the ranks."""
    tensor = args[0]
    over = [each % tensor.dim() for each in (args[1] if len(args) > 1 and args[1] else range(tensor.dim()))]
    if tensor.shard_dim in over and func._overloadpacket is _aten.mean:
        return None
    made = func(tensor.local, *args[1:], **kwargs)
    if tensor.shard_dim in over:
        return tensor.shard_storage.group.all_reduce(made)
    kept = len(args) > 2 and args[2]
    along = tensor.shard_dim - (0 if kept else sum(each < tensor.shard_dim for each in over))
    return tensor.like(made, _global_meta(func, args, kwargs), along)


def _select_backward_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """Backward of select and slice along another dimension than the sharded one."""
    gradient, sizes, dimension, *rest = args
    dimension, along = dimension % len(sizes), gradient.shard_dim
    if func._overloadpacket is _aten.select_backward:
        along += dimension <= along
    if along == dimension:
        return None
    part = _with_size(sizes, along, gradient.local_range[1])
    return gradient.like(func(gradient.local, part, dimension, *rest), _global_meta(func, args, kwargs), along)


_OPS: Mapping[Callable[[Any, Any, Any], Any], Sequence[Any]] = {
    _view_rule: (
        _aten.transpose, _aten.permute, _aten.t, _aten.unsqueeze, _aten.squeeze, _aten.slice, _aten.select, _aten.alias,
        _aten.detach,
    ),
    _reshape_rule: (_aten.view, _aten._unsafe_view),
    _expand_rule: (_aten.expand,),
    _index_select_rule: (_aten.index_select,),
    _copy_rule: (_aten.clone, _aten._to_copy),
    _new_tensor_rule: (
        _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.empty_like, _aten.new_zeros, _aten.new_ones,
        _aten.new_full, _aten.new_empty, _aten.new_empty_strided,
    ),
    _select_backward_rule: (_aten.slice_backward, _aten.select_backward),
    _nll_loss: (_aten.nll_loss_forward, _aten.nll_loss2d_forward),
    _nll_loss_backward: (_aten.nll_loss_backward, _aten.nll_loss2d_backward),
    _layer_norm_rule: (_aten.native_layer_norm, _aten._fused_rms_norm),
    _layer_norm_backward: (_aten.native_layer_norm_backward, _aten._fused_rms_norm_backward),
    _dropout_rule: (_aten.native_dropout,),
    _reduction_rule: (_aten.sum, _aten.mean),
    _log_softmax_rule: (_aten._log_softmax,),
    _log_softmax_backward: (_aten._log_softmax_backward_data,),
}  # fmt: skip
_RULES = {op: rule for rule, ops in _OPS.items() for op in ops}
