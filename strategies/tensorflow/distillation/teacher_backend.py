"""Keras models as teachers: weights from files, hidden states by layer name, and inline teachers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainwright.core.data import Columns
from trainwright.core.errors import CheckpointError, JobError, nearest
from trainwright.strategies.common.user_code_errors import first_line
from trainwright.strategies.distillation.layer_match import layer_item, layer_tensor
from trainwright.strategies.distillation.teacher_outputs import TeacherOutputs
from trainwright.strategies.tensorflow.training.evaluation import flatten_outputs
from trainwright.strategies.tensorflow.training.objective import call_model

FRAMEWORK, LOOKS = "Keras", False  # its steps are traced


def still(parameters: Iterable[Any]) -> keras.optimizers.Optimizer:
    """Return an optimizer without state, for a model that is not trained."""
    return keras.optimizers.SGD(learning_rate=0.0)


def thawed(model: keras.Model) -> keras.Model:
    """Return the model with trainable variables, which an engine needs."""
    model.trainable = True
    return model


def outlined(model: keras.Model) -> bool:
    """Return False: Keras models always have memory."""
    return False


def take_file(model: keras.Model, path: str) -> keras.Model:
    """Load weights from a file that `export` wrote. Raises CheckpointError if they do not fit."""
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
    """Return the SHA-256 of the variables, in their order: names in Keras differ between calls in one process."""
    sums = hashlib.sha256()
    for number, variable in enumerate(model.variables):
        array = np.ascontiguousarray(variable.numpy())
        sums.update(f"{number} {array.dtype} {array.shape}\n".encode())
        sums.update(array.tobytes())
    return sums.hexdigest()


class LayerOutputModel(keras.Model):  # type: ignore[misc]
    """A model that also returns the outputs of some of its layers.

    Args:
        model: with its variables.
        layers: name of the output -> layer, as in `core.loss_api.Match`.

    Raises:
        JobError: there is no such layer; in a call: the layer did not run, or its output has no such item.
    """

    def __init__(self, model: keras.Model, layers: Mapping[str, str]) -> None:
        super().__init__(autocast=False)  # the model takes its inputs in a type of its own
        self.model = model
        found = {layer: (layer_of(model, layer), layer) for layer in layers.values()}
        object.__setattr__(self, "_recorded", found)  # no layers of its own: they are the model's
        object.__setattr__(self, "_layer_of_output", dict(layers))
        self.built = True

    def call(self, *inputs: Any, training: bool | None = None, **named: Any) -> dict[str, Any]:
        """Return the model's outputs and those of the layers, by name."""
        with layer_outputs(self._recorded) as found:
            outputs = dict(flatten_outputs("", call_model(self.model, named or list(inputs), training=training)))
        recorded = found()
        return {**outputs, **{output: recorded[layer] for output, layer in self._layer_of_output.items()}}


def tap(model: keras.Model, layers: Mapping[str, str]) -> keras.Model:
    """Return the model, or one that also returns hidden layers. Raises as `LayerOutputModel`."""
    return LayerOutputModel(model, layers) if layers else model


def shapes(
    model: keras.Model, sample: Columns, inputs: tuple[str, ...], keywords: tuple[str, ...]
) -> dict[str, tuple[int | None, ...]]:
    """Return the shapes of a model's outputs for some rows, by name; rows are None.

    Args:
        sample: columns of one row or a few, after collation.
        inputs, keywords: as a job's `arguments` and `keywords`.
    """
    given: Any = [tf.convert_to_tensor(sample[name]) for name in inputs]
    given = dict(zip(keywords, given, strict=True)) if keywords else given
    found = call_model(model, given, training=False)
    return {name: (None, *value.shape[1:]) for name, value in flatten_outputs("", found) if tf.is_tensor(value)}


class _KerasInlineTeacher:
    """A teacher that runs in the student's step, without gradients.

    Args:
        model: with its weights.
        lesson: its inputs, and how its outputs become columns.
    """

    def __init__(self, model: keras.Model, lesson: TeacherOutputs) -> None:
        self.model, self._lesson = tap(model, lesson.tapped), lesson
        self.model.trainable = False

    def __call__(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the teacher's columns for a batch: logits and layers, float32 or wider.

        Raises:
            JobError: the outputs are wrong. Values are checked in eager calls only.
        """
        given: Any = [columns[name] for name in self._lesson.inputs]
        given = dict(zip(self._lesson.keywords, given, strict=True)) if self._lesson.keywords else given
        outputs = dict(flatten_outputs("", call_model(self.model, given, training=False)))
        told = self._lesson.told(outputs, log_odds, np.asarray if tf.executing_eagerly() else None)
        return {name: tf.stop_gradient(_wide(value)) for name, value in told.items()}


def log_odds(probabilities: Any, each: bool) -> Any:
    """Return logits of probabilities: of one class among all, or of each label by itself."""
    least = np.finfo(probabilities.dtype.as_numpy_dtype).tiny
    logs = tf.math.log(tf.maximum(probabilities, least))
    return logs - tf.math.log(tf.maximum(1 - probabilities, least)) if each else logs


def _wide(value: Any) -> Any:
    return tf.cast(value, tf.float32) if value.dtype.size < 4 else value


inside = _KerasInlineTeacher


# --- Outputs of layers inside a model, recorded while the model is called ---------------------------------------------


def layer_of(model: keras.Model, path: str) -> Any:
    """Return a layer by name or path. Raises JobError if there is none."""
    wanted, _ = layer_item(path)
    every = [layer for layer in model._flatten_layers() if layer is not model]
    for layer in every:
        if wanted in (layer.name, layer.path, (layer.path or "").partition("/")[2]):
            return layer
    raise JobError([f"the model has no layer {wanted!r}: {nearest(wanted, {layer.name for layer in every})}"])


@contextmanager
def layer_outputs(layers: Mapping[str, tuple[Any, str]]) -> Iterator[Callable[[], dict[str, Any]]]:
    """Record layer outputs within this context; yield a function that returns those of the last calls, by name.

    The function raises JobError if a layer did not run, or the selected item of its output is no tensor.

    Args:
        layers: name -> the layer, and its name in a `Match`.
    """
    recorded: dict[str, Any] = {}
    before = [(layer, vars(layer).get("call")) for layer, _ in layers.values()]

    def recording(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def recorded_call(*args: Any, **kwargs: Any) -> Any:
            recorded[name] = call(*args, **kwargs)
            return recorded[name]

        return recorded_call

    for name, (layer, _) in layers.items():
        object.__setattr__(layer, "call", recording(name, layer.call))
    try:
        yield lambda: {
            name: layer_tensor(recorded, name, layer_item(path)[1], tf.is_tensor) for name, (_, path) in layers.items()
        }
    finally:
        for layer, own in reversed(before):
            if own is None:
                vars(layer).pop("call", None)
            else:
                object.__setattr__(layer, "call", own)
