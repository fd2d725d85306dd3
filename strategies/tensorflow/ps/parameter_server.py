"""`tf.distribute.ParameterServerStrategy`: a chief schedules shares of steps on workers, which update server variables.

A worker can die and return at its address while the others continue. If a server or the chief is lost, the group ends,
and a new one starts in new processes from the last checkpoint. TensorFlow's servers never stop by themselves: the
process that started one ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import tensorflow as tf

from trainwright.core.data import Feed, StepReport
from trainwright.core.engine import ModelSpec, StateReader, StateSnapshot
from trainwright.core.errors import JobError, PeerLost
from trainwright.core.plan import Plan
from trainwright.core.topology import Address, Capabilities, Group, StateTag
from trainwright.strategies.common.socket_transport import LOST_PEER_REMEDY
from trainwright.strategies.tensorflow.coordinator_engine import TensorFlowCoordinatorEngine, free_address
from trainwright.strategies.tensorflow.ps.coordinator_steps import CoordinatorSteps, ServerVariables
from trainwright.strategies.tensorflow.training.evaluation import Evaluator
from trainwright.strategies.tensorflow.training.objective import KerasCaller
from trainwright.strategies.tensorflow.training.train_state import KerasReplica, KerasTrainState, inner_optimizer

_JOBS = {"server": "ps", "worker": "worker"}  # role: job name in TensorFlow


class TensorFlowParameterServer(TensorFlowCoordinatorEngine):
    """Chief, server or worker, by the member's role. The chief computes nothing: it schedules."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        reform="new_process", topology="coordinator", tolerates=frozenset({"worker"}), xla=True
    )

    def __init__(self) -> None:
        super().__init__()
        self._coordinator: Any = None
        self._served: ServerVariables | None = None
        self._shares: CoordinatorSteps | None = None

    # --- the group ----------------------------------------------------------------------------------------

    def lead(self, group: Group, servers: Mapping[int, Address]) -> Any:
        """Connect the chief to all servers, and open the strategy."""
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(_cluster_spec(group, servers)), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        return strategy

    def serve(self, group: Group, address: Address) -> Any:
        """Start a TensorFlow server; it learns the other members from the chief."""
        job, index = _task_of(group, group.rank)
        spec = tf.train.ClusterSpec({job: {index: f"{address.host}:{address.port}"}})
        return tf.distribute.Server(spec, job_name=job, task_index=index, protocol="grpc")

    # --- the state ----------------------------------------------------------------------------------------

    def build(self, spec: ModelSpec, plan: Plan) -> StateTag:
        """Make model and optimizer on the chief, and their variables on the servers."""
        if spec.compile == "eager":
            raise JobError(['compile="eager": parameter servers run compiled functions: leave it out'])
        return super().build(spec, plan)

    def _made(self, spec: ModelSpec, plan: Plan) -> KerasTrainState:
        assert self._group is not None, "call form() first"
        caller = KerasCaller(spec=spec, where=self._where)
        replica = KerasReplica(spec, tf.distribute.get_strategy(), plan, caller)
        if replica.loss_scale is not None:
            problem = "parameter servers apply parts of a step, and cannot follow a loss scale"
            remedy = "use mixed_bfloat16, or tf_multi_worker_mirrored"
            raise JobError([f"{problem} (mixed_float16, loss_scale_factor): {remedy}"], where=self._where)
        self._served = ServerVariables(replica, self._strategy, plan.servers)
        self._shares = CoordinatorSteps(
            replica, self._served, self._coordinator, caller, self._check_servers, self._group.deadline_s
        )
        return replica

    def snapshot(self) -> StateSnapshot:
        """Copy the state of the servers to the chief, once all started steps are applied."""
        if self._leads:
            self._guarded(self._fetch)
        return super().snapshot()

    def restore(self, copy: StateSnapshot) -> StateTag:
        """Take a state copied by `snapshot`, and give it to the servers."""
        return self._filled(super().restore(copy))

    def load(self, reader: StateReader) -> StateTag:
        """Take the state of a checkpoint of any TensorFlow engine, and give it to the servers."""
        return self._filled(super().load(reader))

    # --- steps --------------------------------------------------------------------------------------------

    def warm(self, feed: Feed) -> None:
        """Compile the step by a trial step that applies nothing."""
        if self._leads:
            self._guarded(lambda: self._leading.warm(feed))

    def train_step(self, feed: Feed) -> StepReport:
        """Take one step of the whole group, on the chief; the steps of `feed.following` may start.

        Raises:
            NonFiniteLoss: of a share, which was not applied; others of the step may be.
            PeerLost: a server is lost, or no worker computes a share within the deadline.
            UserCodeError, JobError: the user's code raised or is wrong.
        """
        report = self._guarded(lambda: self._leading.train(feed))
        if report.step == self.replica.spec.total_steps:
            self._guarded(self._finish)
        return report

    def _evaluating(self) -> Evaluator:
        """Return the evaluator, which runs micro-batches on the workers."""
        if self._evaluation is None:
            leading = self._leading
            self._evaluation = Evaluator(self.replica.model, self._caller, leading.begin, leading.scope)
        return self._evaluation

    # --- the chief ----------------------------------------------------------------------------------------

    @property
    def _leading(self) -> CoordinatorSteps:
        assert self._shares is not None, "call build() first; only the chief steps"
        return self._shares

    def _fetch(self) -> None:
        assert self._served is not None, "call build() first"
        self._leading.drain()
        self._served.fetch()

    def _finish(self) -> None:
        """Do what `Model.fit` does after its last step, with the state of the servers."""
        replica = self.replica
        assert isinstance(replica, KerasReplica), "the chief has one"
        if inner_optimizer(replica.optimizer).use_ema:
            self._fetch()
            replica.finish()
            self._filled(self._tag())

    def _filled(self, tag: StateTag) -> StateTag:
        if self._served is not None:
            self._guarded(self._served.fill)
        return tag

    def _check_servers(self) -> None:
        """Raise PeerLost if a server is lost, since its variables are lost with it."""
        assert self._registry is not None and self._group is not None, "call form() first"
        servers = [rank for rank in self._registry.gone() if self._group.peers[rank].role == "server"]
        if servers:
            raise PeerLost(
                f"the servers of ranks {servers} are lost, and with them a part of the variables",
                where=self._where,
                remedy=LOST_PEER_REMEDY,
            )


def _task_of(group: Group, rank: int) -> tuple[str, int]:
    """Return a member's job and task index in TensorFlow."""
    role = group.peers[rank].role
    return _JOBS[role], sum(peer.role == role for peer in group.peers[:rank])


def _cluster_spec(group: Group, servers: Mapping[int, Address]) -> dict[str, list[str]]:
    """Return the cluster spec of a group, from its members' server addresses by rank; the chief gets a free port."""
    own = free_address(group.peers[0].address.host)
    cluster: dict[str, list[str]] = {"chief": [f"{own.host}:{own.port}"], "ps": [], "worker": []}
    for rank in range(1, group.size):
        job, _ = _task_of(group, rank)
        cluster[job].append(f"{servers[rank].host}:{servers[rank].port}")
    return cluster
