"""Keras models as teachers: weights from files, hidden states by the names of layers, and one inside another's loss."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainwright.core.errors import CheckpointError, JobError
from trainwright.strategies.failures import first_line
from trainwright.strategies.teaching import Lesson, item_of, located
from trainwright.strategies.tensorflow.evaluation import flat
from trainwright.strategies.tensorflow.objective import call_model


def still(parameters: Iterable[Any]) -> keras.optimizers.Optimizer:
    """An optimizer without state, for what is not trained."""
    return keras.optimizers.SGD(learning_rate=0.0)


def thawed(model: keras.Model) -> keras.Model:
    """The model as an engine takes it, which wants variables that could be trained."""
    model.trainable = True
    return model


def take_file(model: keras.Model, path: str) -> keras.Model:
    """Give a model the weights of a file that `export` wrote. Raises CheckpointError where they do not fit."""
    try:
        model.load_weights(path)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the weights do not fit the model: {first_line(error)}",
            where=path,
            remedy="give the model= that they were exported from, to .keras or .weights.h5: a SavedModel has no layers",
        ) from error
    return model


def digest(model: keras.Model) -> str:
    """SHA-256 of the variables."""
    sums = hashlib.sha256()
    for variable in model.variables:
        array = np.ascontiguousarray(variable.numpy())
        sums.update(f"{variable.path} {array.dtype} {array.shape}\n".encode())
        sums.update(array.tobytes())
    return sums.hexdigest()


def tap(model: keras.Model, layers: Mapping[str, str]) -> keras.Model:
    """A model of the same layers that gives beside its own outputs what some layers give.

    Args:
        layers: name of the output -> layer, or `layer:1` or `layer:key` for an item of what it gives.

    Raises:
        JobError: there is no such layer or item, or the model is not of layers that are known before it is called.
    """
    if not layers:
        return model
    graph = model._functional if isinstance(model, keras.Sequential) else model
    if not isinstance(graph, keras.src.models.functional.Functional):
        kind = type(model).__name__
        raise JobError(
            [f"layers of a {kind} are not known by name: give a functional or sequential model with a keras.Input"]
        )
    names = [layer.name for layer in graph.layers]
    told = dict(flat("", graph._outputs_struct))
    for output, layer in layers.items():
        name, item = located(layer, names)
        told[output] = item_of(graph.get_layer(name).output, layer, item)
    return keras.Model(graph._inputs_struct, told)


class Inside:
    """A teacher inside a student's step, without gradients.

    Args:
        model: with its weights.
        lesson: what it is given, and what is made of what it gives.
    """

    def __init__(self, model: keras.Model, lesson: Lesson) -> None:
        self.model, self._lesson = tap(model, lesson.tapped), lesson
        self.model.trainable = False

    def __call__(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The teacher's columns for a batch: logits and layers, float32 or wider.

        Raises:
            JobError: what it gives is not what it is said to be, where that is not traced.
        """
        given: Any = [columns[name] for name in self._lesson.inputs]
        given = dict(zip(self._lesson.keywords, given, strict=True)) if self._lesson.keywords else given
        outputs = dict(flat("", call_model(self.model, given, training=False)))
        told = self._lesson.told(outputs, log_odds, np.asarray if tf.executing_eagerly() else None)
        return {name: tf.stop_gradient(_wide(value)) for name, value in told.items()}


def log_odds(probabilities: Any, each: bool) -> Any:
    """Logits of probabilities: of one class among all, or of each by itself."""
    least = np.finfo(probabilities.dtype.as_numpy_dtype).tiny
    logs = tf.math.log(tf.maximum(probabilities, least))
    return logs - tf.math.log(tf.maximum(1 - probabilities, least)) if each else logs


def _wide(value: Any) -> Any:
    return tf.cast(value, tf.float32) if value.dtype.size < 4 else value


inside = Inside
