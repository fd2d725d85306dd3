"""Predict with a trained run: what is asked for, what is there already, and a pool of workers for the rest."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainwright import words
from trainwright.core.checkpoint import CheckpointRef
from trainwright.core.cluster import Cluster
from trainwright.core.errors import JobError, StorageError, nearest
from trainwright.core.job import Job
from trainwright.core.plan import Plan
from trainwright.datasets.index import Index
from trainwright.datasets.sources import Dataset, parquet
from trainwright.describe import describe
from trainwright.planner import choose, usable
from trainwright.predictions import (
    MANIFEST,
    SAMPLE,
    Manifest,
    Range,
    Work,
    check_schema,
    cut,
    is_part,
    missing,
    usual_rows,
)
from trainwright.predictor import Predictor, PredictOrder, Stored
from trainwright.profiling import profile_job
from trainwright.rowmeter import Meter
from trainwright.store import Store, open_store
from trainwright.strategies.question import place
from trainwright.trained import plan_here, replica_of, trained_plan
from trainwright.travel import pack
from trainwright.use import find_checkpoint

ATTEMPTS = 3  # workers that may be lost with one range
_HANG_S = 300.0  # for the next batch of a range, where the job says nothing
_BATCH_ROWS = 1024  # where the job's global batch is larger
_FACTS = ("train", "model", "inputs", "pad", "collate", "precision", "seed", "schedule")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predictions in a folder: parquet parts whose rows, in the order of their names, are the samples in order.

    Attributes:
        uri: the folder.
        rows: predicted.
        parts: files.
        computed: parts that this call computed; the others were there.
        run: whose model it was.
        step: of the checkpoint.
    """

    uri: str
    rows: int
    parts: int
    computed: int
    run: str
    step: int

    def dataset(self) -> Dataset:
        """The predictions as a data set: `sample`, the columns kept, the outputs."""
        return parquet(self.uri)

    def __str__(self) -> str:
        done = f"{words.count(self.parts, 'part')}, {self.computed:,} of them computed now"
        return f"{words.count(self.rows, 'row')} in {self.uri} ({done}), {self.run} at step {self.step:,}"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked for, checked as far as that can be without a cluster.

    Attributes:
        job: a job that reads the data set as its `train`, and needs neither targets nor a loss.
        index: of the data set.
        runs: store with the run.
        checkpoint: whose weights are used.
        folder: where the parts go.
        manifest: to be stored there.
        ranges: all of them.
        waiting: those without a part.
    """

    job: Job
    index: Index
    runs: Store
    checkpoint: CheckpointRef
    folder: Store
    manifest: Manifest
    ranges: tuple[Range, ...]
    waiting: tuple[Range, ...]


def predict(
    job: Job,
    data: Any = None,
    *,
    to: str,
    columns: Iterable[str] | None = None,
    keep: Iterable[str] = (),
    step: int | None = None,
    workers: int | None = None,
    batch_size: int | None = None,
    range_rows: int | None = None,
    fresh: bool = False,
    verbose: bool = False,
) -> Prediction:
    """See `trainwright.api.predict`."""
    from trainwright.discover import connect, discover

    _check_numbers(workers=workers, batch_size=batch_size, range_rows=range_rows)
    question = ask(
        job, data, to=to, columns=tuple(columns or ()), keep=tuple(keep), step=step, range_rows=range_rows, fresh=fresh
    )
    if question.waiting:
        rows, trained = batch_size or min(job.batch_size, _BATCH_ROWS), None if workers else trained_plan(job)
        divided = trained if trained is not None and replica_of(trained).workers > 1 else None
        connect(verbose)
        plan, size = (plan_here(divided, job), 0) if divided else plan_pool(question, discover(), workers)
        begin(question, fresh)
        with Meter(question.index.rows, question.index.rows - sum(part.rows for part in question.waiting)) as meter:
            order = _order(question, plan, rows)
            if divided:
                _compute_together(question, order, meter)
            else:
                _compute(question, order, size, meter)
    return _finished(question)


def ask(
    job: Job,
    data: Any,
    *,
    to: str,
    columns: tuple[str, ...],
    keep: tuple[str, ...],
    step: int | None,
    range_rows: int | None,
    fresh: bool,
) -> Question:
    """Everything that can be wrong and known before a cluster is needed.

    Raises:
        JobError, DataError: no data, or a column is not in it.
        CheckpointError: the run has none.
        RunConflict: the folder holds something else.
        StorageError: the folder cannot be read.
    """
    serving = _serving(job, _dataset(job, data))
    index = serving.train.index()
    _check_columns(serving, serving.train.fields(index), keep)
    runs, checkpoint = find_checkpoint(job, step)
    folder = open_store(to)
    stored = None if fresh else folder.find(MANIFEST)
    old = Manifest.decode(stored, folder.uri_of(MANIFEST)) if stored is not None else None
    facts = describe(serving, train=index)
    asked = Manifest(
        run=job.name,
        checkpoint=checkpoint.path,
        checkpoint_sha256=checkpoint.manifest_sha256,
        step=checkpoint.step,
        job={name: facts[name] for name in _FACTS},
        data_sha256=index.hash,
        rows=index.rows,
        columns=columns,
        keep=keep,
        range_rows=range_rows or (old.range_rows if old else usual_rows(index)),
    )
    if old is not None:
        old.check(asked, folder.uri)
    ranges = cut(index, asked.range_rows)
    return Question(
        job=serving, index=index, runs=runs, checkpoint=checkpoint, folder=folder, manifest=asked, ranges=ranges,
        waiting=_waiting(ranges, folder, known=old is not None, fresh=fresh),
    )  # fmt: skip


def plan_pool(question: Question, cluster: Cluster, workers: int | None) -> tuple[Plan, int]:
    """The plan of each worker, and how many there are: one for each accelerator or CPU slot, or as asked.

    Raises:
        ResourceError: more is asked for than the cluster has.
        PlanError, UserCodeError, JobError: the model cannot be run.
    """
    room = usable(cluster, question.job.replace(workers=workers) if workers else question.job)
    size = min(workers or room.slots, len(question.waiting))
    alone = question.job.alone()
    plan = choose(profile_job(alone, alone.train, question.index), cluster, alone).chosen
    return replace(plan, placement=place(room, size)), size


def begin(question: Question, fresh: bool) -> None:
    """Write down what is asked for; with `fresh`, older parts go first. Raises RunConflict, StorageError."""
    folder, manifest = question.folder, question.manifest
    if fresh:
        # The manifest goes last: parts without one are refused, parts under another's would be taken for its own.
        folder.delete([name for name, _ in folder.list() if is_part(name)])
        folder.delete([MANIFEST])
    if not folder.create(MANIFEST, manifest.encode()):
        place = folder.uri_of(MANIFEST)
        Manifest.decode(folder.get(MANIFEST), place).check(manifest, folder.uri)


# --- inside -----------------------------------------------------------------------------------------------------------


def _dataset(job: Job, data: Any) -> Dataset:
    """The data set to predict: as given, the parquet files of a path, or the job's evaluation set."""
    chosen = job.evaluate if data is None else parquet(data) if isinstance(data, str) else data
    if not hasattr(chosen, "map_batches"):
        raise JobError(
            ["there is nothing to predict: give data=, a data set or the path of parquet files"]
            if chosen is None
            else [f"data= is a {type(chosen).__name__}: use tw.datasets.parquet(...) or tw.datasets.table(...)"]
        )
    dataset: Dataset = chosen
    return dataset


