"""Predict with a trained run: check the request, find the parts that exist, and compute the rest on workers.

    <to>/_PREDICTIONS.json                                  the request; a different one is refused
    <to>/part-000000000000-000000001024.parquet             rows 0 to 1023, complete or missing

Names sort in the order of the samples.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import pyarrow.parquet as pq

from trainwright.core import formatting
from trainwright.core.errors import DataError, JobError, RunConflict, StorageError
from trainwright.datasets.dataset import Dataset, parquet
from trainwright.datasets.formats.file_system import is_transient
from trainwright.datasets.sample_order import Lanes
from trainwright.inference.inference_model import InferenceModel, inference_layout, trained_inference_model
from trainwright.inference.prediction_worker import (
    OutputTransform,
    Predictor,
    PredictorConfig,
    Range,
    StoredPart,
    check_schema,
)
from trainwright.planning.job_description import description_changes
from trainwright.planning.job_file import load_job
from trainwright.ray_cluster.discovery import connect, discover
from trainwright.reporting.progress_bar import RowProgress
from trainwright.storage.object_store import Store, open_store
from trainwright.worker.worker_config import pickle_job

if TYPE_CHECKING:
    from trainwright.core.engine import CheckpointChoice
    from trainwright.core.job import Job
    from trainwright.core.plan import Plan
    from trainwright.datasets.data_source import Index

MANIFEST = "_PREDICTIONS.json"
_FORMAT = 1
_PART = re.compile(r"part-(\d{12})-(\d{12})\.parquet")
_RANGE_BYTES, _RANGE_ROWS = 64 << 20, (256, 1 << 16)
_FEW_RANGES = 64  # of a small data set, so that many workers have something to do
ATTEMPTS = 3  # workers that may be lost with one range
_HANG_S = 300.0  # for the next batch of a range, by default
_BATCH_ROWS = 1024  # where the job's global batch is larger


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predictions in a folder: parquet parts whose rows, in the order of their names, are the samples in order."""

    uri: str  # the folder
    rows: int  # predicted
    parts: int  # files
    computed: int  # parts that this call computed; the others were there
    run: str  # that trained the model
    step: int  # of the checkpoint

    def dataset(self) -> Dataset:
        """Return the predictions as a data set: `sample`, the columns kept, the outputs."""
        return parquet(self.uri)

    def __str__(self) -> str:
        done = f"{formatting.count(self.parts, 'part')}, {self.computed:,} of them computed now"
        return f"{formatting.count(self.rows, 'row')} in {self.uri} ({done}), {self.run} at step {self.step:,}"


@dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    """A request for predictions, checked as far as is possible without a cluster."""

    subject: InferenceModel  # the model and its data set
    index: Index  # of the data set
    folder: Store  # where the parts go
    manifest: PredictionManifest  # to be stored there
    form: OutputTransform | None  # in which outputs are written; None writes them as they are
    ranges: tuple[Range, ...]  # all ranges of rows
    waiting: tuple[Range, ...]  # the ranges without a part

    @property
    def stored(self) -> list[Range]:
        """The ranges with a part."""
        waiting = set(self.waiting)
        return [part for part in self.ranges if part not in waiting]


