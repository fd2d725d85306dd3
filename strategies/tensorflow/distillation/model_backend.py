"""Distillation in Keras: models of teachers with hidden states, several students as one model, tensor functions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainwright.core.data import Batch, Columns, Terms
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import CheckpointError, JobError, nearest
from trainwright.core.loss_api import TEACHER_WEIGHTS_OUTPUT, InlineTeacher
from trainwright.strategies.common.user_code_errors import first_line
from trainwright.strategies.distillation.distillation_loss import TensorOps
from trainwright.strategies.distillation.layer_match import LayerProjection, Shape, layer_item, layer_tensor
from trainwright.strategies.distillation.multi_student import Builder, Names, RequestedOutputs
from trainwright.strategies.distillation.teacher_outputs import TeacherOutputs
from trainwright.strategies.tensorflow.tensorflow_compat import replaced
from trainwright.strategies.tensorflow.training import tensor_conversion
from trainwright.strategies.tensorflow.training.evaluation import flatten_outputs
from trainwright.strategies.tensorflow.training.objective import (
    LOSS,
    KerasCaller,
    apply_function,
    call_model,
    model_inputs,
)

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
        layers: name of the output -> layer, as in `core.soft_loss.Match`.

    Raises:
        JobError: there is no such layer; in a call: the layer did not run, or its output has no such item.
    """

    def __init__(self, model: keras.Model, layers: Mapping[str, str]) -> None:
        super().__init__(autocast=False)  # the model takes its inputs in a type of its own
        self.model = model
        found = {layer: (_layer_of(model, layer), layer) for layer in layers.values()}
        object.__setattr__(self, "_recorded", found)  # no layers of its own: they are the model's
        object.__setattr__(self, "_layer_of_output", dict(layers))
        self.built = True

    def call(self, *inputs: Any, training: bool | None = None, **named: Any) -> dict[str, Any]:
        """Return the model's outputs and those of the layers, by name."""
        with _layer_outputs(self._recorded) as found:
            outputs = dict(flatten_outputs("", call_model(self.model, named or list(inputs), training=training)))
        recorded = found()
        return {**outputs, **{output: recorded[layer] for output, layer in self._layer_of_output.items()}}


def tap(model: keras.Model, layers: Mapping[str, str]) -> keras.Model:
    """Return the model, or one that also returns hidden layers. Raises as `LayerOutputModel`."""
    return LayerOutputModel(model, layers) if layers else model


def shapes(model: keras.Model, sample: Columns, inputs: Names, keywords: Names) -> dict[str, Shape]:
    """Return the shapes of a model's outputs for some rows, by name; rows are None."""
    columns = {name: tf.convert_to_tensor(sample[name]) for name in inputs}
    found = call_model(model, model_inputs(columns, inputs, keywords), training=False)
    return {name: (None, *value.shape[1:]) for name, value in flatten_outputs("", found) if tf.is_tensor(value)}


