"""What a Keras model costs, layer by layer, from shapes alone: nothing is computed.

Operations of a layer are two for each weight of its kernel, at each position of its output: exact for dense and
convolutional layers, an estimate for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from trainwright.core.errors import JobError
from trainwright.core.profile import LayerCost, ModelProfile
from trainwright.strategies.tensorflow.failures import user_code
from trainwright.strategies.tensorflow.files import export, take_weights
from trainwright.strategies.tensorflow.replica import batch_norms

__all__ = ["export", "profile_model", "take_weights"]

Sample = Mapping[str, npt.NDArray[Any]]


def profile_model(
    model: keras.Model | Callable[[], Any],
    sample: Sample,
    inputs: tuple[str, ...],
    *,
    keywords: tuple[str, ...] = (),
    step: Any = None,
) -> ModelProfile:
    """Cost of each layer with weights, in order.

    Args:
        model: () -> keras.Model; or a model.
        sample: columns of one or a few rows, collated.
        inputs: columns given to the model.
        keywords: the model's argument that each of `inputs` is given as.
        step: (model, batch) -> losses; such a model is not called.

    Raises:
        UserCodeError: `model()` raised, or the model when it was called to learn its shapes.
        JobError: it returned no model.
    """
    built = model if isinstance(model, keras.Model) else _built(model)
    if not built.built and inputs:
        given = {name: keras.KerasTensor((None, *sample[name].shape[1:]), str(sample[name].dtype)) for name in inputs}
        with user_code("the model", "profile"):
            if keywords:
                built(**dict(zip(keywords, given.values(), strict=True)))
            else:
                built(*given.values())
    layers = tuple(_cost(layer) for layer in _leaves(built) if layer.weights)
    inexact = ("batch_norm",) if batch_norms(built) else ()
    return ModelProfile(framework="tensorflow", layers=layers, inexact=inexact, keras_backend="tensorflow")


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


def _cost(layer: Any) -> LayerCost:
    inner = {id(weight) for part in layer._layers for weight in part.weights}
    own = [weight for weight in layer.weights if id(weight) not in inner]
    parameters = sum(math.prod(weight.shape) for weight in own)
    shape = _output(layer)
    positions = math.prod(shape[:-1]) if len(shape) > 1 else 1
    return LayerCost(
        name=layer.path,
        parameters=parameters,
        parameter_bytes=sum(math.prod(weight.shape) * np.dtype(_plain(weight.dtype)).itemsize for weight in own),
        flops=2.0 * parameters * positions,
        output_numbers=math.prod(shape),
        kept_numbers=math.prod(shape),
        traffic_numbers=2.0 * math.prod(shape),
    )


def _output(layer: Any) -> tuple[int, ...]:
    """Shape of a sample's output; dimensions that are not known count as 1."""
    try:
        shape = layer.output.shape
    except (AttributeError, ValueError):
        return (1,)
    return tuple(size or 1 for size in shape[1:]) or (1,)


def _plain(dtype: str) -> str:
    return "float16" if dtype == "bfloat16" else dtype
