"""Copies of the state in a node's shared memory, which outlive the processes that wrote them.

    /dev/shm/trainwright-<run>/GUARD       the process that the copies live with
    /dev/shm/trainwright-<run>/<version>/  the engine's own files

A folder lives as long as its guard, the process that started its writer (under Ray the node's raylet): whoever opens a
shelf removes those whose guard is gone.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from trainwright.core.checkpoint import FileEntry
from trainwright.core.errors import StorageError
from trainwright.driver.messages import KeptState
from trainwright.owner import Owner, provably_dead

MEMORY = Path("/dev/shm")
PREFIX, GUARD = "trainwright-", "GUARD"
SPARE_ROOM = 1.1  # of the state's size, which the shared memory must have free

Fetch = Callable[[str, int, str], bytes]  # (node, version, name) -> the file, from another node's keeper


def no_fetch(node: str, version: int, name: str) -> bytes:
    """Where no other node can be reached."""
    raise StorageError(f"the memory of {node} cannot be reached", where=f"{version}/{name}")


class Shelf:
    """The copies of one run on one node.

    Args:
        uri: of the run.
        memory: a folder in memory.
    """

    def __init__(self, uri: str, memory: Path = MEMORY) -> None:
        self.folder = memory / f"{PREFIX}{hashlib.sha256(uri.encode()).hexdigest()[:12]}"

    def write(self, version: int, size_bytes: int, hold: Iterable[int]) -> ShelfWriter:
        """Begin a version; older ones that are not in `hold` are removed first. Raises StorageError."""
        sweep(self.folder.parent)
        for entry in self.folder.glob("[0-9]*"):
            if int(entry.name) < version and int(entry.name) not in hold:  # an order that comes late spares newer ones
                shutil.rmtree(entry, ignore_errors=True)
        try:
            free_bytes = shutil.disk_usage(self.folder.parent).free
            if free_bytes < size_bytes * SPARE_ROOM:
                raise _no_room(self.folder, f"{size_bytes:,} bytes are needed, {free_bytes:,} are free")
            place = self.folder / str(version)
            place.mkdir(parents=True, exist_ok=True)
            (self.folder / GUARD).write_text(json.dumps(asdict(Owner.parent())))
        except OSError as error:
            raise _no_room(self.folder, str(error)) from error
        return ShelfWriter(place)

    def read(self, version: int, name: str) -> bytes:
        """A file. Raises StorageError when it is not there."""
        place = self.folder / str(version) / name
        try:
            return place.read_bytes()
        except OSError as error:
            raise _gone(place, str(error)) from error

    def remove(self) -> None:
        """Let go of everything."""
        shutil.rmtree(self.folder, ignore_errors=True)


class ShelfWriter:
    """Writes the files of one version. Implements `core.checkpoint.Writer`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.entries: tuple[FileEntry, ...] = ()

    def write(self, name: str, *pieces: bytes | memoryview) -> None:
        """Store one file of pieces. Raises StorageError when memory runs out."""
        try:
            with (self._folder / name).open("wb") as file:
                size_bytes = sum(file.write(piece) for piece in pieces)
        except OSError as error:
            raise _no_room(self._folder, str(error)) from error
        self.entries = (*self.entries, FileEntry(name=name, size_bytes=size_bytes, sha256=""))


class ShelfReader:
    """Reads a state from this node's memory, or through `fetch` from another's. Implements `core.checkpoint.Reader`."""

    def __init__(self, shelf: Shelf, kept: KeptState, node: str, fetch: Fetch) -> None:
        self._shelf, self._version, self._node, self._fetch = shelf, kept.version, node, fetch
        self.weights_only = False
        self._files: dict[str, dict[str, FileEntry]] = {}
        for item in kept.files:
            self._files.setdefault(item.file.name, {})[item.node] = item.file

    def names(self) -> tuple[str, ...]:
        """Names of all files."""
        return tuple(self._files)

    def read(self, name: str) -> bytes:
        """One file, from the nearest node that has it whole. Raises StorageError when none does."""
        nodes = sorted(self._files[name], key=lambda node: node != self._node)
        troubles = []
        for node in nodes:
            try:
                here = node == self._node
                data = self._shelf.read(self._version, name) if here else self._fetch(node, self._version, name)
            except StorageError as error:
                troubles.append(f"{node}: {error.what}")
                continue
            if len(data) == self._files[name][node].size_bytes:
                return data
            troubles.append(f"{node}: {len(data):,} bytes, not {self._files[name][node].size_bytes:,}")
        raise _gone(self._shelf.folder / str(self._version) / name, "; ".join(troubles))


def sweep(memory: Path = MEMORY) -> None:
    """Remove the shelves whose guard is gone."""
    for folder in memory.glob(f"{PREFIX}*"):
        with suppress(OSError, ValueError, TypeError):  # another process removes it at the same time, or has begun it
            if provably_dead(Owner(**json.loads((folder / GUARD).read_text()))):
                shutil.rmtree(folder, ignore_errors=True)


def _no_room(folder: Path, why: str) -> StorageError:
    return StorageError(
        f"the state does not fit into shared memory: {why}",
        where=str(folder),
        remedy="give the node more /dev/shm (docker: --shm-size), or set keeper_s=0",
    )


def _gone(place: Path, why: str) -> StorageError:
    return StorageError(
        f"a copy of the state in memory cannot be read: {why}",
        where=str(place),
        remedy="nothing: the run goes on from its newest checkpoint",
    )
