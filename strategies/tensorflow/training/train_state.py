"""Model, optimizer and step of one worker under its strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy.typing as npt
import tensorflow as tf

from trainwright.core.data import Batch, fold_seed, repeat_row
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.plan import Plan
from trainwright.strategies.tensorflow.tensorflow_compat import global_seed_generator, replaced, use_global_seeds
from trainwright.strategies.tensorflow.training import tensor_conversion
from trainwright.strategies.tensorflow.training.objective import KerasCaller
from trainwright.strategies.tensorflow.training.tensorflow_errors import TensorFlowUserCode

_SEED_BITS = 32


class KerasTrainState(ABC):
    """Model, optimizer and step of one worker, which are copied, saved and restored.

    Args:
        spec: the job's functions.
        strategy: the strategy that holds the variables.
        plan: gives the precision (`bf16` is Keras' `mixed_bfloat16`) and the number of parts of a batch.
        where: the rank, for errors.

    Attributes:
        caller: calls the job's functions.
        model: the user's model. A model without shapes is built by a call with a sample.
        step: completed steps; None before the first step or load.
        sound: False after a failure that may have changed only a part of the state.
        unseeded: Keras' generator of random numbers without `seed=`.
        carried: variables that neither model nor optimizer saves, by name.

    Raises:
        JobError: one of the job's functions returns a wrong value.
        UserCodeError: one of the job's functions raised.
    """

    def __init__(self, spec: ModelSpec, strategy: tf.distribute.Strategy, plan: Plan, where: str) -> None:
        self.spec, self.strategy, self.where = spec, strategy, where
        self.caller = KerasCaller(spec=spec, where=where)
        self.step: int | None = None
        self.sound = True
        self.carried: Mapping[str, list[tf.Variable]] = {}
        self.model = _build_model(spec, strategy, plan, self.caller)
        self.unseeded = global_seed_generator()

    @property
    @abstractmethod
    def optimizer(self) -> Any:
        """The user's optimizer."""

    @abstractmethod
    def check_divided(self) -> None:
        """Raise JobError if the parts of a batch do not add up to the batch."""

    def aside(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return arrays that a checkpoint stores in addition to the variables."""
        return {}

    def put_aside(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore these arrays of a checkpoint."""
        return


class KerasReplica(KerasTrainState):
    """The state of trainwright's own steps. Its random numbers follow from seed and step.

    Attributes:
        slots: variables of the optimizer for each trained variable, in the order of their creation.
        sum_options: communication options of each sum over replicas.
    """

    def __init__(self, spec: ModelSpec, strategy: tf.distribute.Strategy, plan: Plan, where: str) -> None:
        super().__init__(spec, strategy, plan, where)
        self.sum_options = sum_options(plan)
        with self.strategy.scope():
            with TensorFlowUserCode("optimizer()", self.where):
                optimizer = self.spec.make_optimizer([(each.path, each) for each in self.model.trainable_variables])
            if not isinstance(optimizer, keras.optimizers.Optimizer):
                raise JobError(
                    [f"optimizer() returned {type(optimizer).__name__}: return a keras.optimizers.Optimizer"]
                )
            self._optimizer = _with_loss_scale(optimizer, self.model)
            self.slots = build_optimizer(self.optimizer, self.model.trainable_variables)
        rule = inner_optimizer(self.optimizer)
        rule._all_reduce_sum_gradients = lambda pairs: pairs  # the gradients are sums: Keras would sum them again
        self.own_schedule = isinstance(rule._learning_rate, keras.optimizers.schedules.LearningRateSchedule)
        if self.own_schedule and self.spec.schedule is not None:
            raise JobError(["schedule= and the optimizer's own LearningRateSchedule exclude each other: keep one"])
        check_optimizer(self.optimizer, self.where)
        if strategy.num_replicas_in_sync > 1:
            self.check_divided()
        if callable(rule._learning_rate) and not self.own_schedule:
            problem = "the optimizer's learning rate is a function: use schedule=, or a LearningRateSchedule of Keras"
            raise JobError([problem], where=self.where)
        self.initial_rate = None if self.own_schedule else float(self._rate())
        self.seeds = [generator.state for generator in seed_generators(self.model)]
        seed_ids = {id(seed) for seed in self.seeds}
        self.state = [variable for variable in self.model.non_trainable_variables if id(variable) not in seed_ids]

    @property
    def optimizer(self) -> Any:
        """The user's optimizer, inside a LossScaleOptimizer if the model computes in float16."""
        return self._optimizer

    def check_divided(self) -> None:
        """Raise JobError if the optimizer works in one replica only: Keras updates it in a branch of the graph."""
        rule, problems = inner_optimizer(self.optimizer), []
        if count := rule.gradient_accumulation_steps:
            remedy = f"leave it out, and give the job accumulation={count} and {count} times the batch_size"
            problems.append(f"the optimizer's gradient_accumulation_steps={count} needs one device: {remedy}")
        if rule.use_ema and (count := rule.ema_overwrite_frequency):
            remedy = "leave it out, and the averages replace the weights after the last step; or use one device"
            problems.append(f"the optimizer's ema_overwrite_frequency={count} needs one device: {remedy}")
        if problems:
            raise JobError(problems, where=self.where)

    @property
    def trained(self) -> list[tf.Variable]:
        """The trained variables of TensorFlow."""
        return [variable.value for variable in self.model.trainable_variables]

    @property
    def scales(self) -> bool:
        """Whether the loss scale is dynamic: a step whose gradients overflow is not applied, and halves the scale."""
        return isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)

    @property
    def loss_scale(self) -> Any:
        """The factor on the loss before gradients are computed; `apply` divides by it. None without one."""
        return self.optimizer.dynamic_scale.value if self.scales else self.optimizer.loss_scale_factor

    def finish(self) -> None:
        """Do what `Model.fit` does after its last step: with `use_ema` the weights become their moving averages."""
        self.optimizer.finalize_variable_values(self.model.trainable_variables)

    def _rate(self) -> Any:
        return self.optimizer.learning_rate.numpy()

    def set_rate(self, step: int) -> float:
        """Set the learning rate of a step, and return it."""
        if self.own_schedule:
            return float(self._rate())
        rate = self.initial_rate
        assert rate is not None, "an optimizer has a rate or a schedule"
        if self.spec.schedule is not None:
            assert callable(self.spec.schedule), "`ModelSpec.check` refuses several functions"
            with TensorFlowUserCode("schedule=", self.where):
                rate *= float(self.spec.schedule(step, self.spec.total_steps))
        if self.spec.schedule is not None or float(self._rate()) != rate:  # a checkpoint may hold another rate
            with self.strategy.scope():
                self.optimizer.learning_rate = rate
        return rate


def sum_options(plan: Plan) -> Any:
    """Return the options of each `all_reduce`: MultiWorkerMirroredStrategy's own ignores the strategy's pack size."""
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=plan.bytes_per_pack, implementation=plan.communication.upper()
    )


