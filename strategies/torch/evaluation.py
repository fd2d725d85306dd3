"""Evaluation and prediction: local, without gradients, in the model's evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trainwright.core.data import Batch, Columns, Feed, Sums, Terms
from trainwright.core.errors import JobError
from trainwright.strategies.torch import batches
from trainwright.strategies.torch.objective import Caller

LOSS = "loss"


def evaluate(model: nn.Module, caller: Caller, feed: Feed) -> Sums:
    """Weighted sums and weights of the loss and of each metric over the feed, in float64.

    Raises:
        UserCodeError, JobError: the user's code raised or returned the wrong shape.
    """
    names: list[str] = []
    sums: list[Tensor] = []
    with evaluating(model), torch.no_grad():
        for batch in _batches(feed):
            for name, (values, weights) in _terms(model, caller, batch):
                names.append(name)
                doubled = weights.double()
                sums.append(torch.stack(((values.double() * doubled).sum(), doubled.sum())))
        rows = torch.stack(sums).tolist() if sums else []
    total = Sums()
    for name, (value, weight) in zip(names, rows, strict=True):
        total += Sums(totals={name: (value, weight)})
    return total


def predict(model: nn.Module, caller: Caller, feed: Feed) -> Columns:
    """The model's outputs for the feed's rows: `output`, or by the model's own names where it returns a dict.

    Several outputs without names are `output_0`, `output_1`, and so on.

    Raises:
        UserCodeError, JobError: the model raised, or returned something other than one output per sample.
    """
    if not caller.spec.inputs:
        raise JobError(
            ["inputs= is missing: name the columns given to the model to predict with it"], where=caller.where
        )
    found: dict[str, list[npt.NDArray[Any]]] = {}
    with evaluating(model), torch.no_grad():
        for batch in _batches(feed):
            columns = batches.tensors(batch.columns, caller.spec.inputs, caller.device)
            with caller.precision():
                outputs = caller.outputs(model, columns)
            for name, value in _named(outputs).items():
                found.setdefault(name, []).append(_checked(name, value, batch, caller))
    return {name: np.concatenate(parts) for name, parts in found.items()}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _terms(model: nn.Module, caller: Caller, batch: Batch) -> Iterator[tuple[str, Terms]]:
    """Loss and metrics of a micro-batch; outputs are computed once."""
    columns = caller.tensors(batch.columns)
    if caller.spec.step:
        yield LOSS, caller.loss(model, columns, batch)
        if not caller.spec.metrics:
            return
    with caller.precision():
        outputs = caller.outputs(model, columns)
        if not caller.spec.step:
            yield LOSS, caller.loss_of(outputs, columns, batch)
        for name in caller.spec.metrics:
            yield name, caller.metric(name, outputs, columns, batch)


def _batches(feed: Feed) -> Iterator[Batch]:
    for part in feed.parts:
        yield from part


def _named(outputs: Any) -> Mapping[str, Any]:
    if isinstance(outputs, Mapping):
        return {str(name): value for name, value in outputs.items()}
    if isinstance(outputs, tuple | list):
        return {f"output_{number}": value for number, value in enumerate(outputs)}
    return {"output": outputs}


def _checked(name: str, value: Any, batch: Batch, caller: Caller) -> npt.NDArray[Any]:
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise JobError([f"the model's {name} is {kind}: return tensors, one row per sample"], where=caller.where)
    if value.dim() == 0 or value.shape[0] != batch.rows:
        raise JobError(
            [
                f"the model's {name} has shape {tuple(value.shape)} for a batch of {batch.rows}: the first dimension "
                "must be the batch"
            ],
            where=caller.where,
        )
    return batches.array(value)
