"""Runs as trials of Ray Tune: some at a time, each with actors of its own, and those that fall behind are stopped.

A trial is a process that drives a run and takes next to nothing of the cluster; the run's workers take their share.
What a trial came to is what its run's events say, so that a search goes on from these, and no run that is done is made
again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import tempfile
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import cloudpickle
from ray import tune as ray_tune
from ray.tune import Callback, Stopper, Trainable
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import AsyncHyperBandScheduler, TrialScheduler
from rich.console import Console

from trainwright.core import formatting
from trainwright.core.errors import ResourceError, TrainwrightError
from trainwright.core.events import Evaluated, Event, RunStarted
from trainwright.core.job import Job
from trainwright.planning.decision import Decision
from trainwright.planning.job_preparation import decide_plan, prepare
from trainwright.ray_cluster.discovery import connect
from trainwright.ray_cluster.ray_compat import session_folder
from trainwright.reporting.event_messages import OutputLine
from trainwright.reporting.html import ReportListener
from trainwright.reporting.progress_bar import display_for
from trainwright.reporting.run_history import read_history
from trainwright.runtime.controller import RunController
from trainwright.runtime.run_handle import Run
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_log import RunLog
from trainwright.strategies.search.plan_request import placement_for
from trainwright.worker.worker_config import pickle_job, unpickle_job

_LOST = 2  # times that the process of a trial may be lost
_END_S = 60.0  # for a run that is stopped to take a checkpoint
_FAR = 1_000_000  # evaluations, more than any run has
_NEXT_TO_NONE = {"cpu": 0.001}  # Tune has no trials that take nothing
_SILENT = {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_AIR_NEW_OUTPUT": "0"}


@dataclass(frozen=True, kw_only=True)
class SuccessiveHalving:
    """When runs that are behind are stopped: see `Search`."""

    grace: int
    reduction: int


@dataclass(frozen=True, kw_only=True)
class SearchObjective:
    """What is compared.

    Attributes:
        metric: a job's.
        mode: `max` or `min`.
    """

    metric: str
    mode: str


def run_trials(
    jobs: Mapping[str, Job],
    aim: SearchObjective,
    *,
    concurrent: int | None,
    halving: SuccessiveHalving | None = None,
    verbose: bool = False,
) -> dict[str, TrialResult]:
    """Have all these runs made, those that have ended already left out.

    Args:
        jobs: by the names of their runs, all in one storage.
        concurrent: at a time; by default as many as there is room for.
        halving: stop those that are behind.

    Raises:
        TrainwrightError: one failed, with its own error, or there is no room.
        KeyboardInterrupt: it was stopped; runs go on from their checkpoints when it is called again.
    """
    store = open_store(next(iter(jobs.values())).storage)
    past = {name: outcome for name in jobs if (outcome := trial_result(store, name, aim.metric)) is not None}
    if past.keys() == jobs.keys():
        return past
    connect(verbose)
    # In a comparison all take part, those that have ended before the others, with what they came to.
    names = sorted((name for name in jobs if halving or name not in past), key=lambda name: name not in past)
    # Of all, whatever has ended: a run that goes on has the threads that it had.
    slots = min(concurrent or _room(next(iter(jobs.values()))), len(jobs))
    teller = _TrialReporter(store, aim, past, len(names), slots)
    _run(
        {name: _TrialConfig(job=pickle_job(jobs[name]), slots=slots, past=past.get(name)) for name in names},
        aim,
        halving,
        teller,
    )
    if teller.failure is not None:
        raise teller.failure
    if len(teller.outcomes) < len(names):
        raise KeyboardInterrupt
    return {**past, **teller.outcomes}


def _run(
    orders: Mapping[str, _TrialConfig], aim: SearchObjective, halving: SuccessiveHalving | None, teller: _TrialReporter
) -> None:
    scheduler = None
    if halving is not None:
        scheduler = FinishedAwareASHA(
            metric="value", mode=aim.mode, max_t=_FAR, grace_period=halving.grace, reduction_factor=halving.reduction
        )
    # Where Tune lets its own files lie: with those of this Ray session the scratch of a killed process goes too.
    with _quiet(), tempfile.TemporaryDirectory(prefix="search-", dir=session_folder()) as scratch:
        ray_tune.run(
            ray_tune.with_parameters(_RunTrainable, orders=orders, metric=aim.metric),
            config={"run": ray_tune.grid_search(list(orders))},
            resources_per_trial=_NEXT_TO_NONE,
            max_concurrent_trials=next(iter(orders.values())).slots,
            scheduler=scheduler,
            callbacks=[teller],
            stop=teller.stopper,
            storage_path=scratch,
            reuse_actors=True,
            max_failures=_LOST,
            raise_on_failed_trial=False,
            verbose=0,
        )


class FinishedAwareASHA(AsyncHyperBandScheduler):
    """Compares with all runs, but stops none that has ended: that was decided when it was made."""

    def on_trial_result(self, tune_controller: Any, trial: TuneTrial, result: dict[str, Any]) -> str:
        """Whether it goes on."""
        action: str = super().on_trial_result(tune_controller, trial, result)
        return TrialScheduler.CONTINUE if result["settled"] else action


@contextmanager
def _quiet() -> Iterator[None]:
    """Tune says nothing of its own, and writes no logs beside the runs'."""
    loggers = [logging.getLogger(name) for name in ("ray.tune", "ray.train", "ray.air")]
    levels, before = [each.level for each in loggers], {name: os.environ.get(name) for name in _SILENT}
    for each in loggers:
        each.setLevel(logging.CRITICAL)
    os.environ.update(_SILENT)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({name: value} if value is not None else {})


