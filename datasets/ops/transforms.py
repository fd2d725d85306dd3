"""Transforms: the user's functions over rows and batches, and how they are applied."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from trainwright.core.data import fold
from trainwright.core.errors import DataError, TrainwrightError, UserCodeError
from trainwright.datasets.formats.arrow_columns import Arrays, stack
from trainwright.datasets.ops.stateful_map import Stateful
from trainwright.datasets.sampling.sampler import Rows

RowFunction = Callable[[dict[str, Any], np.random.Generator], Mapping[str, Any]]
BatchFunction = Callable[[Arrays], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RowMap:
    """f(row, rng) -> row, for each row by itself."""

    function: RowFunction
    heavy: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class BatchMap:
    """f(columns) -> columns with as many rows; a need of CPUs or GPUs for each call makes it a stage of Ray Data.

    A `Stateful` function runs there on actors, each with that many of its own.
    """

    function: BatchFunction
    cpus: float = 0.0
    gpus: float = 0.0

    @property
    def heavy(self) -> bool:
        """Whether it runs on Ray Data."""
        return self.cpus > 0 or self.gpus > 0

    @property
    def needs(self) -> dict[str, float]:
        """What each call, or each actor, has of its own."""
        return {"CPU": self.cpus, "GPU": self.gpus}

    @property
    def stateful(self) -> bool:
        """Whether it holds what is made once in a process."""
        return isinstance(self.function, Stateful)


Transform = RowMap | BatchMap


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What randomness is counted by: the run's seed and the epoch."""

    seed: int = 0
    epoch: int = 0


def apply(
    transforms: Sequence[Transform], columns: Arrays, samples: Rows, counters: Counters, first: int = 0
) -> Arrays:
    """Apply transforms in turn.

    Args:
        transforms: in order.
        columns: arrays of as many rows as `samples`.
        samples: (rows,) int64, row numbers in the data set.
        counters: seed and epoch.
        first: number of the first transform within its data set; it is folded into the seed of all but number 0.

    Raises:
        UserCodeError: a function raised.
        DataError: a function gave the wrong rows, types or shapes.
    """
    columns = owned(columns) if transforms else columns
    for number, transform in enumerate(transforms, first):
        if isinstance(transform, RowMap):
            columns = _map_rows(transform.function, columns, samples, counters, number)
        else:
            columns = _map_batch(transform.function, columns, samples)
    return columns


def owned(columns: Arrays) -> Arrays:
    """Columns whose objects a function may change in place: others may keep and give them again."""
    return {
        name: np.fromiter(map(_copied, array), object, len(array))
        if array.dtype == object and array.ndim == 1
        else array
        for name, array in columns.items()
    }


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy() if value.flags.writeable else value
    return value if isinstance(value, str | bytes | int | float | None) else copy.deepcopy(value)


def _map_rows(function: RowFunction, columns: Arrays, samples: Rows, counters: Counters, number: int) -> Arrays:
    stage = (number,) if number else ()
    results: list[Mapping[str, Any]] = []
    for row, sample in enumerate(samples.tolist()):
        key = fold(counters.seed, counters.epoch, sample, *stage)
        generator = np.random.Generator(np.random.Philox(key=key))
        try:
            result = function({name: column[row] for name, column in columns.items()}, generator)
        except Exception as error:
            raise _raised(function, error, f"sample {sample}") from None
        results.append(_row(function, result, results[0] if results else None, sample))
    if not results:
        return columns
    return {name: stack([row[name] for row in results], f"{name!r} from {name_of(function)}") for name in results[0]}


def _row(function: RowFunction, result: Any, first: Mapping[str, Any] | None, sample: int) -> Mapping[str, Any]:
    if not isinstance(result, Mapping) or (first is not None and result.keys() != first.keys()):
        given = f"columns {sorted(result)}" if isinstance(result, Mapping) else f"a {type(result).__name__}"
        raise DataError(
            f"the transform {name_of(function)} returned {given}",
            where=f"sample {sample}",
            remedy="return a dict with the same columns for every row",
        )
    return result


def _map_batch(function: BatchFunction, columns: Arrays, samples: Rows) -> Arrays:
    where = f"samples {', '.join(map(str, samples[:5].tolist()))}{', ...' if len(samples) > 5 else ''}"
    result = called(function, where, dict(columns))
    if not isinstance(result, Mapping):
        raise DataError(
            f"the transform {name_of(function)} returned a {type(result).__name__}", remedy="return a dict of arrays"
        )
    arrays = {name: _array(function, name, column, where) for name, column in result.items()}
    for name, array in arrays.items():
        rows = len(array) if array.ndim else 0
        if rows != len(samples):
            raise DataError(
                f"the transform {name_of(function)} returned {rows} rows of {name!r} for {len(samples)} rows",
                where=where,
                remedy="return as many rows as were given, in the same order",
            )
    return {name: array.astype(object) if array.dtype.kind in "US" else array for name, array in arrays.items()}


def _array(function: BatchFunction, name: str, column: Any, where: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(column)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{name!r} from {name_of(function)} makes no array: {error}",
            where=where,
            remedy="give every row one shape, or an array of dtype object with one array for each row",
        ) from error


def called(
    function: Callable[[Any], Any], where: str, given: Any, finish: Callable[[Any], Any] = lambda answer: answer
) -> Any:
    """finish(function(given)); what that raises becomes a UserCodeError that names the function and `where`.

    Errors of ours, as our own functions raise them, stay as they are.
    """
    try:
        return finish(function(given))
    except TrainwrightError:
        raise
    except Exception as error:
        raise _raised(function, error, where) from None


def _raised(function: Callable[..., Any], error: Exception, where: str) -> UserCodeError:
    """The user's own frames only: ours is the first."""
    trace = error.__traceback__
    own = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    return UserCodeError(
        f"the transform {name_of(function)} raised {type(error).__name__}: {error}",
        where=where,
        remedy="mend the function, or the row it was given: dataset.read(index, [row]) shows it",
        detail="".join(traceback.format_exception(type(error), error, own)),
    )


def name_of(function: Callable[..., Any]) -> str:
    """As errors call a function; a class in its place by its own name."""
    if isinstance(function, Stateful):
        return function.func.__qualname__
    return str(getattr(function, "__qualname__", type(function).__qualname__))
