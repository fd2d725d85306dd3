"""The engine of parameter servers: workers step alone, against servers that hold the parameters and update them.

A server runs nothing of the model: it holds a shard of it in host memory and takes the optimizer's steps. A worker
copies the parameters, computes the mean gradient of a unit, and pushes it while backward is still under way; or takes
several steps by itself, with an optimizer of its own, and pushes how far these went.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

from torch import nn

from trainwright.core.data import Columns, Feed, MetricSums, StepReport
from trainwright.core.engine import ModelSpec, StateReader, StateSnapshot
from trainwright.core.errors import JobError, TrainwrightError
from trainwright.core.plan import Plan
from trainwright.core.topology import (
    Address,
    Capabilities,
    Generation,
    Group,
    OuterOptimizer,
    Peer,
    Role,
    StalenessCounts,
    StateTag,
    StateTransfer,
    WorkUnit,
)
from trainwright.strategies.common.host_address import own_host
from trainwright.strategies.common.socket_transport import ConnectionCanceller, SocketListener
from trainwright.strategies.ps.parameter_client import ParameterClient
from trainwright.strategies.ps.server_roles import FollowerServer, LeadServer
from trainwright.strategies.ps.shard_server import ShardServer
from trainwright.strategies.ps.update_applier import ServerConfig
from trainwright.strategies.torch.engines.base import TorchEngine
from trainwright.strategies.torch.ps.gradient_compression import GradientLayout
from trainwright.strategies.torch.ps.parameter_transfer import SPARSE_REFUSED
from trainwright.strategies.torch.ps.parameter_worker import ParameterWorker
from trainwright.strategies.torch.ps.shard_store import ServedReplica, TorchShardStore, server_shards
from trainwright.strategies.torch.shard_layout import ModelPart
from trainwright.strategies.torch.training.train_state import TorchReplica
from trainwright.strategies.torch.training.train_step import StepRunner


class ParameterServer(TorchEngine):
    """A server or a worker, as its role in the group is.

    Servers hold the pieces `shard-0`, `shard-1` and so on, in the order of their ranks; workers hold none.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        topology="independent", tolerates=frozenset({"worker"}), inductor=True
    )

    def __init__(self) -> None:
        super().__init__()
        self._listener: SocketListener | None = None
        self._switch = ConnectionCanceller()
        self._desk: ShardServer | None = None
        self._bank: TorchShardStore | None = None
        self._job: tuple[ModelSpec, Plan] | None = None
        self._clients: ParameterClient | None = None
        self._solo: ParameterWorker | None = None

    # --- the group ----------------------------------------------------------------------------------------

    def reserve(self, generation: Generation, role: Role) -> Address:
        """A server listens on a port that the system chooses; nobody has to reach a worker."""
        self.leave()
        self._switch = ConnectionCanceller()
        if role != "server":
            return super().reserve(generation, role)
        self._listener = SocketListener(own_host())
        return self._listener.address

    def form(self, group: Group) -> StateTag:
        """A server answers its workers from now on; a worker, at any time, reaches all servers. Raises PeerLost."""
        super().form(group)
        if self._serving:
            assert self._listener is not None, "reserve() comes first"
            kind = LeadServer if group.rank == self._servers[0].rank else FollowerServer
            self._desk = kind(self._listener, group, self._servers, self._switch)
            self._listener = None
            if self._switch.off:  # cut while there was no desk to cut
                self._desk.cut()
        else:
            self._clients = ParameterClient(group, self._servers, self._switch)
            self._clients.open()
        if self._job is not None:
            self._guarded(partial(self._again, *self._job))
        return self._tag()

    def leave(self) -> None:
        """End all connections; the state stays. Safe to call at any time, twice too."""
        super().leave()
        if self._desk is not None:
            self._desk.cut()
            self._let_stand(self._desk)
        for held in (self._desk, self._clients, self._listener):
            if held is not None:
                held.close()
        self._desk = self._clients = self._listener = None

    def interrupt(self, deadline_s: float) -> bool:
        """Cut all connections, so that a blocked call raises PeerLost; a group that is yet to form then does not."""
        for held in (self._switch, self._listener, self._desk, self._clients):
            if held is not None:
                held.cut()
        return self._desk is None or self._desk.join(deadline_s)

    # --- the state ----------------------------------------------------------------------------------------

    def build(self, spec: ModelSpec, plan: Plan) -> StateTag:
        """Make the model as one device would; a server keeps its shard of it, a worker is given room for all.

        Raises:
            JobError: the model cannot be trained, or not with this plan.
            UserCodeError: the user's code raised.
        """
        self._job = spec, plan
        super().build(spec, plan)
        self._equip()
        return self._tag()

    def transfer(self, moves: Sequence[StateTransfer]) -> StateTag:
        """Nothing is sent: no two ranks hold the same. A fresh build stands at step 0 from then on."""
        if moves:
            raise TrainwrightError("no other server has a copy of a shard", remedy="restore from a checkpoint")
        return super().transfer(moves)

    def snapshot(self) -> StateSnapshot:
        """Copy a server's shard to host memory."""
        if self._desk is None:
            return super().snapshot()
        self._desk.check()
        with self._desk.lock:
            return super().snapshot()

    def restore(self, copy: StateSnapshot) -> StateTag:
        """Let a server take a shard copied by `snapshot`. Raises CheckpointError, with nothing changed."""
        return self._renewed(lambda: super(ParameterServer, self).restore(copy))

    def load(self, reader: StateReader) -> StateTag:
        """Let a server take its shard of a checkpoint; a worker pulls. Raises CheckpointError, with nothing changed."""
        if not self._serving:
            return self._tag()
        return self._renewed(lambda: super(ParameterServer, self).load(reader))

    # --- steps --------------------------------------------------------------------------------------------

    def warm(self, feed: Feed) -> None:
        """A worker's throwaway forward and backward of full shape; a server runs nothing."""
        if not self._serving:
            super().warm(feed)

    def lease(self, first: int) -> WorkUnit | None:
        """What to compute next; None when the servers' `serve` from step `first` on is over. Raises PeerLost."""
        grant = self._clients_of.lease(first)
        return None if grant is None else grant.unit

    def train_step(self, feed: Feed) -> StepReport:
        """A worker's next step of the unit that it leased last: pulled before the first, pushed after the last.

        Raises:
            NonFiniteLoss: nothing of the step counts.
            PeerLost: a server is gone.
            UserCodeError, JobError: the user's code raised or is wrong; nothing was pushed.
        """
        if self._runner is None:
            self.warm(feed)
        return self._guarded(lambda: self._solo_of.train(self._ready, feed))

    def evaluate_step(self, feed: Feed) -> MetricSums:
        """Sums at the servers' newest parameters. Raises UserCodeError, JobError, PeerLost."""
        self._solo_of.pull()
        return super().evaluate_step(feed)

    def predict_step(self, feed: Feed) -> Columns:
        """The model's outputs at the servers' newest parameters. Raises UserCodeError, JobError, PeerLost."""
        self._solo_of.pull()
        return super().predict_step(feed)

    def serve(self, until: int, wish: Callable[[], bool]) -> Iterator[StepReport]:
        """A server: let the workers take the steps before `until`. Raises PeerLost, UserCodeError."""
        replica, desk = self.replica, self.server
        yield from desk.serve(replica.step or 0, until, wish)
        replica.step = desk.step

    def staleness(self) -> StalenessCounts:
        """The first server: of what was pushed since it was asked last."""
        return self.server.staleness()

    # --- inside -------------------------------------------------------------------------------------------

    @property
    def _servers(self) -> tuple[Peer, ...]:
        assert self._group is not None, "form() comes first"
        return tuple(peer for peer in self._group.peers if peer.role == "server")

    @property
    def _serving(self) -> bool:
        return any(peer.rank == self._rank for peer in self._servers)

    @property
    def server(self) -> ShardServer:
        """The server of this rank, once it has formed its group."""
        assert self._desk is not None, "a server has a desk, once it has formed"
        return self._desk

    @property
    def _clients_of(self) -> ParameterClient:
        assert self._clients is not None, "a worker has connections, once it has formed"
        return self._clients

    @property
    def _solo_of(self) -> ParameterWorker:
        assert self._solo is not None, "build() comes first"
        return self._solo

    @property
    def _part(self) -> ModelPart:
        """Of the servers, this one."""
        return ModelPart(server=self._rank, servers=len(self._servers))

    def _tag(self) -> StateTag:
        plain, count = super()._tag(), len(self._servers)
        return StateTag(
            step=plain.step if self._serving else None,
            layout=f"servers-{count}",
            pieces=frozenset({f"shard-{self._rank}"} if self._serving else ()),
            total=count,
            sound=plain.sound and (self._desk is None or self._desk.updates.sound),
        )

    def _again(self, spec: ModelSpec, plan: Plan) -> None:
        """Stay with what is held where that is this rank's part in the new group too; otherwise build as at first."""
        held = self._replica.part if isinstance(self._replica, ServedReplica) else None
        if held != (self._part if self._serving else None):
            self._replica = self._made(spec, plan)
        self._equip()

    def _made(self, spec: ModelSpec, plan: Plan) -> TorchReplica:
        self._bank = self._solo = None
        if self._serving:
            return self._served(spec, plan)
        replica = super()._made(spec, plan)
        _check_dense(replica.model, self._where)
        self._solo = ParameterWorker(replica, server_shards(spec, plan, replica.model, self._where), plan)
        return replica

    def _served(self, spec: ModelSpec, plan: Plan) -> ServedReplica:
        """This server's shard."""
        replica = ServedReplica(spec, plan, self._where, self._part)
        _check_dense(replica.model, self._where)
        shard = server_shards(spec, plan, replica.model, self._where)[self._rank]
        replica.keep({slot.name: slot.rows for slot in shard.slots})
        outer = OuterOptimizer.parse(plan.outer) if plan.local_steps > 1 else None
        self._bank = TorchShardStore(replica, shard, GradientLayout(shard, plan.wire), outer, self._where)
        return replica

    def _equip(self) -> None:
        """Let workers pull from now on; a worker makes room for what it pulls and pushes."""
        assert self._job is not None, "build() comes first"
        spec, plan = self._job
        if self._bank is not None:
            self.server.open(self._bank, ServerConfig.of(plan, spec))
        else:
            self._solo_of.join(self._clients_of)

    def _renewed(self, change: Callable[[], StateTag]) -> StateTag:
        """Change what a server holds, and let its workers know."""
        desk = self.server
        with desk.lock:
            change()
            desk.renewed()
        return self._tag()

    def _let_stand(self, desk: ShardServer) -> None:
        """What a server holds that is interrupted in the middle of a segment is of no step."""
        if self._replica is not None:
            self._replica.sound = self._replica.sound and desk.updates.sound

    def _warmed(self, feed: Feed) -> StepRunner:
        runner = self._solo_of.runner(self._caller())
        self._throwaway(runner, feed)
        return runner


def _check_dense(model: nn.Module, where: str) -> None:
    """Raise JobError for what servers cannot be given."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    sparse = [name for name, module in model.named_modules() if isinstance(module, kinds) and module.sparse]
    if sparse:
        raise JobError([f"parameter {f'{sparse[0]}.weight'!r} {SPARSE_REFUSED}"], where=where)
