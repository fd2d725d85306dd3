"""A custom training loop of TensorFlow as a model: the user's own step functions are its `train_step` and `test_step`.

A step function opens its tape, applies its optimizers and updates its metrics, as in TensorFlow's tutorials. So `fit`
(`keras_fit`, `fit_workers`) runs it like any model with a `train_step` of its own. What differs is the loss: TensorFlow
adds the gradients of all replicas, so that a step divides its sum by the rows of the whole batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainwright.core.errors import JobError
from trainwright.strategies.tensorflow.tensorflow_compat import loss_functions, replaced, to_graph_code
from trainwright.strategies.tensorflow.training.divided_losses import (
    LossValues,
    check_losses,
    gradients_recorded,
    variables_kept,
)
from trainwright.strategies.tensorflow.training.train_state import inner_optimizer, seed_generators

_PARTS = (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, keras.random.SeedGenerator)
_VARIABLES = (keras.Variable, tf.Variable, tf.Module)
_TRIAL_ROWS = 32  # rows: random numbers hardly change their mean
_EXACT_ERROR, _RANDOM_ERROR = 1e-4, 0.4  # relative errors, without and with drawn numbers
_as_it_is = tf.autograph.experimental.do_not_convert


class CustomLoop(keras.Model):  # type: ignore[misc]  # Keras has no types
    """A training loop of step functions, which `model=` returns for `run="fit"`.

    Give it the functions that you would give to `strategy.run`, and what they use by any names, as for
    `tf.train.Checkpoint`: `tw.CustomLoop(train_step, test_step, model=model, optimizer=optimizer, accuracy=accuracy)`.
    Each part is an attribute of the loop: `tw.load_model(job).model`.

    Args:
        train_step: (inputs) or (inputs, targets) -> the loss, a dict of numbers, or None. Numbers are logged, and so
            are the metrics that it updates.
        test_step: (inputs) or (inputs, targets) -> None, for the evaluation: it updates metrics.
        reduction: what a loss is: `sum`, over the rows that a step gets, divided by the global batch size, as in
            TensorFlow; or `mean`, of the rows that a step gets, as in loops for one device.
        parts: models, layers, optimizers, metrics, seed generators and variables.

    Raises:
        JobError: a part cannot be saved, or there is no optimizer.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        test_step: Callable[..., Any] | None = None,
        *,
        reduction: Literal["sum", "mean"] = "sum",
        **parts: Any,
    ) -> None:
        super().__init__(name="custom_loop")
        _check(reduction, parts)
        self.reduction = reduction
        self._share: Callable[[Any], Any] | None = None
        self._train = _as_batch_function(train_step)
        self._test = None if test_step is None else _as_batch_function(test_step)
        self._own_metrics = [each for each in parts.values() if isinstance(each, keras.metrics.Metric)]
        object.__setattr__(self, "_updated", {})  # metrics of a step: Keras would track them
        for metric in self._own_metrics:
            update = partial(_update, self._updated, metric, metric.update_state)
            object.__setattr__(metric, "update_state", _as_it_is(update))
        optimizers = [each for each in parts.values() if isinstance(each, keras.optimizers.Optimizer)]
        inner = {id(inner_optimizer(each)) for each in optimizers if inner_optimizer(each) is not each}
        self._applied = [each for each in optimizers if id(each) not in inner]
        self.compile(optimizer=self._applied[0], jit_compile=False)
        for name, part in parts.items():
            setattr(self, name, part)

    @property
    def metrics(self) -> list[Any]:
        """The metrics among the parts."""
        return list(self._own_metrics)

    def train_step(self, data: Any) -> dict[str, Any]:
        """Run the user's step; return what it logs."""
        numbers, results = self._run(self._train, data)
        names = [name for name, value in numbers.items() if value.shape.rank != 0]
        if names:
            problem = f"train_step() returns {names[0]!r}, which is not a number: return the loss, or a dict of numbers"
            raise JobError([problem])
        if self.reduction == "sum":  # Keras takes the mean over replicas
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            numbers = {name: value * tf.cast(replicas, value.dtype) for name, value in numbers.items()}
        return {**numbers, **results}

    def test_step(self, data: Any) -> dict[str, Any]:
        """Run the user's step of an evaluation; return what it logs."""
        if self._test is None:
            raise JobError(["evaluate= needs a step: give CustomLoop(train_step, test_step, ...)"])
        numbers, results = self._run(self._test, data)
        if numbers or not results:
            problem = "test_step() updates no metric of the loop" if not numbers else "test_step() returns a value"
            raise JobError([f"{problem}: update a metric, such as keras.metrics.Mean, and return nothing"])
        return results

    def divide(self, share: Callable[[Any], Any]) -> None:
        """Set (type) -> this worker's share of the rows of a batch, by which TensorFlow's functions then divide."""
        self._share = share if self.reduction == "sum" else None

    def _run(self, step: Callable[[Any], Any], data: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run a user's step; return the numbers that it returns, and the results of the metrics that it updates."""
        self._updated.clear()
        with self._scaled_losses():
            result = step(data)
        values = {} if result is None else dict(result) if isinstance(result, Mapping) else {"loss": result}
        numbers = {name: tf.convert_to_tensor(value) for name, value in values.items()}
        return numbers, {metric.name: metric.result() for metric in self._updated.values()}

    @contextmanager
    def _scaled_losses(self) -> Iterator[None]:
        """Make TensorFlow divide losses by the rows of the whole batch within the block."""
        share, compute, scale = self._share, tf.nn.compute_average_loss, tf.nn.scale_regularization_loss
        if share is None:
            yield
            return

        def average(per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> Any:
            mean = compute(per_example_loss, sample_weight, global_batch_size)
            return mean * share(mean.dtype) if global_batch_size is None else mean

        def regularization(regularization_loss: Any) -> Any:
            loss = scale(regularization_loss)
            return loss * share(loss.dtype)

        with (
            replaced(tf.nn, "compute_average_loss", _as_it_is(average)),
            replaced(tf.nn, "scale_regularization_loss", _as_it_is(regularization)),
        ):
            yield

    # --- a step whose parts of a batch do not add up to the batch -----------------------------------------

    def check_divided(self, rows: Callable[[int], Any], where: str) -> None:
        """Raise JobError if one row twice does not count as two rows. It changes no variable.

        Args:
            rows: (n) -> data of one row n times.
            where: the rank, for errors.
        """
        for step in ("train_step", "test_step") if self._test else ("train_step",):
            single, drawn = self._measure(step, rows(1), 0.5)
            double, _ = self._measure(step, rows(2), 1.0)
            if drawn:
                single, _ = self._measure(step, rows(_TRIAL_ROWS), 0.5)
                double, _ = self._measure(step, rows(2 * _TRIAL_ROWS), 1.0)
            for name, value in single.items():
                adds_up = name.startswith("metric") or self.reduction == "sum"
                expected, actual = value * (2.0 if adds_up else 1.0), double[name]
                sizes = [float(np.linalg.norm(each)) for each in (expected, actual)]
                error = abs(sizes[0] - sizes[1]) if drawn else float(np.linalg.norm(expected - actual))
                if error > (_RANDOM_ERROR if drawn else _EXACT_ERROR) * max(sizes):
                    raise JobError([f"{step}(): {_divided_problem(name, self.reduction)}"], where=where)

    def _measure(self, step: str, data: Any, share: float) -> tuple[dict[str, npt.NDArray[Any]], bool]:
        """Return gradients, logs and new states of metrics of a step; and whether it draws random numbers."""
        seeds, old_share = [generator.state for generator in seed_generators(self)], self._share
        with variables_kept(self):
            self.reset_metrics()
            old_seeds = [each.numpy() for each in seeds]
            self.divide(lambda kind: tf.constant(share, kind))
            try:
                with gradients_recorded(self._applied) as measured:
                    logs = getattr(self, step)(data)
            finally:
                self._share = old_share
            metric_results = self.get_metrics_result()
            measured |= {f"value {name!r}": value.numpy() for name, value in logs.items() if name not in metric_results}
            states = enumerate(self.metrics_variables)
            measured |= {f"metric variable {each.path!r} ({number})": each.numpy() for number, each in states}
            return measured, any((each.numpy() != old).any() for each, old in zip(seeds, old_seeds, strict=True))


def check_fit(
    model: keras.Model, optimizers: Sequence[Any], others: Sequence[tf.Variable], rows: Callable[[int], Any], where: str
) -> None:
    """Raise JobError if the loss of a model that `fit` trains is no mean over rows. It changes no variable.

    A model with Keras' own steps is tried in evaluation mode. The trial of a user's `train_step` compares its gradients
    and the losses that it logs, unless it draws random numbers.

    Args:
        model: compiled.
        optimizers: the optimizers that its steps apply.
        others: variables that its steps use, and that belong to no part of it.
        rows: (n) -> data of one row n times.
        where: the rank, for errors.
    """
    of_keras = type(model).train_step is keras.Model.train_step

    def losses(number: int) -> LossValues:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(rows(number))
        outputs = model(x, training=False)
        loss = model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights)
        return [np.asarray(tf.reduce_mean(each)) for each in (*model.losses, loss)]

    def gradients(number: int) -> LossValues:
        model.reset_metrics()
        with gradients_recorded(optimizers) as found:
            logs = model.train_step(rows(number))
        return [*found.values(), *(np.asarray(value) for name, value in logs.items() if "loss" in name)]

    with (
        variables_kept(model, others),
        replaced(loss_functions, "reduce_values", partial(_as_mean, loss_functions.reduce_values)),
    ):
        measure = losses if of_keras else gradients
        what = (
            "the loss of the compiled model, or one of its add_loss(),"
            if of_keras
            else "the gradient or loss of train_step()"
        )
        check_losses(what, model, measure, where, drawn=of_keras)


def _as_mean(reduce: Any, values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
    """Reduce losses as Keras does; to a mean for `sum`, which `fit` adds up over workers."""
    return reduce(values, sample_weight, "sum_over_batch_size" if reduction == "sum" else reduction)


def check_drawn(graph: Any, where: str) -> None:
    """Raise JobError if a step draws random numbers from a state that no checkpoint holds."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    drawing = [node.op for node in nodes if "seed2" in node.attr]
    if drawing:
        problem = (
            f"train_step() draws numbers by {drawing[0]}, as tf.random.normal() and tf.nn.dropout() do, from a state "
            "that no checkpoint holds: use keras.random with seed=, a keras.random.SeedGenerator of the model"
        )
        raise JobError([problem], where=where)


def _check(reduction: str, parts: Mapping[str, Any]) -> None:
    """Raise JobError for parts of a loop that cannot be saved, or not be trained."""
    problems = [
        f"CustomLoop: {name}={part!r} has no state to save: give models, layers, optimizers, metrics, "
        "keras.random.SeedGenerator or variables of Keras"
        for name, part in parts.items()
        if not isinstance(part, _PARTS + _VARIABLES)
    ]
    problems += [
        f"CustomLoop: {name}= is a name of keras.Model: choose another" for name in parts if hasattr(CustomLoop, name)
    ]
    if not any(isinstance(part, keras.optimizers.Optimizer) for part in parts.values()):
        problems.append(
            "CustomLoop: there is no optimizer: give those that train_step() applies, as optimizer=optimizer"
        )
    if reduction not in ("sum", "mean"):
        problems.append(f'CustomLoop: reduction={reduction!r}: give "sum" or "mean"')
    if reduction == "mean" and tf.distribute.get_strategy().num_replicas_in_sync > 1:
        problems.append(
            'CustomLoop: reduction="mean" cannot be told on several devices of one worker, where Keras divides its own '
            "losses by their number: divide sums by the global batch size, or use tf_multi_worker_mirrored"
        )
    if problems:
        raise JobError(problems)


def _as_batch_function(step: Any) -> Callable[[Any], Any]:
    """Return a function of a batch that calls the user's function, as `tf.function` would.

    A `tf.function` of the user is unwrapped: it would keep a trace in which the gradients of workers are not summed.
    """
    function = getattr(step, "python_function", step)
    required = [
        each for each in inspect.signature(function).parameters.values() if each.default is inspect.Parameter.empty
    ]
    several, graph_function = len(required) > 1, to_graph_code(function)

    def call(data: Any) -> Any:
        target = function if tf.executing_eagerly() else graph_function
        inputs = data[0] if isinstance(data, tuple) and len(data) == 1 else data  # Keras' form of inputs alone
        return target(*inputs) if several else target(inputs)

    return call


def _update(updated: dict[int, Any], metric: Any, update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Update a metric, and note that the step did."""
    updated[id(metric)] = metric
    return update(*args, **kwargs)


def _divided_problem(name: str, reduction: str) -> str:
    """Describe why workers cannot divide a batch."""
    if name.startswith("metric"):
        return (
            f"{name} is not twice as much after one row twice as after the row, so that it cannot be "
            "summed over workers: give update_state() one value for each row, or sample_weight= the number of rows"
        )
    if reduction == "mean":
        return (
            f'{name} of one row twice is not that of the row, as reduction="mean" says: take the mean '
            "over the rows, or leave reduction= out where it is a sum, divided by the global batch size"
        )
    return (
        f"{name} of one row twice is not twice that of the row, so that those of workers do not add up "
        "to that of the batch: divide the sum of the losses by the global batch size, as tf.nn.compute_average_loss() "
        "and tf.nn.scale_regularization_loss() do; or, where the loss is a mean of the rows, say so: "
        'CustomLoop(..., reduction="mean")'
    )
