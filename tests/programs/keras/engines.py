"""Programs of Keras users through the engines, without Ray: one device in this process, several in one of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import trainwright as tw
from tests.support.conformance.harness import Pool, World
from tests.support.conformance.rank import Files
from trainwright.core.data import Feed, MetricSums, StepReport
from trainwright.core.engine import Engine, ModelSpec
from trainwright.core.metric_states import compute_states, metric_states, with_states
from trainwright.core.plan import SUMMED_BY, Mesh, Plan, WorkerResources
from trainwright.datasets.dataset import first_batch
from trainwright.datasets.loading.batch_loader import BatchLoader
from trainwright.strategies import single_rank_engine
from trainwright.strategies.tensorflow.training.checkpoint_files import take_weights

TENSORFLOW = "trainwright.strategies.tensorflow"
ENGINES = {
    ("step", 1): f"{TENSORFLOW}.strategy_engines:TensorFlowOneDevice",
    ("step", 2): f"{TENSORFLOW}.strategy_engines:Mirrored",
    ("fit", 1): f"{TENSORFLOW}.keras_fit:FitOneDevice",
    ("fit", 2): f"{TENSORFLOW}.keras_fit:FitMirrored",
}
ON_WORKERS = {
    "step": f"{TENSORFLOW}.strategy_engines:MultiWorkerMirrored",
    "fit": f"{TENSORFLOW}.fit_workers:FitMultiWorker",
}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run came to.

    Attributes:
        reports: of its steps.
        means: of an evaluation at its end; empty where the job has no evaluation set.
        files: of a checkpoint at its end.
        early: of one before its last two steps, of a run in this process.
        model: with its weights, where it was trained in this process.
    """

    reports: Sequence[StepReport]
    means: Mapping[str, float]
    files: Mapping[str, bytes]
    early: Mapping[str, bytes] = field(default_factory=dict)
    model: Any = None

    @property
    def losses(self) -> list[float]:
        """Of the steps."""
        return [report.loss for report in self.reports]


def plan_of(job: tw.Job, devices: int = 1) -> Plan:
    """One worker with so many devices."""
    return Plan(
        strategy="programs", engine=ENGINES[job.tensorflow.run, devices], mesh=Mesh(data=devices),
        batch_size=job.batch_size,
        placement=WorkerResources(cpus=1), devices_per_worker=devices,
        **{name: job.get(name) for name in SUMMED_BY if job.get(name) != job.default(name)},
    )  # fmt: skip


def spec_of(job: tw.Job, steps: int) -> ModelSpec:
    """What a worker gives its engine."""
    validation = partial(_validation, job) if job.tensorflow.run == "fit" and job.evaluate is not None else None
    return job.model_spec(steps, partial(first_batch, job.train, job.train.index(), job.columns), validation)


def _validation(job: tw.Job) -> list[Feed]:
    """The share of this worker, as TF_CONFIG numbers it."""
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    workers = sum(map(len, config.get("cluster", {}).values())) or 1
    task = config.get("task", {"type": "chief", "index": 0})
    rank = task["index"] + (task["type"] == "worker")
    return feeds(job, replace(plan_of(job), mesh=Mesh(data=workers)), evaluate=True, rank=rank)


def feeds(job: tw.Job, plan: Plan, *, evaluate: bool = False, rank: int = 0) -> list[Feed]:
    """Of the whole run, or of an evaluation."""
    dataset, feeding = job.evaluate if evaluate else job.train, plan.feed_of(rank)
    stream = BatchLoader(dataset, columns=job.columns, feeding=feeding, **job.ordering(evaluate=evaluate))
    return list(stream.feeds(0))