def _serving(job: Job, data: Dataset) -> Job:
    """The job without what only training needs, so that the data may lack it too."""
    if not job.inputs:
        raise JobError(["inputs= is missing: name the columns given to the model to predict with it"])
    needed = job.collation.sources(job.arguments)
    return job.replace(
        train=data,
        evaluate=None,
        step=None,
        loss=_no_loss,
        metrics={},
        targets=(),
        schedule=None,
        pad={name: pad for name, pad in job.pad.items() if name in needed},
        workers=None,
        accumulation=1,
        inexact=("batch_norm",),  # its statistics are not taken from batches here
    )


def _no_loss(outputs: Any, targets: Any) -> Any:
    raise AssertionError("nothing is trained")


def _check_numbers(**numbers: int | None) -> None:
    problems = [f"{name}={value}: use 1 or more" for name, value in numbers.items() if value is not None and value < 1]
    if problems:
        raise JobError(problems)


def _check_columns(job: Job, fields: Mapping[str, Any], keep: tuple[str, ...]) -> None:
    problems = [
        f"{what}={name!r} is no column of the data: {nearest(name, fields)}"
        for what, names in (("inputs", job.input_columns), ("keep", keep))
        for name in names
        if name not in fields
    ]
    if SAMPLE in keep:
        problems.append(f"keep={SAMPLE!r}: the row number has that name; rename the data's column")
    if problems:
        raise JobError(problems)


