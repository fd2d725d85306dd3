"""One training step as one compiled function: it sums gradients over all replicas, and applies them if they are finite.

One reduction sums the gradients and the values that decide whether and how to apply them, so that all replicas decide
alike. Random numbers do not depend on earlier steps: a `StatelessScope` sets the state of each seed generator of the
model from (seed, step, micro-batch, data rank). A data rank draws the same numbers on any replica.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainwright.core.data import (
    COMPILED_PHASE,
    Batch,
    Feed,
    GradientScatter,
    MetricSums,
    StepReport,
    fold_seed,
    noise_is_due,
    repeat_row,
)
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.loss_api import BATCH_LOSS
from trainwright.strategies.common.user_code_errors import format_samples, non_finite_error, nonfinite_columns_hint
from trainwright.strategies.tensorflow.tensorflow_compat import use_global_seeds
from trainwright.strategies.tensorflow.training import tensor_conversion
from trainwright.strategies.tensorflow.training.divided_losses import check_losses
from trainwright.strategies.tensorflow.training.gradient_rows import added, changed, whole_norm
from trainwright.strategies.tensorflow.training.objective import LOSS
from trainwright.strategies.tensorflow.training.tensorflow_errors import TensorFlowUserCode
from trainwright.strategies.tensorflow.training.train_state import KerasReplica, check_fit_only

_SEED_WORD = 2**31 - 1
_SEED_STATE = "seed_generator_state"  # the name of the variable of a SeedGenerator


class MicroBatch(NamedTuple):
    """A micro-batch as tensors."""

    columns: Mapping[str, Any]  # by name
    weights: Any  # (rows,) of the samples, from the feed
    seed: Any  # (2,) int64, for its random numbers


class MicroOutcome(NamedTuple):
    """Values of a micro-batch."""

    losses: Any  # of its samples
    weights: Any  # of the losses
    gradients: list[Any]  # of each trained variable; those of embeddings as rows, see `gradient_rows`
    state: list[Any]  # of the model after the call
    logged: dict[str, Any]  # sum and weight (2,) float64 of each value that `step=` returns beside the loss


class _RankShare(NamedTuple):
    """One data rank's part of a step."""

    micros: tuple[MicroBatch, ...]  # its micro-batches
    rows: Any  # () real samples in the global batch
    stop_requested: Any  # () 1 if this worker requests a stop, else 0
    sampled: Any  # () whether this step measures the gradient noise scale


class _ReducedGradients(NamedTuple):
    """Values of one replica after the reduction."""

    gradients: list[Any]  # summed over all replicas, in the order of the trained variables
    # (8,) over all replicas: sum of weights, sum of weighted losses, number of requests to stop; then `parts`,
    # `samples` and `shares` of `core.data.GradientScatter`, the norm of the gradients, and the scatter's `whole`,
    # each 0 if the step does not need it
    carry: Any
    # new values of the model's state that is not trained, averaged over all replicas; None for values that the step
    # does not change
    state: list[Any]
    losses: list[Any]  # of this replica's micro-batches
    logged: dict[str, Any]  # sum and weight (2,) over all replicas of each value that `step=` returns beside the loss


class _StepOutcome(NamedTuple):
    """Values of a step that the host reads."""

    carry: Any  # of the first replica; see `_ReducedGradients`
    losses: list[Any]  # of each micro-batch, a value for each replica
    logged: dict[str, Any]  # as in `_ReducedGradients`