def _with_loss_scale(optimizer: Any, model: keras.Model) -> Any:
    """Return the optimizer, in a LossScaleOptimizer if the model computes in float16, as `compile` does."""
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scaled or model.dtype_policy.name != "mixed_float16":
        return optimizer
    return keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")


def check_optimizer(optimizer: Any, where: str) -> None:
    """Raise JobError for an optimizer with several learning rates."""
    if isinstance(inner_optimizer(optimizer), getattr(keras.optimizers, "MultiOptimizer", ())):
        raise JobError(
            ["a MultiOptimizer has several learning rates, and a run has one: use one optimizer"], where=where
        )


def check_fit_only(model: keras.Model, spec: ModelSpec, where: str) -> None:
    """Raise JobError if only Keras' `fit` can train the model: it has its own step, or stateful RNNs."""
    check_stateless(model, 'only run="fit" carries its states from batch to batch: set run="fit"', where)
    names = ("train_step", "compute_loss")
    overridden = [name for name in names if getattr(type(model), name) is not getattr(keras.Model, name)]
    if overridden and spec.step is None:
        problem = f'the model has a {overridden[0]}() of its own, which only run="fit" calls'
        raise JobError([f'{problem}: set run="fit", or compute the losses in step='], where=where)


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that updates the variables: the inner one of a LossScaleOptimizer."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def build_optimizer(optimizer: Any, variables: Sequence[keras.Variable]) -> list[list[keras.Variable]]:
    """Build an optimizer; return its variables for each trained variable."""
    slots: dict[int, list[keras.Variable]] = {}
    rule = inner_optimizer(optimizer)
    add = rule.add_variable_from_reference

    def add_slot(reference_variable: Any, *args: Any, **kwargs: Any) -> keras.Variable:
        slot = add(reference_variable, *args, **kwargs)
        slots.setdefault(id(reference_variable), []).append(slot)
        return slot

    with replaced(rule, "add_variable_from_reference", add_slot):
        optimizer.build(variables)
    return [slots.get(id(variable), []) for variable in variables]