def _waiting(ranges: tuple[Range, ...], folder: Store, *, known: bool, fresh: bool) -> tuple[Range, ...]:
    """The ranges to compute. Parts without a manifest are nobody's, and refused unless they may be deleted."""
    names = [name for name, _ in folder.list()]
    if fresh:
        names = [name for name in names if not is_part(name)]
    open_ranges = missing(ranges if known else (), names, folder.uri)
    return open_ranges if known else ranges


def _order(question: Question, plan: Plan, batch_size: int) -> PredictOrder:
    return PredictOrder(
        job=pack(question.job),
        plan=plan,
        index=question.index,
        runs=question.runs,
        checkpoint=question.checkpoint,
        folder=question.folder,
        outputs=question.manifest.columns,
        keep=question.manifest.keep,
        batch_size=batch_size,
    )


def _compute(question: Question, order: PredictOrder, size: int, meter: Meter) -> None:
    """Let a pool of workers, each with the whole model, compute what is missing."""
    from trainwright.pool import Patience, Pool

    job, placement = question.job, order.plan.placement
    patience = Patience(place_s=job.place_deadline_s, hang_s=job.hang_deadline_s or _HANG_S)
    device = placement.accelerator or f"CPU, {words.count(placement.threads, 'thread')} each"
    meter.note(
        f"{job.name} at step {question.checkpoint.step:,}: {words.count(len(question.waiting), 'part')} of "
        f"{len(question.ranges):,} to compute on {words.count(size, 'worker')} ({device})"
    )
    schema = _schema(question)
    Pool(
        order, size, Work(question.waiting, ATTEMPTS), patience, schema=schema, on_rows=meter.add, on_note=meter.note
    ).run()


def _compute_together(question: Question, order: PredictOrder, meter: Meter) -> None:
    """Read what is missing here, have the ranks of the trained layout predict it, and store it."""
    from trainwright.ranks import Ranks

    schema = _schema(question)
    with Ranks(
        question.job, order.plan, question.runs, question.checkpoint, train=question.index, outputs=order.outputs,
        note=meter.note,
    ) as ranks:  # fmt: skip
        predictor = Predictor(order, lambda batch: ranks.predict(batch.columns))
        for part in question.waiting:
            for answer in predictor.compute(part):
                if isinstance(answer, Stored):
                    check_schema(schema or answer.schema, answer.schema, part)
                    schema = schema or dict(answer.schema)
                else:
                    meter.add(answer)


def _schema(question: Question) -> dict[str, str]:
    """Types by column name of the parts that are there already."""
    import pyarrow.parquet as pq

    there = [part for part in question.ranges if part not in set(question.waiting)]
    if not there:
        return {}
    schema = pq.read_schema(io.BytesIO(question.folder.get(there[0].name)))
    return {field.name: str(field.type) for field in schema}


def _finished(question: Question) -> Prediction:
    """Make sure that every part can be seen from here."""
    folder = question.folder
    unseen = missing(question.ranges, (name for name, _ in folder.list()), folder.uri)
    if unseen:
        raise StorageError(
            f"{words.count(len(unseen), 'part')} were written on other nodes and cannot be seen here",
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
