"""Capture Keras' settings of a process and apply them in another: policy, float type, epsilon, custom objects.

This module does not import TensorFlow: Keras may run on torch.
"""

from __future__ import annotations

import copyreg
import logging
import sys
from typing import Any

import cloudpickle
import keras

from trainwright.core.loss_api import is_keras_class, metric_config
from trainwright.core.pickling import is_user_module

_OWN = {"floatx": "float32", "epsilon": 1e-7, "image_data_format": "channels_last", "policy": "float32"}
_FOREIGN = ("builtins", "keras", "tensorflow")
_log = logging.getLogger(__name__)


def captured() -> dict[str, Any]:
    """Return the settings of this process, and the user's registered functions and classes."""
    policy = keras.config.dtype_policy()
    found = {
        "floatx": keras.config.floatx(),
        "epsilon": keras.config.epsilon(),
        "image_data_format": keras.config.image_data_format(),
        "policy": policy.name,
    }
    settings: dict[str, Any] = {}
    if found != _OWN:
        settings = {**found, "policy": keras.saving.serialize_keras_object(policy)}
    items = keras.saving.get_custom_objects().items()
    registered = {name: item for name, item in items if _is_users(item) and _travels(name, item)}
    return {**settings, "registered": registered} if registered else settings


def apply(settings: dict[str, Any]) -> None:
    """Set the settings of another process in this one."""
    if "policy" in settings:
        keras.config.set_floatx(settings["floatx"])
        keras.config.set_epsilon(settings["epsilon"])
        keras.config.set_image_data_format(settings["image_data_format"])
        keras.config.set_dtype_policy(keras.saving.deserialize_keras_object(settings["policy"]))
    for name, item in settings.get("registered", {}).items():
        _register(name, item)


def reduced(item: Any) -> tuple[Any, ...] | None:
    """Return how to pickle a Keras object, with the objects that its configuration names; None for others.

    Keras pickles layers, models, metrics and the like by their configuration, in which functions and classes are names.
    A user's loss is pickled by its attributes: its configuration may leave out arguments of its constructor.

    Raises:
        JobError: the configuration of a user's metric leaves out arguments of its constructor.
    """
    if getattr(type(item), "__reduce__", None) is not keras.layers.Layer.__reduce__:
        return None
    if isinstance(item, keras.losses.Loss) and not is_keras_class(type(item)):
        return copyreg.__newobj__, (type(item),), item.__getstate__()  # type: ignore[attr-defined]  # typeshed has none
    if "tensorflow" not in sys.modules:
        return None
    from trainwright.strategies.tensorflow.tensorflow_compat import serialized_names

    with serialized_names() as names:
        restore, arguments = item.__reduce__()
    own = {name: part for name, part in names.items() if part.__module__.partition(".")[0] not in _FOREIGN}
    if isinstance(item, keras.metrics.Metric):
        with keras.saving.custom_object_scope(own):
            metric_config(item)
    return _restored, (own, restore, arguments)


def _restored(own: dict[str, Any], restore: Any, arguments: tuple[Any, ...]) -> Any:
    with keras.saving.custom_object_scope(own):
        return restore(*arguments)


def _register(name: str, item: Any) -> None:
    package, separator, own = name.partition(">")
    if separator:
        keras.saving.register_keras_serializable(package, own)(item)
    else:
        keras.saving.get_custom_objects()[name] = item


def _is_users(item: Any) -> bool:
    return item.__module__ == "__main__" or is_user_module(sys.modules.get(item.__module__))


def _travels(name: str, item: Any) -> bool:
    """Whether a registered object can be pickled."""
    try:
        cloudpickle.dumps(item)
    except Exception as error:
        _log.info("the custom object %s stays here: pickling it raised %s: %s", name, type(error).__name__, error)
        return False
    return True
