"""A run inside a train function of Ray Train, on its workers.

Rank 0 drives the run, the others wait for its end, and all ranks report to Ray Train together. Ray Train's workers are
the cluster of the run, and its placement group holds the run's processes.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import sys
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cloudpickle
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainwright.core import formatting
from trainwright.core.cluster import Cluster, Node
from trainwright.core.errors import PlanError, ResourceError, TrainwrightError, WorkerLost
from trainwright.core.events import Checkpointed, Evaluated, Event, Failed, Steps
from trainwright.core.job import Job
from trainwright.core.plan import Plan
from trainwright.driver.messages import FinishRun
from trainwright.planning.decision import Decision
from trainwright.planning.job_preparation import PreparedJob, plan_for, prepare
from trainwright.ray_cluster.discovery import nodes_by_id
from trainwright.reporting.progress_bar import RunProgress
from trainwright.runtime.run_handle import RunDriver
from trainwright.runtime.run_listeners import create_controller
from trainwright.runtime.takeover import NAMESPACE, kept_alive, run_name
from trainwright.storage.event_files import read_events
from trainwright.storage.event_log import EventListener
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_log import RunLog
from trainwright.tracking.experiment_trackers import check_trackers

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


@dataclass(frozen=True, kw_only=True)
class _LeaderAnswer:
    """The first message of rank 0: the plan, and the storage of the run."""

    decision: Decision
    storage: str


def start_inside_ray_train(
    job: Job, *, resume: bool, fresh: bool, verbose: bool, detached: bool = False
) -> tuple[RunDriver, Decision]:
    """Return a driver of a job's run and its plan inside a train function of Ray Train; every rank calls it.

    Args:
        job, resume, fresh, verbose, detached: as of `tw.start`. `fresh` is ignored when Ray Train starts the function
            again; `detached` is refused.

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
    channel = _RankChannel.open(group)
    channel.register(_this_worker(job))
    if _context().get_world_rank() != 0:
        return _follow(channel)
    try:
        return _lead(channel, job, group, resume=resume, fresh=fresh, verbose=verbose)
    except BaseException as error:
        channel.send_last(_portable_error(error))
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
    channel: _RankChannel, job: Job, group: PlacementGroup, *, resume: bool, fresh: bool, verbose: bool
) -> tuple[RunDriver, Decision]:
    table: dict[str, Any] = placement_group_table(group)
    workers = TrainWorkers.of(channel.workers(), table["bundles_to_node_id"], group.bundle_specs)
    job = workers.job(job)
    again = _is_again(job)
    with kept_alive(run_name(open_store(job.storage).uri_of(job.name))):
        prepared = prepare(job, resume=resume or again, fresh=fresh and not again)
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]  # outside placement groups
        decision = plan_for(prepared, workers.cluster(nodes_by_id()))
        decision = workers.placed(decision, data_cpus=free.get("CPU", 0.0))
        head = RunLog(prepared.store, job.name).head()
        session: RunDriver
        if again and head is not None and head.outcome == "done":
            session = _FinishedRun(prepared)
        else:
            placement = TrainPlacement(workers, group, decision.chosen)
            progress = RunProgress(decision.chosen, verbose=verbose)
            session = create_controller(prepared, decision, progress, fresh=fresh and not again, room=placement)
    channel.send(_LeaderAnswer(decision=decision, storage=prepared.store.uri))
    return LeaderRank(channel, session, prepared), decision


def _follow(channel: _RankChannel) -> tuple[RunDriver, Decision]:
    answer = channel.receive()
    if isinstance(answer, BaseException):
        _wait_for_rank_0()
        raise answer
    return _FollowerRank(channel, open_store(answer.storage)), answer.decision


