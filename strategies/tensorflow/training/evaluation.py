"""Evaluation and prediction: without gradients, in the model's evaluation mode.

They run on the worker's first device, unless `begin` sends them to another worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainwright.core.data import Batch, Columns, Feed, MetricSums
from trainwright.core.engine import MetricStates
from trainwright.core.errors import JobError, nearest
from trainwright.core.metric_states import is_stateful
from trainwright.strategies.tensorflow.training import tensor_conversion
from trainwright.strategies.tensorflow.training.objective import LOSS, KerasCaller
from trainwright.strategies.tensorflow.training.tensorflow_errors import TensorFlowUserCode

_Begin = Callable[..., Callable[[], Any]]  # (compiled function, its arguments) -> a function that waits for the result


def _run_at_once(function: Any, *arguments: Any) -> Callable[[], Any]:
    """Call a function at once; return a function that returns its result."""
    result = function(*arguments)
    return lambda: result


class Evaluator:
    """Evaluates and predicts with one model, by compiled functions.

    Args:
        model: with its variables.
        caller: calls the job's functions.
        begin: starts a compiled function, and returns a function that waits for its result.
        scope: context in which the model's variables have their values.
    """

    def __init__(
        self,
        model: keras.Model,
        caller: KerasCaller,
        begin: _Begin = _run_at_once,
        scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._model, self._caller, self._begin, self._scope = model, caller, begin, scope
        self._sums = self._compile(self._sums_of)
        self._outputs = self._compile(self._outputs_of)

    def evaluate(self, feed: Feed, states: MetricStates | None = None) -> MetricSums:
        """Return weighted sums and weights of the loss and each metric over the feed, in float64.

        Metrics with state are updated with the rows that have weight.
        """
        pending = [
            (
                batch,
                self._begin(
                    self._sums,
                    tensor_conversion.column_tensors(self._caller.spec.collation, batch, self._caller.wanted),
                    tf.convert_to_tensor(batch.weights),
                ),
            )
            for batch in _batches(feed)
        ]
        total = MetricSums()
        for batch, wait in pending:
            sums, rows = wait()
            total += MetricSums(totals={name: (float(value), float(weight)) for name, (value, weight) in sums.items()})
            if batch.weights.any():
                self._update(states or {}, batch.weights != 0, rows)
        return total

    def _update(self, states: MetricStates, mask: npt.NDArray[Any], rows: tuple[Any, ...]) -> None:
        """Update metrics with the outputs and targets of rows that count."""
        if states and not mask.all():
            rows = tf.nest.map_structure(lambda each: tf.boolean_mask(each, mask), rows)
        for name, state in states.items():
            with TensorFlowUserCode(f"metric {name!r}", self._caller.where):
                state.update(*rows)

    def predict(self, feed: Feed) -> Columns:
        """Return the model's outputs for the feed's rows: `output`, or by the model's names for several."""
        spec = self._caller.spec
        if not spec.inputs:
            raise JobError(
                ["inputs= is missing: name the columns given to the model to predict with it"], where=self._caller.where
            )
        values_by_name: dict[str, list[npt.NDArray[Any]]] = {}
        pending = [
            (batch, self._begin(self._outputs, tensor_conversion.column_tensors(spec.collation, batch, spec.inputs)))
            for batch in _batches(feed)
        ]
        for batch, wait in pending:
            for name, value in self._select_outputs(dict(flatten_outputs("", wait()))).items():
                values_by_name.setdefault(name, []).append(self._check_output(name, value, batch))
        return {name: np.concatenate(parts) for name, parts in values_by_name.items()}

    def _compile(self, function: Callable[..., Any]) -> Any:
        @wraps(function)
        def scoped(*arguments: Any) -> Any:
            with self._scope():
                return function(*arguments)

        return tf.function(scoped, reduce_retracing=True, autograph=False)

    def _sums_of(self, columns: tensor_conversion.Tensors, weights: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Return the sums by name. If a metric has state, also return outputs and targets."""
        caller, spec = self._caller, self._caller.spec
        terms: dict[str, Any] = {}
        rows: tuple[Any, ...] = ()
        if spec.step:
            terms |= caller.step_terms(self._model, columns, weights)
        if not spec.step or spec.metrics:
            outputs = caller.outputs(self._model, columns, training=False)
            if not spec.step:
                terms[LOSS] = caller.loss_of(self._model, outputs, columns, weights, training=False)
            means = [name for name, metric in spec.metrics.items() if not is_stateful(metric)]
            terms |= {name: caller.metric(name, outputs, columns, weights) for name in means}
            if len(means) < len(spec.metrics):
                rows = (outputs, caller.targets(columns))
        return {name: (_sum(term.values * term.weights), _sum(term.weights)) for name, term in terms.items()}, rows

    def _outputs_of(self, columns: tensor_conversion.Tensors) -> Any:
        return self._caller.outputs(self._model, columns, training=False)

    def _select_outputs(self, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        names = self._caller.spec.outputs
        for name in names:
            if name not in outputs:
                raise JobError([f"the model has no output {name!r}: {nearest(name, outputs)}"])
        return {name: outputs[name] for name in names} if names else outputs

    def _check_output(self, name: str, value: Any, batch: Batch) -> npt.NDArray[Any]:
        if value.shape.rank == 0 or value.shape[0] != batch.rows:
            raise JobError(
                [
                    f"the model's {name} has shape {tuple(value.shape)} for a batch of {batch.rows}: the first "
                    "dimension must be the batch; or name the outputs wanted"
                ],
                where=self._caller.where,
            )
        return tensor_conversion.to_numpy(value)


def _sum(values: Any) -> Any:
    return tf.reduce_sum(tf.cast(values, tf.float64))


def _batches(feed: Feed) -> Iterator[Batch]:
    for part in feed.parts:
        yield from part


def flatten_outputs(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each output with its name. The names of nested outputs are joined by underscores."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from flatten_outputs(f"{name}_{key}" if name else str(key), part)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from flatten_outputs(f"{name or 'output'}_{number}", part)
    elif value is not None:
        yield name or "output", value
