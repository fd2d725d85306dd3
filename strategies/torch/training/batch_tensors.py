"""Converts numpy columns to tensors: without a copy on the CPU, through pinned memory to a GPU.

A micro-batch is collated first (`trainwright.core.engine`), here and not where it is fed, because only here its rows
are final, and because a collate function may give torch's own tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainwright.core.data import Batch
from trainwright.core.engine import stack_column
from trainwright.core.errors import DataError, JobError, nearest

Tensors = Mapping[str, torch.Tensor]

_REFUSED = {
    "U": "text",
    "S": "bytes",
    "T": "text",
    "M": "dates",
    "m": "durations",
    "V": "records",
}


def to_tensor(name: str, values: npt.NDArray[Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a column as a tensor on `device`; on the CPU it shares the memory of a writable array.

    Args:
        values: (rows, ...); objects that are arrays of one shape are stacked; a tensor is only moved.
        device: where the tensor is wanted. A copy to a GPU goes through pinned memory and is not waited for: torch
            keeps the pinned memory until its stream has read it.

    Raises:
        DataError: the type of the array is none of torch's, or its rows differ in shape.
    """
    host = values if isinstance(values, torch.Tensor) else _shared(name, values)
    if device.type != "cuda" or host.device.type == "cuda":
        return host if host.device == device else host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def _shared(name: str, array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor in the array's own memory where that is writable, else in that of a copy."""
    if array.dtype.kind == "O":
        array = stack_column(name, array)
    if array.dtype.kind in _REFUSED:
        raise _no_tensor(name, array, _REFUSED[array.dtype.kind])
    if not array.flags.writeable or not array.dtype.isnative or any(stride < 0 for stride in array.strides):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise _no_tensor(name, array, str(array.dtype)) from None


def to_tensors(
    columns: Mapping[str, Any], names: Iterable[str] | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the named columns as tensors; for None all but those of text or bytes.

    Raises:
        JobError: a name is no column; says which is near.
        DataError: the type of a column is none of torch's.
    """
    chosen = {}
    for name in [name for name in columns if not _is_text(columns[name])] if names is None else names:
        if name not in columns:
            problem = f"inputs= and targets= name the column {name!r}, but there is none: {nearest(name, columns)}"
            raise JobError([problem])
        chosen[name] = to_tensor(name, columns[name], device)
    return chosen


def _is_text(column: npt.NDArray[Any] | torch.Tensor) -> bool:
    """Return whether all rows of a column are text or bytes."""
    if isinstance(column, torch.Tensor):
        return False
    objects = column.dtype == object
    return all(isinstance(row, str | bytes) for row in column) if objects else column.dtype.kind in "UST"


def size_bytes(array: npt.NDArray[Any]) -> int:
    """Return the size of a column; of objects, that of those that are arrays."""
    if array.dtype != np.dtype(object):
        return array.nbytes
    return sum(value.nbytes for value in array.flat if isinstance(value, np.ndarray))


class DeviceColumns:
    """The tensors of a micro-batch, on their way to the device or there."""

    def __init__(self, tensors: Tensors, copied: torch.cuda.Event | None) -> None:
        self._tensors: Tensors | None = tensors
        self._copied = copied

    def take(self) -> Tensors | None:
        """Return the tensors, once: what is computed from now on waits for the copy. None from the second call on."""
        tensors, self._tensors = self._tensors, None
        if tensors is not None and self._copied is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self._copied)
            for tensor in tensors.values():
                tensor.record_stream(stream)
        return tensors


def copy_batch(batch: Batch) -> Batch:
    """Return a copy of a micro-batch, so that changes in place by user code stay in the copy."""
    return Batch(
        columns={name: np.array(array) for name, array in batch.columns.items()},
        weights=batch.weights,
        samples=batch.samples,
    )


def shares_memory(tensor: torch.Tensor, batch: Batch) -> bool:
    """Return whether a tensor lies in the memory of a column of a micro-batch."""
    start = tensor.untyped_storage().data_ptr()
    return any(np.asarray(column).ctypes.data == start for column in batch.columns.values())


def to_numpy(values: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor as a numpy array; bfloat16, which numpy does not have, as float32."""
    host = values.detach().to("cpu")
    return np.asarray(host.float() if host.dtype == torch.bfloat16 else host)


def _no_tensor(name: str, array: npt.NDArray[Any], held: str) -> DataError:
    return DataError(
        f"column {name!r} holds {held} (numpy type {array.dtype}), of which torch has no tensors",
        where=f"column {name!r}",
        remedy="turn it into numbers in a transform of the data set: equal shapes in every row, text as indices",
    )
