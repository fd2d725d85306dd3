"""The global random generators of torch, NumPy and Python, which all threads of a process share."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

GENERATORS_LOCK = (
    threading.RLock()
)  # held by whoever seeds them and draws from them: a step, or rows that are read beside it


def seed_generators(number: int) -> None:
    """Seed all generators with `number`, 64 bits."""
    random.seed(number)
    np.random.seed(number % 2**32)
    if torch := _torch():
        torch.default_generator.manual_seed(number)


def save_generators(device: Any = "cuda") -> Callable[[], None]:
    """Remember the states of the generators.

    Args:
        device: a torch device; the state of a GPU is remembered too, once the process uses GPUs.

    Returns:
        A function that restores the states, as often as it is called.
    """
    python, numpy, torch = random.getstate(), np.random.get_state(), _torch()
    state = torch.get_rng_state() if torch else None
    on_gpu = torch and torch.device(device).type == "cuda" and torch.cuda.is_initialized()
    gpu_state = torch.cuda.get_rng_state(device) if on_gpu else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        if torch:
            torch.set_rng_state(state)
        if on_gpu:
            torch.cuda.set_rng_state(gpu_state, device)

    return restore


@contextmanager
def preserve_generators(device: Any = "cuda") -> Iterator[None]:
    """Restore the states of the generators at the end; see `save_generators`."""
    restore = save_generators(device)
    try:
        yield
    finally:
        restore()


def generator_states() -> tuple[object, ...]:
    """Return the states to compare: they differ after a draw."""
    name, keys, *rest = np.random.get_state(legacy=True)
    torch = _torch()
    state = torch.get_rng_state().numpy().tobytes() if torch else b""
    return random.getstate(), name, np.asarray(keys).tobytes(), tuple(rest), state


def _torch() -> Any:
    """Return torch if the process has imported it."""
    return sys.modules.get("torch")
