"""Predict with a trained run: check the request, find the parts that exist, and compute the rest on workers."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainwright.core import formatting
from trainwright.core.errors import DataError, JobError, StorageError
from trainwright.core.job import Job
from trainwright.core.plan import Plan
from trainwright.datasets.data_source import Index
from trainwright.datasets.dataset import Dataset, parquet
from trainwright.inference.inference_model import InferenceModel, inference_layout, trained_inference_model
from trainwright.inference.prediction_files import (
    MANIFEST,
    PredictionManifest,
    Range,
    RangeQueue,
    check_schema,
    default_range_rows,
    is_part_name,
    missing_ranges,
    split_ranges,
)
from trainwright.inference.prediction_worker import OutputTransform, Predictor, PredictorConfig, StoredPart
from trainwright.reporting.progress_bar import RowProgress
from trainwright.storage.object_store import Store, open_store
from trainwright.worker.worker_config import pickle_job

ATTEMPTS = 3  # workers that may be lost with one range
_HANG_S = 300.0  # for the next batch of a range, by default
_BATCH_ROWS = 1024  # where the job's global batch is larger


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predictions in a folder: parquet parts whose rows, in the order of their names, are the samples in order.

    Attributes:
        uri: the folder.
        rows: predicted.
        parts: files.
        computed: parts that this call computed; the others were there.
        run: that trained the model.
        step: of the checkpoint.
    """

    uri: str
    rows: int
    parts: int
    computed: int
    run: str
    step: int

    def dataset(self) -> Dataset:
        """Return the predictions as a data set: `sample`, the columns kept, the outputs."""
        return parquet(self.uri)

    def __str__(self) -> str:
        done = f"{formatting.count(self.parts, 'part')}, {self.computed:,} of them computed now"
        return f"{formatting.count(self.rows, 'row')} in {self.uri} ({done}), {self.run} at step {self.step:,}"


@dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    """A request for predictions, checked as far as is possible without a cluster.

    Attributes:
        subject: the model and its data set.
        index: of the data set.
        folder: where the parts go.
        manifest: to be stored there.
        form: in which outputs are written; None writes them as they are.
        ranges: all ranges of rows.
        waiting: the ranges without a part.
    """

    subject: InferenceModel
    index: Index
    folder: Store
    manifest: PredictionManifest
    form: OutputTransform | None
    ranges: tuple[Range, ...]
    waiting: tuple[Range, ...]


def predict(
    job: Job,
    data: Any = None,
    *,
    to: str,
    columns: Iterable[str] | None = None,
    keep: Iterable[str] = (),
    step: int | Literal["best"] | None = None,
    workers: int | None = None,
    batch_size: int | None = None,
    range_rows: int | None = None,
    fresh: bool = False,
    verbose: bool = False,
) -> Prediction:
    """See `trainwright.api.predict`."""
    _check_numbers(workers=workers, batch_size=batch_size, range_rows=range_rows)
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
    asked = _manifest(subject, index, columns=columns, keep=keep, form="" if form is None else str(form))
    asked = replace(asked, range_rows=range_rows or (old.range_rows if old else default_range_rows(index, row_bytes)))
    if old is not None:
        old.check(asked, folder.uri)
    ranges = split_ranges(index, asked.range_rows)
    return PredictionRequest(
        subject=subject, index=index, folder=folder, manifest=asked, form=form, ranges=ranges,
        waiting=_waiting(ranges, folder, known=old is not None, fresh=fresh),
    )  # fmt: skip


