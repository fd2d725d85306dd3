"""A model in numpy with its backward pass by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

ACTIVATIONS: Mapping[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    # name: (function, its derivative as a function of its output)
    "tanh": (np.tanh, lambda y: 1.0 - y * y),
    "relu": (lambda x: np.maximum(x, 0.0), lambda y: (y > 0.0).astype(np.float64)),
    "linear": (lambda x: x, np.ones_like),
}


class Model(Protocol):
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
class _Layer:
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
        self._tape: list[_Layer] = []
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
            self._tape.append(_Layer(inputs=values, outputs=outputs, kept=kept))
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
