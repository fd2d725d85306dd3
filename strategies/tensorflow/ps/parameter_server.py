"""`tf.distribute.ParameterServerStrategy`: a chief schedules shares of steps on workers, which update server variables.

A worker can die and return at its address while the others continue. If a server or the chief is lost, the group ends,
and a new one starts in new processes from the last checkpoint. TensorFlow's servers never stop by themselves: the
process that started one ends it.

Each data rank's share of a step runs on any worker, and is an update of its own: the worker pulls the variables from
the servers and computes the mean gradient of the share. The servers apply the gradient at once, also if other workers
have changed the variables meanwhile. The chief schedules the shares of a step and of following steps that may start
early, and waits for the shares of the step. If a worker is lost, TensorFlow runs its function again: gradients that the
worker had already pushed are applied twice, in whole or in part; its loss counts once.

The chief holds a whole replica for names, checkpoints and the model's code; the servers hold the trained variables. A
variable is split by rows between servers if the pieces are large enough (`MinSizePartitioner`). A server also holds the
optimizer's slots of its pieces, so that a worker sends only gradients. Variables are split only for optimizers that
update each number independently.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from keras import optimizers

from trainwright.core.data import COMPILED_PHASE, Feed, StepReport
from trainwright.core.engine import ModelSpec, StateReader, StateSnapshot
from trainwright.core.errors import JobError, NonFiniteLoss, PeerLost
from trainwright.core.plan import Plan
from trainwright.core.topology import Address, Capabilities, Group, StateTag
from trainwright.strategies.common.socket_transport import LOST_PEER_REMEDY
from trainwright.strategies.common.user_code_errors import format_samples
from trainwright.strategies.tensorflow.coordinator_engine import TensorFlowCoordinatorEngine, free_address
from trainwright.strategies.tensorflow.training import tensor_conversion
from trainwright.strategies.tensorflow.training.evaluation import Evaluator
from trainwright.strategies.tensorflow.training.gradient_rows import added, changed, split_rows, whole_norm
from trainwright.strategies.tensorflow.training.tensorflow_errors import TensorFlowUserCode
from trainwright.strategies.tensorflow.training.train_function import (
    MicroBatch,
    MicroOutcome,
    logged_sums,
    micro_batches,
    run_micro_batch,
)
from trainwright.strategies.tensorflow.training.train_state import (
    KerasReplica,
    KerasTrainState,
    build_optimizer,
    check_fit_only,
    inner_optimizer,
)

_JOBS = {"server": "ps", "worker": "worker"}  # role: job name in TensorFlow
_POLL_S = 0.1  # between two checks for lost servers
_COPY_S = 1e-3  # between two checks whether a computed value is copied to the chief
_SKIP_REMEDY = (
    'look at these samples, lower the learning rate, set clip_norm, or pass such shares by with on_nonfinite="skip"'
)
_MIN_SPLIT_BYTES = 256 << 10  # of a variable that is split
_ELEMENTWISE_OPTIMIZERS = (
    optimizers.SGD, optimizers.Adam, optimizers.AdamW, optimizers.Adamax, optimizers.Nadam, optimizers.RMSprop,
    optimizers.Adagrad, optimizers.Adadelta, optimizers.Ftrl, optimizers.Lion,
)  # fmt: skip
_VariablePieces = tuple[keras.Variable, ...]


class TensorFlowParameterServer(TensorFlowCoordinatorEngine):
    """Chief, server or worker, by the member's role. The chief computes nothing: it schedules."""

    capabilities: ClassVar[Capabilities] = replace(
        TensorFlowCoordinatorEngine.capabilities, topology="coordinator", tolerates=frozenset({"worker"})
    )

    def __init__(self) -> None:
        super().__init__()
        self._coordinator: Any = None
        self._server_variables: _ServerVariables | None = None
        self._shares: _CoordinatorSteps | None = None

    # --- the group ----------------------------------------------------------------------------------------

    def lead(self, group: Group, servers: Mapping[int, Address]) -> Any:
        """Connect the chief to all servers, and open the strategy."""
        with free_address(group.peers[0].address.host) as address:
            spec = tf.train.ClusterSpec(_cluster_spec(group, address, servers))
            resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
                spec, task_type="chief", task_id=0, rpc_layer="grpc"
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
        """Create model and optimizer on the chief, and their variables on the servers."""
        if spec.compile == "eager":
            raise JobError(['compile="eager": parameter servers run compiled functions: leave it out'])
        return super().build(spec, plan)

    def _make_replica(self, spec: ModelSpec, plan: Plan) -> KerasTrainState:
        assert self._group is not None, "call form() first"
        replica = KerasReplica(spec, tf.distribute.get_strategy(), plan, self._where)
        if replica.loss_scale is not None:
            problem = "parameter servers apply parts of a step, and cannot follow a loss scale"
            remedy = "use mixed_bfloat16, or tf_multi_worker_mirrored"
            raise JobError([f"{problem} (mixed_float16, loss_scale_factor): {remedy}"], where=self._where)
        self._server_variables = _ServerVariables(replica, self._strategy, plan.servers)
        self._shares = _CoordinatorSteps(
            replica, self._server_variables, self._coordinator, self._check_servers, self._group.deadline_s
        )
        return replica

    def snapshot(self) -> StateSnapshot:
        """Copy the state of the servers to the chief, once all started steps are applied."""
        if self._leads:
            self._guarded(self._fetch)
        return super().snapshot()

    def restore(self, copy: StateSnapshot) -> StateTag:
        """Take a state copied by `snapshot`, and give it to the servers."""
        return self._fill_servers(super().restore(copy))

    def load(self, reader: StateReader) -> StateTag:
        """Take the state of a checkpoint of any TensorFlow engine, and give it to the servers."""
        return self._fill_servers(super().load(reader))

    # --- steps --------------------------------------------------------------------------------------------

    def warm(self, feed: Feed) -> None:
        """Compile the step by a trial step that applies nothing."""
        if self._leads:
            self._guarded(lambda: self._steps.warm(feed))

    def train_step(self, feed: Feed) -> StepReport:
        """Take one step of the whole group, on the chief; the steps of `feed.following` may start.

        Raises:
            NonFiniteLoss: a share has one and was not applied; other shares of the step may be.
            PeerLost: a server is lost, or no worker computes a share within the deadline.
            UserCodeError, JobError: the user's code raised or is wrong.
        """
        report = self._guarded(lambda: self._steps.train(feed))
        if report.step == self.replica.spec.total_steps:
            self._guarded(self._finish)
        return report

    def _evaluating(self) -> Evaluator:
        """Return the evaluator, which runs micro-batches on the workers."""
        if self._evaluation is None:
            leading = self._steps
            self._evaluation = Evaluator(self.replica.model, self.replica.caller, leading.begin, leading.scope)
        return self._evaluation

    # --- the chief ----------------------------------------------------------------------------------------

    @property
    def _steps(self) -> _CoordinatorSteps:
        assert self._shares is not None, "call build() first; only the chief steps"
        return self._shares

    def _fetch(self) -> None:
        assert self._server_variables is not None, "call build() first"
        self._steps.drain()
        self._server_variables.fetch()

    def _finish(self) -> None:
        """Do what `Model.fit` does after its last step, with the state of the servers."""
        replica = self.replica
        assert isinstance(replica, KerasReplica), "the chief has one"
        if inner_optimizer(replica.optimizer).use_ema:
            self._fetch()
            replica.finish()
            self._fill_servers(self._tag())

    def _fill_servers(self, tag: StateTag) -> StateTag:
        if self._server_variables is not None:
            self._guarded(self._server_variables.fill)
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