def predict(
    job: Job | str,
    data: Dataset | str | None = None,
    *,
    to: str,
    columns: Iterable[str] | None = None,
    keep: Iterable[str] = (),
    step: CheckpointChoice = None,
    workers: int | None = None,
    batch_size: int | None = None,
    range_rows: int | None = None,
    fresh: bool = False,
    verbose: bool = False,
) -> Prediction:
    """Compute the model's outputs for every row of a data set on the cluster, and store them as parquet parts.

    Where the run divided its model over workers, as many workers compute it in the same layout, and this process reads
    the rows and stores the parts. Otherwise, and with `workers`, a pool of workers reads and stores, each with the full
    model.

    The parts, in the order of their names, hold the samples in order: `sample` (int64, the row number), the kept
    columns, then `output`, or one column for each of several outputs. A part appears when it is complete; the same call
    continues an interrupted one and computes only missing parts. With `on_error="skip"`, a row that cannot be read has
    nulls, and a note says so; `skip_limit=` counts for each worker. The data is compared by names and sizes of its
    files and by a few of its rows: use `fresh` after you changed single rows.

    Args:
        data: a data set, or the path of parquet files; by default the job's evaluation set. It needs no targets.
        to: a folder, or `s3://`, `gs://`, `az://`; every node must be able to write there.
        columns: outputs to store, such as ("logits",); by default all.
        keep: columns of the data set to store with them.
        step: the checkpoint at this step, or "best" (see `tw.Checkpointing`); by default the newest.
        workers: of a pool; by default one for each accelerator or CPU slot of the cluster.
        batch_size: rows computed at once, by each worker or by all together; by default the job's, at most 1024.
        range_rows: most rows of a part; by default chosen by the size of a row.
        fresh: compute everything again.
        verbose: show Ray's own output.

    Raises:
        RunConflict: the folder holds predictions of another checkpoint, data set or other columns, or other files.
        TrainwrightError: the job, its data, its storage or the cluster is not right, or a range failed repeatedly.
    """
    job = load_job(job) if isinstance(job, str) else job
    numbers = {"workers": workers, "batch_size": batch_size, "range_rows": range_rows}
    problems = [f"{name}={value}: use 1 or more" for name, value in numbers.items() if value is not None and value < 1]
    if problems:
        raise JobError(problems)
    subject = trained_inference_model(job, _dataset(job, data), step)
    question = prediction_request(
        subject, to=to, columns=tuple(columns or ()), keep=tuple(keep), range_rows=range_rows, fresh=fresh
    )  # fmt: skip
    return run_request(question, workers=workers, batch_size=batch_size, fresh=fresh, verbose=verbose)


def prediction_request(
    subject: InferenceModel,
    *,
    to: str,
    columns: tuple[str, ...] = (),
    keep: tuple[str, ...] = (),
    form: OutputTransform | None = None,
    index: Index | None = None,
    content: str | None = None,
    range_rows: int | None = None,
    row_bytes: int = 0,
    fresh: bool = False,
) -> PredictionRequest:
    """Return a request for predictions. Checks all that can be checked without a cluster.

    Args:
        subject: the model and its data set.
        to: the folder.
        columns: outputs wanted; empty for all.
        keep: columns of the data set that go with them.
        form: in which outputs are written; its text is compared.
        index: of the data set, where it is known.
        content: `subject.content_hash` of it, where it is known.
        range_rows: rows of a part, at most; by default as they are there, or by the size of a row.
        row_bytes: of what is written for a row, where that may be much.
        fresh: compute again what the folder holds.

    Raises:
        JobError, DataError: no data, or a column is not in it.
        RunConflict: the folder holds something else.
        StorageError: the folder cannot be read.
    """
    index = index or subject.job.train.index()
    subject.check(index, keep)
    folder = open_store(to)
    stored = None if fresh else folder.find(MANIFEST)
    old = PredictionManifest.decode(stored, folder.uri_of(MANIFEST)) if stored is not None else None
    asked = PredictionManifest(
        run=subject.job.name, checkpoint=subject.weights.checkpoint.path if subject.weights else "",
        checkpoint_sha256=subject.sha256, step=subject.step, job=subject.facts(index), data_sha256=index.hash,
        content_sha256=subject.content_hash(index, keep) if content is None else content, rows=index.rows,
        columns=columns, keep=keep, range_rows=0, form="" if form is None else str(form),
    )  # fmt: skip
    asked = replace(asked, range_rows=range_rows or (old.range_rows if old else default_range_rows(index, row_bytes)))
    if old is not None:
        old.check(asked, folder.uri)
    ranges = split_ranges(index, asked.range_rows)
    return PredictionRequest(
        subject=subject, index=index, folder=folder, manifest=asked, form=form, ranges=ranges,
        waiting=_waiting(ranges, folder, known=old is not None, fresh=fresh),
    )  # fmt: skip


