"""From numpy columns to tensors: without a copy on the CPU, through pinned memory to a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainwright.core.data import Batch, Columns
from trainwright.core.errors import DataError, JobError, nearest

Tensors = Mapping[str, torch.Tensor]

_REFUSED = {
    "O": "Python objects",
    "U": "text",
    "S": "bytes",
    "T": "text",
    "M": "dates",
    "m": "durations",
    "V": "records",
}


def tensor(name: str, array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """One column as a tensor on `device`; on the CPU it shares the array's memory where the array may be written.

    Args:
        name: the column's name, for the error.
        array: (rows, ...).
        device: where the tensor is wanted. A copy to a GPU is not waited for.

    Raises:
        DataError: the type of the array is none of torch's.
    """
    if array.dtype.kind in _REFUSED:
        raise _no_tensor(name, array, _REFUSED[array.dtype.kind])
    if not array.flags.writeable or not array.dtype.isnative or any(stride < 0 for stride in array.strides):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    try:
        host = torch.from_numpy(array)
    except TypeError:
        raise _no_tensor(name, array, str(array.dtype)) from None
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def tensors(columns: Columns, names: Iterable[str], device: torch.device) -> dict[str, torch.Tensor]:
    """The named columns as tensors.

    Raises:
        JobError: a name is no column; says which is near.
        DataError: the type of a column is none of torch's.
    """
    chosen = {}
    for name in names:
        if name not in columns:
            raise JobError(
                [f"inputs= and targets= name the column {name!r}, but there is none: {nearest(name, columns)}"]
            )
        chosen[name] = tensor(name, columns[name], device)
    return chosen


def copied(batch: Batch) -> Batch:
    """A copy of a micro-batch, so that whatever user code does to its tensors in place is not seen again."""
    return Batch(
        columns={name: np.array(array) for name, array in batch.columns.items()},
        weights=batch.weights,
        samples=batch.samples,
    )


def array(values: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor as a numpy array; bfloat16, which numpy lacks, as float32."""
    host = values.detach().to("cpu")
    return np.asarray(host.float() if host.dtype == torch.bfloat16 else host)


def _no_tensor(name: str, array: npt.NDArray[Any], held: str) -> DataError:
    return DataError(
        f"column {name!r} holds {held} (numpy type {array.dtype}), of which torch has no tensors",
        where=f"column {name!r}",
        remedy="turn it into numbers in a transform of the data set: equal shapes in every row, text as indices",
    )
