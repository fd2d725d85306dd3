"""What the suite needs of the reference framework: the jobs, a loop written by hand, and a look into the files."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.conformance.problems import CLASSES, CLIP, HIDDEN, RATE, Ids, Problem, schedule
from tests.support.reference.model import (
    Adam,
    Array,
    LossWithGradient,
    Mlp,
    Sgd,
    accuracy,
    cross_entropy,
    squared_error,
)
from tests.support.reference.state import from_bytes, merge_states, to_bytes
from trainwright.core.data import Columns
from trainwright.core.engine import ModelSpec

Arrays = Mapping[str, npt.NDArray[Any]]


def spec(problem: Problem) -> ModelSpec:
    """The job."""
    return ModelSpec(
        model=functools.partial(model, problem),
        loss=_flat
        if problem.flat
        else {"cross_entropy": cross_entropy, "weighted": weighted, "tokens": tokens}[problem.loss],
        optimizer=functools.partial(optimizer, problem.optimizer),
        total_steps=problem.steps,
        inputs=problem.inputs,
        targets=problem.targets,
        metrics={"accuracy": accuracy} if problem.loss == "cross_entropy" else {},
        schedule=schedule if problem.schedule else None,
        clip_norm=CLIP if problem.clip else None,
        seed=problem.seed,
    )


class FlatMlp(Mlp):
    """Loses the rows."""

    def __call__(self, *inputs: npt.NDArray[Any]) -> Array:
        return super().__call__(*inputs).reshape(-1)


def model(problem: Problem) -> Mlp:
    kind = FlatMlp if problem.flat else Mlp
    return kind((problem.features, HIDDEN, CLASSES), dropout=problem.dropout)


def optimizer(name: str, parameters: object) -> Adam | Sgd:
    return Adam(learning_rate=RATE) if name == "adam" else Sgd(learning_rate=RATE, momentum=0.9)


def weighted(outputs: Array, targets: Sequence[Array]) -> LossWithGradient:
    return cross_entropy(outputs, targets[0])._replace(weights=targets[1])


def tokens(outputs: Array, targets: Sequence[Array]) -> LossWithGradient:
    return squared_error(outputs, targets[0])._replace(weights=targets[1])


def _flat(outputs: Array, targets: object) -> LossWithGradient:
    return LossWithGradient(outputs**2, 2 * outputs)


def parameters(files: Mapping[str, bytes]) -> dict[str, npt.NDArray[Any]]:
    """Parameters by name."""
    return {name: value for name, value in state(files).items() if name.startswith("model/")}


def state(files: Mapping[str, bytes]) -> dict[str, npt.NDArray[Any]]:
    """All arrays of a checkpoint by name; rows of one are put together."""
    whole = to_bytes(merge_states(from_bytes(data) for data in files.values()))
    return dict(np.load(io.BytesIO(whole)).items())


def by_hand(
    problem: Problem, start: Arrays, steps: Sequence[Ids], data: Columns
) -> tuple[list[float], list[float], Arrays]:
    """Losses, gradient norms and last parameters of a plain loop over whole global batches, in numpy alone."""
    w1, b1, w2, b2 = (np.array(start[f"model/layers.{name}"]) for name in ("0.weight", "0.bias", "1.weight", "1.bias"))
    held = [w1, b1, w2, b2]
    first, second = [np.zeros_like(one) for one in held], [np.zeros_like(one) for one in held]
    losses, norms, count = [], [], 0
    for step, ids in enumerate(steps):
        x = np.concatenate([data[name][ids] for name in problem.inputs], axis=1)
        hidden = np.tanh(x @ held[0] + held[1])
        loss, weight, error = _loss(
            problem, hidden @ held[2] + held[3], {name: array[ids] for name, array in data.items()}
        )
        if weight == 0:
            losses.append(0.0)
            norms.append(0.0)
            continue
        error = error / weight
        back = error @ held[2].T * (1 - hidden**2)
        gradients = [x.T @ back, back.sum(0), hidden.T @ error, error.sum(0)]
        norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
        if problem.clip:
            gradients = [gradient * min(1.0, CLIP / (norm + 1e-6)) for gradient in gradients]
        rate = RATE * (schedule(step, problem.steps) if problem.schedule else 1.0)
        count += 1
        for index, gradient in enumerate(gradients):
            if problem.optimizer == "adam":
                first[index] = 0.9 * first[index] + 0.1 * gradient
                second[index] = 0.999 * second[index] + 0.001 * gradient**2
                scale = np.sqrt(second[index] / (1 - 0.999**count)) + 1e-8
                held[index] = held[index] - rate * (first[index] / (1 - 0.9**count)) / scale
            else:
                first[index] = 0.9 * first[index] + gradient
                held[index] = held[index] - rate * first[index]
        losses.append(loss / weight)
        norms.append(float(norm))
    names = ("0.weight", "0.bias", "1.weight", "1.bias")
    return losses, norms, {f"model/layers.{name}": value for name, value in zip(names, held, strict=True)}


def _loss(problem: Problem, outputs: Array, batch: Columns) -> tuple[float, float, Array]:
    """Weighted loss sum, sum of weights, and the derivative of the first by the outputs."""
    if problem.loss == "tokens":
        difference, mask = outputs - batch["t"], batch["m"]
        return float((mask * difference**2).sum()), float(mask.sum()), 2 * mask * difference
    weights = batch["w"] if problem.loss == "weighted" else np.ones(len(outputs))
    chances = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    truth = np.eye(CLASSES)[batch["y"]]
    loss = -(weights * np.log((chances * truth).sum(axis=1))).sum()
    return float(loss), float(weights.sum()), (chances - truth) * weights[:, None]
