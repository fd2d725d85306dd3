"""`tw.tune`: train a job with several settings, stop bad ones early, and return all of them with the best.

Search spaces and ASHA are those of Ray Tune. Trials are ordinary runs in the job's storage: `<name>-0`, `<name>-1` and
so on. A search stores nothing else. The same call draws the same settings, and continues what is not finished.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

from ray.tune.schedulers import ASHAScheduler, AsyncHyperBandScheduler
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.core import formatting
from trainwright.core.errors import JobError, TrainwrightError, nearest
from trainwright.core.job import Job
from trainwright.reporting.progress_bar import print_status
from trainwright.reporting.run_history import read_history
from trainwright.storage.object_store import open_store
from trainwright.tuning.search_space import Params, draw_settings, job_of, setting_text, space_problems, value_text
from trainwright.tuning.trials import RANK, SearchMetric, TrialWatcher, fixed_layout, train_trials

if TYPE_CHECKING:
    import pandas

_NONE_EVALUATED = (
    "a trial is evaluated after each epoch: give max_time= enough for one, or make epochs shorter with epoch_samples="
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a search.

    Attributes:
        job: of the run; `tw.load_model(trial.job)` loads its model.
        params: the setting, by the names of the search space.
        value: the metric at the newest evaluation; NaN without one.
        step: of that evaluation; 0 without one.
        state: `done`, `stopped` (early, by the scheduler) or `failed`.
        error: of a failed trial.
    """

    job: Job
    params: Params
    value: float
    step: int
    state: str
    error: str = ""

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.job.name


@dataclass(frozen=True, kw_only=True, repr=False)
class TuneResult:
    """What a search found. Prints as a table.

    Attributes:
        metric: by which trials are compared.
        trials: all, in the order in which their settings were drawn.
    """

    metric: SearchMetric
    trials: tuple[Trial, ...]

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
    for job in jobs if fresh else ():
        open_store(job.storage).delete_folder(job.name)
    watcher.recall(jobs)
    print_status(f"search for the best {wanted.name}: {formatting.count(len(jobs), 'trial')}")
    train_trials(jobs, wanted.name, concurrent=concurrent, resume=resume, verbose=verbose, watcher=watcher)
    if len(watcher.errors) == len(jobs):
        raise next(iter(watcher.errors.values()))
    found = [_trial(job, setting, wanted, watcher) for job, setting in zip(jobs, settings, strict=True)]
    return TuneResult(metric=wanted, trials=tuple(found))


def _jobs(
    target: Job | Callable[..., Job], space: Mapping[str, Any], metric: SearchMetric, trials: int, seed: int
) -> tuple[list[Params], list[Job]]:
    """Return the settings and their jobs. Raises JobError with all problems."""
    if problems := [*space_problems(target, space), *([] if trials > 0 else [f"trials={trials}: use 1 or more"])]:
        raise JobError(problems)
    settings = draw_settings(space, trials, seed)
    jobs = [job_of(target, setting) for setting in settings]
    if problems := list(dict.fromkeys(problem for job in jobs for problem in _metric_problems(job, metric))):
        raise JobError(problems)
    return settings, [fixed_layout(job.replace(name=f"{job.name}-{number}")) for number, job in enumerate(jobs)]


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


def _trial(job: Job, setting: Params, metric: SearchMetric, watcher: TrialWatcher) -> Trial:
    """Return a trial as its run has ended. Raises JobError where its evaluations do not have the metric."""
    last = next(reversed(read_history(open_store(job.storage), job.name).evaluated), None)
    if last is not None and metric.name not in last.metrics:
        raise JobError([f"metric={metric.name!r} is no metric of the run: {nearest(metric.name, last.metrics)}"])
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
        table.add_column(heading, no_wrap=True)
    for each in found.ranked:
        note = "best" if each is best else "stopped early" if each.state == "stopped" else each.state
        value = formatting.metric(each.value) if each.step else "-"
        cells = (*map(value_text, each.params.values()), value, str(each.step), note)
        table.add_row(each.run, *cells, style="bold" if each is best else "")
    if best is None:
        head = Text(f"No best {found.metric.name}: no trial was evaluated\n  -> {_NONE_EVALUATED}", style="bold yellow")
    else:
        figure = f"{formatting.metric(best.value)} with {setting_text(best.params)} ({best.run})"
        head = Text(f"Best {found.metric.name}: {figure}", style="bold green")
    return Group(head, Padding(table, (1, 0, 0, 2)))
