"""Data sets: sources, their order and their delivery. Imported as `trainwright.datasets`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.datasets.fashion_mnist import fashion_mnist
    from trainwright.datasets.sources import Dataset, parquet, table

__all__ = ["Dataset", "fashion_mnist", "parquet", "table"]

_HOMES = {"Dataset": "sources", "parquet": "sources", "table": "sources", "fashion_mnist": "fashion_mnist"}


def _give_way() -> None:
    """Import Hugging Face's `datasets` in our place.

    With the checkout on sys.path (`python -m`, notebooks, Ray workers) `import datasets` finds this folder first.
    """
    checkout, path = Path(__file__).resolve().parent.parent, sys.path.copy()
    sys.path[:] = [entry for entry in path if Path(entry or ".").resolve() != checkout]
    del sys.modules["datasets"]
    try:
        importlib.import_module("datasets")
    finally:
        sys.path[:] = path


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if __name__ == "datasets":
    _give_way()
