"""Norms and dropout of a tensor of whose tokens each rank holds some: rules as in `entropy`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainwright.strategies.torch.tensor_parallel.sharded_tensor import Held, beside


def layer_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Over what a rank has whole: layer norm and RMS norm, with what their backward asks for."""
    tensor, over, *rest = args
    if not _inside(tensor, over) or any(isinstance(each, Held) for each in rest):
        return None
    made = func(tensor.held, over, *rest, **kwargs)
    return tuple(_like(tensor, each) for each in made)


def layer_norm_back(func: Any, args: Any, kwargs: Any) -> Any:
    """Its gradient; that of what is learned is added up over the ranks."""
    gradient, tensor, over, *rest = args
    if not isinstance(tensor, Held) or not _inside(tensor, over):
        return None
    given = [beside(tensor, each) if isinstance(each, Tensor) else each for each in (gradient, *rest)]
    if any(each is None and other is not None for each, other in zip(given, (gradient, *rest), strict=True)):
        return None
    made, *learned = func(given[0], tensor.held, over, *given[1:], **kwargs)
    ring = tensor.numbers.ring
    sums = [
        each if each is None else ring.summed(each if tensor.box[1] else torch.zeros_like(each)) for each in learned
    ]
    return (None if made is None else _like(tensor, made), *sums)


def dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """The numbers that are drawn are those of one device."""
    tensor, share, training = args
    if not tensor.apart:
        return None
    ones = torch.ones((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape).contiguous()
    _, mask = func(ones, share, training, **kwargs)
    mask = mask.narrow(tensor.along, *tensor.box).contiguous()
    scale = 0.0 if share == 1.0 else 1.0 / (1.0 - share)
    return _like(tensor, tensor.held * mask * scale if training else tensor.held.clone()), _like(tensor, mask)


def _inside(tensor: Held, over: Any) -> bool:
    """Whether a rank has all of the dimensions that come last."""
    return tensor.apart and tensor.along < tensor.dim() - len(over)


def _like(tensor: Held, part: Tensor) -> Tensor:
    """What is held as another tensor is; other dimensions may be longer or shorter."""
    shape = [*part.shape]
    shape[tensor.along] = tensor.shape[tensor.along]
    return tensor.like(part, torch.empty(shape, dtype=part.dtype, device="meta"))
