"""In-memory checkpoints: copies of the state in a node's shared memory, which outlive the processes that wrote them.

    /dev/shm/trainwright-<user>-<run>/GUARD       the process whose end makes the copies stale
    /dev/shm/trainwright-<user>-<run>/<version>/  the files of the engine; in received/, those of another node

The guard is the process that started the writer, under Ray the node's raylet. Every writer removes the folders whose
guard is gone. All users may create entries in /dev/shm, so a folder is used only where it belongs to this user and is
closed to all others: then no other user can write into it or replace it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trainwright.core.engine import CheckpointFile
from trainwright.core.errors import StorageError
from trainwright.driver.messages import MemoryCheckpoint
from trainwright.storage.run_log import Owner, provably_dead

SHARED_MEMORY = Path("/dev/shm")
FOLDER_PREFIX, GUARD_FILE = "trainwright-", "GUARD"
_HEADROOM = 1.1  # shared memory must have this multiple of the state's size free

_RECEIVED = "received"  # folder of what other nodes sent, which may have the names of files of this node
_PART_BYTES = 16 << 20
_PAUSES, _PAUSE_S = 9, 2.0  # between two parts: times the time that the last one took on the network, and the most

_FetchFile = Callable[[str, int, str], bytes]  # (node, version, name) -> the file, from another node

SendPart = Callable[["MemoryPart"], object]


class PeerMemory:
    """The memory of other nodes. Here none can be reached."""

    def fetch(self, node: str, version: int, name: str) -> bytes:
        """Read a file. Raises StorageError."""
        raise StorageError(f"the memory of {node} cannot be reached", where=f"{version}/{name}")

    def send(self, node: str, part: MemoryPart) -> None:
        """Write a part of a file; the parts come in order. Raises StorageError."""
        raise StorageError(f"the memory of {node} cannot be reached", where=f"{part.version}/{part.name}")


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """A part of a file on its way to the memory of another node."""

    version: int
    name: str
    size_bytes: int  # of this file and those that follow
    offset: int = 0
    data: bytes = b""
    hold: tuple[int, ...] = ()  # older versions that stay


def control_group_room(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float:
    """Return the bytes that the control groups of this process still allow, without file caches.

    Shared memory counts as memory of the process that writes it (containers, Slurm).
    """
    rooms = [math.inf]
    with suppress(OSError, ValueError):
        for line in membership.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds in ("", "memory"):
                top = root / kinds
                within = top / path.lstrip("/")
                rooms += [_room(folder) for folder in (within, *within.parents) if folder.is_relative_to(top)]
    return min(rooms)


def _room(folder: Path) -> float:
    """Return what one control group, version 2 or 1, allows; infinity without a limit."""
    for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        with suppress(OSError, ValueError):
            free_bytes = int((folder / limit).read_text()) - int((folder / usage).read_text())
            facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return max(0, free_bytes) + sum(int(facts.get(f"{kind}active_file", 0)) for kind in ("", "in"))
    return math.inf


class MemoryCheckpointStore:
    """The in-memory checkpoints of one run on one node.

    Args:
        uri: of the run.
        pause: waits between the parts that are sent to another node.
    """

    def __init__(self, uri: str, memory: Path = SHARED_MEMORY, pause: Callable[[float], object] = time.sleep) -> None:
        self._pause = pause
        self.folder = memory / f"{FOLDER_PREFIX}{os.geteuid()}-{hashlib.sha256(uri.encode()).hexdigest()[:12]}"

    def write(self, version: int, size_bytes: int, hold: Iterable[int]) -> _MemoryCheckpointWriter:
        """Start a version. Older versions that are not in `hold` are removed first. Raises StorageError."""
        remove_stale_copies(self.folder.parent)
        if os.path.lexists(self.folder):
            _make_private(self.folder)
        self.remove_before(version, hold)  # a late call keeps newer versions
        try:
            free_bytes = min(shutil.disk_usage(self.folder.parent).free, control_group_room())
            if free_bytes < size_bytes * _HEADROOM:
                raise _no_room(self.folder, f"{size_bytes:,} bytes are needed, {free_bytes:,.0f} are free")
            place = self.folder / str(version)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            _make_private(self.folder)
            place.mkdir(mode=0o700, exist_ok=True)
            guard_file = self.folder / f"{GUARD_FILE}.{os.getpid()}.{threading.get_ident()}"
            _write(guard_file, json.dumps(asdict(Owner.parent())).encode())
            guard_file.replace(self.folder / GUARD_FILE)
        except OSError as error:
            raise _no_room(self.folder, str(error)) from error
        return _MemoryCheckpointWriter(place)

    def read(self, version: int, name: str) -> bytes:
        """Read a file. Raises StorageError when it is missing, or another user could have written it."""
        place = self.folder / str(version) / name
        if not os.path.lexists(place):
            place = place.parent / _RECEIVED / name
        try:
            _make_private(self.folder)
            with open(place, "rb", opener=_open_regular_file) as file:
                return file.read()
        except OSError as error:
            raise _unreadable_copy(place, str(error)) from error

    def send(self, version: int, files: Iterable[CheckpointFile], hold: tuple[int, ...], send: SendPart) -> None:
        """Send files of a version to another node. Raises StorageError.

        The network is used for a tenth of the time, or for one part each two seconds.
        """
        entries = list(files)
        left_bytes = sum(entry.size_bytes for entry in entries)
        for entry in entries:
            place, offset = self.folder / str(version) / entry.name, 0
            about = MemoryPart(version=version, name=entry.name, size_bytes=left_bytes, hold=hold)
            with open(place, "rb", opener=_open_regular_file) as file:
                while (data := file.read(_PART_BYTES)) or not offset:
                    begun_s = time.monotonic()
                    send(replace(about, offset=offset, data=data))
                    offset += len(data) or 1
                    self._pause(min(_PAUSE_S, _PAUSES * (time.monotonic() - begun_s)))
            left_bytes -= entry.size_bytes

    def receive(self, part: MemoryPart) -> None:
        """Write a part of a file of another node; the first one starts the file. Raises StorageError."""
        place = self.folder / str(part.version) / _RECEIVED / part.name
        try:
            if not part.offset:
                self.write(part.version, part.size_bytes, part.hold)
                place.parent.mkdir(mode=0o700, exist_ok=True)
                _write(place, part.data)
                return
            with open(place, "r+b", opener=_open_regular_file) as file:
                if file.seek(0, os.SEEK_END) == part.offset:
                    file.write(part.data)
                    return
                trouble = f"it has {file.tell():,} bytes, not {part.offset:,}"
        except FileNotFoundError:
            trouble = "a newer version has taken its place"
        except OSError as error:
            raise _no_room(self.folder, str(error)) from error
        raise _unreadable_copy(place, trouble)

    def remove_before(self, version: int, hold: Iterable[int] = ()) -> None:
        """Remove versions older than this one, but for those in `hold`."""
        for entry in self.folder.glob("[0-9]*"):
            if int(entry.name) < version and int(entry.name) not in hold:
                shutil.rmtree(entry, ignore_errors=True)

    def remove(self) -> None:
        """Remove all versions; what belongs to another user stays."""
        shutil.rmtree(self.folder, ignore_errors=True)


class _MemoryCheckpointWriter:
    """Writes the files of one version. Implements `core.engine.StateWriter`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.entries: tuple[CheckpointFile, ...] = ()

    def write(self, name: str, *pieces: bytes | memoryview) -> None:
        """Store one file, given in pieces. Raises StorageError when memory runs out."""
        try:
            size_bytes, sha256 = _write(self._folder / name, *pieces)
        except OSError as error:
            raise _no_room(self._folder, str(error)) from error
        self.entries = (*self.entries, CheckpointFile(name=name, size_bytes=size_bytes, sha256=sha256))


