"""What engines of the coordinator topology share: the chief holds state and feeds, the others follow.

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
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from trainwright.core.data import Columns, Feed, MetricSums
from trainwright.core.engine import ModelSpec, StateReader, StateSnapshot, StateWriter
from trainwright.core.errors import PeerLost
from trainwright.core.plan import Plan
from trainwright.core.topology import Address, Generation, Group, Role, StateTag, StateTransfer
from trainwright.strategies.common import socket_transport
from trainwright.strategies.common.host_address import bind_socket, own_host
from trainwright.strategies.tensorflow.tensorflow_engine import TensorFlowEngine


class CoordinatorEngine(TensorFlowEngine):
    """A member of such a group. Only the chief holds a state, is fed and steps; the others have nothing to tell."""

    def __init__(self) -> None:
        super().__init__()
        self._seats: MemberRegistry | None = None
        self._seat: MemberConnection | None = None

    @abstractmethod
    def lead(self, group: Group, servers: Mapping[int, Address]) -> Any:
        """Of the chief: the strategy, given where each other member serves. Raises PeerLost, JobError."""

    @abstractmethod
    def serve(self, group: Group, address: Address) -> Any:
        """Of another member: what serves at an address; anything but None."""

    # --- the group ----------------------------------------------------------------------------------------

    def reserve(self, generation: Generation, role: Role) -> Address:
        """The chief binds the port at which the others meet it; where they serve they tell it there."""
        self._check_new()
        if role != "chief":
            return Address(host=own_host(), port=0)
        if self._seats is not None:
            self._seats.end()
        self._seats = MemberRegistry()
        return self._seats.address

    def open_strategy(self, group: Group) -> Any:
        """The chief's strategy, once all others serve; of those what serves."""
        if group.rank:
            served: list[Any] = []
            self._seat = MemberConnection(group, lambda address: served.append(self.serve(group, address)))
            return served[0]
        assert self._seats is not None, "reserve() comes first"
        until = time.monotonic() + group.deadline_s
        self._seats.open(group)
        return self.lead(group, self._seats.gather(group, until))

    def follow(self) -> None:
        """Serve until the chief leaves or is gone; TensorFlow's threads do the work, before and after this too."""
        if self._seat is not None:
            self._seat.wait()

    def interrupt(self, deadline_s: float) -> bool:
        """A follower's `follow` returns, so that who then owes an answer is who does not run. False: of the chief."""
        if self._seat is None:
            return super().interrupt(deadline_s)
        self._seat.leave()
        return True

    def leave(self) -> None:
        """The chief tells the others that the group is over; of another rank the chief notices that it is gone."""
        if self._seats is not None:
            self._seats.end()
        if self._seat is not None:
            self._seat.leave()
        super().leave()

    # --- the others' part of what all are asked -----------------------------------------------------------

    def build(self, spec: ModelSpec, plan: Plan) -> StateTag:
        """Make model and optimizer, at the chief."""
        return super().build(spec, plan) if self._leads else self._tag()

    def transfer(self, moves: Sequence[StateTransfer]) -> StateTag:
        """A fresh build stands at step 0 from then on."""
        return super().transfer(moves) if self._leads else self._tag()

    def snapshot(self) -> StateSnapshot:
        """Copy the state to the chief's memory."""
        return super().snapshot() if self._leads else StateSnapshot(step=0, size_bytes=0, state=None)

    def restore(self, copy: StateSnapshot) -> StateTag:
        """Take a state copied by `snapshot`."""
        return super().restore(copy) if self._leads else self._tag()

    def save(self, copy: StateSnapshot, writer: StateWriter) -> None:
        """Write a snapshot's files; only the chief has any."""
        if copy.state is not None:
            super().save(copy, writer)

    def load(self, reader: StateReader) -> StateTag:
        """Take the state of a checkpoint of any engine of TensorFlow's."""
        return super().load(reader) if self._leads else self._tag()

    def warm(self, feed: Feed) -> None:
        """Compile the step, in a throwaway one that applies nothing."""
        if self._leads:
            super().warm(feed)

    def evaluate_step(self, feed: Feed) -> MetricSums:
        """Sums over the feed; nothing on other ranks than the chief."""
        return super().evaluate_step(feed) if self._leads else MetricSums()

    def predict_step(self, feed: Feed) -> Columns:
        """The model's outputs; nothing on other ranks than the chief."""
        return super().predict_step(feed) if self._leads else {}

    @property
    def _leads(self) -> bool:
        return self._group is not None and self._group.rank == 0

    def _tag(self) -> StateTag:
        return super()._tag() if self._leads else StateTag(step=None, pieces=frozenset())


