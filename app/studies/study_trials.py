"""The runs of a study. A repeated call skips finished ones.

scaling      throughput by the number of workers, synchronous and asynchronous
convergence  a metric over time, by the number of workers, synchronous and asynchronous
batch        the final metric by batch size, at equal epochs, under two rules for the learning rate
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from trainwright.core.engine import takes_optimizer, with_batch_size
from trainwright.core.errors import JobError, LossSpike, NonFiniteLoss, RunFinished, Stopped, TrainwrightError
from trainwright.core.job import Job
from trainwright.lr_schedules import constant, linear_scaling
from trainwright.ray_cluster.discovery import connect, discover
from trainwright.reporting.plan_view import plan_from
from trainwright.reporting.run_history import RunHistory
from trainwright.reporting.stored_run import open_run
from trainwright.tuning.parallel_runs import train_in_parallel

StudyKind = Literal["scaling", "convergence", "batch"]
MODES: Mapping[str, Mapping[str, Any]] = {
    "synchronous": {"consistency": "sync"},
    "asynchronous": {"strategy": "parameter_server", "consistency": "async"},
}
_LOSS_ERRORS = (NonFiniteLoss, LossSpike)  # with large batches and rates; they are results of a study
_RULES = ("same rate", "linear rule")
_WARMUP = 0.1  # share of the run, of the linear rule
_FIXED = {"min_workers": None, "max_workers": None, "on_loss": "wait"}  # the number of workers stays that of the trial
_WHOLE = {"early_stop": None, "max_time": None}  # equal epochs


@dataclass(frozen=True, kw_only=True)
class StudyTrial:
    """One run of a study."""

    label: str  # the curve that it belongs to
    x: int  # number of workers, or batch size
    seed: int
    job: Job
    history: RunHistory | None = None  # what came of it; None before it was run
    error: str = ""  # why it failed: its loss was not finite, or rose too far; empty where it did not


@dataclass(frozen=True, kw_only=True)
class _LinearRule:
    """The linear rule for a batch size, with a warm-up over a share of the run; then the job's own schedule."""

    batch_size: int  # of the run
    reference: int  # that of the job
    schedule: Callable[[int, int], float]  # the job's own, (step, total) -> factor

    def __call__(self, step: int, total: int) -> float:
        """Return the factor on the optimizer's own learning rate."""
        sizes = {"batch_size": self.batch_size, "reference": self.reference}
        return linear_scaling(step, total, warmup_steps=int(_WARMUP * total), then=self.schedule, **sizes)


def scaling_trials(job: Job, workers: Sequence[int], modes: Sequence[str], seeds: int, steps: int) -> list[StudyTrial]:
    """Return runs of so many steps for each number of workers; the global batch is the job's.

    Raises:
        JobError: a single worker, asynchronous.
    """
    short = {"epochs": 1, "epoch_samples": steps * job.batch_size}
    return _by_workers(job, "scaling", workers, modes, seeds, short)


def convergence_trials(job: Job, workers: Sequence[int], modes: Sequence[str], seeds: int) -> list[StudyTrial]:
    """Return whole runs of the job for each number of workers.

    Raises:
        JobError: the job evaluates nothing; or a single worker, asynchronous.
    """
    _check_evaluates(job)
    return _by_workers(job, "convergence", workers, modes, seeds, {})


def batch_trials(job: Job, batch_sizes: Sequence[int], seeds: int) -> list[StudyTrial]:
    """Return whole runs of the job, of equal epochs, for each batch size under each rule for the learning rate.

    Raises:
        JobError: the job evaluates nothing, or its schedule cannot be scaled.
    """
    _check_evaluates(job)
    if job.tensorflow.run == "fit":
        raise JobError(['run="fit" takes no schedule=, by which this study scales learning rates: use run="step"'])
    schedules = job.training.schedules
    if any(takes_optimizer(each) for each in schedules):
        problem = "schedule= makes a scheduler of an optimizer, which the linear rule cannot scale"
        raise JobError([f"{problem}: give a function (step, total) -> factor, such as those of tw.schedules"])
    own = [with_batch_size(each, job.batch_size) for each in schedules or (constant,)]  # as at the job's own size
    found = []
    for rule in _RULES:
        for size in batch_sizes:
            made: tuple[Any, ...] = tuple(own)
            if rule == "linear rule":
                made = tuple(_LinearRule(batch_size=size, reference=job.batch_size, schedule=each) for each in own)
            fields = {**_FIXED, **_WHOLE, "batch_size": size, "schedule": made if len(made) > 1 else made[0]}
            for seed in range(seeds):
                name = f"{job.name}-batch-{rule.replace(' ', '-')}-{size}-seed{seed}"
                run = job.replace(name=name, seed=job.training.seed + seed, **fields)
                found.append(StudyTrial(label=rule, x=size, seed=seed, job=run))
    return found


