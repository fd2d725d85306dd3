"""A model in numpy with its backward pass by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

ACTIVATIONS: Mapping[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    # name: (function, its derivative as a function of its output)
    "tanh": (np.tanh, lambda y: 1.0 - y * y),
    "relu": (lambda x: np.maximum(x, 0.0), lambda y: (y > 0.0).astype(np.float64)),
    "linear": (lambda x: x, np.ones_like),
}


class ReferenceModel(Protocol):
    """What the reference engines ask of a model.

    `parameters` maps full names to float64 arrays. The engine replaces the mapping, and never writes into an array.
    """

    parameters: Mapping[str, Array]
    training: bool

    def initialize(self, seed: int) -> None:
        """Set all parameters, as a function of `seed` alone."""

    def reseed(self, seed: int) -> None:
        """Randomness of the next call, such as dropout, is a function of `seed` alone."""

    def __call__(self, *inputs: npt.NDArray[Any]) -> Array:
        """Outputs of shape (rows, ...) for inputs of shape (rows, ...); remembers what `backward` needs."""

    def backward(self, gradient: Array) -> dict[str, Array]:
        """Derivatives by parameter name, given the derivative by the outputs of the last call, of their shape."""


@dataclass(frozen=True, kw_only=True)
class _LayerTape:
    """What one layer of one forward pass leaves for the backward pass."""

    inputs: Array
    outputs: Array
    kept: Array | None


class Mlp:
    """A multi-layer perceptron: `activation` and dropout after every layer but the last.

    Several inputs are flattened to (rows, features) and joined along the features.

    Args:
        sizes: features of the joined inputs, of each hidden layer, and of the outputs.
        activation: `tanh`, `relu` or `linear`.
        dropout: probability that a hidden feature is dropped in training; the others are scaled by 1 / (1 - dropout).
    """

    def __init__(self, sizes: Sequence[int], activation: str = "tanh", dropout: float = 0.0) -> None:
        self.sizes, self.dropout, self.training = tuple(sizes), dropout, True
        self._function, self._derivative = ACTIVATIONS[activation]
        self._random = np.random.default_rng(0)
        self._tape: list[_LayerTape] = []
        self.parameters: Mapping[str, Array] = {}
        self.initialize(0)

    def initialize(self, seed: int) -> None:
        """Weights uniform in +-sqrt(6 / (inputs + outputs)) (Glorot and Bengio 2010), biases zero."""
        random = np.random.default_rng(seed)
        parameters: dict[str, Array] = {}
        for number, (fan_in, fan_out) in enumerate(zip(self.sizes, self.sizes[1:], strict=False)):
            bound = np.sqrt(6.0 / (fan_in + fan_out))
            parameters[f"layers.{number}.weight"] = random.uniform(-bound, bound, (fan_in, fan_out))
            parameters[f"layers.{number}.bias"] = np.zeros(fan_out)
        self.parameters = parameters

    def reseed(self, seed: int) -> None:
        """Seed the dropout of the next call."""
        self._random = np.random.default_rng(seed)

    def __call__(self, *inputs: npt.NDArray[Any]) -> Array:
        """Outputs (rows, sizes[-1]) of inputs (rows, ...)."""
        values = np.concatenate([np.asarray(one, np.float64).reshape(len(one), -1) for one in inputs], axis=1)
        self._tape = []
        last = len(self.sizes) - 2
        for number in range(last + 1):
            weight, bias = self.parameters[f"layers.{number}.weight"], self.parameters[f"layers.{number}.bias"]
            outputs = values @ weight + bias
            if number < last:
                outputs = self._function(outputs)
            kept = self._kept(outputs.shape) if number < last else None
            self._tape.append(_LayerTape(inputs=values, outputs=outputs, kept=kept))
            values = outputs if kept is None else outputs * kept
        return values

    def backward(self, gradient: Array) -> dict[str, Array]:
        """Derivatives by parameter name for the outputs' derivative (rows, sizes[-1])."""
        derivatives: dict[str, Array] = {}
        last = len(self._tape) - 1
        for number in range(last, -1, -1):
            layer = self._tape[number]
            if layer.kept is not None:
                gradient = gradient * layer.kept
            if number < last:
                gradient = gradient * self._derivative(layer.outputs)
            derivatives[f"layers.{number}.weight"] = layer.inputs.T @ gradient
            derivatives[f"layers.{number}.bias"] = gradient.sum(axis=0)
            gradient = gradient @ self.parameters[f"layers.{number}.weight"].T
        return derivatives

    def _kept(self, shape: tuple[int, ...]) -> Array | None:
        """The dropout mask, scaled so that expectations are kept; None where nothing is dropped."""
        if not self.training or not self.dropout:
            return None
        return (self._random.random(shape) >= self.dropout) / (1.0 - self.dropout)


