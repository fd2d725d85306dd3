"""The independent topology: workers step alone against servers, each of which holds a shard of the state.

A worker pulls parameters, computes the mean gradient of its own share, and pushes it; each server applies pushes in
the order in which they come (Li et al., OSDI 2014, without bounded delay). Workers may die and join without a new
generation.

A push is applied exactly once: it carries (session, sequence), a server remembers the last sequence of each session,
and a worker whose connection broke dials again and repeats its request, which a server that had applied it answers
alike.
"""

from __future__ import annotations

import json
import selectors
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from trainwright.core.data import Columns, Feed, StepReport, Sums
from trainwright.core.errors import PeerLost
from trainwright.core.group import Capabilities, Group, Peer, StateTag
from trainwright.strategies.reference.base import PREFIX, SUFFIX, Base, weightless
from trainwright.strategies.reference.model import Array
from trainwright.strategies.reference.optimizers import Arrays
from trainwright.strategies.reference.state import State, decode, encode
from trainwright.strategies.reference.wire import Link, Port, dial

Message = Mapping[str, npt.NDArray[Any]]
_VERSION, _WISH, _PUSH = "version", "wish", "push"
_ATTEMPTS = 3


def shard_of(sizes: Mapping[str, int], shards: int) -> tuple[tuple[str, ...], ...]:
    """Deal parameters to shards: the largest first, each to the shard that holds least so far; ties by name."""
    dealt: list[list[str]] = [[] for _ in range(shards)]
    loads = [0] * shards
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        dealt[least].append(name)
        loads[least] += sizes[name]
    return tuple(tuple(sorted(names)) for names in dealt)


class Clients:
    """A worker's links to the servers. A broken link is dialled again and the request repeated."""

    def __init__(self, group: Group, servers: Sequence[Peer]) -> None:
        self._group, self._servers = group, tuple(servers)
        self._links: dict[int, Link] = {}
        self._end = False

    def open(self) -> None:
        """Reach every server. Raises PeerLost."""
        for index in range(len(self._servers)):
            self._link(index, time.monotonic() + self._group.deadline_s)

    def ask(self, index: int, request: bytes) -> dict[str, npt.NDArray[Any]]:
        """Send a request to one server and wait for its answer. Raises PeerLost, at the latest at the deadline."""
        until = time.monotonic() + self._group.deadline_s
        for attempt in range(_ATTEMPTS):
            try:
                link = self._link(index, until)
                link.send(request, until)
                return decode(link.receive(until))
            except PeerLost:
                self._drop(index)
                if attempt == _ATTEMPTS - 1 or self._end or time.monotonic() > until:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def cut(self) -> None:
        """End all links, from any thread."""
        self._end = True
        for link in tuple(self._links.values()):
            link.cut()

    def close(self) -> None:
        """End and free all links."""
        self._end = True
        for link in self._links.values():
            link.close()

    def _link(self, index: int, until: float) -> Link:
        if index not in self._links:
            self._links[index] = dial(self._servers[index], self._group.generation, self._group.rank, until)
        return self._links[index]

    def _drop(self, index: int) -> None:
        link = self._links.pop(index, None)
        if link is not None:
            link.close()


class Desk:
    """A server's listening port and its workers' links."""

    def __init__(self, port: Port, group: Group) -> None:
        self._port, self._group = port, group
        self._selector = selectors.DefaultSelector()
        self._selector.register(port, selectors.EVENT_READ)
        self._workers: dict[Link, int] = {}
        self.ended = False

    @property
    def workers(self) -> int:
        """Workers connected now."""
        return len(self._workers)

    def wait(self, until: float) -> list[Link]:
        """Links with a request, after a wait that ends at `until` at the latest; newcomers are let in on the way."""
        ready: list[Link] = []
        for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
            if isinstance(key.fileobj, Link):
                ready.append(key.fileobj)
            elif not self.ended:
                self._admit()
        return ready

    def dismiss(self, link: Link) -> None:
        """A worker is gone."""
        self._selector.unregister(link)
        del self._workers[link]
        link.close()

    def cut(self) -> None:
        """End everything, from any thread."""
        self.ended = True
        self._port.cut()
        for link in tuple(self._workers):
            link.cut()

    def close(self) -> None:
        """End and free everything."""
        self.cut()
        self._selector.close()
        for link in self._workers:
            link.close()
        self._workers = {}

    def _admit(self) -> None:
        try:
            joined = self._port.accept(self._group.generation, time.monotonic() + self._group.deadline_s)
        except PeerLost:
            return  # it had hung up before it was let in, or the port was cut
        if joined is not None:
            rank, link = joined
            self._workers[link] = rank
            self._selector.register(link, selectors.EVENT_READ)


