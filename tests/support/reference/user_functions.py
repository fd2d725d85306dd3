"""The user's model and functions, called with care: shapes checked, errors said in the user's terms.

One share of one step becomes one vector, which every topology adds up in its own way:
`[gradient of the weighted loss sum, by parameter | weighted loss sum | sum of weights | wishes to stop]`.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from tests.support.reference.model import Array, Arrays, LossWithGradient, Optimizer, ReferenceModel
from tests.support.reference.state import ReferenceState
from trainwright.core.data import Batch, Columns, Feed, MetricSums, StepReport, Terms, fold_seed
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError, NonFiniteLoss, TrainwrightError, UserCodeError
from trainwright.core.loss_api import outputs_first

_TAIL = 3  # loss, weight, wish


@dataclass(frozen=True, kw_only=True)
class SummedGradients:
    """A vector of sums, taken apart."""

    gradients: Arrays
    loss: float
    weight: float
    stop_requested: bool


class ReferenceProgram:
    """The functions of a job and the model they work on. Holds no state of the training.

    Args:
        spec: the job's part.
        where: the rank, for messages.
    """

    def __init__(self, spec: ModelSpec, where: str) -> None:
        self.spec, self.where = spec, where
        with self._user("model"):
            self.model: ReferenceModel = spec.model()
            self.model.initialize(fold_seed(spec.seed))
        self._shapes = {name: value.shape for name, value in self.model.parameters.items()}
        assert spec.optimizer is not None, "only a job with run='fit' may leave it out"
        with self._user("optimizer"):
            self.optimizer: Optimizer = spec.optimizer(self.model.parameters)

    def initial(self) -> ReferenceState:
        """Parameters and slots before the first step; the same on every rank for one seed."""
        parameters = dict(self.model.parameters)
        return ReferenceState(parameters=parameters, slots=self.optimizer.initial(parameters))

    def share(self, parameters: Arrays, batches: tuple[Batch, ...], *, step: int, data_rank: int) -> Array:
        """The vector of sums over the micro-batches of one data rank.

        Raises:
            NonFiniteLoss, JobError, UserCodeError: nothing has been changed then.
        """
        self.model.parameters, self.model.training = parameters, True
        vector = np.zeros(sum(int(np.prod(shape)) for shape in self._shapes.values()) + _TAIL)
        for number, batch in enumerate(batches):
            self.model.reseed(fold_seed(self.spec.seed, step, number, data_rank, 0))
            vector += self._micro_batch(batch, step)
        return vector

    def totals(self, vector: Array) -> SummedGradients:
        """A vector of sums by parameter."""
        gradients: dict[str, Array] = {}
        start = 0
        for name, shape in self._shapes.items():
            size = int(np.prod(shape))
            gradients[name] = vector[start : start + size].reshape(shape)
            start += size
        loss, weight, wishes = vector[start:]
        return SummedGradients(
            gradients=gradients, loss=float(loss), weight=float(weight), stop_requested=bool(wishes > 0)
        )

    def mean_gradients(self, totals: SummedGradients, step: int, *, clip: bool = True) -> tuple[Arrays, float]:
        """Gradients scaled by 1 / weight, then clipped unless that is for others; and their norm before clipping.

        Raises:
            NonFiniteLoss: the norm is not finite although the loss was.
        """
        mean = {name: value / totals.weight for name, value in totals.gradients.items()}
        norm = float(np.sqrt(sum(float(np.vdot(value, value)) for value in mean.values())))
        if not np.isfinite(norm):
            raise NonFiniteLoss(f"the gradient of step {step + 1} is not finite, nothing was applied", where=self.where)
        limit = self.spec.clip_norm if clip else None
        if limit is not None and norm + 1e-6 > limit:
            mean = {name: value * (limit / (norm + 1e-6)) for name, value in mean.items()}
        return mean, norm

    def rate(self, step: int) -> float:
        """The learning rate of a step, by the job's schedule."""
        if self.spec.schedule is None:
            return self.optimizer.learning_rate
        with self._user("schedule"):
            return self.optimizer.learning_rate * float(self.spec.schedule(step, self.spec.total_steps))

    def update(self, parameters: Arrays, gradients: Arrays, slots: Arrays, rate: float) -> tuple[Arrays, Arrays]:
        """The optimizer's: new parameters and slots."""
        with self._user("optimizer"):
            return self.optimizer.update(parameters, gradients, slots, rate)

    def evaluate(self, parameters: Arrays, feed: Feed) -> MetricSums:
        """Sums of `loss` and of each metric over all rows of the feed; dropout is off."""
        self.model.parameters, self.model.training = parameters, False
        total = MetricSums()
        for batch in _batches(feed):
            values, weights = self._terms("loss", self._loss(batch)[0], batch)
            total += MetricSums(totals={"loss": _weighted_sums(values, weights)})
            if self.spec.metrics:
                total += self._metrics(batch)
        return total

    def predict(self, parameters: Arrays, feed: Feed) -> Columns:
        """`output`: the model's outputs (rows, ...) for all rows of the feed in their order, dropout off."""
        self.model.parameters, self.model.training = parameters, False
        return {"output": np.concatenate([self._outputs(batch) for batch in _batches(feed)])}

    def _micro_batch(self, batch: Batch, step: int) -> Array:
        """The vector of sums of one micro-batch."""
        graded, outputs = self._loss(batch)
        values, weights = self._terms("loss", graded, batch)
        if not _has_gradient(graded) or (outputs is not None and graded.gradient.shape != outputs.shape):
            self._refuse("loss= must return LossWithGradient(values, gradient), gradient of the shape of the outputs")
        self._check_finite(values, weights, batch, step)
        loss, weight = _weighted_sums(values, weights)
        factor = weights.reshape(weights.shape + (1,) * (graded.gradient.ndim - weights.ndim))
        with self._user("model"):
            gradients = self.model.backward(graded.gradient * factor)
        return np.concatenate([*(gradients[name].ravel() for name in self._shapes), [loss, weight, 0.0]])

    def _loss(self, batch: Batch) -> tuple[Any, Array | None]:
        """What the user's loss or step returns, and the outputs where the engine knows them."""
        if self.spec.step is not None:
            with self._user("step"):
                return self.spec.step(self.model, dict(batch.columns)), None
        if self.spec.loss is None:
            self._refuse("give either loss= with inputs= and targets=, or step=")
        outputs = self._outputs(batch)
        with self._user("loss"):
            return outputs_first(self.spec.loss)(outputs, self._targets(batch)), outputs

    def _outputs(self, batch: Batch) -> Array:
        """The model's outputs, first dimension rows."""
        if not self.spec.inputs:
            self._refuse("inputs= is missing: name the columns given to the model")
        with self._user("model"):
            outputs = self.model(*(self._column(batch, name) for name in self.spec.inputs))
        if not isinstance(outputs, np.ndarray) or outputs.ndim == 0 or len(outputs) != batch.rows:
            self._refuse(
                f"the model returned {_describe(outputs)} for {batch.rows} rows: "
                f"return an array whose first dimension is {batch.rows}"
            )
        return outputs

    def _targets(self, batch: Batch) -> Any:
        """One array, or a tuple when there are several."""
        arrays = tuple(self._column(batch, name) for name in self.spec.targets)
        return arrays[0] if len(arrays) == 1 else arrays

    def _column(self, batch: Batch, name: str) -> npt.NDArray[Any]:
        """A column of the batch."""
        if name not in batch.columns:
            self._refuse(f"column {name!r} is not in the data, which has {', '.join(sorted(batch.columns))}")
        return batch.columns[name]

    def _terms(self, what: str, result: Any, batch: Batch) -> tuple[Array, Array]:
        """Values and weights of one shape, (rows,) or (rows, k); the batch's own weights multiplied in."""
        values = np.asarray(result[0] if _has_gradient(result) or isinstance(result, Terms) else result)
        weights = 2 if _has_gradient(result) else 1 if isinstance(result, Terms) else None
        if values.ndim == 0:
            self._refuse(f"{what} returned one number for {batch.rows} rows: return one value per sample, no mean")
        if values.ndim > 2 or len(values) != batch.rows:
            self._refuse(f"{what} returned {_describe(values)} for {batch.rows} rows: return ({batch.rows},) or Terms")
        own = np.ones(values.shape) if weights is None else np.asarray(result[weights], np.float64)
        try:
            own = np.broadcast_to(own, values.shape)
        except ValueError:
            self._refuse(f"{what} returned weights of shape {own.shape} for values of shape {values.shape}")
        return values, own * batch.weights.reshape((-1,) + (1,) * (values.ndim - 1))

    def _metrics(self, batch: Batch) -> MetricSums:
        """Sums of the metrics of one micro-batch."""
        outputs, targets = self._outputs(batch), self._targets(batch)
        totals: dict[str, tuple[float, float]] = {}
        for name, metric in self.spec.metrics.items():
            with self._user(f"metric {name!r}"):
                result = outputs_first(metric)(outputs, targets)
            totals[name] = _weighted_sums(*self._terms(f"metric {name!r}", result, batch))
        return MetricSums(totals=totals)

    def _check_finite(self, values: Array, weights: Array, batch: Batch, step: int) -> None:
        """Raise NonFiniteLoss that names the samples; values of weight 0 do not count."""
        bad = (~np.isfinite(values) & (weights != 0)).reshape(batch.rows, -1).any(axis=1)
        if bad.any():
            samples = batch.samples[bad].tolist()
            raise NonFiniteLoss(
                f"the loss of step {step + 1} is not finite at samples {samples[:10]}, nothing was applied",
                where=self.where,
                remedy="look at these rows, lower the learning rate or set clip_norm=",
            )

    def _refuse(self, problem: str) -> NoReturn:
        raise JobError([problem], where=self.where)

    @contextmanager
    def _user(self, what: str) -> Iterator[None]:
        """Say errors of the user's code as such."""
        try:
            yield
        except TrainwrightError:
            raise
        except Exception as error:
            raise UserCodeError(
                f"{what} raised {type(error).__name__}: {error}", where=self.where, detail=traceback.format_exc()
            ) from error


