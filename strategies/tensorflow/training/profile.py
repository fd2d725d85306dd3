"""What a Keras model costs, layer by layer, read off its graph: nothing is computed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainwright.core.errors import JobError
from trainwright.core.model_profile import LayerCost, ModelProfile, folded, with_loss
from trainwright.strategies.tensorflow.training.checkpoint_files import export, take_weights
from trainwright.strategies.tensorflow.training.error_mapping import user_code
from trainwright.strategies.tensorflow.training.objective import call_model
from trainwright.strategies.tensorflow.training.op_trace import Call, Trace, traced
from trainwright.strategies.tensorflow.training.train_state import batch_norms, has_call

__all__ = ["export", "profile_model", "take_weights", "weight_bytes"]

_log = logging.getLogger(__name__)
REASON = 300  # letters of an error that is shown
Sample = Mapping[str, npt.NDArray[Any]]


def profile_model(
    model: keras.Model | Callable[[], Any],
    sample: Sample,
    inputs: tuple[str, ...],
    *,
    keywords: tuple[str, ...] = (),
    step: Any = None,
) -> ModelProfile:
    """Cost of each layer with weights or products of its own, in the order in which they run.

    Where the model cannot be made into a graph, operations are two for each weight of a layer at each position of its
    output, what backward keeps is not known, and `untraced` says why.

    Args:
        model: () -> keras.Model; or a model.
        sample: columns of one or a few rows, collated.
        inputs: columns given to the model.
        keywords: the model's argument that each of `inputs` is given as.
        step: (model, batch) -> losses, traced instead of the model's call where there are no inputs.

    Raises:
        UserCodeError: `model()` raised, or the model when it was called to learn its shapes.
        JobError: it returned no model.
    """
    built = model if isinstance(model, keras.Model) else _built(model)
    if not built.built and inputs and has_call(built):
        given = {name: keras.KerasTensor((None, *sample[name].shape[1:]), _kind(sample[name])) for name in inputs}
        with user_code("the model", "profile"):
            call_model(built, _given(given, inputs, keywords), training=False)
    inexact = ("batch_norm",) if batch_norms(built) else ()
    known = ModelProfile(
        framework="tensorflow", layers=(), inexact=inexact, keras_backend="tensorflow",
        loss_scale=built.dtype_policy.name == "mixed_float16",
    )  # fmt: skip
    rows = max((len(array) for array in sample.values()), default=1)
    if inputs and not has_call(built):
        return _untraced(known, built, "NotImplementedError: it has no call()")
    try:
        trace = _traced(built, sample, inputs, keywords, step)
        layers = folded(_counted(layer, trace.calls.get(layer, Call()), rows) for layer in _ran(built, trace))
        if inputs:
            layers = with_loss(layers, trace.calls[built].output / rows)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:REASON]}"
        _log.info("operations are estimated from weights: tracing raised %s", reason)
        return _untraced(known, built, reason)
    return replace(known, layers=layers, heads=trace.heads, tokens=trace.tokens)


def _untraced(known: ModelProfile, model: keras.Model, reason: str) -> ModelProfile:
    """Cost of each layer from its weights alone."""
    return replace(known, layers=tuple(_cost(layer) for layer in _leaves(model) if layer.weights), untraced=reason)


def _traced(model: keras.Model, sample: Sample, inputs: tuple[str, ...], keywords: tuple[str, ...], step: Any) -> Trace:
    """Forward and backward, as a training step has them."""
    names = inputs or tuple(sample)
    given = {name: tf.TensorSpec(sample[name].shape, tf.as_dtype(sample[name].dtype)) for name in names}

    def call(columns: Any) -> Any:
        if not inputs:
            return step(model, columns)
        return call_model(model, _given(columns, inputs, keywords), training=True)

    return traced(model, given, call)


def _given(columns: Mapping[str, Any], inputs: tuple[str, ...], keywords: tuple[str, ...]) -> Any:
    """The inputs as `call_model` takes them."""
    given = [columns[name] for name in inputs]
    return dict(zip(keywords, given, strict=True)) if keywords else given


def _kind(array: npt.NDArray[Any]) -> str:
    """Keras' name of an array's type; text is an array of objects."""
    return "string" if array.dtype.kind in "OUS" else str(array.dtype)


def _ran(model: keras.Model, trace: Trace) -> list[Any]:
    """The layers in the order in which they ran; those that did not come last."""
    return [*trace.calls, *(layer for layer in _leaves(model) if layer not in trace.calls)]


def _counted(layer: Any, call: Call, rows: int) -> LayerCost:
    own = _own(layer)
    return LayerCost(
        name=layer.path,
        parameters=sum(math.prod(weight.shape) for weight in own),
        parameter_bytes=sum(_bytes(weight) for weight in own),
        flops=call.flops / rows,
        output_numbers=call.output / rows,
        kept_numbers=call.kept / rows,
        traffic_numbers=call.traffic / rows,
        scores_numbers=call.scores / rows,
        matmuls=call.matmuls,
        launches=call.launches,
    )


def _built(build: Callable[[], Any]) -> keras.Model:
    with user_code("model()", "profile"):
        model = build()
    if not isinstance(model, keras.Model):
        raise JobError([f"model() returned {type(model).__name__}: return a keras.Model"])
    return model


def _leaves(layer: Any) -> Iterator[Any]:
    """Layers that hold weights of their own, each once."""
    inner = list(layer._layers)
    own = len(layer.weights) > sum(len(part.weights) for part in inner)
    if own or not inner:
        yield layer
    for part in inner:
        yield from _leaves(part)


def _own(layer: Any) -> list[Any]:
    """The weights of a layer itself that training may change, be it frozen or not."""
    return list(layer._trainable_variables)


def _cost(layer: Any) -> LayerCost:
    """From weights alone."""
    own = _own(layer)
    parameters, shape = sum(math.prod(weight.shape) for weight in own), _output(layer)
    positions = math.prod(shape[:-1]) if len(shape) > 1 else 1
    return LayerCost(
        name=layer.path,
        parameters=parameters,
        parameter_bytes=sum(map(_bytes, own)),
        flops=2.0 * parameters * positions,
        output_numbers=math.prod(shape),
    )


def _bytes(weight: Any) -> int:
    size: int = math.prod(weight.shape) * np.dtype(_plain(weight.dtype)).itemsize
    return size


def _output(layer: Any) -> tuple[int, ...]:
    """Shape of a sample's output; dimensions that are not known count as 1."""
    try:
        shape = layer.output.shape
    except (AttributeError, ValueError):
        return (1,)
    return tuple(size or 1 for size in shape[1:]) or (1,)


def _plain(dtype: str) -> str:
    return "float16" if dtype == "bfloat16" else dtype


def weight_bytes(model: keras.Model) -> int:
    """Size of the weights that a model has so far."""
    return sum(map(_bytes, model.weights))
