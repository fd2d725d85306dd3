"""The store: files by path in a folder or in an object store, over obstore.

Writes are whole or not at all: a reader never sees a part of a file. `create` is the one primitive that the run's log
needs, and every kind of store has it: of several writers of one path exactly one gets True.
"""

from __future__ import annotations

import os
import shutil
import time
import urllib.parse
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from trainwright.core.errors import StorageError, nearest
from trainwright.faults import MissingFile, classify, explain, is_missing_file

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

__all__ = ["MissingFile", "Store", "open_store"]

_SCHEMES = ("s3", "gs", "az", "file", "memory")
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gs": (),
}
_CHUNK_BYTES = 16 << 20
_MEMORY: dict[str, MemoryStore] = {}


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to try.

    Attributes:
        connect_s: for one connection.
        silence_s: for the next bytes of one request.
        request_s: for one whole request, its data included.
        total_s: after which a failed request is not tried again.
    """

    connect_s: float = 5.0
    silence_s: float = 20.0
    request_s: float = 600.0
    total_s: float = 30.0


_QUICK = Patience(connect_s=2.0, silence_s=3.0, request_s=3.0, total_s=4.0)


def open_store(uri: str) -> Store:
    """Open a store; nothing is created or contacted yet.

    Args:
        uri: a folder (a path or `file://`), or `s3://`, `gs://`, `az://` with a bucket and a prefix. `memory://NAME`
            lives as long as the process, for tests. Credentials and endpoint come from the environment:
            `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_ENDPOINT_URL`, `AWS_REGION` and their like.

    Raises:
        StorageError: the URI names no store.
    """
    return Store(_canonical(uri))


class Store:
    """Files below one URI. Methods may be called from any thread and raise StorageError.

    Paths are relative, with `/` between names, and cannot leave the store. A store pickles as its URI alone: another
    process opens it anew, with the credentials of its own environment.

    Attributes:
        uri: of the store, absolute, without secrets.
    """

    def __init__(self, uri: str, patience: Patience | None = None) -> None:
        self.uri = uri
        self._patience = patience or Patience()
        self._folder = None if "://" in uri else Path(uri)
        self._endpoint = _endpoint(uri.partition("://")[0])
        self._client: ObjectStore | None = None
        self._once: ObjectStore | None = None
        if self._folder is None:
            with self._explained("cannot open the store", ""):
                self._client = _connect(uri, self._endpoint, self._patience, retry=True)
                self._once = _connect(uri, self._endpoint, self._patience, retry=False)

    def __reduce__(self) -> tuple[type[Store], tuple[str, Patience]]:
        return Store, (self.uri, self._patience)

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    def uri_of(self, path: str) -> str:
        """Where a file is, for people."""
        return f"{self.uri.rstrip('/')}/{path}" if path else self.uri

    # --- reading ------------------------------------------------------------------------------------------

    def get(self, path: str) -> bytes:
        """A whole file. Raises MissingFile (a StorageError) when there is none."""
        with self._explained("cannot read", path):
            return obstore.get(self._reader(), self._inside(path)).bytes().to_bytes()

    def find(self, path: str) -> bytes | None:
        """A whole file, or None when there is none."""
        try:
            return self.get(path)
        except MissingFile:
            return None

    def size(self, path: str) -> int:
        """Size of a file in bytes. Raises MissingFile."""
        with self._explained("cannot read", path):
            return obstore.head(self._reader(), self._inside(path))["size"]

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        try:
            return self.size(path) >= 0
        except MissingFile:
            return False

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[tuple[str, int]]:
        """Paths and sizes of the files below the folder `prefix`, at any depth, in order; only those after `after`."""
        folder = self._inside(prefix.rstrip("/")) if prefix else None
        with self._explained("cannot list", prefix):
            found = obstore.list(self._reader(), folder, offset=after).collect()
        return iter(sorted((item["path"], item["size"]) for item in found))

    def folders(self, prefix: str = "") -> tuple[str, ...]:
        """Names of the folders right below the folder `prefix`, in order."""
        folder = self._inside(prefix.rstrip("/")) if prefix else None
        with self._explained("cannot list", prefix):
            found = obstore.list_with_delimiter(self._reader(), folder)
        return tuple(sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found["common_prefixes"]))

    # --- writing ------------------------------------------------------------------------------------------

    def put(self, path: str, data: bytes | memoryview, *, sync: bool = True) -> None:
        """Write a whole file, over an older one.

        Args:
            data: of any size; a memoryview must be one-dimensional bytes.
            sync: in a folder, come back only when the disk has it.
        """
        with self._explained("cannot write", path):
            obstore.put(self._writer(), self._inside(path), data, chunk_size=_CHUNK_BYTES)
            if sync:
                self._sync(path)

    def create(self, path: str, data: bytes) -> bool:
        """Write a file that is not there yet; False when it is, then nothing is changed.

        After an error that leaves open whether the write happened, the file is read back and compared. Writers that
        race need data of their own, such as a random number, so that each can tell its own.
        """
        self._inside(path)
        until_s = time.monotonic() + self._patience.total_s
        pause_s = 0.1
        while True:
            try:
                return self._create_once(path, data)
            except (BaseError, OSError) as error:
                fault = explain(error, doing="cannot write", where=self._place(path))
                if classify(error).certain or self._folder is not None:
                    raise fault from None
                stored = self._read_back(path, fault)
                if stored is not None:
                    return stored == data
                if time.monotonic() + pause_s > until_s:
                    raise fault from None
            time.sleep(pause_s)
            pause_s *= 2

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; those that are not there are no error."""
        wanted = [self._inside(path) for path in paths]
        for start in range(0, len(wanted), 1000):
            batch = wanted[start : start + 1000]
            with self._explained("cannot delete", batch[0]):
                self._delete(batch)

    def delete_folder(self, prefix: str) -> None:
        """Delete a folder with all that is in it, also what killed writers left half written there."""
        self.delete(path for path, _ in self.list(prefix))
        if self._folder is not None:
            with self._explained("cannot delete", prefix), suppress(FileNotFoundError):
                shutil.rmtree(self._folder / self._inside(prefix))

    def check(self) -> None:
        """Prove within about ten seconds that the store can be written, read, deleted from and created in only once."""
        try:
            sound = Store(self.uri, _QUICK)._probe()
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
        try:
            obstore.put(self._once or self._writer(), path, data, mode="create")
        except AlreadyExistsError:
            return False
        self._sync(path)
        return True

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
        """Force a file of a folder to disk: what the log names must outlive a power cut."""
        if self._folder is not None:
            with (self._folder / path).open("rb") as file:
                os.fsync(file.fileno())

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
            raise explain(error, doing=doing, where=where) from None