def apply_step(
    program: ReferenceProgram, state: ReferenceState, feed: Feed, vector: Array
) -> tuple[ReferenceState, StepReport]:
    """Apply one step's sums over the global batch: scale, clip, update. Pure in the state.

    Without any weight nothing is applied, the loss is 0, and the step counts.
    """
    totals, rate = program.totals(vector), program.rate(feed.step)
    parameters, slots, norm, loss = state.parameters, state.slots, 0.0, 0.0
    if totals.weight > 0:
        gradients, norm = program.mean_gradients(totals, feed.step)
        loss = totals.loss / totals.weight
        parameters, slots = program.update(parameters, gradients, slots, rate)
    report = StepReport(
        step=feed.step + 1,
        loss=loss,
        weight=totals.weight,
        learning_rate=rate,
        gradient_norm=None if program.spec.clip_norm is None else norm,
        stop_requested=totals.stop_requested,
    )
    return ReferenceState(parameters=parameters, slots=slots, step=feed.step + 1), report


def _has_gradient(result: Any) -> bool:
    """Whether a result is a LossWithGradient; its class is another one in a process that got it by value."""
    return type(result).__name__ == LossWithGradient.__name__


def _batches(feed: Feed) -> Iterator[Batch]:
    """All micro-batches of a feed in their order."""
    for part in feed.parts:
        yield from part


def _weighted_sums(values: Array, weights: Array) -> tuple[float, float]:
    """Weighted sum and sum of weights; values of weight 0 do not count, whatever they are."""
    return float(np.sum(np.where(weights == 0, 0.0, values * weights))), float(np.sum(weights))


def _describe(value: Any) -> str:
    """A value's type and shape, for messages."""
    return f"shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