def train(job: tw.Job, files: Mapping[str, bytes] | None = None, steps: slice = slice(None)) -> Trained:
    """Train on one device of this process, from a checkpoint or from the start."""
    plan = plan_of(job)
    every = feeds(job, plan)
    engine = single_rank_engine(spec_of(job, len(every)), plan, guest=True)
    if files is None:
        engine.transfer([])
    else:
        engine.load(Files(files))
    engine.warm(every[steps][0])
    reports: list[StepReport] = []
    early: Mapping[str, bytes] = {}
    for feed in every[steps]:
        if feed is every[steps][-2:][0]:
            early = _saved(engine)
        reports.append(engine.train_step(feed))
        if reports[-1].finished:
            break
    judged = feeds(job, plan, evaluate=True) if job.evaluate is not None else []
    states = metric_states(job.metrics)
    sums = with_states(sum((engine.evaluate_step(feed, states) for feed in judged), MetricSums()), states)
    means = compute_states(sums).means()
    return Trained(
        reports=reports, means=means, files=_saved(engine), early=early,
        model=engine.replica.model,  # type: ignore[attr-defined]
    )  # fmt: skip


def _saved(engine: Engine) -> Mapping[str, bytes]:
    files = Files()
    engine.save(engine.snapshot(), files)
    return files.files


def weights_of(model: Any, trained: Trained) -> list[Any]:
    """Of a checkpoint, in a model of its shape."""
    take_weights(model, Files(trained.files))
    found: list[Any] = model.get_weights()
    return found


def train_mirrored(pool: Pool, job: tw.Job) -> Trained:
    """Train on two devices of another process; the job's functions are found by their names there."""
    plan = plan_of(job, devices=2)
    every = feeds(job, plan)
    with World(pool, "tensorflow", plan, spec_of(job, len(every)), reusable=False) as world:
        world.start([every[0]])
        (reports,) = world.train([[feed] for feed in every])
        judged = feeds(job, plan, evaluate=True) if job.evaluate is not None else []
        means: Mapping[str, float] = {}
        if judged:
            (sums,) = world.every("evaluate", lambda rank: (judged,))
            means = compute_states(sums).means()
        return Trained(reports=reports, means=means, files=world.files())


def train_on_workers(pool: Pool, given: tw.Job, workers: int = 2) -> Trained:
    """Train on workers of one device each; the job's functions are found by their names there."""
    (trained,) = train_each_on_workers(pool, [given], workers)
    return trained


def train_each_on_workers(pool: Pool, jobs: Sequence[tw.Job], workers: int = 2) -> Iterator[Trained]:
    """Train jobs of one kind and batch size, one after the other on the same workers."""
    plan = replace(plan_of(jobs[0]), engine=ON_WORKERS[jobs[0].tensorflow.run], mesh=Mesh(data=workers))
    specs = [spec_of(given, len(_shares(given, plan))) for given in jobs]
    with World(pool, "tensorflow", plan, specs[0], reusable=False) as world:
        world.form()
        for given, spec in zip(jobs, specs, strict=True):
            if spec is not specs[0]:
                world.rebuild(spec)
            yield _trained(world, given)


def _trained(world: World, given: tw.Job) -> Trained:
    shares = _shares(given, world.plan)
    judged = _shares(given, world.plan, evaluate=True) if given.evaluate is not None else []
    world.settle(0, shares[0])
    reports: list[StepReport] = []
    for share in shares:
        found = [report for (report,) in world.train([share])]
        assert all(report == found[0] for report in found), "all workers report the same"
        reports.append(found[0])
        if found[0].finished:
            break
    sums = world.every("evaluate", lambda rank: ([step[rank] for step in judged],)) if judged else []
    return Trained(reports=reports, means=compute_states(sum(sums, MetricSums())).means(), files=world.files())


def _shares(given: tw.Job, plan: Plan, *, evaluate: bool = False) -> list[list[Feed]]:
    """Of each step, each worker's feed."""
    ranks = [feeds(given, plan, evaluate=evaluate, rank=rank) for rank in range(plan.workers)]
    return [list(step) for step in zip(*ranks, strict=True)]


def epochs(losses: Sequence[float], rows: int, batch_size: int) -> list[float]:
    """Means over the samples of each epoch, of the losses of steps."""
    sizes = [min(batch_size, rows - first) for first in range(0, rows, batch_size)]
    parts = [losses[first : first + len(sizes)] for first in range(0, len(losses), len(sizes))]
    return [sum(loss * size for loss, size in zip(part, sizes, strict=True)) / rows for part in parts]