class TrainFunction:
    """Computes the steps of all replicas of this process.

    Args:
        replica: model and optimizer.

    Raises:
        JobError: only Keras' `fit` can train the model.
    """

    def __init__(self, replica: KerasReplica) -> None:
        check_fit_only(replica.model, replica.spec, replica.where)
        self._replica, self._caller, self._strategy = replica, replica.caller, replica.strategy
        self._kind = tf.float64 if any(v.dtype == tf.float64 for v in replica.trained) else tf.float32
        self._wants_norm = replica.spec.clip_norm is not None or replica.spec.guard or replica.scales
        compiled = replica.spec.compile == "xla"
        self._micro = tf.function(self._run_micro, jit_compile=True, autograph=False) if compiled else self._run_micro
        self._step = tf.function(self._run_step, reduce_retracing=True, autograph=False)

    def run(self, feed: Feed, *, muted: bool = False) -> _StepOutcome:
        """Run the compiled step. It applies nothing if the loss is not finite or has no weight, as with `muted`.

        If an operation fails, some variables may have been updated already: the replica is marked as not sound. After
        the loss of a peer no variable was updated, because collectives come first.
        """
        shares = [self._share(feed, part, rank, muted) for part, rank in zip(feed.parts, feed.data_ranks, strict=True)]
        distributed_shares = tensor_conversion.distribute_values(self._strategy, shares, feed.data_ranks.start)
        try:
            outcome: _StepOutcome = self._step(distributed_shares)
        except tf.errors.OpError as error:
            self._replica.sound = self._replica.sound and TensorFlowUserCode.lost_peer(error)
            raise
        return outcome

    def check_divided(self, feed: Feed) -> None:
        """Raise JobError if the batch is divided, and the losses of rows depend on other rows.

        The trial runs the model in evaluation mode; it runs `step=` unchanged, unless that draws random numbers.
        """
        spec, (batch, *later_batches) = self._replica.spec, feed.parts[0]
        if feed.total * (1 + len(later_batches)) == 1 or BATCH_LOSS in spec.inexact:
            return
        trials = itertools.count()
        check_losses(
            "what step= returns" if spec.step else "loss=, or one of the model's add_loss(),",
            self._replica.model,
            lambda rows: self._losses_of(repeat_row(batch, rows), next(trials)),
            self._caller.where,
            drawn=not spec.step,
        )

    def _losses_of(self, batch: Batch, trial: int) -> list[npt.NDArray[Any]]:
        """Return the losses that the model adds, and the mean loss. It changes no variable."""
        replica, caller = self._replica, self._caller
        (micro,) = micro_batches(replica.spec, caller.wanted, (batch,), trial, 0, muted=False)
        use_global_seeds(replica.unseeded)
        variables = (*replica.model.trainable_variables, *replica.state)
        variable_values = [(variable, tf.convert_to_tensor(variable.value)) for variable in variables]
        with _Scope([*_seed_values(replica.seeds, micro.seed), *variable_values]):
            values, weights = caller.loss(replica.model, micro.columns, micro.weights, training=False)
            parts = [np.asarray(each) for each in replica.model.losses]
        return [*parts, np.asarray(tf.reduce_sum(values * weights) / tf.reduce_sum(weights))]

    def train(self, feed: Feed) -> StepReport:
        """Compute one step. All ranks apply it, or none does. Raises NonFiniteLoss if nothing was applied."""
        replica = self._replica
        rate = replica.set_rate(feed.step)
        start_s = time.perf_counter()
        outcome = self.run(feed)
        weight, loss, stop_requested, parts, samples, shares, norm, whole = (
            float(value) for value in outcome.carry.numpy()
        )
        phases = {COMPILED_PHASE: time.perf_counter() - start_s}
        self._check(feed, weight, loss, norm, outcome)
        replica.step = feed.step + 1
        if replica.step == replica.spec.total_steps:
            replica.finish()
        overflowed = replica.scales and not math.isfinite(norm)
        has_norm, sampled = self._wants_norm and weight and not overflowed, bool(samples and weight) and not overflowed
        return StepReport(
            step=replica.step, loss=loss / weight if weight else 0.0, weight=weight, learning_rate=rate,
            logged=logged_sums([outcome.logged]),
            gradient_norm=norm * feed.rows / weight if has_norm else None, stop_requested=stop_requested > 0.5,
            overflowed=overflowed,
            phases=None if sampled else phases,
            scatter=GradientScatter(samples=samples, shares=shares, parts=parts, whole=whole) if sampled else None,
        )  # fmt: skip

    def _share(self, feed: Feed, part: Sequence[Batch], rank: int, muted: bool) -> _RankShare:
        micros = micro_batches(self._replica.spec, self._caller.wanted, part, feed.step, rank, muted=muted)
        stop_requested = feed.stop_requested and rank == feed.data_ranks[0]
        sampled = noise_is_due(feed.step, feed.total * len(part))
        return _RankShare(
            micros,
            tf.constant(feed.rows, tf.float64),
            tf.constant(float(stop_requested), self._kind),
            tf.constant(sampled),
        )

    def _run_step(self, share: Any) -> _StepOutcome:
        reduced: _ReducedGradients = self._strategy.run(self._compute_gradients, args=(share,))
        gradients = [tensor for each in reduced.gradients for tensor in self._local(each)]
        state = [tensor for each in reduced.state if each is not None for tensor in self._local(each)]
        with tf.control_dependencies([*gradients, *state]):  # no variable changes before the last collective has ended
            carry = tf.identity(self._local(reduced.carry)[0])
        weight, loss, _, _, _, _, norm, _ = tf.unstack(tf.cast(carry, tf.float64))
        checked = (weight, loss) if self._replica.scales else (weight, loss, norm)  # LossScaleOptimizer checks norms
        finite = tf.reduce_all(tf.math.is_finite(tf.stack(checked)))

        def apply() -> Any:
            factor = self._scale(weight, tf.cast(self._local(share)[0].rows, tf.float64), norm)
            self._apply_update(reduced.gradients, factor, reduced.state)
            return tf.constant(True)

        tf.cond(tf.logical_and(finite, weight != 0.0), apply, lambda: tf.constant(False))
        logged = {name: self._local(value)[0] for name, value in reduced.logged.items()}
        return _StepOutcome(carry, reduced.losses, logged)

    def _scale(self, weight: Any, rows: Any, norm: Any) -> Any:
        """Return the factor on the gradients: the mean over the global weight, and clipping."""
        factor = rows / weight
        max_norm = self._replica.spec.clip_norm
        return factor if max_norm is None else factor * tf.minimum(tf.ones_like(norm), max_norm / (norm * factor))

    def _compute_gradients(self, share: _RankShare) -> _ReducedGradients:
        """Compute one replica's micro-batches, and reduce the gradients."""
        kind, replica = self._kind, self._replica
        gradients: list[Any] = []
        weight, loss, scatter = tf.zeros((), kind), tf.zeros((), kind), tf.zeros(3, kind)
        old_state = state = [tf.convert_to_tensor(variable.value) for variable in replica.state]
        losses = []
        logged: dict[str, Any] = {}
        for micro in share.micros:
            values, weights, micro_gradients, state, micro_logged = self._micro(micro, share.rows, state)
            logged = {name: logged[name] + value if name in logged else value for name, value in micro_logged.items()}
            gradients = list(map(added, gradients, micro_gradients)) if gradients else micro_gradients
            weight += tf.cast(tf.reduce_sum(weights), kind)
            loss += tf.cast(tf.reduce_sum(values * weights), kind)
            losses.append(values)
            scatter += self._if_sampled(share, partial(self._scatter, micro_gradients, micro, share.rows), 3)
        changed_state = [None if new is old else new for old, new in zip(old_state, state, strict=True)]
        carry = tf.concat((tf.stack((weight, loss, share.stop_requested)), scatter), 0)
        reduced = self._reduce_gradients(gradients, carry, changed_state, losses, logged)
        square = self._if_sampled(share, lambda: self._square(reduced.gradients, share.rows)[None], 1)
        return reduced._replace(carry=tf.concat((reduced.carry, square), 0))

    def _if_sampled(self, share: _RankShare, compute: Callable[[], Any], size: int) -> Any:
        """Return sums for the gradient noise scale, or zeros if the step does not measure it or has one share only."""
        zeros = tf.zeros(size, self._kind)
        if self._strategy.num_replicas_in_sync * len(share.micros) == 1:
            return zeros
        return tf.cond(share.sampled, compute, lambda: zeros)

    def _scatter(self, gradients: list[Any], micro: MicroBatch, rows: Any) -> Any:
        """Return a micro-batch's part of the scatter, of shape (3,): parts, samples and shares."""
        samples = tf.cast(tf.math.count_nonzero(micro.weights), self._kind)
        parts = tf.math.divide_no_nan(self._square(gradients, rows), samples)
        return tf.stack((parts, samples, tf.minimum(samples, 1)))

    def _square(self, gradients: list[Any], rows: Any) -> Any:
        """Return the squared norm of the sum of the samples' gradients, each divided by `rows`."""
        return tf.square(tf.cast(whole_norm(gradients), self._kind) * tf.cast(rows, self._kind))

    def _run_micro(self, micro: MicroBatch, rows: Any, state: list[Any]) -> MicroOutcome:
        """Compute one micro-batch; see `run_micro_batch`. Its sum of losses is divided by `rows`."""
        scale = self._replica.loss_scale
        trained = [tf.convert_to_tensor(variable) for variable in self._replica.trained]
        result = run_micro_batch(
            self._replica, micro, trained, state,
            lambda total: self._times(total / tf.cast(rows, total.dtype), scale),
        )  # fmt: skip
        gradients = [changed(each, lambda value: self._times(value, scale, inverse=True)) for each in result.gradients]
        return result._replace(gradients=gradients)

    def _reduce_gradients(
        self, gradients: list[Any], carry: Any, state: list[Any], losses: list[Any], logged: dict[str, Any]
    ) -> _ReducedGradients:
        context, sums = tf.distribute.get_replica_context(), carry.shape[0]
        carry = tf.concat((carry, *(tf.cast(value, self._kind) for value in logged.values())), 0)
        if context.num_replicas_in_sync > 1:
            total = tf.distribute.ReduceOp.SUM
            *gradients, carry = context.all_reduce(total, [*gradients, carry], self._replica.sum_options)
            state = _average(context, state, self._replica.sum_options)
        norm = whole_norm(gradients) if self._wants_norm else tf.zeros(())
        logged = {name: carry[sums + 2 * place :][:2] for place, name in enumerate(logged)}
        carry = tf.concat((carry[:sums], [tf.cast(norm, self._kind)]), 0)
        return _ReducedGradients(gradients=gradients, carry=carry, state=state, losses=losses, logged=logged)

    def _apply_update(self, gradients: list[Any], factor: Any, state: list[Any]) -> None:
        self._strategy.run(self._apply_in_replica, args=(gradients, factor))
        for variable, value in zip(self._replica.state, state, strict=True):
            if value is not None:
                self._strategy.extended.update(variable.value, lambda target, new: target.assign(new), args=(value,))

    def _apply_in_replica(self, gradients: list[Any], factor: Any) -> None:
        """Apply the gradients of the whole batch in one replica."""
        scaled = [changed(gradient, lambda each: each * tf.cast(factor, each.dtype)) for gradient in gradients]
        scaled = [changed(each, lambda values: self._times(values, self._replica.loss_scale)) for each in scaled]
        self._replica.optimizer.apply(scaled, self._replica.model.trainable_variables)

    def _times(self, value: Any, scale: Any, *, inverse: bool = False) -> Any:
        """Return a value with or without the loss scale; unchanged if there is none."""
        if scale is None:
            return value
        value = tf.convert_to_tensor(value)
        scale = tf.cast(scale, value.dtype)
        return value / scale if inverse else value * scale

    def _check(self, feed: Feed, weight: float, loss: float, norm: float, outcome: _StepOutcome) -> None:
        """Raise NonFiniteLoss on every rank. The rank with the bad samples names them."""
        if math.isfinite(loss) and math.isfinite(weight):
            if not weight or math.isfinite(norm) or self._replica.scales:
                return
            raise non_finite_error(f"the gradient's norm became {norm} in step {feed.step + 1}", self._caller.where)
        for rank, batch, losses in self._own_losses(feed, outcome):
            # If finite losses have an infinite sum, at least one of them is above this limit.
            limit = np.finfo(losses.dtype).max / (feed.rows * max(1, losses.size // max(1, len(losses))))
            bad = ~(np.abs(losses.reshape(len(losses), -1)) <= limit).all(axis=1)
            if bad.any():
                samples = batch.samples[bad].tolist()
                where = f"{self._caller.where}, data rank {rank}"
                problem = f"the loss became {loss} in step {feed.step + 1}, in samples {format_samples(samples)}"
                raise non_finite_error(problem, where, samples, cause=nonfinite_columns_hint(batch, bad))
        problem = f"the loss became {loss} in step {feed.step + 1}, on another data rank"
        raise non_finite_error(problem, self._caller.where, elsewhere=True)

    def _own_losses(self, feed: Feed, outcome: _StepOutcome) -> Iterable[tuple[int, Batch, npt.NDArray[Any]]]:
        """Yield the losses of each micro-batch of this process, with its data rank."""
        for micro, value in enumerate(outcome.losses):
            for rank, part, losses in zip(feed.data_ranks, feed.parts, self._local(value), strict=True):
                yield rank, part[micro], losses.numpy()

    def _local(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this process's replicas, in order."""
        return tuple(self._strategy.experimental_local_results(value))


def _average(context: Any, values: list[Any], options: Any) -> list[Any]:
    """Return the means of the values over all replicas. A collective takes values of one type."""
    means = list(values)
    for kind in dict.fromkeys(value.dtype for value in values if value is not None):
        places = [place for place, value in enumerate(values) if value is not None and value.dtype == kind]
        wide = [values[place] if kind.is_floating else tf.cast(values[place], tf.float64) for place in places]
        kind_means = context.all_reduce(tf.distribute.ReduceOp.MEAN, wide, options)
        for place, mean in zip(places, kind_means, strict=True):
            means[place] = mean if kind.is_floating else tf.cast(tf.round(mean), kind)
    return means


def micro_batches(
    spec: ModelSpec, names: Iterable[str] | None, part: Sequence[Batch], step: int, rank: int, *, muted: bool
) -> tuple[MicroBatch, ...]:
    """Return a data rank's part of a step as tensors.

    Args:
        spec: the job's collation and seed.
        names: columns; None for all.
        part: the micro-batches.
        step: number of the step.
        rank: the data rank.
        muted: all weights are 0, for a trial step.
    """
    return tuple(
        MicroBatch(
            columns=tensor_conversion.column_tensors(spec.collation, batch, names),
            weights=tf.convert_to_tensor(batch.weights * (0.0 if muted else 1.0)),
            seed=tf.constant(_seed_words(spec.seed, step, micro, rank), tf.int64),
        )
        for micro, batch in enumerate(part)
    )


def run_micro_batch(
    replica: KerasReplica,
    micro: MicroBatch,
    trained: list[Any],
    state: list[Any],
    scale: Callable[[Any], Any] = lambda total: total,
) -> MicroOutcome:
    """Compute losses and gradients of one micro-batch, without changing any variable.

    Args:
        replica: with the model.
        micro: the micro-batch.
        trained: values of the trained variables.
        state: values of the other variables.
        scale: (weighted sum of losses) -> the value to differentiate.
    """
    use_global_seeds(replica.unseeded)  # each replica may have a thread of its own
    state_values = zip(replica.state, state, strict=True)
    trained_values = zip(replica.model.trainable_variables, trained, strict=True)
    with tf.GradientTape() as tape:
        tape.watch(trained)
        scope = _Scope([*_seed_values(replica.seeds, micro.seed), *state_values, *trained_values])
        with scope:
            if replica.spec.step:
                logged = replica.caller.step_terms(replica.model, micro.columns, micro.weights)
                values, weights = logged.pop(LOSS)
            else:
                logged = {}
                values, weights = replica.caller.loss(replica.model, micro.columns, micro.weights, training=True)
        scope.check(replica.where)
        objective = scale(tf.reduce_sum(values * weights))
    gradients = tape.gradient(objective, trained, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    new_state = [scope.get_current_value(variable) for variable in replica.state]
    new_state = [old if new is None else new for old, new in zip(state, new_state, strict=True)]
    sums = {name: tf.stack((_sum(each.values * each.weights), _sum(each.weights))) for name, each in logged.items()}
    return MicroOutcome(losses=values, weights=weights, gradients=gradients, state=new_state, logged=sums)


class _Scope(keras.StatelessScope):  # type: ignore[misc]  # Keras has no types
    """A scope that detects a generator whose new state is lost: it would draw the same numbers in each step."""

    def __init__(self, state: Iterable[tuple[Any, Any]]) -> None:
        super().__init__(state, collect_losses=True)
        self._drops_seed = False

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Take over the new value of a variable."""
        variable, _ = update
        self._drops_seed |= id(variable) not in self.state_mapping and variable.name == _SEED_STATE
        super().add_update(update)

    def check(self, where: str) -> None:
        """Raise JobError if a generator's state was dropped."""
        if self._drops_seed:
            problem = "a keras.random.SeedGenerator draws numbers in a step, and no layer holds it"
            raise JobError(
                [f"{problem}: make it an attribute of a layer or of the model, or leave seed= out"], where=where
            )


def logged_sums(outcomes: Iterable[Mapping[str, Any]]) -> MetricSums:
    """Add up logged values: a sum and a weight, (2,), by name."""
    pairs = [{name: (float(value[0]), float(value[1])) for name, value in each.items()} for each in outcomes]
    return sum((MetricSums(totals=each) for each in pairs), MetricSums())


def _sum(values: Any) -> Any:
    return tf.reduce_sum(tf.cast(tf.stop_gradient(values), tf.float64))


def _seed_values(generators: Iterable[Any], seed: Any) -> Iterable[tuple[Any, Any]]:
    """Yield each seed generator's variable with its state for a micro-batch with this seed, (2,) int64."""
    for number, variable in enumerate(generators):
        mixed = tf.stack(((seed[0] + number * 0x9E3779B1) % _SEED_WORD, seed[1]))
        yield variable, tf.cast(mixed, variable.dtype)


def _seed_words(*numbers: int) -> tuple[int, int]:
    """Return two words of 31 bits, mixed from the numbers."""
    folded = fold_seed(*numbers, 0)
    return folded & _SEED_WORD, (folded >> 31) & _SEED_WORD
