"""The engine of parameter servers: workers take steps alone, and servers hold the parameters and update them.

A server runs nothing of the model: it holds a shard of it in host memory and takes the optimizer's steps. A worker
copies the parameters, computes the mean gradient of a unit, and pushes it while backward is still under way; or takes
several local steps with an optimizer of its own, and pushes the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from trainwright.core.data import Columns, Feed, MetricSums, StepReport
from trainwright.core.engine import MetricStates, ModelSpec, StateReader, StateSnapshot
from trainwright.core.errors import TrainwrightError
from trainwright.core.plan import Plan
from trainwright.core.topology import (
    Address,
    Capabilities,
    Group,
    Peer,
    Role,
    StalenessCounts,
    StateTag,
    StateTransfer,
    WorkUnit,
)
from trainwright.strategies.common.socket_transport import ConnectionCanceller, SocketListener, own_host
from trainwright.strategies.ps.parameter_client import ParameterClient
from trainwright.strategies.ps.server_roles import FollowerServer, LeadServer
from trainwright.strategies.ps.shard_server import ShardServer
from trainwright.strategies.ps.update_applier import ServerConfig
from trainwright.strategies.torch.engines.base import TorchEngine
from trainwright.strategies.torch.ps.parameter_worker import ParameterWorker
from trainwright.strategies.torch.ps.shard_store import TorchShardStore
from trainwright.strategies.torch.training.train_state import TorchReplica
from trainwright.strategies.torch.training.train_step import StepRunner


class _ServerGroupEngine(TorchEngine):
    """A server or a worker, by its role in the group; `ParameterServer` adds the steps.

    Servers hold the pieces `shard-0`, `shard-1` and so on, in the order of their ranks; workers hold none.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        topology="independent",
        tolerates=frozenset({"worker"}),
        inductor=True,
        tracer=TorchEngine.capabilities.tracer,
    )

    def __init__(self) -> None:
        super().__init__()
        self._listener: SocketListener | None = None
        self._switch = ConnectionCanceller()
        self._server: ShardServer | None = None
        self._store: TorchShardStore | None = None
        self._job: tuple[ModelSpec, Plan] | None = None
        self._connections: ParameterClient | None = None
        self._worker: ParameterWorker | None = None
        self._built_for: tuple[int, int] | None = None  # the place of the replica

    def reserve(self, role: Role) -> Address:
        """Let a server listen on a port that the system chooses; no rank connects to a worker."""
        self.leave()
        self._switch = ConnectionCanceller()
        if role != "server":
            return super().reserve(role)
        self._listener = SocketListener(own_host())
        return self._listener.address

    def form(self, group: Group) -> StateTag:
        """Start to answer workers, or connect to all servers."""
        super().form(group)
        if self._serving:
            assert self._listener is not None, "reserve() comes first"
            kind = LeadServer if group.rank == self._servers[0].rank else FollowerServer
            self._server = kind(self._listener, group, self._servers, self._switch)
            self._listener = None
            if self._switch.off:  # cancelled before there was a server
                self._server.cut()
        else:
            self._connections = ParameterClient(group, self._servers, self._switch)
            self._connections.open()
        if self._job is not None:
            self._guarded(self._join_servers)
        return self._tag()

    def leave(self) -> None:
        """Close all connections; the state stays. Safe to call at any time, and twice."""
        super().leave()
        if self._server is not None:
            self._server.cut()
            if self._replica is not None:  # a shard that was interrupted within a segment belongs to no step
                self._replica.sound = self._replica.sound and self._server.updates.sound
        for held in (self._server, self._connections, self._listener):
            if held is not None:
                held.close()
        self._server = self._connections = self._listener = None

    def interrupt(self, deadline_s: float) -> bool:
        """Close all connections, so that a blocked call raises PeerLost; a group that has not formed does not form."""
        for held in (self._switch, self._listener, self._server, self._connections):
            if held is not None:
                held.cut()
        return self._server is None or self._server.join(deadline_s)

    # --- the state ----------------------------------------------------------------------------------------

    def build(self, spec: ModelSpec, plan: Plan) -> StateTag:
        """Build the model; a server keeps its shard of it, a worker has memory for all of it."""
        self._job = spec, plan
        super().build(spec, plan)
        self._join_servers()
        return self._tag()

    def transfer(self, moves: Sequence[StateTransfer]) -> StateTag:
        """Send nothing, since no two ranks hold the same state. A fresh build is at step 0 from now on."""
        if moves:
            raise TrainwrightError("no other server has a copy of a shard", remedy="restore from a checkpoint")
        return super().transfer(moves)

    def snapshot(self) -> StateSnapshot:
        """Copy a server's shard to host memory."""
        if self._server is None:
            return super().snapshot()
        self._server.check()
        with self._server.lock:
            return super().snapshot()

    def restore(self, copy: StateSnapshot) -> StateTag:
        """Restore a server's shard that `snapshot` copied."""
        return self._renewed(lambda: super(_ServerGroupEngine, self).restore(copy))

    def load(self, reader: StateReader) -> StateTag:
        """Load a server's shard of a checkpoint; a worker pulls."""
        if not self._serving:
            return self._tag()
        return self._renewed(lambda: super(_ServerGroupEngine, self).load(reader))

    # --- for the steps --------------------------------------------------------------------------------------

    @property
    def server(self) -> ShardServer:
        """The server of this rank, once it has formed its group."""
        assert self._server is not None, "form() comes first"
        return self._server

    @property
    def _servers(self) -> tuple[Peer, ...]:
        assert self._group is not None, "form() comes first"
        return tuple(peer for peer in self._group.peers if peer.role == "server")

    @property
    def _serving(self) -> bool:
        return any(peer.rank == self._rank for peer in self._servers)

    @property
    def _client(self) -> ParameterClient:
        assert self._connections is not None, "form() comes first"
        return self._connections

    @property
    def _trainer(self) -> ParameterWorker:
        assert self._worker is not None, "build() comes first"
        return self._worker

    @property
    def _place(self) -> tuple[int, int] | None:
        """This server's number and the number of servers; None for a worker."""
        return (self._rank, len(self._servers)) if self._serving else None

    def _tag(self) -> StateTag:
        plain, count = super()._tag(), len(self._servers)
        return StateTag(
            step=plain.step if self._serving else None,
            layout=f"servers-{count}",
            pieces=frozenset({f"shard-{self._rank}"} if self._serving else ()),
            total=count,
            sound=plain.sound and (self._server is None or self._server.updates.sound),
        )

    def _build_replica(self, spec: ModelSpec, plan: Plan) -> TorchReplica:
        self._store = self._worker = None
        self._built_for = self._place
        if self._serving:
            self._store = TorchShardStore(spec, plan, self._rank, self._where)
            return self._store.replica
        self._worker = ParameterWorker(super()._build_replica(spec, plan), plan, self._where)
        return self._worker.replica

    def _renewed(self, change: Callable[[], StateTag]) -> StateTag:
        """Change the state of a server, and let its workers know."""
        server = self.server
        with server.lock:
            change()
            server.renewed()
        return self._tag()

    def _join_servers(self) -> None:
        """Let workers pull from this server, or this worker from the servers.

        The replica is kept where it is this rank's part in the new group too, and built otherwise.
        """
        assert self._job is not None, "build() comes first"
        spec, plan = self._job
        if self._built_for != self._place:
            self._replica = self._build_replica(spec, plan)
        if self._store is not None:
            self.server.open(self._store, ServerConfig.of(plan, spec))
        else:
            self._trainer.join(self._client)


