"""Ray Train's TensorflowTrainer, as its user guide on TensorFlow has it, with TensorFlow's tutorial's loop."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import keras_problem
import numpy as np
import ray.train
from problem import BATCH_SIZE, WORKERS, data
from ray.train import Checkpoint
from ray.train.tensorflow import TensorflowTrainer

from peers import Settings, fit_with_ray


def fit(storage: Path, settings: Settings) -> None:
    """Train to the end; raises what TensorflowTrainer raises."""
    fit_with_ray(TensorflowTrainer, train_loop, storage, settings)


def train_loop(config: dict[str, Any]) -> None:
    """What each worker runs."""
    import tensorflow as tf
    from stamps import is_last

    settings = Settings(**config)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = ray.train.get_context().get_world_rank()
    with strategy.scope():
        model = keras_problem.build_model()
        optimizer = keras_problem.stamping(settings.stamps, settings.pause_s)(model.trainable_variables)
        optimizer.build(model.trainable_variables)
        saved = tf.train.Checkpoint(model=model, optimizer=optimizer)

    def replica_step(inputs: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(keras_problem.losses(model(inputs, training=True), targets)) / BATCH_SIZE
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def train_step(batch: Any) -> Any:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica_step, args=batch), axis=None)

    done = _resume(saved)
    batches = iter(strategy.experimental_distribute_dataset(_dataset(tf, settings.rows, rank)))
    for step in range(done + 1, settings.steps + 1):
        loss = train_step(next(batches))
        if step % settings.checkpoint_steps == 0:
            _report(rank, step, float(loss), saved)
        if is_last(settings.stamps, step):
            break


def _dataset(tf: Any, rows: int, rank: int) -> Any:
    columns, options = data(rows), tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    own = tf.data.Dataset.from_tensor_slices((columns["x"], columns["y"])).shard(WORKERS, rank)
    mixed = own.shuffle(rows, seed=0).repeat().batch(BATCH_SIZE // WORKERS, drop_remainder=True)
    return mixed.prefetch(tf.data.AUTOTUNE).with_options(options)


def _resume(saved: Any) -> int:
    """Load the checkpoint that Ray Train hands over after a failure; returns its step, 0 without one."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        saved.read(os.path.join(folder, "state")).assert_existing_objects_matched()
        return int(np.load(os.path.join(folder, "step.npy")))


def _report(rank: int, step: int, loss: float, saved: Any) -> None:
    """Report a checkpoint; every worker writes one, as saving is a matter of all, and rank 0 brings its files."""
    with tempfile.TemporaryDirectory() as folder:
        saved.write(os.path.join(folder, "state"))
        np.save(os.path.join(folder, "step.npy"), step)
        checkpoint = Checkpoint.from_directory(folder) if rank == 0 else None
        ray.train.report({"loss": loss}, checkpoint=checkpoint)
