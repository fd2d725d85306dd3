"""The store: files by path in a folder or in an object store, over obstore.

Writes are whole or not at all: a reader never sees a part of a file. `create` is the one primitive that the run's log
needs, and every kind of store has it: of several writers of one path exactly one gets True.

Full jitter draws each pause from 0 to a bound that doubles, so that a thousand workers that were turned away together
do not come back together (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
"""

from __future__ import annotations

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

from trainwright.core.errors import StorageError, StoreDown, nearest
from trainwright.storage.store_errors import MissingFile, classify_error, is_missing_file, storage_error_for

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

__all__ = ["MissingFile", "RetryPolicy", "Store", "StoreDown", "open_store"]

_Value = TypeVar("_Value")

CHUNK_BYTES, MIN_PIECE_BYTES = 16 << 20, 1 << 20
_READERS, _AHEAD = 8, 3


def open_store(uri: str) -> Store:
    """Open a store; nothing is created or contacted yet.

    Args:
        uri: a folder (a path or `file://`), or `s3://`, `gs://`, `az://` with a bucket and a prefix. `memory://NAME`
            lives as long as the process, for tests. Credentials and endpoint come from the environment:
            `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_ENDPOINT_URL`, `AWS_REGION` and their like.

    Raises:
        StorageError: the URI names no store.
    """
    return Store(canonical_uri(uri))


