"""Cost of a Keras model, layer by layer, from its graph: nothing is computed.

The numbers kept for backward are those that operations of the gradients read from the forward pass. Operations are
counted as the runtime executes them: the kernel of a product also adds its bias, and a reshape costs nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from itertools import pairwise
from typing import Any

import keras
import numpy.typing as npt
import tensorflow as tf

from trainwright.core.errors import JobError
from trainwright.core.model_profile import LayerCost, ModelProfile, append_loss, merge_plain_layers
from trainwright.strategies.tensorflow.tensorflow_compat import replaced
from trainwright.strategies.tensorflow.training.checkpoint_files import export, take_weights
from trainwright.strategies.tensorflow.training.objective import call_model, model_inputs
from trainwright.strategies.tensorflow.training.tensorflow_errors import TensorFlowUserCode
from trainwright.strategies.tensorflow.training.train_state import batch_norm_layers, has_call

__all__ = ["export", "profile_model", "take_weights", "weight_bytes"]

_log = logging.getLogger(__name__)
_MAX_REASON = 300  # letters of an error that is shown
_Sample = Mapping[str, npt.NDArray[Any]]


def profile_model(
    model: keras.Model | Callable[[], Any],
    sample: _Sample,
    inputs: tuple[str, ...],
    *,
    keywords: tuple[str, ...] = (),
    step: Any = None,
) -> ModelProfile:
    """Return the cost of each layer with weights or products of its own, in the order in which they run.

    If the model cannot be traced, a layer counts two operations for each weight at each position of its output, the
    numbers kept for backward are unknown, and `untraced` gives the reason.

    Args:
        model: () -> keras.Model; or a model.
        sample: columns of one or a few rows, after collation.
        inputs: columns given to the model.
        keywords: the model's argument for each of `inputs`.
        step: (model, batch) -> losses; traced instead of the model's call if there are no inputs.

    Raises:
        UserCodeError: `model()` raised, or the call of the model that finds its shapes.
        JobError: `model()` returned no model.
    """
    built = model if isinstance(model, keras.Model) else _built(model)
    if not built.built and inputs and has_call(built):
        given = {name: keras.KerasTensor((None, *sample[name].shape[1:]), _kind(sample[name])) for name in inputs}
        with TensorFlowUserCode("the model", "profile"):
            call_model(built, model_inputs(given, inputs, keywords), training=False)
    inexact = ("batch_norm",) if batch_norm_layers(built) else ()
    known = ModelProfile(
        framework="tensorflow", layers=(), inexact=inexact, keras_backend="tensorflow",
        loss_scale=built.dtype_policy.name == "mixed_float16",
    )  # fmt: skip
    rows = max((len(array) for array in sample.values()), default=1)
    if inputs and not has_call(built):
        return _untraced(known, built, "NotImplementedError: it has no call()")
    try:
        calls = _trace_step(built, sample, inputs, keywords, step)
        ran = [*calls, *(layer for layer in _leaves(built) if layer not in calls)]  # those that did not run are last
        layers = merge_plain_layers(_cost(layer, calls.get(layer, _LayerCalls()), rows) for layer in ran)
        if inputs:
            layers = append_loss(layers, calls[built].output / rows)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_REASON]}"
        _log.info("operations are estimated from weights: tracing raised %s", reason)
        return _untraced(known, built, reason)
    return replace(known, layers=layers)


def _untraced(known: ModelProfile, model: keras.Model, reason: str) -> ModelProfile:
    """Return the cost of each layer from its weights alone."""
    layers = []
    for layer in _leaves(model):
        shape = _output(layer)
        positions = math.prod(shape[:-1]) if len(shape) > 1 else 1
        flops = 2.0 * sum(math.prod(weight.shape) for weight in layer._trainable_variables) * positions
        if layer.weights:
            call = _LayerCalls(flops=flops, output=math.prod(shape), matmuls=1, launches=1)
            layers.append(_cost(layer, call, 1))
    return replace(known, layers=tuple(layers), untraced=reason)


def _trace_step(
    model: keras.Model, sample: _Sample, inputs: tuple[str, ...], keywords: tuple[str, ...], step: Any
) -> dict[Any, _LayerCalls]:
    """Trace forward and backward pass of a training step; return the cost of each layer's calls in the forward pass.

    Raises any exception of a model that cannot be traced.
    """
    recorder, names = _Recorder(), inputs or tuple(sample)
    given = {name: tf.TensorSpec(sample[name].shape, tf.as_dtype(sample[name].dtype)) for name in names}

    def traced(columns: Any) -> Any:
        with recorder.watching(model):
            if inputs:
                outputs = call_model(model, model_inputs(columns, inputs, keywords), training=True)
            else:
                outputs = step(model, columns)
        recorder.end = len(tf.compat.v1.get_default_graph().get_operations())
        wanted = [each for each in tf.nest.flatten(outputs) if each.dtype.is_floating]
        return tf.gradients(wanted, [weight.value for weight in model.trainable_weights])

    return recorder.found(tf.function(traced, autograph=False).get_concrete_function(given).graph)


def _kind(array: npt.NDArray[Any]) -> str:
    """Return Keras' name of an array's type; text is an array of objects."""
    return "string" if array.dtype.kind in "OUS" else str(array.dtype)


def _cost(layer: Any, call: _LayerCalls, rows: int) -> LayerCost:
    """Return the cost of a row, given that of some rows; weights count also if they are frozen."""
    own = layer._trainable_variables
    return LayerCost(
        name=layer.path,
        parameters=sum(math.prod(weight.shape) for weight in own),
        parameter_bytes=sum(map(_bytes, own)),
        flops=call.flops / rows,
        output_numbers=call.output / rows,
        kept_numbers=call.kept / rows,
        traffic_numbers=call.traffic / rows,
        matmuls=call.matmuls,
        launches=call.launches,
    )


def _built(build: Callable[[], Any]) -> keras.Model:
    with TensorFlowUserCode("model()", "profile"):
        model = build()
    if not isinstance(model, keras.Model):
        raise JobError([f"model() returned {type(model).__name__}: return a keras.Model"])
    return model


def _leaves(layer: Any) -> Iterator[Any]:
    """Return the layers with weights of their own, each once."""
    inner = list(layer._layers)
    own = len(layer.weights) > sum(len(part.weights) for part in inner)
    if own or not inner:
        yield layer
    for part in inner:
        yield from _leaves(part)


def _bytes(weight: Any) -> int:
    size: int = math.prod(weight.shape) * tf.as_dtype(weight.dtype).size
    return size


def _output(layer: Any) -> tuple[int, ...]:
    """Return the shape of a sample's output; unknown dimensions count as 1."""
    try:
        shape = layer.output.shape
    except (AttributeError, ValueError):
        return (1,)
    return tuple(size or 1 for size in shape[1:]) or (1,)


