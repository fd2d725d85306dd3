"""Names of what is stored: files of a checkpoint and the reference by which the log names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainwright.core.data import Cursor

OPTIMIZER = "optimizer"  # names of files that hold nothing but the optimizer's state begin with it


def checkpoint_path(step: int, token: int, again: int = 0) -> str:
    """The folder, within the run, of the checkpoint that the driver `token` takes after `step` completed steps.

    `again` tells a further try at the same step from the first, so that a late write of an uploader given up cannot
    touch it.
    """
    return f"checkpoints/{step:08d}-{token}" + (f".{again}" if again else "")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint: name within it, size and SHA-256 (hexadecimal)."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class CheckpointRef:
    """A checkpoint as the log names it.

    Attributes:
        step: completed steps it holds.
        path: its folder within the run, `checkpoints/00001200-<token>`.
        manifest_sha256: of its MANIFEST.json.
        parent: path of the checkpoint before it; empty for the first.
    """

    step: int
    path: str
    manifest_sha256: str
    parent: str = ""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds. `facts` are small values to remember, such as metrics and the plan."""

    step: int
    cursor: Cursor
    files: tuple[FileEntry, ...]
    layout: str = "replicated"
    facts: Mapping[str, Any] = field(default_factory=dict)


class Writer(Protocol):
    """Where an engine writes the files of one checkpoint. Runs in an upload thread."""

    def write(self, name: str, *pieces: bytes | memoryview) -> None:
        """Store one file of pieces in this order. `name` is relative, without `..`; raises StorageError."""


class Reader(Protocol):
    """Where an engine reads the files of one checkpoint; sizes and checksums are verified on the way.

    Attributes:
        weights_only: the model is not trained further: an engine that can, leaves out the optimizer's state.
    """

    @property
    def weights_only(self) -> bool:
        """See above."""

    def names(self) -> tuple[str, ...]:
        """Names of all files."""

    def read(self, name: str) -> bytes | bytearray:
        """One file, verified; raises CheckpointError when it is missing, torn or altered."""
