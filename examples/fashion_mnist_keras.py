"""The main job in Keras 3 on TensorFlow: one file for every strategy of tf.distribute.

trainwright fit examples/fashion_mnist_keras.py
trainwright fit examples/fashion_mnist_keras.py --strategy tf_multi_worker_mirrored
trainwright fit examples/fashion_mnist_keras.py --strategy tf_mirrored --set devices=2
"""

from __future__ import annotations

from typing import Any

import sample_data

import trainwright as tw

data = sample_data.fashion_mnist("data/fashion-mnist")


def build_model() -> Any:
    """Two convolutions with group normalisation and two dense layers; 0.2 M parameters."""
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input((28, 28)),
            layers.Rescaling(1 / 90.0, offset=-73.0 / 90.0),
            layers.Reshape((28, 28, 1)),
            layers.Conv2D(16, 3, padding="same"), layers.MaxPooling2D(), layers.GroupNormalization(4), layers.ReLU(),
            layers.Conv2D(32, 3, padding="same"), layers.MaxPooling2D(), layers.GroupNormalization(8), layers.ReLU(),
            layers.Flatten(), layers.Dropout(0.2),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )  # fmt: skip


def cross_entropy(logits: Any, labels: Any) -> Any:
    """One loss per image."""
    import tensorflow as tf

    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def accuracy(logits: Any, labels: Any) -> Any:
    """One 0 or 1 per image."""
    import tensorflow as tf

    return tf.equal(tf.argmax(logits, axis=1), tf.cast(labels, tf.int64))


def adam(variables: Any) -> Any:
    """Adam at the peak rate of the schedule."""
    import keras

    return keras.optimizers.AdamW(5e-3, weight_decay=2e-2)


job = tw.Job(
    name="fashion-mnist-keras",
    model=build_model,
    loss=cross_entropy,
    optimizer=adam,
    schedule=tw.schedules.one_cycle,
    train=tw.datasets.parquet(data.train),
    evaluate=tw.datasets.parquet(data.test),
    inputs="image",
    targets="label",
    batch_size=256,
    epochs=5,
    metrics={"accuracy": accuracy},
    storage="runs",
)
