"""Models compiled by `torch.compile`: whole, or block by block where hooks or cuts come between the blocks.

What it compiles is what a module's call or forward runs, so that names, parameters and checkpoints stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from trainwright.strategies.torch.profiling.repeated_blocks import blocks, outside, parts
from trainwright.strategies.torch.torch_compat import compile_in_process


def compile_whole(model: nn.Module, device: torch.device) -> None:
    """Compile what a call of the model runs."""
    _prepare(device)
    model.compile()


def compile_blocks(model: nn.Module, device: torch.device, cuts: Iterable[str] = ()) -> None:
    """Compile each block's forward, apart from what is done around it; blocks of one class share what is compiled.

    Args:
        cuts: names of modules at which the model is cut: a block that one of them is inside of stays as it is.
    """
    _prepare(device)
    for module in outside(model, blocks(model) or parts(model), cuts):
        module.forward = torch.compile(module.forward)


def _prepare(device: torch.device) -> None:
    """On a CPU compile in this process: others that wait for work would outlive a killed one."""
    if device.type == "cpu":
        compile_in_process()
