"""Versions of what a run was made with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("trainwright", "ray", "torch", "tensorflow", "keras", "numpy", "pyarrow", "pandas")


def versions() -> dict[str, str]:
    """Versions by package, from metadata: nothing is imported."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