class MemoryCheckpointReader:
    """Reads a version from this node's memory, or with `fetch` from another's. Implements `core.engine.StateReader`."""

    def __init__(self, store: MemoryCheckpointStore, copy: MemoryCheckpoint, node: str, fetch: _FetchFile) -> None:
        self._store, self._version, self._node, self._fetch = store, copy.version, node, fetch
        self.weights_only = False
        self._files: dict[str, dict[str, CheckpointFile]] = {}
        for item in copy.files:
            self._files.setdefault(item.file.name, {})[item.node] = item.file

    def names(self) -> tuple[str, ...]:
        """Names of all files."""
        return tuple(self._files)

    def read(self, name: str) -> bytes:
        """Read a file from the nearest node that has it intact. Raises StorageError when none has."""
        nodes = sorted(self._files[name], key=lambda node: node != self._node)
        troubles = []
        for node in nodes:
            try:
                is_local = node == self._node
                data = self._store.read(self._version, name) if is_local else self._fetch(node, self._version, name)
            except StorageError as error:
                troubles.append(f"{node}: {error.what}")
                continue
            entry = self._files[name][node]
            if len(data) != entry.size_bytes:
                troubles.append(f"{node}: {len(data):,} bytes, not {entry.size_bytes:,}")
            elif hashlib.sha256(data).hexdigest() != entry.sha256:
                troubles.append(f"{node}: altered (SHA-256 differs)")
            else:
                return data
        raise _unreadable_copy(self._store.folder / str(self._version) / name, "; ".join(troubles))

    def stream(self, name: str) -> Iterator[memoryview]:
        """Yield a file as one chunk, since it is in memory anyway. Raises as `read`."""
        yield memoryview(self.read(name))


