"""`tw.tune`: train a job with several settings, stop bad ones early, and return all of them with the best.

Search spaces and ASHA are those of Ray Tune. Trials are ordinary runs in the job's storage: `<name>-0`, `<name>-1` and
so on. A search stores nothing else. The same call draws the same settings, and continues what is not finished.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.tune import choice
from ray.tune.schedulers import ASHAScheduler, AsyncHyperBandScheduler
from ray.tune.search.sample import Domain
from ray.tune.search.variant_generator import generate_variants
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.core import formatting
from trainwright.core.errors import JobError, TrainwrightError, nearest
from trainwright.core.job import GROUP_OF, GROUPS, Job
from trainwright.planning.code_fingerprint import CodeFingerprints
from trainwright.reporting.progress_bar import print_status
from trainwright.reporting.run_history import read_history
from trainwright.storage.object_store import open_store
from trainwright.storage.run_control import check_ended, delete_run, is_run
from trainwright.tuning.trials import RANK, SearchMetric, TrialWatcher, fixed_layout, train_trials

if TYPE_CHECKING:
    import pandas


_NONE_EVALUATED = (
    "a trial is evaluated after each epoch: give max_time= enough for one, or make epochs shorter with epoch_samples="
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a search."""

    job: Job  # of the run; `tw.load_model(trial.job)` loads its model
    params: _Params  # the setting, by the names of the search space
    value: float  # the metric at the newest evaluation; NaN without one
    step: int  # of that evaluation; 0 without one
    state: str  # `done`, `stopped` (early, by the scheduler) or `failed`
    error: str = ""  # of a failed trial

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.job.name


@dataclass(frozen=True, kw_only=True, repr=False)
class TuneResult:
    """What a search found. Prints as a table."""

    metric: SearchMetric  # by which trials are compared
    trials: tuple[Trial, ...]  # all, in the order in which their settings were drawn

    @property
    def best(self) -> Trial:
        """The trial with the best metric among the finished ones. Raises TrainwrightError where none was evaluated."""
        if (best := self._evaluated) is None:
            text = f"no trial has a best {self.metric.name}: none of {formatting.count(len(self.trials), 'trial')}"
            raise TrainwrightError(f"{text} was evaluated", where="tw.tune", remedy=_NONE_EVALUATED)
        return best

    @property
    def _evaluated(self) -> Trial | None:
        """The best trial whose metric is a number; None without one."""
        return next((each for each in self.ranked if not math.isnan(each.value)), None)

    @cached_property
    def ranked(self) -> list[Trial]:
        """The trials from the best to the worst; those that were stopped or failed after the finished ones."""
        return sorted(self.trials, key=lambda each: (each.state == "done", self.metric.rank(each.value)), reverse=True)

    @property
    def table(self) -> pandas.DataFrame:
        """One row for each trial, from the best to the worst: run, each varied option, the metric, step, state."""
        import pandas

        rows = [
            {"run": each.run, **each.params, self.metric.name: each.value, "step": each.step, "state": each.state}
            for each in self.ranked
        ]
        return pandas.DataFrame(rows)

    def __repr__(self) -> str:
        return formatting.plain_text(_result_table(self), 120)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"


def tune(
    target: Job | Callable[..., Job],
    space: Mapping[str, Any],
    *,
    metric: str,
    trials: int,
    scheduler: Any,
    concurrent: int | None,
    seed: int,
    resume: bool,
    fresh: bool,
    verbose: bool,
) -> TuneResult:
    """See `tw.tune`."""
    wanted = SearchMetric.parse(metric)
    settings, jobs = _jobs(target, space, wanted, trials, seed)
    watcher = TrialWatcher(_scheduler(scheduler, jobs), wanted, jobs)
    if fresh:
        _remove_runs(jobs)
    watcher.recall(jobs)
    print_status(f"search for the best {wanted.name}: {formatting.count(len(jobs), 'trial')}")
    train_trials(jobs, wanted.name, concurrent=concurrent, resume=resume, verbose=verbose, watcher=watcher)
    if len(watcher.errors) == len(jobs):
        raise next(iter(watcher.errors.values()))
    found = [_trial(job, setting, wanted, watcher) for job, setting in zip(jobs, settings, strict=True)]
    return TuneResult(metric=wanted, trials=tuple(found))


def _jobs(
    target: Job | Callable[..., Job], space: Mapping[str, Any], metric: SearchMetric, trials: int, seed: int
) -> tuple[list[_Params], list[Job]]:
    """Return the settings and their jobs. Raises JobError with all problems."""
    if problems := [*_space_problems(target, space), *([] if trials > 0 else [f"trials={trials}: use 1 or more"])]:
        raise JobError(problems)
    settings = draw_settings(space, trials, seed)
    jobs = [job_of(target, setting) for setting in settings]
    if problems := list(dict.fromkeys(problem for job in jobs for problem in _metric_problems(job, metric))):
        raise JobError(problems)
    return settings, [fixed_layout(job.replace(name=f"{job.name}-{number}")) for number, job in enumerate(jobs)]


