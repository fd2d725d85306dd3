"""The way from one node to another over plain TCP: round trips, which compare the clocks as NTP does, and bytes.

The one who measures connects and proves by a key that it belongs to the examination. Then it sends single letters:
`t` is answered with the other's clock, `b` with bytes until it hangs up.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from contextlib import suppress

from trainwright.diagnostics.facts import Link
from trainwright.strategies.common.host_address import bound, own_host

KEY_BYTES = 16
_CONNECT_S = 3.0
TIMEOUT_S = 5.0
_TRIPS = 20
_MOST_BYTES, _LONGEST_S = 256 << 20, 0.5
_PIECE = bytes(1 << 18)
_TIME = struct.Struct("!d")


class Listener:
    """Answers those who measure, at a port that the system chooses, until it is closed."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._socket = bound(own_host())
        self._socket.listen(64)
        self.address = own_host(), int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="doctor", daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes up the thread that accepts
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(caller,), name="doctor-answer", daemon=True).start()

    def _answer(self, caller: socket.socket) -> None:
        with caller, suppress(OSError):  # whoever hangs up has what it wanted
            caller.settimeout(TIMEOUT_S)
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not secrets.compare_digest(_received(caller, KEY_BYTES), self._key):
                return
            while letter := caller.recv(1):
                caller.sendall(_TIME.pack(time.time()) if letter == b"t" else _PIECE)
                while letter == b"b":
                    caller.sendall(_PIECE)


def measure(source: str, target: str, address: tuple[str, int], key: bytes) -> Link:
    """What this node finds of its way to another, within about ten seconds. Nothing is raised: a fault is a finding."""
    try:
        with socket.create_connection(address, timeout=_CONNECT_S) as line:
            line.settimeout(TIMEOUT_S)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.sendall(key)
            delay_s, offset_s = min(_round_trip(line) for _ in range(_TRIPS))
            return Link(
                source=source, target=target, delay_s=delay_s, offset_s=offset_s, bytes_per_s=_bytes_per_s(line)
            )
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return Link(source=source, target=target, fault=f"{address[0]} port {address[1]}: {why}")


def _round_trip(line: socket.socket) -> tuple[float, float]:
    """Seconds of a round trip, and what the other's clock is ahead if it was read in the middle of it."""
    start, start_wall = time.perf_counter(), time.time()
    line.sendall(b"t")
    (other,) = _TIME.unpack(_received(line, _TIME.size))
    delay_s = time.perf_counter() - start
    return delay_s, other - (start_wall + delay_s / 2)


def _bytes_per_s(line: socket.socket) -> float:
    line.sendall(b"b")
    buffer, total = bytearray(1 << 20), 0
    start = time.perf_counter()
    while total < _MOST_BYTES and time.perf_counter() - start < _LONGEST_S:
        count = line.recv_into(buffer)
        if not count:
            raise ConnectionResetError("the connection broke off")
        total += count
    return total / (time.perf_counter() - start)


def _received(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = line.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the connection broke off")
        data += piece
    return data
