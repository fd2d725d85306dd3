"""Metrics with state, whose value is not a mean over samples: F1, AUC, BLEU.

Each rank updates a metric of its own with its share of the evaluation set. The metrics travel pickled, since the driver
has neither the user's classes nor their framework. One process then merges them in the order of ranks and computes the
value once, so that it is exact over micro-batches and ranks.

A job names a class, or a function without arguments, whose objects have `update(outputs, targets)`, `compute()`, and
`merge(other)` or, as in torcheval, `merge_state(others)`. Metrics of torchmetrics are merged by their states, as
torchmetrics itself does between processes. Those of Keras are merged by their variables, which are sums over batches.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.core.data import MetricSums
from trainwright.core.errors import JobError, user_code
from trainwright.core.loss_api import is_keras_function, metric_config, outputs_first

_REMEDY = "correct the metric"
_PROTOCOL = "give a class, or a function without arguments, whose objects have update(outputs, targets), compute()"
_SUMS: Mapping[str, Callable[[Any, Any], Any]] = {
    "dim_zero_sum": lambda one, other: one + other,
    "dim_zero_max": lambda one, other: one.maximum(other),
    "dim_zero_min": lambda one, other: one.minimum(other),
}
"""How torchmetrics' reductions of a state (`dist_reduce_fx`) merge two tensors; lists of tensors are joined."""


def is_stateful(metric: Any) -> bool:
    """Return whether a job's metric is a class, function or object of metrics with state."""
    made = metric
    while isinstance(made, functools.partial):
        made = made.func
    if _is_keras_metric(made):
        return True
    if is_keras_function(made):
        return False
    if callable(getattr(made, "update", None)) and callable(getattr(made, "compute", None)):
        return True
    try:
        signature = inspect.signature(metric)
    except (TypeError, ValueError):  # of a function that is not Python's
        return False
    return _accepts(signature) and not _accepts(signature, "outputs", "targets")


def _is_keras_metric(made: Any) -> bool:
    """Return whether it is a class of Keras' metrics, or an object of one that is no mean of a function's values."""
    whole = isinstance(made, type)
    names = {kind.__name__ for kind in (made if whole else type(made)).__mro__ if is_keras_function(kind)}
    return "Metric" in names and (whole or "MeanMetricWrapper" not in names)


def _accepts(signature: inspect.Signature, *arguments: str) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


class MetricState:
    """A metric of one rank. Raises JobError or UserCodeError where it cannot be made.

    Attributes:
        metric: the user's object.
        updated: it has seen rows.
    """

    def __init__(self, name: str, metric: Any) -> None:
        with user_code(f"metric {name!r}", _REMEDY):
            whole = not isinstance(metric, type | functools.partial)
            if whole and _is_keras_metric(metric):
                metric = functools.partial(type(metric).from_config, metric_config(metric))
                whole = False
            self.metric = copy.deepcopy(metric) if whole and callable(getattr(metric, "update", None)) else metric()
            if callable(getattr(self.metric, "update_state", None)) and callable(getattr(self.metric, "result", None)):
                self.metric = KerasMetric(metric, self.metric)
        if not all(callable(getattr(self.metric, each, None)) for each in ("update", "compute")):
            kind = type(self.metric).__name__
            raise JobError([f"metric {name!r} made a {kind}, which has no update() and compute(): {_PROTOCOL}"])
        self.updated = False
        self._update = outputs_first(self.metric.update)

    def update(self, outputs: Any, targets: Any) -> None:
        """Add the rows of a micro-batch."""
        self.updated = True
        self._update(outputs, targets)


class KerasMetric:
    """A metric of Keras with the methods of other metrics with state.

    It is pickled as what makes it, a row, by which another process makes its variables, and their values.
    """

    def __init__(self, make: Callable[[], Any], made: Any) -> None:
        self._make, self._made = make, made
        self._row: tuple[npt.NDArray[Any], ...] = ()
        self._problem = ""

    def update(self, outputs: Any, targets: Any) -> None:
        """Add rows. Raises JobError where the model has several outputs, or the job several targets."""
        for what, value in (("outputs", outputs), ("targets", targets)):
            if not hasattr(value, "shape"):
                problem = f"a metric of Keras takes one tensor, and the {what} are a {type(value).__name__}"
                raise JobError([f"{problem}: give a class that has update(outputs, targets), merge() and compute()"])
        if not self._row:
            self._begin(outputs, targets)
        self._made.update_state(targets, outputs)

    def _begin(self, outputs: Any, targets: Any) -> None:
        """Keep a row, and try whether the variables are sums: rows twice must count twice."""
        self._row = tuple(_to_numpy(value[:1]) for value in (targets, outputs))
        found = []
        for _ in range(2):
            self._made.update_state(targets, outputs)
            found.append(self._values())
        self._made.reset_state()
        self._problem = sum_problem(self._made.variables, self._values(), *found)

    def _values(self) -> list[npt.NDArray[Any]]:
        return [_to_numpy(each.value) for each in self._made.variables]

    def __reduce__(self) -> tuple[Any, ...]:
        return KerasMetric._received, (self._make, self._row, self._values(), self._problem)

    @classmethod
    def _received(
        cls, make: Callable[[], Any], row: tuple[npt.NDArray[Any], ...], values: list[npt.NDArray[Any]], problem: str
    ) -> KerasMetric:
        metric = cls(make, make())
        metric._row, metric._problem = row, problem
        metric._made.update_state(*row)
        for variable, value in zip(metric._made.variables, values, strict=True):
            variable.assign(value)
        return metric

    def merge(self, other: KerasMetric) -> None:
        """Add the sums of another rank. Raises JobError for a metric whose state is no sum."""
        if self._problem:
            raise JobError([self._problem])
        for variable, value in zip(self._made.variables, other._values(), strict=True):
            variable.assign(_to_numpy(variable.value) + value)

    def compute(self) -> Any:
        """Return the value."""
        return self._made.result()