def _remove_runs(jobs: Iterable[Job]) -> None:
    """Delete the runs of earlier trials; none of them where the driver of one is alive, which raises RunConflict."""
    by_storage: dict[str, list[str]] = {}
    for job in jobs:
        by_storage.setdefault(job.storage, []).append(job.name)
    stores = {uri: open_store(uri) for uri in by_storage}
    found = [(stores[uri], [run for run in runs if is_run(stores[uri], run)]) for uri, runs in by_storage.items()]
    for store, runs in found:
        check_ended(store, runs)
    for store, runs in found:
        for run in runs:
            delete_run(store, run)


def _metric_problems(job: Job, metric: SearchMetric) -> Iterator[str]:
    """Describe why trials of a job cannot be compared."""
    known = ["loss", *job.metrics]
    if job.evaluate is None:
        yield "evaluate= is missing: give the data set on which trials are compared"
    elif metric.name not in known and job.tensorflow.run == "step":
        yield f"metric={metric.name!r} is neither 'loss' nor one of metrics=: {nearest(metric.name, known)}"


def _scheduler(given: Any, jobs: Sequence[Job]) -> AsyncHyperBandScheduler | None:
    """Return the scheduler of the trials. Raises JobError for one that trials of trainwright cannot follow."""
    if given is None:
        return None
    most = max(math.ceil(job.epochs / job.checkpointing.evaluate_epochs) for job in jobs)
    chosen = ASHAScheduler(max_t=most, stop_last_trials=False) if given == "asha" else copy.deepcopy(given)
    if not isinstance(chosen, AsyncHyperBandScheduler):
        raise JobError([f'scheduler={given!r}: use "asha", an ASHAScheduler of ray.tune.schedulers, or None'])
    if not chosen.set_search_properties(RANK, "max"):
        raise JobError(["scheduler= has a metric or a mode of its own: leave them out, metric= of tw.tune is used"])
    return chosen


def _trial(job: Job, setting: _Params, metric: SearchMetric, watcher: TrialWatcher) -> Trial:
    """Return a trial as its run has ended. Raises JobError where its evaluations do not have the metric."""
    last = next(reversed(read_history(open_store(job.storage), job.name).evaluated), None)
    if last is not None and metric.name not in last.metrics:
        raise JobError([f"metric={metric.name!r} is not a metric of the run: {nearest(metric.name, last.metrics)}"])
    error = watcher.errors.get(job.name)
    return Trial(
        job=job, params=setting,
        value=math.nan if last is None else last.metrics[metric.name], step=0 if last is None else last.step,
        state="failed" if error is not None else "stopped" if job.name in watcher.stopped else "done",
        error="" if error is None else error.summary,
    )  # fmt: skip


def _result_table(found: TuneResult) -> RenderableType:
    """Return the best trial, and a row for each trial, for the terminal."""
    best = found._evaluated
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for heading in ("run", *found.ranked[0].params, found.metric.name, "step", ""):
        table.add_column(Text(heading), no_wrap=True)
    for each in found.ranked:
        note = "best" if each is best else "stopped early" if each.state == "stopped" else each.state
        value = formatting.metric(each.value) if each.step else "-"
        cells = (each.run, *map(_value_text, each.params.values()), value, str(each.step), note)
        table.add_row(*map(Text, cells), style="bold" if each is best else "")
    if best is None:
        head = Text(f"No best {found.metric.name}: no trial was evaluated\n  -> {_NONE_EVALUATED}", style="bold yellow")
    else:
        figure = f"{formatting.metric(best.value)} with {_setting_text(best.params)} ({best.run})"
        head = Text(f"Best {found.metric.name}: {figure}", style="bold green")
    return Group(head, Padding(table, (1, 0, 0, 2)))


# --- The search space: options that are varied, settings drawn from it, and their jobs --------------------------------


_Params = dict[str, Any]
"""A value for each name of a search space."""

_OWN = ("name", "storage")  # of the search, which names the runs of its trials


def draw_settings(space: Mapping[str, Any], trials: int, seed: int) -> list[_Params]:
    """Return the settings of a search, without repetitions. More trials add settings after the same first ones.

    Args:
        space: name -> search-space object of Ray Tune, or values.
        trials: times that settings are drawn; each time, all combinations of `grid_search` values are.
        seed: of the draws.
    """
    values = {name: choice(value) if isinstance(value, list | tuple) else value for name, value in space.items()}
    random = np.random.default_rng(seed)
    found: dict[str, _Params] = {}
    for _ in range(trials):
        for _, spec in generate_variants({"config": values}, random_state=random):
            setting = {name: spec["config"][name] for name in space}
            found.setdefault(CodeFingerprints().digest(setting), setting)
    return list(found.values())


