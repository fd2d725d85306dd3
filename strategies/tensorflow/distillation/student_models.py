"""Several students as one Keras model; see `strategies.distillation.multi_student`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainwright.core.data import Batch, Columns, Terms
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.loss_api import TEACHER_WEIGHTS_OUTPUT
from trainwright.strategies.distillation.layer_match import LayerProjection, Shape
from trainwright.strategies.distillation.multi_student import Builder, Names, RequestedOutputs, StudentBackend
from trainwright.strategies.tensorflow.distillation.teacher_backend import layer_of, layer_outputs
from trainwright.strategies.tensorflow.training import tensor_conversion
from trainwright.strategies.tensorflow.training.objective import LOSS, KerasCaller, call_model


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

    Args:
        models: by name, with their variables.
        wanted: further outputs.

    Attributes:
        only: the one student that runs; empty for all.
    """

    def __init__(self, models: Mapping[str, keras.Model], wanted: RequestedOutputs) -> None:
        super().__init__(autocast=False)  # each student takes its inputs in a type of its own
        self._names = (*models,)
        for name, model in models.items():
            setattr(self, f"student_{name}", model)  # attributes are in checkpoints, dicts are not
        tapped = {name: (layer_of(models[student], path), path) for name, (student, path) in wanted.layers.items()}
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
        with layer_outputs(self._tapped) as found:
            outputs = {name: call_model(model, given, training=training) for name, model in self.students.items()}
        for name, layer in found().items():
            outputs[name] = getattr(self, _bridge(name))(layer) if hasattr(self, _bridge(name)) else layer
        if self.weighing is not None:
            rows = tf.shape(tf.nest.flatten(outputs)[0])[0]
            outputs[TEACHER_WEIGHTS_OUTPUT] = tf.repeat(self.weighing.value[None], rows, 0)
        return outputs


def _bridge(output: str) -> str:
    return f"bridge_{output.replace('/', '_')}"


class _KerasStudentBackend:
    """Combine Keras models on TensorFlow."""

    def model_of(self, models: Mapping[str, Any], wanted: RequestedOutputs) -> keras.Model:
        for name, model in models.items():
            if not isinstance(model, keras.Model):
                raise JobError([f"the builder of student {name!r} returned {type(model).__name__}: all are of Keras"])
            if not model.built:
                raise JobError(
                    [f"student {name!r} has no variables yet: give it a keras.Input, or call it once in its builder"]
                )
        return KerasStudents(models, wanted)

    def shapes(self, build: Builder, sample: Columns, inputs: Names, keywords: Names) -> Mapping[str, Shape]:
        given = [tf.convert_to_tensor(sample[name]) for name in inputs]
        found = call_model(build(), dict(zip(keywords, given, strict=True)) if keywords else given, training=False)
        return {name: (None, *value.shape[1:]) for name, value in found.items() if tf.is_tensor(value)}


CLASSES: StudentBackend = _KerasStudentBackend()


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