def run_request(
    question: PredictionRequest,
    *,
    workers: int | None = None,
    batch_size: int | None = None,
    fresh: bool = False,
    verbose: bool = False,
    note: Callable[[str], object] = lambda _: None,
) -> Prediction:
    """Compute what is missing: on a pool of workers, or in the layout of the run where that divides the model.

    Args:
        question: the request.
        workers, batch_size, fresh, verbose: as of `predict`.
        note: called with problems that were repaired, and with rows that could not be read.

    Raises:
        DataError: an existing part is damaged; names it.
        TrainwrightError: as `predict`.
    """
    _check_parts(question)
    if question.waiting:
        job = question.subject.job
        rows = batch_size or min(job.batch_size, _BATCH_ROWS)
        connect(verbose)
        plan, size = inference_layout(
            question.subject, question.index, len(question.waiting), discover(possible=True), workers
        )
        _store_request(question, fresh)
        done = sum(part.rows for part in question.stored)
        with RowProgress(question.index.rows, done) as told:
            if size:
                order = _order(question, question.subject.single_process_job or job, plan, rows)
                _compute(question, order, size, told, note)
            else:
                _compute_together(question, _order(question, job, plan, rows), told)
    return _finished(question)


def _store_request(question: PredictionRequest, fresh: bool) -> None:
    """Store the manifest; with `fresh`, delete older parts first. Raises RunConflict, StorageError."""
    folder, manifest = question.folder, question.manifest
    if fresh:
        # The manifest goes last: parts without one are refused, parts with another's would be taken for its own.
        folder.delete([name for name, _ in folder.list() if is_part_name(name)])
        folder.delete([MANIFEST])
    if not folder.create(MANIFEST, manifest.encode()):
        place = folder.uri_of(MANIFEST)
        PredictionManifest.decode(folder.get(MANIFEST), place).check(manifest, folder.uri)


def _dataset(job: Job, data: Any) -> Dataset:
    """The data set to predict: as given, the parquet files of a path, or the job's evaluation set."""
    chosen = job.evaluate if data is None else parquet(data) if isinstance(data, str) else data
    if not hasattr(chosen, "map_batches"):
        raise JobError(
            ["no data to predict: give data=, a data set or the path of parquet files"]
            if chosen is None
            else [f"data= is a {type(chosen).__name__}: use tw.datasets.parquet(...) or tw.datasets.table(...)"]
        )
    dataset: Dataset = chosen
    return dataset


def _check_parts(question: PredictionRequest) -> None:
    """Raise DataError for a part that is not complete, or has other rows than its name says."""
    rows = {part.name: part.rows for part in question.stored}
    if not rows:
        return
    try:
        index = parquet(question.folder.uri).index()
        found = Counter[str]()
        for group in index.groups:
            found[group.file.rpartition("/")[2]] += group.rows
        for name in rows:
            if found[name] != rows[name]:
                raise DataError(f"the part has {found[name]} of {rows[name]} rows", where=question.folder.uri_of(name))
    except DataError as error:
        cause = error.__cause__
        silent = isinstance(cause, OSError) and is_transient(cause)  # the store, which says nothing about the file
        if not silent and any(name in error.where for name in rows):
            error.remedy = "delete this file: the same call computes it again, and nothing else"
        raise


def _waiting(ranges: tuple[Range, ...], folder: Store, *, known: bool, fresh: bool) -> tuple[Range, ...]:
    """The ranges to compute. Parts without a manifest are nobody's, and refused unless they may be deleted."""
    names = [name for name, _ in folder.list()]
    if fresh:
        names = [name for name in names if not is_part_name(name)]
    open_ranges = missing_ranges(ranges if known else (), names, folder.uri)
    return open_ranges if known else ranges


def _order(question: PredictionRequest, job: Job, plan: Plan, batch_size: int) -> PredictorConfig:
    weights = None if job is question.subject.single_process_job else question.subject.weights
    return PredictorConfig(
        job=pickle_job(job), plan=plan, index=question.index, weights=weights, folder=question.folder,
        outputs=question.manifest.columns, keep=question.manifest.keep, batch_size=batch_size, form=question.form,
        base=question.subject.base,
    )  # fmt: skip


def _compute(
    question: PredictionRequest, order: PredictorConfig, size: int, meter: RowProgress, note: Callable[[str], object]
) -> None:
    """Compute missing ranges on a pool of workers that each hold the whole model."""
    from trainwright.inference.actor_pool import PredictorPool

    job, placement = question.subject.job, order.plan.placement
    device = placement.accelerator or f"CPU, {formatting.count(placement.threads, 'thread')} each"
    stored = len(question.stored)
    left_out = f"; {formatting.count(stored, 'part')} of {len(question.ranges):,} are stored already" if stored else ""
    meter.note(f"{question.manifest.who}: predicting on {formatting.count(size, 'worker')} ({device}){left_out}")

    def mended(text: str) -> None:
        meter.note(text)
        note(text)

    PredictorPool(
        order, size, question.waiting, attempts=ATTEMPTS, schema=_schema(question), on_rows=meter.add,
        on_note=mended,
        place_s=job.start_deadline_s(discover(possible=True)), hang_s=job.recovery.hang_deadline_s or _HANG_S,
    ).run()  # fmt: skip


