"""Checks of a job's fields against each other: what contradicts what, and what to do."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from trainwright.core.engine import MASK_SUFFIX, takes_optimizer
from trainwright.core.errors import PlanError, nearest
from trainwright.core.loss_api import EVALUATION_COLUMNS, has_sum_reduction
from trainwright.core.strict_model import data_problem, function_problem
from trainwright.core.topology import Consistency, GradientCompression, OuterOptimizer

if TYPE_CHECKING:
    from trainwright.core.job import Job

CRASH_LOOP_FAILURES = 3  # equal failures in a row, after which the batch is skipped
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def inconsistencies(job: Job) -> Iterator[str]:
    """Describe all contradictions."""
    if not _RUN_NAME.fullmatch(job.name):
        yield f"name={job.name!r}: use up to 100 letters, digits, '.', '-' and '_'"
    yield from _step_problems(job) if job.tensorflow.run == "step" else _fit_problems(job)
    if (job.loss is not None or job.tensorflow.run == "fit") and not job.inputs:
        yield "inputs= is missing: name the columns given to the model"
    if job.metrics and not job.inputs:
        yield "metrics= need inputs= and targets="
    if reserved := [name for name in job.metrics if name in EVALUATION_COLUMNS]:
        names = ", ".join(map(repr, reserved))
        yield f"metrics= has {names}, which run.evaluations has already: use other names"
    data = {"train": job.train} | ({} if job.evaluate is None else {"evaluate": job.evaluate})
    yield from filter(None, (data_problem(name, value) for name, value in data.items()))
    yield from filter(None, [function_problem("model", job.model), *_schedule_problems(job)])
    if job.recovery.on_crash_loop == "skip" and job.recovery.failures < CRASH_LOOP_FAILURES:
        yield (
            f'on_crash_loop="skip" recognizes a loop after {CRASH_LOOP_FAILURES} equal failures: set '
            f"failures={CRASH_LOOP_FAILURES} or more"
        )
    for tracker in job.trackers:
        for name in ("begin", "log", "end"):
            if not callable(getattr(tracker, name, None)):
                yield f"trackers= has {type(tracker).__name__}, which has no {name}(): see tw.trackers.Tracker"
    for check in (_weight_problems, _padding_problems, _bounds_problems, _async_problems, _rank_problems):
        yield from check(job)


def _schedule_problems(job: Job) -> Iterator[str]:
    """Describe problems of schedule=, and missing options."""
    training, schedules = job.training, job.training.schedules
    yield from (function_problem("schedule", each) for each in schedules)
    makes = takes_optimizer(training.schedule)
    if isinstance(training.schedule, tuple) and any(map(takes_optimizer, schedules)):
        yield (
            "schedule= has a scheduler for one parameter group: torch's schedulers set the rates of all groups; give "
            "one function (optimizer) -> scheduler, such as lambda optimizer: LambdaLR(optimizer, [first, second])"
        )
    if training.schedule_by == "epoch" and not schedules:
        yield 'schedule_by="epoch" needs schedule='
    metric = training.schedule_metric
    if metric is None:
        return
    metric_names = ["loss", *job.metrics]
    if not makes:
        yield (
            "schedule_metric= is for a scheduler: set schedule= to a function (optimizer) -> scheduler, such as "
            "partial(ReduceLROnPlateau, patience=3)"
        )
    if job.evaluate is None:
        yield f"schedule_metric={metric!r} is computed on the evaluation set: set evaluate="
    if metric not in metric_names:
        yield f"schedule_metric={metric!r} is not a metric of the job: {nearest(metric, metric_names)}"
    if training.schedule_by == "epoch":
        yield 'schedule_metric= counts evaluations: leave schedule_by="epoch" out, and set evaluate_epochs='


def _rank_problems(job: Job) -> Iterator[str]:
    """Describe conflicts of what ranks keep, or see together, with their number or their micro-batches."""
    training = job.training
    if training.local_state and job.scaling.elastic:
        yield "local_state= is kept by rank and cannot be redistributed: leave min_workers= and max_workers= out"
    if training.batch_norm == "sync" and (training.accumulation or 1) > 1 and "batch_norm" not in training.inexact:
        yield (
            f'batch_norm="sync" sees micro-batches, not the whole batch, with accumulation={training.accumulation}: '
            'leave accumulation= out, or accept the difference with inexact=("batch_norm",)'
        )


def _weight_problems(job: Job) -> Iterator[str]:
    """Describe conflicts of sample weights, and of the reduction of a Keras loss."""
    options = [name for name in ("sample_weight", "class_weight") if job.get(name)]
    if len(options) > 1:
        yield "sample_weight= and class_weight= exclude each other: multiply the weights in a column"
    if options and job.training.step is not None:
        yield f"{options[0]}= cannot be used with step=: multiply the losses there, or return Terms"
    if job.data.class_weight and len(job.target_names) != 1:
        yield "class_weight= needs one column of targets=, the class: weigh several with sample_weight="
    weight = job.training.weight
    if isinstance(weight, str) and job.training.step is None and weight not in job.target_names:
        yield f"weight={weight!r} is not in targets=: {nearest(weight, job.target_names)}"
    if has_sum_reduction(job.loss) and job.tensorflow.run == "step":
        yield (
            'loss= has reduction="sum", and steps take the mean over the global batch: leave reduction= out and '
            'multiply the loss by batch_size, or use run="fit", which sums'
        )


def _bounds_problems(job: Job) -> Iterator[str]:
    """Describe contradictions between min_workers, workers, max_workers and on_loss."""
    bounds = [(name, job.get(name)) for name in ("min_workers", "workers", "max_workers")]
    set_bounds = [(name, value) for name, value in bounds if value is not None]
    for (low, least), (high, most) in itertools.pairwise(set_bounds):
        if least > most:
            yield f"{low}={least} is more than {high}={most}"
    if job.recovery.on_loss == "shrink":
        least, most = job.scaling.min_workers, job.scaling.max_workers or job.scaling.workers
        if least is None:
            yield 'on_loss="shrink" needs min_workers=, the fewest workers that it may leave'
        elif least == most:
            yield f'on_loss="shrink" can leave out no worker: min_workers={least} are all of them'


def _async_problems(job: Job) -> Iterator[str]:
    """Describe conflicts between the options of asynchronous training."""
    planning, workers, unknown = job.planning, job.scaling.workers, False
    parsers: tuple[tuple[str, Callable[[str], object]], ...] = (
        (planning.consistency or "sync", Consistency.parse),
        (planning.wire or "full", GradientCompression.parse),
        (planning.outer or "average", OuterOptimizer.parse),
    )
    for text, parse in parsers:
        try:
            parse(text)
        except PlanError as error:
            unknown = True
            yield f"{error.what}: {error.remedy}"
    if unknown:
        return
    consistency = Consistency.parse(planning.consistency or "sync")
    if workers and consistency.backup >= workers:
        yield f"consistency={planning.consistency!r} waits for none of workers={workers}: use a smaller backup="
    if planning.outer is not None and planning.local_steps == 1:
        yield f"outer={planning.outer!r} applies to several local steps: set local_steps=, or leave it out"
    if planning.local_steps > 1 and consistency.scaled:
        yield (
            'consistency="async(scaled)" scales the learning rate of an update, and the differences that local_steps= '
            'pushes have none: use "async"'
        )
    if planning.local_steps > 1 and consistency.backup:
        yield "sync(backup=...) drops parts of a step, and local_steps= are whole steps: leave one of them out"


def _step_problems(job: Job) -> Iterator[str]:
    """Describe what is missing or misplaced in a job with trainwright's own steps."""
    if (job.loss is None) == (job.training.step is None):
        yield "give either loss= with inputs= and targets=, or step="
    if job.optimizer is None:
        yield "optimizer= is missing"
    if isinstance(job.optimizer, Mapping):
        yield from _turn_problems(job)
    if not (job.loss or job.training.step or job.optimizer):
        yield 'where model() returns a compiled Keras model, run="fit" trains it with its own loss and optimizer'


