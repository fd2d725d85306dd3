"""The network of `problem` in Keras."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from problem import CLASSES, FEATURES, HIDDEN, RATE


def build_model() -> Any:
    """Three dense layers, 0.8 million parameters."""
    import keras

    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(HIDDEN, activation="relu"),
            keras.layers.Dense(HIDDEN, activation="relu"),
            keras.layers.Dense(CLASSES),
        ]
    )


def losses(outputs: Any, targets: Any) -> Any:
    """One loss per sample."""
    import tensorflow as tf

    return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)


def adam(variables: Any) -> Any:
    """Keras' AdamW."""
    import keras

    return keras.optimizers.AdamW(RATE)


FIELDS: dict[str, Any] = {"model": build_model, "loss": losses, "optimizer": adam}


def stamping(folder: Any, pause_s: float) -> Callable[[Any], Any]:
    """A builder of an AdamW that stamps its steps into `folder` and then pauses; see `stamps`."""
    path = str(folder)

    def build(variables: Any) -> Any:
        import keras
        import tensorflow as tf

        if "TF_CONFIG" not in os.environ:
            return adam(variables)  # a trial before the run
        task = json.loads(os.environ["TF_CONFIG"])
        rank = task["task"]["index"] + (task["task"]["type"] == "worker" and "chief" in task["cluster"])

        def stamp(step: Any) -> None:
            with open(os.path.join(path, f"{os.getpid()}.stamps"), "a", encoding="ascii") as file:
                file.write(f"{time.time()!r} {rank} {os.getpid()} {int(step)}\n")
            time.sleep(pause_s)

        class Stamping(keras.optimizers.AdamW):
            def apply(self, grads: Any, trainable_variables: Any = None) -> None:
                super().apply(grads, trainable_variables)
                tf.py_function(stamp, [self.iterations], [])

        return Stamping(RATE)

    return build
