"""A store that fails for a while, for real: a folder that is none, or an object store behind a proxy that fails."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import struct
import threading
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from trainwright.core.errors import StorageError

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
RAY_JOB_CONFIG_VARIABLE = (
    "RAY_JOB_CONFIG_JSON_ENV_VAR"  # of which Ray merges the runtime environment into that of the job
)
_AT_FDCWD, _EXCHANGE = -100, 2
_MODES: tuple[_ProxyMode, ...] = ("refuse", "stall")


class Outage(Protocol):
    """How a store is made to fail."""

    environment: Mapping[str, str]  # that the driver needs for it

    def begin(self, run: str, draw: float) -> str:
        """Let the store fail now for this run; says how, in words."""

    def end(self) -> None:
        """It works again; safe to call twice."""

    def close(self) -> None:
        """For good."""


def outage_obstacle(storage: str) -> str:
    """Why a store can not be made to fail; empty where it can."""
    scheme = storage.partition("://")[0] if "://" in storage else "file"
    if scheme == "file":
        return ""
    if scheme != "s3":
        return f"it cannot be done to {scheme}://, only to folders and to s3:// at an http:// endpoint"
    if not _endpoint().startswith("http://"):
        return "it needs an s3:// store at an http:// address in AWS_ENDPOINT_URL: a proxy stands in front of it"
    return ""


def create_outage(storage: str, host: str = "127.0.0.1") -> Outage:
    """The way to make this store fail; see `outage_obstacle`. `host`: where a proxy listens."""
    if storage.startswith("s3://"):
        return _ProxyOutage(_endpoint(), host)
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
            _swap_paths(folder, aside)
            self._swapped = folder, aside
        return "the run's folder is a file"

    def end(self) -> None:
        """Put the folder back."""
        with self._lock:
            if self._swapped is not None:
                folder, aside = self._swapped
                _swap_paths(folder, aside)
                aside.unlink()
                self._swapped = None

    def close(self) -> None:
        """Put the folder back."""
        self.end()


def _swap_paths(one: Path, other: Path) -> None:
    """Let two paths change places, at once (renameat2, Linux). Raises StorageError."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE):
        reason = os.strerror(ctypes.get_errno())
        raise StorageError(
            f"the store cannot be made to fail: {reason}",
            where=str(one),
            remedy="leave out the fault 'storage', or use a folder on a local disk",
        )


class _ProxyOutage:
    """The driver and its workers reach the store through a proxy, which for a while refuses, or says nothing."""

    def __init__(self, endpoint: str, host: str) -> None:
        parts = urllib.parse.urlsplit(endpoint)
        self._proxy = TcpProxy((parts.hostname or host, parts.port or 80), host)
        address = f"http://{host}:{self._proxy.port}"
        self.environment: Mapping[str, str] = proxy_environment(dict.fromkeys(_ENDPOINTS, address))

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


def proxy_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """An environment that gives these variables to a driver and, by Ray, to its workers on every node."""
    config: dict[str, Any] = json.loads(os.environ.get(RAY_JOB_CONFIG_VARIABLE) or "{}")
    wanted: dict[str, Any] = config.get("runtime_env") or {}
    wanted = {**wanted, "env_vars": {**(wanted.get("env_vars") or {}), **variables}}
    return {**variables, RAY_JOB_CONFIG_VARIABLE: json.dumps({**config, "runtime_env": wanted})}


# --- A proxy for TCP connections that can be told to fail -------------------------------------------------------------


_ProxyMode = Literal["pass", "refuse", "stall"]
_PIECE_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class TcpProxy:
    """Passes connections on to an address, until it is told otherwise.

    `refuse` cuts what is under way, and every new connection at once; `stall` lets nothing through, and
    goes on where it stood when `pass` is told.

    Args:
        target: host and port of the server.
        host: address to listen at.

    Attributes:
        port: where it listens.
    """

    def __init__(self, target: tuple[str, int], host: str = "127.0.0.1") -> None:
        self._target = target
        self._mode: _ProxyMode = "pass"
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server((host, 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="trainwright-proxy", daemon=True).start()

    def tell(self, mode: _ProxyMode) -> None:
        """From now on do this; to call it twice does no harm."""
        with self._changed:
            self._mode = mode
            doomed = tuple(self._open) if mode == "refuse" else ()
            self._changed.notify_all()
        for end in doomed:
            _cut(end)

    def close(self) -> None:
        """Listen no more, and cut what is under way."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.tell("refuse")

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Connect to the server, and pump both ways until both sides are done."""
        with client, contextlib.suppress(OSError), socket.create_connection(self._target, timeout=10.0) as server:
            server.settimeout(None)
            ends = {client, server}
            if not self._admit(ends):
                return
            back = threading.Thread(target=self._pump, args=(client, server), daemon=True)
            back.start()
            self._pump(server, client)
            back.join()
            with self._changed:
                self._open -= ends

    def _admit(self, ends: set[socket.socket]) -> bool:
        """Count a connection in; False when it must go at once."""
        with self._changed:
            if self._mode != "refuse":
                self._open |= ends
                return True
        for end in ends:
            _cut(end)
        return False

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while piece := source.recv(_PIECE_BYTES):
                self._wait_out()
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # one side is gone: so is the other
            _cut(source)
            _cut(sink)

    def _wait_out(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._mode != "stall")


def _cut(end: socket.socket) -> None:
    """End a connection so that the other side, and whoever waits for it here, notice at once."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        end.shutdown(socket.SHUT_RDWR)
