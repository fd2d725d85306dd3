"""Keras' `fit` on several workers: each has the model as on one device, and sums over all workers join their steps.

Keras 3 cannot run `fit` under MultiWorkerMirroredStrategy (docs/adr/0011-keras-fit-on-several-workers.md). Here that
strategy computes sums alone. With n_r rows of the batch's N, worker r has the share n_r / N. In the graph of the
model's own `train_step`:

| value               | what the batch has                                                                          |
|---------------------|---------------------------------------------------------------------------------------------|
| gradients           | sum of share * gradient, before the optimizer clips and applies them; rows are gathered    |
| metrics             | their state variables count from 0 in a step; the sums are added to those before it         |
| moving statistics   | the value before, and the sum of share * change                                             |
| seeds of generators | each worker draws numbers of its own, and carries on those of the first                     |

So the state is the same on all workers between two steps: one of them saves it for all, and callbacks, which run on
all, see the same logs and decide alike.

A loss that is a mean over its rows needs no more. `reduction="sum"`, `"mean_with_sample_weight"` and masks are scaled
by the sums of all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainwright.core.data import Feed, MetricSums
from trainwright.core.engine import MetricStates, ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.metric_states import sum_problem
from trainwright.core.plan import Plan
from trainwright.core.topology import StateTag, StateTransfer
from trainwright.strategies.tensorflow.custom_loop import CustomLoop
from trainwright.strategies.tensorflow.distillation.model_backend import digest
from trainwright.strategies.tensorflow.keras_fit import CompiledModel, FitEngine, flat_logs, whole_batch
from trainwright.strategies.tensorflow.strategy_engines import AtGivenAddresses, MultiWorkerMirrored
from trainwright.strategies.tensorflow.tensorflow_compat import loss_functions, replaced
from trainwright.strategies.tensorflow.training.gradient_rows import changed
from trainwright.strategies.tensorflow.training.objective import MEAN_BY_WEIGHT
from trainwright.strategies.tensorflow.training.tensorflow_errors import TensorFlowUserCode
from trainwright.strategies.tensorflow.training.train_state import KerasTrainState, inner_optimizer, sum_options

_WRITERS = (keras.callbacks.TensorBoard, keras.callbacks.CSVLogger, keras.callbacks.RemoteMonitor)
_SEED_STRIDE = 1_000_003  # between the seeds of two workers
_MEANS = ("sum_over_batch_size", "mean")
_DIGEST_DIGITS = 12  # of 4 bits: as many as float64 holds


class _WorkerSums:
    """Sums over all workers, and this worker's share of a batch.

    Args:
        strategy: its collectives compute the sums.
        rank, size: rank of this worker, and the number of workers.
        options: options of the collectives.

    Attributes:
        stop_requested: whether some worker requested a stop in the last step.
    """

    def __init__(self, strategy: Any, rank: int, size: int, options: Any) -> None:
        self._strategy, self.rank, self.size, self._options = strategy, rank, size, options
        self._inputs = tf.Variable([1.0, 0.0], dtype=tf.float64, trainable=False)  # the share; 1 to request a stop
        self.stop_requested = tf.Variable(0.0, dtype=tf.float32, trainable=False)
        self._compiled = tf.function(self.sum, autograph=False)

    def give(self, feed: Feed) -> None:
        """Set this worker's share of a batch, and its stop request."""
        row_count = sum(int(np.count_nonzero(batch.weights)) for part in feed.parts for batch in part)
        self._inputs.assign([row_count / feed.rows, float(feed.stop_requested)])

    @property
    def own_stop_request(self) -> Any:
        """() float32: 1 if this worker requests a stop, else 0."""
        return tf.cast(self._inputs[1], tf.float32)

    def share(self, kind: Any) -> Any:
        """Return this worker's share of the batch: (), of a type."""
        return tf.cast(self._inputs[0], kind)

    def counted(self, value: Any) -> Any:
        """Return a value; zeros from a worker without a row of the batch, which computed a row of another batch."""
        return tf.where(self._inputs[0] > 0, value, tf.zeros_like(value))

    def weighted(self, value: Any) -> Any:
        """Return a value times the share of the batch."""
        value = tf.convert_to_tensor(value)
        return self.counted(value * self.share(value.dtype))

    def of_first(self, value: Any) -> Any:
        """Return a value; zeros unless this is the first worker."""
        value = tf.convert_to_tensor(value)
        return value if self.rank == 0 else tf.zeros_like(value)

    def sum(self, values: Sequence[Any]) -> list[Any]:
        """Return sums over all workers. All call it with values of the same shapes and types in one order."""
        tensors = [tf.convert_to_tensor(value) for value in values]
        sums = list(tensors)
        for kind in dict.fromkeys(value.dtype for value in tensors):
            places = [place for place, value in enumerate(tensors) if value.dtype == kind]
            kind_sums = self._strategy.run(self._all_reduce, args=([tensors[index] for index in places],))
            for index, value in zip(places, kind_sums, strict=True):
                sums[index] = value
        return sums

    def gather(self, value: Any) -> Any:
        """Return the rows of all workers, in their order."""
        return self._strategy.run(_all_gather, args=(value,))

    def sum_now(self, values: Sequence[Any]) -> list[Any]:
        """Return sums over all workers outside of a step, by a compiled function."""
        sums: list[Any] = self._compiled([tf.convert_to_tensor(value) for value in values])
        return sums

    @contextmanager
    def own_seeds(self, seeds: Sequence[Any]) -> Iterator[list[Any]]:
        """Make this worker draw different random numbers within the block. Yield the states that the block has used.

        The list is complete after the block. Other states are as before, and need no sum over workers.
        """
        offset = [self.rank * _SEED_STRIDE, 0]
        for state in seeds:
            state.assign_add(tf.constant(offset, state.dtype))
        uses_before, drawn_states = [_uses(state) for state in seeds], list[Any]()
        yield drawn_states
        for state, uses in zip(seeds, uses_before, strict=True):
            if uses is None or _uses(state) != uses:
                drawn_states.append(state)
            else:
                state.assign_sub(tf.constant(offset, state.dtype))

    def _all_reduce(self, values: list[Any]) -> Any:
        """Return sums of copies over all replicas: the strategy needs values with a device."""
        context, copies = tf.distribute.get_replica_context(), [tf.identity(value) for value in values]
        return context.all_reduce(tf.distribute.ReduceOp.SUM, copies, self._options)


