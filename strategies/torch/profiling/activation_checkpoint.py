"""Activations that are computed again in backward instead of kept: block by block, by torch's own checkpointing."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainwright.strategies.torch.profiling.repeated_blocks import blocks, outside, parts


def recompute(model: nn.Module, divided: Iterable[str] = ()) -> None:
    """Keep of each block what it is given, and of what happens inside it nothing.

    Dropout is drawn alike the second time, and buffers, such as a batch norm's statistics, are as they were the first
    time and change once. Where a model has no blocks, the modules that it consists of are taken.

    Args:
        divided: names of modules at which the model is cut: a block that one of them is inside of stays as it is.
    """
    for module in _recomputed(model, divided):
        buffers = next(module.buffers(), None) is not None
        contexts: dict[str, Any] = {"context_fn": partial(_contexts, module)} if buffers else {}
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, **contexts)


def recomputed_buffers(model: nn.Module, divided: Iterable[str] = ()) -> list[str]:
    """Names of the buffers in a model's state that lie in what `recompute` takes."""
    state = model.state_dict(keep_vars=True)
    inside = {buffer for module in _recomputed(model, divided) for buffer in module.buffers()}
    return [name for name, buffer in model.named_buffers() if name in state and buffer in inside]


def _recomputed(model: nn.Module, divided: Iterable[str]) -> list[nn.Module]:
    return outside(model, blocks(model) or _children(model), divided)


def _children(model: nn.Module) -> list[nn.Module]:
    return [child for child in parts(model) if next(child.parameters(), None) is not None]


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Of a forward that begins now, and of its repetition."""
    return nullcontext(), _Earlier(module) if torch.is_grad_enabled() else nullcontext()


class _Earlier(AbstractContextManager[None]):
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
