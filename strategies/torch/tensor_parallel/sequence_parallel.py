"""Between divided regions each rank holds some of the tokens (Korthikanti et al., 2022, section 4.2.2).

A row ends with a reduce-scatter over tokens in place of its all-reduce, and what a column is given is gathered;
backward does the same the other way round. What lies between is taken for whole (see `apart`): residual sums, norms
and dropout are done on a rank's own tokens, and of what they learn the gradient is added up over the ranks where it
is made. A column's input is gathered again in backward, not kept. What needs all tokens gathers them first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainwright.strategies.torch.tensor_parallel.sharded_tensor import Held, first_order
from trainwright.strategies.torch.tensor_parallel.vocab_logits import Parted

if TYPE_CHECKING:
    from trainwright.strategies.torch.tensor_parallel.layers import Ring


def scattered(partial: Tensor, ring: Ring) -> Tensor:
    """This rank's tokens of the sum over the ranks, to be taken for all of it."""
    made: Tensor = _Scattered.apply(partial, ring)  # type: ignore[no-untyped-call]
    return made


def held_by_token(tensor: Tensor) -> bool:
    """Whether each rank holds some of its tokens, and not of its last dimension."""
    return isinstance(tensor, Held) and tensor.apart and tensor.along != tensor.dim() - 1


@dataclass(kw_only=True)
class Again:
    """Gathers tokens in backward, once for all layers that were given them; until then it holds none.

    Attributes:
        width: tokens of all ranks.
        along: their dimension.
        layers: how many will ask.
    """

    ring: Ring
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
class Stream:
    """What columns are given, gathered once for all of them, and once for all of their backwards.

    Attributes:
        whole: all tokens, of the graph: its gradient is this rank's share of a sum.
        part: this rank's tokens.
        again: all tokens in backward.
    """

    whole: Tensor
    part: Tensor
    again: Again

    @classmethod
    def of(cls, given: Tensor, ring: Ring) -> Stream:
        """In the type that linear layers compute in."""
        kind = given.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind) and given.dtype != torch.float64:
            given = given.to(torch.get_autocast_dtype(kind))
        assert isinstance(given, Held), "each rank holds some of the tokens"
        whole: Tensor = _Entered.apply(given, ring)  # type: ignore[no-untyped-call]
        again = Again(ring=ring, width=given.shape[given.along], along=given.along)
        return cls(whole=whole, part=given.held, again=again)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Some outputs of a linear layer; `weight` is (outputs, inputs)."""
        made: Tensor = _Linear.apply(self.whole, weight, bias, self.part, self.again)  # type: ignore[no-untyped-call]
        return made


def _whole(gradient: Tensor) -> Tensor:
    return gradient.whole() if isinstance(gradient, Held) else gradient


def _own(partial: Tensor, ring: Ring, along: int) -> Tensor:
    claim = torch.empty(partial.shape, dtype=partial.dtype, device="meta")
    return Parted.of(ring.scattered(partial, along), ring, along, claim)


class _Scattered(torch.autograd.Function):
    """Each rank has a part of a sum, and then some tokens of it."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, ring: Ring) -> Tensor:
        return _own(partial, ring, max(partial.dim() - 2, 0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        first_order()
        return _whole(gradients[0]), None


class _Entered(torch.autograd.Function):
    """Each rank has some tokens, and then all, and gives a part of their gradient."""

    @staticmethod
    def forward(ctx: Any, given: Held, ring: Ring) -> Tensor:
        ctx.ring, ctx.along = ring, given.along
        return ring.joined(given.held, given.shape[given.along], given.along)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        first_order()
        return _own(gradients[0], ctx.ring, ctx.along), None


class _Linear(torch.autograd.Function):
    """A linear layer that keeps a rank's tokens of its input."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, weight: Tensor, bias: Tensor | None, part: Tensor, again: Again) -> Tensor:
        ctx.again, ctx.biased = again, bias is not None
        again.layers += ctx.needs_input_grad[1]
        ctx.save_for_backward(weight, part)
        return nn.functional.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        first_order()
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
