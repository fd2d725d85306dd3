"""The programs of `examples/programs`: their jobs on engines in this process or on ranks, without Ray."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

import trainwright as tw
from tests.support.program_table import FOLDER
from tests.support.rank_processes import Exchange, formed
from tests.support.torch_engines import one_device, plan, saved
from trainwright.core.data import MetricSums, fold_seed
from trainwright.core.events import Evaluated
from trainwright.core.metric_states import compute_states, metric_states, with_states
from trainwright.core.plan import Mesh, Plan
from trainwright.datasets.loading.batch_loader import BatchLoader
from trainwright.distillation.distillation_job import compose_job
from trainwright.strategies.torch.engines.data_parallel import DataParallel
from trainwright.strategies.torch.engines.fsdp import Sharded

RANKS = 2
LAYOUTS: dict[str, tuple[Any, Plan]] = {
    "data_parallel": (DataParallel, plan(RANKS)),
    "sharded": (Sharded, plan(mesh=Mesh(shard=RANKS))),
}
_made_in: dict[str, torch.dtype] = {}  # by name of the program
Trained = tuple[list[float], list[dict[str, float]]]


@contextmanager
def in_float64() -> Iterator[None]:
    """Let models and data be made in float64, in which sums on several ranks can be compared."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def program(name: str) -> ModuleType:
    """A program, whose data are made in the default type of this moment."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    if _made_in.setdefault(name, torch.get_default_dtype()) != torch.get_default_dtype():
        del sys.modules[name]
        _made_in[name] = torch.get_default_dtype()
    return importlib.import_module(name)


def job_of(name: str) -> tw.Job:
    """The job of a program; of a distillation, that of its student with the teachers."""
    module = program(name)
    if hasattr(module, "distillation"):
        return compose_job(module.distillation(shuffle=False)).job
    job: tw.Job = module.job(shuffle=False)
    return job


def plain(name: str) -> Trained:
    """The plain loop, with the first parameters of the job, and where the job has its own order, with its batches."""
    module, job = program(name), job_of(name)
    more = {"batches": batches(job)} if "batches" in module.plain.__code__.co_varnames[:2] else {}
    torch.manual_seed(fold_seed(job.training.seed, -1))
    trained: Trained = module.plain(shuffle=False, **more)
    return trained


def batches(job: tw.Job) -> list[list[list[int]]]:
    """The rows of each step of each epoch, of data that a sampler orders."""
    schedule, source, found = Driven(job, plan()).loader.schedule, job.train.source, []
    for epoch in range(job.epochs):
        order = source.sampler.order(source.by, job.training.seed, epoch)
        steps = range(epoch * schedule.steps_per_epoch, (epoch + 1) * schedule.steps_per_epoch)
        found.append([order[schedule.samples(step)].tolist() for step in steps])
    return found


class Driven:
    """A job's steps and evaluations on one rank's engine, as driver and worker let them follow each other.

    Args:
        job: to train.
        how: the layout.
        rank: of this process.
        exchange: gathers a value from all ranks; None for one rank alone.
    """

    def __init__(self, job: tw.Job, how: Plan, rank: int = 0, exchange: Exchange | None = None) -> None:
        self.job, self.exchange = job, exchange
        self.metrics: dict[str, float] | None = None  # of an evaluation after the last step, for the next one
        own: dict[str, Any] = {"feeding": how.feed_of(rank), "columns": job.columns, "accumulation": how.accumulation}
        self.loader = BatchLoader(job.train, **own, **job.ordering())
        self.evaluation = BatchLoader(job.evaluate, **own, **job.ordering(evaluate=True)) if job.evaluate else None
        validation = None if self.evaluation is None else lambda: self.evaluation.feeds(0)
        self.spec = job.model_spec(self.loader.schedule.total_steps, validation=validation)

    def train(self, engine: Any, first: int = 0, last: int | None = None) -> Trained:
        """Losses and evaluations of these steps; early stopping ends them."""
        losses, evaluations, events = list[float](), list[dict[str, float]](), list[Evaluated]()
        metrics = self.metrics if first else None
        schedule, stop = self.loader.schedule, self.job.checkpointing.early_stop
        feeds = self.loader.feeds(first)
        for step in range(first, schedule.total_steps if last is None else last):
            feed = next(feeds)
            losses.append(engine.train_step(feed if metrics is None else replace(feed, metrics=metrics)).loss)
            metrics = None
            if self.evaluation is not None and (step + 1) % schedule.steps_per_epoch == 0:
                metrics = self._evaluated(engine)
                evaluations.append(metrics)
                events.append(Evaluated(step=step + 1, metrics=metrics))
                if stop is not None and stop.reason(events):
                    break
        feeds.close()
        self.metrics = metrics
        return losses, evaluations

    def _evaluated(self, engine: Any) -> dict[str, float]:
        assert self.evaluation is not None
        states = metric_states(self.job.metrics)
        with self.evaluation.feeds(0) as feeds:
            own = with_states(sum((engine.evaluate_step(feed, states) for feed in feeds), MetricSums()), states)
        return compute_states(sum(self.exchange(own) if self.exchange else [own], MetricSums())).means()


def on_one_worker(name: str) -> Trained:
    driven = Driven(job_of(name), plan())
    engine = one_device(driven.spec)
    engine.warm(driven.loader.warm_feed(0))
    return driven.train(engine)


def continued(name: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The last state of a run that was continued from a checkpoint in its middle, and that of an unbroken one."""
    driven = Driven(job_of(name), plan())
    unbroken, stopped, resumed = (one_device(driven.spec) for _ in range(3))
    middle = driven.loader.schedule.total_steps // 2
    driven.train(unbroken)
    driven.train(stopped, last=middle)
    resumed.load(saved(stopped))
    driven.train(resumed, first=middle)
    return saved(resumed).files, saved(unbroken).files


def on_rank(rank: int, world: int, exchange: Exchange, layouts: Mapping[str, Sequence[str]]) -> Any:
    """Losses and evaluations of programs under their layouts, by (program, layout); of one that failed, its error."""
    found: dict[tuple[str, str], Any] = {}
    with in_float64():
        for name, layout in [(name, layout) for name, chosen in layouts.items() for layout in chosen]:
            make, how = LAYOUTS[layout]
            engine = make()
            try:
                driven = Driven(job_of(name), how, rank, exchange)
                formed(rank, exchange, driven.spec, engine=engine, how=how)
                engine.warm(driven.loader.warm_feed(0))
                found[name, layout] = driven.train(engine)
                engine.verify()
            except Exception as error:  # so that it is one test that fails
                found[name, layout] = repr(error)
            finally:
                engine.leave()
    return found
