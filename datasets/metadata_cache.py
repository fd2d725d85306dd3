"""Metadata of the files of a data set, such as parquet footers: read once for each state of a file, and cached.

A cache entry is valid only for the path, size and times of change that the file had before its metadata was read. A
file that changed shortly before may change again within the resolution of its time stamp, so it gets no entry (git does
the same: https://git-scm.com/docs/racy-git). Caches are JSON, since a pickle from another user must not be loaded.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

from trainwright.core.errors import DataError, TrainwrightError
from trainwright.core.pickling import dumps, loads
from trainwright.datasets.data_source import hash_parts

_Value = TypeVar("_Value")

_FORMAT = 1  # to be raised when the same files would give other metadata
SETTLED_S = {True: 2.0, False: 60.0}  # age of an unchanged local file; of a file in a store, whose clock may differ
MAX_CACHE_FILES = 64  # cache files that are kept
_LONGEST_BYTES = 512 << 20
_ENDPOINTS = (
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT",
    "AZURE_STORAGE_ACCOUNT_NAME",
)  # fmt: skip
_MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, pa.ArrowException)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MetadataContext:
    """The run's cache files and Ray cluster, which reading an index can use besides the local cache."""

    # reads a cache file of the run by name; None if it does not exist
    find: Callable[[str], bytes | None] = lambda name: None
    # connects this process to the Ray cluster that reads large data sets; None without a cluster
    connect: Callable[[], object] | None = None
    # digest of a value that changes with the code of its functions; None if it cannot be computed
    fingerprint: Callable[[Any], str] | None = None
    kept: dict[str, bytes] = field(default_factory=dict)  # cache files to keep with the run, by name


_NO_CONTEXT = MetadataContext()
_CURRENT: ContextVar[MetadataContext] = ContextVar("indexing", default=_NO_CONTEXT)


def current_context() -> MetadataContext:
    """Return the innermost `metadata_context` of this thread."""
    return _CURRENT.get()


@contextmanager
def metadata_context(used: MetadataContext) -> Iterator[MetadataContext]:
    """Use this context for indexes inside the block."""
    token = _CURRENT.set(used)
    try:
        yield used
    finally:
        _CURRENT.reset(token)


def cached_metadata(
    system: pafs.FileSystem,
    files: Sequence[pafs.FileInfo],
    *,
    reads: Sequence[object],
    read: Callable[[list[pafs.FileInfo]], Sequence[_Value]],
    pack: Callable[[_Value], Any],
    unpack: Callable[[Any], _Value],
) -> list[_Value]:
    """Return the metadata of each file, from a cache if the file is unchanged.

    Args:
        system: of the files.
        files: as listed now.
        reads: further values that determine the metadata: the format with its options, and the user's path.
        read: returns the metadata of some of the files, in order.
        pack: returns metadata as JSON.
        unpack: returns metadata from JSON. Raises ValueError, TypeError, KeyError or ArrowException for other JSON.
    """
    local, identity = isinstance(system, pafs.LocalFileSystem), _identity(reads)
    name, looked_s = f"{hash_parts([identity])[:32]}.json.z", time.time()
    states = [_file_state(info, local, looked_s) for info in files]
    content = _local(name)
    metadata = _unpacked(files, states, _entries(content, identity), unpack)
    if content is None or len(metadata) < len(files):
        metadata = {**_unpacked(files, states, _entries(current_context().find(name), identity), unpack), **metadata}
        missing = [info for info in files if info.path not in metadata]
        if missing:
            metadata.update(zip((info.path for info in missing), read(missing), strict=True))
        entries = {
            info.path: [state, pack(metadata[info.path])] for info, state in zip(files, states, strict=True) if state
        }
        content = _content(identity, entries)
        _write(name, content)
    current_context().kept[name] = content
    return [metadata[info.path] for info in files]


def run_cached(
    reads: Sequence[object],
    make: Callable[[], _Value],
    *,
    pack: Callable[[_Value], Any],
    unpack: Callable[[Any], _Value],
) -> _Value:
    """Return a value from the run's cache files, or make it. The local cache does not hold it.

    `reads` determine the value. `unpack` raises ValueError, TypeError, KeyError or IndexError for other JSON.
    """
    identity = _identity(reads)
    name = f"{hash_parts([identity])[:32]}.json.z"
    content = current_context().find(name)
    try:
        value = unpack(_entries(content, identity)[""])
    except _MALFORMED:
        value = make()
        content = _content(identity, {"": pack(value)})
    current_context().kept[name] = content or b""
    return value


