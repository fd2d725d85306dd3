"""Convert numpy columns to tensors, and to arguments of `strategy.run`: one value for each local device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainwright.core.data import Batch
from trainwright.core.engine import Collation, stack_column
from trainwright.core.errors import DataError, JobError, nearest

Tensors = Mapping[str, Any]
_UNSUPPORTED = {"M": "dates", "m": "durations", "V": "records"}


def to_tensor(name: str, values: npt.NDArray[Any] | tf.Tensor) -> tf.Tensor:
    """Return a column as a tensor (rows, ...). Objects that are arrays of one shape are stacked; text is tf.string.

    Raises:
        DataError: TensorFlow has no such type, or the rows differ in shape.
    """
    if isinstance(values, tf.Tensor):
        return values
    if values.dtype.kind == "O" and not all(isinstance(value, str | bytes) for value in values.flat):
        values = stack_column(name, values)
    if values.dtype.kind in _UNSUPPORTED:
        raise DataError(
            f"column {name!r} holds {_UNSUPPORTED[values.dtype.kind]} (numpy type {values.dtype}), of which TensorFlow "
            "has no tensors",
            where=f"column {name!r}",
            remedy="turn it into numbers in a transform of the data set",
        )
    return tf.convert_to_tensor(values)


def column_tensors(collation: Collation, batch: Batch, names: Iterable[str] | None) -> dict[str, tf.Tensor]:
    """Return columns of a micro-batch as tensors, after collation: the named ones, or all.

    Raises:
        JobError: there is no column of that name.
        DataError: TensorFlow has no type for a column.
    """
    columns = collation(batch)
    chosen = {}
    for name in columns if names is None else names:
        if name not in columns:
            raise JobError(
                [f"inputs= and targets= name the column {name!r}, but there is none: {nearest(name, columns)}"]
            )
        chosen[name] = to_tensor(name, columns[name])
    return chosen


def distribute_values(strategy: tf.distribute.Strategy, values: Sequence[Any], first: int) -> Any:
    """Return values of one structure, one for each local device, as an argument of `strategy.run`.

    Args:
        strategy: that runs them.
        values: in the order of the devices.
        first: data rank of the first value: the number of its replica among those of all processes.
    """
    devices = strategy.extended.worker_devices
    assert len(devices) == len(values), f"{len(values)} values for {len(devices)} devices"
    if len(values) == 1:
        return values[0]
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group - first]
    )


def to_numpy(values: tf.Tensor) -> npt.NDArray[Any]:
    """Return a tensor as a numpy array. bfloat16 becomes float32, since numpy has no such type."""
    return np.asarray(tf.cast(values, tf.float32) if values.dtype == tf.bfloat16 else values)
