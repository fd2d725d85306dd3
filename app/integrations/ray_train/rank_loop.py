"""The run inside Ray Train: rank 0 drives it, the others wait for its end, and all report to Ray Train together."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainwright.core.errors import ResourceError, TrainwrightError, WorkerLost
from trainwright.core.events import Checkpointed, Evaluated, Event, Failed, Steps
from trainwright.core.job import Job
from trainwright.driver.messages import FinishRun
from trainwright.integrations.ray_train import refuse_inside_ray_train
from trainwright.integrations.ray_train.worker_mapping import TrainPlacement, TrainWorker, TrainWorkers
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

_HOLD_S = 15.0  # in which Ray Train ends all ranks when rank 0 raised


@dataclass(frozen=True, kw_only=True)
class _LeaderAnswer:
    """What rank 0 says first: the plan, and where the run lives."""

    decision: Decision
    storage: str


def start_inside_ray_train(
    job: Job, *, resume: bool, fresh: bool, verbose: bool, detached: bool = False
) -> tuple[RunDriver, Decision]:
    """Return a driver of a job's run and its plan inside a train function of Ray Train; every rank calls it.

    Rank 0 drives the run, the others wait for it.

    Args:
        job, resume, fresh, verbose, detached: as of `tw.start`. If Ray Train starts the function again, `fresh` has
            been done already; `detached` is refused.

    Raises:
        TrainwrightError: on every rank, what rank 0 found.
    """
    check_trackers(job.trackers)
    if detached:
        refuse_inside_ray_train(
            "tw.start(detached=True)", "leave detached out: FailureConfig(max_failures=...) starts rank 0 again"
        )
    group = ray.util.get_current_placement_group()
    assert group is not None, "workers of Ray Train are in a placement group"
    desk = _RankChannel.meet(group)
    desk.sit(_own_seat(job))
    if _context().get_world_rank() != 0:
        return _follow(desk)
    try:
        driven = _lead(desk, job, group, resume=resume, fresh=fresh, verbose=verbose)
    except BaseException as error:
        desk.say_last(_portable_error(error))
        raise
    return driven


def _own_seat(job: Job) -> TrainWorker:
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
    desk: _RankChannel,
    job: Job,
    group: PlacementGroup,
    *,
    resume: bool,
    fresh: bool,
    verbose: bool,
) -> tuple[RunDriver, Decision]:
    table: dict[str, Any] = placement_group_table(group)
    seating = TrainWorkers.of(desk.seats(), table["bundles_to_node_id"], group.bundle_specs)
    job = seating.job(job)
    again = _is_again(job)
    with kept_alive(run_name(open_store(job.storage).uri_of(job.name))):
        prepared = prepare(job, resume=resume or again, fresh=fresh and not again)
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]  # without what is in placement groups
        decision = plan_for(prepared, seating.cluster(nodes_by_id()))
        decision = seating.seated(decision, data_cpus=free.get("CPU", 0.0))
        head = RunLog(prepared.store, job.name).head()
        session: RunDriver
        if again and head is not None and head.outcome == "done":
            session = _FinishedRun(prepared)
        else:
            room, progress = (
                TrainPlacement(seating, group, decision.chosen),
                RunProgress(decision.chosen, verbose=verbose),
            )
            session = create_controller(prepared, decision, progress, fresh=fresh and not again, room=room)
    desk.say(_LeaderAnswer(decision=decision, storage=prepared.store.uri))
    return LeaderRank(desk, session, prepared), decision


def _follow(desk: _RankChannel) -> tuple[RunDriver, Decision]:
    opening = desk.take()
    if isinstance(opening, BaseException):
        _hold()
        raise opening
    return _FollowerRank(desk, open_store(opening.storage)), opening.decision


class LeaderRank:
    """Drives the run on rank 0, and has what there is to tell reported on every rank.

    Args:
        session: of the run.
    """

    def __init__(self, desk: _RankChannel, session: RunDriver, prepared: PreparedJob) -> None:
        self._desk, self._session, self.store = desk, session, prepared.store
        run = prepared.job.name

        def pointer(step: int, path: str) -> Mapping[str, str | int]:
            return {"checkpoint": self.store.uri_of(f"{run}/{path}"), "step": step, **_mark(self.store, run)}

        self._teller = ReportQueue(prepared.steps_per_epoch, pointer)
        self._trouble: TrainwrightError | None = None

    def run(self) -> FinishRun:
        """Until the run has ended and every rank knows."""
        self._session.listen(self._teller)
        telling = threading.Thread(target=self._tell, name="trainwright-ray-train", daemon=True)
        telling.start()
        try:
            finish = self._session.run()
        except BaseException as error:
            finish = FinishRun(outcome="failed", step=0, error=_portable_error(error))
        self._teller.end(silently=finish.error is not None)
        telling.join()
        if self._trouble is not None and finish.error is None:
            finish = FinishRun(outcome="failed", step=finish.step, error=self._trouble)
        self._desk.say_last(finish)
        return finish

    def stop(self, now: bool = False) -> None:
        """Ask the run to end."""
        self._session.stop(now)

    def flush(self) -> None:
        """Write the events so far."""
        self._session.flush()

    def listen(self, listener: EventListener) -> None:
        """Add somebody who hears every event."""
        self._session.listen(listener)

    def _tell(self) -> None:
        """Ray Train's report is one of all ranks: they are told of it first."""
        try:
            for report in self._teller.news():
                self._desk.say(_TrainReport(metrics=report.metrics))
                _report(report)
        except Exception as error:  # it would be lost with this thread, and the run would go on unseen
            self._trouble = _unreported(error)
            self._session.stop()


