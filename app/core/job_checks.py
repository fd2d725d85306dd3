"""What fields of a job contradict each other, in words that say what to do."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from trainwright.core import misplaced_objects
from trainwright.core.argument_order import is_summed
from trainwright.core.collation import MASK
from trainwright.core.errors import PlanError, nearest
from trainwright.core.staleness import Consistency, Outer, Wire

if TYPE_CHECKING:
    from trainwright.core.job import Job

LOOP = 3  # failures alike in a row, after which the batch is passed by
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def inconsistencies(job: Job) -> list[str]:
    """All of them."""
    problems = []
    if not _NAME.fullmatch(job.name):
        problems.append(f"name={job.name!r}: use up to 100 letters, digits, '.', '-' and '_'")
    if job.run == "step":
        problems += _loop_problems(job)
    else:
        problems += _fit_problems(job)
    if (job.loss is not None or job.run == "fit") and not job.inputs:
        problems.append("inputs= is missing: name the columns given to the model")
    if job.metrics and not job.inputs:
        problems.append("metrics= need inputs= and targets=")
    data = {"train": job.train} | ({} if job.evaluate is None else {"evaluate": job.evaluate})
    problems += filter(None, (misplaced_objects.data_problem(name, value) for name, value in data.items()))
    problems += filter(
        None, (misplaced_objects.function_problem(name, getattr(job, name)) for name in ("model", "schedule"))
    )
    if job.on_crash_loop == "skip" and job.failures < LOOP:
        problems.append(f'on_crash_loop="skip" tells a loop by {LOOP} failures alike: set failures={LOOP} or more')
    for tracker in job.trackers:
        problems += [
            f"trackers= has {type(tracker).__name__}, which has no {name}(): see tw.trackers.Tracker"
            for name in ("begin", "log", "end")
            if not callable(getattr(tracker, name, None))
        ]
    problems += _weight_problems(job) + _padding_problems(job) + _bounds_problems(job)
    problems += _alone_problems(job) + _rank_problems(job)
    return problems


def _rank_problems(job: Job) -> list[str]:
    """Where what ranks keep or see together does not go with how many they are, or with their micro-batches."""
    problems = []
    if job.local_state and job.elastic:
        problems.append(
            "local_state= is kept by rank and cannot be divided anew: leave min_workers= and max_workers= out"
        )
    if job.batch_norm == "sync" and (job.accumulation or 1) > 1 and "batch_norm" not in job.inexact:
        problems.append(
            f'batch_norm="sync" looks at micro-batches, not at the whole batch, with accumulation={job.accumulation}: '
            'leave accumulation= out, or accept the difference with inexact=("batch_norm",)'
        )
    return problems


def _weight_problems(job: Job) -> list[str]:
    """What is wrong with the weights of samples, and with the reduction of a loss of Keras'."""
    problems = []
    given = [name for name in ("sample_weight", "class_weight") if getattr(job, name)]
    if len(given) > 1:
        problems.append("sample_weight= and class_weight= exclude each other: multiply the weights in a column")
    if given and job.step is not None:
        problems.append(f"{given[0]}= has no place with step=: multiply the losses there, or return Terms")
    if job.class_weight and len(job.wanted_targets) != 1:
        problems.append("class_weight= needs one column of targets=, the class: weigh several with sample_weight=")
    if is_summed(job.loss) and job.run == "step":
        problems.append(
            'loss= has reduction="sum", and steps take the mean over the global batch: leave reduction= out and '
            'multiply the loss by batch_size, or use run="fit", which sums'
        )
    return problems


def _bounds_problems(job: Job) -> list[str]:
    """Where min_workers, workers and max_workers contradict each other."""
    named = [(name, getattr(job, name)) for name in ("min_workers", "workers", "max_workers")]
    given = [(name, value) for name, value in named if value is not None]
    return [
        f"{low}={least} is more than {high}={most}"
        for (low, least), (high, most) in itertools.pairwise(given)
        if least > most
    ]


def _alone_problems(job: Job) -> list[str]:
    """What is wrong with the fields of workers that step alone."""
    problems = []
    for name, parse in (("consistency", Consistency.parse), ("wire", Wire.parse), ("outer", Outer.parse)):
        try:
            parse(getattr(job, name) or {"consistency": "sync", "wire": "full", "outer": "average"}[name])
        except PlanError as error:
            problems.append(f"{error.what}: {error.remedy}")
    if problems:
        return problems
    consistency = Consistency.parse(job.consistency or "sync")
    if job.workers and consistency.backup >= job.workers:
        problems.append(
            f"consistency={job.consistency!r} waits for none of workers={job.workers}: use a smaller backup="
        )
    if job.outer is not None and job.local_steps == 1:
        problems.append(
            f"outer={job.outer!r} is for what several local steps came to: set local_steps=, or leave it out"
        )
    if job.local_steps > 1 and consistency.scaled:
        problems.append(
            'consistency="async(scaled)" scales the rate of an update, and local_steps= have none: use "async"'
        )
    if job.local_steps > 1 and consistency.backup:
        problems.append(
            "sync(backup=...) drops shares of a step, and local_steps= are whole ones: leave one of them out"
        )
    return problems


def _loop_problems(job: Job) -> list[str]:
    """What a job lacks whose steps are ours."""
    problems = []
    if (job.loss is None) == (job.step is None):
        problems.append("give either loss= with inputs= and targets=, or step=")
    if job.optimizer is None:
        problems.append("optimizer= is missing")
    if not (job.loss or job.step or job.optimizer):
        problems.append(
            'where model() returns a compiled Keras model, run="fit" trains it by what it was compiled with'
        )
    if job.callbacks is not None:
        problems.append('callbacks= are for run="fit": set it, or leave them out')
    return problems


def _fit_problems(job: Job) -> list[str]:
    """What Keras' fit cannot do, and whose way to do it is another."""
    instead = {
        "step": "override train_step() of the model",
        "clip_norm": "set global_clipnorm of the optimizer",
        "accumulation": "set gradient_accumulation_steps of the optimizer",
        "schedule": "give the optimizer a LearningRateSchedule, or use a callback",
        "consistency": "Keras' fit has all workers step together: leave run or it out",
        "wire": "Keras' fit pushes nothing to servers: leave run or it out",
        "local_steps": "Keras' fit takes steps of its own: leave run or it out",
        "on_error": 'run="fit" counts every row of a batch: leave it out',
        "on_nonfinite": 'run="fit" applies an update before its loss is known: leave run or it out',
        "on_crash_loop": 'run="fit" cannot pass a batch by: leave run or it out',
        "on_spike": 'run="fit" cannot pass a batch by: leave run or it out',
    }
    defaults = {name: type(job).model_fields[name].default for name in instead}
    return [
        f'{name}= has no place in run="fit": {remedy}'
        for name, remedy in instead.items()
        if getattr(job, name) != defaults[name]
    ]


def _padding_problems(job: Job) -> list[str]:
    """What is wrong with inputs, pad and collate together."""
    problems = [f"inputs={name!r} is no name of an argument" for name in job.keywords if not name.isidentifier()]
    if job.pad and job.collate:
        problems.append("collate= takes the place of pad=: give one of them")
    used = set(job.collation.sources((*job.arguments, *job.wanted_targets)))
    for name in job.pad if job.step is None and used else ():
        if name not in used:
            problems.append(f"pad={name!r} is neither an input nor a target: {nearest(name, used)}")
        elif name + MASK in job.pad:
            problems.append(f"pad={name + MASK!r} is the name of the mask of {name!r}: rename the column")
    return problems