def _canonical(uri: str) -> str:
    """An absolute path, or a URI of scheme, bucket and prefix."""
    scheme, found, rest = uri.partition("://")
    if not found:
        return _folder(uri)
    if scheme not in _SCHEMES:
        raise StorageError(
            f"{scheme}:// is no store: {nearest(scheme, _SCHEMES)}",
            remedy="give a folder, s3://, gs:// or az:// as storage=",
        )
    if scheme == "file":
        return _folder(urllib.parse.unquote(rest))
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


def _folder(path: str) -> str:
    if not path.strip():
        raise StorageError("storage= is empty", remedy="give a folder, s3://, gs:// or az://")
    return os.path.abspath(Path(path).expanduser())


def _endpoint(scheme: str) -> str:
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


def _connect(uri: str, endpoint: str, patience: Patience, *, retry: bool) -> ObjectStore:
    """A client. Without `retry` one try only, so that what came of a create is known."""
    scheme, _, rest = uri.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme == "memory":
        return _MEMORY.setdefault(uri, MemoryStore())
    options: dict[str, Any] = {
        "prefix": prefix or None,
        "client_options": _client_options(patience, allow_http=endpoint.startswith("http://")),
        "retry_config": _retries(patience, retry=retry),
    }
    if endpoint:
        options["endpoint"] = endpoint
    kinds: dict[str, type[S3Store | GCSStore | AzureStore]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    return kinds[scheme](bucket, **options)


def _client_options(patience: Patience, *, allow_http: bool) -> ClientConfig:
    return {
        "allow_http": allow_http,
        "connect_timeout": timedelta(seconds=patience.connect_s),
        "read_timeout": timedelta(seconds=patience.silence_s),
        "timeout": timedelta(seconds=patience.request_s),
    }


def _retries(patience: Patience, *, retry: bool) -> RetryConfig:
    return {
        "max_retries": 10 if retry else 0,
        "retry_timeout": timedelta(seconds=patience.total_s),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=4), "base": 2},
    }
