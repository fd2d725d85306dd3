"""Files by path in a folder of this machine, or in an object store through the clients of obstore.

A write is whole or has no effect: a reader never sees a part of a file. The run log needs one more guarantee, which
every kind of store gives: when several writers `create` the same path, exactly one of them gets True.
"""

from __future__ import annotations

import errno
import os
import random
import secrets
import shutil
import time
import urllib.parse
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from trainwright.core import retry
from trainwright.core.errors import StorageError, StoreDown, nearest
from trainwright.core.retry import Backoff
from trainwright.storage.store_errors import MissingFile, classify_error, is_missing_file, storage_error_for

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig


CHUNK_BYTES, MIN_PIECE_BYTES = 16 << 20, 1 << 20
_READERS = 8
_ANY = 10_000  # retries: the time limit of a client is reached long before
_MEMORY: dict[str, MemoryStore] = {}


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long the operations of a store are retried."""

    connect_s: float = 5.0  # time limit of one connection attempt
    silence_s: float = 20.0  # time limit for the next bytes of one request
    request_s: float = 600.0  # time limit of one request, its data included
    total_s: float = 30.0  # a failed operation is not retried later than this after its start; until then it is
    # bytes per second. A large file gets the time of one part at this rate on top of `total_s`.
    slowest_bytes_s: float = 256 << 10


_QUICK_POLICY = RetryPolicy(connect_s=2.0, silence_s=3.0, request_s=3.0, total_s=4.0)
"""For operations whose result is of little use when it is late: probes and heartbeats."""


# The classes of backends make one attempt of each operation, and raise the errors of obstore and of the operating
# system. `Store` turns these into StorageErrors, and repeats what may succeed later.


class _LocalFolder:
    """A folder of this machine, which may be a network file system. It is created by the first write."""

    certain = True  # an unknown error of a write proves that nothing was written

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._client: LocalStore | None = None
        self._device = 0  # of the client's folder
        self._durable: set[Path] = set()  # folders whose names are on disk

    def reader(self) -> ObjectStore:
        """Return the client; for a missing folder an empty stand-in, so that reading creates nothing."""
        return self._writer() if self._folder.is_dir() else MemoryStore()

    bulk = reader

    def _writer(self) -> ObjectStore:
        """Return the client; create the folder. A new client is made where somebody deleted the folder.

        Raises OSError where its file system is not mounted any more: what is written below would be hidden later.
        """
        client = self._client
        if client is None or not self._folder.is_dir():
            above = next(folder for folder in self._folder.parents if folder.is_dir())
            if client is not None and above.stat().st_dev != self._device:
                raise OSError(errno.ESTALE, f"{self._folder} is gone, and another file system is there: is it mounted?")
            self._client = client = LocalStore(self._folder, mkdir=True, automatic_cleanup=True)
            self._device = self._folder.stat().st_dev
        return client

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
            try:
                _fsync(folder)
            except OSError as error:  # a folder above that may not be listed, or a file system that has no such call
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP):
                    raise
            if folder in self._durable or folder == self._folder.parent:
                break  # its own name was forced to disk before
            self._durable.add(folder)


class _ObjectStoreClients:
    """A bucket and prefix, or memory for tests. Three clients differ in how long they retry a request by themselves.

    Create-only writes are not retried by the client: after an unclear error `Store.create` reads the file back first.
    """

    certain = False

    def __init__(self, uri: str, endpoint: str, policy: RetryPolicy) -> None:
        limits_s = (policy.total_s, 0.0, policy.total_s + CHUNK_BYTES / policy.slowest_bytes_s)
        self._usual, self._once, self._bulk = (
            _connect_client(uri, endpoint, policy, retry_s=retry_s) for retry_s in limits_s
        )

    def reader(self) -> ObjectStore:
        return self._usual

    def bulk(self) -> ObjectStore:
        return self._bulk

    def get(self, path: str) -> bytes:
        """Read a whole file; a large one in ranges, each of which is retried for itself."""
        response = obstore.get(self._usual, path)
        size_bytes = response.meta["size"]
        if size_bytes <= CHUNK_BYTES:
            return response.bytes().to_bytes()
        with ThreadPoolExecutor(_READERS) as pool:
            ranges = [(start, min(start + CHUNK_BYTES, size_bytes)) for start in range(0, size_bytes, CHUNK_BYTES)]
            return b"".join(pool.map(lambda part: _read_range(self._bulk, path, *part), ranges))

    def put(self, path: str, pieces: Sequence[bytes | memoryview], *, sync: bool) -> None:
        _put(self._usual, self._bulk, path, pieces)

    def create(self, path: str, data: bytes) -> None:
        obstore.put(self._once, path, data, mode="create")

    def delete_folder(self, path: str) -> None:
        """Do nothing: an object store has no folders beside its files."""


# --- files ------------------------------------------------------------------------------------------------------------


def _read_range(client: ObjectStore, path: str, start: int, end: int) -> memoryview:
    return memoryview(obstore.get_range(client, path, start=start, end=end))


def _delete(backend: _LocalFolder | _ObjectStoreClients, paths: Sequence[str]) -> None:
    """Delete files; missing ones are no error."""
    client = backend.reader()
    try:
        obstore.delete(client, paths)
    except FileNotFoundError:
        for path in paths:
            try:
                obstore.delete(client, path)
            except FileNotFoundError as error:
                if not is_missing_file(error):
                    raise


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
    limits: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=policy.connect_s),
        "read_timeout": timedelta(seconds=policy.silence_s),
        "timeout": timedelta(seconds=policy.request_s),
    }
    first_s = retry.FIRST_PAUSE_S * random.SystemRandom().uniform(0.5, 1.5)  # a step seeds the global generator
    longest_s = retry.LONGEST_PAUSE_S
    retries: RetryConfig = {
        "max_retries": _ANY if retry_s else 0,
        "retry_timeout": timedelta(seconds=retry_s),
        "backoff": {"init_backoff": timedelta(seconds=first_s), "max_backoff": timedelta(seconds=longest_s), "base": 3},
    }
    options: dict[str, Any] = {"prefix": prefix or None, "client_options": limits, "retry_config": retries}
    if endpoint:
        options["endpoint"] = endpoint
    kinds: dict[str, type[S3Store | GCSStore | AzureStore]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    return kinds[scheme](bucket, **options)


# --- The store --------------------------------------------------------------------------------------------------------


_Value = TypeVar("_Value")
_READ_AHEAD = 3  # chunks


def open_store(uri: str) -> Store:
    """Open a store. Nothing is created or contacted yet.

    Args:
        uri: a folder (a path or `file://`), or `s3://`, `gs://`, `az://` with a bucket and a prefix. `memory://NAME`
            lives as long as the process, for tests. Credentials and endpoint come from environment variables such as
            `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_ENDPOINT_URL`, `AWS_REGION`.

    Raises:
        StorageError: the URI is not valid.
    """
    return Store(canonical_uri(uri))


class Store:
    """Files below one URI. Methods may be called from any thread and raise StorageError.

    Errors that may pass by themselves are retried with growing pauses for the time of the retry policy; then a
    StoreDown is raised.

    Paths are relative, with `/` between names, and cannot leave the store. A store pickles as its URI: the process that
    unpickles it opens the store again, with the credentials of its own environment.

    Attributes:
        uri: of the store, absolute, without secrets.
    """

    def __init__(self, uri: str, policy: RetryPolicy | None = None) -> None:
        self.uri = uri
        self._policy = policy or RetryPolicy()
        endpoint = _endpoint_of(uri.partition("://")[0])
        self._attempts = _Attempts(uri, endpoint, self._policy.total_s)
        with self._attempts.explained("cannot open the store", ""):
            self._backend: _LocalFolder | _ObjectStoreClients = (
                _ObjectStoreClients(uri, endpoint, self._policy) if "://" in uri else _LocalFolder(Path(uri))
            )

    def __reduce__(self) -> tuple[type[Store], tuple[str, RetryPolicy]]:
        return Store, (self.uri, self._policy)

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    def impatient(self) -> Store:
        """Return the same store with a retry policy that gives up within about ten seconds."""
        return Store(self.uri, _QUICK_POLICY)

    def uri_of(self, path: str) -> str:
        """Return the URI of a file, for messages."""
        return _joined(self.uri, path)

    # --- reading ------------------------------------------------------------------------------------------

    def get(self, path: str) -> bytes:
        """Read a whole file. Raises MissingFile (a StorageError) when there is none."""
        return self._attempts.repeat("cannot read", path, lambda: self._backend.get(_inside(self.uri, path)))

    def stream(self, path: str) -> Iterator[memoryview]:
        """Read a file in chunks of 16 MiB, in order; three are read ahead. Raises MissingFile."""
        size_bytes, chunk_bytes = self.size(path), CHUNK_BYTES
        if size_bytes <= chunk_bytes:
            yield memoryview(self.get(path))
            return
        waiting = deque[Future[memoryview]]()

        with ThreadPoolExecutor(_READ_AHEAD) as pool:
            for start in range(0, size_bytes, chunk_bytes):
                waiting.append(pool.submit(self.read_range, path, start, min(start + chunk_bytes, size_bytes)))
                if len(waiting) > _READ_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def read_range(self, path: str, start: int, end: int) -> memoryview:
        """Read bytes `start` to `end` of a file, `end` excluded. Raises MissingFile."""
        place = _inside(self.uri, path)
        return self._attempts.repeat("cannot read", path, lambda: _read_range(self._backend.bulk(), place, start, end))

    def find(self, path: str) -> bytes | None:
        """Read a whole file; None when there is none."""
        try:
            return self.get(path)
        except MissingFile:
            return None

    def size(self, path: str) -> int:
        """Return the size of a file in bytes. Raises MissingFile."""
        return self._head(path)["size"]

    def modified_s(self, path: str) -> float:
        """Return when a file was last written, in seconds since the epoch on the store's clock. Raises MissingFile."""
        return self._head(path)["last_modified"].timestamp()

    def _head(self, path: str) -> obstore.ObjectMeta:
        return self._attempts.repeat(
            "cannot read", path, lambda: obstore.head(self._backend.reader(), _inside(self.uri, path))
        )

    def exists(self, path: str) -> bool:
        """Return whether there is such a file."""
        try:
            return self.size(path) >= 0
        except MissingFile:
            return False

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[tuple[str, int]]:
        """Paths and sizes of the files below the folder `prefix`, at any depth, in order; only those after `after`."""
        folder = _inside(self.uri, prefix.rstrip("/")) if prefix else None
        items = self._attempts.repeat(
            "cannot list", prefix, lambda: obstore.list(self._backend.reader(), folder, offset=after).collect()
        )
        return iter(sorted((item["path"], item["size"]) for item in items))

    def folders(self, prefix: str = "") -> tuple[str, ...]:
        """Names of the folders directly below the folder `prefix`, in order."""
        folder = _inside(self.uri, prefix.rstrip("/")) if prefix else None
        listing = self._attempts.repeat(
            "cannot list", prefix, lambda: obstore.list_with_delimiter(self._backend.reader(), folder)
        )
        return tuple(sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in listing["common_prefixes"]))

    # --- writing ------------------------------------------------------------------------------------------

    def put(self, path: str, *pieces: bytes | memoryview, sync: bool = True) -> None:
        """Write a whole file and replace an older one.

        Args:
            pieces: of the file, one after the other, of any size; a memoryview must be one-dimensional bytes. Large
                pieces are not copied.
            sync: in a folder, return only when the data is on disk.
        """
        self._attempts.repeat(
            "cannot write", path, lambda: self._backend.put(_inside(self.uri, path), pieces, sync=sync)
        )

    def create(self, path: str, data: bytes) -> bool:
        """Write a file that does not exist yet. Returns False, and changes nothing, when it exists.

        After an error that leaves open whether the file was written, the file is read back and compared; from then on
        an existing file may be this writer's own. Racing writers therefore need different data, such as a random
        number, so that each recognizes its own file.
        """
        _inside(self.uri, path)
        pauses, in_doubt = Backoff(self._policy.total_s), False
        while True:
            try:
                self._backend.create(path, data)
                return True
            except (BaseError, OSError) as error:
                fault = storage_error_for(error, doing="cannot write", where=self._attempts.location(path))
                exists, cause = isinstance(error, AlreadyExistsError), classify_error(error)
                hopeless = cause.certain or (self._backend.certain and not cause.passing)
                if hopeless and not exists:
                    raise fault from None
            in_doubt = in_doubt or not exists
            try:
                existing = self.find(path)  # a store may report a conflict with a write that failed in the end
            except StorageError:
                raise fault from None
            if existing is not None:
                return in_doubt and existing == data
            if not pauses.wait():
                raise fault from None

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; missing ones are no error."""
        inside_paths = [_inside(self.uri, path) for path in paths]
        for start in range(0, len(inside_paths), 1000):
            batch = inside_paths[start : start + 1000]
            self._attempts.repeat("cannot delete", batch[0], partial(_delete, self._backend, batch))

    def delete_folder(self, prefix: str) -> None:
        """Delete a folder with everything in it, also with what killed writers left incomplete."""
        self.delete(path for path, _ in self.list(prefix))
        with self._attempts.explained("cannot delete", prefix):
            self._backend.delete_folder(_inside(self.uri, prefix))

    def check(self) -> None:
        """Test within about ten seconds that the store can write, read, delete, and create only once."""
        try:
            created_once, _ = probe_store(self.impatient())
        except StorageError as error:
            raise StorageError(error.what, where=self._attempts.location(""), remedy=error.remedy) from None
        if not created_once:
            raise StorageError(
                "a create-only write of this store did not happen exactly once, or could not be read back",
                where=self._attempts.location(""),
                remedy="use a store with conditional writes (If-None-Match), or a local folder",
            )


def _inside(uri: str, path: str) -> str:
    """Return the path; raise StorageError where it leaves the store."""
    names = path.split("/")
    if not path.isprintable() or "\\" in path or any(name in ("", ".", "..") for name in names):
        raise StorageError(
            f"the path {path!r} is not inside the store",
            where=uri,
            remedy="use relative names with '/' between them, without '..', '\\' and empty names",
        )
    return path


def probe_store(store: Store) -> tuple[bool, tuple[float, float, float]]:
    """Create a small file twice, read it and delete it.

    Returns whether it was created once, and the seconds of writing, reading and deleting.
    """
    path, start_s = f"probe-{uuid.uuid4().hex}", time.perf_counter()
    created, created_s = store.create(path, b"probe"), time.perf_counter()
    try:
        again, again_s = store.create(path, b"another probe"), time.perf_counter()
        read, read_s = store.find(path), time.perf_counter()
    except StorageError:
        with suppress(StorageError):  # the first error is reported
            store.delete([path])
        raise
    store.delete([path])
    seconds = (created_s - start_s, read_s - again_s, time.perf_counter() - read_s)
    return created and not again and read == b"probe", seconds


class _Attempts:
    """Repeats operations whose errors may pass, and turns errors into StorageErrors.

    Args:
        endpoint: the address from the environment; empty for the provider's own.
    """

    def __init__(self, uri: str, endpoint: str, total_s: float) -> None:
        self._uri, self._endpoint, self._total_s = uri, endpoint, total_s

    def location(self, path: str) -> str:
        """Return where a file is, for error messages."""
        return _joined(self._uri, path) + (f" at {self._endpoint}" if self._endpoint else "")

    def repeat(self, doing: str, path: str, action: Callable[[], _Value]) -> _Value:
        """Return the result of an action, which is repeated while its errors may pass.

        The clients of object stores retry too, but neither deletions nor requests whose answer was cut off.
        """
        pauses = Backoff(self._total_s)
        while True:
            try:
                with self.explained(doing, path):
                    return action()
            except StoreDown:
                if not pauses.wait():
                    raise

    @contextmanager
    def explained(self, doing: str, path: str) -> Iterator[None]:
        """Turn errors of obstore and of the system into StorageErrors. Their texts may hold secrets: `from None`."""
        try:
            yield
        except StorageError:
            raise
        except (BaseError, OSError, ValueError) as error:
            where = self.location(path)
            if doing != "cannot write" and path and is_missing_file(error):
                raise MissingFile("there is no such file", where=where, remedy="check the path") from None
            raise storage_error_for(error, doing=doing, where=where) from None


# --- URIs -------------------------------------------------------------------------------------------------------------


_SCHEMES = ("s3", "gs", "az", "file", "memory")
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gs": (),
}


def _joined(uri: str, path: str) -> str:
    return f"{uri.rstrip('/')}/{path}" if path else uri


def canonical_uri(uri: str) -> str:
    """Return a storage URI as an absolute path, or as scheme, bucket and prefix. Raises StorageError."""
    scheme, found, rest = uri.partition("://")
    if not found:
        kind, colon, path = uri.partition(":")
        if kind not in _SCHEMES:
            kind, colon, path = uri.partition("//")  # s3//bucket
        if colon and kind in _SCHEMES:
            meant = path if kind == "file" else f"{kind}://{path.lstrip('/')}"
            raise StorageError(f"{uri!r} is not a storage URI", remedy=f"write {meant}")
        return _absolute_folder(uri)
    if scheme not in _SCHEMES:
        raise StorageError(
            f"unknown storage scheme {scheme}://: {nearest(scheme, _SCHEMES)}",
            remedy="give a folder, s3://, gs:// or az:// as storage=",
        )
    if scheme == "file":
        return _absolute_folder(urllib.parse.unquote(rest))
    bucket, _, prefix = rest.partition("/")
    if not bucket or set(rest) & set("@?#"):
        raise StorageError(
            f"{scheme}:// takes a bucket and optionally a prefix, nothing else",
            remedy=f"write {scheme}://BUCKET/PREFIX; put credentials into environment variables",
        )
    names = [name for name in prefix.split("/") if name]
    if ".." in names:
        raise StorageError(f"{scheme}://{bucket} has '..' in its prefix", remedy="write the prefix without '..'")
    return f"{scheme}://{'/'.join([bucket, *names])}"


def _absolute_folder(path: str) -> str:
    if not path.strip():
        raise StorageError("storage= is empty", remedy="give a folder, s3://, gs:// or az://")
    return os.path.abspath(Path(path).expanduser())


def _endpoint_of(scheme: str) -> str:
    """Return the endpoint that the environment sets for a kind of store; empty for the provider's own."""
    for name in _ENDPOINTS.get(scheme, ()):
        value = os.environ.get(name, "")
        if not value:
            continue
        parts = urllib.parse.urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise StorageError(
                f"{name} is not a valid endpoint address",
                remedy="write it as https://HOST:PORT (or http://), without credentials",
            )
        return value
    return ""
