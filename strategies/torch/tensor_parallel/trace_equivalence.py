"""Whether a forward that is given a part of each divided layer's outputs does the same as with all of them, on a part.

Both are run without data and their operations compared one by one. A tensor is divided where it is shorter in one of
its dimensions. Each operation must leave that dimension alone: compute number by number along it, or only carry it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainwright.strategies.torch.profiling.op_trace import storage
from trainwright.strategies.torch.torch_compat import TorchDispatchMode, tree_leaves

_aten = torch.ops.aten
Shape = tuple[int, ...]
_VIEWS = (_aten.view, _aten._unsafe_view, _aten.reshape)
_PICKS = {  # with the place of the dimension among their arguments
    _aten.slice: 1, _aten.select: 1, _aten.unbind: 1, _aten.split: 2, _aten.split_with_sizes: 2, _aten.narrow: 1,
    _aten.cat: 1, _aten.stack: 1, _aten._softmax: 1, _aten._safe_softmax: 1, _aten._log_softmax: 1,
}  # fmt: skip
_OVER_LAST = {_aten.native_layer_norm: 1, _aten._fused_rms_norm: 1}
_CARRY = (
    _aten.transpose, _aten.permute, _aten.t, _aten.unsqueeze, _aten.squeeze, _aten.expand, _aten.alias, _aten.detach,
    _aten.clone, _aten._to_copy, _aten.copy_, _aten.native_dropout, _aten.bernoulli_, _aten.masked_fill, _aten.where,
    _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.mean, _aten.sum, _aten.amax, _aten.linalg_vector_norm,
    _aten.lift_fresh, _aten.contiguous,
)  # fmt: skip
_PRODUCTS = {_aten.bmm: 0, _aten.baddbmm: 1}  # with the place of their first factor


@dataclass(frozen=True, kw_only=True)
class Event:
    """An operation, or the call of a layer that is divided.

    Attributes:
        func: of the operation; None for a call.
        call: the layer's name and role.
        given: arguments; shapes in the place of tensors.
        made: shapes of the outputs.
    """

    func: Any = None
    call: tuple[str, str] = ("", "")
    given: tuple[Any, ...] = ()
    made: tuple[Shape, ...] = ()


@dataclass(frozen=True)
class Sized:
    """In the place of a tensor; `learns` where it has a gradient."""

    shape: Shape
    learns: bool


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the operations of a forward in which some layers are stood in for.

    Args:
        names: of these layers, by the storage of each of their parameters.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.called: set[str] = set()
        self._names = names
        self._deaf = False

    def stand_in(self, name: str, role: str, takes: int, gives: int, kind: torch.dtype) -> Callable[[Tensor], Tensor]:
        """A forward of a layer that is given, and gives, so many numbers of each token; `kind` is its weight's type."""

        def forward(given: Tensor) -> Tensor:
            self._deaf = True
            try:
                if takes and given.shape[-1] != takes:
                    raise ValueError(f"module {name!r} is given {given.shape[-1]} numbers where it takes {takes}")
                shape = (*given.shape[:-1], gives) if takes else (*given.shape, gives)
                made = given.new_empty(shape, dtype=given.dtype if given.is_floating_point() else kind)
                made = made.requires_grad_().clone()  # no leaf: a forward may write to it
            finally:
                self._deaf = False
            self.called.add(name)
            self.events.append(Event(call=(name, role)))
            return made

        return forward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if not self._deaf:
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, Tensor) and (name := self._names.get(storage(each))) is not None:
                    raise ValueError(f"a parameter of module {name!r} is used without calling it")
            given = tuple(
                Sized(tuple(each.shape), each.requires_grad) if isinstance(each, Tensor) else each
                for each in _flat(args, kwargs)
            )
            made = tuple(tuple(each.shape) for each in tree_leaves(outputs) if isinstance(each, Tensor))
            self.events.append(Event(func=func, given=given, made=made))
        return outputs


def parted(whole: Sequence[Event], part: Sequence[Event], degree: int) -> str:
    """Why a forward on a part is not the whole one's part; empty where it is."""
    if [(event.func, event.call) for event in whole] != [(event.func, event.call) for event in part]:
        return "its forward does something else with a part of the outputs"
    inside = False
    for one, other in zip(whole, part, strict=True):
        if one.func is None:
            inside = one.call[1] == "column" or (inside and one.call[1] != "row")
            continue
        why = _unlike(one, other, degree, inside)
        if why:
            return f"{one.func._overloadpacket} {why}"
    return ""


def opening(events: Sequence[Event]) -> Iterator[str]:
    """Columns after which random numbers are drawn before the next row."""
    column = ""
    for event in events:
        if event.call[1] == "column":
            column = column or event.call[0]
        elif event.call[1] == "row":
            column = ""
        elif column and event.func is not None and torch.Tag.nondeterministic_seeded in event.func.tags:
            yield column


