"""How a store reaches its medium: a folder of this machine, or an object store through obstore's clients.

`open_backend` returns a `_LocalFolder` or `_ObjectStoreClients`. Their methods do one attempt and raise the errors of
obstore and of the operating system; `Store` turns these into StorageErrors and repeats what may succeed later.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from trainwright.core import retry
from trainwright.storage.store_errors import is_missing_file

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

CHUNK_BYTES, MIN_PIECE_BYTES = 16 << 20, 1 << 20
_READERS = 8
_ANY = 10_000  # retries: the time limit of a client is reached long before
_MEMORY: dict[str, MemoryStore] = {}


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long the operations of a store are retried.

    Attributes:
        connect_s: time limit of one connection attempt.
        silence_s: time limit for the next bytes of one request.
        request_s: time limit of one request, its data included.
        total_s: a failed operation is not retried later than this after its start; until then it is.
        slowest_bytes_s: bytes per second. A large file gets the time of one part at this rate on top of `total_s`.
    """

    connect_s: float = 5.0
    silence_s: float = 20.0
    request_s: float = 600.0
    total_s: float = 30.0
    slowest_bytes_s: float = 256 << 10


QUICK_POLICY = RetryPolicy(connect_s=2.0, silence_s=3.0, request_s=3.0, total_s=4.0)
"""For operations whose result is of little use when it is late: probes and heartbeats."""


def open_backend(uri: str, endpoint: str, policy: RetryPolicy) -> StoreBackend:
    """Return the backend of a canonical URI. Nothing is created or contacted yet."""
    return _ObjectStoreClients(uri, endpoint, policy) if "://" in uri else _LocalFolder(Path(uri))


class StoreBackend(ABC):
    """One attempt of each operation on a medium.

    Attributes:
        certain: whether an unknown error of a write proves that nothing was written.
    """

    certain = False

    @abstractmethod
    def reader(self) -> ObjectStore:
        """Return the client that reads, lists and deletes."""

    @abstractmethod
    def bulk(self, *, write: bool = False) -> ObjectStore:
        """Return the client for the parts of large files."""

    @abstractmethod
    def get(self, path: str) -> bytes:
        """Read a whole file."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> None:
        """Write a file that does not exist yet. Raises AlreadyExistsError."""

    @abstractmethod
    def put(self, path: str, pieces: Sequence[bytes | memoryview], *, sync: bool) -> None:
        """Write a whole file; with `sync` return when it is on disk."""

    def read_range(self, path: str, start: int, end: int) -> memoryview:
        """Read bytes `start` to `end`, `end` excluded."""
        return memoryview(obstore.get_range(self.bulk(), path, start=start, end=end))

    def delete(self, paths: Sequence[str]) -> None:
        """Delete files; missing ones are no error."""
        try:
            obstore.delete(self.reader(), paths)
        except FileNotFoundError:
            for path in paths:
                try:
                    obstore.delete(self.reader(), path)
                except FileNotFoundError as error:
                    if not is_missing_file(error):
                        raise

    @abstractmethod
    def delete_folder(self, path: str) -> None:
        """Remove what is left of a folder whose listed files were deleted."""


class _LocalFolder(StoreBackend):
    """A folder of this machine, which may be a network file system. It is created by the first write."""

    certain = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._client: LocalStore | None = None
        self._durable: set[Path] = set()  # folders whose names are on disk

    def reader(self) -> ObjectStore:
        """Return the client; for a missing folder an empty stand-in, so that reading creates nothing."""
        if self._client is None and not self._folder.is_dir():
            return MemoryStore()
        return self._writer()

    def _writer(self) -> ObjectStore:
        """Return the client; create the folder. A new client is made where somebody deleted the folder."""
        client = self._client
        if client is None or not self._folder.is_dir():
            self._client = client = LocalStore(self._folder, mkdir=True, automatic_cleanup=True)
        return client

    def bulk(self, *, write: bool = False) -> ObjectStore:
        """Return the same client."""
        return self._writer() if write else self.reader()

    def get(self, path: str) -> bytes:
        """Read a whole file."""
        return obstore.get(self.reader(), path).bytes().to_bytes()

    def put(self, path: str, pieces: Sequence[bytes | memoryview], *, sync: bool) -> None:
        """Write a whole file; with `sync` return when it is on disk."""
        _put(self._writer(), self._writer(), path, pieces)
        if sync:
            self._sync(path)

    def create(self, path: str, data: bytes) -> None:
        """Write a file that does not exist yet. Raises AlreadyExistsError."""
        _create_by_link(self._folder / path, data)
        self._sync(path)

    def delete_folder(self, path: str) -> None:
        """Remove a folder with what killed writers left in it."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self._folder / path)

    def _sync(self, path: str) -> None:
        """Force a file and its name to disk: a file that the run log names must survive a power cut."""
        place = self._folder / path
        _fsync(place)
        for folder in place.parents:
            _fsync(folder)
            if folder in self._durable or folder == self._folder.parent:
                break  # its own name was forced to disk before
            self._durable.add(folder)