class Store:
    """Files below one URI. Methods may be called from any thread and raise StorageError.

    What fails in a way that may pass by itself is tried again, with growing pauses, for as long as the patience says;
    then the error is a StoreDown.

    Paths are relative, with `/` between names, and cannot leave the store. A store pickles as its URI alone: another
    process opens it anew, with the credentials of its own environment.

    Attributes:
        uri: of the store, absolute, without secrets.
    """

    def __init__(self, uri: str, patience: RetryPolicy | None = None) -> None:
        self.uri = uri
        self._patience = patience or RetryPolicy()
        self._folder = None if "://" in uri else Path(uri)
        self._endpoint = _endpoint_of(uri.partition("://")[0])
        self._client: ObjectStore | None = None
        self._once: ObjectStore | None = None
        self._bulk: ObjectStore | None = None
        self._durable: set[Path] = set()  # folders whose names are on disk
        if self._folder is None:
            with self._explained("cannot open the store", ""):
                self._client, self._once, self._bulk = (self._connect(tries_s) for tries_s in self._tries_s)

    def __reduce__(self) -> tuple[type[Store], tuple[str, RetryPolicy]]:
        return Store, (self.uri, self._patience)

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    def impatient(self) -> Store:
        """The same store, which gives up within about ten seconds."""
        return Store(self.uri, _QUICK_POLICY)

    def uri_of(self, path: str) -> str:
        """Where a file is, for people."""
        return f"{self.uri.rstrip('/')}/{path}" if path else self.uri

    # --- reading ------------------------------------------------------------------------------------------

    def get(self, path: str) -> bytes:
        """A whole file. Raises MissingFile (a StorageError) when there is none."""
        return self._tried("cannot read", path, lambda: self._get(self._inside(path)))

    def stream(self, path: str) -> Iterator[memoryview]:
        """A file in portions of 16 MiB, in order; three are read ahead. Raises MissingFile."""
        size_bytes = self.size(path)
        if size_bytes <= CHUNK_BYTES:
            yield memoryview(self.get(path))
            return
        client, waiting = self._bulk or self._reader(), deque[Future[memoryview]]()

        def read(start: int) -> memoryview:
            end = min(start + CHUNK_BYTES, size_bytes)
            found = self._tried("cannot read", path, lambda: obstore.get_range(client, path, start=start, end=end))
            return memoryview(found)

        with ThreadPoolExecutor(_AHEAD) as pool:
            for start in range(0, size_bytes, CHUNK_BYTES):
                waiting.append(pool.submit(read, start))
                if len(waiting) > _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def find(self, path: str) -> bytes | None:
        """A whole file, or None when there is none."""
        try:
            return self.get(path)
        except MissingFile:
            return None

    def size(self, path: str) -> int:
        """Size of a file in bytes. Raises MissingFile."""
        return self._tried("cannot read", path, lambda: obstore.head(self._reader(), self._inside(path))["size"])

    def modified_s(self, path: str) -> float:
        """When a file was written last, seconds since the epoch on the store's clock. Raises MissingFile."""
        head = self._tried("cannot read", path, lambda: obstore.head(self._reader(), self._inside(path)))
        return head["last_modified"].timestamp()

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        try:
            return self.size(path) >= 0
        except MissingFile:
            return False

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[tuple[str, int]]:
        """Paths and sizes of the files below the folder `prefix`, at any depth, in order; only those after `after`."""
        folder = self._inside(prefix.rstrip("/")) if prefix else None
        found = self._tried("cannot list", prefix, lambda: obstore.list(self._reader(), folder, offset=after).collect())
        return iter(sorted((item["path"], item["size"]) for item in found))

    def folders(self, prefix: str = "") -> tuple[str, ...]:
        """Names of the folders right below the folder `prefix`, in order."""
        folder = self._inside(prefix.rstrip("/")) if prefix else None
        found = self._tried("cannot list", prefix, lambda: obstore.list_with_delimiter(self._reader(), folder))
        return tuple(sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found["common_prefixes"]))

    # --- writing ------------------------------------------------------------------------------------------

    def put(self, path: str, *pieces: bytes | memoryview, sync: bool = True) -> None:
        """Write a whole file, over an older one.

        Args:
            pieces: of it, one after the other, of any size; a memoryview must be one-dimensional bytes. They are not
                joined, unless they are small.
            sync: in a folder, come back only when the disk has it.
        """
        small = sum(map(len, pieces)) <= CHUNK_BYTES

        def write() -> None:
            client = self._writer() if small else self._bulk or self._writer()
            data = b"".join(pieces) if small else _chunks(pieces)
            obstore.put(client, self._inside(path), data, chunk_size=CHUNK_BYTES)
            if sync:
                self._sync(path)

        self._tried("cannot write", path, write)

    def create(self, path: str, data: bytes) -> bool:
        """Write a file that is not there yet; False when it is, then nothing is changed.

        After an error that leaves open whether the write happened, the file is read back and compared, and from then on
        a file that is there may be our own. Writers that race need data of their own, such as a random number, so that
        each can tell its own.
        """
        self._inside(path)
        pauses, doubt = Backoff(self._patience.total_s), False
        while True:
            try:
                return self._create_once(path, data)
            except (BaseError, OSError) as error:
                fault = storage_error_for(error, doing="cannot write", where=self._place(path))
                taken, cause = isinstance(error, AlreadyExistsError), classify_error(error)
                hopeless = cause.certain or (self._folder is not None and not cause.passing)
                if hopeless and not taken:
                    raise fault from None
            doubt = doubt or not taken
            stored = self._read_back(path, fault)  # a conflict may be told of a write that came to nothing
            if stored is not None:
                return doubt and stored == data
            if not pauses.wait():
                raise fault from None

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; those that are not there are no error."""
        wanted = [self._inside(path) for path in paths]
        for start in range(0, len(wanted), 1000):
            batch = wanted[start : start + 1000]
            self._tried("cannot delete", batch[0], partial(self._delete, batch))

    def delete_folder(self, prefix: str) -> None:
        """Delete a folder with all that is in it, also what killed writers left half written there."""
        self.delete(path for path, _ in self.list(prefix))
        if self._folder is not None:
            with self._explained("cannot delete", prefix), suppress(FileNotFoundError):
                shutil.rmtree(self._folder / self._inside(prefix))

    def check(self) -> None:
        """Prove within about ten seconds that the store can be written, read, deleted from and created in only once."""
        try:
            sound = self.impatient()._probe()
        except StorageError as error:
            raise StorageError(error.what, where=self._place(""), remedy=error.remedy) from None
        if not sound:
            raise StorageError(
                "the store does not keep its promises: a create-only write must happen once and be read back",
                where=self._place(""),
                remedy="use a store with conditional writes (If-None-Match), or a local folder",
            )

    # --- inside -------------------------------------------------------------------------------------------

    def _probe(self) -> bool:
        path = f"probe-{uuid.uuid4().hex}"
        created = self.create(path, b"probe")
        again = self.create(path, b"another probe")
        read = self.find(path)
        self.delete([path])
        return created and not again and read == b"probe"

    def _create_once(self, path: str, data: bytes) -> bool:
        if self._folder is None:
            obstore.put(self._once or self._writer(), path, data, mode="create")
        else:
            _create_by_link(self._folder / path, data)
            self._sync(path)
        return True

    def _get(self, path: str) -> bytes:
        """A file; one of several parts in ranges, each of which is tried again for itself."""
        found = obstore.get(self._reader(), path)
        size_bytes = found.meta["size"]
        if self._bulk is None or size_bytes <= CHUNK_BYTES:
            return found.bytes().to_bytes()
        client, starts = self._bulk, range(0, size_bytes, CHUNK_BYTES)

        def read(start: int) -> memoryview:
            end = min(start + CHUNK_BYTES, size_bytes)
            return memoryview(obstore.get_range(client, path, start=start, end=end))

        with ThreadPoolExecutor(_READERS) as pool:
            return b"".join(pool.map(read, starts))

    def _read_back(self, path: str, fault: StorageError) -> bytes | None:
        """What a doubtful write left; the fault that made it doubtful when that cannot be known."""
        try:
            return self.find(path)
        except StorageError:
            raise fault from None

    def _delete(self, paths: Sequence[str]) -> None:
        try:
            obstore.delete(self._reader(), paths)
        except FileNotFoundError:
            for path in paths:
                if self.exists(path):
                    obstore.delete(self._reader(), path)

    def _sync(self, path: str) -> None:
        """Force a file of a folder and its name to disk: what the log names must outlive a power cut."""
        if self._folder is None:
            return
        place = self._folder / path
        _fsync(place)
        for folder in place.parents:
            _fsync(folder)
            if folder in self._durable or folder == self._folder.parent:
                break  # its own name was forced to disk before
            self._durable.add(folder)

    @property
    def _tries_s(self) -> tuple[float, float, float]:
        """For how long the three clients try: the usual one, the one of creates, the one of large files."""
        total_s = self._patience.total_s
        return total_s, 0.0, total_s + CHUNK_BYTES / self._patience.slowest_bytes_s

    def _connect(self, tries_s: float) -> ObjectStore:
        return _connect_client(self.uri, self._endpoint, self._patience, tries_s=tries_s)

    def _reader(self) -> ObjectStore:
        """The client; for a folder that does not exist yet an empty stand-in, so that reading creates nothing."""
        if self._client is None and self._folder is not None and not self._folder.is_dir():
            return MemoryStore()
        return self._writer()

    def _writer(self) -> ObjectStore:
        """The client; creates the folder. Made anew when somebody deleted the folder."""
        client = self._client
        if client is None or (self._folder is not None and not self._folder.is_dir()):
            self._client = client = LocalStore(self._folder, mkdir=True, automatic_cleanup=True)
        return client

    def _place(self, path: str) -> str:
        return self.uri_of(path) + (f" at {self._endpoint}" if self._endpoint else "")

    def _inside(self, path: str) -> str:
        names = path.split("/")
        if not path.isprintable() or "\\" in path or any(name in ("", ".", "..") for name in names):
            raise StorageError(
                f"the path {path!r} is not inside the store",
                where=self.uri,
                remedy="use relative names with '/' between them, without '..', '\\' and empty names",
            )
        return path

    def _tried(self, doing: str, path: str, action: Callable[[], _Value]) -> _Value:
        """What an action gives, which may be done again: after faults that pass, and that the client did not outlast.

        The client does not itself repeat a request whose answer broke off, or a deletion.
        """
        pauses = Backoff(self._patience.total_s)
        while True:
            try:
                with self._explained(doing, path):
                    return action()
            except StoreDown:
                if not pauses.wait():
                    raise

    @contextmanager
    def _explained(self, doing: str, path: str) -> Iterator[None]:
        """Turn errors of obstore and of the system into StorageErrors. Their texts may hold secrets: `from None`."""
        try:
            yield
        except StorageError:
            raise
        except (BaseError, OSError, ValueError) as error:
            where = self._place(path)
            if doing != "cannot write" and path and is_missing_file(error):
                raise MissingFile("there is no such file", where=where, remedy="check the path") from None
            raise storage_error_for(error, doing=doing, where=where) from None


def _create_by_link(place: Path, data: bytes) -> None:
    """Create a file that is whole on disk before it has its name. Raises AlreadyExistsError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    unnamed = place.with_name(f"{place.name}#{secrets.randbelow(10**9)}")  # which obstore does not list
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
    """The same bytes in portions that a client takes up well: large pieces cut up, small ones joined."""
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


