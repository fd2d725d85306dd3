"""What torch is told for a whole process: the type of new floats."""

from __future__ import annotations

from typing import Any

import torch


def captured() -> dict[str, Any]:
    """The settings of this process; empty where they are torch's own."""
    kind = torch.get_default_dtype()
    return {} if kind is torch.float32 else {"dtype": kind}


def apply(settings: dict[str, Any]) -> None:
    """Give this process the settings of another."""
    torch.set_default_dtype(settings["dtype"])
