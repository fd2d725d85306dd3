"""Trials: the runs of a search. Each is an ordinary run; a metric compares them, and bad ones can be stopped early."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

from trainwright.core.errors import NonFiniteLoss, TrainwrightError, headline
from trainwright.core.events import Evaluated, Event, RunStarted
from trainwright.core.job import Job
from trainwright.core.metric_goals import metric_name, minimizes
from trainwright.reporting.progress_bar import print_status
from trainwright.reporting.run_history import read_history
from trainwright.runtime.run_handle import Run
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_control import check_ended
from trainwright.storage.run_log import RunLog
from trainwright.tuning.parallel_runs import train_in_parallel

_LAYOUT = frozenset({"workers", "min_workers", "max_workers", "strategy", "plan", "devices", "consistency"})
_MOST_AT_ONCE = 8  # runs whose drivers share this process, where concurrent= is not given
_WORST = -1e300  # a finite rank for NaN and infinity: ASHA interpolates between ranks
_TIME, RANK = "training_iteration", "rank"  # of a result for Ray Tune: the number of evaluations, and the metric's rank
_MOST_BROKEN = 3  # trials that fail before any trial is evaluated: then the job is wrong, and not the settings


@dataclass(frozen=True, kw_only=True)
class SearchMetric:
    """The metric by which runs are compared."""

    name: str  # of an evaluation, `loss` or one of the job's metrics
    largest: bool  # whether larger is better

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the metric of a goal: `accuracy`, or `-error` where smaller is better; see `core.metric_goals`."""
        return cls(name=metric_name(text), largest=not minimizes(text))

    def rank(self, value: float) -> float:
        """Return a number that is larger for a better value; NaN and infinity come last."""
        return _WORST if not math.isfinite(value) else value if self.largest else -value


def fixed_layout(job: Job) -> Job:
    """Return the job for one of many runs: one worker unless a layout is given, and no in-memory checkpoints."""
    given = job.given
    own: dict[str, Any] = {} if given & _LAYOUT else {"workers": 1}
    return job.replace(**own, probe=False, **({} if "keeper_s" in given else {"keeper_s": 0.0}))


def final_metric(store: Store, run: str, metric: str) -> float | None:
    """Return a finished run's metric after its last step; None where the run, or its last evaluation, is missing.

    Args:
        store: of the run.
        run: its name.
        metric: of its evaluations.
    """
    head = RunLog(store, run).head()
    if head is None or head.outcome != "done":
        return None
    last = max(read_history(store, run).evaluated, key=lambda each: each.step, default=None)
    return last.metrics.get(metric) if last is not None and last.step >= head.checkpoints[-1].step else None


def delete_search(storage: str, name: str) -> None:
    """Delete the folder of a search with all its runs.

    Raises:
        RunConflict: the driver of a run is alive; nothing is deleted.
        StorageError: the store cannot be used.
    """
    store = open_store(storage)
    runs = open_store(store.uri_of(name))
    check_ended(runs, runs.folders())
    store.delete_folder(name)