def _room(job: Job) -> int:
    """How many such runs fit the cluster side by side."""
    decision = decide_plan(prepare(job, resume=True))
    plan, used = decision.chosen, decision.used
    return max(1, (used.accelerators or int(used.cpus)) // (plan.processes * plan.devices_per_worker))


def _narrowed(decision: Decision, slots: int) -> Decision:
    """Its workers take no more of the cluster than leaves room for as many others as there are slots."""
    plan = decision.chosen
    share = placement_for(decision.used, slots * plan.processes, plan.devices_per_worker)
    placement = replace(plan.placement, cpus=share.cpus, threads=share.threads, server_cpus=share.server_cpus)
    return replace(decision, chosen=replace(plan, placement=placement))


@dataclass(frozen=True, kw_only=True)
class _TrialConfig:
    """What a trial makes.

    Attributes:
        job: packed.
        slots: runs that share the cluster.
        past: what the run came to, where it has ended, and is only told of.
    """

    job: bytes
    slots: int
    past: TrialResult | None


class _RunTrainable(Trainable):
    """Drives one run after another; each step is an evaluation of it."""

    _driven: _LiveTrial | _ReplayedTrial | None = None

    def setup(  # type: ignore[override]
        self, config: dict[str, Any], *, orders: Mapping[str, _TrialConfig], metric: str
    ) -> None:
        """A run begins with its first step, where its errors can be told."""
        self._orders, self._metric = orders, metric
        self._name = config["run"]

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """End the run, and take another."""
        self.cleanup()
        self._name = new_config["run"]
        return True

    def step(self) -> dict[str, Any]:
        """The next evaluation: see `_told`; or the run's `error`."""
        try:
            if self._driven is None:
                order = self._orders[self._name]
                self._driven = _LiveTrial(order, self._metric) if order.past is None else _ReplayedTrial(order.past)
            return self._driven.next()
        except TrainwrightError as error:
            return {**_told(0, math.nan, over=True), "error": cloudpickle.dumps(error)}

    def cleanup(self) -> None:
        """End the run where it stands, with a checkpoint."""
        driven, self._driven = self._driven, None
        if driven is not None:
            driven.end()


class _ReplayedTrial:
    """A run that has ended, and what its evaluations said."""

    def __init__(self, outcome: TrialResult) -> None:
        self._told = deque(outcome.told.items())

    def next(self) -> dict[str, Any]:
        """As `Trial.step`."""
        step, value = self._told.popleft()
        return _told(step, value, over=not self._told, settled=True)

    def end(self) -> None:
        """There is nothing to end."""


class _LiveTrial:
    """A run, and what its evaluations say: first those of drivers before, then those that come."""

    def __init__(self, order: _TrialConfig, metric: str) -> None:
        job = unpickle_job(order.job)
        prepared = prepare(job, resume=True)
        decision = _narrowed(decide_plan(prepared), order.slots)
        session = RunController(prepared, decision)
        session.listen(ReportListener(prepared.store, job.name))
        self._ear = _EvaluationListener()
        session.listen(self._ear)
        self._metric, self._total, self._last = metric, prepared.total_steps, (0, math.nan)
        self._run: Run | None = Run(job, session, decision)
        self._ear.begun.wait()  # from now on no driver before can tell more, though its process should live
        self._past = deque(read_history(prepared.store, job.name).evaluated)

    def next(self) -> dict[str, Any]:
        """As `Trial.step`. Raises what the run raised."""
        while self._run is not None:
            event = self._past.popleft() if self._past else self._ear.heard.get()
            if event is None or event.step >= self._total:
                self._run.wait()
                self._run = None
            if event is not None and event.step > self._last[0]:
                self._last = (event.step, event.metrics[self._metric])
                return _told(*self._last, over=self._run is None)
        return _told(*self._last, over=True)

    def end(self) -> None:
        """Stop the run; what it fails with while it ends is in its journal."""
        run, self._run = self._run, None
        if run is not None:
            run.stop()
            with suppress(TrainwrightError):
                if not run.wait(_END_S):
                    run.stop(now=True)
                    run.wait()


def _told(step: int, value: float, *, over: bool, settled: bool = False) -> dict[str, Any]:
    """What Tune hears of a run: the metric after so many steps, whether it has `finished`, and had done so before."""
    return {"value": value, "step": step, "finished": over, "settled": settled, "done": over}


class _EvaluationListener:
    """Hears a run's evaluations; None is its end."""

    def __init__(self) -> None:
        self.heard: SimpleQueue[Evaluated | None] = SimpleQueue()
        self.begun = threading.Event()

    def on(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, RunStarted):
            self.begun.set()
        elif isinstance(event, Evaluated):
            self.heard.put(event)

    def close(self) -> None:
        """The run has ended."""
        self.begun.set()
        self.heard.put(None)


class _TrialReporter(Callback):
    """Says what each run came to, and has storage remember which were stopped.

    Attributes:
        outcomes: of the runs that have ended, by name.
        failure: what the first one failed with that did.
        stopper: ends the others then.
    """

    def __init__(
        self, store: Store, aim: SearchObjective, past: Mapping[str, TrialResult], total: int, slots: int
    ) -> None:
        self.outcomes: dict[str, TrialResult] = {}
        self.failure: TrainwrightError | None = None
        self.stopper = _StopOnFailure()
        self._store, self._aim, self._past, self._total = store, aim, past, total
        self._told: dict[str, dict[int, float]] = defaultdict(dict)
        self._surface = display_for(Console(file=sys.stderr))
        self._say(f"search in {store.uri}: {formatting.count(total, 'run')}, {slots} at a time")

    def on_trial_result(
        self, iteration: int, trials: Sequence[TuneTrial], trial: TuneTrial, result: dict[str, Any], **info: Any
    ) -> None:
        """A run was evaluated; one whose process was lost tells all again."""
        self._told[trial.config["run"]][result["step"]] = result["value"]

    def on_trial_complete(
        self, iteration: int, trials: Sequence[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:  # fmt: skip
        """A run is done, was stopped, or failed."""
        name, result = trial.config["run"], trial.last_result
        if "error" in result:
            self._fail(cloudpickle.loads(result["error"]))
            return
        outcome = self._past.get(name) or TrialResult(told=self._told[name], stopped=not result["finished"])
        if outcome.stopped and name not in self._past:
            mark_stopped(self._store, name, outcome)
        self.outcomes[name] = outcome
        came = f"{self._aim.metric} {formatting.metric(outcome.value)} after {formatting.count(outcome.step, 'step')}"
        why = ", stopped: behind others" if outcome.stopped else ""
        self._say(f"  {name}: {came}{why} ({len(self.outcomes)} of {self._total})")

    def on_trial_error(self, iteration: int, trials: Sequence[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """The process of a trial was lost too often."""
        self._fail(
            ResourceError(
                f"the process that drives the run {trial.config['run']!r} was lost {_LOST + 1} times",
                where=self._store.uri,
                remedy="look for what ended it, such as memory (concurrent= gives fewer at a time); then call it again",
            )
        )

    def _fail(self, failure: TrainwrightError) -> None:
        self.failure = self.failure or failure
        self.stopper.failed = True

    def _say(self, text: str) -> None:
        self._surface.line(OutputLine(text=text))


class _StopOnFailure(Stopper):
    """Ends the search where a run failed."""

    failed = False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """No run for itself."""
        return False

    def stop_all(self) -> bool:
        """All of them."""
        return self.failed


# --- What the runs of a search came to, as storage knows it -----------------------------------------------------------


_STOPPED = "stopped"  # folder of the runs that were stopped for good


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What a run came to.

    Attributes:
        told: the metric by steps, of each evaluation, in order; at least one.
        stopped: it was behind others after the last of these.
    """

    told: Mapping[int, float]
    stopped: bool = False

    @property
    def step(self) -> int:
        """After how many steps."""
        return max(self.told)

    @property
    def value(self) -> float:
        """The metric then."""
        return self.told[self.step]


def trial_result(store: Store, run: str, metric: str) -> TrialResult | None:
    """What a run came to that was stopped, or is done and says so; None of one that has more to do or to say."""
    mark = store.find(f"{_STOPPED}/{run}")
    if mark is not None:
        return TrialResult(told=dict(json.loads(mark)), stopped=True)
    head = RunLog(store, run).head()
    if head is None or head.outcome != "done":
        return None
    told = {each.step: each.metrics[metric] for each in read_history(store, run).evaluated}
    return TrialResult(told=told) if max(told, default=-1) >= head.checkpoints[-1].step else None


def mark_stopped(store: Store, run: str, outcome: TrialResult) -> None:
    """Remember that a run was stopped for good, with its figures: its events of these may not be in storage yet."""
    store.put(f"{_STOPPED}/{run}", json.dumps([*outcome.told.items()]).encode())
