"""Selective recomputation: attention scores are recomputed in backward instead of kept, in any model.

A model computes scores by several functions: a batched product, scaling and masking, a softmax, perhaps dropout, and a
second product. These calls are recorded. At the second product, what they have saved for backward is dropped, except
their inputs from outside. Backward repeats the calls, with the same random numbers, up to the last missing tensor. A
fused kernel never writes scores, and is not changed.

See Korthikanti et al. (2022), section 5. torch's own selective checkpointing keeps the output of every operation that
it does not recompute, needed or not, and needs a policy for each model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import FunctionType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.strategies.torch.torch_compat import generator_of, storage_key, tree_map

_F = nn.functional
_PRODUCTS = frozenset(
    (
        torch.matmul, torch.bmm, torch.baddbmm, torch.einsum,
        Tensor.matmul, Tensor.__matmul__, Tensor.bmm, Tensor.baddbmm,
    )
)  # fmt: skip
_SOFTMAX = frozenset((_F.softmax, torch.softmax, Tensor.softmax))
_attribute: Any = Tensor.data
_DATA = (_attribute.__get__, _attribute.__set__)
_FACTORS = ((0, "query"), (1, "key"))
_BATCHED = 3  # dimensions of a batch of products' factors; with a parameter it is a layer's
_Hook = Callable[[Tensor], Any]


class _SavedTensor:
    """What autograd saved: a tensor, or the calls that compute it again."""

    __slots__ = ("__weakref__", "recipe", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self.recipe: Sequence[_RecordedCall] = ()

    def taken(self) -> Tensor:
        """Return the tensor for backward. Raises RuntimeError where it was changed since, as autograd does."""
        if self.tensor is None:
            _repeat(self.recipe)
        tensor = self.tensor
        assert tensor is not None, "it was made again"
        if self.recipe:
            self.tensor = None
        elif tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(tensor.shape)} beside attention's scores"
            )
        return tensor


@dataclass(kw_only=True, eq=False)
class _RecordedCall:
    """One recorded function call that leads to attention scores.

    Attributes:
        function: with `args` and `kwargs`, in which a `_RecordedCall` stands for what it gave.
        outside: tensors among them that no call gave, and their versions.
        before: calls that gave the others.
        autocast: of the device, and its type.
        normalised: a softmax is behind it.
        drawn: the state of the device's random numbers where it drew some.
        saved: by it for backward, in order.
        number: the earlier the call, the lower.
    """

    function: Any
    args: Any
    kwargs: Any
    outside: tuple[tuple[Tensor, int], ...]
    before: tuple[_RecordedCall, ...]
    device: torch.device
    autocast: tuple[bool, torch.dtype]
    normalised: bool
    drawn: Tensor | None = None
    saved: list[ReferenceType[_SavedTensor]] = field(default_factory=list)
    number: int = field(default_factory=count().__next__)

    def save(self, tensor: Tensor) -> _SavedTensor:
        """Save a tensor; autograd calls it."""
        saved = _SavedTensor(tensor)
        self.saved.append(ref(saved))
        return saved

    def again(self, given: Mapping[_RecordedCall, Any]) -> Any:
        """Repeat the call, given new results of earlier ones. Raises RuntimeError where inputs have changed."""
        if any(tensor._version != version for tensor, version in self.outside):
            raise RuntimeError(
                "the inputs of attention scores were changed in place after use: leave "
                "recompute=selective out, or do not change it"
            )
        args, kwargs = tree_map(
            lambda each: given[each] if isinstance(each, _RecordedCall) else each, (self.args, self.kwargs)
        )
        if self.drawn is not None:
            generator_of(self.device).set_state(self.drawn)
        enabled, dtype = self.autocast
        with torch.autocast(self.device.type, dtype, enabled=enabled, cache_enabled=False):
            return self.function(*args, **kwargs)


class SelectiveRecompute(TorchFunctionMode):
    """Drops what a forward saves of attention scores; backward computes it again."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: Any = WeakIdKeyDictionary()  # what gave each tensor that may become scores, and its version then

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DATA:  # what is changed through it has a version of its own
            self._calls.pop(args[0], None)
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func is _F.multi_head_attention_forward:
            with self:
                return _multi_head_by_calls(*args, **kwargs)
        return self._called(func, args, kwargs)

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = [*_tensors((*args, *kwargs.values()))]
        known = [each for each in given if self._maker(each) is not None]
        before = tuple(dict.fromkeys(filter(None, map(self._maker, known))))
        fused, product = func is _F.scaled_dot_product_attention, func in _PRODUCTS
        batched = product and all(each.dim() >= _BATCHED for each in given)
        if not (before or fused or batched) or given[0].is_meta:
            return func(*args, **kwargs)
        call = self._call(func, args, kwargs, given, before)
        state = generator_of(call.device).get_state()
        with saved_tensors_hooks(call.save, _SavedTensor.taken):
            made = func(*args, **kwargs)
        if not torch.equal(state, generator_of(call.device).get_state()):
            call.drawn = state
        if (product and any(each.normalised for each in before)) or (
            fused and _writes_scores(call, args, kwargs, made)
        ):
            _drop(call)
        elif (
            not fused and isinstance(made, Tensor) and made.requires_grad and _extends_scores(call, given, known, made)
        ):
            self._calls[made] = call, made._version
        return made

    def _maker(self, tensor: Tensor) -> _RecordedCall | None:
        """Return the call that made a tensor; None where it was changed since, or is not known."""
        call, version = self._calls.get(tensor, (None, None))
        return call if call is not None and version == tensor._version else None

    def _call(
        self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], before: tuple[_RecordedCall, ...]
    ) -> _RecordedCall:
        """Record a call, with references in place of tensors that other calls made."""
        outside: list[tuple[Tensor, int]] = []

        def kept(each: Any) -> Any:
            if not isinstance(each, Tensor):
                return each
            call = self._maker(each)
            if call is not None:
                return call
            bare = each.detach().requires_grad_(each.requires_grad)  # no graph: what saves this is behind it
            outside.append((bare, each._version))
            return bare

        device = given[0].device
        own_args, own_kwargs = tree_map(kept, (args, kwargs))
        return _RecordedCall(
            function=func,
            args=own_args,
            kwargs=own_kwargs,
            outside=tuple(outside),
            before=before,
            device=device,
            autocast=(torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)),
            normalised=func in _SOFTMAX or any(each.normalised for each in before),
        )