class ParameterServer(_ServerGroupEngine):
    """The steps of a worker, and what a server does meanwhile."""

    def warm(self, feed: Feed) -> None:
        """Run a worker's throwaway forward and backward of full shape; a server runs nothing."""
        if not self._serving:
            super().warm(feed)

    def lease(self, first: int) -> WorkUnit | None:
        """Return the next unit to compute; None once `serve` from step `first` has ended. Raises PeerLost."""
        grant = self._client.lease(first)
        return None if grant is None else grant.unit

    def train_step(self, feed: Feed) -> StepReport:
        """Run a worker's next step of its leased unit: it pulls before the first, and pushes after the last.

        After an error, nothing of the step counts and nothing was pushed.
        """
        if self._runner is None:
            self.warm(feed)
        return self._guarded(lambda: self._trainer.train(self._ready, feed))

    def evaluate_step(self, feed: Feed, states: MetricStates | None = None) -> MetricSums:
        """Return sums at the servers' newest parameters."""
        self._trainer.pull()
        return super().evaluate_step(feed, states)

    def predict_step(self, feed: Feed) -> Columns:
        """Return the model's outputs at the servers' newest parameters."""
        self._trainer.pull()
        return super().predict_step(feed)

    def serve(self, until: int, stop_requested: Callable[[], bool]) -> Iterator[StepReport]:
        """Let the workers take the steps before `until`; a server calls it."""
        replica, server = self.replica, self.server
        yield from server.serve(replica.step or 0, until, stop_requested)
        replica.step = server.step

    def staleness(self) -> StalenessCounts:
        """Return the staleness of the pushes since the last call; the lead server calls it."""
        return self.server.staleness()

    def _wants_check(self, feed: Feed) -> bool:
        """Return whether the loss is to be checked; a worker that comes later joins a run that has done so."""
        return feed.step == 0 and super()._wants_check(feed)

    def _warmed(self, feed: Feed) -> StepRunner:
        runner = self._trainer.runner(self._caller())
        self._throwaway(runner, feed, check=self._wants_check(feed))
        return runner