class LeaderRank:
    """Drives the run on rank 0, and lets every rank report its metrics to Ray Train."""

    def __init__(self, channel: _RankChannel, session: RunDriver, prepared: PreparedJob) -> None:
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
    """Waits for the end of the run on another rank. Implements `RunDriver`."""

    def __init__(self, channel: _RankChannel, store: Store) -> None:
        self._channel, self.store = channel, store

    def run(self) -> FinishRun:
        """Report what rank 0 reports, until it says how the run ended."""
        while not isinstance(message := self._channel.receive(), FinishRun):
            try:
                _report(message)
            except Exception as error:
                raise _report_failure(error) from error
        if message.error is not None:
            _wait_for_rank_0()
        return message

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
    with checkpoint.as_directory() as folder:
        file = Path(folder) / POINTER_FILE
        found = json.loads(file.read_text()) if file.exists() else {}
    return {**found, **_mark(open_store(job.storage), job.name)} == found


def _report(report: _TrainReport) -> None:
    """Report to Ray Train, and return when all ranks have reported."""
    with _pointer_checkpoint(report.pointer) as checkpoint:
        _ray_train().report(dict(report.metrics), checkpoint=checkpoint)


@contextmanager
def _pointer_checkpoint(pointer: Mapping[str, str | int]) -> Iterator[Any]:
    """Yield a checkpoint of Ray Train that contains a pointer; None without a pointer."""
    if not pointer:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / POINTER_FILE).write_text(json.dumps(pointer))
        yield _ray_train().Checkpoint.from_directory(folder)


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


# --- The channel between the ranks of Ray Train -----------------------------------------------------------------------


_LAST_MESSAGE_S = 10.0  # for the other ranks to receive the last message


class _RankChannelActor:
    """Keeps the workers of all ranks, and the messages of rank 0 in order for each of the other ranks to receive."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._workers: dict[int, TrainWorker] = {}
        self._messages: list[bytes] = []
        self._received: dict[int, int] = {}  # number of messages, by rank
        self._changed = asyncio.Condition()

    async def register(self, worker: TrainWorker) -> None:
        async with self._changed:
            self._workers[worker.rank] = worker
            self._changed.notify_all()

    async def workers(self) -> list[TrainWorker]:
        """Return the workers of all ranks when all are registered."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._workers) == self._size)
            return list(self._workers.values())

    async def send(self, message: bytes) -> None:
        async with self._changed:
            self._messages.append(message)
            self._changed.notify_all()

    async def receive(self, rank: int, number: int) -> bytes:
        """Return the message of this number when it is sent."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._messages) > number)
            self._received[rank] = number + 1
            self._changed.notify_all()
            return self._messages[number]

    async def all_received(self) -> None:
        """Return when all other ranks have received all messages."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: all(self._received.get(rank, 0) >= len(self._messages) for rank in range(1, self._size))
            )


_RANK_CHANNEL_ACTOR: Any = ray.remote(num_cpus=0, max_restarts=0)(_RankChannelActor)
"""The actor class. It ends with rank 0's process, and with Ray Train's placement group."""


