"""A run inside a train function of Ray Train, on its workers.

Rank 0 drives the run, and all ranks report to Ray Train together. Ray Train's workers are the cluster of the run: they
train in their own processes, or each one lends its bundle of Ray Train's placement group to a process of ours.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainwright.core import formatting
from trainwright.core.cluster import Cluster, Node
from trainwright.core.errors import JobError, PlanError, ResourceError, TrainwrightError, WorkerLost
from trainwright.core.events import Checkpointed, Evaluated, Event, Failed, Steps
from trainwright.core.job import Job
from trainwright.core.plan import Plan
from trainwright.driver.messages import FinishRun
from trainwright.integrations.rank_channel import RankCalls, RankChannel, RankHandle, TrainWorker
from trainwright.planning.decision import Decision
from trainwright.planning.job_preparation import PreparedJob, plan_for, prepare
from trainwright.ray_cluster.discovery import nodes_by_id
from trainwright.ray_cluster.placement_groups import WorkerPlacement
from trainwright.reporting.progress_bar import RunProgress
from trainwright.runtime.run_handle import RunDriver
from trainwright.runtime.run_listeners import create_controller
from trainwright.runtime.takeover import kept_alive, run_name
from trainwright.storage.checkpoints import MANIFEST
from trainwright.storage.event_files import read_events
from trainwright.storage.event_log import EventListener
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_log import RunLog
from trainwright.storage.store_errors import MissingFile
from trainwright.strategies import engine_class
from trainwright.tracking.experiment_trackers import check_trackers

_TF_CONFIG, _LEGACY_KERAS = "TF_CONFIG", "TF_USE_LEGACY_KERAS"  # a TensorflowTrainer sets both
_HOLD_S = 15.0  # within this time Ray Train ends all ranks after rank 0 has raised an error


def inside_ray_train() -> bool:
    """Return whether this process is a worker of Ray Train."""
    train: Any = sys.modules.get("ray.train")
    if train is None or not ray.is_initialized() or ray.util.get_current_placement_group() is None:
        return False
    try:
        with warnings.catch_warnings(action="ignore"):  # of its first version, where there is no such context
            return train.get_context().get_world_size() is not None
    except (RuntimeError, DeprecationWarning):  # elsewhere, and in a function of Ray Tune's
        return False


def refuse_inside_ray_train(what: str, remedy: str) -> None:
    """Raise ResourceError inside Ray Train, where `what` is not possible."""
    if inside_ray_train():
        raise ResourceError(f"{what} cannot be called inside Ray Train", where="the train function", remedy=remedy)


def refuse_outside_ray_train(processes: str | None) -> None:
    """Raise ResourceError for a choice that exists only inside Ray Train."""
    if processes == "ray_train":
        raise ResourceError(
            'processes="ray_train" needs workers of Ray Train, and there are none here',
            where="processes",
            remedy="leave it out, or call tw.fit in the train function of a TorchTrainer",
        )


@dataclass(frozen=True, kw_only=True)
class _LeaderAnswer:
    """The first message of rank 0: the plan, and the storage of the run."""

    decision: Decision
    storage: str


def start_inside_ray_train(
    job: Job, *, resume: bool, fresh: bool, verbose: bool, detached: bool = False, processes: Processes | None = None
) -> tuple[RunDriver, Decision]:
    """Return a driver of a job's run and its plan inside a train function of Ray Train; every rank calls it.

    Args:
        job, resume, fresh, verbose, detached, processes: as of `tw.start`. `fresh` is ignored when Ray Train starts the
            function again; `detached` is refused.

    Raises:
        TrainwrightError: on every rank, the error of rank 0.
    """
    check_trackers(job.trackers)
    if detached:
        refuse_inside_ray_train(
            "tw.start(detached=True)", "leave detached out: FailureConfig(max_failures=...) starts rank 0 again"
        )
    group = ray.util.get_current_placement_group()
    assert group is not None, "workers of Ray Train are in a placement group"
    channel = RankChannel.open(group)
    os.environ.pop(_LEGACY_KERAS, None)  # Keras 3 trains here, as elsewhere
    follower = _FollowerRank(channel) if channel.rank else None
    channel.register(_this_worker(job))
    if follower is not None:
        return follower, follower.begin()
    RankCalls(channel, lambda message: None)  # rank 0 tells itself nothing new
    try:
        return _lead(channel, job, group, resume=resume, fresh=fresh, verbose=verbose, processes=processes)
    except BaseException as error:
        channel.send_last(FinishRun(outcome="failed", step=0, error=_portable_error(error)))
        raise


def _this_worker(job: Job) -> TrainWorker:
    here = ray.get_runtime_context()
    ids: Mapping[str, list[str]] = here.get_accelerator_ids()
    held = next((name for name in ("GPU", "TPU") if ids.get(name)), "")
    return TrainWorker(
        rank=_context().get_world_rank(),
        node_id=here.get_node_id(),
        run=job.name,
        accelerator=held,
        accelerators=tuple(str(number) for number in ids.get(held, ())),
    )


def _lead(
    channel: RankChannel,
    job: Job,
    group: PlacementGroup,
    *,
    resume: bool,
    fresh: bool,
    verbose: bool,
    processes: Processes | None,
) -> tuple[RunDriver, Decision]:
    table: dict[str, Any] = placement_group_table(group)
    workers = TrainWorkers.of(channel.workers(), table["bundles_to_node_id"], group.bundle_specs)
    job = workers.job(job)
    again = _is_again(job)
    # Outside placement groups, and before the data set is looked at, whose tasks may hold CPUs for a moment longer.
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    with kept_alive(run_name(open_store(job.storage).uri_of(job.name))):
        prepared = prepare(job, resume=resume or again, fresh=fresh and not again)
        decision = _decide(prepared, workers.cluster(nodes_by_id()), group)
        why = own_processes_reason(job, decision.chosen, processes)
        decision = workers.placed(decision, data_cpus=free.get("CPU", 0.0), own=why)
        head = RunLog(prepared.store, job.name).head()
        session: RunDriver
        if again and head is not None and head.outcome == "done":
            session = _FinishedRun(prepared)
        else:
            shared = None if why else SharedProcesses(workers, group, decision.chosen, channel)
            started = prepared if why else replace(prepared, job=job.replace(spares=0))
            session = create_controller(
                started,
                decision,
                RunProgress(decision.chosen, verbose=verbose),
                fresh=fresh and not again,
                placement=shared or TrainPlacement(workers, group, decision.chosen),
            )
            if shared is not None:
                session.listen(shared)
    channel.send(_LeaderAnswer(decision=decision, storage=prepared.store.uri))
    return LeaderRank(channel, session, prepared), decision


def _decide(prepared: PreparedJob, cluster: Cluster, group: PlacementGroup) -> Decision:
    """Choose the plan; for TensorFlow in another process, since this one may use it only to train."""
    if _TF_CONFIG not in os.environ:
        return plan_for(prepared, cluster)
    environment = {"env_vars": {_TF_CONFIG: os.environ[_TF_CONFIG]}}
    where = PlacementGroupSchedulingStrategy(group)
    task = ray.remote(num_cpus=0, runtime_env=environment, scheduling_strategy=where)(plan_for)
    try:
        decision: Decision = ray.get(task.remote(prepared, cluster))
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, TrainwrightError) else error from None
    return decision


class LeaderRank:
    """Drives the run on rank 0, and lets every rank report its metrics to Ray Train."""

    def __init__(self, channel: RankChannel, session: RunDriver, prepared: PreparedJob) -> None:
        self._channel, self._session, self.store = channel, session, prepared.store
        run = prepared.job.name

        def pointer(step: int, path: str) -> Mapping[str, str | int]:
            return {"checkpoint": self.store.uri_of(f"{run}/{path}"), "step": step, **_mark(self.store, run)}

        self._reports = ReportQueue(prepared.steps_per_epoch, pointer)
        self._report_error: TrainwrightError | None = None

    def run(self) -> FinishRun:
        """Drive the run to its end, and tell every rank how it ended."""
        self._session.listen(self._reports)
        reporting = threading.Thread(target=self._report, name="trainwright-ray-train", daemon=True)
        reporting.start()
        try:
            finish = self._session.run()
        except BaseException as error:
            finish = FinishRun(outcome="failed", step=0, error=_portable_error(error))
        self._reports.end(silently=finish.error is not None)
        reporting.join()
        if self._report_error is not None and finish.error is None:
            finish = FinishRun(outcome="failed", step=finish.step, error=self._report_error)
        self._channel.send_last(finish)
        return finish

    def stop(self, now: bool = False) -> None:
        """Ask the run to end."""
        self._session.stop(now)

    def flush(self) -> None:
        """Write the events so far."""
        self._session.flush()

    def listen(self, listener: EventListener) -> None:
        """Add a listener of all events."""
        self._session.listen(listener)

    def _report(self) -> None:
        """Report until the end. Ray Train waits for the report of every rank, so the other ranks get it first."""
        try:
            for report in self._reports.reports():
                self._channel.send(_TrainReport(metrics=report.metrics))
                _report(report)
        except Exception as error:  # it would be lost with this thread, and the run would continue without reports
            self._report_error = _report_failure(error)
            self._session.stop()


class _FollowerRank:
    """Does what rank 0 asks until the end of the run. Implements `RunDriver`."""

    def __init__(self, channel: RankChannel) -> None:
        self._begun: Future[_LeaderAnswer] = Future()
        self._finished: Future[FinishRun] = Future()
        self._calls = RankCalls(channel, self._told)

    def begin(self) -> Decision:
        """Wait for the plan. Raises the error of rank 0 if there is none."""
        self._calls.wait(self._begun)
        error = self._begun.exception()
        if error is not None:
            _wait_for_rank_0()
            raise error
        return self._begun.result().decision

    @property
    def store(self) -> Store:
        """Where the run lives."""
        return open_store(self._begun.result().storage)

    def run(self) -> FinishRun:
        """Wait until rank 0 says how the run ended."""
        self._calls.wait(self._finished)
        finish = self._finished.result()
        if finish.error is not None:
            _wait_for_rank_0()
        return finish

    def _told(self, message: _LeaderAnswer | _TrainReport | FinishRun) -> None:
        match message:
            case _LeaderAnswer():
                self._begun.set_result(message)
            case _TrainReport():
                try:
                    _report(message)
                except Exception as error:
                    raise _report_failure(error) from error
            case FinishRun():
                if not self._begun.done():
                    self._begun.set_exception(message.error)
                self._finished.set_result(message)

    def stop(self, now: bool = False) -> None:
        raise ResourceError("only rank 0 of Ray Train can stop the run", remedy="call stop where the rank is 0")

    def flush(self) -> None:
        """Do nothing: rank 0 writes the events."""

    def listen(self, listener: EventListener) -> None:
        raise ResourceError("only rank 0 of Ray Train has the events", remedy="call listen where the rank is 0")


class _FinishedRun:
    """A run that was done before Ray Train started the train function again. Implements `RunDriver`."""

    def __init__(self, prepared: PreparedJob) -> None:
        self.store, self._prepared = prepared.store, prepared

    def run(self) -> FinishRun:
        return FinishRun(outcome="done", step=self._prepared.total_steps)

    def stop(self, now: bool = False) -> None:
        """Do nothing: the run has ended."""

    def flush(self) -> None:
        """Do nothing: all events are written."""

    def listen(self, listener: EventListener) -> None:
        """Pass the stored events."""
        for event in read_events(self.store, self._prepared.job.name):
            listener.on(event)


def _ray_train() -> Any:
    return importlib.import_module("ray.train")


def _context() -> Any:
    return _ray_train().get_context()


def _mark(store: Store, run: str) -> dict[str, str]:
    """Return the part of a pointer by which a run recognizes its own pointers from the same Ray job."""
    return {"run": store.uri_of(run), "ray_job": str(ray.get_runtime_context().get_job_id())}


def _is_again(job: Job) -> bool:
    """Return whether Ray Train has started the train function again after this run had reported a checkpoint."""
    checkpoint = _ray_train().get_checkpoint()
    if checkpoint is None:
        return False
    try:  # the whole checkpoint would be copied from its storage for one file of it
        with checkpoint.filesystem.open_input_stream(f"{checkpoint.path}/{POINTER_FILE}") as file:
            found: dict[str, Any] = json.loads(file.read())
    except FileNotFoundError:
        return False
    return {**found, **_mark(open_store(job.storage), job.name)} == found


def _report(report: _TrainReport) -> None:
    """Report to Ray Train, and return when all ranks have reported."""
    with _pointer_checkpoint(report.pointer) as checkpoint:
        _ray_train().report(dict(report.metrics), checkpoint=checkpoint)


@contextmanager
def _pointer_checkpoint(pointer: Mapping[str, str | int]) -> Iterator[Any]:
    """Yield a checkpoint of Ray Train that contains a pointer and the weights; None without a pointer."""
    with tempfile.TemporaryDirectory() as folder:
        if pointer and copy_weights(str(pointer["checkpoint"]), Path(folder)):
            (Path(folder) / POINTER_FILE).write_text(json.dumps(pointer))
            yield _ray_train().Checkpoint.from_directory(folder)
        else:
            yield None


def copy_weights(checkpoint: str, folder: Path) -> bool:
    """Copy the files of a run's checkpoint that hold the weights of the whole model; none where the plan divides it.

    Returns:
        False if the checkpoint was deleted meanwhile, since newer ones exist.
    """
    store = open_store(checkpoint)
    names = [name for name, _ in store.list()]
    try:
        for name in filter(_WEIGHTS.fullmatch, names):
            with (folder / name).open("wb") as file:
                file.writelines(store.stream(name))
    except MissingFile:
        return False
    return MANIFEST in names


def _portable_error(error: BaseException) -> TrainwrightError:
    """Return an error that can be pickled for the other ranks."""
    if isinstance(error, TrainwrightError):
        return error
    return TrainwrightError(
        f"{type(error).__name__}: {error}",
        where="rank 0 of Ray Train",
        detail="".join(traceback.format_exception(error)),
    )


def _report_failure(error: Exception) -> TrainwrightError:
    if isinstance(error, TrainwrightError):
        return error
    return ResourceError(
        f"Ray Train did not accept a report: {error}",
        where="RunConfig",
        remedy="give RunConfig a storage_path that all nodes can write; the run itself continues from its checkpoint",
        detail=traceback.format_exc(),
    )


def _wait_for_rank_0() -> None:
    """Wait while Ray Train ends all ranks because rank 0 has raised, so that it shows the error of rank 0 alone.

    Afterwards, if the user has caught that error, the other ranks raise it too.
    """
    threading.Event().wait(_HOLD_S)


# --- Reports to Ray Train ---------------------------------------------------------------------------------------------


_REPORT_INTERVAL_S = 10.0  # longest time without a report while there are steps
POINTER_FILE = "trainwright.json"
"""The file of a checkpoint of Ray Train that says where the run's own checkpoint is."""
_WEIGHTS = re.compile(r"(model|average)(-\d+)?\.safetensors|state\.(index|data-.*)")  # of torch and of TensorFlow


