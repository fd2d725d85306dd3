"""The repeated blocks of a model, compiled by `torch.compile`; and activations that backward computes again.

Only what a module's call runs is compiled, so that names, parameters and checkpoints stay the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.strategies.torch.torch_compat import (
    compile_in_process,
    generator_of,
    multi_head_attention,
    storage_key,
    tensor_leaves,
    tree_map,
)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of one class in a list or sequence, which share no parameters with others."""
    sites = Counter(_parameter_ids(model))
    found: list[nn.Module] = []
    _collect(model, sites, found)
    return found


def _without_cuts(model: nn.Module, modules: Iterable[nn.Module], cuts: Iterable[str]) -> list[nn.Module]:
    """Return the modules that no pipeline cut lies inside of."""
    inside = [name.split(".") for name in cuts]
    names = {module: name.split(".") for name, module in model.named_modules()}
    paths = [(module, names[module]) for module in modules]
    return [
        module for module, path in paths if not any(len(cut) > len(path) and cut[: len(path)] == path for cut in inside)
    ]


def _collect(module: nn.Module, sites: Counter[int], found: list[nn.Module]) -> None:
    children = list(module.children())
    repeated: Counter[type] = Counter()
    if isinstance(module, nn.ModuleList | nn.Sequential):
        repeated.update(type(child) for child in children if next(child.parameters(), None) is not None)
    for child in children:
        if repeated[type(child)] > 1 and _owns_its_parameters(child, sites):
            found.append(child)
        else:
            _collect(child, sites, found)


def _owns_its_parameters(module: nn.Module, sites: Counter[int]) -> bool:
    """Return whether a module is called and all uses of its parameters lie within it."""
    container = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return not container and all(sites[key] == count for key, count in Counter(_parameter_ids(module)).items())


def _parameter_ids(module: nn.Module) -> Iterator[int]:
    """Yield the identity of each parameter, once for each place that holds it."""
    for _, owner in module.named_modules(remove_duplicate=False):
        yield from (id(parameter) for parameter in owner._parameters.values() if parameter is not None)


def _called_children(model: nn.Module) -> list[nn.Module]:
    """Yield the called modules directly below a model; containers are replaced by their contents."""
    found: list[nn.Module] = []
    for child in model.children():
        found += _called_children(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
    return found


# --- torch.compile ----------------------------------------------------------------------------------------------------


def compile_model(model: nn.Module, device: torch.device) -> None:
    """Compile the model's call with `torch.compile`."""
    _prepare_compiler(device)
    model.compile()


def compile_blocks(model: nn.Module, device: torch.device, cuts: Iterable[str] = ()) -> None:
    """Compile each block's forward by itself; blocks of one class share the compiled code.

    Args:
        cuts: names of modules at which the model is cut: a block that one of them is inside of stays as it is.
    """
    _prepare_compiler(device)
    for module in _without_cuts(model, repeated_blocks(model) or _called_children(model), cuts):
        module.forward = torch.compile(module.forward)


def _prepare_compiler(device: torch.device) -> None:
    """Compile in this process on a CPU: compiler processes would outlive a killed worker."""
    if device.type == "cpu":
        compile_in_process()


# --- Activation checkpointing -----------------------------------------------------------------------------------------


def checkpoint_blocks(model: nn.Module, divided: Iterable[str] = ()) -> None:
    """Checkpoint activations: keep the inputs of each block, and recompute the rest in backward.

    Dropout is drawn alike the second time, and buffers, such as a batch norm's statistics, are as they were the first
    time and change once. Where a model has no blocks, the modules that it consists of are taken.

    Args:
        divided: names of modules at which the model is cut: a block that one of them is inside of stays as it is.
    """
    for module in checkpointed_modules(model, divided):
        buffers = next(module.buffers(), None) is not None
        contexts: dict[str, Any] = {"context_fn": partial(_buffer_contexts, module)} if buffers else {}
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, **contexts)


def checkpointed_buffers(model: nn.Module, divided: Iterable[str] = ()) -> list[str]:
    """Return the names of the persistent buffers inside the modules that `checkpoint_blocks` wraps."""
    state = model.state_dict(keep_vars=True)
    inside = {buffer for module in checkpointed_modules(model, divided) for buffer in module.buffers()}
    return [name for name, buffer in model.named_buffers() if name in state and buffer in inside]


def checkpointed_modules(model: nn.Module, divided: Iterable[str] = ()) -> list[nn.Module]:
    """Return the modules that `checkpoint_blocks` wraps."""
    children = [child for child in _called_children(model) if next(child.parameters(), None) is not None]
    return _without_cuts(model, repeated_blocks(model) or children, divided)


def _buffer_contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for a forward that starts now and for its recomputation."""
    return nullcontext(), _EarlierBuffers(module) if torch.is_grad_enabled() else nullcontext()


class _EarlierBuffers(AbstractContextManager[None]):
    """Lets a module work on copies of its buffers as they were when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (owner._buffers, name, buffer.detach().clone())
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._own: list[Tensor | None] = []

    def __enter__(self) -> None:
        self._own = [buffers[name] for buffers, name, _ in self._places]
        for buffers, name, earlier in self._places:
            buffers[name] = earlier.clone()

    def __exit__(self, *error: object) -> None:
        for (buffers, name, _), buffer in zip(self._places, self._own, strict=True):
            buffers[name] = buffer
        self._own = []


# --- Selective recomputation ------------------------------------------------------------------------------------------

# Attention scores are recomputed in backward instead of kept, in any model. A model computes scores by several
# functions: a batched product, scaling and masking, a softmax, perhaps dropout, and a second product. These calls are
# recorded. At the second product, what they have saved for backward is dropped, except their inputs from outside.
# Backward repeats the calls, with the same random numbers, up to the last missing tensor. A fused kernel never writes
# scores, and is not changed.
#
# See Korthikanti et al. (2022), section 5. torch's own selective checkpointing keeps the output of every operation that
# it does not recompute, needed or not, and needs a policy for each model.


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
    """One recorded function call that leads to attention scores."""

    function: Any  # with `args` and `kwargs`, in which a `_RecordedCall` stands for what it gave
    args: Any
    kwargs: Any
    outside: tuple[tuple[Tensor, int], ...]  # tensors among them that no call gave, and their versions
    before: tuple[_RecordedCall, ...]  # calls that gave the others
    device: torch.device
    autocast: tuple[bool, torch.dtype]  # of the device, and its type
    normalised: bool  # a softmax is behind it
    drawn: Tensor | None = None  # the state of the device's random numbers where it drew some
    saved: list[ReferenceType[_SavedTensor]] = field(default_factory=list)  # by it for backward, in order
    number: int = field(default_factory=count().__next__)  # the earlier the call, the lower

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
        given = tensor_leaves((args, kwargs))
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
    kept = {storage_key(tensor) for tensor in tensor_leaves((args, kwargs, made))}
    saved = [each.tensor for each in (one() for one in call.saved) if each is not None and each.tensor is not None]
    return any(each.shape[-2:] == (query.shape[-2], key.shape[-2]) and storage_key(each) not in kept for each in saved)


def _in_place(function: Any) -> bool:
    """Return whether a function changes its first argument."""
    name: str = getattr(function, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


# torch's own tells a mode of itself alone; so it tells of what it calls
_multi_head_by_calls = multi_head_attention(has_torch_function=lambda _: False)
