"""Runs that an earlier version stored half-way, and their jobs: a later version must still read and resume them.

`python -m tests.stored_runs VERSION` stores those of the code as it is now, in `tests/stored_runs/VERSION`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import trainwright as tw

HERE = Path(__file__).resolve().parent
ROWS, WIDTH, CLASSES, BATCH, EPOCHS, SEED = 96, 8, 4, 8, 2, 3
STOPPED_AT = 8  # steps of 24
PAUSE = "STORED_RUNS_PAUSE_S"


def dataset(rows: int = ROWS) -> tw.datasets.Dataset:
    """Rows that can be learned, of a fixed seed."""
    x = np.random.default_rng(11).normal(size=(ROWS, WIDTH)).astype(np.float32)[:rows]
    return tw.datasets.table({"x": x, "y": x[:, :CLASSES].argmax(1).astype(np.int64)})


def constant(_step: int, _total: int) -> float:
    """Return the factor of the learning rate; slow where a run is to be stopped half-way."""
    time.sleep(float(os.environ.get(PAUSE, "0")))
    return 1.0


def torch_model() -> Any:
    """Return two layers."""
    from torch import nn

    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def torch_loss(outputs: Any, targets: Any) -> Any:
    """Return the cross-entropy of each sample, as a shape (batch,)."""
    from torch.nn import functional

    return functional.cross_entropy(outputs, targets, reduction="none")


def torch_optimizer(parameters: Any) -> Any:
    """Return AdamW."""
    from torch.optim import AdamW

    return AdamW(parameters, lr=0.01)


def keras_model() -> Any:
    """Return the same two layers of Keras."""
    import keras

    layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers])


def keras_loss(outputs: Any, targets: Any) -> Any:
    """Return the cross-entropy of each sample, as a shape (batch,)."""
    import tensorflow as tf

    return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)


def keras_optimizer(_variables: Any) -> Any:
    """Return SGD with momentum."""
    import keras

    return keras.optimizers.SGD(0.1, momentum=0.9)


TORCH = {"model": torch_model, "loss": torch_loss, "optimizer": torch_optimizer}
KERAS = {"model": keras_model, "loss": keras_loss, "optimizer": keras_optimizer}
JOBS: dict[str, dict[str, Any]] = {
    "data-parallel": {**TORCH, "strategy": "data_parallel"},
    "sharded": {**TORCH, "strategy": "sharded"},
    "pipeline": {**TORCH, "strategy": "pipeline", "accumulation": 2},
    "keras": {**KERAS, "strategy": "tf_multi_worker_mirrored"},
}


def job(name: str, storage: Path | str) -> tw.Job:
    """Return the job of a stored run: 24 steps on two workers, a checkpoint after every 4."""
    return tw.Job(
        name=name,
        train=dataset(),
        evaluate=dataset(16),
        inputs=("x",),
        targets=("y",),
        batch_size=BATCH,
        epochs=EPOCHS,
        seed=SEED,
        schedule=constant,
        checkpoint_steps=4,
        workers=2,
        storage=str(storage),
        probe=False,
        preflight=False,
        **JOBS[name],
    )