def _unlike(whole: Event, part: Event, degree: int, inside: bool) -> str:
    """What an operation does otherwise."""
    try:
        given = [_divided(one, other, degree) for one, other in _sizes(whole, part)]
        made = [_divided(one, other, degree) for one, other in zip(whole.made, part.made, strict=True)]
    except ValueError as error:
        return str(error)
    packet, random = whole.func._overloadpacket, torch.Tag.nondeterministic_seeded in whole.func.tags
    if all(each is None for each in given):
        if any(each is not None for each in made) or _plain(whole) != _plain(part):
            return "makes something that depends on the size of a part"
        return "draws random numbers for all ranks beside those of each one" if random and inside else ""
    learned = [one.learns for one in whole.given if isinstance(one, Sized)]
    if any(learns and each is None for learns, each in zip(learned, given, strict=True)):
        return "meets what is learned and whole: each rank would have a part of its gradient"
    made = [each for one, each in zip(whole.made, made, strict=True) if not _fused(packet) or any(one)]
    if any(each is None for each in made):  # of a fused kernel's outputs some are states of its random numbers
        return "needs the whole"
    return _carried(packet, whole, part, degree, [*zip((one for one, _ in _sizes(whole, part)), given, strict=True)])


def _carried(packet: Any, whole: Event, part: Event, degree: int, given: list[tuple[Shape, int | None]]) -> str:
    """Why an operation is not one along whose divided dimensions each rank can do its part."""
    shape, dimension = next((shape, each) for shape, each in given if each is not None)
    if packet in _VIEWS:
        after = _divided(whole.made[0], part.made[0], degree)
        slowest = math.prod(shape[:dimension]) == math.prod(whole.made[0][:after])  # of the numbers that it is seen in
        return "" if slowest else "mixes what is divided with what is not"
    if packet in _PICKS:
        along = whole.given[_PICKS[packet]] if len(whole.given) > _PICKS[packet] else 0
        along = next((each for each in reversed(whole.given) if type(each) is int), 0) if packet in _JOINS else along
        if along % max(len(shape), 1) != dimension:
            return ""
        return "" if packet in _SLICES and whole.made == (shape,) else "picks from what is divided"
    if (packet in _PRODUCTS or _fused(packet)) and _plain(whole) != _plain(part):
        return "computes with the size of a part"
    if packet in _PRODUCTS:
        factors = given[_PRODUCTS[packet] :][:2]
        return "" if [each for _, each in factors] == [0, 0] else "adds up over what is divided"
    if _fused(packet):
        return "" if {each for _, each in given[:3]} == {1} else "attends over what is divided"
    if packet in _OVER_LAST:
        over = len(whole.given[_OVER_LAST[packet]])
        return "" if dimension is not None and dimension < len(shape) - over else "is over all that is divided"
    if torch.Tag.pointwise not in whole.func.tags and packet not in _CARRY:
        return "is not known to work on a part"
    if torch.Tag.pointwise in whole.func.tags:
        if len({len(one) - each for one, each in given if each is not None}) > 1:
            return "brings different dimensions together"
        if _plain(whole) != _plain(part):
            return "computes with the size of a part"
    return ""


def _fused(packet: Any) -> bool:
    """Whether an operation is attention in one kernel."""
    return "scaled_dot_product" in str(packet)


_JOINS = (_aten.cat, _aten.stack)
_SLICES = (_aten.slice, _aten.split, _aten.split_with_sizes, _aten.narrow)  # which may take all there is


def _divided(whole: Shape, part: Shape, degree: int) -> int | None:
    """In which dimension a tensor is divided. Raises ValueError where it is otherwise unlike."""
    if whole == part:
        return None
    differing = [each for each in range(len(whole)) if len(whole) == len(part) and whole[each] != part[each]]
    if len(differing) != 1 or whole[differing[0]] != degree * part[differing[0]]:
        raise ValueError(f"makes {part} of a part, and {whole} of the whole")
    return differing[0]


def _sizes(whole: Event, part: Event) -> list[tuple[Shape, Shape]]:
    """Shapes of the tensors that are given."""
    pairs = zip(whole.given, part.given, strict=True)
    return [(one.shape, other.shape) for one, other in pairs if isinstance(one, Sized) and isinstance(other, Sized)]


def _plain(event: Event) -> list[Any]:
    """What is given beside tensors."""
    return [each for each in event.given if not isinstance(each, Sized)]


def _flat(args: Any, kwargs: Any) -> Iterator[Any]:
    """Arguments one by one; lists of tensors one after the other, others as they are."""
    for each in (*args, *(kwargs or {}).values()):
        if isinstance(each, list | tuple) and any(isinstance(one, Tensor) for one in each):
            yield from each
        else:
            yield tuple(each) if isinstance(each, list) else each
