"""What a trained run is good for: its model, and how good it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from trainwright.core.cluster import Cluster, Node
from trainwright.core.data import MetricSums
from trainwright.core.engine import CheckpointRef, Engine, ModelSpec, StateReader
from trainwright.core.errors import CheckpointError, DamagedCheckpoint, JobError
from trainwright.core.job import Job
from trainwright.core.plan import Plan
from trainwright.core.topology import Generation, Group, Peer
from trainwright.datasets.data_source import Index
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.first_row import first_batch
from trainwright.datasets.loading.batch_loader import BatchLoader
from trainwright.inference.inference_plan import plan_on_cluster, trained_plan
from trainwright.planning.planner import choose
from trainwright.planning.profiler import profile_job, profiler_of
from trainwright.storage.checkpoints import CheckpointReader, damage_note, newest_intact, read_manifest
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_log import RunLog
from trainwright.strategies import engine_class
from trainwright.strategies.distillation.multi_student import unwrap_student

_Value = TypeVar("_Value")


def load_model(job: Job, step: int | None = None) -> Any:
    """The job's model with the weights of its run's newest checkpoint, or of the one at `step`.

    Of a class of students of which one alone is wanted (`Students.alone`), that student.

    Raises:
        CheckpointError: there is none, or it does not fit the model.
    """
    model = job.model()
    with_checkpoint(job, step, lambda reader: profiler_of(model).take_weights(model, reader))
    return unwrap_student(model)


def export(job: Job, path: str, step: int | None = None) -> str:
    """Write the trained model to a file or folder for use elsewhere, in the form that the path's ending names.

    Raises:
        JobError: the ending names no form; says which there are.
        CheckpointError: there is no checkpoint, or it does not fit the model.
    """
    model = load_model(job, step)
    profiler_of(model).export(model, path)
    return path


def loading_code(file: str, overrides: list[str]) -> str:
    """The Python that loads the model of a run that was started from a job file."""
    if not overrides:
        return f"import trainwright as tw; model = tw.load_model({file!r})"
    return (
        "import trainwright as tw; from trainwright.planning.job_file import load_job; "
        f"model = tw.load_model(load_job({file!r}, {overrides!r}))"
    )


def evaluate(job: Job, step: int | None = None, *, here: bool = False, verbose: bool = False) -> dict[str, float]:
    """See `trainwright.api.evaluate`."""
    if job.evaluate is None:
        raise JobError(["evaluate= is missing: give the job a data set to evaluate on"])
    plan = None if here else trained_plan(job)
    return _evaluate_here(job, step) if plan is None or plan.workers == 1 else _evaluate_on(plan, job, step, verbose)


def _evaluate_on(plan: Plan, job: Job, step: int | None, verbose: bool) -> dict[str, float]:
    """On workers of the cluster. Only the evaluation set is read."""
    from trainwright.inference.sharded_inference import ShardedModel

    store, *_ = _named(job, step)
    index, judged, plan = job.evaluate.index(), job.replace(train=job.evaluate), plan_on_cluster(plan, job, verbose)

    def ranked(checkpoint: CheckpointRef) -> dict[str, float]:
        with ShardedModel(judged, plan, store, checkpoint, train=index, evaluate=index) as ranks:
            return ranks.evaluate().means()

    return _newest_loaded(job, step, ranked)


def _evaluate_here(job: Job, step: int | None) -> dict[str, float]:
    """In this process on one device, with the threads that it has: a model may be open here already."""
    alone, index, plan = local_plan(job, job.evaluate)
    engine = single_rank_engine(
        alone.model_spec(1, partial(first_batch, job.evaluate, index, job.columns)), plan, guest=True
    )
    with_checkpoint(job, step, engine.load)
    stream = BatchLoader(
        job.evaluate, index, batch_size=job.batch_size, epochs=1, seed=job.seed, shuffle=False, drop_last=False,
        feeding=plan.feed_of(0), columns=job.columns,
    )  # fmt: skip
    return sum((engine.evaluate_step(feed) for feed in stream.feeds(0)), MetricSums()).means()


def local_plan(job: Job, data: Dataset) -> tuple[Job, Index, Plan]:
    """The job for one CPU device of this machine, the index of a data set of its, and the plan. Raises as planning."""
    alone, index = job.alone(accelerator="cpu"), data.index()
    here = Cluster(nodes=(Node(name="here", cpus=os.cpu_count() or 1, memory_bytes=0),))
    return alone, index, choose(profile_job(alone, data, index), here, alone).chosen


def single_rank_engine(spec: ModelSpec, plan: Plan, *, guest: bool = False) -> Engine:
    """An engine of one rank, built, on the device that the plan asks for; a guest takes the threads that are there."""
    engine = engine_class(plan)()
    alone = Generation(token=0, number=0)
    peer = Peer(rank=0, address=engine.reserve(alone, "worker"))
    devices = ("cuda:0",) if plan.placement.accelerator == "GPU" else ("cpu",)
    threads = 0 if guest else plan.placement.threads
    engine.form(Group(generation=alone, rank=0, peers=(peer,), devices=devices, threads=threads))
    engine.build(spec, plan)
    return engine


def with_checkpoint(job: Job, step: int | None, load: Callable[[StateReader], _Value]) -> _Value:
    """What `load` makes of the weights of the run's newest whole checkpoint, or of the one at `step`.

    Each file is verified as it is read, and none before. Where one is damaged, the checkpoint before it is loaded.

    Raises:
        CheckpointError: there is none; names the steps that are kept.
    """

    def loaded(checkpoint: CheckpointRef) -> _Value:
        store = open_store(job.storage)
        manifest = read_manifest(store, job.name, checkpoint)
        return load(CheckpointReader(store, job.name, checkpoint, manifest, weights_only=True))

    return _newest_loaded(job, step, loaded)


def find_checkpoint(job: Job, step: int | None = None) -> tuple[Store, CheckpointRef]:
    """The run's newest checkpoint whose weights are whole, or the one at `step`, and the store that it is in.

    Raises:
        CheckpointError: there is none; names the steps that are kept.
    """
    store, kept, refs = _named(job, step)
    checkpoint, notes = newest_intact(store, job.name, refs, weights_only=True)
    if checkpoint is None:
        raise _none_whole(job, step, store, kept, notes)
    return store, checkpoint


def _newest_loaded(job: Job, step: int | None, load: Callable[[CheckpointRef], _Value]) -> _Value:
    store, kept, refs = _named(job, step)
    notes: list[str] = []
    for checkpoint in reversed(refs):
        try:
            return load(checkpoint)
        except DamagedCheckpoint as error:
            notes.append(damage_note(checkpoint, error))
            print(notes[-1], file=sys.stderr)
    raise _none_whole(job, step, store, kept, notes)


def _named(job: Job, step: int | None) -> tuple[Store, str, tuple[CheckpointRef, ...]]:
    """The store, the steps that are kept, and the checkpoints that are meant, newest last."""
    store = open_store(job.storage)
    entry = RunLog(store, job.name).head()
    named = entry.checkpoints if entry else ()
    return store, ", ".join(str(ref.step) for ref in named), tuple(ref for ref in named if step in (None, ref.step))


def _none_whole(job: Job, step: int | None, store: Store, kept: str, notes: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"the run {job.name!r} has no whole checkpoint" + (f" at step {step}" if step is not None else ""),
        where=store.uri_of(job.name),
        remedy=f"steps kept: {kept}" if kept else "train it first: trainwright fit",
        detail="\n".join(notes),
    )