# --- Losses with their derivatives, one value per sample or element ---------------------------------------------------


class LossWithGradient(NamedTuple):
    """Terms that carry their derivative.

    Attributes:
        values: (rows,) or (rows, k).
        gradient: of the outputs' shape. `values[i]` depends on `outputs[i, ...]` alone, and `gradient[i, ...]` is its
            derivative by them; for values of (rows, k) the same with (i, j).
        weights: of the shape of `values`, or something that broadcasts to it.
    """

    values: Array
    gradient: Array
    weights: npt.ArrayLike = 1.0


def cross_entropy(outputs: Array, targets: npt.NDArray[Any]) -> LossWithGradient:
    """-log softmax(outputs)[target]; outputs (..., classes), integer targets (...)."""
    shifted = outputs - outputs.max(axis=-1, keepdims=True)
    exponentials = np.exp(shifted)
    sums = exponentials.sum(axis=-1, keepdims=True)
    chosen = np.asarray(targets, np.int64)[..., None]
    values = (np.log(sums) - np.take_along_axis(shifted, chosen, axis=-1))[..., 0]
    gradient = exponentials / sums
    np.put_along_axis(gradient, chosen, np.take_along_axis(gradient, chosen, axis=-1) - 1.0, axis=-1)
    return LossWithGradient(values, gradient)


def squared_error(outputs: Array, targets: npt.NDArray[Any]) -> LossWithGradient:
    """(output - target) squared, element by element; both (rows, k), values (rows, k)."""
    difference = outputs - np.asarray(targets, np.float64).reshape(outputs.shape)
    return LossWithGradient(difference * difference, 2.0 * difference)


def accuracy(outputs: Array, targets: npt.NDArray[Any]) -> Array:
    """1.0 where the largest output is the target's; outputs (rows, classes), integer targets (rows,)."""
    return np.asarray(outputs.argmax(axis=-1) == targets, np.float64)


# --- Optimizers as settings with pure updates of named arrays ---------------------------------------------------------


Arrays = Mapping[str, Array]


class Optimizer(Protocol):
    """What the reference engines ask of an optimizer. Slots are its state, by names of its own."""

    @property
    def learning_rate(self) -> float:
        """The rate before the job's schedule."""

    def initial(self, parameters: Arrays) -> dict[str, Array]:
        """Slots before the first update."""

    def update(
        self, parameters: Arrays, gradients: Arrays, slots: Arrays, rate: float
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """New parameters and new slots; `rate` is the learning rate of this update."""


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Stochastic gradient descent with heavy-ball momentum (Polyak 1964): m = momentum * m + g, p = p - rate * m."""

    learning_rate: float = 0.1
    momentum: float = 0.0

    def initial(self, parameters: Arrays) -> dict[str, Array]:
        """One `momentum/<parameter>` each, zero."""
        return {f"momentum/{name}": np.zeros_like(value) for name, value in parameters.items()}

    def update(
        self, parameters: Arrays, gradients: Arrays, slots: Arrays, rate: float
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """One step down the gradients."""
        moving = {name: self.momentum * slots[f"momentum/{name}"] + gradients[name] for name in parameters}
        moved = {name: value - rate * moving[name] for name, value in parameters.items()}
        return moved, {f"momentum/{name}": value for name, value in moving.items()}


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam with bias correction (Kingma and Ba 2015, algorithm 1)."""

    learning_rate: float = 1e-3
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8

    def initial(self, parameters: Arrays) -> dict[str, Array]:
        """`count` of updates, and `first/<parameter>` and `second/<parameter>` each, zero."""
        moments = {
            f"{moment}/{name}": np.zeros_like(value)
            for moment in ("first", "second")
            for name, value in parameters.items()
        }
        return {"count": np.zeros(()), **moments}

    def update(
        self, parameters: Arrays, gradients: Arrays, slots: Arrays, rate: float
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """One step with moments corrected for their start at zero."""
        count = slots["count"] + 1.0
        changed: dict[str, Array] = {"count": np.asarray(count)}
        moved: dict[str, Array] = {}
        for name, value in parameters.items():
            gradient = gradients[name]
            first = self.beta_1 * slots[f"first/{name}"] + (1.0 - self.beta_1) * gradient
            second = self.beta_2 * slots[f"second/{name}"] + (1.0 - self.beta_2) * gradient * gradient
            corrected = first / (1.0 - self.beta_1**count)
            scale = np.sqrt(second / (1.0 - self.beta_2**count)) + self.epsilon
            moved[name] = value - rate * corrected / scale
            changed[f"first/{name}"], changed[f"second/{name}"] = first, second
        return moved, changed
