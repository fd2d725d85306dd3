"""MultiWorkerMirroredStrategy by hand, as TensorFlow's tutorial on custom training with it has it."""

from __future__ import annotations

import time
from typing import Any

import keras_problem
import tensorflow as tf
from problem import BATCH_SIZE, ROWS, data


class PlainLoop:
    """One worker's training loop; the strategy is there already."""

    def __init__(self, strategy: tf.distribute.MultiWorkerMirroredStrategy) -> None:
        self._strategy = strategy
        with strategy.scope():
            self._model = keras_problem.build_model()
            self._optimizer = keras_problem.adam(None)
            self._optimizer.build(self._model.trainable_variables)
        columns, options = data(), tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        workers = strategy.num_replicas_in_sync
        own = strategy.cluster_resolver.task_id if strategy.cluster_resolver.task_type == "worker" else -1
        rows = tf.data.Dataset.from_tensor_slices((columns["x"], columns["y"])).shard(workers, own + 1)
        mixed = rows.shuffle(ROWS // workers, seed=0).repeat().batch(BATCH_SIZE // workers, drop_remainder=True)
        fed = mixed.prefetch(tf.data.AUTOTUNE).with_options(options)
        self._batches = iter(strategy.experimental_distribute_dataset(fed))

    def run(self, steps: int) -> list[float]:
        """Seconds of each of so many steps; it waits for the last."""
        seconds, loss = [], None
        for _ in range(steps):
            begun = time.perf_counter()
            loss = self._step(next(self._batches))
            seconds.append(time.perf_counter() - begun)
        assert loss is not None
        begun = time.perf_counter()
        loss.numpy()
        seconds[-1] += time.perf_counter() - begun
        return seconds

    @tf.function
    def _step(self, batch: Any) -> Any:
        each = self._strategy.run(self._train, args=batch)
        return self._strategy.reduce(tf.distribute.ReduceOp.SUM, each, axis=None)

    def _train(self, inputs: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = self._model(inputs, training=True)
            loss = tf.reduce_sum(keras_problem.losses(outputs, targets)) / BATCH_SIZE
        variables = self._model.trainable_variables
        self._optimizer.apply(tape.gradient(loss, variables), variables)
        return loss
