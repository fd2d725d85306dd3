"""Callbacks of Keras' `fit`: made by the job's function, and what a checkpoint keeps of their state.

Keras' own callbacks start again with each `fit`. A run that resumes would forget for how long EarlyStopping has waited,
and ModelCheckpoint would overwrite the best model with a worse one. So a checkpoint has the attributes by which they
decide, and those that a user's callback names in `carried`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.strategies.tensorflow.training.tensorflow_errors import TensorFlowUserCode

_Arrays = Mapping[str, npt.NDArray[Any]]
_CARRIED: tuple[tuple[type[Any], tuple[str, ...]], ...] = (
    (keras.callbacks.EarlyStopping, ("best", "best_epoch", "best_weights", "stopped_epoch", "wait")),
    (keras.callbacks.ReduceLROnPlateau, ("best", "cooldown_counter", "wait")),
    (keras.callbacks.ModelCheckpoint, ("best", "_batches_seen_since_last_saving", "_last_batch_seen")),
)


def make_callbacks(spec: ModelSpec, where: str) -> list[Any]:
    """Return the user's callbacks. Raises JobError, UserCodeError."""
    with TensorFlowUserCode("callbacks()", where):
        callbacks = list(spec.callbacks()) if spec.callbacks else []
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            raise JobError(
                [f"callbacks() gives a {type(callback).__name__}: give keras.callbacks.Callback"], where=where
            )
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise JobError(
                ["callbacks() gives a BackupAndRestore: leave it out, every run backs up and restores"], where=where
            )
    return callbacks


def callback_state(callbacks: Sequence[Any]) -> _Arrays:
    """Return what a checkpoint keeps of callbacks; a list of arrays, such as the best weights, is several entries."""
    found: dict[str, npt.NDArray[Any]] = {}
    for key, callback, name in _carried(callbacks):
        value = getattr(callback, name, None)
        if isinstance(value, list | tuple):
            found |= {f"{key}/{number}": np.asarray(each) for number, each in enumerate(value)}
        elif value is not None:
            found[key] = np.asarray(value)
    return found


def restore_callbacks(callbacks: Sequence[Any], state: _Arrays) -> None:
    """Set the attributes that `callback_state` returned for the same callbacks; others stay."""
    for key, callback, name in _carried(callbacks):
        if key in state:
            setattr(callback, name, state[key].item() if state[key].ndim == 0 else state[key])
        elif f"{key}/0" in state:
            several = sum(each.startswith(f"{key}/") for each in state)
            setattr(callback, name, [state[f"{key}/{number}"] for number in range(several)])


def _carried(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield each attribute that is kept: its key, the callback, its name."""
    for number, callback in enumerate(callbacks):
        own = [name for kind, names in _CARRIED if isinstance(callback, kind) for name in names]
        for name in (*own, *getattr(callback, "carried", ())):
            yield f"{number}/{type(callback).__name__}/{name}", callback, name


def to_bytes(state: _Arrays) -> bytes:
    """Return the state as a file."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **state)
    return file.getvalue()


def from_bytes(data: bytes) -> _Arrays:
    """Return the state of a file."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        return dict(file)