class _FollowerRank:
    """Waits for the end of the run on another rank."""

    def __init__(self, desk: _RankChannel, store: Store) -> None:
        self._desk, self.store = desk, store

    def run(self) -> FinishRun:
        """Report what rank 0 reports, until it says how the run ended."""
        while not isinstance(word := self._desk.take(), FinishRun):
            try:
                _report(word)
            except Exception as error:
                raise _unreported(error) from error
        if word.error is not None:
            _hold()
        return word

    def stop(self, now: bool = False) -> None:
        """Refused: raises ResourceError."""
        raise ResourceError("only rank 0 of Ray Train can stop the run", remedy="call stop where the rank is 0")

    def flush(self) -> None:
        """Rank 0 writes the events."""

    def listen(self, listener: EventListener) -> None:
        """Refused: raises ResourceError."""
        raise ResourceError("the run is heard on rank 0 of Ray Train only", remedy="call listen where the rank is 0")


class _FinishedRun:
    """A run that had come to its end when Ray Train started the train function again."""

    def __init__(self, prepared: PreparedJob) -> None:
        self.store, self._prepared = prepared.store, prepared

    def run(self) -> FinishRun:
        """It is done."""
        return FinishRun(outcome="done", step=self._prepared.total_steps)

    def stop(self, now: bool = False) -> None:
        """It has ended."""

    def flush(self) -> None:
        """All is written."""

    def listen(self, listener: EventListener) -> None:
        """Tell somebody what there was."""
        for event in read_events(self.store, self._prepared.job.name):
            listener.on(event)


def _context() -> Any:
    return importlib.import_module("ray.train").get_context()


def _mark(store: Store, run: str) -> dict[str, str]:
    """By which a run knows a pointer that it left in the same job of Ray's."""
    return {"run": store.uri_of(run), "ray_job": str(ray.get_runtime_context().get_job_id())}


def _is_again(job: Job) -> bool:
    """Whether Ray Train has started the train function again after this run had reported a checkpoint."""
    checkpoint: Any = importlib.import_module("ray.train").get_checkpoint()
    if checkpoint is None:
        return False
    with checkpoint.as_directory() as folder:
        file = Path(folder) / POINTER_FILE
        found = json.loads(file.read_text()) if file.exists() else {}
    return {**found, **_mark(open_store(job.storage), job.name)} == found


def _report(report: _TrainReport) -> None:
    """Tell Ray Train; returns when all ranks have."""
    train: Any = importlib.import_module("ray.train")
    with _pointing(report.pointer) as checkpoint:
        train.report(dict(report.metrics), checkpoint=checkpoint)