def weight_bytes(model: keras.Model) -> int:
    """Return the size of the weights that a model has so far."""
    return sum(map(_bytes, model.weights))


# --- The operations of one forward pass of a Keras model, from its graph ----------------------------------------------


_VIEWS = {"Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient"}
_FREE = _VIEWS | {"Const", "Placeholder", "ReadVariableOp", "Shape", "ShapeN", "NoOp", "VariableShape"}
_GATHERS = {"ResourceGather", "GatherV2"}  # read as much as they write
_SHAPES = {"Shape", "ShapeN", "Rank", "Size"}  # read no value
_BIASES = {"Add", "AddV2", "BiasAdd"}
_SMALL = 16  # integers with at most so many elements are sizes, which the host computes


@dataclass(kw_only=True)
class _LayerCalls:
    """Cost of the calls of one layer, without the layers inside it."""

    flops: float = 0.0
    matmuls: int = 0
    launches: int = 0
    traffic: float = 0.0
    kept: float = 0.0
    output: float = 0.0


class _Recorder:
    """Records which layer makes which operations: the innermost layer whose `call` runs."""

    def __init__(self) -> None:
        self.calls: dict[Any, _LayerCalls] = {}
        self.end = 0
        self._owners: list[tuple[int, Any]] = []  # first operation, and the layer that makes it and the next ones
        self._open: list[Any] = []

    @contextmanager
    def watching(self, model: keras.Model) -> Iterator[None]:
        """Record calls of the model's layers within the block."""
        with ExitStack() as stack:
            for layer in dict.fromkeys(_all(model)):
                stack.enter_context(replaced(layer, "call", self._recorded(layer, layer.call)))
            yield

    def _recorded(self, layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.calls.setdefault(layer, _LayerCalls())
            self._open.append(layer)
            self._mark()
            try:
                outputs = call(*args, **kwargs)
            finally:
                self._open.pop()
                self._mark()
            self.calls[layer].output = sum(_numbers(each) for each in tf.nest.flatten(outputs))
            return outputs

        return recorded

    def _mark(self) -> None:
        made = len(tf.compat.v1.get_default_graph().get_operations())
        self._owners.append((made, self._open[-1] if self._open else None))

    def found(self, graph: tf.Graph) -> dict[Any, _LayerCalls]:
        """Return the cost of the recorded layers from the graph's operations, in the order in which they first ran."""
        every = graph.get_operations()
        forward, owner = every[: self.end], {}
        bounds = [*self._owners, (self.end, None)]
        for (begin, layer), (end, _) in pairwise(bounds):
            owner.update(dict.fromkeys(forward[begin:end], layer))
        for operation in forward:
            if owner.get(operation) is not None:
                _count(operation, self.calls[owner[operation]])
        for tensor in _kept(forward, every[self.end :]):
            layer = owner.get(tensor.op)
            if layer is not None:  # an element of a mask counts as half a number
                self.calls[layer].kept += _numbers(tensor) / (2 if tensor.dtype == tf.bool else 1)
        return self.calls


def _all(layer: Any) -> Iterator[Any]:
    """Yield a layer and all layers inside it."""
    yield layer
    for part in layer._layers:
        yield from _all(part)


def _count(operation: Any, call: _LayerCalls) -> None:
    """Add one operation to the cost of its layer."""
    flops = _flops(operation)
    if flops is not None:
        call.flops += flops
        call.matmuls += 1
        call.launches += 1
    elif operation.type not in _FREE and operation.outputs and not _of_host(operation) and not _is_bias(operation):
        written = sum(map(_numbers, operation.outputs))
        read = written if operation.type in _GATHERS else sum(map(_numbers, operation.inputs))
        call.launches += 1
        call.traffic += written + read


def _flops(operation: Any) -> float | None:
    """Return the floating-point operations of a product; None for other operations."""
    kind = operation.type
    sizes: list[tuple[int, ...]] = [tuple(each.shape) if each.shape.rank else () for each in operation.inputs]
    if kind in ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        turned = operation.get_attr("transpose_a" if kind == "MatMul" else "adj_x")
        return 2.0 * _numbers(operation.outputs[0]) * sizes[0][-2 if turned else -1]
    if kind in ("Conv2D", "Conv3D", "Conv"):
        return 2.0 * _numbers(operation.outputs[0]) * math.prod(sizes[1][:-1])
    if kind == "DepthwiseConv2dNative":
        return 2.0 * _numbers(operation.outputs[0]) * math.prod(sizes[1][:-2])
    if kind in ("Conv2DBackpropInput", "Conv3DBackpropInputV2"):  # forward of a transposed convolution
        return 2.0 * math.prod(sizes[2]) * math.prod(sizes[1][:-1])
    if kind == "Einsum":
        left = operation.get_attr("equation").decode().partition("->")[0].split(",")
        named = {name: size for part, shape in zip(left, sizes, strict=True) for name, size in _named(part, shape)}
        return 2.0 * math.prod(named.values()) if len(left) > 1 else None
    return None


def _named(part: str, shape: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """Yield index names of an einsum operand with their sizes. Dimensions of an ellipsis count from the end."""
    front, dots, back = part.partition("...")
    yield from zip(front, shape, strict=False)
    if dots:
        hidden = shape[len(front) : len(shape) - len(back)]
        yield from ((f"...{len(hidden) - place}", size) for place, size in enumerate(hidden))
        yield from zip(back, shape[len(shape) - len(back) :], strict=True)


def _of_host(operation: Any) -> bool:
    """Whether an operation returns only a few integers, such as a shape, which the host computes."""
    return all(each.dtype.is_integer and _numbers(each) <= _SMALL for each in operation.outputs)


def _is_bias(operation: Any) -> bool:
    """Whether an operation adds a variable to a product, which the product's kernel does."""
    kinds = [_root(each).op for each in operation.inputs]
    products = any(_flops(each) is not None for each in kinds)
    return operation.type in _BIASES and products and any(each.type == "ReadVariableOp" for each in kinds)


def _kept(forward: list[Any], backward: list[Any]) -> list[Any]:
    """Return the tensors of the forward pass that backward reads, each once, without parameters, inputs and views."""
    mine, found = set(forward), {}
    for operation in backward:
        if operation.type not in _SHAPES:
            for tensor in operation.inputs:
                root = _root(tensor)
                if root.op in mine and root.op.type not in _FREE and not _of_host(root.op):
                    found[root.ref()] = root
    return list(found.values())


def _root(tensor: Any) -> Any:
    """Return the tensor whose numbers a tensor shows: the first one before all views."""
    while tensor.op.type in _VIEWS:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def _numbers(tensor: Any) -> int:
    """Return the number of elements. An unknown dimension counts as 1, and other values than tensors as 0."""
    if not tf.is_tensor(tensor):
        return 0
    return math.prod(size or 1 for size in tensor.shape) if tensor.shape.rank is not None else 1
