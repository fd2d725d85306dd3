"""The independent topology in numpy float64: the executable meaning of `core.engine.Independent`.

The servers' side and the workers' are `trainwright.strategies.ps`'; here are a shard, and what a worker computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from trainwright.core.data import Columns, Feed, StepReport, Sums
from trainwright.core.engine import ModelSpec, StateCopy
from trainwright.core.errors import TrainwrightError
from trainwright.core.group import Address, Capabilities, Generation, Group, Peer, Role, StateTag
from trainwright.core.plan import Plan
from trainwright.core.staleness import Staleness, Unit
from trainwright.strategies.common.host_address import own_host
from trainwright.strategies.ps.client import Clients
from trainwright.strategies.ps.follower_server import Follower
from trainwright.strategies.ps.lead_server import Lead
from trainwright.strategies.ps.server import Desk
from trainwright.strategies.ps.server_config import Rules
from trainwright.strategies.ps.shard_store import Shard
from trainwright.strategies.ps.sockets import Listener
from trainwright.strategies.reference.base import PREFIX, SUFFIX, Base, weightless
from trainwright.strategies.reference.optimizers import Arrays
from trainwright.strategies.reference.shards import NumpyBank, beginning, local, part_of, shards_of, whole_of, write
from trainwright.strategies.reference.state import State
from trainwright.strategies.reference.user_functions import Totals


@dataclass(kw_only=True)
class _Work:
    """What a worker has done of its unit.

    Attributes:
        pulled: the parameters that it began with.
        now: those that its local steps came to.
        sums: of each step: weighted sum of losses, sum of weights.
        norms: of each step's gradient, before clipping.
    """

    pulled: Arrays
    now: Arrays
    sums: list[tuple[float, float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


class Independent(Base):
    """One rank of the independent topology; its role in the group says whether it is a server or a worker.

    A server holds one of the pieces `shard-0` ... `shard-(n-1)`, in rank order of the n servers. A worker holds none;
    with local steps its optimizer's state is its own, and goes when it goes.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(topology="independent", tolerates=frozenset({"worker"}))

    def __init__(self, *, host: str | None = None) -> None:
        super().__init__(host=host)
        self._listener: Listener | None = None
        self._plan: Plan | None = None
        self._bank: NumpyBank | None = None
        self._shards: tuple[Shard, ...] = ()
        self._sound = True
        self._own_slots: Arrays | None = None
        self._work: _Work | None = None
        self._rules: Rules
        self._parameters: Arrays = {}

    def reserve(self, generation: Generation, role: Role) -> Address:
        """Listen on a port that the system chooses, under which servers are found."""
        self.leave()
        self._listener = Listener(self._host or own_host())
        return self._listener.address

    def form(self, group: Group) -> StateTag:
        """A server opens its desk; a worker, at any time, reaches every server. Raises PeerLost."""
        assert self._listener is not None, "reserve comes first"
        listener, self._listener, self._group = self._listener, None, group
        if self._serving:
            kind = Lead if self._index == 0 else Follower
            self._connections = kind(listener, group, self._servers)
        else:
            listener.close()
            self._connections = clients = Clients(group, self._servers)
            with self._acting():
                clients.open()
        if self._program is not None:
            self._program.where = self._where()
            self._equip()
        return self._tag()

    def build(self, spec: ModelSpec, plan: Plan) -> StateTag:
        """Make model and optimizer, the same on every rank for one seed; step None."""
        self._plan = plan
        super().build(spec, plan)
        self._equip()
        return self._tag()

    def snapshot(self) -> StateCopy:
        """A deep copy of a server's shard, between two calls of `serve`."""
        if not isinstance(self._connections, Desk):
            return super().snapshot()
        self._connections.check()
        with self._connections.lock:
            return super().snapshot()

    def warm(self, feed: Feed) -> None:
        """A worker's throwaway step: pull and compute, push nothing."""
        if not self._serving:
            self._computed(weightless(feed), self._newest())

    def serve(self, until: int, wish: Callable[[], bool]) -> Iterator[StepReport]:
        """Let the workers take the steps before `until`."""
        assert self._bank is not None, "build comes first"
        self._settle(self.state)
        with self._busy:
            yield from self.server.serve(self.state.step or 0, until, wish)
        self._state = State(parameters=self._bank.parameters, slots=self._bank.slots, step=self.server.step)

    def staleness(self) -> Staleness:
        """Of what was applied at this server since it was asked last."""
        return self.server.staleness()

    def lease(self, first: int) -> Unit | None:
        """A worker's next unit; None when the servers' `serve` from step `first` on is over."""
        with self._busy:
            self._work, grant = None, self.clients.lease(first)
        return None if grant is None else grant.unit

    def train_step(self, feed: Feed) -> StepReport:
        """One step of the unit that was leased last: its first begins with a pull, its last ends with a push.

        Raises:
            PeerLost: a server is gone or did not answer within the deadline.
            NonFiniteLoss, JobError, UserCodeError: nothing was pushed.
        """
        with self._busy:
            unit, work = self._going_on(feed)
            totals, rate = self._computed(feed, work.now), self.program.rate(feed.step)
            gradients, norm = self._gradients(totals, feed.step)
            if gradients and local(self.plan):
                slots = self._own_slots or self.program.optimizer.initial(work.now)
                work.now, self._own_slots = self.program.update(work.now, gradients, slots, rate)
            work.sums.append((totals.loss, totals.weight))
            work.norms.append(norm)
            if len(work.sums) == unit.steps:
                self._push(work, gradients)
        return StepReport(
            step=feed.step + 1,
            loss=totals.loss / totals.weight if totals.weight > 0 else 0.0,
            weight=totals.weight,
            learning_rate=rate,
            gradient_norm=None if self.program.spec.clip_norm is None else norm,
            wish=feed.wish,
        )

    def evaluate_step(self, feed: Feed) -> Sums:
        """Sums at the servers' newest parameters, in a worker."""
        return self.program.evaluate(self._newest(), feed)

    def predict_step(self, feed: Feed) -> Columns:
        """Outputs at the servers' newest parameters, in a worker."""
        return self.program.predict(self._newest(), feed)

    def interrupt(self, deadline_s: float) -> bool:
        """Cut all connections, so that a blocked call raises; True when no call is left within the deadline."""
        if self._listener is not None:
            self._listener.cut()
        ended = super().interrupt(deadline_s)
        return ended and (not isinstance(self._connections, Desk) or self._connections.join(deadline_s))

    def leave(self) -> None:
        """End the group and keep the state."""
        if isinstance(self._connections, Desk):
            self._connections.cut()
            self._sound = self._sound and self._connections.sound
        super().leave()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # --- the group ---

    @property
    def _servers(self) -> tuple[Peer, ...]:
        return tuple(peer for peer in self.group.peers if peer.role == "server")

    @property
    def _serving(self) -> bool:
        return self.group.peers[self.group.rank].role == "server"

    @property
    def _index(self) -> int:
        """Place of this server among the servers."""
        return [peer.rank for peer in self._servers].index(self.group.rank)

    @property
    def server(self) -> Desk:
        """The server of this rank, once it has formed its group."""
        assert isinstance(self._connections, Desk), "form comes first"
        return self._connections

    @property
    def clients(self) -> Clients:
        """Connections of this worker to the servers, once it has formed its group."""
        assert isinstance(self._connections, Clients), "form comes first"
        return self._connections

    @property
    def plan(self) -> Plan:
        """The plan; `build` comes first."""
        assert self._plan is not None, "build comes first"
        return self._plan

    # --- the state ---

    def _equip(self) -> None:
        """What this group needs of the state: a server's shard where others reach it, a worker's room for all."""
        self._shards = shards_of(self.program.initial().parameters, len(self._servers))
        self._rules, self._own_slots = Rules.of(self.plan, self.program.spec), None
        if not self._serving:
            self.clients.lay(self._shards, [shard.trained_bytes for shard in self._shards])
            return
        fresh = self._part(self._initial())
        if self.state.parameters.keys() != fresh.parameters.keys():  # it held another piece, or none
            self._state = fresh
        self._bank = NumpyBank(self._shards[self._index], self.program, self.plan, self.state)
        self.server.open(self._bank, self._rules)
        self._state = replace(self.state, parameters=self._bank.parameters)

    def _initial(self) -> State:
        return beginning(self.program, self.plan)

    def _part(self, whole: State) -> State:
        """A server keeps its shard, a worker nothing."""
        if not self._serving:
            return State(parameters={}, slots={}, step=whole.step)
        return part_of(whole, shards_of(whole.parameters, len(self._servers))[self._index])

    def _hold(self, state: State) -> None:
        """A server's workers pull this from now on."""
        self._state, self._sound = state, True
        if self._bank is not None and isinstance(self._connections, Desk):
            with self._connections.lock:
                self._bank.take(state)
                self._connections.renewed()
            self._state = replace(state, parameters=self._bank.parameters)

    def _tag(self) -> StateTag:
        count = len(self._servers)
        return StateTag(
            step=None if self._state is None else self._state.step,
            layout=f"sharded-{count}",
            pieces=frozenset({f"shard-{self._index}"} if self._serving else ()),
            total=count,
            sound=self._sound and (not isinstance(self._connections, Desk) or self._connections.sound),
        )

    def _file(self) -> str:
        return f"{PREFIX}-{self.group.rank:05d}{SUFFIX}"

    # --- a worker's steps ---

    def _going_on(self, feed: Feed) -> tuple[Unit, _Work]:
        """The unit that this step is of, and what was done of it; it begins with a pull."""
        grant = self.clients.grant
        done = 0 if self._work is None else len(self._work.sums)
        if grant is None or feed.step != grant.unit.step + done or tuple(feed.data_ranks) != (grant.unit.share,):
            raise TrainwrightError(
                f"fed step {feed.step} of data ranks {list(feed.data_ranks)} after {done} steps of {grant}",
                where=self._where(),
            )
        if self._work is None:
            pulled = self._pulled(grant.needs)
            self._work = _Work(pulled=pulled, now=pulled)
        return grant.unit, self._work

    def _pulled(self, needs: int) -> Arrays:
        """The servers' newest parameters, which hold the updates of so many rounds at least."""
        if self.clients.pull(needs):
            shapes = {name: value.shape for name, value in self.program.model.parameters.items()}
            self._parameters = whole_of(self._shards, self.clients.memory, shapes)
        return self._parameters

    def _newest(self) -> Arrays:
        with self._busy:
            return self._pulled(0)

    def _computed(self, feed: Feed, parameters: Arrays) -> Totals:
        """Sums over this worker's feed."""
        vectors = [
            self.program.share(parameters, part, step=feed.step, data_rank=data_rank)
            for data_rank, part in zip(feed.data_ranks, feed.parts, strict=True)
        ]
        return self.program.totals(sum(vectors[1:], start=vectors[0]))

    def _gradients(self, totals: Totals, step: int) -> tuple[Arrays, float]:
        """The mean gradient, and its norm before clipping; none where there is no weight."""
        if totals.weight <= 0:
            return {}, 0.0
        return self.program.mean_gradients(totals, step, clip=not self._rules.clips)

    def _push(self, work: _Work, gradients: Arrays) -> None:
        """Push the gradient of a step, or how far local steps went."""
        weight = sum(weight for _, weight in work.sums)
        if weight > 0:
            went = {name: work.now[name] - value for name, value in work.pulled.items()}
            for shard, outbox in zip(self._shards, self.clients.outbox, strict=True):
                write(shard, went if local(self.plan) else gradients, outbox)
        self.clients.push(weight=weight, sums=work.sums, norm=sum(work.norms) / len(work.norms))