def _build_model(spec: ModelSpec, strategy: tf.distribute.Strategy, plan: Plan, caller: KerasCaller) -> keras.Model:
    """Build the job's model in the strategy's scope, with all variables; see `KerasTrainState` for arguments."""
    keras.utils.set_random_seed(fold_seed(spec.seed, -1) % 2**_SEED_BITS)
    with strategy.scope(), _policy(plan):
        use_global_seeds(None)
        with TensorFlowUserCode("model()", caller.where):
            model = spec.model()
        if not isinstance(model, keras.Model):
            kind = type(model)
            raise JobError([f"model() returned {kind.__module__}.{kind.__qualname__}: return a keras.Model"])
        _check_batch_norms(model, spec, plan, caller.where)
        if not (model.built and model.trainable_variables) and spec.sample is not None and has_call(model):
            with states_reset(model):
                _call_once(model, sample_rows(model, spec.sample(), plan), caller)
        global_seed_generator()  # creates its variable in the scope, unless the model did
    if not model.trainable_variables:
        raise JobError(
            ["model() has no variables that can be trained: build the model, or call it once"], where=caller.where
        )
    return model


def make_callbacks(spec: ModelSpec, where: str) -> list[Any]:
    """Return the user's callbacks. Raises JobError, UserCodeError."""
    with TensorFlowUserCode("callbacks()", where):
        callbacks = list(spec.callbacks()) if spec.callbacks else []
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            problem = f"callbacks() gives a {type(callback).__name__}: give keras.callbacks.Callback"
            raise JobError([problem], where=where)
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            problem = "callbacks() gives a BackupAndRestore: leave it out, every run backs up and restores"
            raise JobError([problem], where=where)
    return callbacks


@contextmanager
def _policy(plan: Plan) -> Iterator[None]:
    """Set Keras' policy for a plan's precision within the block."""
    old_policy = keras.config.dtype_policy()
    if plan.precision == "bf16":
        keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        yield
    finally:
        if plan.precision == "bf16":
            keras.config.set_dtype_policy(old_policy)


def has_call(model: keras.Model) -> bool:
    """Whether a model can be called; one with only its own `train_step`, such as a GAN, may not be."""
    return type(model).call is not keras.Model.call


def _call_once(model: keras.Model, sample: Batch, caller: KerasCaller) -> None:
    """Call the model once, which creates its variables."""
    columns = tensor_conversion.column_tensors(caller.spec.collation, sample, caller.spec.inputs or None)
    if caller.spec.inputs:
        caller.outputs(model, columns, training=False)
    else:
        caller.loss(model, columns, tf.convert_to_tensor(sample.weights), training=False)


def sample_rows(model: keras.Model, row: Batch, plan: Plan) -> Batch:
    """Return a batch for a trial call: one row, or a replica's number of rows for layers that need that number."""
    return repeat_row(row, plan.micro_batches(plan.batch_size)[1] if _stateful_layers(model) else 1)


@contextmanager
def states_reset(model: keras.Model) -> Iterator[None]:
    """Reset the states of stateful layers after the block, since its batch is not a batch of the job."""
    yield
    for layer in _stateful_layers(model):
        layer.reset_state()


def _stateful_layers(model: keras.Model) -> list[Any]:
    """Return the layers that keep a state for each row of a batch, with which the next batch begins."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.RNN) and layer.stateful]


def check_stateless(model: keras.Model, reason: str, where: str) -> None:
    """Raise JobError with this reason and remedy if a layer has a state for each row of a batch."""
    stateful = _stateful_layers(model)
    if stateful:
        raise JobError([f"layer {stateful[0].path!r} is a stateful RNN, and {reason}"], where=where)


def batch_norm_layers(model: keras.Model) -> list[str]:
    """Return the names of the layers that normalize by batch statistics."""
    kind = keras.layers.BatchNormalization
    return [layer.path for layer in model._flatten_layers() if isinstance(layer, kind) and layer.trainable]


def _check_batch_norms(model: keras.Model, spec: ModelSpec, plan: Plan, where: str) -> None:
    norms = batch_norm_layers(model)
    if norms and (plan.mesh.data_ranks > 1 or plan.accumulation > 1) and "batch_norm" not in spec.inexact:
        problem = (
            f"layer {norms[0]!r} is a batch norm: {plan.mesh.data_ranks} data ranks and accumulation="
            f"{plan.accumulation} normalize smaller batches than one device: use group or layer normalization, or "
            'accept the difference with inexact=("batch_norm",)'
        )
        raise JobError([problem], where=where)


def seed_generators(model: keras.Model) -> Iterator[Any]:
    """Return the seed generators of all layers, and Keras' own for random numbers without `seed=`."""
    for layer in model._flatten_layers():
        yield from layer._seed_generators
    yield global_seed_generator()
