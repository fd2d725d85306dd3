"""Collation: the columns of a micro-batch made rectangular. Pure numpy, the same for every framework.

Engines apply it where a batch becomes tensors. There the rows of a micro-batch are final, so each micro-batch is padded
to its own longest row; until there rows stay as short as they are in memory and on the wire; and training, evaluation,
prediction and the throwaway step all pass through that one place.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.core.data import Batch
from trainwright.core.errors import DataError, JobError, UserCodeError, nearest

Collate = Callable[[dict[str, Any]], Mapping[str, Any]]

MASK = "_mask"
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Pad:
    """How a column of arrays of different lengths becomes one array (rows, width, ...).

    Beside it stands the column `<name>_mask`, bool (rows, width): True where the data is, False where it was padded.

    Attributes:
        value: put behind the end of each row; the column's own type must be able to hold it.
        multiple: the width is the smallest multiple of this that holds the longest row of the micro-batch.
        length: the width of every micro-batch instead; engines with static shapes need it.
    """

    value: float = 0
    multiple: int = 1
    length: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.multiple < 1:
            problems.append(f"Pad(multiple={self.multiple}): use 1 or more")
        if self.length is not None and self.length < 1:
            problems.append(f"Pad(length={self.length}): use 1 or more, or None for the longest row")
        if self.length is not None and self.length % max(self.multiple, 1):
            problems.append(f"Pad(length={self.length}) is no multiple of {self.multiple}: leave multiple= out")
        if problems:
            raise JobError(problems)

    def width(self, longest: int) -> int:
        """Width for a longest row of this many elements; at least 1."""
        return self.length if self.length is not None else -(-max(longest, 1) // self.multiple) * self.multiple


@dataclass(frozen=True, kw_only=True)
class Collation:
    """What is done to a micro-batch before its columns become tensors.

    Attributes:
        pad: columns to pad, by name.
        function: does all of it instead: the dict of columns -> a dict of arrays, or of the framework's tensors.
    """

    pad: Mapping[str, Pad] = field(default_factory=dict)
    function: Collate | None = None

    def __call__(self, batch: Batch) -> Mapping[str, Any]:
        """The columns of a micro-batch, padded, with their masks; first dimensions are the batch's rows.

        Raises:
            DataError: a padded column is not there, or its rows cannot be padded; the function gave other rows.
            UserCodeError: the function raised.
        """
        if self.function is not None:
            return _collated(self.function, batch)
        if not self.pad:
            return batch.columns
        columns = dict(batch.columns)
        for name, pad in self.pad.items():
            if name not in batch.columns:
                raise DataError(
                    f"pad= names the column {name!r}, but there is none", remedy=nearest(name, batch.columns)
                )
            if name + MASK in batch.columns:
                raise DataError(
                    f"the data has a column {name + MASK!r}, which is also the name of the mask of {name!r}",
                    remedy=f"rename the data's column, or leave {name!r} out of pad=",
                )
            columns[name], columns[name + MASK] = padded(name, batch.columns[name], pad, batch.samples)
        return columns

    def sources(self, names: Iterable[str]) -> tuple[str, ...]:
        """The columns of the data set that these come from, each once: of a mask, the column that it belongs to."""
        masks = {name + MASK: name for name in self.pad}
        return tuple(dict.fromkeys(masks.get(name, name) for name in names))

    def static_problems(self) -> list[str]:
        """Why an engine that needs static shapes cannot take this, one line for each problem."""
        return [
            f"pad={name!r}: the accelerator needs one width in every step: give Pad(length=...)"
            for name, pad in self.pad.items()
            if pad.length is None
        ]


def padded(
    name: str, column: npt.NDArray[Any], pad: Pad, samples: Sequence[int] | npt.NDArray[np.int64]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """A column as one array (rows, width, ...), and its mask (rows, width). Not copied where nothing is to be padded.

    Args:
        name: of the column, for errors.
        column: (rows,) objects, each an array (length, ...) of numbers; or a rectangular array (rows, length, ...).
        pad: value and width.
        samples: row numbers in the data set, for errors.

    Raises:
        DataError: a row is longer than the width, is no array of numbers, or differs from others in more than length.
    """
    rows = _rows(name, column, samples)
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    width = pad.width(int(lengths.max(initial=0)))
    if lengths.max(initial=0) > width:
        worst = int(lengths.argmax())
        raise DataError(
            f"a row of column {name!r} has {lengths[worst]} elements, more than Pad(length={width})",
            where=f"sample {samples[worst]}",
            remedy="raise length=, or cut the rows in a transform of the data set",
        )
    mask = np.arange(width) < lengths[:, None]
    if column.dtype != object and column.shape[1] == width:
        return column, mask
    flat = _joined(name, rows)
    result = np.full((len(rows), width, *flat.shape[1:]), _fill(name, pad, flat.dtype), flat.dtype)
    result[mask] = flat
    return result, mask


def stacked(name: str, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A column of objects as one array where its rows are numbers or arrays of one shape.

    Raises:
        DataError: it is ragged, or holds no numbers; says what to do.
    """
    rows = [np.asarray(row) for row in column]
    kinds = {row.dtype.kind for row in rows}
    if not kinds <= set("biufc"):
        held = sorted({type(row).__name__ for row in column})
        raise DataError(
            f"column {name!r} holds {', '.join(held)}, of which there are no tensors",
            where=f"column {name!r}",
            remedy="turn it into numbers in a transform of the data set: text as indices; or use collate=",
        )
    shapes = sorted({row.shape for row in rows})
    if len(shapes) > 1:
        raise DataError(
            f"column {name!r} is ragged: shape {shapes[0]} in one row and {shapes[-1]} in another",
            where=f"column {name!r}",
            remedy=f"pad it with pad={{{name!r}: tw.Pad()}}, use collate=, or crop the rows in a transform",
        )
    return np.stack(rows)


