"""Accuracy, calibration and agreement of model outputs, from sums over rows. Pure numpy.

A unit is what is right or wrong by itself: a sample, of language models a token, in multi-label a label of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.core.data import Terms
from trainwright.distillation.target_encoding import log_sum

_Array = npt.NDArray[Any]

_BINS = 15  # of confidence, as in Guo et al. (2017)
_SHOWN = 20  # classes in a picture
_WHOLE = 256  # classes of which all pairs are counted


@dataclass(frozen=True, kw_only=True)
class LabelledOutputs:
    """Outputs of one model for some units, with their labels.

    Attributes:
        chances: (units, classes) logarithms; in regression (units, numbers) values.
        labels: (units,) classes, in regression (units, numbers); None where there are none.
        weights: (units,).
        columns: of a row: labels in multi-label, tokens in language models.
    """

    chances: _Array
    labels: _Array | None
    weights: _Array
    columns: int = 1


def labelled_outputs(kind: str, said: _Array, labels: _Array | None, weights: _Array) -> LabelledOutputs:
    """Return outputs as units.

    Args:
        kind: of `SoftLoss`.
        said: (rows, ...) logits or values.
        labels: of the shape of `said`, without the classes where there are some; None for none.
        weights: (rows, ...), of rows or of what is in them.
    """
    said = np.asarray(said, dtype=np.float64)
    if kind == "regression":
        flat = said.reshape(len(said), -1)
        values = None if labels is None else labels.reshape(flat.shape).astype(np.float64)
        return LabelledOutputs(chances=flat, labels=values, weights=_spread(weights, (len(said),)))
    each = kind == "multi_label"
    logits = np.stack((np.zeros_like(said), said), axis=-1) if each else said
    known = None if labels is None else labels.astype(np.int64).reshape(-1)
    counted = _spread(weights, logits.shape[:-1]).reshape(-1)
    chances = log_softmax(logits).reshape(-1, logits.shape[-1])
    return LabelledOutputs(chances=chances, labels=known, weights=counted, columns=len(chances) // max(len(said), 1))


def labels_of(
    kind: str, said: _Array, targets: Sequence[_Array], loss: Terms | None
) -> tuple[_Array | None, _Array, int | None]:
    """Return labels, weights and tokens of some rows.

    Args:
        kind: of `SoftLoss`.
        said: (rows, ...) what a model says.
        targets: the job's target columns, collated.
        loss: the job's loss of it; its weights, such as a mask of tokens, count. Where it is of one token less than
            there are, it is of the next ones.

    Returns:
        Labels as `labelled_outputs` takes them, or None where no target is one; weights; how many tokens have a label,
        None for all.
    """
    weights = np.ones(len(said)) if loss is None else loss.weights
    if kind in ("regression", "multi_label"):
        fitting = (each for each in targets if each.size == said.size and each.dtype.kind in "fiub")
        found = next(fitting, None)
        labels = None if found is None else found.reshape(said.shape)
        return (labels > 0.5 if labels is not None and kind == "multi_label" else labels), weights, None
    *ahead, classes = said.shape
    names = (each.reshape(ahead) for each in targets if each.dtype.kind in "iub" and each.size == math.prod(ahead))
    shares = (each.argmax(axis=-1) for each in targets if each.shape == said.shape)
    labels = next(iter((*names, *shares)), None)
    if labels is None:
        return None, np.ones(len(said)), None
    following = loss is not None and len(ahead) == 2 and loss.values.shape == (ahead[0], ahead[1] - 1)
    if following:
        labels = labels[:, 1:]
    counted = _spread(weights, labels.shape) * ((labels >= 0) & (labels < classes))  # not an index to ignore
    return np.where(counted > 0, labels, 0), counted, labels.shape[1] if following else None


def log_softmax(logits: _Array) -> _Array:
    """Log-softmax along the last axis; minus infinity stays."""
    return np.asarray(logits - log_sum(logits)[..., None])


def ensemble_outputs(said: Mapping[str, LabelledOutputs], shares: Mapping[str, float]) -> LabelledOutputs:
    """Return the outputs of several models as one: the mean of probabilities, or of values in regression."""
    first = next(iter(said.values()))
    values = first.labels is not None and first.labels.ndim > 1
    parts = [(each.chances if values else np.exp(each.chances)) * shares[name] for name, each in said.items()]
    total: _Array = sum(parts[1:], parts[0])
    with np.errstate(divide="ignore"):
        return LabelledOutputs(chances=total if values else np.log(total), labels=first.labels, weights=first.weights)


class ClassificationMetrics:
    """Scores of one classifier."""

    def __init__(self) -> None:
        self.weight = self.correct = self.surprise = 0.0
        self._bins = np.zeros((3, _BINS))  # weight, confidence, right

    def add(self, units: LabelledOutputs) -> None:
        """Add some units."""
        labels, weights = units.labels, units.weights
        self.weight += float(weights.sum())
        if labels is None:
            return
        top = units.chances.argmax(axis=-1)
        sure = np.exp(np.take_along_axis(units.chances, top[:, None], -1)[:, 0])
        right = (top == labels) * weights
        self.correct += float(right.sum())
        self.surprise -= _dot(np.take_along_axis(units.chances, labels[:, None], -1)[:, 0], weights)
        places = np.minimum((sure * _BINS).astype(np.int64), _BINS - 1)
        for row, counted in enumerate((weights, sure * weights, right)):
            self._bins[row] += np.bincount(places, counted, _BINS)

    def scores(self) -> dict[str, float]:
        """Top-1 accuracy, negative log-likelihood in nats, expected calibration error (Guo et al., 2017)."""
        error = np.abs(self._bins[1] - self._bins[2]).sum()
        found = {"top-1": self.correct, "NLL": self.surprise, "ECE": float(error)}
        return {name: value / self.weight if self.weight else math.nan for name, value in found.items()}

    def reliability(self) -> list[list[float]]:
        """Return mean confidence, accuracy and share of units of each bin that is not empty."""
        weight, sure, right = self._bins
        some = weight > 0
        rows = np.stack((sure[some] / weight[some], right[some] / weight[some], weight[some] / max(self.weight, 1e-12)))
        return [[float(number) for number in row] for row in rows.T]


class RegressionMetrics:
    """Scores of one regression model."""

    def __init__(self) -> None:
        self.weight = self.squares = 0.0
        self._sum: Any = 0.0
        self._square: Any = 0.0

    def add(self, units: LabelledOutputs) -> None:
        """Add some units."""
        if units.labels is None:
            return
        counted = units.weights[:, None]
        self.weight += float(units.weights.sum())
        self.squares += float((counted * (units.chances - units.labels) ** 2).sum())
        self._sum = self._sum + (counted * units.labels).sum(axis=0)
        self._square = self._square + (counted * units.labels**2).sum(axis=0)

    def scores(self) -> dict[str, float]:
        """Root mean squared error, and the share of the labels' variance that is explained."""
        if not self.weight:
            return {}
        numbers = np.size(self._sum)
        spread = float(np.sum(self._square - self._sum**2 / self.weight))
        explained = 1 - self.squares / spread if spread > 0 else math.nan
        return {"RMSE": math.sqrt(self.squares / self.weight / numbers), "R2": explained}

    def reliability(self) -> list[list[float]]:
        """Values have no confidence."""
        return []


