"""What a model costs, layer by layer; numbers only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Cost of one layer, for one sample, forward.

    Attributes:
        name: the module's name.
        parameters: number of parameters.
        parameter_bytes: their size as stored.
        flops: floating-point operations of one forward pass of one sample.
        output_bytes: size of its output for one sample.
    """

    name: str
    parameters: int
    parameter_bytes: int
    flops: float
    output_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model's layers in order. `framework` is `torch`, `tensorflow` or `reference`.

    `inexact` names what cannot be equal across layouts, such as `batch_norm`.
    """

    framework: str
    layers: tuple[LayerCost, ...]
    inexact: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameters."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def flops(self) -> float:
        """Floating-point operations of one forward pass of one sample."""
        return sum(layer.flops for layer in self.layers)
