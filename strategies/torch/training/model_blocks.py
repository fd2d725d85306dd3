"""The repeated blocks of a model: found, compiled by `torch.compile`, and checkpointed to save activations.

Only what a module's call runs is compiled, so that names, parameters and checkpoints stay the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainwright.strategies.torch.torch_compat import compile_in_process


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
    for module in _checkpointed_modules(model, divided):
        buffers = next(module.buffers(), None) is not None
        contexts: dict[str, Any] = {"context_fn": partial(_buffer_contexts, module)} if buffers else {}
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, **contexts)


def checkpointed_buffers(model: nn.Module, divided: Iterable[str] = ()) -> list[str]:
    """Return the names of the persistent buffers inside the modules that `checkpoint_blocks` wraps."""
    state = model.state_dict(keep_vars=True)
    inside = {buffer for module in _checkpointed_modules(model, divided) for buffer in module.buffers()}
    return [name for name, buffer in model.named_buffers() if name in state and buffer in inside]


def _checkpointed_modules(model: nn.Module, divided: Iterable[str]) -> list[nn.Module]:
    return _without_cuts(model, repeated_blocks(model) or _trainable_children(model), divided)


def _trainable_children(model: nn.Module) -> list[nn.Module]:
    return [child for child in _called_children(model) if next(child.parameters(), None) is not None]


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