# --- How long to try when a store fails, and the pauses in between ----------------------------------------------------


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 4.0
_unseeded_random = random.SystemRandom().random  # a step seeds the global generator


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long to try.

    Attributes:
        connect_s: for one connection.
        silence_s: for the next bytes of one request.
        request_s: for one whole request, its data included.
        total_s: after which an operation that fails is not tried again; until then it is, however often.
        slowest_bytes_s: a file of several parts is given the time that a part takes at this rate on top of `total_s`.
    """

    connect_s: float = 5.0
    silence_s: float = 20.0
    request_s: float = 600.0
    total_s: float = 30.0
    slowest_bytes_s: float = 256 << 10


_QUICK_POLICY = RetryPolicy(connect_s=2.0, silence_s=3.0, request_s=3.0, total_s=4.0)
"""For what is worth little when it comes late: probes and heartbeats."""


class Backoff:
    """The pauses of one operation; its time runs from here on.

    Args:
        total_s: no pause ends later than this.
        clock: seconds, from any origin.
        sleep: waits some seconds.
        jitter: numbers in [0, 1).
    """

    def __init__(
        self,
        total_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = _unseeded_random,
    ) -> None:
        self._clock, self._sleep, self._jitter = clock, sleep, jitter
        self._until_s, self._bound_s = clock() + total_s, FIRST_PAUSE_S

    def wait(self) -> bool:
        """Pause before the next attempt; False, at once, when there is to be none."""
        pause_s = self._bound_s * self._jitter()
        if self._clock() + pause_s > self._until_s:
            return False
        self._sleep(pause_s)
        self._bound_s = min(2 * self._bound_s, LONGEST_PAUSE_S)
        return True


# --- Where a store is and how it is reached ---------------------------------------------------------------------------


_SCHEMES = ("s3", "gs", "az", "file", "memory")
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gs": (),
}
_ANY = 10_000  # retries, which is more than there is time for
_MEMORY: dict[str, MemoryStore] = {}


def canonical_uri(uri: str) -> str:
    """An absolute path, or a URI of scheme, bucket and prefix."""
    scheme, found, rest = uri.partition("://")
    if not found:
        return _absolute_folder(uri)
    if scheme not in _SCHEMES:
        raise StorageError(
            f"{scheme}:// is no store: {nearest(scheme, _SCHEMES)}",
            remedy="give a folder, s3://, gs:// or az:// as storage=",
        )
    if scheme == "file":
        return _absolute_folder(urllib.parse.unquote(rest))
    bucket, _, prefix = rest.partition("/")
    if not bucket or set(rest) & set("@?#"):
        raise StorageError(
            f"{scheme}:// needs a bucket and may have a prefix, nothing else",
            remedy=f"write {scheme}://BUCKET/PREFIX; credentials belong into environment variables",
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
    """The address that the environment gives for a kind of store; empty for the provider's own."""
    for name in _ENDPOINTS.get(scheme, ()):
        value = os.environ.get(name, "")
        if not value:
            continue
        parts = urllib.parse.urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise StorageError(
                f"{name} is no address of a store",
                remedy="write it as https://HOST:PORT (or http://), without credentials",
            )
        return value
    return ""