class _RankChannel:
    """One rank's end of the channel. Messages are whatever cloudpickle can pickle."""

    def __init__(self, actor: Any, rank: int) -> None:
        self._actor, self._rank, self._received = actor, rank, 0

    @classmethod
    def open(cls, group: PlacementGroup) -> _RankChannel:
        """Open the channel; every rank calls it equally often.

        Raises:
            ResourceError: this is the first version of Ray Train, which has no collectives.
        """
        context = _context()
        try:
            collective: Any = importlib.import_module("ray.train.collective")
        except ImportError as error:
            raise ResourceError(
                "trainwright needs the second version of Ray Train",
                where="RAY_TRAIN_V2_ENABLED=0",
                remedy="unset RAY_TRAIN_V2_ENABLED: Ray 2.60 uses that version by default",
            ) from error
        rank, actor, name = context.get_world_rank(), None, f"trainwright-channel/{uuid.uuid4().hex[:12]}"
        if rank == 0:
            size = context.get_world_size()
            options = {"name": name, "namespace": NAMESPACE, "max_concurrency": 2 * size + 8}
            where = PlacementGroupSchedulingStrategy(group)
            actor = _RANK_CHANNEL_ACTOR.options(scheduling_strategy=where, **options).remote(size)
        name = collective.broadcast_from_rank_zero(name)
        return cls(actor or ray.get_actor(name, namespace=NAMESPACE), rank)

    def register(self, worker: TrainWorker) -> None:
        """Tell rank 0 what this rank has."""
        self._ask(self._actor.register.remote(worker))

    def workers(self) -> list[TrainWorker]:
        """Wait for the workers of all ranks and return them."""
        found: list[TrainWorker] = self._ask(self._actor.workers.remote())
        return found

    def send(self, message: Any) -> None:
        """Send a message from rank 0 to all other ranks."""
        self._ask(self._actor.send.remote(cloudpickle.dumps(message)))

    def send_last(self, message: Any) -> None:
        """Send the last message and wait until it is received: the actor ends with this object."""
        self.send(message)
        ray.wait([self._actor.all_received.remote()], timeout=_LAST_MESSAGE_S)

    def receive(self) -> Any:
        """Wait for the next message of rank 0 and return it."""
        message = self._ask(self._actor.receive.remote(self._rank, self._received))
        self._received += 1
        return cloudpickle.loads(message)

    def _ask(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except RayError as error:
            raise WorkerLost(
                "rank 0 of Ray Train, which drives the run, has ended",
                where=f"rank {self._rank}",
                remedy="set FailureConfig(max_failures=...): Ray Train then starts again, and the run continues",
            ) from error


# --- Ray Train's workers as a cluster, and job options that conflict with them ----------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainWorker:
    """One worker of Ray Train."""

    rank: int
    node_id: str
    run: str
    accelerator: str = ""  # Ray's resource of its accelerators, such as `GPU`; empty without any
    accelerators: tuple[str, ...] = ()  # their ids on that node


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
        return job.replace(workers=size, min_workers=None, max_workers=None)

    def placed(self, decision: Decision, *, data_cpus: float) -> Decision:
        """Return the decision with plans that use the resources of these workers.

        Args:
            data_cpus: CPUs of the cluster that are free for Ray Data.

        Raises:
            PlanError: the plan has another number of workers, or leaves accelerators unused.
        """
        plans = [self._placed(plan, data_cpus) for plan in (decision.chosen, *decision.contenders)]
        return replace(decision, chosen=plans[0], contenders=tuple(plans[1:]))

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


# --- Placement in the bundles that Ray Train reserved, whose resources its own workers hold ---------------------------


class TrainPlacement:
    """Places each worker in the bundle of one of Ray Train's workers, without resources. Implements `WorkerPlacement`.

    Servers, whose slots come first, share bundles with workers. Ray ends all that is in a placement group when it is
    removed: no process outlives Ray Train's workers.

    Args:
        workers: one for each worker of the plan.
    """

    def __init__(self, workers: TrainWorkers, group: PlacementGroup, plan: Plan) -> None:
        self._workers, self._group = workers, group
        self._first = plan.processes - plan.workers  # slot of a worker

    @property
    def name(self) -> str:
        """The id of the placement group."""
        return str(self._group.id.hex())

    def options(self, slot: int, *, beside: bool = False) -> dict[str, Any]:
        """Return Ray's options for a slot's process."""
        bundle = self._workers.bundles[self._worker(slot)]
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"num_cpus": 0, "scheduling_strategy": where}

    def lent(self, slot: int) -> tuple[str, ...]:
        """Return the ids of the accelerators of a slot's worker; none for a server."""
        return self._workers.workers[self._worker(slot)].accelerators if slot >= self._first else ()

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: nodes and placement group are Ray Train's, and no process outlives the group."""

    found = shun = inherit = give_back = _nothing

    def _worker(self, slot: int) -> int:
        return (slot - self._first) % len(self._workers.workers)