@contextmanager
def _pointing(pointer: Mapping[str, str | int]) -> Iterator[Any]:
    """A checkpoint of Ray Train's that holds a pointer; none without one."""
    if not pointer:
        yield None
        return
    train: Any = importlib.import_module("ray.train")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / POINTER_FILE).write_text(json.dumps(pointer))
        yield train.Checkpoint.from_directory(folder)


def _portable_error(error: BaseException) -> TrainwrightError:
    """An error that every rank can be sent."""
    if isinstance(error, TrainwrightError):
        return error
    return TrainwrightError(
        f"{type(error).__name__}: {error}",
        where="rank 0 of Ray Train",
        detail="".join(traceback.format_exception(error)),
    )


def _unreported(error: Exception) -> TrainwrightError:
    if isinstance(error, TrainwrightError):
        return error
    return ResourceError(
        f"Ray Train did not take a report: {error}",
        where="RunConfig",
        remedy="give RunConfig a storage_path that all nodes can write; the run itself goes on where it was",
        detail=traceback.format_exc(),
    )


def _hold() -> None:
    """Ray Train ends all ranks when one raises: the others wait, so that it shows rank 0's error and none beside it.

    Where the user caught that, they raise it too.
    """
    threading.Event().wait(_HOLD_S)


# --- Reports to Ray Train ---------------------------------------------------------------------------------------------


_REPORT_INTERVAL_S = 10.0  # at least, while there are steps
POINTER_FILE = "trainwright.json"
"""The file of a checkpoint of Ray Train's that says where the run's own one lies."""


@dataclass(frozen=True, kw_only=True)
class _TrainReport:
    """What every rank reports to Ray Train at once.

    Attributes:
        metrics: figures by name.
        pointer: contents of `POINTER_FILE`, from rank 0; empty where there is nothing to point at.
    """

    metrics: Mapping[str, float]
    pointer: Mapping[str, str | int] = field(default_factory=dict)


class ReportQueue:
    """A listener that keeps the newest figures: those that nobody has asked for are overwritten, so that none waits.

    Ray Train takes a report about every 2 seconds, and steps may be quicker.

    Args:
        steps_per_epoch: at whose end there is news.
        pointer: makes a pointer of a step and a checkpoint's path below the run.
        every_s: seconds after which steps alone are news.
        clock: monotonic seconds.
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
        self._turn = threading.Condition()
        self._metrics: dict[str, float] = {}
        self._newest: Mapping[str, str | int] = {}
        self._due = self._changed = self._ended = self._points = False
        self._told_s = clock()

    def on(self, event: Event) -> None:
        """Take one event."""
        with self._turn:
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
            self._turn.notify_all()

    def close(self) -> None:
        """The run has ended; `end` says it."""

    def end(self, *, silently: bool = False) -> None:
        """There is no more to tell than what is due; with `silently` not even that."""
        with self._turn:
            self._ended, self._due = True, self._changed and not silently
            self._turn.notify_all()

    def news(self) -> Iterator[_TrainReport]:
        """Waits for what is to be told; the last one is told at the end."""
        while True:
            with self._turn:
                while not (self._due or self._ended):
                    self._turn.wait(self._every_s if self._changed else None)
                    self._due |= self._changed and self._clock() - self._told_s >= self._every_s
                if not self._due:
                    return
                points = self._points or self._ended
                report = _TrainReport(metrics=dict(self._metrics), pointer=self._newest if points else {})
                self._due = self._changed = self._points = False
                self._told_s = self._clock()
            yield report

    def _step(self, event: Steps) -> None:
        """Figures of the newest step; the end of an epoch is news."""
        last = event.step[-1]
        self._due |= last // self._per_epoch > (event.step[0] - 1) // self._per_epoch
        self._changed = True
        figures = {
            "step": last,
            "epoch": math.ceil(last / self._per_epoch),
            "train/loss": event.loss[-1],
            "train/learning_rate": event.learning_rate[-1],
            "speed/samples_per_s": sum(event.samples) / max(sum(event.step_s), 1e-9),
        }
        self._metrics |= {name: value for name, value in figures.items() if math.isfinite(value)}


# --- The channel between the ranks of Ray Train -----------------------------------------------------------------------


_LAST_MESSAGE_S = 10.0  # for the others to hear the last word


class _RankChannelActor:
    """Keeps what rank 0 says, in order, for each of the others to take.

    Args:
        size: how many ranks there are.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._seats: dict[int, TrainWorker] = {}
        self._said: list[bytes] = []
        self._taken: dict[int, int] = {}  # how much of it, by rank
        self._news = asyncio.Condition()

    async def sit(self, seat: TrainWorker) -> None:
        """A rank is there."""
        async with self._news:
            self._seats[seat.rank] = seat
            self._news.notify_all()

    async def seats(self) -> list[TrainWorker]:
        """All of them, once they are there."""
        async with self._news:
            await self._news.wait_for(lambda: len(self._seats) == self._size)
            return list(self._seats.values())

    async def say(self, word: bytes) -> None:
        """Rank 0's next word."""
        async with self._news:
            self._said.append(word)
            self._news.notify_all()

    async def take(self, rank: int, number: int) -> bytes:
        """The word of that number, once it is said."""
        async with self._news:
            await self._news.wait_for(lambda: len(self._said) > number)
            self._taken[rank] = number + 1
            self._news.notify_all()
            return self._said[number]

    async def taken(self) -> None:
        """Returns when all others have heard all."""
        async with self._news:
            await self._news.wait_for(
                lambda: all(self._taken.get(rank, 0) >= len(self._said) for rank in range(1, self._size))
            )


