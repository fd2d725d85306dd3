"""The files of predictions: ranges of rows, one part for each, the manifest, and the queue of open ranges. Pure.

    <to>/_PREDICTIONS.json                                  the request; a different one is refused
    <to>/part-000000000000-000000001024.parquet             rows 0 to 1023, complete or missing

Names sort in the order of the samples.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainwright.core.data import Columns
from trainwright.core.errors import HangError, JobError, RunConflict, StorageError, TrainwrightError, WorkerLost
from trainwright.datasets.data_source import Index
from trainwright.datasets.formats.parquet_writer import tensor_column
from trainwright.datasets.sample_order import Lanes
from trainwright.planning.job_description import description_changes

MANIFEST = "_PREDICTIONS.json"
SAMPLE = "sample"

_FORMAT = 1
_PART = re.compile(r"part-(\d{12})-(\d{12})\.parquet")
_RANGE_BYTES, _RANGE_ROWS = 64 << 20, (256, 1 << 16)
_FEW_RANGES = 64  # of a small data set, so that many workers have something to do


# --- ranges -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, order=True)
class Range:
    """Rows start..stop of a data set: the unit of work, and one part of the output."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    @property
    def name(self) -> str:
        """Name of the part's file."""
        return f"part-{self.start:012}-{self.stop:012}.parquet"

    def __str__(self) -> str:
        return f"rows {self.start:,} to {self.stop - 1:,}"


