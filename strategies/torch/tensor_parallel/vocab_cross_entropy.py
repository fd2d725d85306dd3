"""Cross-entropy of logits of which each rank holds some, below autograd (Shoeybi et al., 2019, section 3).

Each rule is given what autograd gives an operation, and answers None where it cannot do without all logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.strategies.torch.tensor_parallel.sharded_tensor import Held, beside
from trainwright.strategies.torch.torch_compat import assert_on_device

_MEAN, _SUM = 1, 2  # reductions, as torch numbers them


def log_softmax(func: Any, args: Any, kwargs: Any) -> Any:
    """Over the vocabulary: the largest logit and the sum of exponentials are those of all ranks."""
    tensor, dimension, wider = args
    if not tensor.apart or dimension % tensor.dim() != tensor.along:
        return None
    along, ring, numbers = tensor.along, tensor.numbers.ring, _precise(tensor.held)
    least = numbers.new_full((*numbers.shape[:along], 1, *numbers.shape[along + 1 :]), -math.inf)
    numbers = numbers - ring.highest(numbers.amax(along, keepdim=True) if numbers.shape[along] else least)
    made = numbers - ring.summed(numbers.exp().sum(along, keepdim=True)).log()
    claim = torch.empty(tensor.shape, dtype=torch.float32 if wider else tensor.dtype, device="meta")
    return tensor.like(made.to(claim.dtype), claim)


def log_softmax_back(func: Any, args: Any, kwargs: Any) -> Any:
    """Its gradient."""
    gradient, tensor, dimension, kind = args
    if not (isinstance(tensor, Held) and tensor.apart) or dimension % tensor.dim() != tensor.along:
        return None
    slopes = beside(tensor, gradient)
    if slopes is None:
        return None
    slopes, along = _precise(slopes), tensor.along
    whole = tensor.numbers.ring.summed(slopes.sum(along, keepdim=True))
    made = slopes - _precise(tensor.held).exp() * whole
    return tensor.like(made.to(kind), torch.empty(tensor.shape, dtype=kind, device="meta"))


def chosen(func: Any, args: Any, kwargs: Any) -> Any:
    """The targets' log-probabilities, each from the rank that has it."""
    tensor, targets, weight, reduction, ignored = args
    along = min(tensor.dim() - 1, 1)
    if not isinstance(tensor, Held) or not tensor.apart or tensor.along != along:
        return None
    targets = targets.long()  # bytes have no -100, and index as a mask
    _check(targets, tensor.shape[along], ignored)
    counts, here, places = _places(tensor, targets, ignored)
    held = tensor.held if tensor.box[1] else tensor.held.new_zeros(_with(tensor.shape, along, 1))
    found = held.gather(along, places.unsqueeze(along)).squeeze(along).masked_fill(~here, 0.0)
    weights = _weights(tensor, weight, targets, counts)
    values = -tensor.numbers.ring.summed(found) * weights
    values = values.masked_fill(~counts, 0.0)
    if reduction not in (_MEAN, _SUM) and tensor.dim() > 1:
        return values, tensor.held.new_zeros(())
    total = weights.sum()
    return (values.sum() / total if reduction == _MEAN else values.sum()), total


def chosen_back(func: Any, args: Any, kwargs: Any) -> Any:
    """Its gradient."""
    gradient, tensor, targets, weight, reduction, ignored, total = args
    along = min(tensor.dim() - 1, 1)
    if not isinstance(tensor, Held) or not tensor.apart or tensor.along != along:
        return None
    targets = targets.long()
    counts, here, places = _places(tensor, targets, ignored)
    slopes = -gradient * _weights(tensor, weight, targets, counts) / (total if reduction == _MEAN else 1.0)
    made = torch.zeros_like(tensor.held, memory_format=torch.contiguous_format)
    if tensor.box[1]:
        made.scatter_(along, places.unsqueeze(along), slopes.masked_fill(~here, 0.0).to(made.dtype).unsqueeze(along))
    return tensor.like(made, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


def _places(tensor: Held, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which targets count, which of these are this rank's, and where in its part; 0 of all others."""
    first, count = tensor.box
    counts = targets != ignored
    here = counts & (targets >= first) & (targets < first + count)
    return counts, here, (targets - first).masked_fill(~here, 0)


def _weights(tensor: Held, weight: Tensor | None, targets: Tensor, counts: Tensor) -> Tensor:
    """Of each target; 0 where it does not count."""
    if weight is None:
        return counts.to(tensor.dtype)
    return weight[targets.masked_fill(~counts, 0)].masked_fill(~counts, 0.0)


def _check(targets: Tensor, width: int, ignored: int) -> None:
    """Raise IndexError, as on one device, for a target that is not in the vocabulary."""
    if targets.is_meta:
        return
    wrong = (targets != ignored) & ((targets < 0) | (targets >= width))
    if targets.is_cuda:
        assert_on_device(~wrong.any())
    elif bool(wrong.any()):
        raise IndexError(f"Target {int(targets[wrong].flatten()[0])} is out of bounds.")


def _precise(tensor: Tensor) -> Tensor:
    """In single precision at least, as torch's own kernels add up."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _with(shape: Sequence[int], place: int, size: int) -> list[int]:
    made = [*shape]
    made[place] = size
    return made