def _cluster_spec(group: Group, chief: Address, servers: Mapping[int, Address]) -> dict[str, list[str]]:
    """Return the cluster spec of a group, from the chief's own server address and those of the others by rank."""
    cluster: dict[str, list[str]] = {"chief": [f"{chief.host}:{chief.port}"], "ps": [], "worker": []}
    for rank in range(1, group.size):
        job, _ = _task_of(group, rank)
        cluster[job].append(f"{servers[rank].host}:{servers[rank].port}")
    return cluster


# --- Steps of the chief -----------------------------------------------------------------------------------------------


class _ShareResult(NamedTuple):
    """A worker's result of a share."""

    sums: Any  # (3,) float64: sum of weights, sum of weighted losses, norm of the mean gradient (0 if it is not needed)
    losses: list[Any]  # of each micro-batch
    logged: dict[str, Any]  # sum and weight of each value that `step=` returns beside the loss


class _PendingStep(NamedTuple):
    """A started step: its learning rate, and functions that wait for the results of its shares."""

    rate: float
    shares: list[Callable[[], _ShareResult]]


class _CoordinatorSteps:
    """Schedules the chief's steps.

    Args:
        replica: the chief's replica.
        variables: its variables on the servers.
        coordinator: a `ClusterCoordinator`.
        check: raises PeerLost if a server is lost.
        deadline_s: a worker must start on a share within this time, while the chief waits for it.

    Raises:
        JobError: only Keras' `fit` can train the model.
    """

    def __init__(
        self,
        replica: KerasReplica,
        variables: _ServerVariables,
        coordinator: Any,
        check: Callable[[], None],
        deadline_s: float,
    ) -> None:
        check_fit_only(replica.model, replica.spec, replica.where)
        self._replica, self._server_variables, self._coordinator = replica, variables, coordinator
        self._check_servers, self._deadline_s = check, deadline_s
        self._pending_steps: dict[int, _PendingStep] = {}
        self._seeds = [tensor_conversion.to_numpy(seed.value) for seed in replica.seeds]
        self._wants_norm = replica.spec.clip_norm is not None or replica.spec.guard
        compiled = replica.spec.compile == "xla"
        self._run_micro = tf.function(self._micro, jit_compile=True, autograph=False) if compiled else self._micro
        self._share = tf.function(self._run_share, reduce_retracing=True, autograph=False)

    def warm(self, feed: Feed) -> None:
        """Compile the step by a trial step of weight 0, which applies nothing."""
        for result in self._schedule(feed, muted=True).shares:
            result()

    def train(self, feed: Feed) -> StepReport:
        """Compute one step, and start those in `feed.following`, unless a stop is requested.

        The last started step reports the request to stop. Raises NonFiniteLoss if the loss of a share is not finite:
        that share is not applied, but other shares of the step may be.
        """
        start_s = time.perf_counter()
        self._check_servers()
        for each in _chain(feed):
            if each.step not in self._pending_steps:
                self._pending_steps[each.step] = self._schedule(each)
        pending = self._pending_steps.pop(feed.step)
        results = [share() for share in pending.shares]
        self._check(feed, results)
        replica = self._replica
        replica.step = feed.step + 1
        sums = np.array([each.sums for each in results])
        weight, loss = (float(total) for total in sums[:, :2].sum(0))
        norm = float(sums[:, 2] @ sums[:, 0]) / weight if self._wants_norm and weight else None
        return StepReport(
            step=replica.step, loss=loss / weight if weight else 0.0, weight=weight, learning_rate=pending.rate,
            gradient_norm=norm, stop_requested=feed.stop_requested and not self._pending_steps,
            phases={COMPILED_PHASE: time.perf_counter() - start_s},
            logged=logged_sums([each.logged for each in results]),
        )  # fmt: skip

    def drain(self) -> None:
        """Wait for all started steps: no variable changes after that."""
        for pending in self._pending_steps.values():
            for result in pending.shares:
                result()

    def begin(self, function: Any, *arguments: Any) -> Callable[[], Any]:
        """Run a compiled function on a worker; return a function that waits for the result. Raises PeerLost."""
        value = self._coordinator.schedule(function, args=arguments)
        return lambda: self._wait_for(value)

    def scope(self) -> AbstractContextManager[Any]:
        """Let the model use the servers' variables within the block."""
        trained, state = self._server_variables.pull()
        replica = self._replica
        seed_values = [(seed, tf.constant(value)) for seed, value in zip(replica.seeds, self._seeds, strict=True)]
        trained_values = zip(replica.model.trainable_variables, trained, strict=True)
        scope: AbstractContextManager[Any] = keras.StatelessScope(
            [*trained_values, *zip(replica.state, state, strict=True), *seed_values], collect_losses=True
        )
        return scope

    def _schedule(self, feed: Feed, *, muted: bool = False) -> _PendingStep:
        rate = self._rate(feed.step)
        parts = zip(feed.parts, feed.data_ranks, strict=True)
        rate_tensor = tf.constant(rate, tf.float32)
        shares = [
            micro_batches(self._replica.spec, self._replica.caller.wanted, part, feed.step, rank, muted=muted)
            for part, rank in parts
        ]
        return _PendingStep(rate, [self.begin(self._share, share, rate_tensor) for share in shares])

    def _rate(self, step: int) -> float:
        """Return the learning rate of a step; each of its shares is an update."""
        if self._replica.own_schedule:
            return float(self._replica.optimizer._learning_rate(step))
        return self._replica.set_rate(step)

    def _wait_for(self, value: Any) -> Any:
        """Return the value of a scheduled function, once the chief has it.

        The worker has the value first; a thread of the coordinator copies it to the chief. If the worker is lost before
        that, the function runs again on another worker. The deadline starts again while a worker computes: the driver
        finds workers that hang. `value.get()` alone would block without noticing that a server was lost.
        """
        deadline = time.monotonic() + self._deadline_s
        while time.monotonic() < deadline:
            if value._status_available_event.wait(_POLL_S):
                if value._error is None and _is_running(value):
                    deadline = time.monotonic() + self._deadline_s
                elif value._error is not None or value._has_fetched_to_local:
                    return self._get_value(value)
                else:
                    time.sleep(_COPY_S)
            self._check_servers()
        raise PeerLost(
            f"no worker took a share within {self._deadline_s:g} s",
            where=self._replica.where,
            remedy=LOST_PEER_REMEDY,
        )

    def _get_value(self, value: Any) -> Any:
        try:
            return value.get()
        except tf.errors.OpError:
            self._check_servers()
            raise

    def _run_share(self, micros: tuple[MicroBatch, ...], rate: Any) -> _ShareResult:
        """Compute the gradient of a share, and apply it on the servers if it is finite. Runs on a worker."""
        trained, state = self._server_variables.pull()
        gradients, weight, loss, losses = [tf.zeros_like(each) for each in trained], 0.0, 0.0, []
        logged: dict[str, Any] = {}
        for number, micro in enumerate(micros):
            values, weights, micro_gradients, state, micro_logged = self._run_micro(micro, trained, state)
            logged = {name: logged[name] + value if name in logged else value for name, value in micro_logged.items()}
            gradients = list(map(added, gradients, micro_gradients)) if number else micro_gradients
            weight += tf.cast(tf.reduce_sum(weights), tf.float64)
            loss += tf.cast(tf.reduce_sum(values * weights), tf.float64)
            losses.append(values)
        gradients = _scale(gradients, tf.math.divide_no_nan(1.0, weight))
        norm = tf.cast(whole_norm(gradients) if self._wants_norm else 0.0, tf.float64)
        sums = tf.stack((weight, loss, norm))
        fine = tf.logical_and(tf.reduce_all(tf.math.is_finite(sums)), weight != 0.0)
        max_norm = self._replica.spec.clip_norm
        if max_norm is not None:
            factor = max_norm / tf.maximum(norm, tf.constant(max_norm, norm.dtype))
            gradients = _scale(gradients, factor)

        def apply() -> Any:
            self._server_variables.push(gradients, state, rate)
            return tf.constant(True)

        tf.cond(fine, apply, lambda: tf.constant(False))
        return _ShareResult(sums, losses, logged)

    def _micro(self, micro: MicroBatch, trained: list[Any], state: list[Any]) -> MicroOutcome:
        return run_micro_batch(self._replica, micro, trained, state)

    def _check(self, feed: Feed, results: Sequence[_ShareResult]) -> None:
        """Raise NonFiniteLoss with the samples of the shares whose loss or gradient is not finite."""
        bad: list[int] = []
        ranks = [rank for rank, each in zip(feed.data_ranks, results, strict=True) if not np.isfinite(each.sums).all()]
        for rank, part, each in zip(feed.data_ranks, feed.parts, results, strict=True):
            for batch, losses in zip(part, each.losses, strict=True):
                rows = ~np.isfinite(np.asarray(losses).reshape(batch.rows, -1)).all(axis=1)
                bad += batch.samples[rows].tolist() if rank in ranks else []
        if ranks:
            bad_loss = any(not math.isfinite(float(each.sums[1])) for each in results)
            what = "the loss became" if bad_loss else "a gradient is"
            error = NonFiniteLoss(
                f"{what} not finite in step {feed.step + 1}" + (f", in samples {format_samples(bad)}" if bad else ""),
                where=f"{self._replica.where}, data ranks {format_samples(ranks)}",
                remedy=f"{_SKIP_REMEDY}; nothing of these shares was applied, other shares of the step may be",
            )
            error.samples = tuple(bad)
            raise error


