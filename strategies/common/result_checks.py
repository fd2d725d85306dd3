"""Checks of what a job's loss, metrics and model return, in words that are the same in all frameworks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from trainwright.core.errors import nearest

Parts = Mapping[Any, Any] | Sequence[Any] | None


def reduced_problem(what: str, no_reduction: str) -> str:
    """Say that a loss or metric returned a single number.

    Args:
        what: names the function, such as `loss=` or `metric 'mae'`.
        no_reduction: the framework's argument against it, such as `reduction=None`.
    """
    loss = f"one loss per sample: use {no_reduction}"
    wanted = "one value per sample, without a mean" if what.startswith("metric") else loss
    return f"{what} returned a single number: return {wanted}, or Terms(values, weights)"


def rows_problem(what: str, shape: Sequence[Any], rows: int | None) -> str:
    """Say that the first dimension of a loss or metric is not the batch."""
    return (
        f"{what} returned shape {tuple(shape)} for a batch of {rows} rows: the first dimension must be the batch, one "
        "loss per sample; for tokens or pixels return (samples, k) or Terms(values, weights)"
    )


def weights_problem(what: str, weights: Sequence[Any], values: Sequence[Any]) -> str:
    """Say that the weights of a loss or metric do not fit its values."""
    return (
        f"{what} has weights of shape {tuple(weights)} for values of shape {tuple(values)}: give each value its weight"
    )


def missing_column_problem(name: str, columns: Collection[str]) -> str:
    """Say that a job names a column that its data does not have."""
    return f"inputs= and targets= name the column {name!r}, but there is none: {nearest(name, columns)}"


def missing_output_problem(name: str, outputs: Collection[str]) -> str:
    """Say that a job asks for an output that its model does not have."""
    return f"the model has no output {name!r}: {nearest(name, outputs)}"


NO_INPUTS = "inputs= is missing: name the columns given to the model to predict with it"


def named_outputs(value: Any, parts_of: Callable[[Any], Parts], name: str = "") -> Iterator[tuple[str, Any]]:
    """Give each output of a model by name, those inside others too.

    Outputs without names are `output_0`, `output_1` and so on, parts of an output `name_0` or `name_key`; a single one
    is `output`. None is left out.

    Args:
        value: what the model returned.
        parts_of: returns the parts of an output, by key or in order; None for one that has no parts.
        name: of the value, inside another one.
    """
    parts = parts_of(value)
    if parts is None:
        if value is not None:
            yield name or "output", value
        return
    named = isinstance(parts, Mapping)
    outer = name if named else name or "output"
    for key, part in parts.items() if isinstance(parts, Mapping) else enumerate(parts):
        yield from named_outputs(part, parts_of, f"{outer}_{key}" if outer else str(key))
