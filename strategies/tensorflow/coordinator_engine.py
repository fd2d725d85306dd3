"""Base of the engines with a coordinator: the chief holds the state and is fed, the other members serve.

Each member connects to the chief, sends the address of its TensorFlow server, and waits on that connection for the end
of the group. A closed connection tells the chief at once that a process is gone. TensorFlow knows each member by a
fixed address, so a process that replaces another one gets the port of its predecessor.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trainwright.core.data import Columns, Feed, MetricSums
from trainwright.core.engine import MetricStates, ModelSpec, StateReader, StateSnapshot, StateWriter
from trainwright.core.errors import PeerLost
from trainwright.core.plan import Plan
from trainwright.core.topology import Address, Group, Role, StateTag, StateTransfer
from trainwright.strategies.common.socket_transport import (
    HANDSHAKE_S,
    LOST_PEER_REMEDY,
    NO_DEADLINE,
    FramedConnection,
    SocketListener,
    accept_member,
    bind_socket,
    join_group,
    own_host,
)
from trainwright.strategies.tensorflow.tensorflow_engine import TensorFlowEngine

_log = logging.getLogger(__name__)
_MAX_MESSAGE_BYTES = 4096
_ADDRESS = TypeAdapter(Address)
_PORT_POLL_S = 0.05


class TensorFlowCoordinatorEngine(TensorFlowEngine):
    """A member of the group. Only the chief holds a state, is fed and steps; the others return empty results."""

    def __init__(self) -> None:
        super().__init__()
        self._registry: MemberRegistry | None = None
        self._membership: MemberConnection | None = None

    @abstractmethod
    def lead(self, group: Group, servers: Mapping[int, Address]) -> Any:
        """Open the chief's strategy, given the address of each other member's server. Raises PeerLost, JobError."""

    @abstractmethod
    def serve(self, group: Group, address: Address) -> Any:
        """Start another member's server at an address, and return an object that keeps it alive."""

    # --- the group ----------------------------------------------------------------------------------------

    def reserve(self, role: Role) -> Address:
        """Bind the port at which the others reach the chief; they send the addresses of their own servers to it."""
        self._check_new()
        if role != "chief":
            return Address(host=own_host(), port=0)
        if self._registry is not None:
            self._registry.end()
        self._registry = MemberRegistry()
        return self._registry.address

    def open_strategy(self, group: Group) -> Any:
        """Open the chief's strategy, once all others serve; return the server on the others."""
        if group.rank:
            served: list[Any] = []
            self._membership = MemberConnection(group, lambda address: served.append(self.serve(group, address)))
            return served[0]
        assert self._registry is not None, "call reserve() first"
        until = time.monotonic() + group.deadline_s
        self._registry.open(group)
        return self.lead(group, self._registry.gather(group, until))

    def follow(self) -> None:
        """Serve until the chief leaves or is lost. TensorFlow's own threads do the work."""
        if self._membership is not None:
            self._membership.wait()

    def interrupt(self, deadline_s: float) -> bool:
        """Let a waiting `follow` return. Return False on the chief: nothing interrupts its steps."""
        if self._membership is None:
            return super().interrupt(deadline_s)
        self._membership.leave()
        return True

    def leave(self) -> None:
        """End the group: the chief tells the others, and notices by the connection when another member leaves."""
        if self._registry is not None:
            self._registry.end()
        if self._membership is not None:
            self._membership.leave()
        super().leave()

    # --- calls that only the chief carries out -------------------------------------------------------------

    def build(self, spec: ModelSpec, plan: Plan) -> StateTag:
        """Make model and optimizer, on the chief."""
        return super().build(spec, plan) if self._leads else self._tag()

    def transfer(self, moves: Sequence[StateTransfer]) -> StateTag:
        """Set a fresh build to step 0."""
        return super().transfer(moves) if self._leads else self._tag()

    def snapshot(self) -> StateSnapshot:
        """Copy the state to the chief's memory."""
        return super().snapshot() if self._leads else StateSnapshot(step=0, size_bytes=0, state=None)

    def restore(self, copy: StateSnapshot) -> StateTag:
        """Take a state copied by `snapshot`."""
        return super().restore(copy) if self._leads else self._tag()

    def save(self, copy: StateSnapshot, writer: StateWriter) -> None:
        """Write a snapshot's files, on the chief."""
        if copy.state is not None:
            super().save(copy, writer)

    def load(self, reader: StateReader) -> StateTag:
        """Take the state of a checkpoint of any TensorFlow engine."""
        return super().load(reader) if self._leads else self._tag()

    def warm(self, feed: Feed) -> None:
        """Compile the step by a trial step that applies nothing."""
        if self._leads:
            super().warm(feed)

    def evaluate_step(self, feed: Feed, states: MetricStates | None = None) -> MetricSums:
        """Return sums over the feed, on the chief."""
        return super().evaluate_step(feed, states) if self._leads else MetricSums()

    def predict_step(self, feed: Feed) -> Columns:
        """Return the model's outputs, on the chief."""
        return super().predict_step(feed) if self._leads else {}

    @property
    def _leads(self) -> bool:
        return self._group is not None and self._group.rank == 0

    def _tag(self) -> StateTag:
        return super()._tag() if self._leads else StateTag(step=None, pieces=frozenset())


