"""One worker of a prediction: it holds the model, computes ranges of rows and stores each as a part. Does not use Ray.

`PredictorProcess` becomes an actor. Our errors are among its answers, so that Ray does not wrap them.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from trainwright.core.data import Batch, Columns, single_rank_feed
from trainwright.core.engine import CheckpointRef, ModelSpec
from trainwright.core.errors import JobError, TrainwrightError
from trainwright.core.initial_weights import WeightSource
from trainwright.core.job import Job
from trainwright.core.plan import Plan
from trainwright.datasets.data_source import Index
from trainwright.datasets.dataset import first_batch
from trainwright.datasets.formats.parquet_writer import tensor_column
from trainwright.datasets.loading.bad_samples import SkippedSample, SkippingReader
from trainwright.datasets.loading.batch_loader import ReadAhead, TransformedRows
from trainwright.storage.checkpoints import CheckpointReader, read_manifest
from trainwright.storage.object_store import Store
from trainwright.strategies import single_rank_engine
from trainwright.worker.worker_config import unpickle_job

SAMPLE = "sample"


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


OutputTransform = Callable[[Columns], Columns]
"""form(the model's outputs for some rows) -> the columns that are written."""


@dataclass(frozen=True, kw_only=True)
class CheckpointWeights:
    """A checkpoint of a run."""

    runs: Store  # store with the run
    run: str  # its name
    checkpoint: CheckpointRef  # the checkpoint

    def __str__(self) -> str:
        return f"{self.run}, {self.checkpoint.path}"  # not the folder, which can differ

    def reader(self) -> CheckpointReader:
        """Return a reader of the weights. Raises CheckpointError."""
        manifest = read_manifest(self.runs, self.run, self.checkpoint)
        return CheckpointReader(self.runs, self.run, self.checkpoint, manifest, weights_only=True)


@dataclass(frozen=True, kw_only=True)
class PredictorConfig:
    """What a new process needs to predict."""

    job: bytes  # the pickled job; its `train` is the data set to predict
    plan: Plan  # of one rank
    index: Index  # of the data set
    weights: CheckpointWeights | None  # loaded into the model; None where model() brings them
    folder: Store  # where the parts go
    outputs: tuple[str, ...]  # those wanted; empty for all
    keep: tuple[str, ...]  # columns of the data set that go with them
    batch_size: int  # rows given to the model at once
    form: OutputTransform | None = None  # in which the outputs are written; None writes them as they are
    # files of the parameters that the checkpoint does not hold; None where it holds all
    base: WeightSource | None = None


class StoredPart(NamedTuple):
    """A part that is stored."""

    schema: Mapping[str, str]  # types by column name
    note: str = ""  # about rows that could not be read


OutputFunction = Callable[[Batch], Sequence[Columns]]
"""outputs(batch) -> the model's outputs for its rows, in order, in pieces."""


def order_outputs(order: PredictorConfig) -> OutputFunction:
    """Return the configured model in this process. Raises as `local_outputs`."""
    job = unpickle_job(order.job)
    spec = job.model_spec(1, partial(first_batch, job.train, order.index, _names(job, order)), weights=order.base)
    return local_outputs(replace(spec, outputs=order.outputs), order.plan, order.weights)


def local_outputs(
    spec: ModelSpec, plan: Plan, weights: CheckpointWeights | None, *, guest: bool = False
) -> OutputFunction:
    """Return a model in this process, on one device; `guest` where the process does other work too.

    Raises:
        CheckpointError, UserCodeError, JobError: the model cannot be built, or its weights do not fit.
    """
    engine = single_rank_engine(spec, plan, guest=guest)
    if weights is not None:
        engine.load(weights.reader())
    return lambda batch: [engine.predict_step(single_rank_feed(batch))]


class Predictor:
    """Applies a model to ranges of a data set.

    Raises:
        DataError: the source cannot be opened.
    """

    def __init__(self, order: PredictorConfig, outputs: OutputFunction) -> None:
        self._order, self._outputs = order, outputs
        job = unpickle_job(order.job)
        names, skipper = _names(job, order), None
        self._skipped = dict[int, SkippedSample]()
        if job.data.on_error == "skip":
            skipper = SkippingReader(job.recovery.skip_limit, self._skip, "correct the data, or raise skip_limit")
        self._rows = TransformedRows(
            job.train, job.train.reader(order.index, names), names, seed=job.training.seed, skipper=skipper
        )

    def compute(self, part: Range) -> Iterator[int | StoredPart]:
        """Compute a range and store it. Yields the rows of each batch, and at the end the stored part.

        Rows that are skipped have nulls, except for their number.

        Raises:
            DataError, UserCodeError, JobError: an error of the data, its transforms or the model.
            StorageError: the part could not be written.
        """
        kept: list[Columns] = []
        outputs: list[Columns] = []
        masks: list[npt.NDArray[np.bool_]] = []
        with closing(ReadAhead(self._batches(part), name="trainwright-predict")) as batches:
            for batch, mask in batches:
                pieces = self._outputs(batch)
                outputs.extend(pieces if self._order.form is None else map(self._order.form, pieces))
                kept.append({name: batch.columns[name] for name in self._order.keep})
                masks.append(mask)
                yield batch.rows
        good = np.concatenate(masks)
        table = part_table(part, concatenate_outputs(kept, part), concatenate_outputs(outputs, part))
        if not good.all():
            table = _with_nulls(table, good)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        self._order.folder.put(part.name, sink.getvalue().to_pybytes())
        yield StoredPart({field.name: str(field.type) for field in table.schema}, self._note(part, good))

    def _batches(self, part: Range) -> Iterator[tuple[Batch, npt.NDArray[np.bool_]]]:
        """The range's rows in order, transformed, and which of them are good."""
        for start in range(part.start, part.stop, self._order.batch_size):
            samples = np.arange(start, min(start + self._order.batch_size, part.stop), dtype=np.int64)
            columns, good = self._rows.read(samples)
            yield Batch(columns=columns, weights=np.ones(len(samples)), samples=samples), good

    def _skip(self, skipped: SkippedSample) -> None:
        self._skipped[skipped.sample] = skipped

    def _note(self, part: Range, good: npt.NDArray[np.bool_]) -> str:
        """Return which rows of a part have nulls, and why; empty for none."""
        if good.all():
            return ""
        first = self._skipped[part.start + int(np.argmin(good))]
        what = f"{part}: {int((~good).sum())} of {part.rows} cannot be read and have nulls"
        return f"{what}; sample {first.sample}: {first.error} ({first.where})"


class PredictorProcess:
    """Answers are `value | TrainwrightError`."""

    def __init__(self) -> None:
        self._node = f"{socket.gethostname()}, pid {os.getpid()}"
        self._predictor: Predictor | None = None

    def hello(self) -> str:
        """Return the node and process id, in words."""
        return self._node

    def load(self, order: PredictorConfig) -> TrainwrightError | None:
        """Build the model and load the checkpoint. Returns the error, if any."""
        try:
            self._predictor = Predictor(order, order_outputs(order))
        except Exception as error:
            return located_error(error, self._node)
        return None

    def compute(self, part: Range) -> Iterator[int | StoredPart | TrainwrightError]:
        """As `Predictor.compute`; the last answer can be an error."""
        assert self._predictor is not None, "load comes first"
        try:
            yield from self._predictor.compute(part)
        except Exception as error:
            yield located_error(error, f"{part} on {self._node}")


def located_error(error: Exception, where: str) -> TrainwrightError:
    """Return an error of ours with the place added; any other exception becomes one, with its traceback."""
    if isinstance(error, TrainwrightError):
        error.where = f"{error.where}; {where}" if error.where else where
        return error
    return TrainwrightError(
        f"{type(error).__name__}: {error}", where=where, detail="".join(traceback.format_exception(error))
    )


def _names(job: Job, order: PredictorConfig) -> tuple[str, ...] | None:
    """The columns to read; None for all."""
    return None if job.columns is None else tuple(dict.fromkeys((*job.columns, *order.keep)))


# --- The columns of a part --------------------------------------------------------------------------------------------


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


def _with_nulls(table: pa.Table, good: npt.NDArray[np.bool_]) -> pa.Table:
    """Return a part with nulls in all columns but `sample` where `good` (rows,) is False."""
    places = pa.array(np.arange(table.num_rows), mask=~good)  # `take` gives null where the place is null
    return table.take(places).set_column(0, table.schema.field(SAMPLE), table[SAMPLE])


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
