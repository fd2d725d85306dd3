"""Activations that are computed again in backward instead of kept: block by block, by torch's own checkpointing."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from trainwright.strategies.torch.blocks import blocks, outside


def recompute(model: nn.Module, divided: Iterable[str] = ()) -> None:
    """Keep of each block what it is given, and of what happens inside it nothing.

    Dropout is drawn alike the second time. Where a model has no blocks, the modules that it consists of are taken.

    Args:
        divided: names of modules at which the model is cut: a block that one of them is inside of stays as it is.
    """
    for module in outside(model, blocks(model) or _children(model), divided):
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def _children(model: nn.Module) -> list[nn.Module]:
    return [child for child in model.children() if next(child.parameters(), None) is not None]
