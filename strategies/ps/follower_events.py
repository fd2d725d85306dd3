"""The other servers as the first one sees them: events for them, their progress, and whether they are alive."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trainwright.core.errors import PeerLost
from trainwright.core.topology import Group, Peer
from trainwright.strategies.common.socket_transport import LOST_PEER_REMEDY
from trainwright.strategies.ps.call_headers import PollCall, require
from trainwright.strategies.ps.server_connections import WorkerConnection
from trainwright.strategies.ps.shard_server import send_answer, wait_notice_s


@dataclass(frozen=True, kw_only=True)
class _Poll:
    """Another server that waits for the events after those that it has received."""

    connection: WorkerConnection
    received: int
    since_s: float


class FollowerEvents:
    """Queue of events for the other servers. Each server polls; events that all have received are dropped.

    Args:
        group: of the server. Another server that is silent for its deadline is lost.
        servers: all servers.
    """

    def __init__(self, group: Group, servers: Iterable[Peer]) -> None:
        self._group = group
        self.ranks = frozenset(peer.rank for peer in servers) - {group.rank}
        self._opened: set[int] = set()  # servers that have begun this segment
        self._ended: set[int] = set()  # servers that have ended it
        self._alive_s: dict[int, float] = {}
        self._events: list[dict[str, Any]] = []  # that not all servers have received
        self._dropped = 0  # events before those
        self._polls: dict[int, _Poll] = {}
        self._received: dict[int, int] = {}

    @property
    def all_opened(self) -> bool:
        """Whether all servers have begun this segment."""
        return self._opened == self.ranks

    @property
    def all_ended(self) -> bool:
        """Whether all servers have ended this segment."""
        return self._ended == self.ranks

    def start_segment(self) -> None:
        """Count the silence of servers from now on."""
        self._alive_s = dict.fromkeys(self.ranks, time.monotonic())

    def end_segment(self, step: int) -> None:
        """Tell all servers that the segment is over, and wait for them to end it."""
        self._opened, self._ended = set(), set()
        self.publish(over=step)

    def opened(self, rank: int) -> None:
        """A server has begun this segment."""
        self._opened.add(rank)

    def ended(self, rank: int) -> None:
        """A server has ended this segment."""
        self._ended.add(rank)

    def publish(self, **event: object) -> None:
        """Send an event to all other servers."""
        if self.ranks:
            self._events.append(event)

    def alive(self, connection: WorkerConnection) -> None:
        """A call came over a connection. Raises MalformedCallError unless another server made it."""
        require(connection.rank in self.ranks, "only servers make this call")
        self._alive_s[connection.rank] = time.monotonic()

    def poll(self, connection: WorkerConnection, head: PollCall) -> None:
        """Another server waits for events."""
        self.alive(connection)
        known = 0 <= head.received - self._dropped <= len(self._events)
        require(known, f"event {head.received} is not in the queue")
        rank = connection.rank
        self._received[rank] = head.received
        self._polls[rank] = _Poll(connection=connection, received=head.received, since_s=time.monotonic())
        if len(self._received) == len(self.ranks):
            least = min(self._received.values())
            del self._events[: least - self._dropped]
            self._dropped = least

    def answer_polls(self, now_s: float) -> None:
        """Answer the servers for which there are events, and those that have waited for long."""
        for rank, poll in list(self._polls.items()):
            events = self._events[poll.received - self._dropped :]
            if events or now_s - poll.since_s > wait_notice_s(self._group):
                send_answer(poll.connection, events=events)
                del self._polls[rank]

    def check_alive(self, now_s: float) -> None:
        """Raise PeerLost for servers that were silent for longer than the deadline."""
        silent = sorted(rank for rank, called_s in self._alive_s.items() if now_s - called_s > self._group.deadline_s)
        if silent:
            raise PeerLost(f"servers {silent} did not answer within the deadline", remedy=LOST_PEER_REMEDY)
