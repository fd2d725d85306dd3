"""Training as `Model.fit` does it: the model's `train_step`, the arguments of `compile`, and callbacks.

Keras' `fit` has its own loop and reads its own data, so that it cannot be fed, copied or resumed between two steps.
This module runs the loop one step at a time. The compiled step, metrics, epochs, validation and callbacks are Keras'
own, and run in the order of `fit`. A run that resumes within an epoch calls the callbacks for the start of that epoch
again; metrics continue.

Keras applies an update before it returns the loss. After a loss that is not finite, the state is not sound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainwright.core.data import COMPILED_PHASE, Batch, Feed, MetricSums, StepReport, Terms, repeat_row
from trainwright.core.engine import MetricStates, ModelSpec
from trainwright.core.errors import JobError, NonFiniteLoss, UserCodeError
from trainwright.core.loss_api import BATCH_LOSS, log_name_problem, metric_config, takes_targets_first
from trainwright.core.plan import Plan
from trainwright.strategies.tensorflow.custom_loop import CustomLoop, check_drawn, check_fit
from trainwright.strategies.tensorflow.distillation.model_backend import digest
from trainwright.strategies.tensorflow.strategy_engines import Mirrored, TensorFlowOneDevice
from trainwright.strategies.tensorflow.tensorflow_compat import (
    compiled_parts,
    keras_mask,
    loss_functions,
    replaced,
    use_global_seeds,
)
from trainwright.strategies.tensorflow.tensorflow_engine import TensorFlowEngine
from trainwright.strategies.tensorflow.training import tensor_conversion
from trainwright.strategies.tensorflow.training.checkpoint_files import (
    CARRIED_OTHERS,
    callback_state,
    continue_log,
    restore_callbacks,
)
from trainwright.strategies.tensorflow.training.objective import LOSS, KerasCaller, MaskedTerms, model_inputs
from trainwright.strategies.tensorflow.training.tensorflow_errors import TensorFlowUserCode
from trainwright.strategies.tensorflow.training.train_state import (
    KerasTrainState,
    check_optimizer,
    check_stateless,
    inner_optimizer,
    make_callbacks,
    sample_rows,
    seed_generators,
    states_reset,
)

_DIVIDED_STATES = "parts of a batch would mix its states: use one worker with one device"
_MAX_COMPILED_STEPS = 16  # one for each number of rows: skipped rows cause many, and each holds a graph in memory


class CompiledModel(KerasTrainState):
    """A model with its loss, metrics and optimizer, from the job or from a model that `model()` compiled.

    It also carries variables that Keras keeps between steps and does not save: the metrics of this epoch, random seeds,
    and variables of a user's `train_step` that belong neither to the model nor to its optimizer.

    Attributes:
        callbacks: the user's callbacks on this worker, while a loop exists.
        callback_state: the state in a checkpoint, for callbacks that have not begun.

    Raises:
        JobError: also if the job and `model()` both compile.
    """

    def __init__(self, spec: ModelSpec, strategy: tf.distribute.Strategy, plan: Plan, where: str) -> None:
        super().__init__(spec, strategy, plan, where)
        self.callbacks: Sequence[Any] = ()
        self.callback_state: Mapping[str, npt.NDArray[Any]] = {}
        if plan.mesh.data_ranks > 1:
            check_stateless(self.model, _DIVIDED_STATES, where)
        self._steps = _StepCache(self.model, strategy)
        job_options = ", ".join(f"{name}=" for name in ("optimizer", "loss", "metrics") if getattr(spec, name))
        if not self.model.compiled:
            self._compile()
        elif job_options:
            raise JobError([f"model() returns a compiled model: leave {job_options} out"], where=where)
        if not isinstance(self.model, CustomLoop):  # a CustomLoop builds its optimizers in its step
            check_optimizer(self.optimizer, where)
            with strategy.scope():
                self.optimizer.build(self.model.trainable_variables)
        used_variables: list[tf.Variable] = []
        self._targets_by_name = False
        if spec.sample is not None and type(self.model).train_step is keras.Model.train_step:
            self._targets_by_name = len(spec.targets) > 1 and _names_outputs(self, spec.sample())
            sample = sample_rows(self.model, spec.sample(), plan)
            arguments = keras.utils.unpack_x_y_sample_weight(self.data(sample, training=False))
            with states_reset(self.model), TensorFlowUserCode("the model", where):
                self.model.test_on_batch(*arguments)  # creates the variables of the metrics
            self.model.reset_metrics()
            self.model.test_function = None  # a callback's evaluation would share its trace of one row
            self._check_mask(spec.sample())
        elif spec.sample is not None:
            used_variables = self._trace_variables(spec.sample())
        self.carried = {
            "metrics": [variable.value for variable in self.model.metrics_variables],
            "seeds": [generator.state.value for generator in seed_generators(self.model)],
        }
        checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer, **self.carried)
        saved_ids = {id(_tf_variable(each)) for each in tf.train.TrackableView(checkpoint).descendants()}
        slots = [_tf_variable(each) for optimizer in self.optimizers for each in optimizer.variables]
        saved_ids |= {id(part) for each in slots for part in strategy.experimental_local_results(each)}
        unsaved_variables = [each for each in used_variables if id(each) not in saved_ids]
        if unsaved_variables and isinstance(self.model, CustomLoop):
            name = unsaved_variables[0].name
            problem = f"the steps of CustomLoop use the variable {name!r}, and no part of it holds that"
            raise JobError([f"{problem}: give its model, optimizer, metric or seed generator by a name"], where=where)
        self.carried = {**self.carried, CARRIED_OTHERS: unsaved_variables}

    @property
    def optimizer(self) -> Any:
        """The optimizer that the model was compiled with."""
        return self.model.optimizer

    def _check_mask(self, row: Batch) -> None:
        """Raise JobError if several devices would each divide by their own number of unmasked steps."""
        if self.strategy.num_replicas_in_sync == 1:
            return
        columns = tensor_conversion.column_tensors(self.spec.collation, row, self.spec.inputs)
        with self.strategy.scope():
            outputs = self.caller.outputs(self.model, columns, training=False)
        if any(keras_mask(each) is not None for each in tf.nest.flatten(outputs)):
            problem = (
                "the outputs have a mask (mask_zero=True or Masking), and Keras' fit takes the mean over each device's "
                "own unmasked steps: use devices=1, or leave run= out"
            )
            raise JobError([problem], where=self.where)

    @property
    def optimizers(self) -> list[Any]:
        """The optimizer of `compile`, and further optimizers among the attributes of the model."""
        parts = tf.train.TrackableView(self.model).descendants()
        others = [part for part in parts if isinstance(part, keras.optimizers.Optimizer) and part is not self.optimizer]
        return [self.optimizer, *others]

    def _trace_variables(self, row: Batch) -> list[tf.Variable]:
        """Trace a user's `train_step` without running it; return the variables that it uses.

        The trace creates variables of optimizers, metrics and layers that Keras would create in the first step. A
        checkpoint is loaded before that step, and needs existing variables.

        Raises:
            JobError: the step returns no values, or cannot be traced and makes variables later.
            UserCodeError: the step raised.
        """
        rows = max(self.spec.batch_size // self.strategy.num_replicas_in_sync, 1)
        data, where = self.data(repeat_row(row, rows), training=True), self.where
        step = tf.function(lambda: self.strategy.run(self.model.train_step, args=(data,)), autograph=False)
        try:
            with self._variables_built_once(), TensorFlowUserCode("train_step()", where):
                graph_function = step.get_concrete_function()
        except UserCodeError:
            if not (self.model.run_eagerly or self.spec.compile == "eager"):
                raise
            self._check_optimizers()
            return []
        check_drawn(graph_function.graph, where)
        logs = graph_function.structured_outputs
        if not isinstance(logs, Mapping) or not logs:
            raise JobError(['train_step() returns no dict of values: return one, such as {"loss": loss}'], where=where)
        places = {id(handle): place for place, handle in enumerate(graph_function.captured_inputs)}
        variables = sorted(graph_function.graph.variables, key=lambda each: places.get(id(each.handle), len(places)))
        return list({id(each): each for each in map(_distributed_variable, variables)}.values())

    @contextmanager
    def _variables_built_once(self) -> Iterator[None]:
        """Let optimizers, metrics and losses make their variables once for all replicas within the block."""
        parts = (*self.optimizers, *compiled_parts(self.model))
        several = self.strategy.num_replicas_in_sync > 1
        with ExitStack() as stack:
            for part in (each for each in parts if several and not each.built):
                stack.enter_context(replaced(part, "build", partial(_build_once, part.build)))
            yield

    def _check_optimizers(self) -> None:
        """Raise JobError for an optimizer that makes its variables in the first step: it could not be restored."""
        if not all(optimizer.built for optimizer in self.optimizers):
            problem = (
                "train_step() runs eagerly, and an optimizer of the model has no variables yet, so that the run could "
                "not be resumed: call its build(variables) in model(), with the variables that it trains"
            )
            raise JobError([problem], where=self.where)

    def check_divided(self) -> None:
        """Raise JobError for a stateful RNN, and if the parts of a batch do not add up to the batch."""
        model, sample, where = self.model, self.spec.sample, self.where
        check_stateless(model, _DIVIDED_STATES, where)
        if sample is None or self.strategy.num_replicas_in_sync > 1:
            return
        row = sample()

        def rows(number: int) -> Any:
            return self.data(repeat_row(row, number), training=True)

        if isinstance(model, CustomLoop):
            model.check_divided(rows, where)
        elif BATCH_LOSS not in self.spec.inexact:
            check_fit(model, self.optimizers, self.carried[CARRIED_OTHERS], rows, where)

    def _compile(self) -> None:
        spec, where = self.spec, self.where
        if spec.optimizer is None or spec.loss is None:
            problem = 'run="fit" needs a compiled model: call compile() in model(), or give optimizer= and loss='
            raise JobError([problem], where=where)
        with self.strategy.scope():
            with TensorFlowUserCode("optimizer()", where):
                optimizer = spec.make_optimizer([(each.path, each) for each in self.model.trainable_variables])
            self.model.compile(
                optimizer=optimizer,
                loss=spec.loss if takes_targets_first(spec.loss) else _Loss(self.caller),
                metrics=[_metric(self.caller, name) for name in spec.metrics],
                run_eagerly=spec.compile == "eager",
                jit_compile=spec.compile == "xla",
            )

    def data(self, batch: Batch, *, training: bool) -> Any:
        """Return inputs, targets and any sample weights, as `fit` passes them to `train_step`."""
        spec = self.spec
        columns = tensor_conversion.column_tensors(spec.collation, batch, self.caller.wanted)
        inputs = model_inputs(columns, spec.inputs, spec.keywords)
        if isinstance(inputs, list):
            inputs = inputs[0] if len(inputs) == 1 else tuple(inputs)
        targets: Any = self.caller.targets(columns) if spec.targets else None
        if self._targets_by_name:
            targets = dict(zip(spec.targets, targets, strict=True))
        return keras.utils.pack_x_y_sample_weight(inputs, targets, self.caller.factors(columns, training=training))

    def distributed(self, feed: Feed, *, training: bool) -> list[Any]:
        """Return a step's data in the form that the compiled step takes: one share for each replica."""
        batch = whole_batch(feed)
        replicas = self.strategy.num_replicas_in_sync
        if batch.rows % replicas:
            problem = f"Keras' fit would weigh the rows of a batch of {batch.rows} differently on {replicas} devices"
            raise JobError([f"{problem}: use a batch_size that they divide and drop_last=True"], where=self.where)
        data = self.data(batch, training=training)
        size = batch.rows // replicas
        shares = [
            tf.nest.map_structure(lambda values, start=start: values[start : start + size], data)
            for start in range(0, batch.rows, size)
        ]
        return [tensor_conversion.distribute_values(self.strategy, shares, 0)]

    def make_functions(self) -> None:
        """Compile the steps of training and evaluation."""
        self.model.make_train_function()
        self.model.make_test_function()

    def train(self, data: Any) -> Any:
        """Return the logs of a training step; `data` is the result of `distributed`. A callback can recompile it."""
        with _losses_by_batch(self.model):
            return self._steps.get("train", data)(data)

    def test(self, data: Any) -> Any:
        """Return the logs of an evaluation step; `data` is the result of `distributed`."""
        with _losses_by_batch(self.model):
            return self._steps.get("test", data)(data)

    def stop_requested(self, feed: Feed) -> bool:
        """Return whether a worker requested a stop in the last step."""
        return feed.stop_requested

    def agree(self) -> None:
        """Make all workers use the same decisions of callbacks. A single worker needs nothing."""

    def own_callbacks(self, callbacks: Sequence[Any]) -> list[Any]:
        """Return the user's callbacks that run on this worker."""
        return list(callbacks)

    def aside(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return the state of callbacks. Before they begin, it is the state that they will begin with."""
        return callback_state(self.callbacks) if self.callbacks else self.callback_state

    def put_aside(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Keep the state of callbacks until they begin."""
        self.callbacks, self.callback_state = (), arrays


def _names_outputs(compiled: CompiledModel, row: Batch) -> bool:
    """Return whether the outputs are a dict. Keras would match a tuple of targets with its keys in sorted order.

    Raises JobError if a target does not have the name of an output.
    """
    inputs, *_ = keras.utils.unpack_x_y_sample_weight(compiled.data(row, training=False))
    with compiled.strategy.scope(), TensorFlowUserCode("the model", compiled.where):
        outputs = compiled.model(inputs, training=False)
    if not isinstance(outputs, dict):
        return False
    if not set(compiled.spec.targets) <= set(outputs):
        names = ", ".join(map(repr, outputs))
        problem = (
            f"the model's outputs are a dict with the keys {names}, and targets= are the columns "
            f"{', '.join(map(repr, compiled.spec.targets))}: give each column the name of its output"
        )
        raise JobError([problem], where=compiled.where)
    return True


class _StepCache:
    """Keras' compiled steps, one for each number of rows of a batch.

    A compiled step of Keras keeps its traces. At a second number of rows it traces a function for any number, which
    TensorFlow optimizes differently and which all later batches use. So a resumed run would compute different bits. A
    callback that calls `model.evaluate` would share these traces too.

    Args:
        model: the user's model.
        strategy: the strategy that runs the steps.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy) -> None:
        self._model, self._strategy = model, strategy
        self._compiled_steps: dict[str, tuple[Any, dict[int, Callable[[Any], Any]]]] = {}

    def get(self, kind: Literal["train", "test"], data: Sequence[Any]) -> Callable[[Any], Any]:
        """Return the step for the number of rows of `data`, the result of `CompiledModel.distributed`."""
        name = f"{kind}_function"
        keras_step, cached = getattr(self._model, name), self._compiled_steps.get(name)
        if cached is None or cached[0] is not keras_step:  # a callback made Keras compile it again
            cached = self._compiled_steps[name] = keras_step, {}
        steps = cached[1]
        share = self._strategy.experimental_local_results(tf.nest.flatten(data[0])[0])[0]
        rows = int(share.shape[0])
        step = steps.pop(rows, None)
        if step is None:
            getattr(self._model, f"make_{name}")(force=True)
            step = getattr(self._model, name)
            setattr(self._model, name, keras_step)
        steps[rows] = step  # the most recently used one is last
        if len(steps) > _MAX_COMPILED_STEPS:
            del steps[next(iter(steps))]
        return step


class _FitLoop:
    """The loop of `fit`, one step at a time.

    Args:
        compiled: model and optimizer.
        callbacks: the user's callbacks; none to only evaluate.
    """

    def __init__(self, compiled: CompiledModel, callbacks: Sequence[Any] = ()) -> None:
        spec = compiled.spec
        self._compiled, self._model = compiled, compiled.model
        self._epoch_steps, self._total_steps = spec.total_steps // spec.epochs, spec.total_steps
        self._callbacks_begun, self._user_callbacks = False, callbacks
        self._tracker = next((item for item in self._model.metrics if item.name == LOSS), None)
        self._optimizers, self._active_optimizer = compiled.optimizers, compiled.optimizer
        self._last_counts = self._step_counts()
        self._undivided_test = self._test_undivided if self._model.run_eagerly else tf.function(self._test_undivided)
        self._test_logs: dict[str, float] = {}
        self._test_rows = 0
        self._validated: tuple[str, list[MetricSums]] = ("", [])  # of the model with this digest
        self._user = TensorFlowUserCode("a callback", compiled.where)
        self._callbacks = keras.callbacks.CallbackList(
            compiled.own_callbacks(callbacks),
            add_history=True,
            model=self._model,
            epochs=spec.epochs,
            steps=self._epoch_steps,
            verbose=0,
        )
        self._model.stop_training = False
        self._agree = compiled.agree if callbacks else lambda: None
        compiled.make_functions()

    def train(self, feed: Feed) -> StepReport:
        """Run one step with the ends of epochs and of the training. Raises NonFiniteLoss after the update."""
        compiled, model = self._compiled, self._model
        epoch, batch = divmod(feed.step, self._epoch_steps)
        start_s = time.perf_counter()
        use_global_seeds(compiled.unseeded)
        data = compiled.distributed(feed, training=True)
        self._begin(epoch, batch)
        totals_before = self._loss_totals()
        with TensorFlowUserCode("train_step()", compiled.where):
            logs = flat_logs(compiled.train(data))
        loss = self._loss_of(logs, totals_before)
        phases = {COMPILED_PHASE: time.perf_counter() - start_s}
        compiled.step = feed.step + 1
        if not math.isfinite(loss):
            compiled.sound = False
            raise NonFiniteLoss(
                f"the loss became {loss} in step {compiled.step}",
                where=compiled.where,
                remedy="look at the data, lower the learning rate, or set global_clipnorm of the optimizer; Keras has "
                "applied it already: the run continues from its last checkpoint",
            )
        with self._user:
            self._callbacks.on_train_batch_end(batch, logs)
        self._agree()
        logged = MetricSums()
        if model.stop_training or batch + 1 == self._epoch_steps:
            results = self._results(logs)
            logged = _logged(results)
            logs = self._end_epoch(epoch, results)
            self._agree()
        finished = bool(model.stop_training) or compiled.step == self._total_steps
        if finished:
            if not isinstance(model, CustomLoop):
                compiled.optimizer.finalize_variable_values(model.trainable_variables)
            with self._user:
                self._callbacks.on_train_end(logs)
        return StepReport(
            step=compiled.step, loss=loss, weight=float(feed.rows), learning_rate=self._rate(),
            stop_requested=compiled.stop_requested(feed), finished=finished, phases=phases, logged=logged,
        )  # fmt: skip

    def evaluate(self, feed: Feed) -> MetricSums:
        """Return the sums that a batch adds to the evaluation's loss and metrics; the first batch has step 0.

        A metric need not be a mean: the sums of all batches give the value that Keras has after the last batch. Results
        of this step's validation are used again, unless the weights have changed since. Callbacks can restore other
        weights (`EarlyStopping(restore_best_weights=True)`), and `use_ema` takes averages of the weights at the end.
        """
        if feed.step == 0 and self._validated[0] and self._validated[0] != digest(self._model):
            self._validated = ("", [])
        state, sums = self._validated
        return sums[feed.step] if state else self._test(feed)

    def _begin(self, epoch: int, batch: int) -> None:
        """Run the callbacks before a step. A run that resumes has the learning rates of its checkpoint."""
        with self._user:
            if not self._callbacks_begun:
                continues = epoch > 0 or batch > 0
                for callback in self._callbacks.callbacks if continues else ():
                    if isinstance(callback, keras.callbacks.CSVLogger):
                        continue_log(callback, epoch)
                with self._rates_kept(continues):
                    self._callbacks.on_train_begin()
                restore_callbacks(self._user_callbacks, self._compiled.callback_state)
                self._compiled.callbacks = self._user_callbacks
            if batch == 0:
                self._model.reset_metrics()
            if batch == 0 or not self._callbacks_begun:
                with self._rates_kept(batch > 0):
                    self._callbacks.on_epoch_begin(epoch)
                self._agree()
            self._callbacks.on_train_batch_begin(batch)
        self._callbacks_begun = True

    @contextmanager
    def _rates_kept(self, keep: bool) -> Iterator[None]:
        """Restore the learning rates after the block, if `keep`."""
        inner = map(inner_optimizer, self._optimizers)
        rules = [rule for rule in inner if isinstance(rule._learning_rate, keras.Variable)]
        rates = [_number(rule.learning_rate) for rule in rules] if keep else []
        yield
        for rule, rate in zip(rules, rates, strict=False):
            if _number(rule.learning_rate) != rate:
                rule.learning_rate = rate

    def _end_epoch(self, epoch: int, logs: dict[str, Any]) -> dict[str, Any]:
        """Run the validation, and log the epoch."""
        spec = self._compiled.spec
        if spec.validation is not None and (epoch + 1) % spec.validation_epochs == 0:
            logs |= {f"val_{name}": value for name, value in self._validate().items()}
        with self._user:
            self._callbacks.on_epoch_end(epoch, logs)
        return logs

    def _results(self, logs: Any) -> dict[str, Any]:
        """Return the logs of a step: the metrics so far, over all replicas, or values of the step itself."""
        results = self._model.get_metrics_result()
        if isinstance(self._model, CustomLoop):
            return {**logs, **{name: value for name, value in results.items() if name in logs}}
        return dict(results if set(results) == set(logs) else logs)

    def _validate(self) -> dict[str, float]:
        spec, sums = self._compiled.spec, list[MetricSums]()
        assert spec.validation is not None and self._compiled.step is not None
        with self._user:
            self._callbacks.on_test_begin()
        for feed in spec.validation():
            with self._user:
                self._callbacks.on_test_batch_begin(feed.step)
            sums.append(self._test(feed))
            with self._user:
                self._callbacks.on_test_batch_end(feed.step, self._test_logs)
        with self._user:
            self._callbacks.on_test_end(self._test_logs)
        self._validated = (digest(self._model), sums)
        return dict(self._test_logs)

    def _test(self, feed: Feed) -> MetricSums:
        model, rows = self._model, feed.rows
        if feed.step == 0:
            model.reset_metrics()
            self._test_logs, self._test_rows = {}, 0
        replicas = self._compiled.strategy.num_replicas_in_sync
        with TensorFlowUserCode("test_step()", self._compiled.where):
            if rows % replicas:
                logs = self._undivided_test(self._compiled.data(whole_batch(feed), training=False))
            else:
                logs = self._compiled.test(self._compiled.distributed(feed, training=False))
        logs = flat_logs(logs)
        logs = self._results(logs) if replicas > 1 else logs
        sums = {name: value * self._test_rows for name, value in self._test_logs.items()}
        self._test_logs, self._test_rows = _numbers(logs), self._test_rows + rows
        new_sums = {name: value * self._test_rows for name, value in self._test_logs.items()}
        return MetricSums(totals={name: (value - sums.get(name, 0.0), rows) for name, value in new_sums.items()})

    def _test_undivided(self, data: Any) -> Any:
        """Return the logs of a batch that the replicas cannot divide. All compute it, and the first counts."""
        model, strategy = self._model, self._compiled.strategy

        def test() -> Any:
            first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
            before = {id(each): tf.identity(each.value) for each in model.metrics_variables}
            logs = model.test_step(data)
            for variable in model.metrics_variables:
                new = tf.identity(variable.value)
                variable.value.assign(tf.where(first, new, before.get(id(variable), tf.zeros_like(new))))
            return logs

        results = strategy.run(test)
        return tf.nest.map_structure(lambda each: strategy.experimental_local_results(each)[0], results)

    def _step_counts(self) -> list[int]:
        """Return the steps of each optimizer."""
        return [int(_number(optimizer.iterations)) for optimizer in self._optimizers]

    def _rate(self) -> float:
        """Return the learning rate of the optimizer used last. The optimizer of `compile` can be an unused default."""
        counts = self._step_counts()
        updated = [new > old for old, new in zip(self._last_counts, counts, strict=True)]
        self._last_counts = counts
        if any(updated):
            self._active_optimizer = self._optimizers[updated.index(True)]
        return _number(self._active_optimizer.learning_rate)

    def _loss_totals(self) -> tuple[float, float]:
        """Return sum and number of this epoch's losses, as Keras counts them."""
        if not isinstance(self._tracker, keras.metrics.Mean):
            return 0.0, 0.0
        total, count = map(_number, self._tracker.variables)
        return total, count

    def _loss_of(self, logs: Any, totals_before: tuple[float, float]) -> float:
        """Return the loss of a step. Its logs have the mean of the epoch so far, or values of a user's `train_step`.

        Among a user's values the loss is `loss`, or the first value without a `loss`.
        """
        total, count = self._loss_totals()
        if count > totals_before[1]:
            return (total - totals_before[0]) / (count - totals_before[1])
        value = tf.nest.flatten(logs.get(LOSS, next(iter(logs.values()))))[0]
        return float(np.mean(tf.convert_to_tensor(value).numpy()))


class FitEngine(TensorFlowEngine):
    """Base of the engines that train as `fit` does."""

    def __init__(self) -> None:
        super().__init__()
        self._fit: _FitLoop | None = None

    def warm(self, feed: Feed) -> None:
        """Start the loop again at the current state. The first step compiles the function."""
        if feed.total > 1:
            self._guarded(self._compiled.check_divided)
        self._fit = self._guarded(lambda: _FitLoop(self._compiled, make_callbacks(self._compiled.spec, self._where)))

    def train_step(self, feed: Feed) -> StepReport:
        """Run one step of `fit` with the ends of epochs and of the training.

        Raises:
            NonFiniteLoss: the update was applied already.
            UserCodeError, JobError: the user's code raised or is wrong.
        """
        fit, compiled = self._fit, self._compiled
        assert fit is not None, "warm() comes before steps"
        sound, compiled.sound = compiled.sound, False  # a failed step may have updated a part of the variables
        report = self._guarded(lambda: fit.train(feed))
        compiled.sound = sound
        return report

    def evaluate_step(self, feed: Feed, states: MetricStates | None = None) -> MetricSums:
        """Return sums of the loss and the metrics of `compile`. Raises UserCodeError, JobError."""
        self._fit = self._fit or self._guarded(lambda: _FitLoop(self._compiled))
        fit = self._fit
        return self._guarded(lambda: fit.evaluate(feed))

    @property
    def _compiled(self) -> CompiledModel:
        compiled = self.replica
        assert isinstance(compiled, CompiledModel)
        return compiled

    def _make_replica(self, spec: ModelSpec, plan: Plan) -> KerasTrainState:
        return CompiledModel(spec, self._strategy, plan, self._where)


class FitOneDevice(FitEngine, TensorFlowOneDevice):
    """`fit` on one device."""


class FitMirrored(FitEngine, Mirrored):
    """`fit` on all devices of one node."""


def whole_batch(feed: Feed) -> Batch:
    """Return the rows with weight of all data ranks of this worker, as one batch; all rows if none has weight."""
    parts = [batch for part in feed.parts for batch in part]
    return Batch(
        columns={name: np.concatenate([batch.columns[name] for batch in parts]) for name in parts[0].columns},
        weights=np.concatenate([batch.weights for batch in parts]),
        samples=np.concatenate([batch.samples for batch in parts]),
    ).counted()


@contextmanager
def _losses_by_batch(model: keras.Model) -> Iterator[None]:
    """Give each batch, also a short one, the same weight in the losses of several outputs within the block.

    Keras weights the losses by the number of rows if the trace of a step has a fixed number. For a short last batch,
    `fit` traces its step with an unknown number. Traces here have fixed numbers, since a model may need one.
    """
    keeps_weights = model.run_eagerly or model.distribute_strategy.num_replicas_in_sync > 1
    with ExitStack() as stack:
        for metric in () if keeps_weights else getattr(model._compile_loss, "metrics", ()):
            stack.enter_context(replaced(metric, "update_state", partial(_update_unweighted, metric.update_state)))
        yield


def _update_unweighted(update: Callable[[Any], Any], values: Any, sample_weight: Any = None) -> Any:
    """Update a metric without the weight of the batch."""
    return update(values)


def _build_once(build: Callable[..., None], *args: Any) -> None:
    """Call a `build` outside all replicas and graphs, with the first replica's values, when all replicas have called.

    Metrics and losses are built from tensors: their `build` reads only the shapes.
    """

    def build_in_scope(strategy: tf.distribute.Strategy) -> None:
        with tf.init_scope(), strategy.scope():
            build(*args)

    tf.distribute.get_replica_context().merge_call(build_in_scope)


def _number(value: Any) -> float:
    """Return a tensor or variable as a number."""
    return float(tf.convert_to_tensor(value))


def _tf_variable(item: Any) -> Any:
    """Return the TensorFlow variable inside a Keras variable."""
    return item.value if isinstance(item, keras.Variable) else item


def _distributed_variable(variable: tf.Variable) -> tf.Variable:
    """Return the distributed variable that contains a device's variable."""
    container = getattr(variable.handle, "_distributed_container", None)
    return variable if container is None else container()


class _Loss(keras.losses.Loss):  # type: ignore[misc]  # Keras has no types
    """The mean of the job's loss over the samples. Keras' own wrapper of functions would cast targets to floats.

    Like that wrapper, it gives each replica its share of the mean, and leaves masked values out.
    """

    def __init__(self, caller: KerasCaller) -> None:
        super().__init__()
        self._caller = caller

    def __call__(self, targets: Any, outputs: Any, sample_weight: Any = None) -> Any:
        result = _single(self._caller.applied("loss=", self._caller.spec.loss, outputs, targets))
        sample_ones = tf.ones(tf.shape(tf.nest.flatten(outputs)[0])[:1])
        values, weights = self._caller.weighted(self._caller.terms("loss=", result, sample_ones), sample_weight)
        return loss_functions.reduce_values(values * weights, weights, "mean_with_sample_weight")


def _logged(results: Mapping[str, Any]) -> MetricSums:
    """Return the values of an epoch for the history: single numbers whose names are no columns of the history."""
    loggable = {name: value for name, value in results.items() if not log_name_problem(name)}
    return MetricSums(totals={name: (value, 1.0) for name, value in _numbers(loggable).items()})


def flat_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return logs with nested dicts flattened, as Keras does: the result of `compile_metrics` is a dict."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat |= flat_logs(value) if isinstance(value, Mapping) else {name: value}
    return flat


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the single numbers among logs. A metric can have several, such as one for each class."""
    arrays = {name: np.asarray(value) for name, value in logs.items()}
    return {name: float(value.item()) for name, value in arrays.items() if value.size == 1}


def _metric(caller: KerasCaller, name: str) -> keras.metrics.Metric:
    """Return a Keras metric with variables of the strategy, or the mean of a function's values."""
    metric = caller.spec.metrics[name]
    if isinstance(metric, keras.metrics.Metric):
        return type(metric).from_config({**metric_config(metric), "name": name})
    return keras.metrics.MeanMetricWrapper(partial(_values, caller, name), name=name)


def _values(caller: KerasCaller, name: str, targets: Any, outputs: Any) -> Any:
    """Return the values of a metric; Keras applies its mask itself."""
    result = caller.applied(f"metric {name!r}", caller.spec.metrics[name], outputs, targets, metric=True)
    return result.values if isinstance(_single(result), Terms) else result


def _single(result: Any) -> Any:
    """Return one value for each sample, or for those in Keras' mask. Raises JobError for Terms."""
    if isinstance(result, Terms) and not isinstance(result, MaskedTerms):
        raise JobError(['run="fit" takes one loss per sample, and no Terms: leave run out, or return the losses'])
    return result