@dataclass(frozen=True, kw_only=True)
class _TrainReport:
    """A report that every rank makes to Ray Train. `pointer` has the contents of `POINTER_FILE`, on rank 0 alone."""

    metrics: Mapping[str, float]
    pointer: Mapping[str, str | int] = field(default_factory=dict)


class ReportQueue:
    """A listener that keeps the newest metrics for the next report; older ones are overwritten, so that none waits.

    A report is due at the end of an epoch, after an evaluation and after a checkpoint. Ray Train accepts a report about
    every 2 seconds, and steps may be faster.

    Args:
        pointer: makes a pointer of a step and a checkpoint's path below the run.
        every_s: seconds after which steps alone are reported.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        steps_per_epoch: int,
        pointer: Callable[[int, str], Mapping[str, str | int]],
        *,
        every_s: float = _REPORT_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_epoch, self._pointer, self._every_s, self._clock = steps_per_epoch, pointer, every_s, clock
        self._condition = threading.Condition()
        self._metrics: dict[str, float] = {}
        self._newest: Mapping[str, str | int] = {}
        self._due = self._changed = self._ended = self._points = False
        self._reported_s = clock()

    def on(self, event: Event) -> None:
        """Take one event."""
        with self._condition:
            match event:
                case Steps() if event.step:
                    self._step(event)
                case Evaluated():
                    self._metrics |= {f"evaluation/{name}": value for name, value in event.metrics.items()}
                    self._changed = self._due = self._points = True
                case Checkpointed():
                    self._newest = self._pointer(event.step, event.path)
                    self._changed = self._due = self._points = True
                case Failed():
                    self._metrics["failures"] = self._metrics.get("failures", 0) + 1
            self._condition.notify_all()

    def close(self) -> None:
        """Do nothing: `end` ends the queue."""

    def end(self, *, silently: bool = False) -> None:
        """End the queue after a last report of what has changed; with `silently` without it."""
        with self._condition:
            self._ended, self._due = True, self._changed and not silently
            self._condition.notify_all()

    def reports(self) -> Iterator[_TrainReport]:
        """Wait for each report that is due and yield it, until `end` is called."""
        while True:
            with self._condition:
                while not (self._due or self._ended):
                    self._condition.wait(self._every_s if self._changed else None)
                    self._due |= self._changed and self._clock() - self._reported_s >= self._every_s
                if not self._due:
                    return
                points = self._points or self._ended
                report = _TrainReport(metrics=dict(self._metrics), pointer=self._newest if points else {})
                self._due = self._changed = self._points = False
                self._reported_s = self._clock()
            yield report

    def _step(self, event: Steps) -> None:
        """Take the metrics of the newest step. At the end of an epoch, a report is due."""
        last = event.step[-1]
        self._due |= last // self._per_epoch > (event.step[0] - 1) // self._per_epoch
        self._changed = True
        figures = {
            "step": last,
            "epoch": math.ceil(last / self._per_epoch),
            "train/loss": event.loss[-1],
            "train/learning_rate": event.learning_rate[-1],
            "speed/samples_per_s": sum(event.samples) / max(sum(event.step_s), 1e-9),
            **{f"train/{name}": values[-1] for name, values in event.logged.items()},
        }
        self._metrics |= {name: value for name, value in figures.items() if math.isfinite(value)}


# --- Ray Train's workers as a cluster, and job options that conflict with them ----------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainWorkers:
    """All workers of Ray Train, in the order of their ranks."""

    workers: tuple[TrainWorker, ...]
    bundles: tuple[int, ...]  # the bundle of each worker in Ray Train's placement group
    cpus: float  # of each worker, by `resources_per_worker`

    @classmethod
    def of(
        cls, workers: Iterable[TrainWorker], bundle_nodes: Mapping[int, str], bundles: Sequence[Mapping[str, float]]
    ) -> TrainWorkers:
        """Assign each worker a bundle on its node.

        Args:
            bundle_nodes: Ray's id of the node of each bundle.
            bundles: resources of each; those on one node are alike.

        Raises:
            ResourceError: the ranks name several runs, share an accelerator, or have TPUs.
        """
        ordered = tuple(sorted(workers, key=lambda worker: worker.rank))
        _check(ordered)
        free: dict[str, list[int]] = defaultdict(list)
        for bundle, node_id in sorted(bundle_nodes.items()):
            free[node_id].append(bundle)
        taken = tuple(free[worker.node_id].pop(0) for worker in ordered)
        return cls(workers=ordered, bundles=taken, cpus=min(bundles[bundle].get("CPU", 0.0) for bundle in taken))

    def cluster(self, nodes: Mapping[str, Node]) -> Cluster:
        """Return the cluster that has only the resources of these workers; `nodes` of the whole one, by Ray's id."""
        here: dict[str, list[TrainWorker]] = defaultdict(list)
        for worker in self.workers:
            here[worker.node_id].append(worker)
        return Cluster(nodes=tuple(self._part(nodes[node_id], workers) for node_id, workers in here.items()))

    def _part(self, node: Node, workers: Sequence[TrainWorker]) -> Node:
        """Return what workers have of their node; a worker without a CPU of its own still computes on one."""
        number = sum(len(worker.accelerators) for worker in workers)
        share = min(1.0, len(workers) * self.cpus / node.cpus)
        return replace(
            node,
            cpus=len(workers) * max(1.0, self.cpus),
            memory_bytes=int(node.memory_bytes * (share or 1.0)),
            accelerators=number,
            accelerator=workers[0].accelerator if number else "",
            kind=node.kind if number else "",
        )

    def job(self, job: Job) -> Job:
        """Return the job for as many workers. Raises ResourceError if it asks for another number."""
        size, scaling = len(self.workers), job.scaling
        least = scaling.min_workers or scaling.workers or 1
        most = scaling.max_workers or scaling.workers or size
        if not least <= size <= most:
            wanted = f"{least}" if least == most else f"{least} to {most}"
            raise ResourceError(
                f"the job asks for {wanted} workers, and Ray Train started {size}",
                where="workers",
                remedy=f"leave workers= out, or set ScalingConfig(num_workers={least if size < least else most})",
            )
        return job.replace(workers=size, min_workers=None, max_workers=None, on_loss="wait")

    def placed(self, decision: Decision, *, data_cpus: float, own: str) -> Decision:
        """Return the decision with plans that use the resources of these workers.

        Args:
            data_cpus: CPUs of the cluster that are free for Ray Data.
            own: why the workers are processes of their own; empty for those of Ray Train, in which no plans are
                measured: one that fails there would cost a start of Ray Train.

        Raises:
            PlanError: the plan has another number of workers, or leaves accelerators unused.
        """
        contenders = decision.contenders if own else ()
        plans = [self._placed(plan, data_cpus) for plan in (decision.chosen, *contenders)]
        note = _OWN_NOTE.format(own) if own else _SHARED_NOTE
        chosen = replace(plans[0], notes=(*plans[0].notes, note))
        return replace(decision, chosen=chosen, contenders=tuple(plans[1:]))

    def _placed(self, plan: Plan, data_cpus: float) -> Plan:
        size, held = len(self.workers), len(self.workers[0].accelerators)
        used = plan.placement.accelerators
        if plan.workers != size:
            raise PlanError(
                f"{plan.strategy} is for {formatting.count(plan.workers, 'worker')}, and Ray Train started {size}",
                where="num_workers",
                remedy=f"set ScalingConfig(num_workers={plan.workers}), or leave strategy= and plan= out",
            )
        if used and used != held:
            raise PlanError(
                f"{plan.strategy} has workers of {formatting.count(used, plan.placement.accelerator)}, and those of "
                f"Ray Train have {held}",
                where="resources_per_worker",
                remedy=f"set resources_per_worker={{'{plan.placement.accelerator}': {used}}}, or devices={held}",
            )
        placement = replace(plan.placement, threads=max(1, int(self.cpus)), data_cpus=data_cpus)
        return replace(plan, placement=placement)


