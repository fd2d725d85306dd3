"""What a reference model costs, and how it takes the weights of a checkpoint."""

from __future__ import annotations

from typing import Any

from trainwright.core.checkpoint import Reader
from trainwright.core.data import Columns
from trainwright.core.model_profile import LayerCost, ModelProfile
from trainwright.strategies.reference.base import PREFIX, SUFFIX
from trainwright.strategies.reference.model import Model
from trainwright.strategies.reference.state import from_bytes, merge


def profile_model(
    model: Model, sample: Columns, inputs: tuple[str, ...], *, keywords: tuple[str, ...] = (), step: Any = None
) -> ModelProfile:
    """Cost by parameter array: a multiplication and an addition for each number. Looks at no sample."""
    layers = (
        LayerCost(name=name, parameters=value.size, parameter_bytes=value.nbytes, flops=2.0 * value.size)
        for name, value in model.parameters.items()
    )
    return ModelProfile(framework="reference", layers=tuple(layers))


def weight_bytes(model: Model) -> int:
    """Size of a model's parameters."""
    return sum(value.nbytes for value in model.parameters.values())


def take_weights(model: Model, reader: Reader) -> None:
    """Give a model the weights of a checkpoint."""
    names = sorted(name for name in reader.names() if name.startswith(PREFIX) and name.endswith(SUFFIX))
    model.parameters = merge(from_bytes(reader.read(name)) for name in names).parameters
