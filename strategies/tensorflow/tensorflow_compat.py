"""Symbols of TensorFlow and Keras without a public equivalent.

Every private symbol of theirs that the TensorFlow engines name is imported here and nowhere else, so that a new
version is checked in one place (`tests/unit/test_compat.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from keras.src import losses as _losses
from keras.src.backend.common import global_state
from keras.src.losses.losses import LossFunctionWrapper as LossFunctionWrapper
from keras.src.models.functional import Functional as Functional
from keras.src.random import seed_generator
from keras.src.saving import object_registration
from tensorflow.python.eager.context import Context

loss_functions = _losses.loss  # the module of `reduce_values` and `apply_mask`


def use_global_seeds(generator: Any) -> None:
    """Have Keras draw random numbers without `seed=` from a generator in this thread; from a new one if it is None."""
    global_state.set_global_attribute("global_seed_generator", generator)  # Keras 3.12 has no constant for the name


def global_seed_generator() -> Any:
    """Return this thread's generator of random numbers without `seed=`."""
    return seed_generator.global_seed_generator()


def before_first_use(call: Callable[[], None]) -> None:
    """Call a function before TensorFlow starts its devices, from now on."""
    start = Context.ensure_initialized

    def ensure_initialized(self: Context) -> None:
        if not self._initialized:
            call()
        start(self)

    Context.ensure_initialized = ensure_initialized


def in_use() -> bool:
    """Return whether TensorFlow has started its devices and threads in this process."""
    from tensorflow.python.eager.context import context_safe

    context = context_safe()
    return context is not None and bool(context._initialized)


def to_graph_code(function: Any) -> Any:
    """Return a function as AutoGraph rewrites it within the current trace."""
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx())


def keras_mask(value: Any) -> Any:
    """Return the Keras mask of a tensor, or None."""
    return getattr(value, "_keras_mask", None)


def compiled_parts(model: Any) -> list[Any]:
    """Return what a model holds of the metrics and the loss of `compile`: each has `built` and `build(y, outputs)`."""
    return [part for part in (model._compile_metrics, model._compile_loss) if part is not None]


@contextmanager
def serialized_names() -> Iterator[dict[str, Any]]:
    """Yield a dict of the functions and classes that Keras serializes by name within the block."""
    name_of, found = object_registration.get_registered_name, dict[str, Any]()

    def recorded(item: Any) -> Any:
        name = name_of(item)
        found[name] = item
        return name

    with replaced(object_registration, "get_registered_name", recorded):
        yield found


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute within the block. Keras does not track it."""
    own = vars(holder)
    before = own.get(name)
    object.__setattr__(holder, name, value)
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(holder, name)
        else:
            object.__setattr__(holder, name, before)
