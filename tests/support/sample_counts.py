"""The account of samples that the model of `tests.support.torch_jobs` keeps, as a checkpoint holds it."""

from __future__ import annotations

from typing import Any

import numpy as np
from safetensors.numpy import load

from tests.support import torch_jobs
from tests.support.finished_runs import State


def account_of(state: State) -> np.ndarray:
    """What SGD has taken off each sample's number: (ROWS,) float64."""
    tensors: dict[str, Any] = {}
    for name, payload in state.files.items():
        if name.endswith(".safetensors"):
            tensors.update(load(payload))
    found: np.ndarray = next(
        value for name, value in tensors.items() if name.endswith("seen") and value.shape == (torch_jobs.ROWS,)
    )
    return found
