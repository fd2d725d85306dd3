"""Train several runs side by side, each on a share of the cluster: trials of searches, and teachers.

The drivers of the runs are threads of this process. When it dies, the same call continues the runs.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from trainwright.core.cluster import Cluster, Node
from trainwright.core.errors import PlanError, ResourceError, RunConflict, RunFinished, Stopped, TrainwrightError
from trainwright.planning.job_preparation import PreparedJob, plan_for, prepare
from trainwright.ray_cluster.discovery import connect, discover
from trainwright.reporting.progress_bar import PlainTextDisplay, RunProgress
from trainwright.runtime.run_handle import Run, stop_on_signals
from trainwright.runtime.run_listeners import create_controller
from trainwright.tracking.experiment_trackers import check_trackers

if TYPE_CHECKING:
    from trainwright.core.job import Job
    from trainwright.reporting.event_messages import OutputLine, ProgressFigures

_TURN_S = 0.2  # a join without a timeout would block signals


def train_in_parallel(
    jobs: Iterable[Job],
    *,
    what: str,
    parts: int | None = None,
    resume: bool = False,
    fresh: bool = False,
    verbose: bool = False,
    on_start: Callable[[Run], object] | None = None,
    on_end: Callable[[Job], object] | None = None,
    on_error: Callable[[Job, TrainwrightError], object] | None = None,
) -> None:
    """Train the runs that are not finished, and continue those that were started. Return when all are finished.

    Each run has a share of the cluster, and waits for one where there are more runs than shares. A run for which a
    share is too small has the whole cluster, after the others.

    Args:
        jobs: one for each run.
        what: the runs, in words.
        parts: shares of the cluster, at most; each has an accelerator, or a CPU, for each worker of a run. By default
            as many as there are unfinished runs.
        resume, fresh, verbose: as of `tw.fit`.
        on_start: called with each run that has started.
        on_end: called with the job of each run that has ended, unless all are stopped; the progress of runs is not
            shown then.
        on_error: called with the job and the error of each run that could not start or failed, and the others
            continue; what it raises stops them. By default, and where a run belongs to another job or driver, the
            first error stops the others.

    Raises:
        Stopped: a signal came; the runs have taken a checkpoint.
        TrainwrightError: a run could not start, or failed; the others were stopped after a checkpoint. A tracker of a
            job cannot be used: nothing was started.
    """
    jobs = list(jobs)
    if not jobs:
        return
    check_trackers({id(tracker): tracker for job in jobs for tracker in job.trackers}.values())
    connect(verbose)
    waiting = _unfinished(jobs, resume, fresh)
    if not waiting:
        return
    runs = ParallelRuns(
        waiting, discover(), parts=parts, fresh=fresh, verbose=verbose, on_start=on_start, on_end=on_end,
        on_error=on_error,
    )  # fmt: skip
    with stop_on_signals(runs) as stops:
        runs.train()
    if runs.stopped:
        raise Stopped(
            f"stopped while {what} were trained", remedy="the same call continues", signal=stops.last or signal.SIGINT
        )


class ParallelRuns:
    """Runs that share a cluster. `train` blocks; `stop` may be called from a signal handler.

    Args:
        waiting: the runs to train.
        cluster: the resources that they share.
        parts, fresh, verbose, on_start, on_end, on_error: as of `train_in_parallel`.

    Attributes:
        stopped: whether `stop` was called, or one of the runs was stopped from elsewhere.
    """

    def __init__(
        self,
        waiting: list[PreparedJob],
        cluster: Cluster,
        *,
        parts: int | None = None,
        fresh: bool = False,
        verbose: bool = False,
        on_start: Callable[[Run], object] | None = None,
        on_end: Callable[[Job], object] | None = None,
        on_error: Callable[[Job, TrainwrightError], object] | None = None,
    ) -> None:
        if all(prepared.job.scaling.accelerator == "cpu" for prepared in waiting):
            cluster = cluster.without_accelerators()
        self._waiting, self._cluster = list(waiting), cluster
        self._fresh, self._verbose = fresh, verbose
        self._on_start, self._on_end, self._on_error = on_start, on_end, on_error
        if parts is not None:
            workers = max((_least_workers(each.job) for each in waiting), default=1)
            parts = min(parts, _share_count(cluster, workers))
        self._free = split_cluster(cluster, parts or len(waiting))
        self._large: list[PreparedJob] = []
        self._running: dict[Run, Cluster] = {}
        self._errors: list[Exception] = []
        self.stopped = False

    def train(self) -> None:
        """Block until all runs have ended. Raises the first error of a run, when the others have stopped."""
        while self._running or self._left:
            try:
                self._start()
                self._wait()
            except Exception as error:
                self._errors.append(error)
                self._stop_all()
        if self._errors:
            raise self._errors[0]

    def stop(self, now: bool = False) -> None:
        """Ask all runs to stop."""
        self.stopped = True
        self._stop_all(now)

    @property
    def _left(self) -> bool:
        """Whether there is a run to start."""
        return bool(self._waiting or self._large) and not self.stopped and not self._errors

    def _stop_all(self, now: bool = False) -> None:
        for run in list(self._running):
            run.stop(now)

    def _start(self) -> None:
        """Start waiting runs on free shares, and a large one on the whole cluster when no other run is left."""
        while self._free and self._waiting and self._left:
            prepared, share = self._waiting.pop(0), self._free.pop(0)
            try:
                self._launch(prepared, share)
            except (ResourceError, PlanError):  # raised again if the whole cluster is too small
                self._large.append(prepared)
                self._free.append(share)
            except Exception as error:
                self._free.append(share)
                self._fail(prepared.job, error)
        if self._large and not self._running and self._left:
            prepared = self._large.pop(0)
            try:
                self._launch(prepared, self._cluster)
            except Exception as error:
                self._fail(prepared.job, error)

    def _launch(self, prepared: PreparedJob, share: Cluster) -> None:
        job, decision = prepared.job, plan_for(prepared, share)
        shown = PlainTextDisplay if self._on_end is None else _WarningsOnly
        surface = shown(Console(file=sys.stderr), head=f"{job.name}: ")
        progress = RunProgress(decision.chosen, verbose=self._verbose, surface=surface)
        run = Run(job, create_controller(prepared, decision, progress, fresh=self._fresh), decision)
        self._running[run] = share
        if self._on_start is not None:
            self._on_start(run)
        if self.stopped:  # a signal came in the meantime
            run.stop()

    def _wait(self) -> None:
        """Wait for each run for a moment; free the shares of those that have ended. Raises the error of a run."""
        for run in list(self._running):
            try:
                ended = run.wait(timeout_s=_TURN_S)
            except Exception as error:
                self._free.append(self._running.pop(run))
                self._fail(run.job, error)
                continue
            if ended:
                self._free.append(self._running.pop(run))
                if run.state == "stopped" and not run.stop_asked:  # from elsewhere: it is not finished
                    self.stop()
                if self._on_end is not None and not self.stopped and not self._errors:
                    self._on_end(run.job)

    def _fail(self, job: Job, error: Exception) -> None:
        """Pass on the error of a run, with the run's name; raise it where the other runs must not continue."""
        if not isinstance(error, TrainwrightError):
            raise error
        error.where = "; ".join(filter(None, (f"run {job.name!r}", error.where)))
        if self._on_error is None or isinstance(error, RunConflict):
            raise error
        self._on_error(job, error)


