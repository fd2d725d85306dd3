"""Small Keras jobs for tests, with kills as data: whoever is fed the sample in question dies."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import trainwright as tw
from tests.support.torch_jobs import Kill, keep_pace
from trainwright.datasets.loading.batch_loader import make_schedule

ROWS, WIDTH, CLASSES = 203, 8, 4
BATCH, EPOCHS = 24, 3  # nine steps of an epoch, the last batch short
EVERY = 5  # steps between checkpoints


def data() -> dict[str, npt.NDArray[Any]]:
    """Rows that can be learned; `id` is the row number."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(ROWS, WIDTH))
    return {"id": np.arange(ROWS), "x": x, "y": x[:, :CLASSES].argmax(1).astype(np.int64)}


def make_model(dropout: float = 0.1) -> Callable[[], Any]:
    """Two layers in float64."""

    def build() -> Any:
        import keras

        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((WIDTH,), dtype="float64"),
                layers.Dense(16, activation="tanh", dtype="float64"),
                layers.Dropout(dropout, dtype="float64"),
                layers.Dense(CLASSES, dtype="float64"),
            ]
        )

    return build


def momentum(variables: Any) -> Any:
    import keras

    return keras.optimizers.SGD(0.1, momentum=0.9)


def make_step(kills: tuple[Kill, ...], pace_s: float = 0.0, storage: str = "") -> Callable[[Any, Any], Any]:
    """Cross-entropy; a process dies that is fed the first sample of a kill's rank and step in the first epoch.

    Args:
        pace_s: that each step takes at least.
        storage: the run's folder, where a kill is to wait for the checkpoint due before it.
    """
    victims = {first_sample(kill.step, kill.rank): kill for kill in kills}

    def step(model: Any, batch: Any) -> Any:
        import tensorflow as tf

        def strike(ids: Any) -> None:
            for sample in victims.keys() & set(ids.numpy().tolist()):
                if storage:
                    keep_pace(storage, victims[sample].step // EVERY * EVERY, EVERY)
                victims[sample].strike()
            time.sleep(pace_s)

        if victims or pace_s:
            tf.py_function(strike, [batch["id"]], [])
        return tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], model(batch["x"]))

    return step


def first_sample(step: int, rank: int, workers: int = 2) -> int:
    """What a rank is fed first in a step (from 0) of `job`."""
    made = job("")
    share = make_schedule(made.train.index(), **made.ordering()).share(range(step, step + 1), rank, workers)
    return int(share.samples[0])


def job(
    folder: Path | str, kills: tuple[Kill, ...] = (), pace_s: float = 0.0, *, paced: bool = False, **fields: Any
) -> tw.Job:
    """A job of 27 steps, a checkpoint each 5, neither spares nor keepers; `paced` kills wait for theirs."""
    return tw.Job(
        **{
            "name": "faulty",
            "model": make_model(),
            "optimizer": momentum,
            "step": make_step(kills, pace_s, str(folder) if paced else ""),
            "train": tw.datasets.table(data()),
            "batch_size": BATCH,
            "epochs": EPOCHS,
            "seed": 3,
            "checkpoint_steps": EVERY,
            "storage": str(folder),
            "workers": 2,
            "strategy": "tf_multi_worker_mirrored",
            "preflight": False,  # faults are in the job's functions, and are for workers alone
            "spares": 0,
            "keeper_s": 0,
            "hang_deadline_s": 60.0,
            **fields,
        }
    )


def tf_rank() -> int:
    """The number of this worker in TF_CONFIG."""
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"type": "chief", "index": 0})
    return int(task["index"]) + (task["type"] == "worker")


def fit_job(folder: Path | str, kills: tuple[Kill, ...] = (), patience: int | None = None, **fields: Any) -> tw.Job:
    """The same for Keras' `fit`, with validation; a kill strikes at the end of its step.

    The learning rate falls at the end, two epochs after the best one.

    Args:
        patience: epochs without a better loss after which the training ends, none being better by 10.
    """

    def callbacks() -> list[Any]:
        import keras

        def strike(batch: int, logs: Any) -> None:
            for kill in kills:
                if (kill.rank, kill.step) == (tf_rank(), striking.model.optimizer.iterations.numpy()):
                    kill.strike()

        striking = keras.callbacks.LambdaCallback(on_train_batch_end=strike)
        slower = keras.callbacks.ReduceLROnPlateau("val_loss", min_delta=10.0, patience=2)
        early = keras.callbacks.EarlyStopping("val_loss", min_delta=10.0, patience=patience or 0)
        return [striking, slower] if patience is None else [striking, early]

    def loss(outputs: Any, targets: Any) -> Any:
        import tensorflow as tf

        return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)

    fit = {"run": "fit", "step": None, "loss": loss, "inputs": "x", "targets": "y", "callbacks": callbacks}
    alone = {"workers": 1, "strategy": "tf_one_device", "evaluate": tw.datasets.table(data())}
    return job(folder, **{**fit, **alone, **fields})


