"""A store that fails for a while, for real: a folder that is none, or an object store behind a proxy that fails."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from trainwright.chaos_testing.tcp_proxy import Mode, Proxy
from trainwright.core.errors import StorageError

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # of which Ray merges the runtime environment into that of the job
_AT_FDCWD, _EXCHANGE = -100, 2
_MODES: tuple[Mode, ...] = ("refuse", "stall")


class Outage(Protocol):
    """How a store is made to fail."""

    environment: Mapping[str, str]  # that the driver needs for it

    def begin(self, run: str, draw: float) -> str:
        """Let the store fail now for this run; says how, in words."""

    def end(self) -> None:
        """It works again; safe to call twice."""

    def close(self) -> None:
        """For good."""


def cannot_fail(storage: str) -> str:
    """Why a store can not be made to fail; empty where it can."""
    scheme = storage.partition("://")[0] if "://" in storage else "file"
    if scheme == "file":
        return ""
    if scheme != "s3":
        return f"it cannot be done to {scheme}://, only to folders and to s3:// at an http:// endpoint"
    if not _endpoint().startswith("http://"):
        return "it needs an s3:// store at an http:// address in AWS_ENDPOINT_URL: a proxy stands in front of it"
    return ""


def outage_of(storage: str, host: str = "127.0.0.1") -> Outage:
    """The way to make this store fail; see `cannot_fail`. `host`: where a proxy listens."""
    if storage.startswith("s3://"):
        return ProxyOutage(_endpoint(), host)
    return FolderOutage(Path(urllib.parse.unquote(storage.removeprefix("file://"))))


def _endpoint() -> str:
    return next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")


class FolderOutage:
    """For a while the run's folder is a file, so that nothing in it can be read or written, by root neither.

    Folder and file change places in one step, so that nobody can make the folder anew in between.
    """

    def __init__(self, storage: Path) -> None:
        self.environment: Mapping[str, str] = {}
        self._storage = storage
        self._swapped: tuple[Path, Path] | None = None
        self._lock = threading.Lock()

    def begin(self, run: str, draw: float) -> str:
        """Put a file in the place of the run's folder."""
        with self._lock:
            assert self._swapped is None, "an outage ends before the next begins"
            folder, aside = self._storage / run, self._storage / f"{run}.aside"
            aside.touch()
            _exchange(folder, aside)
            self._swapped = folder, aside
        return "the run's folder is a file"

    def end(self) -> None:
        """Put the folder back."""
        with self._lock:
            if self._swapped is not None:
                folder, aside = self._swapped
                _exchange(folder, aside)
                aside.unlink()
                self._swapped = None

    def close(self) -> None:
        """Put the folder back."""
        self.end()


def _exchange(one: Path, other: Path) -> None:
    """Let two paths change places, at once (renameat2, Linux). Raises StorageError."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE):
        reason = os.strerror(ctypes.get_errno())
        raise StorageError(
            f"the store cannot be made to fail: {reason}",
            where=str(one),
            remedy="leave out the fault 'storage', or use a folder on a local disk",
        )


class ProxyOutage:
    """The driver and its workers reach the store through a proxy, which for a while refuses, or says nothing."""

    def __init__(self, endpoint: str, host: str) -> None:
        parts = urllib.parse.urlsplit(endpoint)
        self._proxy = Proxy((parts.hostname or host, parts.port or 80), host)
        address = f"http://{host}:{self._proxy.port}"
        self.environment: Mapping[str, str] = through(dict.fromkeys(_ENDPOINTS, address))

    def begin(self, run: str, draw: float) -> str:
        """Fail in one of the ways."""
        mode = _MODES[int(draw * len(_MODES))]
        self._proxy.tell(mode)
        return {"refuse": "connections are cut and refused", "stall": "nothing comes through"}[mode]

    def end(self) -> None:
        """Let everything through again."""
        self._proxy.tell("pass")

    def close(self) -> None:
        """Give the port back."""
        self._proxy.close()


def through(variables: Mapping[str, str]) -> dict[str, str]:
    """An environment that gives these variables to a driver and, by Ray, to its workers on every node."""
    config: dict[str, Any] = json.loads(os.environ.get(RAY_JOB) or "{}")
    wanted: dict[str, Any] = config.get("runtime_env") or {}
    wanted = {**wanted, "env_vars": {**(wanted.get("env_vars") or {}), **variables}}
    return {**variables, RAY_JOB: json.dumps({**config, "runtime_env": wanted})}
