"""The King James text (1611, as printed since 1769): 4.4 million characters, one verse a line, for language models.

Of the last 5%, bzip2 that has seen the first 95% needs 1.79 bits per character, PPMd of order 8 1.60.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from trainwright.core.errors import DataError, TrainwrightError
from trainwright.datasets.debian import reason, unpacked

PACKAGE = "bible-kjv-text"
FOLDER = "data/king-james"
FILE = "king-james.txt"
SHA256 = "cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d"
TRAINED = 0.95  # of the characters

MAGIC = b"\x1f\x9d\x90"  # of compress(1): block mode, codes of up to 16 bits
OFFSETS, FIRST_WINDOW = 0x5C, 0x170  # of the windows' places in bible.data, and of the first window

Say = Callable[[str], None]


class Text(NamedTuple):
    """Files of UTF-8 text that follow on each other: the first 95%, up to the end of a verse, and the rest."""

    train: str
    test: str


def king_james(folder: str | os.PathLike[str] = FOLDER, say: Say = lambda line: None) -> Text:
    """Fetch, verify and divide the King James text, once.

    Args:
        folder: to write `train.txt` and `test.txt` into. `king-james.txt` in it is used before anything is fetched.
        say: called with one line for each step.

    Raises:
        DataError: no source answered, or all gave another text, or another one is there; says what to do by hand.
    """
    home = Path(folder)
    text = Text(train=str(home / "train.txt"), test=str(home / "test.txt"))
    if all(Path(part).is_file() for part in text):
        _verified(b"".join(Path(part).read_bytes() for part in text), f"remove {text.train} and {text.test}")
        return text
    whole = _fetch(home, say)
    end = whole.rindex(b"\n", 0, int(TRAINED * len(whole))) + 1
    home.mkdir(parents=True, exist_ok=True)
    for path, content in zip(text, (whole[:end], whole[end:]), strict=True):
        _write(Path(path), content)
    say(f"wrote {len(whole):,} characters to {home}")
    return text


def _fetch(home: Path, say: Say) -> bytes:
    """The text from the first source that has it unaltered."""
    sources: dict[str, Callable[[], bytes]] = {
        str(home / FILE): (home / FILE).read_bytes,
        f"the Debian package {PACKAGE}": from_debian,
    }
    problems = []
    for name, fetch in sources.items():
        say(f"looking for {name}")
        try:
            text = _verified(fetch(), "fetch it anew")
        except (OSError, subprocess.SubprocessError, struct.error, TrainwrightError) as error:
            problems.append(f"{name}: {reason(error)}")
            say(f"  no: {reason(error)}")
            continue
        say(f"verified the text by SHA-256, from {name}")
        return text
    raise DataError(
        "the King James text could not be fetched",
        where="; ".join(problems),
        remedy=f"write what `bible -f gen1:1-rev22:21` of Debian's package bible-kjv prints to {home / FILE}",
    )


def _verified(text: bytes, remedy: str) -> bytes:
    """The text itself; raises DataError where it is another one."""
    found = hashlib.sha256(text).hexdigest()
    if found != SHA256:
        raise DataError(f"the text is altered: its SHA-256 is {found} and not {SHA256}", remedy=remedy)
    return text


def from_debian() -> bytes:
    """`bible.data` holds windows of 64 KiB, each as compress(1) writes it without its first bytes; gzip reads those."""
    with tempfile.TemporaryDirectory(prefix="king-james-") as folder:
        data = (unpacked(PACKAGE, Path(folder)) / "usr" / "lib" / "bible.data").read_bytes()
    places = struct.unpack(f">{(FIRST_WINDOW - OFFSETS) // 4}I", data[OFFSETS:FIRST_WINDOW])
    windows = [MAGIC + data[start:stop] for start, stop in itertools.pairwise(places)]
    text = b"".join(
        subprocess.run(["gzip", "-dc"], input=each, capture_output=True, check=True).stdout for each in windows
    )
    return text.partition(b"\n")[2]  # the first line names the edition


def _write(path: Path, content: bytes) -> None:
    """A file that appears whole."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".writing-", delete=False) as file:
        file.write(content)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)