def make_gan() -> Any:
    """Two networks without call(), each with an optimizer of its own, and noise."""
    import keras
    import tensorflow as tf

    class Gan(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.seed = keras.random.SeedGenerator(5)
            self.generator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(WIDTH)])
            self.discriminator = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1, "sigmoid")])
            self.compile()
            self.d_optimizer, self.g_optimizer = keras.optimizers.Adam(0.03), keras.optimizers.Adam(0.01)

        def train_step(self, real: Any) -> Any:
            noise = keras.random.normal((tf.shape(real)[0], 2), seed=self.seed)
            with tf.GradientTape(persistent=True) as tape:
                wrong = self.discriminator(self.generator(noise))
                d_loss = tf.reduce_mean((1 - self.discriminator(tf.cast(real, tf.float32))) ** 2) + tf.reduce_mean(
                    wrong**2
                )
                g_loss = tf.reduce_mean((1 - wrong) ** 2)
            parts = ((self.discriminator, d_loss, self.d_optimizer), (self.generator, g_loss, self.g_optimizer))
            for part, loss, optimizer in parts:
                optimizer.apply(tape.gradient(loss, part.trainable_weights), part.trainable_weights)
            return {"d_loss": d_loss, "g_loss": g_loss}

    return Gan()


def gan_job(folder: Path | str, kills: tuple[Kill, ...] = (), **fields: Any) -> tw.Job:
    """Such a GAN trained by Keras' `fit` on the rows alone; a kill strikes at the end of its step."""

    def callbacks() -> list[Any]:
        import keras

        def strike(batch: int, logs: Any) -> None:
            for kill in kills:
                if kill.step == striking.model.d_optimizer.iterations.numpy():
                    kill.strike()

        striking = keras.callbacks.LambdaCallback(on_train_batch_end=strike)
        return [striking]

    gan = {"model": make_gan, "optimizer": None, "loss": None, "targets": (), "evaluate": None, "callbacks": callbacks}
    return fit_job(folder, **{**gan, **fields})


def make_loop() -> Any:
    """A custom training loop with dropout, a metric, and an optimizer for each of two parts."""
    import keras
    import tensorflow as tf

    first = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(16, "tanh"), keras.layers.Dropout(0.1)])
    last = keras.Sequential([keras.Input((16,)), keras.layers.Dense(CLASSES)])
    optimizers = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9)
    accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    def train_step(inputs: Any) -> Any:
        x, y = inputs
        with tf.GradientTape(persistent=True) as tape:
            outputs = last(first(x, training=True), training=True)
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(y, outputs)
            loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
        for part, optimizer in zip((first, last), optimizers, strict=True):
            optimizer.apply(tape.gradient(loss, part.trainable_weights), part.trainable_weights)
        accuracy.update_state(y, outputs)
        return loss

    return tw.CustomLoop(
        train_step, first=first, last=last, adam=optimizers[0], sgd=optimizers[1], accuracy=accuracy
    )  # fmt: skip


def loop_job(folder: Path | str, kills: tuple[Kill, ...] = (), **fields: Any) -> tw.Job:
    """That loop on two workers; a kill strikes at the end of its step."""
    two = {"workers": 2, "strategy": "tf_multi_worker_mirrored", "evaluate": None}
    loop = {"model": make_loop, "optimizer": None, "loss": None}
    return fit_job(folder, kills, **{**two, **loop, **fields})


def pipeline(epoch: int) -> Any:
    """The rows by tf.data: as they lie in the first epoch, shuffled in others."""
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices(data())
    return rows.shuffle(ROWS, seed=epoch, reshuffle_each_iteration=False) if epoch else rows


def sharded_pipeline(epoch: int, shard: Any) -> Any:
    """The same rows, of which each worker computes only its own."""
    return shard(pipeline(epoch)).map(dict)
