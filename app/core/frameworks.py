"""How torch, TensorFlow and other frameworks are loaded, and what to do where they are missing.

`isolate_llvm()` and `silence_widget_notes()` run at `import trainwright`. After the first, torch (with triton) and
TensorFlow share a process in any order of imports. `load_module()` imports a module that needs a framework, and says
which extra to install if it is missing.
`keep_freed_memory()` is for processes that take steps, `return_freed_memory()` for those that build a divided model.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from trainwright.core.errors import MissingFramework, TrainwrightError

EXTRAS = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow"}  # of trainwright, by import name

_EXPORTS = "tensorflow.python.pywrap_dlopen_global_flags"
_TRITON = "triton._C.libtriton"
# of malloc.h in glibc
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # that glibc takes on 64 bits
_KEPT_BYTES = 1 << 30
_LEAST_RETURNED_BYTES = 1 << 20


def load_module(module: str) -> Any:
    """Import a module of trainwright that needs a framework.

    Raises:
        MissingFramework: the framework is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise missing_framework(error) or error from error


def missing_framework(error: BaseException, where: str = "") -> MissingFramework | None:
    """Return the error that says what to install, if an exception means that a framework is not installed."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name not in EXTRAS or importlib.util.find_spec(name) is not None:
        return None
    return MissingFramework(f"{name} is not installed: pip install 'trainwright[{EXTRAS[name]}]'", where=where)


def keep_freed_memory() -> None:
    """Have glibc's malloc keep what is freed, up to 1 GiB. Does nothing where the C library is another one.

    By default malloc gives the activations of a step back to the system at its end, and takes them again in the next:
    2,000 page faults, a tenth of the time of a step of a small network on CPUs (measured).
    """
    _set_malloc_option(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    _set_malloc_option(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    _set_malloc_option(_M_TOP_PAD, 2 * _LARGEST_MMAP_THRESHOLD)  # a thread's memory is in pieces of so many bytes


@contextmanager
def return_freed_memory() -> Iterator[None]:
    """Have glibc's malloc give freed blocks of 1 MiB or more to the system at once; at the end, `keep_freed_memory()`.

    A rank that keeps a part of each layer would otherwise leave gaps between these parts, as large as all other parts.
    """
    _set_malloc_option(_M_MMAP_THRESHOLD, _LEAST_RETURNED_BYTES)
    try:
        yield
    finally:
        keep_freed_memory()


def _set_malloc_option(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        import ctypes  # not in every process that imports trainwright

        set_option = getattr(ctypes.CDLL(None), "mallopt", None)
        if set_option is not None:
            set_option(option, value)


def silence_widget_notes() -> None:
    """Silence the warnings of tqdm and Ray about missing ipywidgets, as Ray is imported. No run needs ipywidgets."""
    warnings.filterwarnings("ignore", message="IProgress not found")
    logging.getLogger("ray.widgets.util").setLevel(logging.ERROR)


def isolate_llvm() -> None:
    """Keep the LLVM of TensorFlow and the LLVM of triton apart, whichever is imported first. Imports neither.

    The wheels of TensorFlow 2.20 and 2.21 load their libraries with RTLD_GLOBAL, by mistake, and so export their LLVM
    to every library that is loaded later (tensorflow/tensorflow#124205, cured upstream after 2.21). The CUDA builds of
    torch bring triton, whose library exports another LLVM; `torch._dynamo` imports it. Loaded after TensorFlow, it
    binds to TensorFlow's LLVM and crashes the process in its initializers.

    TensorFlow is loaded as upstream loads it now, without RTLD_GLOBAL. Where the process imported TensorFlow before
    trainwright, triton's library is loaded with RTLD_DEEPBIND: it prefers its own symbols.
    """
    if not any(isinstance(finder, _Separation) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Separation())


class _Separation(MetaPathFinder):
    """Import finder that hides the module by which TensorFlow exports its symbols, and finds triton's library."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _EXPORTS:
            raise ModuleNotFoundError(f"{fullname} is hidden by trainwright", name=fullname)
        if fullname != _TRITON or _EXPORTS not in sys.modules:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, ExtensionFileLoader):
            spec.loader = _OwnSymbolsFirst(fullname, spec.loader.path)
        return spec


class _OwnSymbolsFirst(ExtensionFileLoader):
    """Loader of a library that prefers its own symbols to the loaded ones."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Raises TrainwrightError where a preloaded library, such as another malloc, would be bypassed."""
        if os.environ.get("LD_PRELOAD"):
            raise TrainwrightError(
                "triton cannot be loaded after TensorFlow while LD_PRELOAD is set",
                where="this process imported tensorflow before trainwright",
                remedy="import trainwright first, or unset LD_PRELOAD",
            )
        flags = sys.getdlopenflags()
        sys.setdlopenflags(flags | os.RTLD_DEEPBIND)
        try:
            return super().create_module(spec)
        finally:
            sys.setdlopenflags(flags)


# --- Versions of what a run was made with -----------------------------------------------------------------------------


_REPORTED_PACKAGES = ("trainwright", "ray", "torch", "tensorflow", "keras", "numpy", "pyarrow", "pandas")


def package_versions() -> dict[str, str]:
    """Return versions by package from metadata, without importing anything."""
    versions = {"python": platform.python_version()}
    for package in _REPORTED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions
