"""Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017) as parquet: 60,000 and 10,000 images of clothing in 10 classes.

Run as `python -m trainwright.datasets.fashion_mnist [folder]`.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import DataError, TrainwrightError
from trainwright.datasets.debian import reason, unpacked

ADDRESS = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
PACKAGE = "dataset-fashion-mnist"
FOLDER = "data/fashion-mnist"
# Of the files without gzip: a packer may write another header.
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
_SPLITS = {"train": ("train", 1250), "test": ("t10k", 1250)}  # name: prefix of its files, rows of a row group
_CONNECT_S = 10.0

Fetch = Callable[[Path], None]
Say = Callable[[str], None]


class Splits(NamedTuple):
    """Folders of parquet files with columns `image` (28, 28) uint8, `label` int64 and `id` int64."""

    train: str
    test: str


def fashion_mnist(folder: str | os.PathLike[str] = FOLDER, say: Say = lambda line: None) -> Splits:
    """Fetch, verify and write Fashion-MNIST as parquet, once.

    Args:
        folder: to write `train` and `test` into. Files in its `raw` folder are used before anything is fetched.
        say: called with one line for each step.

    Raises:
        DataError: no source answered, or all gave altered files; says what to do by hand.
    """
    home = Path(folder)
    splits = Splits(train=str(home / "train"), test=str(home / "test"))
    if all(_written(Path(split)) for split in splits):
        return splits
    files = _fetch(home / "raw", say)
    for name, split in zip(_SPLITS, splits, strict=True):
        if not _written(Path(split)):
            prefix, group_rows = _SPLITS[name]
            images = _images(files[f"{prefix}-images-idx3-ubyte"])
            labels = _labels(files[f"{prefix}-labels-idx1-ubyte"])
            _write(Path(split), images, labels, group_rows)
            say(f"wrote {len(labels):,} images to {split}")
    return splits


def _written(split: Path) -> bool:
    """Folders appear whole, by a rename."""
    return (split / "part-0.parquet").is_file()


def _fetch(raw: Path, say: Say) -> dict[str, bytes]:
    """The four files from the first source that has them unaltered."""
    sources: dict[str, Fetch] = {
        f"files in {raw}": lambda target: _copy(raw, target),
        f"the Debian package {PACKAGE}": from_debian,
        ADDRESS: from_address,
    }
    problems = []
    for name, fetch in sources.items():
        with tempfile.TemporaryDirectory(prefix="fashion-mnist-") as folder:
            say(f"looking for {name}")
            try:
                fetch(Path(folder))
                files = {file: _verified(Path(folder) / f"{file}.gz") for file in SHA256}
            except (OSError, EOFError, subprocess.SubprocessError, TrainwrightError) as error:
                problems.append(f"{name}: {reason(error)}")
                say(f"  no: {reason(error)}")
                continue
            say(f"verified {len(files)} files by SHA-256, from {name}")
            return files
    raise DataError(
        "Fashion-MNIST could not be fetched",
        where="; ".join(problems),
        remedy=f"download {', '.join(f'{file}.gz' for file in SHA256)} from {ADDRESS} and put them in {raw}",
    )


def _verified(path: Path) -> bytes:
    """The unpacked file; raises DataError where it is not the one that was published."""
    content = gzip.decompress(path.read_bytes())
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[path.stem]:
        raise DataError(
            f"{path.name} is altered: its SHA-256 is {found} and not {SHA256[path.stem]}", remedy="fetch it anew"
        )
    return content


def _copy(raw: Path, target: Path) -> None:
    for file in SHA256:
        shutil.copy(raw / f"{file}.gz", target)


def from_debian(target: Path) -> None:
    """Copy the files from the Debian package into a folder."""
    _copy(unpacked(PACKAGE, target) / "usr" / "share" / "datasets" / "fashion-mnist", target)


def from_address(target: Path) -> None:
    """Download the files into a folder."""
    for file in SHA256:
        with urllib.request.urlopen(f"{ADDRESS}{file}.gz", timeout=_CONNECT_S) as answer:
            (target / f"{file}.gz").write_bytes(answer.read())


def _images(content: bytes) -> npt.NDArray[np.uint8]:
    """An IDX file of images: 16 bytes of header, then rows of 28 x 28."""
    return np.frombuffer(content, np.uint8, offset=16).reshape(-1, 28, 28)


def _labels(content: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(content, np.uint8, offset=8).astype(np.int64)


def _write(split: Path, images: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64], group_rows: int) -> None:
    """One parquet file in a folder that appears whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(images)
    table = pa.table({"image": tensors, "label": labels, "id": np.arange(len(labels), dtype=np.int64)})
    split.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=split.parent) as folder:
        whole = Path(folder) / split.name
        whole.mkdir()
        pq.write_table(table, whole / "part-0.parquet", row_group_size=group_rows, compression="zstd")
        try:
            whole.rename(split)
        except OSError:
            if not _written(split):  # another process was quicker, unless something else lies there
                raise


class _Callable(ModuleType):
    """Lets `trainwright.datasets.fashion_mnist(...)` work whether or not the module of that name was imported."""

    def __call__(self, *arguments: Any, **options: Any) -> Splits:
        return fashion_mnist(*arguments, **options)


sys.modules[__name__].__class__ = _Callable


def main(arguments: list[str]) -> int:
    """Fetch into the folder named, or the usual one; prints one line for each step. Returns the exit code."""
    try:
        splits = fashion_mnist(arguments[0] if arguments else FOLDER, say=lambda line: print(line, flush=True))
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"ready: {splits.train} and {splits.test}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