def remove_stale_copies(memory: Path = SHARED_MEMORY) -> None:
    """Remove this user's folders whose guard is gone. Files of other users are not opened: a FIFO would block."""
    for folder in memory.glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError, ValueError, TypeError):  # another process removes or creates it right now
            about = folder.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
                continue
            with open(folder / GUARD_FILE, opener=_open_regular_file) as file:
                guard = Owner(**json.load(file))
            if provably_dead(guard):
                shutil.rmtree(folder, ignore_errors=True)


def _write(place: Path, *pieces: bytes | memoryview) -> tuple[int, str]:
    """Write a new file that only this user can read. Returns its size and SHA-256. Raises OSError."""
    digest, size_bytes = hashlib.sha256(), 0
    with suppress(FileNotFoundError):
        place.unlink()  # left by a killed writer
    with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        for piece in pieces:
            size_bytes += file.write(piece)
            digest.update(piece)
    return size_bytes, digest.hexdigest()


def _open_regular_file(path: str, flags: int) -> int:
    """Open a file as opener of `open`, without following links or blocking. Raises OSError for special files."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor


def _make_private(folder: Path) -> None:
    """Close a folder to all other users. Raises StorageError where it is a link or belongs to another user."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError as error:  # a link, a file, a folder that another user has closed
        raise _unsafe_folder(folder, error.strerror or str(error)) from error
    try:
        about = os.fstat(descriptor)
        if about.st_uid != os.geteuid():
            raise _unsafe_folder(folder, f"it belongs to the user with id {about.st_uid}")
        if stat.S_IMODE(about.st_mode) != 0o700:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def _unsafe_folder(folder: Path, why: str) -> StorageError:
    return StorageError(
        f"in-memory checkpoints are not safe in this folder: {why}",
        where=str(folder),
        remedy="remove the folder, or ask its owner to; until then the run uses only its checkpoints in storage",
    )


def _no_room(folder: Path, why: str) -> StorageError:
    return StorageError(
        f"the state does not fit into shared memory: {why}",
        where=str(folder),
        remedy="give the node more /dev/shm (docker: --shm-size), or set keeper_s=0",
    )


def _unreadable_copy(place: Path, why: str) -> StorageError:
    return StorageError(
        f"an in-memory checkpoint cannot be read: {why}",
        where=str(place),
        remedy="none needed: the run continues from its newest checkpoint",
    )
