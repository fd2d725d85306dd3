"""Linear models of Keras as teachers and students."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

ROWS, WIDTH, CLASSES, STEPS, RATE, ALPHA, HEAT = 200, 6, 4, 5, 0.5, 0.3, 3.0


def keras_linear(weights: np.ndarray) -> Callable[[], Any]:
    def build() -> Any:
        import keras

        model = keras.Sequential([keras.Input((weights.shape[0],)), keras.layers.Dense(weights.shape[1])])
        model.set_weights([weights, np.zeros(weights.shape[1], np.float32)])
        return model

    return build


def keras_loss(outputs: Any, targets: Any) -> Any:
    import tensorflow as tf

    return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)


def keras_sgd(parameters: Any) -> Any:
    import keras

    return keras.optimizers.SGD(RATE)