class _KerasInlineTeacher:
    """A teacher that runs in the student's step, without gradients."""

    def __init__(self, model: keras.Model, lesson: TeacherOutputs) -> None:
        self.model, self._lesson = tap(model, lesson.tapped), lesson
        self.model.trainable = False

    def __call__(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the teacher's columns for a batch: logits and layers, float32 or wider.

        Raises:
            JobError: the outputs are wrong. Values are checked in eager calls only.
        """
        given = model_inputs(columns, self._lesson.inputs, self._lesson.keywords)
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


def _layer_of(model: keras.Model, path: str) -> Any:
    """Return a layer by name or path. Raises JobError if there is none."""
    wanted, _ = layer_item(path)
    every = [layer for layer in model._flatten_layers() if layer is not model]
    for layer in every:
        if wanted in (layer.name, layer.path, (layer.path or "").partition("/")[2]):
            return layer
    raise JobError([f"the model has no layer {wanted!r}: {nearest(wanted, {layer.name for layer in every})}"])


@contextmanager
def _layer_outputs(layers: Mapping[str, tuple[Any, str]]) -> Iterator[Callable[[], dict[str, Any]]]:
    """Record layer outputs within this context; yield a function that returns those of the last calls, by name.

    The function raises JobError if a layer did not run, or the selected item of its output is not a tensor.

    Args:
        layers: name -> the layer, and its name in a `Match`.
    """
    recorded: dict[str, Any] = {}

    def recording(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def recorded_call(*args: Any, **kwargs: Any) -> Any:
            recorded[name] = call(*args, **kwargs)
            return recorded[name]

        return recorded_call

    with ExitStack() as stack:
        for name, (layer, _) in layers.items():
            stack.enter_context(replaced(layer, "call", recording(name, layer.call)))
        yield lambda: {
            name: layer_tensor(recorded, name, layer_item(path)[1], tf.is_tensor) for name, (_, path) in layers.items()
        }


# --- Several students as one model; see `strategies.distillation.multi_student` ---------------------------------------


class KerasAxisLinear(keras.layers.Layer):  # type: ignore[misc]
    """A linear map along one axis."""

    def __init__(self, bridge: LayerProjection, dtype: Any) -> None:
        super().__init__(dtype=dtype)
        self.axis = bridge.axis
        self.linear = keras.layers.Dense(bridge.wanted, dtype=dtype)
        self.linear.build((None, bridge.given))
        self.built = True

    def call(self, layer: Any) -> Any:
        """Return a shape with another size along the axis."""
        return keras.ops.moveaxis(self.linear(keras.ops.moveaxis(layer, self.axis, -1)), -1, self.axis)


class KerasStudents(keras.Model):  # type: ignore[misc]
    """Students with the same inputs, as one model.

    Attributes:
        only: the one student that runs; empty for all.
    """

    def __init__(self, models: Mapping[str, keras.Model], wanted: RequestedOutputs) -> None:
        super().__init__(autocast=False)  # each student takes its inputs in a type of its own
        self._names = (*models,)
        for name, model in models.items():
            setattr(self, f"student_{name}", model)  # attributes are in checkpoints, dicts are not
        tapped = {name: (_layer_of(models[student], path), path) for name, (student, path) in wanted.layers.items()}
        object.__setattr__(self, "_tapped", tapped)  # not as attributes for Keras: the layers are the students'
        for name, bridge in wanted.bridges.items():
            setattr(self, _bridge(name), KerasAxisLinear(bridge, tapped[name][0].dtype_policy))
        self.weighing = None
        if wanted.teachers:
            kind = next(iter(models.values())).trainable_variables[0].dtype
            kind = kind if kind == "float64" else "float32"  # half precision would lose small updates
            self.weighing = self.add_weight(
                shape=(wanted.teachers,), initializer="zeros", dtype=kind, autocast=False, name="weighing"
            )
        self.only = wanted.only
        self.built = True

    @property
    def students(self) -> dict[str, keras.Model]:
        """The models by name."""
        return {name: getattr(self, f"student_{name}") for name in self._names}

    def call(self, *inputs: Any, training: bool | None = None, **named: Any) -> Any:
        """Return {student: its outputs} and the further outputs; with `only`, that student's own outputs."""
        given = named or list(inputs)
        if self.only:
            return call_model(self.students[self.only], given, training=training)
        with _layer_outputs(self._tapped) as found:
            outputs = {name: call_model(model, given, training=training) for name, model in self.students.items()}
        for name, layer in found().items():
            outputs[name] = getattr(self, _bridge(name))(layer) if hasattr(self, _bridge(name)) else layer
        if self.weighing is not None:
            rows = tf.shape(tf.nest.flatten(outputs)[0])[0]
            outputs[TEACHER_WEIGHTS_OUTPUT] = tf.repeat(self.weighing.value[None], rows, 0)
        return outputs


def _bridge(output: str) -> str:
    return f"bridge_{output.replace('/', '_')}"


def combine_students(models: Mapping[str, Any], wanted: RequestedOutputs) -> keras.Model:
    """Return several models as one. Raises JobError if one is not of Keras, or not built."""
    for name, model in models.items():
        if not isinstance(model, keras.Model):
            raise JobError([f"the builder of student {name!r} returned {type(model).__name__}: all are of Keras"])
        if not model.built:
            raise JobError(
                [f"student {name!r} has no variables yet: give it a keras.Input, or call it once in its builder"]
            )
    return KerasStudents(models, wanted)


def built_shapes(build: Builder, sample: Columns, inputs: Names, keywords: Names) -> Mapping[str, Shape]:
    """Return output shapes as `shapes`."""
    return shapes(build(), sample, inputs, keywords)


# --- A job's loss and metrics of given outputs, as arrays -------------------------------------------------------------


def marked(spec: ModelSpec, batch: Batch, outputs: Any, only: str = "") -> Terms:
    """Return the terms of a metric, or of the loss without regularizers."""
    caller = KerasCaller(spec=spec, where=only or LOSS)
    named = isinstance(outputs, Mapping)
    given: Any = {
        name: tensor_conversion.to_tensor(name, each) for name, each in (outputs if named else {"": outputs}).items()
    }
    given = given if named else given[""]
    weighed = (spec.sample_weight,) if spec.sample_weight else ()
    columns = tensor_conversion.column_tensors(spec.collation, batch, dict.fromkeys((*spec.targets, *weighed)))
    weights = tf.convert_to_tensor(batch.weights)
    if only:
        found = caller.metric(only, given, columns, weights)
    else:
        found = caller.terms("loss=", caller.applied("loss=", spec.loss, given, caller.targets(columns)), weights)
        found = caller.weighted(found, caller.factors(columns, training=False))
    return Terms(*(np.asarray(tf.cast(each, tf.float64)) for each in found))


# --- The tensor functions of distillation losses ----------------------------------------------------------------------


_TINY = 1e-24  # smallest square of a length
_loaded: dict[tuple[str, str], Any] = {}


def _float32_or_64(value: tf.Tensor) -> tf.Tensor:
    value = tf.convert_to_tensor(value)
    return value if value.dtype == tf.float64 else tf.cast(value, tf.float32)


def _answers(teacher: InlineTeacher, columns: Mapping[str, tf.Tensor], like: tf.Tensor) -> Mapping[str, tf.Tensor]:
    """Load the model once in a process, outside graph and strategy. It replaces another model of its name."""
    key = (teacher.name, teacher.identity())
    if key not in _loaded:
        for old in [old for old in _loaded if old[0] == teacher.name]:
            del _loaded[old]
        _loaded[key] = _apart(teacher.module)
    return {name: tf.stop_gradient(value) for name, value in _loaded[key](columns).items()}


def _apart(function: Callable[[], Any]) -> Any:
    """Return the result of a function in its own thread, outside of graph, strategy and Keras scopes."""
    with ThreadPoolExecutor(1, thread_name_prefix="teacher") as pool:
        return pool.submit(function).result()


TENSORS = TensorOps(
    channels=3,
    is_tensor=lambda value: bool(tf.is_tensor(value)),
    first=lambda outputs: next(leaf for leaf in tf.nest.flatten(outputs) if tf.is_tensor(leaf)),
    shape=lambda value: tuple(value.shape),
    wide=_float32_or_64,
    typed=lambda value, like: tf.cast(value, like.dtype),
    near=lambda value, like: tf.stop_gradient(tf.cast(value, like.dtype)),
    held=tf.stop_gradient,
    precisely=lambda _: nullcontext(),  # only layers of Keras compute in half precision
    called=apply_function,
    answers=_answers,
    log_softmax=tf.nn.log_softmax,
    log_sigmoid=tf.math.log_sigmoid,
    exp=tf.exp,
    log=tf.math.log,
    log_add=lambda one, other: tf.reduce_logsumexp(tf.stack((one, other)), 0),
    log_total=lambda value: tf.reduce_logsumexp(value, 0),
    softmax=lambda value: tf.nn.softmax(value, 0),
    counted=lambda chance, value: tf.where(chance == 0, tf.zeros_like(value), chance * value),
    total=tf.reduce_sum,
    mean=tf.reduce_mean,
    unit=lambda value: value * tf.math.rsqrt(tf.maximum(tf.reduce_sum(value * value, -1, keepdims=True), _TINY)),
    stacked=lambda values: tf.stack([*values]),
    unstacked=lambda value: list(tf.unstack(value)),
    paired=lambda one, other: tf.stack((one, other), -1),
    transposed=tf.transpose,
    flat=lambda value: tf.reshape(value, (tf.shape(value)[0], -1)),
    shortened=lambda value, like: value[:, : tf.shape(like)[1]],
    widened=lambda value, dimensions: value[(..., *(tf.newaxis for _ in range(dimensions - value.shape.rank)))],
)