# --- inside -----------------------------------------------------------------------------------------------------------


def _rows(name: str, column: npt.NDArray[Any], samples: Any) -> list[npt.NDArray[Any]]:
    """Each row as an array of numbers with at least one dimension."""
    rows = [np.asarray(row) for row in column]
    for row, sample in zip(rows, samples, strict=True):
        if not row.ndim or row.dtype.kind not in "biufc":
            held = "a single value" if not row.ndim and row.dtype.kind in "biufc" else f"{row.dtype} values"
            raise DataError(
                f"column {name!r} cannot be padded: a row is {held}",
                where=f"sample {sample}",
                remedy="pad columns of which each row is an array of numbers",
            )
    return rows


def _joined(name: str, rows: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """All elements of all rows, one after the other. Empty rows, often of no particular type, do not set the type."""
    filled = [row for row in rows if len(row)] or rows[:1]
    shapes = sorted({row.shape[1:] for row in filled})
    if len(shapes) > 1:
        raise DataError(
            f"the rows of column {name!r} differ in more than length: their elements have shapes {shapes[0]} and "
            f"{shapes[-1]}",
            where=f"column {name!r}",
            remedy="give all elements one shape in a transform of the data set",
        )
    return np.concatenate(filled)


def _fill(name: str, pad: Pad, dtype: np.dtype[Any]) -> Any:
    """The padding value in the column's type."""
    if dtype.kind in "fc":
        return pad.value
    with np.errstate(invalid="ignore"):
        fits = float(np.array(pad.value).astype(dtype)) == float(pad.value)
    if not fits:
        raise DataError(
            f"column {name!r} is {dtype}, which cannot hold Pad(value={pad.value})",
            where=f"column {name!r}",
            remedy="use another value, or convert the column in a transform of the data set",
        )
    return pad.value


def _collated(function: Collate, batch: Batch) -> Mapping[str, Any]:
    """What the user's function made of a micro-batch, checked."""
    shown = ", ".join(map(str, batch.samples[:_SHOWN].tolist()))
    where = f"samples {shown}{', ...' if batch.rows > _SHOWN else ''}"
    try:
        result = function(dict(batch.columns))
    except Exception as error:
        raise UserCodeError(
            f"collate= raised {type(error).__name__}: {error}",
            where=where,
            remedy="mend the function, or the rows it was given",
            detail=_own_frames(error),
        ) from None
    if not isinstance(result, Mapping):
        raise DataError(
            f"collate= returned a {type(result).__name__}",
            where=where,
            remedy="return a dict of arrays or tensors by name",
        )
    columns = {str(name): _array(str(name), value, where) for name, value in result.items()}
    for name, value in columns.items():
        rows = value.shape[0] if len(value.shape) else 0
        if rows != batch.rows:
            raise DataError(
                f"collate= returned {rows} rows of {name!r} for {batch.rows} rows",
                where=where,
                remedy="return one row for each row given, in the same order; leave rows out with dataset.filter",
            )
    return columns


def _array(name: str, value: Any, where: str) -> Any:
    """An array or tensor as it is, anything else as an array."""
    if hasattr(value, "shape"):
        return value
    try:
        return np.asarray(value)
    except ValueError as error:
        raise DataError(
            f"collate= returned {name!r} as a {type(value).__name__} that makes no array: {error}",
            where=where,
            remedy="give every row one shape: pad",
        ) from None


def _own_frames(error: Exception) -> str:
    """The traceback from the user's function on: our own frame comes first."""
    trace = error.__traceback__
    own = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    return "".join(traceback.format_exception(type(error), error, own))
