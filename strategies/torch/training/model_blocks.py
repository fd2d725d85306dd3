"""The blocks that a model repeats: what is gathered, or computed again, one after the other.

What it compiles is what a module's call or forward runs, so that names, parameters and checkpoints stay as they are.
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
    """Modules of one class that a list or sequence holds several of, the outermost; none with parameters of others."""
    sites = Counter(_parameter_ids(model))
    found: list[nn.Module] = []
    _collect(model, sites, found)
    return found


def _without_cuts(model: nn.Module, modules: Iterable[nn.Module], cuts: Iterable[str]) -> list[nn.Module]:
    """Those of a model's modules inside of which none is at which it is cut."""
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
    """Whether it is a module that is called, and all uses of its parameters lie within it."""
    container = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return not container and all(sites[key] == count for key, count in Counter(_parameter_ids(module)).items())


def _parameter_ids(module: nn.Module) -> Iterator[int]:
    """Each place of the tree that holds a parameter, by the parameter's identity."""
    for _, owner in module.named_modules(remove_duplicate=False):
        yield from (id(parameter) for parameter in owner._parameters.values() if parameter is not None)


def _called_children(model: nn.Module) -> list[nn.Module]:
    """The modules that a model consists of; of containers, which are not called, what they hold."""
    found: list[nn.Module] = []
    for child in model.children():
        found += _called_children(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
    return found


# --- Models compiled by `torch.compile` -------------------------------------------------------------------------------


def compile_model(model: nn.Module, device: torch.device) -> None:
    """Compile what a call of the model runs."""
    _prepare_compiler(device)
    model.compile()


def compile_blocks(model: nn.Module, device: torch.device, cuts: Iterable[str] = ()) -> None:
    """Compile each block's forward, apart from what is done around it; blocks of one class share what is compiled.

    Args:
        cuts: names of modules at which the model is cut: a block that one of them is inside of stays as it is.
    """
    _prepare_compiler(device)
    for module in _without_cuts(model, repeated_blocks(model) or _called_children(model), cuts):
        module.forward = torch.compile(module.forward)


def _prepare_compiler(device: torch.device) -> None:
    """On a CPU compile in this process: others that wait for work would outlive a killed one."""
    if device.type == "cpu":
        compile_in_process()


# --- Activations that are computed again in backward instead of kept --------------------------------------------------


def checkpoint_blocks(model: nn.Module, divided: Iterable[str] = ()) -> None:
    """Keep of each block what it is given, and of what happens inside it nothing.

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
    """Names of the buffers in a model's state that lie in what `checkpoint_blocks` takes."""
    state = model.state_dict(keep_vars=True)
    inside = {buffer for module in _checkpointed_modules(model, divided) for buffer in module.buffers()}
    return [name for name, buffer in model.named_buffers() if name in state and buffer in inside]


def _checkpointed_modules(model: nn.Module, divided: Iterable[str]) -> list[nn.Module]:
    return _without_cuts(model, repeated_blocks(model) or _trainable_children(model), divided)


def _trainable_children(model: nn.Module) -> list[nn.Module]:
    return [child for child in _called_children(model) if next(child.parameters(), None) is not None]


def _buffer_contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Of a forward that begins now, and of its repetition."""
    return nullcontext(), _EarlierBuffers(module) if torch.is_grad_enabled() else nullcontext()


class _EarlierBuffers(AbstractContextManager[None]):
    """Within, a module works on copies of its buffers as they were when this was made; more than once if need be."""

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