def _is_running(value: Any) -> bool:
    """Whether a worker computes a value: the thread that waits for the worker holds a lock meanwhile."""
    free: bool = value._has_fetched_to_local_lock.acquire(timeout=_POLL_S)
    if free:
        value._has_fetched_to_local_lock.release()
    return not free


def _chain(feed: Feed) -> Iterator[Feed]:
    """Yield the feed and the following feeds that may start with it; only the feed if a stop is requested."""
    following: Feed | None = feed
    while following is not None:
        yield following
        following = None if feed.stop_requested else following.following


# --- The model's variables on the servers, and the optimizer that updates them there ----------------------------------


class _ServerVariables:
    """Variables on the servers, created with the values of the chief's replica.

    Args:
        replica: the chief's replica.
        strategy: a `ParameterServerStrategy`, which places variables on the servers in turn.
        servers: number of servers.

    Attributes:
        trained, state: the pieces of each trained variable and of each other one, in the order of rows.
        optimizer: the user's optimizer, for the pieces.
    """

    def __init__(self, replica: KerasReplica, strategy: tf.distribute.Strategy, servers: int) -> None:
        self._replica, self._strategy = replica, strategy
        self._partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(_MIN_SPLIT_BYTES, servers)
        self._may_split = type(replica.optimizer) in _ELEMENTWISE_OPTIMIZERS and replica.optimizer.clipnorm is None
        with strategy.scope():
            self.trained = [self._place(variable) for variable in replica.model.trainable_variables]
            self.state = [self._place(variable) for variable in replica.state]
            with TensorFlowUserCode("optimizer()", replica.where):
                self.optimizer = replica.spec.make_optimizer([(each.path, each) for each in self.pieces])
            slots = build_optimizer(self.optimizer, self.pieces)
        self.optimizer._all_reduce_sum_gradients = lambda pairs: pairs  # a share's gradient is an update of its own
        self.optimizer._get_current_learning_rate = lambda: self._rate
        count = self.optimizer.iterations
        count.assign_add = count.value.assign_add  # atomic: Keras' own reads and writes, and loses concurrent counts
        self._pairs = [*zip(replica.model.trainable_variables, self.trained, strict=True)]
        self._pairs += zip(replica.state, self.state, strict=True)
        self._pairs += self._optimizer_pairs(slots)
        self._rate: Any = None

    @property
    def pieces(self) -> list[keras.Variable]:
        """The pieces of the trained variables."""
        return [piece for pieces in self.trained for piece in pieces]

    def pull(self) -> tuple[list[Any], list[Any]]:
        """Return the values of whole trained variables and of the other state, as tensors of the current graph."""
        return [_join_pieces(pieces) for pieces in self.trained], [_join_pieces(pieces) for pieces in self.state]

    def push(self, gradients: Sequence[Any], state: Sequence[Any], rate: Any) -> None:
        """Apply gradients of whole variables with a learning rate, each piece on its server, and set the state."""
        self._rate = rate
        split = [part for gradient, pieces in zip(gradients, self.trained, strict=True)
                 for part in split_rows(gradient, [piece.shape for piece in pieces])]  # fmt: skip
        self._strategy.run(lambda parts: self.optimizer.apply(parts, self.pieces), args=(split,))
        for (piece,), value in zip(self.state, state, strict=True):
            piece.value.assign(value)

    def fetch(self) -> None:
        """Copy the servers' values into the chief's replica."""
        for variable, pieces in self._pairs:
            parts = [tensor_conversion.to_numpy(tf.convert_to_tensor(piece.value)) for piece in pieces]
            variable.assign(np.concatenate(parts) if len(parts) > 1 else parts[0])

    def fill(self) -> None:
        """Copy the values of the chief's replica to the servers."""
        for variable, pieces in self._pairs:
            values = tensor_conversion.to_numpy(variable.value)
            for piece, part in zip(pieces, _rows(values, [piece.shape for piece in pieces]), strict=True):
                piece.assign(part)

    def _place(self, variable: keras.Variable) -> _VariablePieces:
        values: npt.NDArray[Any] = tensor_conversion.to_numpy(variable.value)
        number = 1
        if self._may_split and variable.trainable and variable.constraint is None and values.ndim:
            number = self._partitioner(tf.TensorShape(values.shape), tf.as_dtype(variable.dtype))[0]
        parts = np.array_split(values, number) if number > 1 else [values]
        return tuple(self._piece(variable, part) for part in parts)

    def _piece(self, variable: keras.Variable, values: npt.NDArray[Any]) -> keras.Variable:
        piece = keras.Variable(values, dtype=variable.dtype, trainable=variable.trainable, name=variable.name)
        piece.constraint = variable.constraint
        return piece

    def _optimizer_pairs(
        self, slots: Sequence[Sequence[keras.Variable]]
    ) -> Iterator[tuple[keras.Variable, _VariablePieces]]:
        """Yield the variables of the chief's optimizer with their pieces; the learning rate stays with the chief."""
        ends = list(accumulate(len(pieces) for pieces in self.trained))
        for chief_slots, end, pieces in zip(self._replica.slots, ends, self.trained, strict=True):
            piece_slots = slots[end - len(pieces) : end]
            for number, slot in enumerate(chief_slots):
                yield slot, tuple(each[number] for each in piece_slots)
        unslotted = _unslotted(self._replica.optimizer, self._replica.slots)
        for variable, piece in zip(unslotted, _unslotted(self.optimizer, slots), strict=True):
            yield variable, (piece,)


def _unslotted(optimizer: Any, slots: Sequence[Sequence[keras.Variable]]) -> list[keras.Variable]:
    """Return an optimizer's variables that belong to no trained variable, without its learning rate."""
    slot_ids = {id(slot) for each in slots for slot in each} | {id(optimizer._learning_rate)}
    return [variable for variable in optimizer.variables if id(variable) not in slot_ids]


def _join_pieces(pieces: _VariablePieces) -> Any:
    parts = [tf.convert_to_tensor(piece.value) for piece in pieces]
    return tf.concat(parts, 0) if len(parts) > 1 else parts[0]


def _scale(gradients: Sequence[Any], factor: Any) -> list[Any]:
    return [changed(gradient, lambda values: values * tf.cast(factor, values.dtype)) for gradient in gradients]


def _rows(values: npt.NDArray[Any], shapes: Sequence[Any]) -> list[npt.NDArray[Any]]:
    if len(shapes) == 1:
        return [values]
    return np.split(values, list(accumulate(shape[0] for shape in shapes))[:-1])
