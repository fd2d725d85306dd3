"""A job's loss and metrics of outputs that are there already, as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainwright.core.data import Batch, Columns, Terms
from trainwright.core.engine import ModelSpec
from trainwright.strategies.torch.training import tensors as batches
from trainwright.strategies.torch.training.evaluation import LOSS
from trainwright.strategies.torch.training.objective import Caller


def marked(spec: ModelSpec, batch: Batch, outputs: Any, only: str = "") -> Terms:
    """The terms of a metric, or of the loss.

    Args:
        spec: of the job.
        batch: with the targets.
        outputs: an array (rows, ...), or arrays by the output's name.
        only: the metric; empty for the loss.

    Raises:
        JobError, UserCodeError: the function takes other outputs, or does not give one value for each sample.
    """
    caller = Caller(spec=spec, device=torch.device("cpu"), autocast=None, where=only or LOSS)
    given = _tensors(outputs) if isinstance(outputs, Mapping) else _tensors({"output": outputs})["output"]
    columns = caller.wanted(batch)
    with torch.no_grad():
        found = caller.metric(only, given, columns, batch) if only else caller.loss_of(given, columns, batch)
    return Terms(batches.array(found.values.double()), batches.array(found.weights.double()))


def _tensors(outputs: Columns) -> dict[str, torch.Tensor]:
    return batches.tensors(outputs, outputs, torch.device("cpu"))