_RANK_CHANNEL_ACTOR: Any = ray.remote(num_cpus=0, max_restarts=0)(_RankChannelActor)
"""The actor class. It ends with rank 0's process, and with Ray Train's placement group."""


class _RankChannel:
    """One rank's way to the desk."""

    def __init__(self, actor: Any, rank: int) -> None:
        self._actor, self._rank, self._heard = actor, rank, 0

    @classmethod
    def meet(cls, group: PlacementGroup) -> _RankChannel:
        """Every rank of Ray Train calls it, as often as the others.

        Raises:
            ResourceError: it is Ray Train's first version, whose ranks cannot meet.
        """
        context: Any = importlib.import_module("ray.train").get_context()
        try:
            collective: Any = importlib.import_module("ray.train.collective")
        except ImportError as error:
            raise ResourceError(
                "trainwright needs the second version of Ray Train",
                where="RAY_TRAIN_V2_ENABLED=0",
                remedy="unset RAY_TRAIN_V2_ENABLED: Ray 2.60 uses that version by default",
            ) from error
        rank, actor, name = context.get_world_rank(), None, f"trainwright-desk/{uuid.uuid4().hex[:12]}"
        if rank == 0:
            size = context.get_world_size()
            options = {"name": name, "namespace": NAMESPACE, "max_concurrency": 2 * size + 8}
            where = PlacementGroupSchedulingStrategy(group)
            actor = _RANK_CHANNEL_ACTOR.options(scheduling_strategy=where, **options).remote(size)
        name = collective.broadcast_from_rank_zero(name)
        return cls(actor or ray.get_actor(name, namespace=NAMESPACE), rank)

    def sit(self, seat: TrainWorker) -> None:
        """This rank is there."""
        self._ask(self._actor.sit.remote(seat))

    def seats(self) -> list[TrainWorker]:
        """All ranks, once they are there."""
        found: list[TrainWorker] = self._ask(self._actor.seats.remote())
        return found

    def say(self, word: Any) -> None:
        """Rank 0 tells the others; whatever can be pickled."""
        self._ask(self._actor.say.remote(cloudpickle.dumps(word)))

    def say_last(self, word: Any) -> None:
        """The same, and wait for them to hear it: the desk ends with this object."""
        self.say(word)
        ray.wait([self._actor.taken.remote()], timeout=_LAST_MESSAGE_S)

    def take(self) -> Any:
        """Rank 0's next word, whenever it comes."""
        word = self._ask(self._actor.take.remote(self._rank, self._heard))
        self._heard += 1
        return cloudpickle.loads(word)

    def _ask(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except RayError as error:
            raise WorkerLost(
                "rank 0 of Ray Train, which drives the run, has ended",
                where=f"rank {self._rank}",
                remedy="FailureConfig(max_failures=...) has Ray Train start again, and the run goes on",
            ) from error