def sum_problem(variables: Sequence[Any], none: Sequence[Any], once: Sequence[Any], twice: Sequence[Any]) -> str:
    """Return why the variables of Keras' metrics cannot be summed over workers; empty where they can.

    Args:
        none, once, twice: their values, as arrays, after no, one and two updates with the same rows.
    """
    said = 'so that it cannot be merged over workers: use run="fit" with workers=1, or another metric'
    if not variables:
        return f"the metric has no variables of Keras, {said}"
    for variable, before, first, second in zip(variables, none, once, twice, strict=True):
        if np.any(before) or not np.allclose(second, 2 * np.asarray(first, np.float64), rtol=1e-3, equal_nan=True):
            return f"metric variable {variable.path!r} is not a sum over batches, {said}"
    return ""


def _to_numpy(value: Any) -> npt.NDArray[Any]:
    """Return a tensor of any framework as an array."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def metric_states(metrics: Mapping[str, Any]) -> dict[str, MetricState]:
    """Return a new state of each of a job's metrics that has one, for one evaluation. Raises as `MetricState`."""
    return {name: MetricState(name, metric) for name, metric in metrics.items() if is_stateful(metric)}


def with_states(sums: MetricSums, states: Mapping[str, MetricState]) -> MetricSums:
    """Return the sums of a rank with its metrics pickled, on the CPU. Raises UserCodeError where one cannot be."""
    from trainwright.core import pickling  # needs cloudpickle, which a machine for engines alone may not have

    packed: dict[str, tuple[bytes, ...]] = {}
    for name, state in states.items():
        if state.updated:
            with user_code(f"metric {name!r}", _REMEDY):
                to_cpu = getattr(state.metric, "cpu", None)
                packed[name] = (pickling.dumps(to_cpu() if callable(to_cpu) else state.metric),)
    return MetricSums(totals=sums.totals, states=packed)


def compute_states(sums: MetricSums) -> MetricSums:
    """Return the sums of all ranks with the values of their metrics, merged, in place of the states.

    Raises:
        JobError: the metrics cannot be merged exactly, or the value is not one number.
        UserCodeError: a metric raised.
    """
    from trainwright.core import pickling

    values = {}
    for name, pieces in sums.states.items():
        what = f"metric {name!r}"
        with user_code(what, _REMEDY):
            merged = _merged(what, [pickling.loads(piece) for piece in pieces])
            if hasattr(merged, "distributed_available_fn"):  # torchmetrics would merge with all processes once more
                merged.distributed_available_fn = lambda: False
            value = merged.compute()
        try:
            values[name] = (float(value), 1.0)
        except (TypeError, ValueError, RuntimeError):
            shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
            problem = f"compute() of {what} returned a {type(value).__name__}{shape}: return one number"
            raise JobError([problem]) from None
    return MetricSums(totals={**sums.totals, **values})


def _merged(what: str, pieces: Sequence[Any]) -> Any:
    """Merge metrics into the first one, in their order."""
    first, *others = pieces
    if callable(getattr(first, "merge", None)):
        for other in others:
            first.merge(other)
    elif hasattr(first, "_reductions"):
        _merge_torchmetrics(what, first, others)
    elif callable(getattr(first, "merge_state", None)):
        first.merge_state(others)
    else:
        raise JobError(
            [f"{what} has no merge(other), which adds up the parts of the workers: {_PROTOCOL} and merge(other)"]
        )
    return first


def _merge_torchmetrics(what: str, first: Any, others: Sequence[Any]) -> None:
    """Merge the states of torchmetrics' metrics."""
    if any(hasattr(inner, "_reductions") for inner in first.modules() if inner is not first):
        raise JobError([f"{what} has metrics inside, which cannot be merged: name them one by one in metrics="])
    for state, reduction in first._reductions.items():
        for other in others:
            one, more = getattr(first, state), getattr(other, state)
            if isinstance(one, list):
                setattr(first, state, one + (more if isinstance(more, list) else [more]))
                continue
            merge = _SUMS.get(getattr(reduction, "__name__", ""))
            if merge is None:
                raise JobError([f"{what} keeps {state!r}, which is not a sum, minimum, maximum or list over samples: "
                                "use a metric with such states, or one with merge(other)"])  # fmt: skip
            setattr(first, state, merge(one, more))