class Independent(Base):
    """One rank of the independent topology; its role in the group says whether it is a server or a worker.

    A server holds the pieces `shard-0` ... `shard-(n-1)` in rank order of the n servers, and counts the updates applied
    as its steps. A worker holds nothing; its own steps are those it was fed.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(topology="independent", tolerates=frozenset({"worker"}))

    def __init__(self, *, host: str | None = None) -> None:
        super().__init__(host=host)
        self._session, self._sequence = "", 0
        self._seen: dict[str, int] = {}

    def form(self, group: Group) -> StateTag:
        """A server opens its desk; a worker, at any time, reaches every server. Raises PeerLost."""
        port = self._enter(group)
        servers = self._servers
        if self._serving:
            self._connections = Desk(port, group)
            self._seen = {}
            return self._tag()
        port.close()
        self._connections = clients = Clients(group, servers)
        self._session, self._sequence = uuid.uuid4().hex, 0
        with self._acting():
            clients.open()
        return self._tag()

    def warm(self, feed: Feed) -> None:
        """A worker's throwaway step: pull and compute, push nothing."""
        with self._acting():
            self._gradients(weightless(feed), self._pull())

    def train_step(self, feed: Feed) -> StepReport:
        """One step of this worker, against the newest parameters. A share without weight pushes nothing.

        Raises:
            PeerLost: a server is gone or did not answer within the deadline.
            NonFiniteLoss, JobError, UserCodeError: nothing was pushed.
        """
        with self._acting():
            parameters = self._pull()
            vector = self._gradients(feed, parameters)
            totals, rate = self.program.totals(vector), self.program.rate(feed.step)
            mean = self.program.mean_gradients(totals, feed.step) if totals.weight > 0 else None
            gradients, norm = mean if mean is not None else ({}, 0.0)
            wish = feed.wish
            if gradients or feed.wish:
                wish = self._push(gradients, wish=feed.wish, rate=rate) or wish
        return StepReport(
            step=feed.step + 1,
            loss=totals.loss / totals.weight if totals.weight > 0 else 0.0,
            weight=totals.weight,
            learning_rate=rate,
            gradient_norm=None if self.program.spec.clip_norm is None else norm,
            wish=wish,
        )

    def evaluate_step(self, feed: Feed) -> Sums:
        """Sums at the servers' newest parameters."""
        return self.program.evaluate(self._newest(), feed)

    def predict_step(self, feed: Feed) -> Columns:
        """Outputs at the servers' newest parameters."""
        return self.program.predict(self._newest(), feed)

    def serve(self) -> None:
        """Answer workers until one wished to stop and all have left, or no worker was there for a whole deadline.

        A worker's death ends its link and nothing else. A worker serves nobody and returns at once.
        """
        if not self._serving:
            return
        desk, alone_since = self._desk, time.monotonic()
        wished = False
        with self._busy:
            while not desk.ended:
                if desk.workers:
                    alone_since = time.monotonic()
                elif wished or time.monotonic() > alone_since + self.group.deadline_s:
                    return
                for link in desk.wait(time.monotonic() + self.group.deadline_s / 10):
                    wished = self._attend(desk, link, wished) or wished

    @property
    def _servers(self) -> tuple[Peer, ...]:
        return tuple(peer for peer in self.group.peers if peer.role == "server")

    @property
    def _serving(self) -> bool:
        return self.group.peers[self.group.rank].role == "server"

    @property
    def _desk(self) -> Desk:
        assert isinstance(self._connections, Desk), "form comes first"
        return self._connections

    @property
    def _clients(self) -> Clients:
        assert isinstance(self._connections, Clients), "form comes first"
        return self._connections

    @property
    def _dealt(self) -> tuple[tuple[str, ...], ...]:
        """Parameter names by server."""
        sizes = {name: value.size for name, value in self.program.initial().parameters.items()}
        return shard_of(sizes, len(self._servers))

    def _part(self, whole: State) -> State:
        """A server keeps its shard, a worker nothing."""
        return whole.only(self._dealt[self._index] if self._serving else ())

    @property
    def _index(self) -> int:
        """Place of this server among the servers."""
        return [peer.rank for peer in self._servers].index(self.group.rank)

    def _tag(self) -> StateTag:
        names = [f"shard-{index}" for index in range(len(self._servers))]
        return StateTag(
            step=None if self._state is None else self._state.step,
            layout=f"sharded-{len(names)}",
            pieces=frozenset({names[self._index]} if self._serving else ()),
            whole=frozenset(names),
        )

    def _file(self) -> str:
        return f"{PREFIX}-{self.group.rank:05d}{SUFFIX}"

    def _gradients(self, feed: Feed, parameters: Arrays) -> Array:
        """The vector of sums of this worker's feed."""
        vectors = [
            self.program.share(parameters, part, step=feed.step, data_rank=data_rank)
            for data_rank, part in zip(feed.data_ranks, feed.parts, strict=True)
        ]
        return sum(vectors[1:], start=vectors[0])

    def _newest(self) -> Arrays:
        """All parameters, in the model's order; a server has only its own and no business with outputs."""
        with self._acting():
            return self._pull()

    def _pull(self) -> Arrays:
        """Parameters of all servers."""
        pulled: dict[str, Array] = {}
        for index in range(len(self._servers)):
            pulled.update(_parameters(self._clients.ask(index, encode(_request(self._session)))))
        return {name: pulled[name] for name in self.program.model.parameters}

    def _push(self, gradients: Arrays, *, wish: bool, rate: float) -> bool:
        """Each server gets the gradients of its shard. True when some worker wished to stop."""
        self._sequence += 1
        heard = False
        for index, names in enumerate(self._dealt):
            mine = {name: gradients[name] for name in names} if gradients else {}
            request = _request(self._session, self._sequence, wish, rate, mine)
            heard = bool(self._clients.ask(index, encode(request))[_WISH]) or heard
        return heard

    def _attend(self, desk: Desk, link: Link, wished: bool) -> bool:
        """Answer one request. True when it wished to stop."""
        until = time.monotonic() + self.group.deadline_s
        try:
            request = decode(link.receive(until))
        except PeerLost:
            desk.dismiss(link)
            return False
        head = json.loads(request.pop(_PUSH).tobytes())
        self._apply(head, request)
        wish = wished or bool(head["wish"])
        answer: dict[str, npt.NDArray[Any]] = {_WISH: np.array(wish), _VERSION: np.array(self.state.step or 0)}
        if not head["sequence"]:
            answer.update({f"/{name}": value for name, value in self.state.parameters.items()})
        try:
            link.send(encode(answer), until)
        except PeerLost:
            desk.dismiss(link)
        return bool(head["wish"])

    def _apply(self, head: Mapping[str, Any], gradients: Arrays) -> None:
        """Apply a push that has not been seen; a pull has sequence 0."""
        session, sequence = str(head["session"]), int(head["sequence"])
        if sequence <= self._seen.get(session, 0):
            return
        self._seen[session] = sequence
        if not gradients:
            return
        named = _parameters(gradients)
        state = self.state
        parameters, slots = self.program.optimizer.update(state.parameters, named, state.slots, float(head["rate"]))
        self._state = State(parameters=parameters, slots=slots, step=(state.step or 0) + 1)


def _request(
    session: str, sequence: int = 0, wish: bool = False, rate: float = 0.0, gradients: Arrays | None = None
) -> Message:
    """A pull (sequence 0) or a push, as named arrays."""
    head = json.dumps({"session": session, "sequence": sequence, "wish": wish, "rate": rate})
    named = {f"/{name}": value for name, value in (gradients or {}).items()}
    return {_PUSH: np.frombuffer(head.encode(), np.uint8), **named}


def _parameters(message: Message) -> dict[str, Array]:
    """The arrays of a message that belong to parameters."""
    return {name[1:]: value for name, value in message.items() if name.startswith("/")}
