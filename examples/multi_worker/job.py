"""The training of `by_hand.py` as a job: no TF_CONFIG to write, and no process to start by hand.

A worker that dies is replaced while the others wait for a second or two.

    trainwright fit examples/multi_worker/job.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import trainwright as tw

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sample_data import fashion_mnist

data = fashion_mnist("data/fashion-mnist")


def build_model() -> Any:
    """One convolution and two dense layers."""
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input((28, 28)),
            layers.Rescaling(1 / 255),
            layers.Reshape((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def loss(logits: Any, labels: Any) -> Any:
    """One loss per image."""
    import tensorflow as tf

    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def accuracy(logits: Any, labels: Any) -> Any:
    """One 0 or 1 per image."""
    import tensorflow as tf

    return tf.equal(tf.argmax(logits, axis=1), tf.cast(labels, tf.int64))


def sgd(variables: Any) -> Any:
    """Plain stochastic gradient descent."""
    import keras

    return keras.optimizers.SGD(0.05)


job = tw.Job(
    name="multi-worker",
    model=build_model,
    loss=loss,
    optimizer=sgd,
    metrics={"accuracy": accuracy},
    train=tw.datasets.parquet(data.train),
    evaluate=tw.datasets.parquet(data.test),
    inputs="image",
    targets="label",
    batch_size=128,
    epochs=3,
    strategy="tf_multi_worker_mirrored",
    storage="runs",
)
