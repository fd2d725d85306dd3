"""A tensor that is to be taken for whole, of which each rank of a tensor-parallel group holds a part."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.core.errors import JobError
from trainwright.strategies.torch.checkpoint.shard_layout import Box
from trainwright.strategies.torch.torch_compat import DisableTorchFunctionSubclass, tree_map, wrapper_subclass

if TYPE_CHECKING:
    from trainwright.strategies.torch.tensor_parallel.layers import Ring

_View = Callable[[Tensor], Tensor]


@dataclass(kw_only=True, eq=False)
class Numbers:
    """What tensors hold together that are views of each other.

    Attributes:
        ring: the ranks that hold it.
        claim: shape, strides and type of the whole, on the meta device.
        along: the dimension of which each rank has some.
        part: this rank's; None once it was gathered.
        whole: all of it; None before that. From then on it stays so: what changes it in place changes all views.
    """

    ring: Ring
    claim: Tensor
    along: int
    part: Tensor | None
    whole: Tensor | None = None

    def gathered(self) -> Tensor:
        """All of it; every rank calls it."""
        if self.whole is None:
            assert self.part is not None, "one of the two is there"
            joined = self.ring.joined(self.part, self.claim.shape[self.along], self.along)
            if joined.stride() != self.claim.stride():
                shape, strides = self.claim.shape, self.claim.stride()
                joined = torch.empty_strided(shape, strides, dtype=joined.dtype, device=joined.device).copy_(joined)
            self.part, self.whole = None, joined
        return self.whole


class Held(Tensor):
    """A tensor that is to be taken for whole, of which this rank holds a part along one dimension."""

    numbers: Numbers
    _views: tuple[_View, ...]
    claim: Tensor
    along: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What is learned and plain meets it through a node of the graph that gives it a plain gradient."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if torch.is_grad_enabled() and not (name.startswith("__") or name.endswith("_")):
            args, kwargs = tree_map(_met, (args, kwargs))
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @staticmethod
    def __new__(cls: type[Held], numbers: Numbers, views: tuple[_View, ...], claim: Tensor, along: int) -> Held:
        """A view of numbers; `claim` and `along` are its own."""
        device = (numbers.part if numbers.whole is None else numbers.whole).device  # type: ignore[union-attr]
        made: Held = wrapper_subclass(cls, claim, device)
        made.numbers, made._views, made.claim, made.along = numbers, views, claim, along
        return made

    @classmethod
    def of(cls, part: Tensor, ring: Ring, along: int, claim: Tensor) -> Held:
        """This rank's part of what is in no other tensor's memory."""
        strides = claim.stride()
        order = sorted(range(claim.dim()), key=lambda each: -strides[each])  # in memory, so that views are alike
        part = part.permute(order).contiguous().permute([order.index(each) for each in range(claim.dim())])
        return cls(Numbers(ring=ring, claim=claim, along=along, part=part), (), claim, along)

    @property
    def apart(self) -> bool:
        """Whether it has not been gathered."""
        return self.numbers.whole is None

    @property
    def held(self) -> Tensor:
        """This rank's part; all of it once it was gathered."""
        made = self.numbers.part if self.apart else self.numbers.whole
        assert made is not None, "one of the two is there"
        for view in self._views:
            made = view(made)
        return made

    @property
    def box(self) -> tuple[int, int]:
        """The first number of this rank along that dimension, and how many it has."""
        box = Box.share((self.shape[self.along],), 0, self.numbers.ring.index, self.numbers.ring.of)
        return box.start[0], box.count

    def whole(self) -> Tensor:
        """All of it, without a graph; every rank calls it."""
        self.numbers.gathered()
        return self.held

    def viewed(self, view: _View, claim: Tensor, along: int) -> Held:
        """A view of it."""
        return type(self)(self.numbers, (*self._views, view), claim, along)

    def like(self, part: Tensor, claim: Tensor, along: int | None = None) -> Held:
        """This rank's part of something else that is held alike."""
        return type(self).of(part, self.numbers.ring, self.along if along is None else along, claim)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # gathers nothing
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, apart={self.apart})"

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


def first_order() -> None:
    """Raise JobError in a backward whose result is to be differentiated: it would be without this rank's graph."""
    if torch.is_grad_enabled():
        raise JobError(
            [
                "a gradient through divided layers cannot be differentiated once more (create_graph=True): use tp=1, "
                "or a loss without a gradient in it"
            ]
        )


class _Met(torch.autograd.Function):
    """The same; its gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        first_order()
        (gradient,) = gradients
        return gradient.whole() if isinstance(gradient, Held) else gradient


def _met(each: Any) -> Any:
    if isinstance(each, Held) or not isinstance(each, Tensor) or not each.requires_grad:
        return each
    made = _Met.apply(each)  # type: ignore[no-untyped-call]
    made.met = True
    return made


def beside(tensor: Held, other: Tensor) -> Tensor | None:
    """What a rank needs of a tensor that meets its part of another one; None where it cannot be."""
    width, place = tensor.shape[tensor.along], other.dim() - tensor.dim() + tensor.along
    if isinstance(other, Held):
        if other.apart:
            return other.held if place == other.along and other.shape[place] == width else None
        other = other.whole()
    if place < 0 or other.shape[place] == 1:
        return other
    if other.requires_grad and torch.is_grad_enabled() and not hasattr(other, "met"):
        return None  # its gradient has to be a plain tensor
    return other.narrow(place, *tensor.box)
