"""Who of a coordinator's group is there: a connection of each member to the chief, apart from TensorFlow's own.

A member tells over it where its TensorFlow server listens, and waits on it for the end; that a process is gone is known
by its connection at once. One that takes the place of a process before it is told that one's port, for TensorFlow
knows each member by a fixed address.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from trainwright.core.errors import PeerLost
from trainwright.core.group import Address, Group
from trainwright.strategies.common.host_address import bound, own_host
from trainwright.strategies.ps import handshake

_LONGEST_LINE = 4096
_END = {"end": True}
_IDLE_S, _BETWEEN_S, _PROBES = 10, 5, 4  # a host that is gone answers no probe of the kernel's
_REMEDY = "the first rank that failed says why"


class Seats:
    """The chief's side. It listens from the start, so that nobody else gets the port, until the group ends."""

    def __init__(self) -> None:
        self._listening = bound(own_host())
        self._listening.listen(128)
        self.address = Address(host=own_host(), port=self._listening.getsockname()[1])
        self._taken: dict[int, socket.socket] = {}
        self._servers: dict[int, Address] = {}
        self._changed = threading.Condition()
        self._over = False

    def open(self, group: Group) -> None:
        """Seat members, those that come later too, in a thread of its own."""
        threading.Thread(target=self._seat_all, args=(group,), name="seats", daemon=True).start()

    def gather(self, group: Group, until: float) -> Mapping[int, Address]:
        """Where each member's server listens, once all have come. Raises PeerLost at the deadline."""
        others = range(1, group.size)
        with self._changed:
            self._changed.wait_for(lambda: len(self._servers) == len(others), until - time.monotonic())
            absent = [rank for rank in others if rank not in self._servers]
            if absent:
                raise PeerLost(f"ranks {absent} did not join within the deadline", remedy=_REMEDY)
            return dict(self._servers)

    def gone(self) -> list[int]:
        """Ranks whose process has ended, or whose host is gone, and that nobody has replaced yet."""
        with self._changed:
            poll, ranks = select.poll(), {connection.fileno(): rank for rank, connection in self._taken.items()}
            for descriptor in ranks:
                poll.register(descriptor, select.POLLIN)  # a member says nothing more: this is its end
            return sorted(ranks[descriptor] for descriptor, _ in poll.poll(0))

    def end(self) -> None:
        """Tell all that the group is over, and stop listening. Safe to call twice."""
        with self._changed:
            self._over = True
            with suppress(OSError):  # wakes the thread that accepts
                self._listening.shutdown(socket.SHUT_RDWR)
            self._listening.close()
            for connection in self._taken.values():
                with suppress(OSError):  # it may be gone
                    _tell(connection, _END)
                connection.close()
            self._taken.clear()

    def _seat_all(self, group: Group) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if self._over:
                    return
                raise
            with suppress(OSError, ValueError, KeyError, TypeError):  # a stranger, or gone again
                self._seat(group, connection)
                continue
            connection.close()

    def _seat(self, group: Group, connection: socket.socket) -> None:
        rank = handshake.accept(connection, group.key, time.monotonic() + handshake.HANDSHAKE_S)
        if rank not in range(1, group.size):
            raise ValueError("of another group")
        connection.settimeout(handshake.HANDSHAKE_S)
        former = self._servers.get(rank)
        _tell(connection, {"host": former.host, "port": former.port} if former else {"host": "", "port": 0})
        server = _line(connection)
        _alert(connection)
        with self._changed:
            before = self._taken.pop(rank, None)
            if before is not None:
                before.close()
            self._taken[rank] = connection
            self._servers[rank] = Address(host=server["host"], port=int(server["port"]))
            self._changed.notify_all()


class Seat:
    """A member's side.

    Args:
        group: as this member sees it.
        serve: (port) -> starts the TensorFlow server there; raises where the port is taken.

    Raises:
        PeerLost: the chief cannot be reached within the deadline, or this host is not that of the process before.
    """

    def __init__(self, group: Group, serve: Callable[[Address], None]) -> None:
        chief, host = group.peers[0].address, own_host()
        try:
            until = time.monotonic() + group.deadline_s
            self._chief = socket.create_connection((chief.host, chief.port), group.deadline_s)
        except OSError as error:
            raise PeerLost(f"the chief cannot be reached ({error})", remedy=_REMEDY) from error
        try:
            handshake.join(self._chief, group.key, group.rank, until)
            former = _line(self._chief)
        except (OSError, ValueError) as error:
            self._chief.close()
            raise PeerLost(f"the chief did not let rank {group.rank} in ({error})", remedy=_REMEDY) from error
        if former["host"] not in ("", host):
            self._chief.close()
            raise PeerLost(
                f"rank {group.rank} was on {former['host']} and cannot join from {host}: TensorFlow keeps addresses",
                remedy="let it start on the same node, or let a new generation begin",
            )
        address = Address(host=host, port=former["port"]) if former["port"] else free(host)
        serve(address)
        try:
            _tell(self._chief, {"host": address.host, "port": address.port})
        except OSError as error:
            raise PeerLost(f"the chief is gone ({error})", remedy=_REMEDY) from error
        _alert(self._chief)
        self._chief.settimeout(None)

    def wait(self) -> None:
        """Until the chief says that the group is over, or is gone."""
        with suppress(OSError, ValueError):  # it is gone
            _line(self._chief)

    def leave(self) -> None:
        """From any thread: the chief knows, and `wait` returns."""
        with suppress(OSError):  # it may have ended already
            self._chief.shutdown(socket.SHUT_RDWR)


def free(host: str) -> Address:
    """A port that nobody has bound, which TensorFlow has to bind by itself."""
    with socket.create_server(("", 0)) as probe:
        return Address(host=host, port=probe.getsockname()[1])


def _alert(connection: socket.socket) -> None:
    """Let the kernel find out within half a minute that the other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", _BETWEEN_S), ("TCP_KEEPCNT", _PROBES)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _tell(connection: socket.socket, words: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(words).encode() + b"\n")


def _line(connection: socket.socket) -> dict[str, Any]:
    """What the other says next. Raises OSError, ValueError where that is nothing."""
    said = b""
    while not said.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece or len(said) > _LONGEST_LINE:
            raise ConnectionError("it hung up")
        said += piece
    words: dict[str, Any] = json.loads(said)
    return words