class TrialWatcher:
    """Hears the evaluations of trials, stops bad trials, and keeps the errors of failed ones.

    The decisions are those of Ray Tune's ASHA (https://arxiv.org/abs/1810.05934). They follow from the order of the
    evaluations, so that a search that continues makes them again from the stored ones. Any thread may call it.

    Args:
        scheduler: an `AsyncHyperBandScheduler` of Ray Tune whose metric is `RANK`; None stops no trial.
        metric: by which trials are compared.
        jobs: of all trials.

    Attributes:
        stopped: names of the trials that were stopped.
        errors: of the trials that failed, by name.
    """

    def __init__(self, scheduler: Any, metric: SearchMetric, jobs: Iterable[Job]) -> None:
        self._scheduler, self._metric, self._lock = scheduler, metric, threading.Lock()
        self._steps: dict[str, set[int]] = defaultdict(set)
        self.stopped: set[str] = set()
        self.errors: dict[str, TrainwrightError] = {}
        for job in jobs if scheduler is not None else ():
            scheduler.on_trial_add(None, _trial(job.name))

    def recall(self, jobs: Iterable[Job]) -> None:
        """Make the decisions of an earlier process again, in the order of the stored evaluations."""
        events = []
        for job in jobs:
            summary = read_history(open_store(job.storage), job.name).summary
            events += [(event, job.name, summary.start.total_steps) for event in summary.evaluations.values()]
        for event, name, total_steps in sorted(events, key=lambda each: each[0].time_s):
            self.evaluated(name, event, total_steps)

    def watch(self, run: Run) -> None:
        """Hear the evaluations of a run from now on."""
        run.listen(_EvaluationListener(self, run))

    def evaluated(self, name: str, event: Evaluated, total_steps: int) -> bool:
        """Take an evaluation of a trial. Returns whether the trial is to be stopped, which has more steps then."""
        with self._lock:
            self._steps[name].add(event.step)
            if self._scheduler is None:
                return False
            rank = self._metric.rank(event.metrics.get(self._metric.name, math.nan))
            result = {_TIME: len(self._steps[name]), RANK: rank}
            decision = self._scheduler.on_trial_result(None, _trial(name), result)
            if decision != self._scheduler.STOP or event.step >= total_steps:
                return False
            self.stopped.add(name)
            return True

    def failed(self, job: Job, error: TrainwrightError) -> None:
        """Keep the error of a trial. Raises it where several trials failed and none was evaluated."""
        self.errors[job.name] = error
        print_status(f"  {job.name} failed: {headline(error)}", "warning")
        broken = [each for each in self.errors.values() if not isinstance(each, NonFiniteLoss)]
        if len(broken) >= _MOST_BROKEN and not self._steps:
            raise error


class _EvaluationListener:
    """Passes the evaluations of one run to the watcher, and stops the run where the watcher says so."""

    def __init__(self, watcher: TrialWatcher, run: Run) -> None:
        self._watcher, self._run, self._total_steps = watcher, run, 0

    def on(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, RunStarted):
            self._total_steps = event.total_steps
        elif isinstance(event, Evaluated) and self._watcher.evaluated(self._run.job.name, event, self._total_steps):
            self._run.stop()

    def close(self) -> None:
        """Do nothing: the run has ended."""


def _trial(name: str) -> Any:
    """Return what Ray Tune's ASHA reads of a trial."""
    return SimpleNamespace(trial_id=name)


def train_trials(
    jobs: Iterable[Job],
    metric: str,
    *,
    concurrent: int | None = None,
    resume: bool = False,
    verbose: bool = False,
    watcher: TrialWatcher | None = None,
) -> dict[str, float]:
    """Train the runs of a search that are not finished, some at a time, and print a line for each that ends.

    Args:
        jobs: of the runs.
        metric: of their evaluations.
        concurrent: most runs at a time; by default 8, or as many as the cluster has accelerators, or CPUs, for.
        resume, verbose: as of `tw.fit`.
        watcher: stops bad runs, and keeps the errors of failed ones; without it, the first error ends the search.

    Returns:
        The metric of each finished run after its last step, by name.

    Raises:
        RunConflict: a run of this name was started with another job, or another driver has it.
        Stopped: a signal came; the runs have taken a checkpoint.
        TrainwrightError: as `train_in_parallel`.
    """
    jobs = list(jobs)
    stopped = watcher.stopped if watcher is not None else ()
    found: dict[str, float] = {}

    def read(job: Job) -> bool:
        value = final_metric(open_store(job.storage), job.name, metric)
        if value is not None:
            found[job.name] = value
        return value is not None

    def ended(job: Job) -> None:
        if read(job):
            print_status(f"  {job.name}: {metric} {found[job.name]:.4f} ({len(found)} of {len(jobs)})")
        elif job.name in stopped:
            print_status(f"  {job.name}: stopped early")

    for job in jobs:
        read(job)
    left = [job for job in jobs if job.name not in stopped and not (resume and job.name in found)]
    train_in_parallel(
        left, what="runs of the search", parts=min(concurrent or _MOST_AT_ONCE, len(jobs)), resume=resume,
        verbose=verbose, on_end=ended,
        on_start=None if watcher is None else watcher.watch, on_error=None if watcher is None else watcher.failed,
    )  # fmt: skip
    return found
