"""Teachers that are not trained yet: their runs side by side, each on a share of the cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace

from rich.console import Console

from trainwright.core.cluster import Cluster, Node
from trainwright.core.errors import PlanError, ResourceError, RunFinished, Stopped, TrainwrightError
from trainwright.distillation.distillation_spec import Teacher
from trainwright.planning.job_preparation import PreparedJob, plan_for, prepare
from trainwright.ray_cluster.discovery import connect, discover
from trainwright.reporting.progress_bar import PlainTextDisplay, RunProgress
from trainwright.runtime.launch import create_controller
from trainwright.runtime.run_handle import Run, stop_on_signals

_TURN_S = 0.2  # a join without a timeout would not let signals through


def train_teachers(teachers: Iterable[Teacher], *, verbose: bool = False) -> None:
    """Train the runs of teachers with `train=True` that are not finished; returns when all are.

    Each has a share of the cluster, and waits for one where there are more runs than shares. One for which a share is
    too little has all of the cluster, after the others. A run that was begun before goes on.

    Raises:
        Stopped: a signal came; the runs have taken a checkpoint.
        RunConflict: a run was begun with another job.
        TrainwrightError: a run could not start, or failed; the others were stopped after a checkpoint.
    """
    wanted = [teacher for teacher in teachers if teacher.train]
    if not wanted:
        return
    connect(verbose)
    waiting = _unfinished(wanted)
    if waiting:
        abreast = ParallelRuns(waiting, discover(), verbose=verbose)
        with stop_on_signals(abreast) as stops:
            abreast.train()
        if abreast.stopped:
            left = "the same call goes on with them"
            raise Stopped("stopped while teachers were trained", remedy=left, signal=stops.last)


class ParallelRuns:
    """Runs that share a cluster. `train` blocks; `stop` may be called from a handler of signals.

    Args:
        waiting: what is to be trained.
        cluster: what there is.
        verbose: as of `tw.fit`.

    Attributes:
        stopped: the end was asked for.
    """

    def __init__(self, waiting: list[PreparedJob], cluster: Cluster, *, verbose: bool = False) -> None:
        if all(prepared.job.accelerator == "cpu" for prepared in waiting):
            cluster = cluster.without_accelerators()
        self._waiting, self._cluster, self._verbose = list(waiting), cluster, verbose
        self._free = split_cluster(cluster, len(waiting))
        self._large: list[PreparedJob] = []
        self._running: dict[Run, Cluster] = {}
        self._errors: list[Exception] = []
        self.stopped = False

    def train(self) -> None:
        """Until all runs have ended. Raises the first error of theirs, when the others have stopped."""
        while self._running or self._left:
            try:
                self._start()
                self._listen()
            except Exception as error:
                self._errors.append(error)
                self._stop_all()
        if self._errors:
            raise self._errors[0]

    def stop(self, now: bool = False) -> None:
        """Ask all runs to end."""
        self.stopped = True
        self._stop_all(now)

    @property
    def _left(self) -> bool:
        """Whether there is a run to be started."""
        return bool(self._waiting or self._large) and not self.stopped and not self._errors

    def _stop_all(self, now: bool = False) -> None:
        for run in list(self._running):
            run.stop(now)

    def _start(self) -> None:
        """Give free shares to runs that wait, and all of the cluster to a large one when no other runs."""
        while self._free and self._waiting and self._left:
            prepared, share = self._waiting.pop(0), self._free.pop(0)
            try:
                self._launch(prepared, share)
            except (ResourceError, PlanError):  # raised again if all of the cluster is too little
                self._large.append(prepared)
                self._free.append(share)
        if self._large and not self._running and self._left:
            self._launch(self._large.pop(0), self._cluster)

    def _launch(self, prepared: PreparedJob, share: Cluster) -> None:
        job, decision = prepared.job, plan_for(prepared, share)
        surface = PlainTextDisplay(Console(file=sys.stderr), head=f"{job.name}: ")
        session = create_controller(
            prepared, decision, RunProgress(decision.chosen, verbose=self._verbose, surface=surface)
        )
        run = Run(job, session, decision)
        self._running[run] = share
        if self.stopped:  # since it was looked at
            run.stop()

    def _listen(self) -> None:
        """Wait for each run for a moment; one that has ended gives its share back. Raises what a run does."""
        for run in list(self._running):
            try:
                ended = run.wait(timeout_s=_TURN_S)
            except Exception as error:
                del self._running[run]
                if isinstance(error, TrainwrightError):
                    error.where = "; ".join(filter(None, (f"run {run.job.name!r} of a teacher", error.where)))
                raise
            if ended:
                self._free.append(self._running.pop(run))


def split_cluster(cluster: Cluster, wanted: int) -> list[Cluster]:
    """Parts of a cluster for runs side by side: whole nodes, or equal parts of a node.

    Args:
        cluster: with accelerators, or without any.
        wanted: number of runs.

    Returns:
        As many, or fewer where there are fewer accelerators, or without any fewer CPUs.
    """
    nodes = [node for node in cluster.nodes if node.accelerators] or list(cluster.nodes)
    if wanted <= len(nodes):
        return [Cluster(nodes=tuple(nodes[first::wanted])) for first in range(wanted)]
    parts = [wanted // len(nodes) + (number < wanted % len(nodes)) for number in range(len(nodes))]
    return [Cluster(nodes=(part,)) for node, number in zip(nodes, parts, strict=True) for part in _parts(node, number)]


def _parts(node: Node, wanted: int) -> list[Node]:
    """Equal parts of a node, none without an accelerator, or a CPU where there are none."""
    number = max(1, min(wanted, node.accelerators or int(node.cpus)))
    part = replace(
        node,
        cpus=node.cpus / number,
        memory_bytes=node.memory_bytes // number,
        accelerators=node.accelerators // number,
    )
    return [part] * number


def _unfinished(teachers: Iterable[Teacher]) -> list[PreparedJob]:
    """The runs that have steps left, each once. Raises RunConflict for one of another job."""
    jobs = {(teacher.job.storage, teacher.job.name): teacher.job for teacher in teachers if teacher.job is not None}
    found = []
    for job in jobs.values():
        try:
            found.append(prepare(job))
        except RunFinished:
            continue
    return found