def _check(workers: Sequence[TrainWorker]) -> None:
    """Raise ResourceError for workers that cannot train one job together."""
    if others := [worker.run for worker in workers if worker.run != workers[0].run]:
        raise ResourceError(
            f"the ranks of Ray Train train different runs: {workers[0].run!r} and {others[0]!r}",
            where="the train function",
            remedy="call tw.fit with the same job on every rank",
        )
    if any(worker.accelerator == "TPU" for worker in workers):
        raise ResourceError(
            "trainwright does not train on TPUs inside Ray Train",
            remedy="call tw.fit outside of it: it places its own workers on them",
        )
    held = Counter((worker.node_id, number) for worker in workers for number in worker.accelerators)
    if shared := [number for (_, number), times in held.items() if times > 1]:
        raise ResourceError(
            f"workers of Ray Train share the {workers[0].accelerator} {shared[0]}",
            where="resources_per_worker",
            remedy=f"give each one of its own: resources_per_worker={{'{workers[0].accelerator}': 1}}",
        )


# --- Whose processes the workers are ----------------------------------------------------------------------------------


Processes = Literal["ray_train", "own"]
_OWN_NOTE = "the workers are processes beside those of Ray Train, since {}"
_SHARED_NOTE = (
    "the workers are Ray Train's own processes: when one ends, Ray Train starts all again as FailureConfig allows, and "
    'the run continues from its newest checkpoint; with processes="own" one is replaced in its place'
)


