"""Data sets: sources, their order and their delivery. Imported as `trainwright.datasets`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.datasets.dataset import Dataset, parquet, table
    from trainwright.datasets.formats.binary_formats import arrow, tfrecord, webdataset
    from trainwright.datasets.formats.image_folder import decode_image, images
    from trainwright.datasets.formats.ray_dataset import from_ray
    from trainwright.datasets.formats.text_formats import csv, json_lines, text
    from trainwright.datasets.formats.tf_data import from_tf
    from trainwright.datasets.formats.user_loaders import from_huggingface, from_torch
    from trainwright.datasets.ops.hash_split import split
    from trainwright.datasets.ops.weighted_mix import concat, mix

__all__ = [
    "Dataset", "arrow", "concat", "csv", "decode_image", "from_huggingface", "from_ray", "from_tf", "from_torch",
    "images", "json_lines", "mix", "parquet", "split", "table", "text", "tfrecord", "webdataset",
]  # fmt: skip

_EXPORTS = {
    "dataset": ("Dataset", "parquet", "table"),
    "formats.binary_formats": ("arrow", "tfrecord", "webdataset"),
    "formats.image_folder": ("decode_image", "images"),
    "formats.ray_dataset": ("from_ray",),
    "formats.text_formats": ("csv", "json_lines", "text"),
    "formats.tf_data": ("from_tf",),
    "formats.user_loaders": ("from_huggingface", "from_torch"),
    "ops.hash_split": ("split",),
    "ops.weighted_mix": ("concat", "mix"),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _EXPORTS.items() for name in names}


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
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if __name__ == "datasets":
    _give_way()