class MemberRegistry:
    """The chief's connections to the other members. It listens from `reserve` until the group ends."""

    def __init__(self) -> None:
        self._listener = SocketListener(own_host(), unix=False)
        self.address = self._listener.address
        self._connections: dict[int, FramedConnection] = {}
        self._servers: dict[int, Address] = {}
        self._changed = threading.Condition()
        self._over = False

    def open(self, group: Group) -> None:
        """Accept members in a thread of its own, those that replace others too."""
        threading.Thread(target=self._accept_all, args=(group,), name="members", daemon=True).start()

    def gather(self, group: Group, until: float) -> Mapping[int, Address]:
        """Return the address of each member's server, once all have joined. Raises PeerLost at the deadline."""
        others = range(1, group.size)
        with self._changed:
            self._changed.wait_for(lambda: len(self._servers) == len(others), until - time.monotonic())
            absent = [rank for rank in others if rank not in self._servers]
            if absent:
                raise PeerLost(f"ranks {absent} did not join within the deadline", remedy=LOST_PEER_REMEDY)
            return dict(self._servers)

    def gone(self) -> list[int]:
        """Return the ranks whose process or host is lost and not yet replaced."""
        with self._changed:
            poll, ranks = select.poll(), {each.fileno(): rank for rank, each in self._connections.items()}
            for descriptor in ranks:
                poll.register(descriptor, select.POLLIN)  # a member sends nothing more: readable means ended
            return sorted(ranks[descriptor] for descriptor, _ in poll.poll(0))

    def end(self) -> None:
        """Tell all members that the group is over, and stop listening. Safe to call twice."""
        with self._changed:
            self._over = True
            self._listener.cut()  # wakes the thread that accepts
            self._listener.close()
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    def _accept_all(self, group: Group) -> None:
        while True:
            try:
                joined = accept_member(self._listener, group.key, NO_DEADLINE)
            except OSError:
                if self._over:
                    return
                raise
            if joined is None:
                continue
            rank, connection = joined
            try:
                self._admit(group, rank, connection)
            except PeerLost as error:  # a member of another group, lost again, or without an address
                _log.warning("the chief ends the connection of rank %d: %s", rank, error.what)
                connection.close()

    def _admit(self, group: Group, rank: int, connection: FramedConnection) -> None:
        if rank not in range(1, group.size):
            raise PeerLost(f"rank {rank} is not in this group")
        until = time.monotonic() + HANDSHAKE_S
        former = self._servers.get(rank, Address(host="", port=0))
        connection.send(_ADDRESS.dump_json(former), until)
        server = _unpacked(connection, until)
        with self._changed:
            if self._over:
                raise PeerLost("the group is over")
            before = self._connections.pop(rank, None)
            if before is not None:
                before.close()
            self._connections[rank], self._servers[rank] = connection, server
            self._changed.notify_all()


class MemberConnection:
    """Another member's connection to the chief.

    Args:
        group: as this member sees it.
        serve: (address) -> starts the TensorFlow server there; raises if the port is taken.

    Raises:
        PeerLost: the chief cannot be reached within the deadline or sends no address, or the rank was on another host
            before.
    """

    def __init__(self, group: Group, serve: Callable[[Address], None]) -> None:
        until, host = time.monotonic() + group.deadline_s, own_host()
        self._chief = join_group(group.peers[0].address, group.key, group.rank, until, "the chief")
        try:
            former = _unpacked(self._chief, until)
            if former.host not in ("", host):
                raise PeerLost(
                    f"rank {group.rank} was on {former.host} and cannot join from {host}: TensorFlow keeps addresses",
                    remedy="start it on the same node, or form a new group",
                )
            with free_address(host, former.port, min(until, time.monotonic() + HANDSHAKE_S / 2)) as address:
                serve(address)
            self._chief.send(_ADDRESS.dump_json(address), until)
        except BaseException:
            self._chief.close()
            raise

    def wait(self) -> None:
        """Return once the group is over, or the chief is lost."""
        with suppress(PeerLost):  # both close the connection
            self._chief.receive(NO_DEADLINE, _MAX_MESSAGE_BYTES)

    def leave(self) -> None:
        """Leave the group, from any thread: the chief notices, and `wait` returns."""
        self._chief.cut()


@contextmanager
def free_address(host: str, port: int = 0, until: float = 0.0) -> Iterator[Address]:
    """Keep a port from all processes but a server of TensorFlow, which is to bind it within the context.

    Args:
        host: of the address.
        port: 0 for any that is free. Another process may have a port for now, such as for a connection of its own.
        until: by `time.monotonic`, how long to wait for it then.

    Raises:
        PeerLost: the port is still in use.
    """
    while True:
        try:
            held = bind_socket("", port, shared=True)
            break
        except OSError as error:
            if time.monotonic() >= until:
                raise PeerLost(
                    f"port {port}, by which TensorFlow knows this rank, cannot be bound: {error.strerror}",
                    remedy="form a new group, or find the process that has the port: ss -tanp",
                ) from error
        time.sleep(_PORT_POLL_S)
    with held:
        yield Address(host=host, port=held.getsockname()[1])


def _unpacked(connection: FramedConnection, until: float) -> Address:
    """Receive an address. Raises PeerLost, also for a message that is no address."""
    message = connection.receive(until, _MAX_MESSAGE_BYTES)
    try:
        address = _ADDRESS.validate_json(message, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"]
        raise PeerLost(f"{connection.peer} sent a malformed address: {problem}", remedy=LOST_PEER_REMEDY) from error
    if not 0 <= address.port < 2**16:
        raise PeerLost(f"{connection.peer} sent the port {address.port}, which is none", remedy=LOST_PEER_REMEDY)
    return address