def _compute_together(question: PredictionRequest, order: PredictorConfig, meter: RowProgress) -> None:
    """Read missing ranges in this process, have the ranks of a layout predict them, and store the parts."""
    from trainwright.inference.sharded_inference import ShardedModel

    schema, subject, weights = _schema(question), question.subject, question.subject.weights
    store, checkpoint = (weights.runs, weights.checkpoint) if weights else (question.folder, None)
    with ShardedModel(
        subject.job, order.plan, store, checkpoint, train=question.index, outputs=order.outputs, base=subject.base,
        note=meter.note,
    ) as ranks:  # fmt: skip
        predictor = Predictor(order, lambda batch: ranks.predict(batch.columns))
        for part in question.waiting:
            for answer in predictor.compute(part):
                if isinstance(answer, StoredPart):
                    check_schema(schema or answer.schema, answer.schema, part)
                    schema = schema or dict(answer.schema)
                    if answer.note:
                        meter.note(answer.note)
                else:
                    meter.add(answer)


def _schema(question: PredictionRequest) -> dict[str, str]:
    """Return types by column name of the existing parts."""
    if not question.stored:
        return {}
    schema = pq.read_schema(io.BytesIO(question.folder.get(question.stored[0].name)))
    return {field.name: str(field.type) for field in schema}


def _finished(question: PredictionRequest) -> Prediction:
    """Return the prediction. Raises StorageError for parts that this process cannot see."""
    folder = question.folder
    unseen = missing_ranges(question.ranges, (name for name, _ in folder.list()), folder.uri)
    if unseen:
        raise StorageError(
            f"{formatting.count(len(unseen), 'part')} were written on other nodes and cannot be seen here",
            where=folder.uri,
            remedy="give a folder that all nodes share, or s3://, gs:// or az://",
        )
    return Prediction(
        uri=folder.uri, rows=question.index.rows, parts=len(question.ranges), computed=len(question.waiting),
        run=question.manifest.run, step=question.manifest.step,
    )  # fmt: skip


# --- The ranges of a data set and their parts -------------------------------------------------------------------------


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

    Raises:
        RunConflict: a file is none of ours, and would be read as a part.
    """
    expected = {part.name for part in ranges}
    found = {name for name in names if not any(item.startswith(("_", ".")) for item in name.split("/"))}
    strange = sorted(found - expected)
    if strange:
        raise RunConflict(
            f"the folder holds files that are not parts of these predictions, such as {strange[0]}",
            where=folder,
            remedy="give another folder"
            + ("" if any(not is_part_name(name) for name in strange) else ", or fresh=True"),
        )
    return tuple(part for part in ranges if part.name not in found)


def is_part_name(name: str) -> bool:
    """Whether a file has the name of a part."""
    return _PART.fullmatch(name) is not None


# --- The manifest -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PredictionManifest:
    """The request that a folder belongs to. Two calls with equal manifests write the same parts."""

    run: str  # name of the run that trained the model, or of what else predicts
    checkpoint: str  # its folder within the run; empty where the weights are of none
    checkpoint_sha256: str  # of the checkpoint's own manifest, or of the weights
    step: int  # of the checkpoint
    # the job's fields that say what is computed, in words (`describe`); `train` is the data set, with digests of its
    # rows and transforms
    job: Mapping[str, str]
    data_sha256: str  # hash of the data set's index
    rows: int  # of the data set
    columns: tuple[str, ...]  # outputs asked for; empty for all
    keep: tuple[str, ...]  # columns of the data set that are kept
    range_rows: int  # rows of a range, at most
    form: str = ""  # in which the outputs are kept; empty for as they are
    content_sha256: str = ""  # of a few rows (`Dataset.sampled_hash`)

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
            facts.update({name: facts[name][:12] for name in ("data_sha256", "content_sha256", "checkpoint_sha256")})
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