class AgreementMetrics:
    """Agreement of a student with a teacher."""

    def __init__(self, *, values: bool) -> None:
        self._values = values
        self.weight = self.agreed = self.apart = 0.0

    def add(self, student: LabelledOutputs, teacher: LabelledOutputs) -> None:
        """Add some units."""
        own, theirs, weights = student.chances, teacher.chances, student.weights
        self.weight += float(weights.sum())
        if self._values:
            self.apart += _dot(((own - theirs) ** 2).mean(axis=-1), weights)
            return
        self.agreed += float(weights[own.argmax(axis=-1) == theirs.argmax(axis=-1)].sum())
        chances = np.exp(theirs)
        with np.errstate(invalid="ignore"):
            self.apart += _dot(np.where(chances > 0, chances * (theirs - own), 0.0).sum(axis=-1), weights)

    def scores(self) -> dict[str, float]:
        """Share of units with the same prediction, and KL(teacher || student) in nats; or the RMSE between them."""
        weight = self.weight or math.nan
        if self._values:
            return {"RMSE between": math.sqrt(self.apart / weight)}
        return {"agreement": self.agreed / weight, "KL": self.apart / weight}


class SoftTargetMatrix:
    """Mean probabilities of a model for the units of each class.

    Args:
        classes: there are.
        labels: of the first units: where there are very many classes, those that are common among them are shown.
    """

    def __init__(self, classes: int, labels: _Array) -> None:
        common = np.bincount(labels.reshape(-1), minlength=classes).argsort(kind="stable")[::-1][:_SHOWN]
        self._kept = np.arange(classes) if classes <= _WHOLE else np.sort(common)
        self._place = np.full(classes, -1)
        self._place[self._kept] = np.arange(len(self._kept))
        self._sums = np.zeros((len(self._kept), len(self._kept)))
        self._counts = np.zeros(classes)

    def add(self, chances: _Array, labels: _Array, weights: _Array) -> None:
        """Count some units: (units, classes) log probabilities, (units,) labels and weights."""
        self._counts += np.bincount(labels, weights, len(self._counts))
        places = self._place[labels]
        some = (places >= 0) & (weights > 0)
        np.add.at(self._sums, places[some], np.exp(chances[some][:, self._kept]) * weights[some][:, None])

    def shown(self) -> list[int]:
        """Return the classes in the picture: the most frequent, at most `_SHOWN`."""
        counts = self._counts[self._kept]
        most = np.sort(counts.argsort(kind="stable")[::-1][:_SHOWN])
        return [int(number) for number in self._kept[most[counts[most] > 0]]]

    def means(self) -> list[list[float]]:
        """Return the mean probabilities of the shown classes, for each of them as the true class."""
        shown = self.shown()
        places = self._place[shown]
        rows = self._sums[np.ix_(places, places)] / self._counts[shown][:, None]
        return [[float(value) for value in row] for row in rows]

    def commonest(self) -> tuple[int, float]:
        """Return the most frequent class and its share of units."""
        most = int(self._counts.argmax())
        return most, float(self._counts[most] / max(self._counts.sum(), 1e-12))


def _dot(values: _Array, weights: _Array) -> float:
    """Return the weighted sum; values of weight 0 do not count, even NaN."""
    return float(np.where(weights > 0, values * weights, 0.0).sum())


def _spread(weights: _Array, shape: tuple[int, ...]) -> _Array:
    """Return weights broadcast to a shape from their first axes."""
    weights = np.asarray(weights, dtype=np.float64)
    if weights.ndim > len(shape):
        weights = weights.mean(axis=tuple(range(len(shape), weights.ndim)))
    return np.broadcast_to(weights.reshape(*weights.shape, *(1 for _ in shape[weights.ndim :])), shape)
