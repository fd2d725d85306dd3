"""A vocabulary's logits, of which each rank of a group holds some, gathered where they are needed whole.

A job's loss is a function of whole logits. It is given a tensor that says it is whole and holds this rank's part.
Below autograd, operations that keep the vocabulary apart are done on the parts: views, what goes number by number, and
of cross-entropy the log-softmax and the choice of the targets', which add up a number or two of each token over the
ranks (Shoeybi et al., 2019, section 3). Gradients come back in the same way. Every other operation gathers the logits
first, and is done on all of them. torch's own `loss_parallel` has the same formulas for DTensors, which refuse to meet
the plain tensors that a loss brings along, and raise where they know no rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.strategies.torch.checkpoint.shard_layout import Box
from trainwright.strategies.torch.tensor_parallel import sequence_norms, vocab_cross_entropy
from trainwright.strategies.torch.tensor_parallel.sharded_tensor import Held, beside, first_order
from trainwright.strategies.torch.torch_compat import tree_map

if TYPE_CHECKING:
    from trainwright.strategies.torch.tensor_parallel.layers import Ring

_aten = torch.ops.aten
_VIEWS = (
    _aten.transpose, _aten.permute, _aten.t, _aten.unsqueeze, _aten.squeeze, _aten.slice, _aten.select, _aten.alias,
    _aten.detach,
)  # fmt: skip
_SHAPES = (_aten.view, _aten._unsafe_view)
_COPIES = (_aten.clone, _aten._to_copy)
_LIKE = (
    _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.empty_like,
    _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty, _aten.new_empty_strided,
)  # fmt: skip


class Parted(Held):
    """Does with its part what can be done with it, and gathers it for all else."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        rule = _RULES.get(packet)
        if rule is None and torch.Tag.pointwise in func.tags and "out" not in kwargs:
            rule = _in_place if func._schema.is_mutable else _pointwise
        made = rule(func, args, kwargs) if rule else None
        return _done_whole(func, args, kwargs) if made is None else made


def parted(part: Tensor, ring: Ring, width: int) -> Tensor:
    """What a rank has of `width` numbers along the last dimension, to be taken for all of them."""
    made: Tensor = _Taken.apply(part, ring, width)  # type: ignore[no-untyped-call]
    return made


def plain(tensor: Tensor) -> Tensor:
    """The same as a plain tensor, with its graph; every rank calls it."""
    made: Tensor = _Given.apply(tensor) if isinstance(tensor, Parted) else tensor  # type: ignore[no-untyped-call]
    return made


class _Taken(torch.autograd.Function):
    """A part is taken for the whole."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ring: Ring, width: int) -> Tensor:
        ctx.ring, ctx.width = ring, width
        claim = torch.empty((*part.shape[:-1], width), dtype=part.dtype, device="meta")
        return Parted.of(part.detach(), ring, part.dim() - 1, claim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        first_order()
        (gradient,) = gradients
        if isinstance(gradient, Parted):
            if gradient.apart and gradient.along == gradient.dim() - 1:
                return gradient.held, None, None
            gradient = gradient.whole()
        box = Box.share((ctx.width,), 0, ctx.ring.index, ctx.ring.of)
        return gradient[..., box.start[0] : box.stop[0]].contiguous(), None, None


class _Given(torch.autograd.Function):
    """What is taken for whole becomes so."""

    @staticmethod
    def forward(ctx: Any, tensor: Parted) -> Tensor:
        whole = tensor.whole()
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        first_order()
        return gradients[0]


# --- operations, given as autograd gives them; a rule answers None where all numbers are needed ------------------


def _done_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on all numbers; what it changes in place stays changed."""
    held: dict[int, Parted] = {}

    def opened(each: Any) -> Any:
        if not isinstance(each, Parted):
            return each
        if each.apart:
            each.numbers.ring.asked(func)
        whole = each.whole()
        held[id(whole)] = each
        return whole

    given = tree_map(opened, (args, kwargs))
    made = func(*given[0], **given[1])
    return tree_map(lambda each: held.get(id(each), each), made)


def _claimed(func: Any, args: Any, kwargs: Any, width: int | None = None) -> Any:
    """What an operation would make of all numbers, on the meta device; or of so many along the vocabulary."""

    def bare(each: Any) -> Any:
        if isinstance(each, Parted):
            if width is None:
                return each.claim
            shape = [*each.shape]
            shape[each.along] = width
            return each.claim.new_empty(shape)
        return torch.empty_like(each, device="meta") if isinstance(each, Tensor) else each

    given = tree_map(bare, (args, {**kwargs, "device": "meta"} if "device" in kwargs else kwargs))
    return func(*given[0], **given[1])


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """A view that leaves the vocabulary's dimension as it is, or moves it."""
    tensor = args[0]
    if not tensor.apart:
        return None
    claim, width = _claimed(func, args, kwargs), tensor.shape[tensor.along]
    other = _claimed(func, args, kwargs, width - 1)
    differing = [each for each, sizes in enumerate(zip(claim.shape, other.shape, strict=True)) if len({*sizes}) > 1]
    if len(differing) != 1 or (claim.shape[differing[0]], other.shape[differing[0]]) != (width, width - 1):
        return None
    return tensor.viewed(lambda held: func(held, *args[1:], **kwargs), claim, differing[0])


