"""Look at one transformed row of a data set, before a run and without its delivery.

Where a transform is slow to open, such as a model on a GPU, a task of Ray computes the row, so that no other process
opens it. The row is computed once in each process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trainwright.core.data import Batch
from trainwright.core.errors import DataError, HangError, TrainwrightError, UserCodeError
from trainwright.core.pickling import dumps, loads
from trainwright.datasets.data_source import Arrays, Field, Index, schema_of, select_columns
from trainwright.datasets.dataset import Dataset

_TRIED_ROWS = 4  # where the first row cannot be read
_DEADLINE_S = 600.0  # to open the transforms and compute a row
_COMPUTED: dict[tuple[Any, ...], Arrays] = {}  # rows of this process


def transformed_fields(dataset: Dataset, index: Index) -> Mapping[str, Field]:
    """Return the columns after the transforms; with transforms, one row is read and transformed."""
    return schema_of(first_row(dataset, index)) if dataset.transforms else index.schema


def first_batch(dataset: Dataset, index: Index, columns: Iterable[str] | None = None) -> Batch:
    """Return the row of `first_row` as a batch. Raises as `first_row`."""
    return Batch(columns=first_row(dataset, index, columns), weights=np.ones(1), samples=np.zeros(1, dtype=np.int64))


def first_row(dataset: Dataset, index: Index, columns: Iterable[str] | None = None) -> Arrays:
    """Return one transformed row: the first, or another where the first cannot be read.

    Raises:
        DataError, UserCodeError: none of a few rows can be read, or what a transform needs cannot be opened.
        HangError: the task of Ray did not end in time.
    """
    if not dataset.stateful:
        return _first_readable_row(dataset, index, columns)
    key = (index.hash, repr(dataset), *(getattr(step.function, "key", id(step)) for step in dataset.transforms))
    if key not in _COMPUTED:
        _COMPUTED[key] = _row_of_task(dataset, index) or _first_readable_row(dataset, index, None)
    found = _COMPUTED[key]
    return {name: found[name] for name in select_columns(found, columns, repr(dataset))}


def _first_readable_row(dataset: Dataset, index: Index, columns: Iterable[str] | None) -> Arrays:
    failure: TrainwrightError | None = None
    for row in dict.fromkeys([0, *np.linspace(0, index.rows - 1, _TRIED_ROWS).astype(np.int64).tolist()]):
        try:
            return dataset.read(index, [row], columns)
        except (DataError, UserCodeError) as error:
            failure = failure or error
    assert failure is not None, "an index has a row"
    raise failure


def _row_of_task(dataset: Dataset, index: Index) -> Arrays | None:
    """Compute the row in a task with the resources of the transforms; None where Ray is not connected."""
    import ray
    from ray.exceptions import GetTimeoutError, RayTaskError

    if not ray.is_initialized():
        return None
    needs = dataset.needs
    task: Any = ray.remote(num_cpus=needs["CPU"], num_gpus=needs["GPU"], max_calls=1)(_compute_row)
    try:
        found: Arrays | TrainwrightError = ray.get(task.remote(dumps((dataset, index))), timeout=_DEADLINE_S)
    except GetTimeoutError as error:
        asked = ", ".join(f"{number:g} {name}s" for name, number in needs.items() if number)
        raise HangError(
            f"no process with {asked} computed the first row of {dataset!r} within {_DEADLINE_S:g} s",
            remedy="see what holds them, or declare less",
        ) from error
    except RayTaskError as error:
        raise DataError(
            f"{dataset!r} cannot be opened where Ray Data runs",
            remedy="install what its functions import on every node",
            detail=str(error),
        ) from error
    if isinstance(found, TrainwrightError):
        raise found
    return found


def _compute_row(pickled: bytes) -> Arrays | TrainwrightError:
    """Run as the task. An error is returned, because Ray would wrap a raised one."""
    dataset, index = loads(pickled)
    try:
        return _first_readable_row(dataset, index, None)
    except TrainwrightError as error:
        return error
