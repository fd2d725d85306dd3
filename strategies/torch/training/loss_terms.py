"""What a job's loss or metric returns, checked and brought to one form: values with weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainwright.core.data import Batch, Terms
from trainwright.core.errors import JobError
from trainwright.strategies.common.result_checks import reduced_problem, rows_problem, weights_problem
from trainwright.strategies.torch.tensor_parallel.sharded_tensor import full_tensor
from trainwright.strategies.torch.training.batch_tensors import to_tensor


def loss_terms(what: str, result: Any, batch: Batch, where: str) -> Terms:
    """Return the values of a loss or metric with their weights, the weights of the samples included.

    Values of weight 0 do not count, whatever they are: not even if they are not finite.

    Args:
        what: names the function, such as `loss=`.
        result: what it returned: (samples,) or (samples, ...) values, or Terms.
        batch: the micro-batch, with (samples,) weights.
        where: the rank, for errors.

    Raises:
        JobError: it is no tensor, it was reduced, or its first dimension is not the batch.
    """
    values = result.values if isinstance(result, Terms) else result
    if problem := _values_problem(what, values, batch.rows):
        raise JobError([problem], where=where)
    values = full_tensor(values)
    values = values if values.dtype in (torch.float32, torch.float64) else values.float()
    weights = to_tensor("weights", batch.weights, values.device).to(values.dtype)
    if values.dim() > 1:
        weights = _rowwise(weights, values).expand_as(values)
    if isinstance(result, Terms):
        own = full_tensor(torch.as_tensor(result.weights, device=values.device).detach()).to(values.dtype)
        weights = weights * _expanded(what, own, values, where)
    if isinstance(result, Terms) or not batch.weights.all():
        values = values.masked_fill(weights == 0.0, 0.0)
    return Terms(values, weights)


def _values_problem(what: str, values: Any, rows: int) -> str:
    """Return why values are not one or more for each sample; empty where they are."""
    if not isinstance(values, Tensor):
        return f"{what} returned {type(values).__name__}: return a tensor with one value per sample"
    if values.dim() == 0:
        return reduced_problem(what, 'reduction="none"')
    return "" if values.shape[0] == rows else rows_problem(what, values.shape, rows)


def _expanded(what: str, weights: Tensor, values: Tensor, where: str) -> Tensor:
    """Return the user's weights in the shape of the values. Raises JobError where they do not fit."""
    leading = weights.shape == values.shape[: weights.dim()]
    try:
        return (_rowwise(weights, values) if leading else weights).expand_as(values)
    except RuntimeError:
        raise JobError([weights_problem(what, weights.shape, values.shape)], where=where) from None


def _rowwise(weights: Tensor, values: Tensor) -> Tensor:
    """Return weights of the leading dimensions with dimensions of 1 appended, so that they broadcast to the values."""
    return weights.reshape(*weights.shape, *(1 for _ in range(values.dim() - weights.dim())))
