"""Steps of a coordinator: each data rank's share of a step runs on any worker, and is an update of its own.

A worker pulls the variables from the servers, computes the mean gradient of the share and has the servers apply it, at
once, whatever others have applied meanwhile. The chief schedules a step's shares and those of the steps that may begin
before it ends, and waits for the step's own. TensorFlow runs a function again whose worker was lost: what that had
pushed already is applied twice, in part or whole; its loss counts once.

The chief holds a whole replica, which lends names, checkpoints and the model's code; what is trained lies on the
servers. A variable is cut by rows among them where a piece is large enough (`MinSizePartitioner`), and each piece has
the optimizer's slots beside it, so that a worker sends gradients and nothing else. Only an optimizer that looks at each
number by itself may have its variables cut.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainwright.core.data import COMPILED_PHASE, Batch, Feed, StepReport
from trainwright.core.errors import NonFiniteLoss, PeerLost
from trainwright.strategies.common.socket_transport import LOST_PEER_REMEDY
from trainwright.strategies.common.user_code_errors import format_samples
from trainwright.strategies.tensorflow.training import tensor_conversion
from trainwright.strategies.tensorflow.training.objective import KerasCaller
from trainwright.strategies.tensorflow.training.tensorflow_errors import TensorFlowUserCode
from trainwright.strategies.tensorflow.training.train_function import MicroBatch, seed_values, seed_words
from trainwright.strategies.tensorflow.training.train_state import KerasReplica, build_optimizer

_POLL_S = 0.1  # between two looks at who is gone
_COPY_S = 1e-3  # between two looks whether a value that is computed is copied
_SKIPPED = (
    'look at these samples, lower the learning rate, set clip_norm, or pass such shares by with on_nonfinite="skip"'
)


class _ShareResult(NamedTuple):
    """A worker's result of a share.

    Attributes:
        sums: (3,) float64: of weights, of weighted losses, and the mean gradient's norm where it is wanted, else 0.
        losses: of each micro-batch.
    """

    sums: Any
    losses: list[Any]


class _PendingStep(NamedTuple):
    """A started step: its learning rate, and the pending results of its shares."""

    rate: float
    told: list[Callable[[], _ShareResult]]


class CoordinatorSteps:
    """Schedules the chief's steps.

    Args:
        replica: of the chief.
        served: its variables on the servers.
        coordinator: a `ClusterCoordinator`.
        caller: how the job's functions are called.
        check: raises PeerLost where a server is gone.
        deadline_s: within which a worker must be at a share that is waited for.
    """

    def __init__(
        self,
        replica: KerasReplica,
        served: ServerVariables,
        coordinator: Any,
        caller: KerasCaller,
        check: Callable[[], None],
        deadline_s: float,
    ) -> None:
        self._replica, self._served, self._coordinator, self._caller = replica, served, coordinator, caller
        self._check_servers, self._deadline_s = check, deadline_s
        self._begun: dict[int, _PendingStep] = {}
        self._seeds = [tensor_conversion.to_numpy(seed.value) for seed in replica.seeds]
        self._wants_norm = replica.spec.clip_norm is not None or replica.spec.guard
        compiled = replica.spec.compile == "xla"
        self._one = tf.function(self._micro, jit_compile=True, autograph=False) if compiled else self._micro
        self._share = tf.function(self._shared, reduce_retracing=True, autograph=False)

    def warm(self, feed: Feed) -> None:
        """Compile the step by one of weight 0 that applies nothing."""
        for told in self._scheduled(feed, muted=True).told:
            told()

    def train(self, feed: Feed) -> StepReport:
        """Compute one step, and start those in `feed.following`, unless a stop is requested.

        The last step that was begun reports that wish. Raises NonFiniteLoss where the loss of a share is not finite:
        that share is not applied, others of the step may be.
        """
        started = time.perf_counter()
        self._check_servers()
        for each in _chain(feed):
            if each.step not in self._begun:
                self._begun[each.step] = self._scheduled(each)
        begun = self._begun.pop(feed.step)
        told = [share() for share in begun.told]
        self._check(feed, told)
        replica = self._replica
        replica.step = feed.step + 1
        sums = np.array([each.sums for each in told])
        weight, loss = (float(total) for total in sums[:, :2].sum(0))
        norm = float(sums[:, 2] @ sums[:, 0]) / weight if self._wants_norm and weight else None
        return StepReport(
            step=replica.step, loss=loss / weight if weight else 0.0, weight=weight, learning_rate=begun.rate,
            gradient_norm=norm, wish=feed.wish and not self._begun,
            phases={COMPILED_PHASE: time.perf_counter() - started},
        )  # fmt: skip

    def drain(self) -> None:
        """Wait for all started steps: no variable changes after that."""
        for begun in self._begun.values():
            for told in begun.told:
                told()

    def begin(self, function: Any, *arguments: Any) -> Callable[[], Any]:
        """Run a compiled function on a worker; return a function that waits for the result. Raises PeerLost."""
        value = self._coordinator.schedule(function, args=arguments)
        return lambda: self._landed(value)

    def scope(self) -> AbstractContextManager[Any]:
        """Let the model use the servers' variables within the block."""
        trained, state = self._served.pull()
        replica = self._replica
        drawn = [(seed, tf.constant(value)) for seed, value in zip(replica.seeds, self._seeds, strict=True)]
        named = zip(replica.model.trainable_variables, trained, strict=True)
        scope: AbstractContextManager[Any] = keras.StatelessScope(
            [*named, *zip(replica.state, state, strict=True), *drawn], collect_losses=True
        )
        return scope

    def _scheduled(self, feed: Feed, *, muted: bool = False) -> _PendingStep:
        rate = self._rate(feed.step)
        parts = zip(feed.parts, feed.data_ranks, strict=True)
        given = tf.constant(rate, tf.float32)
        shares = [self._micros(feed.step, part, rank, muted) for part, rank in parts]
        return _PendingStep(rate, [self.begin(self._share, share, given) for share in shares])

    def _rate(self, step: int) -> float:
        """Return the learning rate of a step; each of its shares is an update."""
        if self._replica.own_schedule:
            return float(self._replica.optimizer._learning_rate(step))
        return self._replica.set_rate(step)

    def _micros(self, step: int, part: Sequence[Batch], rank: int, muted: bool) -> tuple[MicroBatch, ...]:
        spec = self._replica.spec
        return tuple(
            MicroBatch(
                columns=tensor_conversion.column_tensors(spec.collation, batch, self._caller.wanted),
                weights=tf.convert_to_tensor(batch.weights * (0.0 if muted else 1.0)),
                seed=tf.constant(seed_words(spec.seed, step, micro, rank), tf.int64),
            )
            for micro, batch in enumerate(part)
        )

    def _landed(self, value: Any) -> Any:
        """Wait for the value of a scheduled function.

        It is on its worker first, from where a thread of the coordinator copies it: where that worker is lost before
        the chief has it, the function runs again elsewhere. While a worker is at it that takes its time, and who does
        not move at all is the driver's to find; to ask for the value then would hear of no server's end.
        """
        until = time.monotonic() + self._deadline_s
        while time.monotonic() < until:
            if value._status_available_event.wait(_POLL_S):
                if value._error is None and _is_running(value):
                    until = time.monotonic() + self._deadline_s
                elif value._error is not None or value._has_fetched_to_local:
                    return self._got(value)
                else:
                    time.sleep(_COPY_S)
            self._check_servers()
        raise PeerLost(
            f"no worker took a share within {self._deadline_s:g} s",
            where=self._caller.where,
            remedy=LOST_PEER_REMEDY,
        )

    def _got(self, value: Any) -> Any:
        try:
            return value.get()
        except tf.errors.OpError:
            self._check_servers()
            raise

    def _shared(self, micros: tuple[MicroBatch, ...], rate: Any) -> _ShareResult:
        """On a worker: compute the gradient of a share, and apply it on the servers if it is finite."""
        trained, state = self._served.pull()
        gradients, weight, loss, losses = [tf.zeros_like(each) for each in trained], 0.0, 0.0, []
        for number, micro in enumerate(micros):
            values, weights, own, state = self._one(micro, trained, state)
            gradients = [one + other for one, other in zip(gradients, own, strict=True)] if number else own
            weight += tf.cast(tf.reduce_sum(weights), tf.float64)
            loss += tf.cast(tf.reduce_sum(values * weights), tf.float64)
            losses.append(values)
        gradients = [gradient * tf.cast(tf.math.divide_no_nan(1.0, weight), gradient.dtype) for gradient in gradients]
        norm = tf.cast(tf.linalg.global_norm(gradients) if self._wants_norm else 0.0, tf.float64)
        sums = tf.stack((weight, loss, norm))
        fine = tf.logical_and(tf.reduce_all(tf.math.is_finite(sums)), weight != 0.0)
        largest = self._replica.spec.clip_norm
        if largest is not None:
            factor = largest / tf.maximum(norm, tf.constant(largest, norm.dtype))
            gradients = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]

        def apply() -> Any:
            self._served.push(gradients, state, rate)
            return tf.constant(True)

        tf.cond(fine, apply, lambda: tf.constant(False))
        return _ShareResult(sums, losses)

    def _micro(self, micro: MicroBatch, trained: list[Any], state: list[Any]) -> tuple[Any, Any, list[Any], list[Any]]:
        """Compute one micro-batch: losses, weights, gradient of the sum, and the state after it."""
        replica = self._replica
        before = zip(replica.state, state, strict=True)
        named = zip(replica.model.trainable_variables, trained, strict=True)
        with tf.GradientTape() as tape:
            tape.watch(trained)
            scope = keras.StatelessScope(
                [*seed_values(replica.seeds, micro.seed), *before, *named], collect_losses=True
            )
            with scope:
                values, weights = self._caller.loss(replica.model, micro.columns, micro.weights, training=True)
            objective = tf.reduce_sum(values * weights)
        found = tape.gradient(objective, trained, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        after = [scope.get_current_value(variable) for variable in replica.state]
        after = [old if new is None else new for old, new in zip(state, after, strict=True)]
        return values, weights, [tf.convert_to_tensor(gradient) for gradient in found], after

    def _check(self, feed: Feed, told: Sequence[_ShareResult]) -> None:
        """Raise NonFiniteLoss with the samples of the shares whose loss or gradient is not finite."""
        bad: list[int] = []
        ranks = [rank for rank, each in zip(feed.data_ranks, told, strict=True) if not np.isfinite(each.sums).all()]
        for rank, part, each in zip(feed.data_ranks, feed.parts, told, strict=True):
            for batch, losses in zip(part, each.losses, strict=True):
                rows = ~np.isfinite(np.asarray(losses).reshape(batch.rows, -1)).all(axis=1)
                bad += batch.samples[rows].tolist() if rank in ranks else []
        if ranks:
            what = (
                "the loss became" if any(not math.isfinite(float(each.sums[1])) for each in told) else "a gradient is"
            )
            error = NonFiniteLoss(
                f"{what} not finite in step {feed.step + 1}" + (f", in samples {format_samples(bad)}" if bad else ""),
                where=f"{self._caller.where}, data ranks {format_samples(ranks)}",
                remedy=f"{_SKIPPED}; nothing of these shares was applied, other shares of the step may be",
            )
            error.samples = tuple(bad)
            raise error


def _is_running(value: Any) -> bool:
    """Whether a worker is computing it: the waiting thread holds a lock meanwhile."""
    free: bool = value._has_fetched_to_local_lock.acquire(timeout=_POLL_S)
    if free:
        value._has_fetched_to_local_lock.release()
    return not free


def _chain(feed: Feed) -> Iterator[Feed]:
    """Return the feed and those that may start with it; only itself once a stop is requested."""
    following: Feed | None = feed
    while following is not None:
        yield following
        following = None if feed.wish else following.following


# --- A model's variables on parameter servers, and the optimizer that updates them there ------------------------------


_MIN_PIECE_BYTES = 256 << 10  # of a variable that is cut
_optimizers = keras.optimizers
_ELEMENTWISE_OPTIMIZERS = (
    _optimizers.SGD, _optimizers.Adam, _optimizers.AdamW, _optimizers.Adamax, _optimizers.Nadam, _optimizers.RMSprop,
    _optimizers.Adagrad, _optimizers.Adadelta, _optimizers.Ftrl, _optimizers.Lion,
)  # fmt: skip
_VariablePieces = tuple[keras.Variable, ...]


class ServerVariables:
    """Variables on the servers with a replica's values.

    Args:
        replica: of the chief.
        strategy: a `ParameterServerStrategy`, which places variables on the servers in turn.
        servers: how many there are.

    Attributes:
        trained, state: of each of the replica's variables of that kind its pieces, in the order of rows.
        optimizer: the user's, of the pieces.
    """

    def __init__(self, replica: KerasReplica, strategy: tf.distribute.Strategy, servers: int) -> None:
        self._replica, self._strategy = replica, strategy
        self._partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(_MIN_PIECE_BYTES, servers)
        self._may_cut = type(replica.optimizer) in _ELEMENTWISE_OPTIMIZERS and replica.optimizer.clipnorm is None
        with strategy.scope():
            self.trained = [self._put(variable) for variable in replica.model.trainable_variables]
            self.state = [self._put(variable) for variable in replica.state]
            assert replica.spec.optimizer is not None, "the replica has one"
            with TensorFlowUserCode("optimizer()", replica.where):
                self.optimizer = replica.spec.optimizer(self.pieces)
            slots = build_optimizer(self.optimizer, self.pieces)
        self.optimizer._all_reduce_sum_gradients = lambda pairs: pairs  # a share's gradient is an update of its own
        self.optimizer._get_current_learning_rate = lambda: self._rate
        count = self.optimizer.iterations
        count.assign_add = count.value.assign_add  # Keras reads, adds and writes, and so loses others' counts
        self._pairs = [*zip(replica.model.trainable_variables, self.trained, strict=True)]
        self._pairs += zip(replica.state, self.state, strict=True)
        self._pairs += self._of_optimizer(slots)
        self._rate: Any = None

    @property
    def pieces(self) -> list[keras.Variable]:
        """The pieces of the trained variables."""
        return [piece for pieces in self.trained for piece in pieces]

    def pull(self) -> tuple[list[Any], list[Any]]:
        """Return trained variables and other state, whole, as tensors of the current graph."""
        return [_whole(pieces) for pieces in self.trained], [_whole(pieces) for pieces in self.state]

    def push(self, gradients: Sequence[Any], state: Sequence[Any], rate: Any) -> None:
        """Apply gradients of whole variables with a learning rate, each piece on its server, and set the state."""
        self._rate = rate
        cut = [part for gradient, pieces in zip(gradients, self.trained, strict=True)
               for part in _split(gradient, pieces)]  # fmt: skip
        self._strategy.run(lambda parts: self.optimizer.apply(parts, self.pieces), args=(cut,))
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

    def _put(self, variable: keras.Variable) -> _VariablePieces:
        values: npt.NDArray[Any] = tensor_conversion.to_numpy(variable.value)
        number = 1
        if self._may_cut and variable.trainable and variable.constraint is None and values.ndim:
            number = self._partitioner(tf.TensorShape(values.shape), tf.as_dtype(variable.dtype))[0]
        return tuple(self._piece(variable, part) for part in np.array_split(values, number)) if number > 1 else (
            self._piece(variable, values),
        )  # fmt: skip

    def _piece(self, variable: keras.Variable, values: npt.NDArray[Any]) -> keras.Variable:
        piece = keras.Variable(values, dtype=variable.dtype, trainable=variable.trainable, name=variable.name)
        piece.constraint = variable.constraint
        return piece

    def _of_optimizer(
        self, slots: Sequence[Sequence[keras.Variable]]
    ) -> Iterator[tuple[keras.Variable, _VariablePieces]]:
        """Yield the variables of the chief's optimizer with their pieces; the learning rate stays with the chief."""
        ends = list(accumulate(len(pieces) for pieces in self.trained))
        for own, end, pieces in zip(self._replica.slots, ends, self.trained, strict=True):
            of_pieces = slots[end - len(pieces) : end]
            for number, slot in enumerate(own):
                yield slot, tuple(each[number] for each in of_pieces)
        pairs = zip(_others(self._replica.optimizer, self._replica.slots), _others(self.optimizer, slots), strict=True)
        for variable, piece in pairs:
            yield variable, (piece,)


def _others(optimizer: Any, slots: Sequence[Sequence[keras.Variable]]) -> list[keras.Variable]:
    """Return an optimizer's variables that belong to no trained variable, without its learning rate."""
    known = {id(slot) for each in slots for slot in each} | {id(optimizer._learning_rate)}
    return [variable for variable in optimizer.variables if id(variable) not in known]


def _whole(pieces: _VariablePieces) -> Any:
    parts = [tf.convert_to_tensor(piece.value) for piece in pieces]
    return tf.concat(parts, 0) if len(parts) > 1 else parts[0]


def _split(gradient: Any, pieces: _VariablePieces) -> list[Any]:
    return tf.split(gradient, [piece.shape[0] for piece in pieces]) if len(pieces) > 1 else [gradient]


def _rows(values: npt.NDArray[Any], shapes: Sequence[Any]) -> list[npt.NDArray[Any]]:
    if len(shapes) == 1:
        return [values]
    return np.split(values, list(accumulate(shape[0] for shape in shapes))[:-1])