def own_processes_reason(job: Job, plan: Plan, processes: Processes | None) -> str:
    """Return why the workers of a plan are processes of their own; empty for Ray Train's own processes.

    By default they are Ray Train's, unless the job asks for what only processes that we may end can do.

    Raises:
        JobError: there is no such choice.
        PlanError: `ray_train` is asked for, and the plan cannot have it.
    """
    if processes not in (None, "ray_train", "own"):
        raise JobError([f'processes={processes!r}: give "ray_train" or "own", or leave it out'])
    needed = _process_need(plan)
    if needed and processes == "ray_train":
        raise PlanError(
            f"{plan.strategy} cannot run in Ray Train's own processes: {needed}",
            where="processes",
            remedy='leave processes= out, or give processes="own"',
        )
    if processes:
        return 'processes="own" was given' if processes == "own" else ""
    recovery = job.recovery
    asked = {
        "spares=": recovery.spares,
        "replace_stragglers=": recovery.replace_stragglers,
        'on_crash_loop="skip"': recovery.on_crash_loop == "skip",
    }
    needs = [f"{option} asks for processes that can be replaced" for option, value in asked.items() if value]
    return needed or next(iter(needs), "")


def _process_need(plan: Plan) -> str:
    """Return what a plan does that needs processes of its own; empty for nothing."""
    capabilities = engine_class(plan).capabilities
    if plan.processes > plan.workers or capabilities.topology != "collective":
        return "its servers and workers come and go one by one"
    if capabilities.reform == "new_process" and _TF_CONFIG not in os.environ:
        return "TensorFlow trains once in a process, and outside of a TensorflowTrainer the plan was made in rank 0's"
    return ""


