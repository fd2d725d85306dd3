"""Blocks of Ray Data that each hold one piece of a share: one row, whose values are the piece's columns.

Arrays of numbers lie in the block as they are in memory, so that they enter the object store with one copy and are
read from it without any. Ray Data divides no row. The column `piece` says what else belongs to the piece.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import cloudpickle
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainwright.core.errors import TrainwrightError
from trainwright.datasets.data_source import Arrays, Rows, object_array

_PIECE, _SAMPLES, _PASSES, _COLUMN = "piece", "samples", "passes", "column "  # names in a block; the last is a prefix
_NO_ROWS = np.zeros(0, np.int64)


class SharePart(NamedTuple):
    """A label: part `part` of `parts` of the share that data rank `rank` of `total` has of the chunk at `step`."""

    step: int
    rank: int
    total: int
    part: int
    parts: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece: its rows, or the error that ended it."""

    label: SharePart
    samples: Rows  # with `passes`, they seed the transforms
    passes: Rows
    columns: Arrays = field(default_factory=dict)
    error: TrainwrightError | None = None
    spent: tuple[tuple[str, float], ...] = ()  # seconds of each stage so far, by name
    size_bytes: int = 0  # of its block; in a summary only

    def to_block(self) -> pa.Table:
        """Return the block that holds it."""
        columns = {name: _to_arrow(array) for name, array in self.columns.items()}
        layouts = {name: layout for name, (layout, _) in columns.items()}
        header = cloudpickle.dumps((replace(self, samples=_NO_ROWS, passes=_NO_ROWS, columns={}), layouts))
        values = {
            _SAMPLES: pa.array(self.samples),
            _PASSES: pa.array(self.passes),
            **{_COLUMN + name: stored for name, (_, stored) in columns.items()},
        }
        return pa.table(
            {
                _PIECE: pa.array([header], pa.large_binary()),
                **{name: pa.LargeListArray.from_arrays([0, len(stored)], stored) for name, stored in values.items()},
            }
        )

    @classmethod
    def of(cls, block: pa.Table) -> Piece:
        """Return the piece of a block. Its arrays are read-only where they share the block's memory."""
        piece, layouts = _head(block)
        return replace(
            piece,
            samples=block.column(_SAMPLES)[0].values.to_numpy(),
            passes=block.column(_PASSES)[0].values.to_numpy(),
            columns={
                name: _from_arrow(layout, block.column(_COLUMN + name)[0].values) for name, layout in layouts.items()
            },
        )


def piece_summary(block: pa.Table) -> Piece:
    """Return the piece of a block without its rows, but with their size."""
    return replace(_head(block)[0], size_bytes=block.nbytes)


class _Layout(NamedTuple):
    """How an array lies in a block."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()  # of a row
    kind: type | None = None  # of objects: `bytes` for a value each, `object` for one pickle of all


def _head(block: pa.Table) -> tuple[Piece, dict[str, _Layout]]:
    (packed,) = block.column(_PIECE)  # a second row would be lost without a word
    head: tuple[Piece, dict[str, _Layout]] = cloudpickle.loads(packed.as_buffer())
    return head


def _to_arrow(array: npt.NDArray[Any]) -> tuple[_Layout, pa.Array]:
    if array.dtype.hasobject:
        plain = array.ndim == 1 and all(type(value) is bytes for value in array)
        values, kind = (array, bytes) if plain else ([cloudpickle.dumps(array)], object)
        return _Layout(array.dtype, kind=kind), pa.array(values, pa.large_binary())
    width = array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
    content = pa.py_buffer(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return _Layout(array.dtype, array.shape[1:]), pa.Array.from_buffers(pa.binary(width), len(array), [None, content])


def _from_arrow(layout: _Layout, stored: pa.Array) -> npt.NDArray[Any]:
    if layout.kind is bytes:
        return object_array(stored.to_pylist())
    if layout.kind is object:
        return cast(npt.NDArray[Any], cloudpickle.loads(stored[0].as_buffer()))
    data = stored.buffers()[1]
    return np.ndarray((len(stored), *layout.shape), layout.dtype, data, stored.offset * stored.type.byte_width)
