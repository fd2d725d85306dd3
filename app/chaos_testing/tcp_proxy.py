"""A proxy for TCP connections that can be told to fail: it refuses, goes silent, or cuts what is under way."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Literal

Mode = Literal["pass", "refuse", "stall"]
_PIECE_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class Proxy:
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
        self._mode: Mode = "pass"
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server((host, 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="trainwright-proxy", daemon=True).start()

    def tell(self, mode: Mode) -> None:
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