def run_trials(
    trials: Sequence[StudyTrial], *, fresh: bool = False, concurrent: int = 1, say: Callable[[str], object] = print
) -> list[StudyTrial]:
    """Run the trials, and return them with what came of them.

    Args:
        fresh: run finished ones again.
        concurrent: most trials at a time, each on an equal share of the cluster.
        say: takes a line for the user.

    Raises:
        Stopped: a signal stopped one of them; the same call continues.
        TrainwrightError: one of them failed for another reason than its loss.
    """
    threads = _threads_per_worker(trials[0].job) if trials[0].label in MODES else None
    given = [replace(each, job=each.job.replace(threads_per_worker=threads)) for each in trials] if threads else trials
    run = _run_in_turn if concurrent == 1 else partial(_run_in_parallel, concurrent=concurrent)
    failed = run(given, fresh=fresh, say=say)
    done = []
    for trial in trials:
        history = open_run(trial.job.name, trial.job.storage).read()
        done.append(replace(trial, history=history, error=failed.get(trial.job.name, "")))
    return done


def _run_in_turn(trials: Sequence[StudyTrial], *, fresh: bool, say: Callable[[str], object]) -> dict[str, str]:
    """Run one trial after the other on the whole cluster; return why trials failed, by the names of their runs."""
    from trainwright import api

    failed = {}
    for number, trial in enumerate(trials, 1):
        say(f"{number}/{len(trials)}  {_title(trial)}")
        try:
            run = api.fit(trial.job, fresh=fresh)
        except RunFinished:
            say("  it is finished already")
        except _LOSS_ERRORS as error:
            failed[trial.job.name] = error.summary
            say(f"  it failed: {error.summary}")
        else:
            if run.state == "stopped":
                raise Stopped(
                    f"the study was stopped in run {trial.job.name}",
                    remedy="the same command continues it", signal=run.signal or signal.SIGINT,
                )  # fmt: skip
        _check_threads(trial)
    return failed


def _run_in_parallel(
    trials: Sequence[StudyTrial], *, fresh: bool, say: Callable[[str], object], concurrent: int
) -> dict[str, str]:
    """Run some trials at a time; return why trials failed, by the names of their runs."""
    failed, titles = {}, {trial.job.name: _title(trial) for trial in trials}
    say(f"{len(trials)} runs, at most {concurrent} at a time{'' if fresh else '; finished ones are not run again'}")

    def tell(job: Job, what: str) -> None:
        say(f"  {titles[job.name]} {what}")

    def keep(job: Job, error: TrainwrightError) -> None:
        if not isinstance(error, _LOSS_ERRORS):
            raise error
        failed[job.name] = error.summary
        tell(job, f"failed: {error.summary}")

    jobs = [trial.job for trial in trials]
    told = partial(tell, what="is finished")
    train_in_parallel(jobs, what="runs of the study", parts=concurrent, fresh=fresh, on_end=told, on_error=keep)
    return failed


def _title(trial: StudyTrial) -> str:
    return f"{trial.label}, {trial.x}, seed {trial.seed}: run {trial.job.name}"


def _by_workers(
    job: Job, kind: str, workers: Sequence[int], modes: Sequence[str], seeds: int, fields: Mapping[str, Any]
) -> list[StudyTrial]:
    found = []
    for mode in modes:
        for count in [each for each in workers if mode == "synchronous" or each > 1]:  # one has nobody to wait for
            for seed in range(seeds):
                name = f"{job.name}-{kind}-{mode}-{count}-seed{seed}"
                more = {"name": name, "workers": count, "seed": job.training.seed + seed}
                run = job.replace(**{**more, **_FIXED, **MODES[mode], **fields})
                found.append(StudyTrial(label=mode, x=count, seed=seed, job=run))
    if not found:
        raise JobError(["--mode asynchronous needs two workers or more: --workers 2,4"])
    return found


def _threads_per_worker(job: Job) -> int | None:
    """Return the CPU threads of each worker where numbers of workers are compared: one, but on accelerators the usual.

    By default a single worker computes with all CPUs of its node, so that more workers there would gain nothing.
    """
    if job.scaling.threads_per_worker:
        return job.scaling.threads_per_worker
    connect()
    return None if discover().accelerators and job.scaling.accelerator != "cpu" else 1


def _check_threads(trial: StudyTrial) -> None:
    """Refuse a finished run whose workers had other threads than those that are compared. Raises JobError."""
    threads = trial.job.scaling.threads_per_worker if trial.label in MODES else None
    plan = plan_from(open_run(trial.job.name, trial.job.storage).read().summary.start.plan) if threads else None
    if plan is not None and plan.placement.threads != threads:
        raise JobError([
            f"run {trial.job.name} was made with {plan.placement.threads} CPU threads for each worker, and this study "
            f"has {threads}: run it again with --fresh, or set threads_per_worker={plan.placement.threads}"
        ])  # fmt: skip


def _check_evaluates(job: Job) -> None:
    if job.evaluate is None:
        raise JobError(["evaluate= is missing: this study compares metrics of evaluations"])