def _manifest(subject: InferenceModel, index: Index, **request: Any) -> PredictionManifest:
    checkpoint = subject.weights.checkpoint.path if subject.weights else ""
    return PredictionManifest(
        run=subject.job.name, checkpoint=checkpoint, checkpoint_sha256=subject.sha256, step=subject.step,
        job=subject.facts(index), data_sha256=index.hash, rows=index.rows, range_rows=0, **request,
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
        workers, batch_size, fresh, verbose: as of `trainwright.api.predict`.
        note: called with problems that were repaired.

    Raises:
        DataError: an existing part is damaged; names it.
        TrainwrightError: as `trainwright.api.predict`.
    """
    from trainwright.ray_cluster.discovery import connect, discover

    _check_parts(question)
    if question.waiting:
        job = question.subject.job
        rows = batch_size or min(job.batch_size, _BATCH_ROWS)
        connect(verbose)
        plan, size = inference_layout(
            question.subject, question.index, len(question.waiting), discover(possible=True), workers
        )
        _store_request(question, fresh)
        done = question.index.rows - sum(part.rows for part in question.waiting)
        with RowProgress(question.index.rows, done) as told:
            if size:
                _compute(
                    question, _order(question, question.subject.single_process_job or job, plan, rows), size, told, note
                )
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


def _check_numbers(**numbers: int | None) -> None:
    problems = [f"{name}={value}: use 1 or more" for name, value in numbers.items() if value is not None and value < 1]
    if problems:
        raise JobError(problems)


def _check_parts(question: PredictionRequest) -> None:
    """Raise DataError for a part that is not complete, or has other rows than its name says."""
    rows = {part.name: part.rows for part in question.ranges if part not in set(question.waiting)}
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
    return PredictorConfig(
        job=pickle_job(job),
        plan=plan,
        index=question.index,
        weights=None if job is question.subject.single_process_job else question.subject.weights,
        folder=question.folder,
        outputs=question.manifest.columns,
        keep=question.manifest.keep,
        batch_size=batch_size,
        form=question.form,
        base=question.subject.base,
    )


def _compute(
    question: PredictionRequest,
    order: PredictorConfig,
    size: int,
    meter: RowProgress,
    note: Callable[[str], object],
) -> None:
    """Compute missing ranges on a pool of workers that each hold the whole model."""
    from trainwright.inference.actor_pool import PoolTimeouts, PredictorPool
    from trainwright.ray_cluster.discovery import discover

    job, placement = question.subject.job, order.plan.placement
    timeouts = PoolTimeouts(
        place_s=job.start_deadline_s(discover(possible=True)), hang_s=job.recovery.hang_deadline_s or _HANG_S
    )
    device = placement.accelerator or f"CPU, {formatting.count(placement.threads, 'thread')} each"
    meter.note(
        f"{question.manifest.who}: {formatting.count(len(question.waiting), 'part')} of "
        f"{len(question.ranges):,} to compute on {formatting.count(size, 'worker')} ({device})"
    )

    def mended(text: str) -> None:
        meter.note(text)
        note(text)

    work, schema = RangeQueue(question.waiting, ATTEMPTS), _schema(question)
    PredictorPool(order, size, work, timeouts, schema=schema, on_rows=meter.add, on_note=mended).run()


def _compute_together(question: PredictionRequest, order: PredictorConfig, meter: RowProgress) -> None:
    """Read missing ranges in this process, have the ranks of a layout predict them, and store the parts."""
    from trainwright.inference.sharded_inference import ShardedModel

    schema, subject, weights = _schema(question), question.subject, question.subject.weights
    store, checkpoint = (weights.runs, weights.checkpoint) if weights else (question.folder, None)
    with ShardedModel(
        subject.job,
        order.plan,
        store,
        checkpoint,
        train=question.index,
        outputs=order.outputs,
        base=subject.base,
        note=meter.note,
    ) as ranks:
        predictor = Predictor(order, lambda batch: ranks.predict(batch.columns))
        for part in question.waiting:
            for answer in predictor.compute(part):
                if isinstance(answer, StoredPart):
                    check_schema(schema or answer.schema, answer.schema, part)
                    schema = schema or dict(answer.schema)
                else:
                    meter.add(answer)


def _schema(question: PredictionRequest) -> dict[str, str]:
    """Return types by column name of the existing parts."""
    import pyarrow.parquet as pq

    there = [part for part in question.ranges if part not in set(question.waiting)]
    if not there:
        return {}
    schema = pq.read_schema(io.BytesIO(question.folder.get(there[0].name)))
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
        uri=folder.uri,
        rows=question.index.rows,
        parts=len(question.ranges),
        computed=len(question.waiting),
        run=question.manifest.run,
        step=question.manifest.step,
    )