def _connect_client(uri: str, endpoint: str, patience: RetryPolicy, *, tries_s: float) -> ObjectStore:
    """A client that repeats a failed request for so many seconds; with 0 it tries once.

    It does so after server errors, throttling, timeouts and lost connections. Its pauses are drawn between a first one,
    which differs from client to client, and three times the one before (object_store's decorrelated jitter).
    """
    scheme, _, rest = uri.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme == "memory":
        return _MEMORY.setdefault(uri, MemoryStore())
    options: dict[str, Any] = {
        "prefix": prefix or None,
        "client_options": _client_options(patience, allow_http=endpoint.startswith("http://")),
        "retry_config": _retries(tries_s),
    }
    if endpoint:
        options["endpoint"] = endpoint
    kinds: dict[str, type[S3Store | GCSStore | AzureStore]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    return kinds[scheme](bucket, **options)


def _client_options(patience: RetryPolicy, *, allow_http: bool) -> ClientConfig:
    return {
        "allow_http": allow_http,
        "connect_timeout": timedelta(seconds=patience.connect_s),
        "read_timeout": timedelta(seconds=patience.silence_s),
        "timeout": timedelta(seconds=patience.request_s),
    }


def _retries(tries_s: float) -> RetryConfig:
    """Time is the only limit: any number of tries would be used up by short pauses long before."""
    first_s = FIRST_PAUSE_S * random.SystemRandom().uniform(0.5, 1.5)  # a step seeds the global generator
    return {
        "max_retries": _ANY if tries_s else 0,
        "retry_timeout": timedelta(seconds=tries_s),
        "backoff": {
            "init_backoff": timedelta(seconds=first_s),
            "max_backoff": timedelta(seconds=LONGEST_PAUSE_S),
            "base": 3,
        },
    }
