"""Data sets: sources, their order and their delivery. Imported as `trainwright.datasets`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.datasets.archives import webdataset
    from trainwright.datasets.arrow_files import arrow
    from trainwright.datasets.corpora import king_james
    from trainwright.datasets.csv_files import csv
    from trainwright.datasets.fashion_mnist import fashion_mnist
    from trainwright.datasets.image_files import decode_image, images
    from trainwright.datasets.jsonl_files import json_lines
    from trainwright.datasets.mixtures import mix
    from trainwright.datasets.objects import from_huggingface, from_torch
    from trainwright.datasets.ray_source import from_ray
    from trainwright.datasets.records import tfrecord
    from trainwright.datasets.sources import Dataset, parquet, table
    from trainwright.datasets.splits import split
    from trainwright.datasets.text_files import text
    from trainwright.datasets.tf_pipelines import from_tf

__all__ = [
    "Dataset",
    "arrow",
    "csv",
    "decode_image",
    "fashion_mnist",
    "from_huggingface",
    "from_ray",
    "from_tf",
    "from_torch",
    "images",
    "json_lines",
    "king_james",
    "mix",
    "parquet",
    "split",
    "table",
    "text",
    "tfrecord",
    "webdataset",
]

_HOMES = {
    "arrow": "arrow_files",
    "csv": "csv_files",
    "Dataset": "sources",
    "decode_image": "image_files",
    "fashion_mnist": "fashion_mnist",
    "from_huggingface": "objects",
    "from_ray": "ray_source",
    "from_tf": "tf_pipelines",
    "from_torch": "objects",
    "images": "image_files",
    "json_lines": "jsonl_files",
    "king_james": "corpora",
    "mix": "mixtures",
    "parquet": "sources",
    "split": "splits",
    "table": "sources",
    "text": "text_files",
    "tfrecord": "records",
    "webdataset": "archives",
}


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