def cache_folder(kind: str = "indexes") -> Path:
    """The folder of a local cache: in `TRAINWRIGHT_CACHE`, else in `trainwright` in the user's cache directory."""
    configured = os.environ.get("TRAINWRIGHT_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(configured or os.path.join(base, "trainwright")) / kind


def _identity(reads: Sequence[object]) -> str:
    """Return the key of a cache file. It has the endpoints, since a path names other files at another endpoint."""
    return repr((_FORMAT, *map(str, reads), *(os.environ.get(name, "") for name in _ENDPOINTS)))


def _file_state(info: pafs.FileInfo, local: bool, looked_s: float) -> list[Any]:
    """Return size and times of change of a file; empty if a later change could leave them equal."""
    if local:
        try:
            status = os.stat(info.path)
        except OSError:  # reading the file will say why
            return []
        changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
        state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        settled = status.st_size == info.size
    else:
        changed_ns, state, settled = info.mtime_ns or 0, [info.size, info.mtime_ns], bool(info.mtime_ns)
    return state if settled and changed_ns / 1e9 < looked_s - SETTLED_S[local] else []


def _content(identity: str, entries: Mapping[str, Any]) -> bytes:
    return zlib.compress(json.dumps({"identity": identity, "files": entries}).encode(), level=1)


def _entries(content: bytes | None, identity: str) -> Mapping[str, Any]:
    """Return state and metadata by path; empty if the content is malformed or has another identity."""
    if content is None:
        return {}
    try:
        unzipped = zlib.decompressobj().decompress(content, _LONGEST_BYTES)
        document = json.loads(unzipped)
        entries: Mapping[str, Any] = document["files"] if document["identity"] == identity else {}
        return entries if isinstance(entries, dict) else {}
    except (zlib.error, *_MALFORMED):
        return {}


def _unpacked(
    files: Sequence[pafs.FileInfo],
    states: Sequence[list[Any]],
    entries: Mapping[str, Any],
    unpack: Callable[[Any], _Value],
) -> dict[str, _Value]:
    """Return the metadata of unchanged files by path."""
    metadata: dict[str, _Value] = {}
    for info, state in zip(files, states, strict=True):
        try:
            before, packed = entries[info.path]
            if state and before == state:
                metadata[info.path] = unpack(packed)
        except _MALFORMED:
            continue
    return metadata


def _local(name: str) -> bytes | None:
    try:
        return (cache_folder() / name).read_bytes() if _is_private(cache_folder()) else None
    except OSError:
        return None


def _is_private(path: Path) -> bool:
    """Return whether this user owns a folder and nobody else may write into it."""
    status = path.lstat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _write(name: str, content: bytes) -> None:
    """Write a cache file atomically; after a failure, the next index takes as long as this one."""
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(folder):
            raise PermissionError(f"{folder} can be written by others")
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as temporary:
            written = Path(temporary, name)
            written.write_bytes(content)
            written.replace(folder / name)
        _prune(folder)
    except OSError as error:
        _log.info("the index of a data set is not cached: %s", error)


def _prune(folder: Path) -> None:
    """Delete the oldest cache files."""
    files = sorted(folder.glob("*.json.z"), key=lambda path: path.lstat().st_mtime, reverse=True)
    for path in files[MAX_CACHE_FILES:]:
        path.unlink(missing_ok=True)


# --- A first pass over data without an index --------------------------------------------------------------------------


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

MIN_PASS_S = 2.0  # of a pass, before its length is estimated
LONG_PASS_S = 10.0  # remaining time of a pass from which on Ray tasks are faster
_PARTS = 4  # tasks for each CPU of the cluster, so that all CPUs end at about the same time
_PART_ITEMS = 256


def first_pass(work: Callable[[_Item], _Result], items: Sequence[_Item], *, threads: int = 1) -> list[_Result]:
    """Return work(item) of each item, in order; a long pass continues as tasks of Ray.

    Args:
        work: picklable by value. The first error ends the pass.
        threads: of this process that call it at a time.

    Raises:
        TrainwrightError: as the work raised it.
    """
    begun_s, done, pending = time.monotonic(), list[_Result](), deque[Future[_Result]]()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="trainwright-pass")
    try:
        while len(done) < len(items):
            started, spent_s = len(done) + len(pending), time.monotonic() - begun_s
            is_long = done and spent_s > MIN_PASS_S and spent_s / len(done) * (len(items) - len(done)) > LONG_PASS_S
            if started < len(items) and is_long and ray_connected():
                done += [future.result() for future in pending]
                return done + run_as_ray_tasks(work, items[started:], threads)
            pending.extend(pool.submit(work, item) for item in items[started : len(done) + 2 * threads])
            done.append(pending.popleft().result())
    finally:
        pool.shutdown(cancel_futures=True)
    return done


def ray_connected() -> bool:
    """Connect to the Ray cluster of the run, if any, and return whether this process is connected to one."""
    connect = current_context().connect
    if connect is not None:
        connect()
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def run_as_ray_tasks(work: Callable[[_Item], _Result], items: Sequence[_Item], threads: int = 1) -> list[_Result]:
    """Return work(item) of each item from Ray tasks that are spread over the nodes, one for each CPU at a time.

    Each task calls `work` in `threads` threads. Tasks request no CPU, so that they run even if a job uses all CPUs.
    """
    import ray

    stored = ray.put(dumps(work))
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    cpus = max(int(resources.get("CPU", 1)), 1)
    size = min(max(len(items) // (_PARTS * cpus), 1), _PART_ITEMS)
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    task: Any = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(_part)
    running: dict[Any, int] = {}
    results: dict[int, list[_Result]] = {}
    for number, part in enumerate(parts):
        running[task.remote(stored, part, threads)] = number
        while len(running) >= cpus or (running and number == len(parts) - 1):
            (ended,), _ = ray.wait(list(running), num_returns=1)
            results[running.pop(ended)] = _result(ended)
    return [value for number in range(len(parts)) for value in results[number]]


def _result(ended: Any) -> list[Any]:
    import ray

    try:
        values: list[Any] | TrainwrightError = ray.get(ended)
    except ray.exceptions.RayError as error:
        raise DataError(
            "a task that passes over the data failed",
            where="Ray",
            remedy="install what the functions import on every node, and let every node see the files",
            detail=str(error),
        ) from error
    if isinstance(values, TrainwrightError):
        raise values
    return values


def _part(packed: bytes, items: Sequence[Any], threads: int) -> list[Any] | TrainwrightError:
    """Runs as a task of Ray."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="trainwright-pass")
    try:
        return list(pool.map(loads(packed), items))
    except TrainwrightError as error:
        return error
    finally:
        pool.shutdown(cancel_futures=True)
