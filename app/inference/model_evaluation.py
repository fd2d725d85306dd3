"""Evaluate the checkpoint of a run: on workers in the layout of its training, or in this process."""

from __future__ import annotations

import os
from functools import partial

from trainwright.core.cluster import Cluster, Node
from trainwright.core.data import MetricSums
from trainwright.core.engine import CheckpointRef
from trainwright.core.errors import JobError
from trainwright.core.job import Job
from trainwright.core.plan import Plan
from trainwright.datasets.data_source import Index
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.first_row import first_batch
from trainwright.datasets.loading.batch_loader import BatchLoader
from trainwright.inference.inference_plan import plan_on_cluster, trained_plan
from trainwright.planning.planner import choose
from trainwright.planning.profiler import profile_job
from trainwright.storage.checkpoints import checkpoints_of, load_newest, with_checkpoint
from trainwright.strategies.common.single_rank import single_rank_engine


def evaluate(job: Job, step: int | None = None, *, here: bool = False, verbose: bool = False) -> dict[str, float]:
    """See `trainwright.api.evaluate`."""
    if job.evaluate is None:
        raise JobError(["evaluate= is missing: give the job a data set to evaluate on"])
    plan = None if here else trained_plan(job)
    return _evaluate_here(job, step) if plan is None or plan.workers == 1 else _evaluate_on(plan, job, step, verbose)


def _evaluate_on(plan: Plan, job: Job, step: int | None, verbose: bool) -> dict[str, float]:
    """Evaluate on workers of the cluster. Only the evaluation set is read."""
    from trainwright.inference.sharded_inference import ShardedModel

    store, *_ = checkpoints_of(job, step)
    index, judged, plan = job.evaluate.index(), job.replace(train=job.evaluate), plan_on_cluster(plan, job, verbose)

    def ranked(checkpoint: CheckpointRef) -> dict[str, float]:
        with ShardedModel(judged, plan, store, checkpoint, train=index, evaluate=index) as ranks:
            return ranks.evaluate().means()

    return load_newest(job, step, ranked)


def _evaluate_here(job: Job, step: int | None) -> dict[str, float]:
    """Evaluate in this process on one device. The number of threads stays as it is."""
    alone, index, plan = local_plan(job, job.evaluate)
    engine = single_rank_engine(
        alone.model_spec(1, partial(first_batch, job.evaluate, index, job.columns)), plan, guest=True
    )
    with_checkpoint(job, step, engine.load)
    stream = BatchLoader(
        job.evaluate, index, batch_size=job.batch_size, epochs=1, seed=job.training.seed, shuffle=False,
        drop_last=False,
        feeding=plan.feed_of(0), columns=job.columns,
    )  # fmt: skip
    return sum((engine.evaluate_step(feed) for feed in stream.feeds(0)), MetricSums()).means()


def local_plan(job: Job, data: Dataset) -> tuple[Job, Index, Plan]:
    """Return the job for one CPU device of this machine, the data set's index, and the plan. Raises as planning."""
    alone, index = job.on_one_device(accelerator="cpu"), data.index()
    here = Cluster(nodes=(Node(name="here", cpus=os.cpu_count() or 1, memory_bytes=0),))
    return alone, index, choose(profile_job(alone, data, index), here, alone).chosen
