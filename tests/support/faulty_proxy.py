"""A faulty proxy in front of an object store: it answers wrongly, late, partly or not at all.

Faults are data: each says for which requests, how often and how. A proxy passes on what no fault concerns, headers
untouched, so that signatures stay valid.
"""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

Kind = Literal["answer", "cut_request", "cut_answer", "lose_answer", "late", "slow", "silence"]
ALWAYS = 1 << 30
SLOW_DOWN = "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
SKEWED = (
    "<Error><Code>RequestTimeTooSkewed</Code><Message>The difference between the request time and the current time "
    "is too large.</Message></Error>"
)
_PIECES = 8


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to requests.

    Attributes:
        kind: `answer` with `status` and `body` and pass nothing on; `cut_request` in the middle of its body, or
            `cut_answer` in the middle of its; `lose_answer`: the store does it and the client never hears; `late`: the
            store gets it `seconds` later, whoever still waits; `slow`: `seconds` before each eighth of the answer;
            `silence`: neither passed on nor answered.
        on: which requests, a regular expression for `METHOD /path?query`.
        times: so many of them, then no more.
    """

    kind: Kind
    on: str = ""
    times: int = ALWAYS
    status: int = 500
    body: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0


class FaultyProxy:
    """A proxy in front of `upstream`, used as a context manager. `address` is what clients are given.

    Attributes:
        seen: every request, as `METHOD /path?query`, and when it came, in monotonic seconds.
        heard: called with each request before it is treated; from the proxy's threads.
    """

    def __init__(self, upstream: str) -> None:
        parts = urllib.parse.urlsplit(upstream)
        self._upstream = (parts.hostname or "", parts.port or 80)
        self._faults: list[tuple[Fault, list[int]]] = []
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._servers: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._listener: socket.socket | None = None
        self._port = 0
        self.seen: list[tuple[str, float]] = []
        self.heard: Callable[[str], object] = lambda request: None

    def __enter__(self) -> FaultyProxy:
        self.mend()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self.cut()
        for server in tuple(self._servers):
            _reset(server)
        for thread in tuple(self._threads):
            thread.join(20)
            assert not thread.is_alive(), "a thread of the proxy hangs"

    @property
    def address(self) -> str:
        """The endpoint for clients; the same before and after an outage."""
        return f"http://127.0.0.1:{self._port}"

    def add(self, *faults: Fault) -> None:
        """From now on; of several faults for one request the first that is not used up counts."""
        with self._lock:
            self._faults += [(fault, [fault.times]) for fault in faults]

    def clear(self) -> None:
        """No faults from now on; what was said of requests so far is forgotten too."""
        with self._lock:
            self._faults.clear()
            self.seen.clear()

    def count(self, on: str = "") -> int:
        """Requests seen that match."""
        return len(self.times(on))

    def times(self, on: str = "") -> list[float]:
        """When the requests came that match."""
        with self._lock:
            return [when for request, when in self.seen if re.search(on, request)]

    def cut(self) -> None:
        """The network is lost: connections break, new ones are refused, until `mend`."""
        with self._lock:
            listener, self._listener = self._listener, None
            sockets = tuple(self._sockets)
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for item in sockets:
            _reset(item)

    def mend(self) -> None:
        """The network is there again, at the same address."""
        listener = socket.create_server(("127.0.0.1", self._port), backlog=64)
        self._port = listener.getsockname()[1]
        with self._lock:
            self._listener = listener
        self._start(self._accept, listener)

    # --- threads ------------------------------------------------------------------------------------------

    def _start(self, target: Callable[[socket.socket], None], item: socket.socket) -> None:
        thread = threading.Thread(target=target, args=(item,), name="faulty proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client = listener.accept()[0]
            except OSError:
                return
            with self._lock:
                open_ = self._listener is listener
                self._sockets.add(client)
            if not open_:
                _reset(client)
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError, http.client.HTTPException, ValueError), client, client.makefile("rb") as stream:
            while self._turn(client, stream):  # requests of one connection, until a fault ends it
                pass
        with self._lock:
            self._sockets.discard(client)

    def _turn(self, client: socket.socket, stream: Iterator[bytes]) -> bool:
        """One request; whether the connection may have another one."""
        head = _read_head(stream)
        if head is None:
            return False
        method, path, lines = head
        request = f"{method} {path}"
        length = int(next((line.split(b":")[1] for line in lines if line.lower().startswith(b"content-length:")), b"0"))
        with self._lock:
            self.seen.append((request, time.monotonic()))
        self.heard(request)
        fault = self._fault_of(request)
        kind = fault.kind if fault else ""
        if fault and kind == "silence":
            self._over.wait(fault.seconds or 60)
            return False
        if kind == "cut_request":
            stream.read(length // 2)  # type: ignore[attr-defined]
            _reset(client)
            return False
        body = stream.read(length)  # type: ignore[attr-defined]
        if fault and kind == "answer":
            client.sendall(_answer(fault, method))
            return True
        if fault and kind == "late":
            self._over.wait(fault.seconds)
        answer = self._pass_on(f"{method} {path} HTTP/1.1\r\n".encode() + b"".join(lines) + b"\r\n" + body, method)
        if fault and kind == "lose_answer":
            _reset(client)
            return False
        return self._send(client, answer, fault)

    def _send(self, client: socket.socket, answer: bytes, fault: Fault | None) -> bool:
        if fault and fault.kind == "cut_answer":
            head, body = answer.index(b"\r\n\r\n") + 4, len(answer) - answer.index(b"\r\n\r\n") - 4
            client.sendall(answer[: head + body // 2])
            time.sleep(0.05)  # so that the client has read that much before the reset takes it away
            _reset(client)
            return False
        if fault and fault.kind == "slow":
            size = max(1, len(answer) // _PIECES)
            for start in range(0, len(answer), size):
                self._over.wait(fault.seconds)
                client.sendall(answer[start : start + size])
            return True
        client.sendall(answer)
        return True

    def _fault_of(self, request: str) -> Fault | None:
        with self._lock:
            for fault, left in self._faults:
                if left[0] and re.search(fault.on, request):
                    left[0] -= 1
                    return fault
        return None

    def _pass_on(self, request: bytes, method: str) -> bytes:
        """The store's whole answer."""
        with socket.create_connection(self._upstream, timeout=60) as server:
            self._servers.add(server)
            server.sendall(request)
            answer = http.client.HTTPResponse(server, method=method)
            answer.begin()
            body = answer.read()
            self._servers.discard(server)
        headers = [(name, value) for name, value in answer.getheaders() if name.lower() != "transfer-encoding"]
        if method != "HEAD" and answer.status != 204:
            headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
            headers.append(("Content-Length", str(len(body))))
        return _head(answer.status, answer.reason, headers) + body


def _read_head(stream: Iterator[bytes]) -> tuple[str, str, list[bytes]] | None:
    """Method, path with query, and header lines as they came; None at the end."""
    first = stream.readline()  # type: ignore[attr-defined]
    if not first:
        return None
    method, path, _ = first.decode("latin-1").split()
    lines: list[bytes] = []
    while (line := stream.readline()) not in (b"\r\n", b""):  # type: ignore[attr-defined]
        lines.append(line)
    return method, path, lines


def _answer(fault: Fault, method: str) -> bytes:
    body = b"" if method == "HEAD" else fault.body.encode()
    headers = [("Content-Length", str(len(body))), ("Content-Type", "application/xml"), *fault.headers]
    return _head(fault.status, http.client.responses.get(fault.status, "Odd"), headers) + body


def _head(status: int, reason: str, headers: list[tuple[str, str]]) -> bytes:
    lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in headers)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _reset(item: socket.socket) -> None:
    """End a connection without a goodbye."""
    with suppress(OSError):
        item.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        item.shutdown(socket.SHUT_RDWR)
    item.close()
