"""Multi-worker training with plain TensorFlow, after the guide "Custom training loop with Keras and
MultiWorkerMirroredStrategy". `job.py` in this folder does the same in a third of the lines.

Start it once for each worker, each with its own TF_CONFIG, here for the first of two:

    export TF_CONFIG='{"cluster": {"worker": ["localhost:12345", "localhost:23456"]},
                       "task": {"type": "worker", "index": 0}}'
    python examples/multi_worker/by_hand.py

When one worker is killed, the other one waits and then ends. Start both again to continue from the last complete epoch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow.parquet as pq
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sample_data import fashion_mnist

BATCH, EPOCHS, FOLDER = 128, 3, Path("runs/by-hand")


def dataset(context: tf.distribute.InputContext, file: str) -> tf.data.Dataset:
    """Return this worker's share of the images, shuffled."""
    table = pq.read_table(file)
    images = np.stack(table["image"].to_numpy(zero_copy_only=False)).reshape(-1, 28, 28, 1) / np.float32(255)
    rows = tf.data.Dataset.from_tensor_slices((images, table["label"].to_numpy().astype(np.int64)))
    rows = rows.shard(context.num_input_pipelines, context.input_pipeline_id).shuffle(60_000).repeat()
    return rows.batch(context.get_per_replica_batch_size(BATCH)).prefetch(tf.data.AUTOTUNE)


def build_model() -> keras.Model:
    """One convolution and two dense layers."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    """Train, with a checkpoint after each epoch."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    with strategy.scope():
        model, optimizer = build_model(), keras.optimizers.SGD(0.05)
        optimizer.build(model.trainable_variables)
        hits = keras.metrics.SparseCategoricalAccuracy()
        epoch = tf.Variable(0, trainable=False)

    def replica_step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)) / BATCH
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        hits.update_state(labels, logits)
        return loss

    @tf.function
    def train_step(batches: Any) -> Any:
        losses = strategy.run(replica_step, args=next(batches))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=epoch)
    chief = task["index"] == 0  # every worker must save, but only the chief's files are kept
    manager = tf.train.CheckpointManager(checkpoint, FOLDER if chief else f"/tmp/unused-{task['index']}", max_to_keep=1)
    latest = tf.train.latest_checkpoint(FOLDER)
    if latest:
        checkpoint.restore(latest)
    file = fashion_mnist("data/fashion-mnist").train
    batches = iter(strategy.distribute_datasets_from_function(lambda context: dataset(context, file)))
    while int(epoch.numpy()) < EPOCHS:
        losses = [float(train_step(batches)) for _ in range(60_000 // BATCH)]
        print(f"epoch {int(epoch.numpy()) + 1}: loss {np.mean(losses):.4f}, accuracy {float(hits.result()):.4f}")
        hits.reset_state()
        epoch.assign_add(1)
        manager.save()


if __name__ == "__main__":
    main()
