"""Engines for torch: `one_device` and `data_parallel`. Importing this package alone imports no framework.

Read in this order: `base` (what both engines share), `replica` (model, optimizer and where they stand), `objective`
(losses as terms, and what travels with the gradients), `step` (one step), `state` and `files` (copies and
checkpoints), `group` (the process group's life), `data_parallel`.
"""

from __future__ import annotations

from typing import Any


def owns(model: Any) -> bool:
    """Whether an object is a torch module, without importing torch: a module's class names torch's among its bases."""
    return any(
        base.__module__ == "torch.nn.modules.module" and base.__name__ == "Module" for base in type(model).__mro__
    )
