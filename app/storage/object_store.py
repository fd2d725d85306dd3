"""Where a store is and how it is reached: its address, its client, and how often that tries again."""

from __future__ import annotations

import os
import random
import urllib.parse
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from trainwright.core.errors import StorageError, nearest
from trainwright.storage.retry import FIRST_S, LONGEST_S, Patience

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_SCHEMES = ("s3", "gs", "az", "file", "memory")
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gs": (),
}
_ANY = 10_000  # retries, which is more than there is time for
_MEMORY: dict[str, MemoryStore] = {}


def canonical(uri: str) -> str:
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


def endpoint_of(scheme: str) -> str:
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


def connect(uri: str, endpoint: str, patience: Patience, *, tries_s: float) -> ObjectStore:
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


def _client_options(patience: Patience, *, allow_http: bool) -> ClientConfig:
    return {
        "allow_http": allow_http,
        "connect_timeout": timedelta(seconds=patience.connect_s),
        "read_timeout": timedelta(seconds=patience.silence_s),
        "timeout": timedelta(seconds=patience.request_s),
    }


def _retries(tries_s: float) -> RetryConfig:
    """Time is the only limit: any number of tries would be used up by short pauses long before."""
    first_s = FIRST_S * random.SystemRandom().uniform(0.5, 1.5)  # a step seeds the global generator
    return {
        "max_retries": _ANY if tries_s else 0,
        "retry_timeout": timedelta(seconds=tries_s),
        "backoff": {
            "init_backoff": timedelta(seconds=first_s),
            "max_backoff": timedelta(seconds=LONGEST_S),
            "base": 3,
        },
    }
