"""Metadata of the files of a data set, such as parquet footers: read once for each state of a file, and cached.

A cache entry counts only for the path, size and times of change that the file had before its metadata was read. A file
that was changed shortly before that may change again without another time of change, so no entry is kept of it (git
does the same: https://git-scm.com/docs/racy-git). Caches are JSON, since pickles of others must not be loaded.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

from trainwright.datasets.index import digest

Value = TypeVar("Value")

_FORMAT = 1  # another one where the same files would give other metadata
SETTLED_S = {True: 2.0, False: 60.0}  # of local files; of a store, whose clock may differ from ours by as much
MAX_CACHE_FILES = 64  # cache files that are kept
_LONGEST_BYTES = 512 << 20
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_ENDPOINT")
_MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, pa.ArrowException)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Indexing:
    """What indexes use beside this process and its local cache.

    Attributes:
        find: reads a cache file that is kept with a run, by name; None where there is none.
        connect: connects this process to a Ray cluster, which large data sets are read on; None for no such cluster.
        fingerprint: digest of a value that is another where the code of its functions is; None where nobody can tell.
        kept: cache files to keep with the run, by name.
    """

    find: Callable[[str], bytes | None] = lambda name: None
    connect: Callable[[], object] | None = None
    fingerprint: Callable[[Any], str] | None = None
    kept: dict[str, bytes] = field(default_factory=dict)


_ALONE = Indexing()
_CURRENT: ContextVar[Indexing] = ContextVar("indexing", default=_ALONE)


def current() -> Indexing:
    """The innermost `indexing` of this thread."""
    return _CURRENT.get()


@contextmanager
def indexing(used: Indexing) -> Iterator[Indexing]:
    """Within it, indexes use this."""
    token = _CURRENT.set(used)
    try:
        yield used
    finally:
        _CURRENT.reset(token)


def metadata_of(
    system: pafs.FileSystem,
    files: Sequence[pafs.FileInfo],
    *,
    reads: Sequence[object],
    read: Callable[[list[pafs.FileInfo]], Sequence[Value]],
    pack: Callable[[Value], Any],
    unpack: Callable[[Any], Value],
) -> list[Value]:
    """Metadata of each file: from a cache where the file is as it was, else as read now.

    Args:
        system: of the files.
        files: as listed now.
        reads: what the metadata depends on but the files: the format with its options, and the path asked for.
        read: metadata of some of the files, in order.
        pack: metadata as JSON.
        unpack: metadata from JSON. Raises ValueError, TypeError, KeyError or ArrowException for JSON that is none.
    """
    local, identity = isinstance(system, pafs.LocalFileSystem), _identity(reads)
    name, looked_s = f"{digest([identity])[:32]}.json.z", time.time()
    states = [_state(info, local, looked_s) for info in files]
    content = _local(name)
    found = _unpacked(files, states, _entries(content, identity), unpack)
    if content is None or len(found) < len(files):
        found = {**_unpacked(files, states, _entries(current().find(name), identity), unpack), **found}
        missing = [info for info in files if info.path not in found]
        if missing:
            found.update(zip((info.path for info in missing), read(missing), strict=True))
        entries = {
            info.path: [state, pack(found[info.path])] for info, state in zip(files, states, strict=True) if state
        }
        content = _content(identity, entries)
        _write(name, content)
    current().kept[name] = content
    return [found[info.path] for info in files]


def with_run(
    reads: Sequence[object], make: Callable[[], Value], *, pack: Callable[[Value], Any], unpack: Callable[[Any], Value]
) -> Value:
    """What a run keeps of its beginning, else what is made now; unlike metadata of files it is in no local cache.

    Args:
        reads: what it depends on.
        pack: it as JSON.
        unpack: it from JSON. Raises ValueError, TypeError, KeyError or IndexError for JSON that is none.
    """
    identity = _identity(reads)
    name = f"{digest([identity])[:32]}.json.z"
    content = current().find(name)
    try:
        value = unpack(_entries(content, identity)[""])
    except _MALFORMED:
        value = make()
        content = _content(identity, {"": pack(value)})
    current().kept[name] = content or b""
    return value


def folder() -> Path:
    """The folder of the local cache: `TRAINWRIGHT_CACHE`, else `trainwright` in the user's cache directory."""
    given = os.environ.get("TRAINWRIGHT_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(given or os.path.join(base, "trainwright")) / "indexes"


def _identity(reads: Sequence[object]) -> str:
    """The same name means other files at another endpoint."""
    return repr((_FORMAT, *map(str, reads), *(os.environ.get(name, "") for name in _ENDPOINTS)))


def _state(info: pafs.FileInfo, local: bool, looked_s: float) -> list[Any]:
    """Size and times of change of a file; empty where they do not tell its content from an earlier one."""
    if local:
        try:
            found = os.stat(info.path)
        except OSError:  # whoever reads it says why
            return []
        changed_ns = max(found.st_mtime_ns, found.st_ctime_ns)
        state = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
        settled = found.st_size == info.size
    else:
        changed_ns, state, settled = info.mtime_ns or 0, [info.size, info.mtime_ns], bool(info.mtime_ns)
    return state if settled and changed_ns / 1e9 < looked_s - SETTLED_S[local] else []


def _content(identity: str, entries: Mapping[str, Any]) -> bytes:
    return zlib.compress(json.dumps({"identity": identity, "files": entries}).encode(), level=1)


def _entries(content: bytes | None, identity: str) -> Mapping[str, Any]:
    """State and metadata by path; empty where the content is torn, or another's."""
    if content is None:
        return {}
    try:
        unzipped = zlib.decompressobj().decompress(content, _LONGEST_BYTES)
        found = json.loads(unzipped)
        entries: Mapping[str, Any] = found["files"] if found["identity"] == identity else {}
        return entries if isinstance(entries, dict) else {}
    except (zlib.error, *_MALFORMED):
        return {}


def _unpacked(
    files: Sequence[pafs.FileInfo],
    states: Sequence[list[Any]],
    entries: Mapping[str, Any],
    unpack: Callable[[Any], Value],
) -> dict[str, Value]:
    """Metadata of the files that are as they were, by path."""
    found: dict[str, Value] = {}
    for info, state in zip(files, states, strict=True):
        try:
            before, packed = entries[info.path]
            if state and before == state:
                found[info.path] = unpack(packed)
        except _MALFORMED:
            continue
    return found


def _local(name: str) -> bytes | None:
    try:
        return (folder() / name).read_bytes() if _own(folder()) else None
    except OSError:
        return None


def _own(path: Path) -> bool:
    """Whether a folder is this user's, and nobody else may write into it."""
    found = path.lstat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _write(name: str, content: bytes) -> None:
    """Write a cache file at once; where that cannot be, the next index takes as long as this one."""
    place = folder()
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _own(place):
            raise PermissionError(f"{place} can be written by others")
        with tempfile.TemporaryDirectory(dir=place, prefix=".") as own:
            written = Path(own, name)
            written.write_bytes(content)
            written.replace(place / name)
        _prune(place)
    except OSError as error:
        _log.info("the index of a data set is not cached: %s", error)


def _prune(place: Path) -> None:
    """Delete the oldest cache files."""
    files = sorted(place.glob("*.json.z"), key=lambda path: path.lstat().st_mtime, reverse=True)
    for path in files[MAX_CACHE_FILES:]:
        path.unlink(missing_ok=True)