def _turn_problems(job: Job) -> Iterator[str]:
    """Describe what is missing or contradictory in a job with several optimizers."""
    if not job.optimizer:
        yield "optimizer= is empty: give an optimizer, or the name of a module -> its optimizer"
    if job.training.step is None:
        yield "several optimizers need step=, which yields the name of one and a loss, in turn"
    if job.training.precision == "fp16":
        yield 'several optimizers have no loss scale for precision="fp16": use bf16 or fp32'


def _fit_problems(job: Job) -> Iterator[str]:
    """Describe options that Keras' fit does not have, and what to use instead."""
    instead = {
        "step": "override train_step() of the model",
        "weight": "give Keras' losses their weights by sample_weight=",
        "clip_norm": "set global_clipnorm of the optimizer",
        "accumulation": "set gradient_accumulation_steps of the optimizer",
        "schedule": "give the optimizer a LearningRateSchedule, or use a callback",
        "weight_average": "set use_ema= of the optimizer",
        "initial_weights": "load Keras' own files in model()",
        "save_frozen": "leave it out: Keras' files hold all variables",
        "consistency": "Keras' fit steps synchronously: leave out run= or this option",
        "wire": "Keras' fit has no parameter servers: leave out run= or this option",
        "local_steps": "Keras' fit has no local steps: leave out run= or this option",
        "on_error": 'run="fit" counts every row of a batch: leave it out',
        "on_nonfinite": 'run="fit" applies an update before its loss is known: leave out run= or this option',
        "on_crash_loop": 'run="fit" cannot skip a batch: leave out run= or this option',
        "on_spike": 'run="fit" cannot skip a batch: leave out run= or this option',
        "on_oom": "TensorFlow's processes keep their plan: leave it out",
    }
    for name, remedy in instead.items():
        if job.get(name) != job.default(name):
            yield f'{name}= cannot be used with run="fit": {remedy}'


def _padding_problems(job: Job) -> Iterator[str]:
    """Describe conflicts between inputs, pad and collate."""
    yield from (f"inputs={name!r} is not a valid argument name" for name in job.keywords if not name.isidentifier())
    if job.data.pad and job.data.collate:
        yield "collate= replaces pad=: give one of them"
    sources = set(job.data.collation.sources((*job.arguments, *job.target_names)))
    for name in job.data.pad if job.training.step is None and sources else ():
        if name not in sources:
            yield f"pad={name!r} is neither an input nor a target: {nearest(name, sources)}"
        elif name + MASK_SUFFIX in job.data.pad:
            yield f"pad={name + MASK_SUFFIX!r} is the name of the mask of {name!r}: rename the column"
