"""The state of a replica or of a server's shard; its form as a file, a npz archive without pickles; messages."""

from __future__ import annotations

import io
import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.reference.model import Arrays
from trainwright.core.errors import CheckpointError, TrainwrightError

_MODEL, _OPTIMIZER, _STEP = "model/", "optimizer/", "step"
_ROW_SLICE = re.compile(r"(?P<name>.+)\[(?P<start>\d+):\d+\]")
_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True, kw_only=True)
class ReferenceState:
    """All that training changes; replaced as a whole, never written into, so it is always sound.

    Attributes:
        parameters: by full name.
        slots: the optimizer's arrays, by its own names, which end with the parameter's.
        step: completed steps; None for a state that was built and never trained or loaded.
    """

    parameters: Arrays
    slots: Arrays
    step: int | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(value.nbytes for value in (*self.parameters.values(), *self.slots.values()))

    def copy(self) -> ReferenceState:
        """A deep copy."""
        return ReferenceState(
            parameters={name: value.copy() for name, value in self.parameters.items()},
            slots={name: value.copy() for name, value in self.slots.items()},
            step=self.step,
        )


def encode_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Named arrays as one message: the length of a JSON header, names, types and shapes in it, then the raw bytes."""
    solid = {name: np.ascontiguousarray(value).reshape(value.shape) for name, value in arrays.items()}
    if any(value.dtype.hasobject for value in solid.values()):
        names = sorted(name for name, value in solid.items() if value.dtype.hasobject)
        raise TrainwrightError(f"arrays of Python objects cannot be sent: {names}", remedy="make them numbers")
    header = json.dumps([(name, value.dtype.str, value.shape) for name, value in solid.items()]).encode()
    return b"".join((_LENGTH.pack(len(header)), header, *(value.tobytes() for value in solid.values())))


def decode_arrays(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """The named arrays of a message, writable. Nothing in it can execute."""
    start = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, kind, shape in json.loads(data[_LENGTH.size : start]):
        count = math.prod(shape)
        array = np.frombuffer(data, np.dtype(kind), count, start) if count else np.empty(0, np.dtype(kind))
        arrays[name] = array.reshape(shape).copy()
        start += array.nbytes
    return arrays


def to_bytes(state: ReferenceState) -> bytes:
    """A state as a npz archive: `model/<name>`, `optimizer/<slot>` and `step` (-1 for None)."""
    arrays = {
        **{f"{_MODEL}{name}": value for name, value in state.parameters.items()},
        **{f"{_OPTIMIZER}{name}": value for name, value in state.slots.items()},
        _STEP: np.array(-1 if state.step is None else state.step, np.int64),
    }
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def from_bytes(data: bytes | bytearray) -> ReferenceState:
    """The state that `to_bytes` wrote."""
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    step = int(arrays.pop(_STEP))
    return ReferenceState(
        parameters={name.removeprefix(_MODEL): value for name, value in arrays.items() if name.startswith(_MODEL)},
        slots={name.removeprefix(_OPTIMIZER): value for name, value in arrays.items() if name.startswith(_OPTIMIZER)},
        step=None if step < 0 else step,
    )


def row_slice_name(name: str, start: int, stop: int) -> str:
    """What the rows from `start` to before `stop` of an array are called."""
    return f"{name}[{start}:{stop}]"


def merge_states(parts: Iterable[ReferenceState]) -> ReferenceState:
    """One state of the disjoint shards of one step; the order does not matter. Rows come together again."""
    parameters: dict[str, Any] = {}
    slots: dict[str, Any] = {}
    steps: list[int | None] = []
    for part in parts:
        parameters.update(part.parameters)
        slots.update(part.slots)
        steps.append(part.step)
    step = max((step for step in steps if step is not None), default=0)
    return ReferenceState(parameters=_join_rows(parameters), slots=_join_rows(slots), step=step)


def _join_rows(arrays: Arrays) -> Arrays:
    """Arrays of which there are rows, as a whole."""
    whole: dict[str, Any] = {}
    cut: dict[str, dict[int, Any]] = {}
    for name, value in arrays.items():
        found = _ROW_SLICE.fullmatch(name)
        if found is None:
            whole[name] = value
        else:
            cut.setdefault(found["name"], {})[int(found["start"])] = value
    return whole | {name: np.concatenate([rows[start] for start in sorted(rows)]) for name, rows in cut.items()}


def fit_state(loaded: ReferenceState, built: ReferenceState) -> ReferenceState:
    """The arrays of `loaded` that `built` has, in its order; raises CheckpointError where they do not fit."""
    problems = [
        f"{name}: {_shape(found, name)} in the checkpoint, {value.shape} in the job"
        for own, found in ((built.parameters, loaded.parameters), (built.slots, loaded.slots))
        for name, value in own.items()
        if _shape(found, name) != value.shape
    ]
    if problems:
        raise CheckpointError(
            "the checkpoint holds another model or optimizer",
            detail="\n".join(problems),
            remedy="use the model and optimizer that wrote it, or start a run under a new name",
        )
    return ReferenceState(
        parameters={name: loaded.parameters[name] for name in built.parameters},
        slots={name: loaded.slots[name] for name in built.slots},
        step=loaded.step,
    )


def _shape(arrays: Arrays, name: str) -> tuple[int, ...] | None:
    """Shape of an array, None where there is none."""
    return arrays[name].shape if name in arrays else None