def _all_gather(value: Any) -> Any:
    """Return the rows of all replicas."""
    return tf.distribute.get_replica_context().all_gather(tf.identity(value), axis=0)


class _Unsaved:
    """Stands for the model in a ModelCheckpoint that does not write, but still reads the model's metrics."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    save_weights = save


class _CompiledOnWorkers(CompiledModel):
    """A compiled model whose steps use the rows of all workers.

    Args:
        spec: the job's functions.
        plan: gives the precision.
        where: the rank, for errors.
        sums: sums over all workers.

    Raises:
        JobError, UserCodeError: as `CompiledModel`; or a metric cannot be summed over workers.
    """

    def __init__(self, spec: ModelSpec, plan: Plan, where: str, sums: _WorkerSums) -> None:
        super().__init__(spec, tf.distribute.get_strategy(), plan, where)
        self._sums = sums
        self.model.jit_compile = False  # XLA has no sums over processes
        self._adds = isinstance(self.model, CustomLoop) and self.model.reduction == "sum"
        if isinstance(self.model, CustomLoop):
            self.model.divide(sums.share)
        if type(self.model).test_step is keras.Model.test_step:
            self._check_metrics()

    def make_functions(self) -> None:
        """Compile steps of all workers. A callback can still call `model.evaluate` by itself."""
        model, scheduled = self.model, keras.optimizers.schedules.LearningRateSchedule
        inner = {id(inner_optimizer(each)) for each in self.optimizers if inner_optimizer(each) is not each}
        self._outer = [each for each in self.optimizers if id(each) not in inner]
        rules = [inner_optimizer(each) for each in self._outer]
        self._rates = [each for each in rules if not isinstance(each._learning_rate, scheduled)]
        seed_ids = {id(each) for each in self.carried["seeds"]}
        frozen = {id(each) for layer in model._flatten_layers() if not layer.trainable for each in layer.variables}
        self._moving_statistics = [
            each.value
            for each in model.non_trainable_variables
            if id(each) not in frozen and id(each.value) not in seed_ids and tf.as_dtype(each.dtype).is_floating
        ]
        self._make_train_function()
        with replaced(model, "test_step", partial(self._run_on_workers, model.test_step, False)):
            model.make_test_function(force=True)
        self._test, model.test_function = self._compiled("test_step()", model.test_function), None

    def _make_train_function(self) -> None:
        model = self.model
        with replaced(model, "train_step", partial(self._run_on_workers, model.train_step, True)):
            model.make_train_function(force=True)
        self._train_from, self._train = model.train_function, self._compiled("train_step()", model.train_function)

    def _compiled(self, name: str, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return step if self.model.run_eagerly else _of_any_rows(step, _AnyRowsUserCode(name, self.where))

    def train(self, data: Any) -> Any:
        """Return the logs of a step of all workers. If a callback compiled Keras' step again, compile this one too."""
        if self.model.train_function is not self._train_from:
            self._make_train_function()
        return self._train(data)

    def test(self, data: Any) -> Any:
        """Return the logs of a step of evaluation of all workers."""
        return self._test(data)

    def distributed(self, feed: Feed, *, training: bool) -> list[Any]:
        """Return this worker's data of a step. Without rows, it is a row of another batch, which does not count."""
        self._sums.give(feed)
        return [self.data(whole_batch(feed), training=training)]

    def stop_requested(self, feed: Feed) -> bool:
        """Return whether some worker requested a stop in the last step."""
        return bool(self._sums.stop_requested.numpy() > 0)

    def agree(self) -> None:
        """Give all workers the learning rates of the first, and stop all if a callback of one stopped the training.

        Raises:
            JobError: callbacks of only some workers compiled the step again: workers may have different steps.
        """
        model, sums = self.model, self._sums
        rates = [float(each.learning_rate.numpy()) for each in self._rates]
        recompiled = float(model.train_function is not self._train_from)
        decisions = [float(model.stop_training), recompiled, *(rates if sums.rank == 0 else [0.0] * len(rates))]
        (totals,) = sums.sum_now([tf.constant(decisions, tf.float64)])
        stopped, compiled, *agreed = totals.numpy().tolist()
        if compiled not in (0, sums.size):
            problem = f"a callback compiles the model's step again on {compiled:g} of {sums.size} workers"
            raise JobError([f"{problem}: do it on all of them, in the same hook"], where=self.where)
        model.stop_training = stopped > 0
        for optimizer, rate, own_rate in zip(self._rates, agreed, rates, strict=True):
            if rate != own_rate:
                optimizer.learning_rate = rate

    def own_callbacks(self, callbacks: Sequence[Any]) -> list[Any]:
        """Return the callbacks of this worker. Only the first writes files; a muted ModelCheckpoint runs on all."""
        if self._sums.rank == 0:
            return list(callbacks)
        for each in callbacks:
            if isinstance(each, keras.callbacks.ModelCheckpoint):
                _mute(each)
        return [each for each in callbacks if not isinstance(each, _WRITERS)]

    # --- a step -------------------------------------------------------------------------------------------

    def _run_on_workers(self, function: Callable[[Any], Any], training: bool, data: Any) -> Any:
        """Run `train_step` or `test_step` with the metrics, gradients and other state of the whole batch."""
        sums, model = self._sums, self.model
        metrics = [each.value for each in model.metrics_variables]
        statistics, own_seeds = (self._moving_statistics, self.carried["seeds"]) if training else ([], [])
        old_values = [tf.identity(each) for each in (*metrics, *statistics)]
        for variable in metrics:
            variable.assign(tf.zeros_like(variable))
        with self._batch_losses(), self._batch_gradients(), sums.own_seeds(own_seeds) as seeds:
            logs = flat_logs(function(data))
        by_batch = self._by_batch
        changes = [sums.weighted(each) if id(each) in by_batch else sums.counted(each) for each in metrics]
        changes += [sums.weighted(each - old) for each, old in zip(statistics, old_values[len(metrics) :], strict=True)]
        plain = {name: value for name, value in logs.items() if name not in model.get_metrics_result()}
        parts = [self._part(_as_float(value)) for value in plain.values()]
        *totals, stopped = sums.sum([*changes, *map(sums.of_first, seeds), *parts, sums.own_stop_request])
        for variable, old, change in zip((*metrics, *statistics), old_values, totals, strict=False):
            variable.assign(old + change)
        for variable, new in zip(seeds, totals[len(old_values) :], strict=False):
            variable.assign(new)
        if training:
            self._sums.stop_requested.assign(stopped)
        means = dict(zip(plain, totals[len(totals) - len(parts) :], strict=True))
        return {**means, **{name: value for name, value in model.get_metrics_result().items() if name in logs}}

    @property
    def _by_batch(self) -> set[int]:
        """Variables of the losses of several outputs, which Keras counts once for each batch of any number of rows."""
        compiled = self.model._compile_loss
        return {id(each.value) for metric in getattr(compiled, "metrics", ()) for each in metric.variables}

    @contextmanager
    def _batch_gradients(self) -> Iterator[None]:
        """Make optimizers apply the gradients of all workers within the block."""
        with ExitStack() as stack:
            for optimizer in self._outer:
                stack.enter_context(replaced(optimizer, "apply", partial(self._apply, optimizer.apply)))
            yield

    def _apply(self, apply: Callable[..., Any], gradients: Any, trainable_variables: Any = None) -> Any:
        """Apply the gradients of all workers; a gradient can be None, or rows, which are gathered."""
        summed = [changed(gradient, self._part) for gradient in gradients]
        rows = [place for place, gradient in enumerate(summed) if isinstance(gradient, tf.IndexedSlices)]
        places = [place for place, gradient in enumerate(summed) if gradient is not None and place not in rows]
        for place, total in zip(places, self._sums.sum([summed[index] for index in places]), strict=True):
            summed[place] = total
        for place in rows:
            values, indices = (self._sums.gather(each) for each in (summed[place].values, summed[place].indices))
            summed[place] = tf.IndexedSlices(values, indices, summed[place].dense_shape)
        return apply(summed, trainable_variables)

    def _part(self, value: Any) -> Any:
        """Return this worker's part of a loss or gradient of the batch. The value is a mean, or already such a part."""
        return self._sums.counted(tf.convert_to_tensor(value)) if self._adds else self._sums.weighted(value)

    @contextmanager
    def _batch_losses(self) -> Iterator[None]:
        """Make Keras scale losses within the block, so that their mean by shares is the loss of the batch."""
        if self._adds:
            yield
            return
        with (
            replaced(loss_functions, "reduce_values", partial(self._reduce_loss, loss_functions.reduce_values)),
            replaced(loss_functions, "apply_mask", partial(self._merge_mask, loss_functions.apply_mask)),
        ):
            yield

    def _reduce_loss(self, reduce: Any, values: Any, sample_weight: Any = None, reduction: Any = _MEANS[0]) -> Any:
        """Reduce losses as Keras' `reduce_values` does."""
        loss = reduce(values, sample_weight, reduction)
        if reduction == "sum" and values.shape.rank:
            return tf.math.divide_no_nan(loss, self._sums.share(loss.dtype))
        keras_step = type(self.model).train_step is keras.Model.train_step
        if reduction in (None, "none") and values.shape.rank and keras_step:
            problem = f"a loss with reduction={reduction!r} is a sum over rows to Keras, and its log is not"
            raise JobError([f'{problem}: on several workers use "sum_over_batch_size" or "sum"'], where=self.where)
        if reduction == MEAN_BY_WEIGHT and sample_weight is not None:
            return loss * self._ratio(tf.reduce_sum(tf.cast(sample_weight, loss.dtype)))
        return loss

    def _merge_mask(self, apply: Any, sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        """Merge a mask into weights as Keras' `apply_mask` does."""
        weights = apply(sample_weight, mask, dtype, reduction)
        if mask is None or reduction not in _MEANS:
            return weights
        return weights * self._ratio(tf.reduce_sum(tf.cast(mask, weights.dtype)))

    def _ratio(self, divisor: Any) -> Any:
        """Return this worker's divisor of a loss, relative to the whole batch's divisor times the worker's share."""
        (total,) = self._sums.sum([self._sums.counted(divisor)])
        return tf.math.divide_no_nan(divisor, total * self._sums.share(divisor.dtype))

    # --- what cannot be summed ----------------------------------------------------------------------------

    def _check_metrics(self) -> None:
        """Raise JobError for a metric whose state is not a sum over batches: one row twice must count twice."""
        if self.spec.sample is None:
            return
        model, data = self.model, self.data(self.spec.sample(), training=False)
        model.make_test_function()
        states = []
        model.reset_metrics()
        for _ in range(2):
            states.append([np.asarray(each.numpy(), np.float64) for each in model.metrics_variables])
            model.test_function([data])
        states.append([np.asarray(each.numpy(), np.float64) for each in model.metrics_variables])
        model.reset_metrics()
        problem = sum_problem(model.metrics_variables, *states) if model.metrics_variables else ""
        if problem:
            raise JobError([problem], where=self.where)


class FitMultiWorker(FitEngine, MultiWorkerMirrored):
    """`fit` on several workers of one device each."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: _WorkerSums | None = None

    def transfer(self, moves: Sequence[StateTransfer]) -> StateTag:
        """Set a fresh build to step 0, with the values of the first worker: a model may draw its own values."""
        compiled, sums = self._compiled, self._worker_sums
        variables = [*compiled.model.variables, *(each for rule in compiled.optimizers for each in rule.variables)]
        kinds = [(each, tf.as_dtype(each.dtype)) for each in variables]
        numeric = [each for each, kind in kinds if kind.is_floating or kind.is_integer]
        values = self._guarded(lambda: sums.sum_now([sums.of_first(each.value) for each in numeric]))
        for variable, value in zip(numeric, values, strict=True):
            variable.assign(value)
        return super().transfer(moves)

    def verify(self) -> None:
        """Check that all workers hold the same model. Raises JobError."""
        sums = self._worker_sums
        digests = [0.0] * sums.size
        digests[sums.rank] = float(int(digest(self.replica.model)[:_DIGEST_DIGITS], 16))
        (all_digests,) = self._guarded(lambda: sums.sum_now([tf.constant(digests, tf.float64)]))
        ranks = [rank for rank, value in enumerate(all_digests.numpy().tolist()) if value != float(all_digests[0])]
        if ranks:
            problem = (
                f"the model of rank {ranks[0]} is not that of rank 0 after step {self.replica.step}: a callback or "
                "train_step() changes variables in another way on each worker, such as by its own random numbers, or "
                "applies gradients by an optimizer that is not an attribute of the model"
            )
            raise JobError([problem], where=self._where)

    def evaluate_step(self, feed: Feed, states: MetricStates | None = None) -> MetricSums:
        """Return the sums of all workers on the first one, zeros on others. Raises UserCodeError, JobError."""
        sums = super().evaluate_step(feed, states)
        if self._worker_sums.rank == 0:
            return sums
        return MetricSums(totals=dict.fromkeys(sums.totals, (0.0, 0.0)))

    @property
    def _worker_sums(self) -> _WorkerSums:
        assert self._sums is not None, "call build() first"
        return self._sums

    def _make_replica(self, spec: ModelSpec, plan: Plan) -> KerasTrainState:
        assert self._group is not None, "call form() first"
        self._sums = _WorkerSums(self._strategy, self._group.rank, self._group.size, sum_options(plan))
        return _CompiledOnWorkers(spec, plan, self._where, self._sums)


class FitAtGivenAddresses(FitMultiWorker, AtGivenAddresses):
    """FitMultiWorker at the addresses that TF_CONFIG in each worker's environment gives."""


class _AnyRowsUserCode(TensorFlowUserCode):
    """User code that is traced without the number of rows."""

    @classmethod
    def remedy(cls, error: BaseException) -> str:
        """Return how to get the number of rows, for an error that its absence may have caused."""
        if "None" not in str(error):
            return super().remedy(error)
        return (
            "several workers trace a step once for any number of rows, so that `inputs.shape[0]` is None: take the "
            "number of rows from tf.shape(inputs)[0] or keras.ops.shape(inputs)[0]"
        )


def _of_any_rows(step: Callable[[Any], Any], tracing: TensorFlowUserCode) -> Callable[[Any], Any]:
    """Return a step that is traced once for any number of rows, as with the data sets that `fit` makes.

    So all workers run the same trace, and Keras counts the losses of several outputs once a batch: see `_by_batch`.

    Args:
        step: a step of Keras.
        tracing: names the step in errors of its trace.
    """
    compiled = tf.function(lambda data: step([data]), reduce_retracing=True, autograph=False)
    graph_functions: list[Any] = []

    def call(batches: Any) -> Any:
        (data,) = batches
        if not graph_functions:
            specs = tf.nest.map_structure(lambda each: tf.TensorSpec([None, *each.shape[1:]], each.dtype), data)
            with tracing:
                graph_functions.append(compiled.get_concrete_function(specs))
        return compiled(data)

    return call


def _uses(variable: tf.Variable) -> int | None:
    """Return how many operations of the current trace use a variable; None outside of traces."""
    if tf.executing_eagerly():
        return None
    return len(tf.compat.v1.get_default_graph().capture(variable.handle).consumers())


def _mute(callback: keras.callbacks.ModelCheckpoint) -> None:
    """Make a ModelCheckpoint decide, but write nothing."""
    set_model, callback.verbose = callback.set_model, 0
    callback.set_model = lambda model: set_model(_Unsaved(model))


def _as_float(value: Any) -> Any:
    """Return a log as a tensor of floats."""
    value = tf.convert_to_tensor(value)
    return value if value.dtype.is_floating else tf.cast(value, tf.float32)
