"""What layers inside a model give, heard of while it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import keras
import tensorflow as tf

from trainwright.core.errors import JobError, nearest
from trainwright.strategies.distillation.layer_projection import item_of, layer_item


def layer_of(model: keras.Model, path: str) -> Any:
    """A layer by its name or its path. Raises JobError where there is none."""
    wanted, _ = layer_item(path)
    every = [layer for layer in model._flatten_layers() if layer is not model]
    for layer in every:
        if wanted in (layer.name, layer.path, (layer.path or "").partition("/")[2]):
            return layer
    raise JobError([f"the model has no layer {wanted!r}: {nearest(wanted, {layer.name for layer in every})}"])


@contextmanager
def heard(layers: Mapping[str, tuple[Any, str]]) -> Iterator[Callable[[], dict[str, Any]]]:
    """Within, layers are heard of; what this gives tells what the last call of each gave, by name.

    Args:
        layers: name -> the layer, and how a `Match` names it.

    Raises:
        JobError: from the function: a layer did not run, or what is meant of its output is no tensor.
    """
    said: dict[str, Any] = {}
    before = [(layer, vars(layer).get("call")) for layer, _ in layers.values()]

    def listened(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def told(*args: Any, **kwargs: Any) -> Any:
            said[name] = call(*args, **kwargs)
            return said[name]

        return told

    for name, (layer, _) in layers.items():
        object.__setattr__(layer, "call", listened(name, layer.call))
    try:
        yield lambda: {
            name: item_of(said, name, layer_item(path)[1], tf.is_tensor) for name, (_, path) in layers.items()
        }
    finally:
        for layer, own in reversed(before):
            if own is None:
                vars(layer).pop("call", None)
            else:
                object.__setattr__(layer, "call", own)