def _setting_text(setting: _Params) -> str:
    """Return the setting for people: `optimizer.lr = 0.01, batch_size = 32`."""
    return ", ".join(f"{name} = {_value_text(value)}" for name, value in setting.items())


def _value_text(value: Any) -> str:
    """Return a value of a setting for people; functions and classes by their names."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(getattr(value, "__name__", value))


def _space_problems(target: Job | Callable[..., Job], space: Mapping[str, Any]) -> list[str]:
    """Describe what is wrong with a search space.

    Args:
        target: a job, whose options are varied, or a function, whose parameters are.
        space: as of `draw_settings`.
    """
    if not space:
        return ['space= is empty: name what is varied, such as {"optimizer.lr": ray.tune.loguniform(1e-4, 1e-1)}']
    names = _option_problems(target, space) if isinstance(target, Job) else _parameter_problems(target, space)
    return [*names, *_value_problems(space)]


def job_of(target: Job | Callable[..., Job], setting: _Params) -> Job:
    """Return the job of a setting. Raises JobError where it is wrong."""
    try:
        job = _changed(target, setting) if isinstance(target, Job) else target(**setting)
    except JobError as error:
        raise JobError([f"{problem} (with {_setting_text(setting)})" for problem in error.problems]) from None
    if not isinstance(job, Job):
        raise JobError([f"the function of tw.tune returned {type(job).__name__}: return a tw.Job"])
    return job


def _changed(job: Job, setting: _Params) -> Job:
    """Return the job with changed options, and with functions that have changed parameters."""
    changes: dict[str, Any] = {}
    parameters: dict[str, dict[str, Any]] = {}
    for name, value in setting.items():
        first, _, rest = name.partition(".")
        if rest and first not in GROUPS:
            parameters.setdefault(first, {})[rest] = value
        else:
            changes[rest or first] = value
    for name, given in parameters.items():
        changes[name] = functools.partial(changes.get(name, job.get(name)), **given)
    return job.replace(**changes)


def _option_problems(job: Job, space: Mapping[str, Any]) -> Iterator[str]:
    """Describe names that are neither options of the job nor parameters of its functions."""
    for name in space:
        first, _, rest = name.partition(".")
        if first in _OWN:
            yield f"space={name!r} cannot be varied: the search names the runs of its trials"
        elif first not in GROUP_OF and first not in Job.model_fields:
            yield f"space={name!r} is not an option of a job: {Job.advice_on(first)}"
        elif rest and first in GROUPS:
            if rest not in GROUPS[first].model_fields:
                yield f"space={name!r} is not an option of {first}=: {GROUPS[first].advice_on(rest)}"
        elif rest and first not in space:
            yield from _unknown_parameter(name, job.get(first), rest)


def _unknown_parameter(name: str, function: Any, parameter: str) -> Iterator[str]:
    """Describe a parameter that a function of the job does not have."""
    first = name.partition(".")[0]
    if not callable(function):
        yield f"space={name!r} is a parameter of {first}=, which is not a function: name the option alone"
        return
    known = _parameters(function)
    if known is not None and parameter not in known:
        yield f"space={name!r} is not a parameter of {first}=: {nearest(parameter, known)}"


def _parameter_problems(function: Callable[..., Job], space: Mapping[str, Any]) -> Iterator[str]:
    """Describe names that are not parameters of a function, and parameters without values."""
    known = _parameters(function)
    if known is None:
        return
    for name in space:
        if name not in known:
            yield f"space={name!r} is not a parameter of the function: {nearest(name, known)}"
    for name, required in known.items():
        if required and name not in space:
            yield f"space= has no values for the parameter {name!r} of the function: add them, or give it a default"


def _parameters(function: Callable[..., Any]) -> dict[str, bool] | None:
    """Return the names that a function takes as keywords, and whether each is required; None where any name works."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a function that is not Python's
        return None
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return {each.name: each.default is each.empty for each in named}


def _value_problems(space: Mapping[str, Any]) -> Iterator[str]:
    """Describe values that are no search space."""
    for name, value in space.items():
        grid = value.get("grid_search") if isinstance(value, Mapping) else None
        if isinstance(value, list | tuple) or grid is not None:
            if not (value if grid is None else grid):
                yield f"space={name!r} has no values: list at least one"
        elif not isinstance(value, Domain):
            yield (
                f"space={name!r} has the value {value!r}: give a list of values, or a search space of Ray Tune such as "
                "ray.tune.loguniform(1e-4, 1e-1)"
            )