def _shape(func: Any, args: Any, kwargs: Any) -> Any:
    """Another shape in which the vocabulary still has a dimension of its own."""
    tensor = args[0]
    if not tensor.apart:
        return None
    claim, along, width = _claimed(func, args, kwargs), tensor.along, tensor.shape[tensor.along]
    before = math.prod(tensor.shape[:along])
    found = (each for each, size in enumerate(claim.shape) if (math.prod(claim.shape[:each]), size) == (before, width))
    place = next(found, None)
    if place is None:
        return None

    def seen(held: Tensor) -> Tensor:
        shape = [*claim.shape]
        shape[place] = held.shape[along]
        made: Tensor = func(held, shape)
        return made

    return tensor.viewed(seen, claim, place)


def _expanded(func: Any, args: Any, kwargs: Any) -> Any:
    """Longer or more dimensions beside that of which each rank has some."""
    tensor, claim = args[0], _claimed(func, args, kwargs)
    place = claim.dim() - tensor.dim() + tensor.along
    if not tensor.apart or claim.shape[place] != tensor.shape[tensor.along] or claim.shape[place] == 1:
        return None

    def seen(held: Tensor) -> Tensor:
        shape = [*claim.shape]
        shape[place] = held.shape[tensor.along]
        return held.expand(shape)

    return tensor.viewed(seen, claim, place)


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Another type or order in memory."""
    (tensor, *_), claim = args, _claimed(func, args, kwargs)
    moved = kwargs.get("device") not in (None, tensor.device) or not claim.is_floating_point()
    if not tensor.apart or moved:
        return None
    return tensor.like(func(tensor.held, *args[1:], **kwargs), claim)


def _selected(func: Any, args: Any, kwargs: Any) -> Any:
    """Rows by number, along another dimension than the vocabulary's."""
    tensor, dimension, *_ = args
    if not isinstance(tensor, Parted) or not tensor.apart or dimension % tensor.dim() == tensor.along:
        return None
    return tensor.like(func(tensor.held, *args[1:], **kwargs), _claimed(func, args, kwargs))


def _new(func: Any, args: Any, kwargs: Any) -> Any:
    """A plain tensor that is made after another's shape."""
    stand_in = torch.empty((), dtype=args[0].dtype, device=args[0].device).expand(args[0].shape)
    return func(stand_in, *args[1:], **kwargs)


def _pointwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Number by number, also with plain tensors, of which each rank takes its part."""
    flat: list[Any] = []
    tree_map(flat.append, (args, kwargs))
    tensor = next((each for each in flat if isinstance(each, Parted) and each.apart), None)
    if tensor is None:
        return None
    parts = {id(each): beside(tensor, each) for each in flat if isinstance(each, Tensor)}
    if any(each is None for each in parts.values()):
        return None
    claim = _claimed(func, args, kwargs)
    if not isinstance(claim, Tensor) or not claim.is_floating_point():
        return None
    given = tree_map(lambda each: parts.get(id(each), each), (args, kwargs))
    return tensor.like(func(*given[0], **given[1]), claim, claim.dim() - tensor.dim() + tensor.along)


def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """Number by number, in the place of what is held."""
    tensor, *rest = args
    if not isinstance(tensor, Parted) or not tensor.apart:
        return None
    given = [beside(tensor, each) if isinstance(each, Tensor) else each for each in rest]
    if any(each is None and other is not None for each, other in zip(given, rest, strict=True)):
        return None
    func(tensor.held, *given, **kwargs)
    return tensor


def _sum(func: Any, args: Any, kwargs: Any) -> Any:
    """Over the vocabulary too, or not."""
    tensor = args[0]
    if not tensor.apart:
        return None
    over = [each % tensor.dim() for each in (args[1] if len(args) > 1 and args[1] else range(tensor.dim()))]
    if tensor.along in over and func._overloadpacket is _aten.mean:
        return None
    made = func(tensor.held, *args[1:], **kwargs)
    if tensor.along in over:
        return tensor.numbers.ring.summed(made)
    kept = len(args) > 2 and args[2]
    return tensor.like(
        made, _claimed(func, args, kwargs), tensor.along - (0 if kept else sum(each < tensor.along for each in over))
    )


def _back(func: Any, args: Any, kwargs: Any) -> Any:
    """The gradient of what was picked along another dimension, in zeros."""
    gradient, sizes, dimension, *rest = args
    along = gradient.along if func._overloadpacket is _aten.slice_backward else None
    dimension %= len(sizes)
    if along is None:
        along = gradient.along + (dimension <= gradient.along)
    if not gradient.apart or along == dimension:
        return None
    part = [*sizes]
    part[along] = gradient.box[1]
    return gradient.like(func(gradient.held, part, dimension, *rest), _claimed(func, args, kwargs), along)


_RULES: Mapping[Any, Callable[[Any, Any, Any], Any]] = {
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(_SHAPES, _shape),
    _aten.expand: _expanded,
    _aten.index_select: _selected,
    **dict.fromkeys(_COPIES, _copy),
    **dict.fromkeys(_LIKE, _new),
    **dict.fromkeys((_aten.slice_backward, _aten.select_backward), _back),
    **dict.fromkeys((_aten.nll_loss_forward, _aten.nll_loss2d_forward), vocab_cross_entropy.chosen),
    **dict.fromkeys((_aten.nll_loss_backward, _aten.nll_loss2d_backward), vocab_cross_entropy.chosen_back),
    **dict.fromkeys((_aten.native_layer_norm, _aten._fused_rms_norm), sequence_norms.layer_norm),
    **dict.fromkeys((_aten.native_layer_norm_backward, _aten._fused_rms_norm_backward), sequence_norms.layer_norm_back),
    _aten.native_dropout: sequence_norms.dropout,
    **dict.fromkeys((_aten.sum, _aten.mean), _sum),
    _aten._log_softmax: vocab_cross_entropy.log_softmax,
    _aten._log_softmax_backward_data: vocab_cross_entropy.log_softmax_back,
}