def default_range_rows(index: Index, row_bytes: int = 0) -> int:
    """Return the default rows of a range. It depends on nothing that changes, so that a later call divides equally.

    Args:
        index: of the data set.
        row_bytes: of what is written for a row, where that may be much; a worker holds those of a range.
    """
    least, most = _RANGE_ROWS
    fitting = min(_RANGE_BYTES // max(index.row_bytes, row_bytes, 1), most, -(-index.rows // _FEW_RANGES))
    return max(fitting, min(least, max(_RANGE_BYTES // max(row_bytes, 1), 1)))


def split_ranges(index: Index, rows: int) -> tuple[Range, ...]:
    """Return all ranges of a data set, in order: small row groups are joined up to `rows`, others split."""
    edges = Lanes(rows=index.rows, count=1, window=rows, groups=index.firsts).edges.tolist()
    return tuple(Range(start=start, stop=stop) for start, stop in pairwise(edges))


def missing_ranges(ranges: Sequence[Range], names: Iterable[str], folder: str) -> tuple[Range, ...]:
    """Return the ranges without a part.

    Args:
        ranges: all of them.
        names: of the files in the folder.
        folder: for the error.

    Raises:
        RunConflict: a file is none of ours, and would be read as a part.
    """
    expected = {part.name for part in ranges}
    found = {name for name in names if not any(item.startswith(("_", ".")) for item in name.split("/"))}
    strange = sorted(found - expected)
    if strange:
        raise RunConflict(
            f"the folder holds files that are no parts of these predictions, such as {strange[0]}",
            where=folder,
            remedy="give another folder"
            + ("" if any(not is_part_name(name) for name in strange) else ", or fresh=True"),
        )
    return tuple(part for part in ranges if part.name not in found)


def is_part_name(name: str) -> bool:
    """Whether a file has the name of a part."""
    return _PART.fullmatch(name) is not None


# --- manifest ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PredictionManifest:
    """The request that a folder belongs to. Two calls with equal manifests write the same parts.

    Attributes:
        run: name of the run that trained the model, or of what else predicts.
        checkpoint: its folder within the run; empty where the weights are of none.
        checkpoint_sha256: of the checkpoint's own manifest, or of the weights.
        step: of the checkpoint.
        job: the job's fields that say what is computed, in words (`describe`); `train` is the data set, with digests of
            its rows and transforms.
        data_sha256: hash of the data set's index.
        rows: of the data set.
        columns: outputs asked for; empty for all.
        keep: columns of the data set that are kept.
        range_rows: rows of a range, at most.
        form: in which the outputs are kept; empty for as they are.
    """

    run: str
    checkpoint: str
    checkpoint_sha256: str
    step: int
    job: Mapping[str, str]
    data_sha256: str
    rows: int
    columns: tuple[str, ...]
    keep: tuple[str, ...]
    range_rows: int
    form: str = ""

    @property
    def who(self) -> str:
        """The model, in words."""
        return f"{self.run} at step {self.step:,}" if self.checkpoint else self.run

    def encode(self) -> bytes:
        """Return the manifest as it is stored."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes, where: str) -> Self:
        """Return a stored manifest. Raises StorageError for anything else."""
        try:
            fields = json.loads(data)
            if fields.pop("format") != _FORMAT:
                raise ValueError("another version")
            return cls(**{**fields, "columns": tuple(fields["columns"]), "keep": tuple(fields["keep"])})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StorageError(
                f"the manifest cannot be read: {error}", where=where, remedy="give another folder, or fresh=True"
            ) from error

    def differences(self, asked: PredictionManifest) -> list[str]:
        """Return lines with the differences of a new request."""
        old, new = asdict(self), asdict(asked)
        lines = [line.replace("train: ", "data: ", 1) for line in description_changes(old.pop("job"), new.pop("job"))]
        for facts in (old, new):
            facts.update({name: facts[name][:12] for name in ("data_sha256", "checkpoint_sha256")})
        return lines + [f"{name}: {old[name]} -> {new[name]}" for name in new if old[name] != new[name]]

    def check(self, asked: PredictionManifest, folder: str) -> None:
        """Raise RunConflict, with the differences, where a new request is another one."""
        lines = self.differences(asked)
        if not lines:
            return
        again = f", or step={self.step} to go on with the same checkpoint" if asked.step != self.step else ""
        listed = "".join(f"\n    {line}" for line in lines)
        raise RunConflict(
            f"the folder holds predictions of something else:{listed}\n ",
            where=folder,
            remedy=f"give another folder, or fresh=True to compute them again{again}",
        )


# --- work -------------------------------------------------------------------------------------------------------------


class RangeQueue:
    """The ranges that wait for a worker.

    Args:
        ranges: to be computed, in order.
        attempts: workers that may be lost with one range before all is given up.
    """

    def __init__(self, ranges: Iterable[Range], attempts: int) -> None:
        self._waiting = deque(ranges)
        self._attempts = attempts
        self._out: set[Range] = set()
        self._lost: dict[Range, list[str]] = {}

    @property
    def open(self) -> int:
        """Ranges that are not done."""
        return len(self._waiting) + len(self._out)

    def take(self) -> Range | None:
        """Return the next range to compute; None while workers have all."""
        if not self._waiting:
            return None
        part = self._waiting.popleft()
        self._out.add(part)
        return part

    def done(self, part: Range) -> None:
        """Mark a range as computed and stored."""
        self._out.remove(part)

    def losses(self, part: Range) -> int:
        """Return how often a worker was lost with a range."""
        return len(self._lost.get(part, ()))

    def lost(self, part: Range, node: str, error: TrainwrightError) -> None:
        """Put a range whose worker was lost, or could not store it, at the front of the queue.

        Raises:
            WorkerLost: that happened too often with this range; names range and nodes. A StorageError as it is.
        """
        self._out.remove(part)
        tries = self._lost.setdefault(part, [])
        tries.append(node)
        if len(tries) < self._attempts:
            self._waiting.appendleft(part)
            return
        if isinstance(error, StorageError):
            raise error
        look = "at these rows and at the memory of the nodes, or set a smaller batch_size"
        if isinstance(error, HangError):
            look = "for a deadlock in the model or the transforms of the data, or raise hang_deadline_s"
        raise WorkerLost(
            f"{part} were given up: {len(tries)} workers were lost with them, the last because {error.what}",
            where=f"{part}; on {', '.join(tries)}",
            remedy=f"look {look}; the parts that are done stay, and the same call goes on from them",
            detail=error.detail,
        )


# --- columns ----------------------------------------------------------------------------------------------------------


def part_table(part: Range, kept: Columns, outputs: Columns) -> pa.Table:
    """A part: `sample` (int64, the row number), the columns kept, the outputs; (rows, ...) as fixed-shape tensors.

    Raises:
        JobError: two columns have one name, or an output is of a type that parquet has not.
    """
    taken = [name for name in outputs if name in kept or name == SAMPLE]
    if taken:
        raise JobError([f"the model's output {taken[0]!r} has the name of another column of the predictions"])
    columns = {SAMPLE: pa.array(np.arange(part.start, part.stop, dtype=np.int64))}
    for name, array in {**kept, **outputs}.items():
        columns[name] = arrow_column(name, array)
    return pa.table(columns)


def arrow_column(name: str, array: npt.NDArray[Any]) -> pa.Array:
    """Return an array (rows, *shape) as an Arrow column. Raises JobError where Arrow has no such type."""
    try:
        if array.ndim == 1:
            return pa.array(array.tolist() if array.dtype == object and len(array) else array)
        return tensor_column(array)
    except (pa.ArrowException, TypeError) as error:
        raise JobError([f"column {name!r} ({array.dtype}, shape {array.shape}) cannot be written: {error}"]) from error


def concatenate_outputs(pieces: Sequence[Columns], part: Range) -> dict[str, npt.NDArray[Any]]:
    """Return the outputs of a range's batches, concatenated.

    Raises:
        JobError: names, shapes or types differ between batches.
    """
    result: dict[str, npt.NDArray[Any]] = {}
    for piece in pieces[1:]:
        for name in piece.keys() ^ pieces[0].keys():
            raise JobError([f"the model gave the output {name!r} for some batches only"], where=str(part))
    for name in pieces[0]:
        arrays = [piece[name] for piece in pieces]
        shapes = sorted({array.shape[1:] for array in arrays})
        if len(shapes) > 1:
            raise JobError([_shape_mismatch(name, str(shapes[0]), str(shapes[-1]))], where=str(part))
        result[name] = np.concatenate(arrays)
    return result


def check_schema(first: Mapping[str, str], found: Mapping[str, str], part: Range) -> None:
    """Raise JobError where a part has other columns than the parts before it."""
    for name in sorted({*first, *found}):
        before, now = first.get(name, "missing"), found.get(name, "missing")
        if before != now:
            raise JobError([_shape_mismatch(name, before, now)], where=str(part))


def _shape_mismatch(name: str, one: str, other: str) -> str:
    """Return the error for outputs that cannot be columns of one table."""
    return (
        f"the output {name!r} is {one} for some rows and {other} for others: let the model give one shape for every "
        "row, for instance by padding its inputs to one length with tw.Pad(length=...)"
    )