class _WarningsOnly(PlainTextDisplay):
    """Prints warnings and errors, and no progress."""

    def line(self, line: OutputLine) -> None:
        """Print a warning or an error."""
        if line.tone in ("warning", "bad"):
            super().line(line)

    def show(self, figures: ProgressFigures, *, news: bool) -> None:
        """Print nothing."""


def _least_workers(job: Job) -> int:
    """Return for how many workers the share of a run needs room."""
    given = job.scaling.workers or job.scaling.min_workers
    return given or (1 if job.planning.strategy in (None, "one_device", "tf_one_device") else 2)


def _share_count(cluster: Cluster, workers: int) -> int:
    """Return how many shares of a cluster have an accelerator, or a CPU, for each of so many workers; 1 or more."""
    devices = [_device_count(node) for node in _training_nodes(cluster)]
    return max(1, sum(each // workers for each in devices) or sum(devices) // workers)


def _device_count(node: Node) -> int:
    """Return the accelerators of a node, or its CPUs if it has none."""
    return node.accelerators or int(node.cpus)


def _training_nodes(cluster: Cluster) -> list[Node]:
    return [node for node in cluster.nodes if node.accelerators] or list(cluster.nodes)


def split_cluster(cluster: Cluster, wanted: int) -> list[Cluster]:
    """Divide a cluster into shares: whole nodes, or equal parts of a node.

    Args:
        cluster: with accelerators, or without any.
        wanted: number of shares.

    Returns:
        As many shares as wanted; fewer if there are fewer accelerators (without accelerators: fewer CPUs).
    """
    nodes = _training_nodes(cluster)
    if wanted <= len(nodes):
        return [Cluster(nodes=tuple(nodes[first::wanted])) for first in range(wanted)]
    parts, devices = [1] * len(nodes), [_device_count(node) for node in nodes]
    for _ in range(wanted - len(nodes)):
        parts[max(range(len(nodes)), key=lambda number: devices[number] / (parts[number] + 1))] += 1
    return [Cluster(nodes=(part,)) for node, number in zip(nodes, parts, strict=True) for part in _parts(node, number)]


def _parts(node: Node, wanted: int) -> list[Node]:
    """Return equal parts of a node, each with an accelerator, or with a CPU if there are no accelerators."""
    number = max(1, min(wanted, _device_count(node)))
    part = replace(
        node,
        cpus=node.cpus / number,
        memory_bytes=node.memory_bytes // number,
        accelerators=node.accelerators // number,
    )
    return [part] * number


def _unfinished(jobs: Iterable[Job], resume: bool, fresh: bool) -> list[PreparedJob]:
    """Return the runs that have steps left. Raises RunConflict for a run that was started with another job."""
    found = []
    for job in jobs:
        try:
            found.append(prepare(job, resume=resume, fresh=fresh))
        except RunFinished:
            continue
    return found