# --- Who of a coordinator's group is there ----------------------------------------------------------------------------


_LONGEST_LINE = 4096
_END = {"end": True}
_IDLE_S, _BETWEEN_S, _PROBES = 10, 5, 4  # a host that is gone answers no probe of the kernel's
_REMEDY = "the first rank that failed says why"


class MemberRegistry:
    """The chief's side. It listens from the start, so that nobody else gets the port, until the group ends."""

    def __init__(self) -> None:
        self._listening = bind_socket(own_host())
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
                    _send_line(connection, _END)
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
        rank = socket_transport.authenticate_peer(
            connection, group.key, time.monotonic() + socket_transport.HANDSHAKE_S
        )
        if rank not in range(1, group.size):
            raise ValueError("of another group")
        connection.settimeout(socket_transport.HANDSHAKE_S)
        former = self._servers.get(rank)
        _send_line(connection, {"host": former.host, "port": former.port} if former else {"host": "", "port": 0})
        server = _receive_line(connection)
        _set_keepalive(connection)
        with self._changed:
            before = self._taken.pop(rank, None)
            if before is not None:
                before.close()
            self._taken[rank] = connection
            self._servers[rank] = Address(host=server["host"], port=int(server["port"]))
            self._changed.notify_all()


class MemberConnection:
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
            socket_transport.authenticate(self._chief, group.key, group.rank, until)
            former = _receive_line(self._chief)
        except (OSError, ValueError) as error:
            self._chief.close()
            raise PeerLost(f"the chief did not let rank {group.rank} in ({error})", remedy=_REMEDY) from error
        if former["host"] not in ("", host):
            self._chief.close()
            raise PeerLost(
                f"rank {group.rank} was on {former['host']} and cannot join from {host}: TensorFlow keeps addresses",
                remedy="let it start on the same node, or let a new generation begin",
            )
        address = Address(host=host, port=former["port"]) if former["port"] else free_address(host)
        serve(address)
        try:
            _send_line(self._chief, {"host": address.host, "port": address.port})
        except OSError as error:
            raise PeerLost(f"the chief is gone ({error})", remedy=_REMEDY) from error
        _set_keepalive(self._chief)
        self._chief.settimeout(None)

    def wait(self) -> None:
        """Until the chief says that the group is over, or is gone."""
        with suppress(OSError, ValueError):  # it is gone
            _receive_line(self._chief)

    def leave(self) -> None:
        """From any thread: the chief knows, and `wait` returns."""
        with suppress(OSError):  # it may have ended already
            self._chief.shutdown(socket.SHUT_RDWR)


def free_address(host: str) -> Address:
    """A port that nobody has bound, which TensorFlow has to bind by itself."""
    with socket.create_server(("", 0)) as probe:
        return Address(host=host, port=probe.getsockname()[1])


def _set_keepalive(connection: socket.socket) -> None:
    """Let the kernel find out within half a minute that the other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", _BETWEEN_S), ("TCP_KEEPCNT", _PROBES)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send_line(connection: socket.socket, words: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(words).encode() + b"\n")


def _receive_line(connection: socket.socket) -> dict[str, Any]:
    """What the other says next. Raises OSError, ValueError where that is nothing."""
    said = b""
    while not said.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece or len(said) > _LONGEST_LINE:
            raise ConnectionError("it hung up")
        said += piece
    words: dict[str, Any] = json.loads(said)
    return words