def _extends_scores(call: _RecordedCall, given: Sequence[Tensor], known: Sequence[Tensor], made: Tensor) -> bool:
    """Return whether a call makes scores of scores, elementwise, or a batched product that may become scores.

    Args:
        known: those of the tensors `given` that calls had given before this one, which may have changed them.
    """
    if call.function in _PRODUCTS:
        return True
    foreign = _in_place(call.function) and all(each is not given[0] for each in known)
    return not foreign and "out" not in call.kwargs and any(each.numel() == made.numel() for each in known)


def _drop(last: _RecordedCall) -> None:
    """Drop what the calls up to a second product have saved, unless something else keeps it."""
    recipe = _recipe(last)
    outside = {storage_key(tensor) for call in recipe for tensor, _ in call.outside}
    for call in recipe:
        for saved in filter(None, (each() for each in call.saved)):
            if saved.recipe or saved.tensor is None or saved.tensor._version != saved.version:
                continue  # what was changed since is left for `taken` to tell
            if storage_key(saved.tensor) not in outside:
                saved.recipe, saved.tensor = recipe, None


def _recipe(last: _RecordedCall) -> tuple[_RecordedCall, ...]:
    """Return a call and all calls that it needs, in the order in which they were made."""
    found, left = {last}, [last]
    while left:
        new = [each for each in left.pop().before if each not in found]
        found.update(new)
        left += new
    return tuple(sorted(found, key=lambda call: call.number))


class _AllRecomputed(Exception):
    """All dropped tensors have been computed again."""


def _repeat(recipe: Sequence[_RecordedCall]) -> None:
    """Repeat the calls, and refill the saved tensors that were dropped."""
    given: dict[_RecordedCall, Any] = {}
    devices = [call.device for call in recipe[:1] if call.device.type == "cuda"]
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            for call in recipe:
                with saved_tensors_hooks(_refill_hook(call, last=call is recipe[-1]), lambda saved: saved):
                    given[call] = call.again(given)
    except _AllRecomputed:
        pass


def _refill_hook(call: _RecordedCall, *, last: bool) -> _Hook:
    """Return a hook that gives the n-th tensor that a call saves to its n-th saved tensor of the first time."""
    left = [*reversed(call.saved)]

    def give(tensor: Tensor) -> None:
        if not left:
            raise RuntimeError("recomputing attention scores gave other operations than the first time")
        saved = left.pop()()
        if saved is not None and saved.tensor is None:
            saved.tensor = tensor.detach()
        if last and not left:
            raise _AllRecomputed

    return give


def _writes_scores(call: _RecordedCall, args: Any, kwargs: Any, made: Tensor) -> bool:
    """Return whether attention saved a value for each query and key: it was not computed by a fused kernel."""
    query, key = (args[place] if place < len(args) else kwargs[name] for place, name in _FACTORS)
    kept = {storage_key(tensor) for tensor in (*_tensors((*args, *kwargs.values())), made)}
    saved = [each.tensor for each in (one() for one in call.saved) if each is not None and each.tensor is not None]
    return any(each.shape[-2:] == (query.shape[-2], key.shape[-2]) and storage_key(each) not in kept for each in saved)


def _in_place(function: Any) -> bool:
    """Return whether a function changes its first argument."""
    name: str = getattr(function, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _tensors(given: Sequence[Any]) -> Iterator[Tensor]:
    for each in given:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(each)


_multi_head = _F.multi_head_attention_forward
_multi_head_by_calls = FunctionType(  # it tells a mode of itself alone; so it tells of what it calls
    _multi_head.__code__,
    {**vars(_F), "has_torch_function": lambda _: False},
    _multi_head.__name__,
    _multi_head.__defaults__,
)