class TrainPlacement(WorkerPlacement):
    """Places each worker in the bundle of one of Ray Train's workers, without resources.

    Servers, whose slots come first, share bundles with workers. Ray ends all that is in a placement group when it is
    removed: no process outlives Ray Train's workers.

    Args:
        workers: one for each worker of the plan.
    """

    def __init__(self, workers: TrainWorkers, group: PlacementGroup, plan: Plan) -> None:
        self._workers, self._group, self.name = workers, group, str(group.id.hex())
        self._first = plan.processes - plan.workers  # slot of a worker

    def options(self, slot: int, *, beside: bool = False) -> dict[str, Any]:
        """Return Ray's options for a slot's process."""
        bundle = self._workers.bundles[self._worker(slot)]
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"num_cpus": 0, "scheduling_strategy": where}

    def lent(self, slot: int) -> tuple[str, ...] | None:
        """Return the ids of the accelerators of a slot's worker; none for a server."""
        return self._workers.workers[self._worker(slot)].accelerators if slot >= self._first else ()

    def _worker(self, slot: int) -> int:
        return (slot - self._first) % len(self._workers.workers)


class SharedProcesses(TrainPlacement):
    """Has each worker in the process of one of Ray Train's workers. The run ends when one of them would be replaced."""

    def __init__(self, workers: TrainWorkers, group: PlacementGroup, plan: Plan, channel: RankChannel) -> None:
        super().__init__(workers, group, plan)
        self._channel, self._failed = channel, Failed()

    def lent(self, slot: int) -> None:
        """Return None: the process has the accelerators that Ray gave it."""
        return

    def process(self, slot: int) -> RankHandle:
        """Return the handle of the process of a slot's worker."""
        return self._channel.handle(self._worker(slot))

    def lost(self, slot: int, cause: str) -> WorkerLost:
        """Return the error for a process that has ended, or that the driver would end."""
        rank, failed = self._worker(slot), self._failed
        return WorkerLost(
            f"rank {rank} of Ray Train cannot go on: {failed.cause or cause}",
            where=f"rank {rank}",
            remedy="set FailureConfig(max_failures=...): Ray Train then starts again, and the run continues from its "
            'newest checkpoint; processes="own" of tw.fit replaces a single process',
            detail=failed.detail,
        )

    def on(self, event: Event) -> None:
        """Remember the last failure."""
        if isinstance(event, Failed):
            self._failed = event

    def close(self) -> None:
        """Do nothing: the events are over."""
