"""Keras models as teachers: weights from files, hidden states by the names of layers, and one inside another's loss."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainwright.core.data import Columns
from trainwright.core.errors import CheckpointError
from trainwright.strategies.common.error_mapping import first_line
from trainwright.strategies.distillation.teacher_outputs import Lesson
from trainwright.strategies.tensorflow.distillation.hidden_states import heard, layer_of
from trainwright.strategies.tensorflow.training.evaluation import flat
from trainwright.strategies.tensorflow.training.objective import call_model

FRAMEWORK, LOOKS = "Keras", False  # its steps are traced


def still(parameters: Iterable[Any]) -> keras.optimizers.Optimizer:
    """An optimizer without state, for what is not trained."""
    return keras.optimizers.SGD(learning_rate=0.0)


def thawed(model: keras.Model) -> keras.Model:
    """The model as an engine takes it, which wants variables that could be trained."""
    model.trainable = True
    return model


def outlined(model: keras.Model) -> bool:
    """Never: Keras builds with memory."""
    return False


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
    """SHA-256 of the variables by their order: Keras counts names up in a process."""
    sums = hashlib.sha256()
    for number, variable in enumerate(model.variables):
        array = np.ascontiguousarray(variable.numpy())
        sums.update(f"{number} {array.dtype} {array.shape}\n".encode())
        sums.update(array.tobytes())
    return sums.hexdigest()


class Tapped(keras.Model):  # type: ignore[misc]
    """A model that gives beside its own outputs what some of its layers give.

    Args:
        model: with its variables.
        layers: name of the output -> layer, as in `core.soft_loss.Match`.

    Raises:
        JobError: there is no such layer; when called: it did not run, or gives no such item.
    """

    def __init__(self, model: keras.Model, layers: Mapping[str, str]) -> None:
        super().__init__(autocast=False)  # the model takes its inputs in a type of its own
        self.model = model
        found = {layer: (layer_of(model, layer), layer) for layer in layers.values()}
        object.__setattr__(self, "_layers_heard", found)  # no layers of its own: they are the model's
        object.__setattr__(self, "_told", dict(layers))
        self.built = True

    def call(self, *inputs: Any, training: bool | None = None, **named: Any) -> dict[str, Any]:
        """All by name."""
        with heard(self._layers_heard) as found:
            outputs = dict(flat("", call_model(self.model, named or list(inputs), training=training)))
        said = found()
        return {**outputs, **{output: said[layer] for output, layer in self._told.items()}}


def tap(model: keras.Model, layers: Mapping[str, str]) -> keras.Model:
    """The model, or where layers of it are to be told one around it. Raises as `Tapped`."""
    return Tapped(model, layers) if layers else model


def shapes(
    model: keras.Model, sample: Columns, inputs: tuple[str, ...], keywords: tuple[str, ...]
) -> dict[str, tuple[int | None, ...]]:
    """Shapes of what a model gives for some rows, by name; that of the rows is None.

    Args:
        sample: columns of a row or a few, collated.
        inputs, keywords: as a job's `arguments` and `keywords`.
    """
    given: Any = [tf.convert_to_tensor(sample[name]) for name in inputs]
    given = dict(zip(keywords, given, strict=True)) if keywords else given
    found = call_model(model, given, training=False)
    return {name: (None, *value.shape[1:]) for name, value in flat("", found) if tf.is_tensor(value)}


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
