"""Fashion-MNIST by TensorFlow's parameter servers: accuracy beside one device, on Ray."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fashion_table import Splits, fashion_mnist, write_splits
from figures import Figure, deviation, shortfall
from machine import ray_cluster, settle

import trainwright as tw

DATA = Path(__file__).resolve().parent.parent / "data" / "fashion-mnist"
WORKERS, SERVERS, BATCH_SIZE, EPOCHS, SEEDS = 2, 2, 256, 5, 3
HIDDEN, CLASSES = 128, 10
ALONE, SERVED = "one device", "parameter servers"
RATES = {ALONE: 3e-3, SERVED: 3e-3}
TRIED = (1 / 3, 1, 3)  # by `tune`, times those above
PLANS: Mapping[str, Mapping[str, Any]] = {
    ALONE: {"strategy": "tf_one_device", "workers": 1},
    SERVED: {"strategy": "tf_parameter_server", "workers": WORKERS, "plan": f"dp={WORKERS},servers={SERVERS}"},
}
NOTE = (
    f"A Keras network of two layers on Fashion-MNIST, {EPOCHS} epochs of steps of {BATCH_SIZE} samples, the same for "
    "both, Adam without momentum, whose learning rate rises for a tenth of the run and falls to 0; at its highest "
    f"{', '.join(f'{rate:g} for {name}' for name, rate in RATES.items())}, the best of three rates on another seed "
    "(`python benchmarks/tf_parameter_server.py` tries a third and three times as much). `trainwright.fit` on a Ray "
    f"cluster: `tf_parameter_server` with a chief, {WORKERS} workers and {SERVERS} servers, each worker's half of a "
    "step an update of its own, and `tf_one_device`. Accuracy is of the 10,000 test images, a mean over "
    f"{SEEDS} seeds; the ratio is how far it lies below that of one device, in the latter's deviations. No time "
    "is measured, so that the machine need not be quiet; no two runs with servers are alike."
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    found: dict[str, list[float]] = {name: [] for name in PLANS}
    splits = write_splits(folder / "data", 4 * BATCH_SIZE, BATCH_SIZE) if smoke else fashion_mnist(DATA)
    seeds, epochs = (1, 1) if smoke else (SEEDS, EPOCHS)
    with ray_cluster(cpus=1 + WORKERS + SERVERS):
        for seed in range(seeds):
            for name in PLANS:
                found[name].append(accuracy_of(folder / f"{seed}", splits, name, RATES[name], seed, epochs))
                settle()
    return [_below(found[SERVED], found[ALONE])]


def tune() -> None:
    """Print what both come to by learning rate, on a seed that is not measured."""
    with tempfile.TemporaryDirectory() as folder, ray_cluster(cpus=1 + WORKERS + SERVERS):
        splits = fashion_mnist(DATA)
        for name in PLANS:
            for factor in TRIED:
                rate = factor * RATES[name]
                found = accuracy_of(Path(folder) / f"{factor:g}", splits, name, rate, 99, EPOCHS)
                print(f"{name:17} {rate:7.2g} {found:.4f}", flush=True)


def accuracy_of(folder: Path, splits: Splits, name: str, rate: float, seed: int, epochs: int) -> float:
    """On the test set, after a whole run."""
    run = tw.fit(
        tw.Job(
            name=name.replace(" ", "-"),
            model=build_model,
            loss=losses,
            optimizer=functools.partial(adam, rate),
            schedule=triangle,
            train=tw.datasets.parquet(splits.train),
            evaluate=tw.datasets.parquet(splits.test),
            evaluate_epochs=epochs,
            inputs="image",
            targets="label",
            batch_size=BATCH_SIZE,
            epochs=epochs,
            metrics={"accuracy": accuracy},
            checkpoint_steps=epochs * 60_000,
            seed=seed,
            spares=0,
            storage=str(folder),
            **PLANS[name],
        )
    )
    return run.metrics["accuracy"]


def _below(ours: Sequence[float], alone: Sequence[float]) -> Figure:
    """How far our mean lies below that of one device, in the latter's deviations over the seeds."""
    said = (
        f"accuracy of a chief, {WORKERS} workers and {SERVERS} servers +- {deviation(ours):.4f}, below that of "
        f"one device +- {deviation(alone):.4f}, in the latter's deviations"
    )
    return Figure(
        benchmark="tf_parameter_server", what=said, unit="of 1", ours=float(np.mean(ours)), peer=float(np.mean(alone)),
        pairs=len(ours), ratio=shortfall(ours, alone), target=1, count=True,
    )  # fmt: skip


def build_model() -> Any:
    """Two dense layers, 0.1 million parameters."""
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input((28, 28)),
            layers.Rescaling(1 / 90.0, offset=-73.0 / 90.0),
            layers.Flatten(),
            layers.Dense(HIDDEN, activation="relu"),
            layers.Dense(CLASSES),
        ]
    )


def losses(outputs: Any, targets: Any) -> Any:
    """One loss per image."""
    import tensorflow as tf

    return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)


def accuracy(outputs: Any, targets: Any) -> Any:
    """1 where the class is right."""
    import tensorflow as tf

    return tf.cast(tf.equal(tf.argmax(outputs, axis=1), tf.cast(targets, tf.int64)), tf.float32)


def adam(rate: float, variables: Any) -> Any:
    """Keras' Adam, without momentum."""
    import keras

    return keras.optimizers.Adam(rate, beta_1=0.0)


def triangle(step: int, total: int) -> float:
    """Up for a tenth, and down to 0."""
    return min(10.0 * (step + 1) / total, 1.0) * (1.0 - step / total)


if __name__ == "__main__":
    tune()
