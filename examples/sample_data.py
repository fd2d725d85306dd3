"""Download the data sets of the examples: Fashion-MNIST as parquet files and the King James text.

    python examples/sample_data.py [FOLDER]    # Fashion-MNIST, into FOLDER or data/fashion-mnist

Each source is tried in turn, and its content is verified by SHA-256: files already on disk, a Debian package (unpacked
without root and without an installation), the publisher's address.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import os
import struct
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import DataError, TrainwrightError

FASHION_MNIST_FOLDER, KING_JAMES_FOLDER = "data/fashion-mnist", "data/king-james"
ADDRESS = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
FASHION_MNIST_PACKAGE, KING_JAMES_PACKAGE = "dataset-fashion-mnist", "bible-kjv-text"
# Of the files after gunzip: another gzip may write another header.
FASHION_MNIST_SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
KING_JAMES_FILE = "king-james.txt"
KING_JAMES_SHA256 = "cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d"
TRAINING_SHARE = 0.95  # of the characters
# bible.data holds windows of 64 KiB. Each is the output of compress(1) without these first bytes.
COMPRESS_MAGIC = b"\x1f\x9d\x90"  # block mode, codes of up to 16 bits
WINDOW_OFFSETS, FIRST_WINDOW = 0x5C, 0x170  # byte offsets of the table of windows and of the first window
_SPLITS, _GROUP_ROWS = {"train": "train", "test": "t10k"}, 1250  # prefix of the files of each split
_CONNECT_S, _COMMAND_S = 10.0, 180.0

Files = dict[str, bytes]
Say = Callable[[str], None]


class Splits(NamedTuple):
    """Folders of parquet files with columns `image` (28, 28) uint8, `label` int64 and `id` int64."""

    train: str
    test: str


class Text(NamedTuple):
    """Files of UTF-8 text: the first 95%, up to the end of a verse, and the rest."""

    train: str
    test: str


def fashion_mnist(folder: str | os.PathLike[str] = FASHION_MNIST_FOLDER, say: Say = lambda line: None) -> Splits:
    """Download Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017) and write it as parquet, unless it is there already.

    Args:
        folder: gets the folders `train` (60,000 images) and `test` (10,000). Files in its folder `raw` are used first.
        say: called with one line for each step.

    Raises:
        DataError: no source has the original files; the message says what to do by hand.
    """
    home = Path(folder)
    splits = Splits(train=str(home / "train"), test=str(home / "test"))
    if all(_is_written(Path(split)) for split in splits):
        return splits
    raw = home / "raw"
    sources = {
        f"files in {raw}": lambda: _read_fashion_mnist(raw),
        f"the Debian package {FASHION_MNIST_PACKAGE}": fashion_mnist_from_debian,
        ADDRESS: fashion_mnist_from_address,
    }
    names = ", ".join(f"{name}.gz" for name in FASHION_MNIST_SHA256)
    remedy = f"download {names} from {ADDRESS} and put them in {raw}"
    files = _fetch("Fashion-MNIST", sources, FASHION_MNIST_SHA256, remedy, say)
    for split, prefix in zip(splits, _SPLITS.values(), strict=True):
        if not _is_written(Path(split)):
            # IDX files: a header of 16 or 8 bytes, then the values.
            images = np.frombuffer(files[f"{prefix}-images-idx3-ubyte"], np.uint8, offset=16).reshape(-1, 28, 28)
            labels = np.frombuffer(files[f"{prefix}-labels-idx1-ubyte"], np.uint8, offset=8).astype(np.int64)
            _write_split(Path(split), images, labels)
            say(f"wrote {len(labels):,} images to {split}")
    return splits


def king_james(folder: str | os.PathLike[str] = KING_JAMES_FOLDER, say: Say = lambda line: None) -> Text:
    """Download the King James text (1611, as printed since 1769) and split it, unless it is there already.

    It has 4.4 million characters, one verse a line. For the last 5%, bzip2 that has read the first 95% needs 1.79 bits
    per character and PPMd of order 8 needs 1.60.

    Args:
        folder: gets `train.txt` and `test.txt`. A file `king-james.txt` in it is used first.
        say: called with one line for each step.

    Raises:
        DataError: no source has the original text, or the split files are altered; the message says what to do.
    """
    home = Path(folder)
    text = Text(train=str(home / "train.txt"), test=str(home / "test.txt"))
    sums = {KING_JAMES_FILE: KING_JAMES_SHA256}
    if all(Path(part).is_file() for part in text):
        found = {KING_JAMES_FILE: b"".join(Path(part).read_bytes() for part in text)}
        _verify(found, sums, f"remove {text.train} and {text.test}")
        return text
    sources = {
        str(home / KING_JAMES_FILE): lambda: {KING_JAMES_FILE: (home / KING_JAMES_FILE).read_bytes()},
        f"the Debian package {KING_JAMES_PACKAGE}": king_james_from_debian,
    }
    remedy = f"write the output of `bible -f gen1:1-rev22:21` (Debian package bible-kjv) to {home / KING_JAMES_FILE}"
    content = _fetch("the King James text", sources, sums, remedy, say)[KING_JAMES_FILE]
    end = content.rindex(b"\n", 0, int(TRAINING_SHARE * len(content))) + 1
    home.mkdir(parents=True, exist_ok=True)
    for path, part in zip(text, (content[:end], content[end:]), strict=True):
        _write_file(Path(path), part)
    say(f"wrote {len(content):,} characters to {home}")
    return text


def _fetch(
    what: str, sources: Mapping[str, Callable[[], Files]], sums: Mapping[str, str], remedy: str, say: Say
) -> Files:
    """Return the files of the first source that has all of them unaltered."""
    problems = []
    for name, read in sources.items():
        say(f"looking for {name}")
        try:
            files = read()
            _verify(files, sums, "download it again")
        except (OSError, EOFError, subprocess.SubprocessError, struct.error, TrainwrightError) as error:
            problems.append(f"{name}: {_reason(error)}")
            say(f"  not used: {_reason(error)}")
            continue
        say(f"verified {len(files)} {'file' if len(files) == 1 else 'files'} by SHA-256, from {name}")
        return files
    raise DataError(f"{what} could not be downloaded", where="; ".join(problems), remedy=remedy)


def _verify(files: Files, sums: Mapping[str, str], remedy: str) -> None:
    for name, expected in sums.items():
        found = hashlib.sha256(files[name]).hexdigest()
        if found != expected:
            raise DataError(f"{name} is altered: its SHA-256 is {found} and not {expected}", remedy=remedy)


def _reason(error: Exception) -> str:
    """Say in one line why a source has no files."""
    if isinstance(error, subprocess.CalledProcessError):
        output = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else str(error.stderr or "")
        lines = [line for line in output.splitlines() if line.strip()]
        return lines[-1] if lines else f"{error.cmd[0]} exited with {error.returncode}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


# --- Sources ----------------------------------------------------------------------------------------------------------


def _read_fashion_mnist(folder: Path) -> Files:
    return {name: gzip.decompress((folder / f"{name}.gz").read_bytes()) for name in FASHION_MNIST_SHA256}


def fashion_mnist_from_address() -> Files:
    """Download Fashion-MNIST from its publisher."""
    files = {}
    for name in FASHION_MNIST_SHA256:
        with urllib.request.urlopen(f"{ADDRESS}{name}.gz", timeout=_CONNECT_S) as answer:
            files[name] = gzip.decompress(answer.read())
    return files


def fashion_mnist_from_debian() -> Files:
    """Read Fashion-MNIST from its Debian package."""
    with tempfile.TemporaryDirectory(prefix="fashion-mnist-") as folder:
        return _read_fashion_mnist(
            unpack_debian(FASHION_MNIST_PACKAGE, Path(folder)) / "usr/share/datasets/fashion-mnist"
        )


def king_james_from_debian() -> Files:
    """Read the text from `bible.data` of its Debian package; gzip can decompress the windows of compress(1)."""
    with tempfile.TemporaryDirectory(prefix="king-james-") as folder:
        data = (unpack_debian(KING_JAMES_PACKAGE, Path(folder)) / "usr/lib/bible.data").read_bytes()
    offsets = struct.unpack(f">{(FIRST_WINDOW - WINDOW_OFFSETS) // 4}I", data[WINDOW_OFFSETS:FIRST_WINDOW])
    windows = [COMPRESS_MAGIC + data[start:stop] for start, stop in itertools.pairwise(offsets)]
    text = b"".join(
        subprocess.run(["gzip", "-dc"], input=each, capture_output=True, check=True).stdout for each in windows
    )
    return {KING_JAMES_FILE: text.partition(b"\n")[2]}  # the first line names the edition


def unpack_debian(package: str, folder: Path) -> Path:
    """Download a Debian package and return the folder with its files, inside `folder`.

    Missing package lists are downloaded into `folder` too, so that no root rights are needed.

    Raises:
        OSError, subprocess.SubprocessError: no apt, no network, or no such package.
    """
    try:
        _run(["apt-get", "download", package], folder)
    except subprocess.SubprocessError:
        for part in ("lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        private = ["-o", f"Dir::State::Lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]
        _run(["apt-get", *private, "update"], folder)
        _run(["apt-get", *private, "download", package], folder)
    unpacked, file = folder / "unpacked", next(folder.glob("*.deb"), None)
    if file is None:
        raise FileNotFoundError(f"apt-get downloaded no file of {package}")
    _run(["dpkg", "-x", str(file), str(unpacked)], folder)
    return unpacked


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=_COMMAND_S)


# --- Files that appear only when complete -----------------------------------------------------------------------------


def _is_written(split: Path) -> bool:
    return (split / "part-0.parquet").is_file()


def _write_split(split: Path, images: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64]) -> None:
    """Write a folder with one parquet file, renamed into place when it is complete."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(images)
    table = pa.table({"image": tensors, "label": labels, "id": np.arange(len(labels), dtype=np.int64)})
    split.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=split.parent) as folder:
        complete = Path(folder) / split.name
        complete.mkdir()
        pq.write_table(table, complete / "part-0.parquet", row_group_size=_GROUP_ROWS, compression="zstd")
        try:
            complete.rename(split)
        except OSError:
            if not _is_written(split):  # another process may have written it first
                raise


def _write_file(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".writing-", delete=False) as file:
        file.write(content)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def main(arguments: list[str]) -> int:
    """Download Fashion-MNIST and print one line for each step. Returns the exit code."""
    try:
        splits = fashion_mnist(*arguments[:1], say=lambda line: print(line, flush=True))
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"ready: {splits.train} and {splits.test}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
