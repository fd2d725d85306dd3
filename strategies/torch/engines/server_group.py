"""The state of a rank in a group with parameter servers: its connections, and its shard or its copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from trainwright.core.engine import ModelSpec, StateReader, StateSnapshot
from trainwright.core.errors import TrainwrightError
from trainwright.core.plan import Plan
from trainwright.core.topology import Address, Capabilities, Generation, Group, Peer, Role, StateTag, StateTransfer
from trainwright.strategies.common.host_address import own_host
from trainwright.strategies.common.socket_transport import ConnectionCanceller, SocketListener
from trainwright.strategies.ps.parameter_client import ParameterClient
from trainwright.strategies.ps.server_roles import FollowerServer, LeadServer
from trainwright.strategies.ps.shard_server import ShardServer
from trainwright.strategies.ps.update_applier import ServerConfig
from trainwright.strategies.torch.engines.base import TorchEngine
from trainwright.strategies.torch.ps.parameter_worker import ParameterWorker
from trainwright.strategies.torch.ps.shard_store import ServedReplica, TorchShardStore, server_shards
from trainwright.strategies.torch.shard_layout import ModelPart
from trainwright.strategies.torch.training.train_state import TorchReplica


class ServerGroupEngine(TorchEngine):
    """A server or a worker, by its role in the group; `ParameterServer` adds the steps.

    Servers hold the pieces `shard-0`, `shard-1` and so on, in the order of their ranks; workers hold none.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        topology="independent", tolerates=frozenset({"worker"}), inductor=True
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

    def reserve(self, generation: Generation, role: Role) -> Address:
        """Let a server listen on a port that the system chooses; no rank connects to a worker."""
        self.leave()
        self._switch = ConnectionCanceller()
        if role != "server":
            return super().reserve(generation, role)
        self._listener = SocketListener(own_host())
        return self._listener.address

    def form(self, group: Group) -> StateTag:
        """Start to answer workers, or connect to all servers. Raises PeerLost."""
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
        """Build the model; a server keeps its shard of it, a worker has memory for all of it.

        Raises:
            JobError: the model cannot be trained, or not with this plan.
            UserCodeError: the user's code raised.
        """
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
        """Restore a server's shard that `snapshot` copied. Raises CheckpointError, with nothing changed."""
        return self._renewed(lambda: super(ServerGroupEngine, self).restore(copy))

    def load(self, reader: StateReader) -> StateTag:
        """Load a server's shard of a checkpoint; a worker pulls. Raises CheckpointError, with nothing changed."""
        if not self._serving:
            return self._tag()
        return self._renewed(lambda: super(ServerGroupEngine, self).load(reader))

    # --- for the steps --------------------------------------------------------------------------------------

    @property
    def server(self) -> ShardServer:
        """The server of this rank, once it has formed its group."""
        assert self._server is not None, "a server has a desk, once it has formed"
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
        assert self._connections is not None, "a worker has connections, once it has formed"
        return self._connections

    @property
    def _trainer(self) -> ParameterWorker:
        assert self._worker is not None, "build() comes first"
        return self._worker

    @property
    def _part(self) -> ModelPart:
        """This server's part of the model."""
        return ModelPart(server=self._rank, servers=len(self._servers))

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
        if self._serving:
            self._store = TorchShardStore.of(spec, plan, self._part, self._where)
            return self._store.replica
        replica = super()._build_replica(spec, plan)
        self._worker = ParameterWorker(replica, server_shards(spec, plan, replica.model, self._where), plan)
        return replica

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
        held = self._replica.part if isinstance(self._replica, ServedReplica) else None
        if held != (self._part if self._serving else None):
            self._replica = self._build_replica(spec, plan)
        if self._store is not None:
            self.server.open(self._store, ServerConfig.of(plan, spec))
        else:
            self._trainer.join(self._client)