class _ObjectStoreClients(StoreBackend):
    """A bucket and prefix, or memory for tests. Three clients differ in how long they retry a request by themselves.

    Create-only writes are not retried by the client: after an unclear error `Store.create` reads the file back first.
    """

    def __init__(self, uri: str, endpoint: str, policy: RetryPolicy) -> None:
        limits_s = (policy.total_s, 0.0, policy.total_s + CHUNK_BYTES / policy.slowest_bytes_s)
        self._usual, self._once, self._bulk = (
            _connect_client(uri, endpoint, policy, retry_s=retry_s) for retry_s in limits_s
        )

    def reader(self) -> ObjectStore:
        """Return the usual client."""
        return self._usual

    def bulk(self, *, write: bool = False) -> ObjectStore:
        """Return the client that retries longest."""
        return self._bulk

    def get(self, path: str) -> bytes:
        """Read a whole file; a large one in ranges, each of which is retried for itself."""
        found = obstore.get(self._usual, path)
        size_bytes = found.meta["size"]
        if size_bytes <= CHUNK_BYTES:
            return found.bytes().to_bytes()
        with ThreadPoolExecutor(_READERS) as pool:
            starts = range(0, size_bytes, CHUNK_BYTES)
            ends = [min(start + CHUNK_BYTES, size_bytes) for start in starts]
            return b"".join(pool.map(self.read_range, [path] * len(ends), starts, ends))

    def put(self, path: str, pieces: Sequence[bytes | memoryview], *, sync: bool) -> None:
        """Write a whole file."""
        _put(self._usual, self._bulk, path, pieces)

    def create(self, path: str, data: bytes) -> None:
        """Write a file that does not exist yet. Raises AlreadyExistsError."""
        obstore.put(self._once, path, data, mode="create")

    def delete_folder(self, path: str) -> None:
        """Do nothing: an object store has no folders beside its files."""


# --- files ------------------------------------------------------------------------------------------------------------


def _put(client: ObjectStore, bulk: ObjectStore, path: str, pieces: Sequence[bytes | memoryview]) -> None:
    """Write a file of pieces; a small one with `client`, a large one in parts with `bulk`."""
    if sum(map(len, pieces)) <= CHUNK_BYTES:
        obstore.put(client, path, b"".join(pieces), chunk_size=CHUNK_BYTES)
    else:
        obstore.put(bulk, path, _chunks(pieces), chunk_size=CHUNK_BYTES)


def _create_by_link(place: Path, data: bytes) -> None:
    """Create a file that is whole on disk before it has its name. Raises AlreadyExistsError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    unnamed = place.with_name(f"{place.name}#{secrets.randbelow(10**9)}")  # obstore does not list such names
    try:
        with unnamed.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(unnamed, place)
        except FileExistsError:
            raise AlreadyExistsError(f"{place} exists") from None
    finally:
        unnamed.unlink(missing_ok=True)


def _fsync(place: Path) -> None:
    number = os.open(place, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _chunks(pieces: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the same bytes in portions of a size that suits a client: large pieces divided, small ones joined."""
    joined = bytearray()
    for piece in pieces:
        if len(piece) < MIN_PIECE_BYTES:
            joined += piece
        elif joined:
            yield bytes(joined)
            joined.clear()
        if len(joined) >= MIN_PIECE_BYTES:
            yield bytes(joined)
            joined.clear()
        if len(piece) >= MIN_PIECE_BYTES:
            yield from (memoryview(piece)[start : start + CHUNK_BYTES] for start in range(0, len(piece), CHUNK_BYTES))
    yield bytes(joined)


# --- clients ----------------------------------------------------------------------------------------------------------


def _connect_client(uri: str, endpoint: str, policy: RetryPolicy, *, retry_s: float) -> ObjectStore:
    """Return a client that retries a failed request for so many seconds; with 0 it does not retry.

    It retries after server errors, throttling, timeouts and lost connections. Its pauses are drawn between a first one,
    which differs from client to client, and three times the one before (object_store's decorrelated jitter).
    """
    scheme, _, rest = uri.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme == "memory":
        return _MEMORY.setdefault(uri, MemoryStore())
    options: dict[str, Any] = {
        "prefix": prefix or None,
        "client_options": _client_options(policy, allow_http=endpoint.startswith("http://")),
        "retry_config": _retry_config(retry_s),
    }
    if endpoint:
        options["endpoint"] = endpoint
    kinds: dict[str, type[S3Store | GCSStore | AzureStore]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    return kinds[scheme](bucket, **options)


def _client_options(policy: RetryPolicy, *, allow_http: bool) -> ClientConfig:
    return {
        "allow_http": allow_http,
        "connect_timeout": timedelta(seconds=policy.connect_s),
        "read_timeout": timedelta(seconds=policy.silence_s),
        "timeout": timedelta(seconds=policy.request_s),
    }


def _retry_config(retry_s: float) -> RetryConfig:
    """Limit retries by time alone: short pauses would use up any number of retries long before."""
    first_s = retry.FIRST_PAUSE_S * random.SystemRandom().uniform(0.5, 1.5)  # a step seeds the global generator
    return {
        "max_retries": _ANY if retry_s else 0,
        "retry_timeout": timedelta(seconds=retry_s),
        "backoff": {
            "init_backoff": timedelta(seconds=first_s),
            "max_backoff": timedelta(seconds=retry.LONGEST_PAUSE_S),
            "base": 3,
        },
    }
