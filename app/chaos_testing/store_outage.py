"""Make a store fail for some time: a file replaces the folder, or a proxy in front of the object store fails."""

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
RAY_JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray merges its runtime environment into that of the job
_AT_FDCWD, _EXCHANGE = -100, 2
_MODES: tuple[_ProxyMode, ...] = ("refuse", "stall")


class Outage(Protocol):
    """A way to make a store or a link fail."""

    environment: Mapping[str, str]  # variables that the driver needs

    def begin(self, run: str, draw: float) -> str:
        """Start the outage for a run; return how, in words."""

    def end(self) -> None:
        """End the outage; safe to call twice."""

    def close(self) -> None:
        """End the outage and release all resources."""


def outage_obstacle(storage: str) -> str:
    """Return why a store cannot be made to fail; empty if it can."""
    scheme = storage.partition("://")[0] if "://" in storage else "file"
    if scheme == "file":
        return ""
    if scheme != "s3":
        return f"{scheme}:// stores cannot be made to fail, only folders and s3:// at an http:// endpoint"
    if not _endpoint().startswith("http://"):
        return "an s3:// store needs an http:// address in AWS_ENDPOINT_URL, because a proxy is put in front of it"
    return ""


def create_outage(storage: str, host: str = "127.0.0.1") -> Outage:
    """Return the outage that fits a store; see `outage_obstacle`. A proxy listens at `host`."""
    if storage.startswith("s3://"):
        return _ProxyOutage(_endpoint(), host)
    return FolderOutage(Path(urllib.parse.unquote(storage.removeprefix("file://"))))


def _endpoint() -> str:
    return next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")


class FolderOutage:
    """Replaces the run's folder by a file, so that nobody, not even root, can read or write in it.

    Folder and file are swapped atomically, so that nobody can create the folder in between.
    """

    def __init__(self, storage: Path) -> None:
        self.environment: Mapping[str, str] = {}
        self._storage = storage
        self._swapped: tuple[Path, Path] | None = None
        self._lock = threading.Lock()

    def begin(self, run: str, draw: float) -> str:
        """Swap the run's folder for a file."""
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
    """Swap two paths atomically (renameat2, Linux). Raises StorageError."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE):
        reason = os.strerror(ctypes.get_errno())
        raise StorageError(
            f"the store cannot be made to fail: {reason}",
            where=str(one),
            remedy="leave out the fault 'storage', or use a folder on a local disk",
        )


class _ProxyOutage:
    """Puts a proxy between the run and its store, which refuses or stalls connections during the outage."""

    def __init__(self, endpoint: str, host: str) -> None:
        parts = urllib.parse.urlsplit(endpoint)
        self._proxy = TcpProxy((parts.hostname or host, parts.port or 80), host)
        address = f"http://{host}:{self._proxy.port}"
        self.environment: Mapping[str, str] = proxy_environment(dict.fromkeys(_ENDPOINTS, address))

    def begin(self, run: str, draw: float) -> str:
        """Fail in a randomly chosen mode."""
        mode = _MODES[int(draw * len(_MODES))]
        self._proxy.set_mode(mode)
        return {"refuse": "connections are cut and refused", "stall": "connections stall"}[mode]

    def end(self) -> None:
        """Pass connections again."""
        self._proxy.set_mode("pass")

    def close(self) -> None:
        """Close the proxy."""
        self._proxy.close()


def proxy_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that gives these variables to a driver and, through Ray, to its workers on every node."""
    config: dict[str, Any] = json.loads(os.environ.get(RAY_JOB_CONFIG_VARIABLE) or "{}")
    wanted: dict[str, Any] = config.get("runtime_env") or {}
    wanted = {**wanted, "env_vars": {**(wanted.get("env_vars") or {}), **variables}}
    return {**variables, RAY_JOB_CONFIG_VARIABLE: json.dumps({**config, "runtime_env": wanted})}


# --- A TCP proxy that fails on demand ---------------------------------------------------------------------------------


_ProxyMode = Literal["pass", "refuse", "stall"]
_PIECE_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class TcpProxy:
    """Forwards connections to an address, with three modes.

    `pass` forwards; `refuse` resets open and new connections; `stall` holds all data until the mode is `pass` again.

    Args:
        target: host and port of the server.
        host: address to listen at.

    Attributes:
        port: on which it listens.
    """

    def __init__(self, target: tuple[str, int], host: str = "127.0.0.1") -> None:
        self._target = target
        self._mode: _ProxyMode = "pass"
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server((host, 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="trainwright-proxy", daemon=True).start()

    def set_mode(self, mode: _ProxyMode) -> None:
        """Set the mode; safe to call twice."""
        with self._changed:
            self._mode = mode
            doomed = tuple(self._open) if mode == "refuse" else ()
            self._changed.notify_all()
        for end in doomed:
            _cut(end)

    def close(self) -> None:
        """Stop listening and reset open connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.set_mode("refuse")

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Connect to the server, and forward both ways until both sides are done."""
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
        """Register a connection; return False if it must be reset."""
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
        except OSError:  # one side was closed, so close the other
            _cut(source)
            _cut(sink)

    def _wait_out(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._mode != "stall")


def _cut(end: socket.socket) -> None:
    """Reset a connection, so that both sides notice at once."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        end.shutdown(socket.SHUT_RDWR)
