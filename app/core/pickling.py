"""Pickle jobs and functions for other processes, which cannot import a job file, a script or a notebook.

What such a module sets in a framework for the whole process, such as Keras' policy, travels with them.
"""

from __future__ import annotations

import contextlib
import io
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import cloudpickle

from trainwright.core.frameworks import load_module

# Of each framework by its import name, the module that knows its settings for a whole process.
_SETTINGS = {
    "keras": "trainwright.strategies.tensorflow.training.keras_settings",
    "torch": "trainwright.strategies.torch.torch_compat",
}

_INSTALLED = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
)
# Of other environments that PYTHONPATH leads to, as on clusters with environment modules.
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_FOREIGN = tuple({f"{folder}{os.sep}" for path in _INSTALLED for folder in (path, os.path.realpath(path))})


def dumps(value: Any) -> bytes:
    """Pickle a value with the user's own modules by value, and the settings of the frameworks in this process."""
    with _by_value(), io.BytesIO() as stream:
        captured = {name: load_module(module).captured() for name, module in _SETTINGS.items() if name in sys.modules}
        for each in ({name: settings for name, settings in captured.items() if settings}, value):
            _Pickler(stream).dump(each)
        return stream.getvalue()


def loads(data: bytes) -> Any:
    """Unpickle a value, after applying the frameworks' settings in this process."""
    stream = io.BytesIO(data)
    for name, settings in cloudpickle.load(stream).items():
        load_module(_SETTINGS[name]).apply(settings)
    return cloudpickle.load(stream)


@contextlib.contextmanager
def _by_value() -> Iterator[None]:
    """Let cloudpickle pickle the user's own modules by value."""
    users = [module for module in list(sys.modules.values()) if is_user_module(module)]
    registered = {module.__name__: module for module in users}.values()  # one may be known by several names
    for module in registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """A pickler for Keras objects that hold other objects by name, and for references to objects in Ray's store."""

    def reducer_override(self, obj: Any) -> Any:
        """Implement the hook of `pickle`."""
        ray = sys.modules.get("ray")
        if ray is not None and isinstance(obj, ray.ObjectRef):  # only Ray's own pickler adds who owns the object
            return cloudpickle.loads, (ray.cloudpickle.dumps(obj),)
        keras = sys.modules.get(_SETTINGS["keras"])
        reduced = keras.reduced(obj) if keras is not None else None
        return super().reducer_override(obj) if reduced is None else reduced


def is_user_module(module: Any) -> bool:
    """Return whether a module is neither installed nor trainwright's: a worker could not import it."""
    file = getattr(module, "__file__", None)
    if not isinstance(module, ModuleType) or not file or module.__name__ == "__main__":
        return False
    if module.__name__.split(".")[0] in ("trainwright", "datasets", "__mp_main__"):
        return False
    return is_user_file(file)


def is_user_file(file: str) -> bool:
    """Return whether a source file is outside the folders of installed packages."""
    path = os.path.abspath(file)
    return not path.startswith(_FOREIGN) and not any(packages in path for packages in _PACKAGES)
