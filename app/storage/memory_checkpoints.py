"""Copies of the state in a node's shared memory, which outlive the processes that wrote them.

    /dev/shm/trainwright-<user>-<run>/GUARD       the process that the copies live with
    /dev/shm/trainwright-<user>-<run>/<version>/  the engine's own files

A folder lives as long as its guard, the process that started its writer (under Ray the node's raylet): whoever opens a
shelf removes those whose guard is gone. Everybody may create entries in /dev/shm, so a folder is used only where it is
this user's own and open to nobody else; then no other user can put anything into it or in its place.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from trainwright.core.engine import CheckpointFile
from trainwright.core.errors import StorageError
from trainwright.driver.messages import MemoryCheckpoint
from trainwright.storage.run_owner import Owner, provably_dead

SHARED_MEMORY = Path("/dev/shm")
FOLDER_PREFIX, GUARD_FILE = "trainwright-", "GUARD"
_HEADROOM = 1.1  # of the state's size, which the shared memory must have free

FetchFile = Callable[[str, int, str], bytes]  # (node, version, name) -> the file, from another node's keeper


def fetch_unavailable(node: str, version: int, name: str) -> bytes:
    """Where no other node can be reached."""
    raise StorageError(f"the memory of {node} cannot be reached", where=f"{version}/{name}")


class MemoryCheckpointStore:
    """The copies of one run on one node.

    Args:
        uri: of the run.
        memory: a folder in memory.
    """

    def __init__(self, uri: str, memory: Path = SHARED_MEMORY) -> None:
        self.folder = memory / f"{FOLDER_PREFIX}{os.geteuid()}-{hashlib.sha256(uri.encode()).hexdigest()[:12]}"

    def write(self, version: int, size_bytes: int, hold: Iterable[int]) -> _MemoryCheckpointWriter:
        """Begin a version; older ones that are not in `hold` are removed first. Raises StorageError."""
        remove_stale_copies(self.folder.parent)
        if os.path.lexists(self.folder):
            _make_private(self.folder)
        for entry in self.folder.glob("[0-9]*"):
            if int(entry.name) < version and int(entry.name) not in hold:  # an order that comes late spares newer ones
                shutil.rmtree(entry, ignore_errors=True)
        try:
            free_bytes = shutil.disk_usage(self.folder.parent).free
            if free_bytes < size_bytes * _HEADROOM:
                raise _no_room(self.folder, f"{size_bytes:,} bytes are needed, {free_bytes:,} are free")
            place = self.folder / str(version)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            _make_private(self.folder)
            place.mkdir(mode=0o700, exist_ok=True)
            own = self.folder / f"{GUARD_FILE}.{os.getpid()}"
            _write(own, json.dumps(asdict(Owner.parent())).encode())
            own.replace(self.folder / GUARD_FILE)
        except OSError as error:
            raise _no_room(self.folder, str(error)) from error
        return _MemoryCheckpointWriter(place)

    def read(self, version: int, name: str) -> bytes:
        """A file. Raises StorageError when it is not there, or another user could have put it there."""
        place = self.folder / str(version) / name
        try:
            _make_private(self.folder)
            with open(place, "rb", opener=_open_regular_file) as file:
                return file.read()
        except OSError as error:
            raise _unreadable_copy(place, str(error)) from error

    def remove(self) -> None:
        """Let go of everything; what is another user's cannot be removed, and stays."""
        shutil.rmtree(self.folder, ignore_errors=True)


class _MemoryCheckpointWriter:
    """Writes the files of one version. Implements `core.checkpoint.Writer`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.entries: tuple[CheckpointFile, ...] = ()

    def write(self, name: str, *pieces: bytes | memoryview) -> None:
        """Store one file of pieces. Raises StorageError when memory runs out."""
        try:
            size_bytes, sha256 = _write(self._folder / name, *pieces)
        except OSError as error:
            raise _no_room(self._folder, str(error)) from error
        self.entries = (*self.entries, CheckpointFile(name=name, size_bytes=size_bytes, sha256=sha256))


class MemoryCheckpointReader:
    """Reads a state from this node's memory, or through `fetch` from another's. Implements `core.checkpoint.Reader`."""

    def __init__(self, shelf: MemoryCheckpointStore, kept: MemoryCheckpoint, node: str, fetch: FetchFile) -> None:
        self._shelf, self._version, self._node, self._fetch = shelf, kept.version, node, fetch
        self.weights_only = False
        self._files: dict[str, dict[str, CheckpointFile]] = {}
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
            entry = self._files[name][node]
            if len(data) != entry.size_bytes:
                troubles.append(f"{node}: {len(data):,} bytes, not {entry.size_bytes:,}")
            elif hashlib.sha256(data).hexdigest() != entry.sha256:
                troubles.append(f"{node}: other bytes than were written (SHA-256)")
            else:
                return data
        raise _unreadable_copy(self._shelf.folder / str(self._version) / name, "; ".join(troubles))


def remove_stale_copies(memory: Path = SHARED_MEMORY) -> None:
    """Remove this user's shelves whose guard is gone. Nothing of another user's is opened: it may block (a FIFO)."""
    for folder in memory.glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError, ValueError, TypeError):  # another process removes it at the same time, or has begun it
            about = folder.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
                continue
            with open(folder / GUARD_FILE, opener=_open_regular_file) as file:
                guard = Owner(**json.load(file))
            if provably_dead(guard):
                shutil.rmtree(folder, ignore_errors=True)


def _write(place: Path, *pieces: bytes | memoryview) -> tuple[int, str]:
    """Write a new file that only this user can read; its size and SHA-256. Raises OSError."""
    digest, size_bytes = hashlib.sha256(), 0
    with suppress(FileNotFoundError):
        place.unlink()  # of a writer that was ended in between
    with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        for piece in pieces:
            size_bytes += file.write(piece)
            digest.update(piece)
    return size_bytes, digest.hexdigest()


def _open_regular_file(path: str, flags: int) -> int:
    """An opener for `open` that follows no link and waits for nobody. Raises OSError where it is no regular file."""
    found = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(f"{path} is no regular file")
    return found


def _make_private(folder: Path) -> None:
    """Close a folder of this user's to all others. Raises StorageError where it is a link or another user's."""
    try:
        found = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError as error:  # a link, a file, a folder that another user has closed
        raise _unsafe_folder(folder, error.strerror or str(error)) from error
    try:
        about = os.fstat(found)
        if about.st_uid != os.geteuid():
            raise _unsafe_folder(folder, f"it belongs to the user with id {about.st_uid}")
        if stat.S_IMODE(about.st_mode) != 0o700:
            os.fchmod(found, 0o700)
    finally:
        os.close(found)


def _unsafe_folder(folder: Path, why: str) -> StorageError:
    return StorageError(
        f"copies of the state in memory are not safe here: {why}",
        where=str(folder),
        remedy="remove it, or have its owner remove it; until then the run goes on with its checkpoints alone",
    )


def _no_room(folder: Path, why: str) -> StorageError:
    return StorageError(
        f"the state does not fit into shared memory: {why}",
        where=str(folder),
        remedy="give the node more /dev/shm (docker: --shm-size), or set keeper_s=0",
    )


def _unreadable_copy(place: Path, why: str) -> StorageError:
    return StorageError(
        f"a copy of the state in memory cannot be read: {why}",
        where=str(place),
        remedy="nothing: the run goes on from its newest checkpoint",
    )
