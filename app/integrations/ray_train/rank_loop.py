"""The run inside Ray Train: rank 0 drives it, the others wait for its end, and all report to Ray Train together."""

from __future__ import annotations

import importlib
import json
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from trainwright.core.errors import ResourceError, TrainwrightError
from trainwright.core.job import Job
from trainwright.driver.messages import Finish
from trainwright.integrations.ray_train.placement import SeatRoom
from trainwright.integrations.ray_train.rendezvous_actor import Desk
from trainwright.integrations.ray_train.train_report import POINTER, Report, Teller
from trainwright.integrations.ray_train.worker_mapping import Seat, Seating
from trainwright.planning.job_preparation import Prepared, plan_for, prepare
from trainwright.planning.planner import Decision
from trainwright.reporting.progress import Progress
from trainwright.runtime.cluster_discovery import nodes_by_id
from trainwright.runtime.launch import heard
from trainwright.runtime.run_handle import Drives
from trainwright.runtime.takeover import kept_alive, run_name
from trainwright.storage.event_files import read_events
from trainwright.storage.event_log import Listener
from trainwright.storage.run_log import RunLog
from trainwright.storage.store import Store, open_store

HOLD_S = 15.0  # in which Ray Train ends all ranks when rank 0 raised


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What rank 0 says first: the plan, and where the run lives."""

    decision: Decision
    storage: str


def ready_inside(
    job: Job, *, resume: bool, fresh: bool, verbose: bool, notes: Sequence[str] = ()
) -> tuple[Drives, Decision]:
    """What drives a job's run, or waits for it, in a train function of Ray Train's, and its plan; every rank calls it.

    Args:
        job, resume, fresh, verbose, notes: as of `starting.ready`. Where Ray Train starts again what it began, `fresh`
            is done already.

    Raises:
        TrainwrightError: on every rank, what rank 0 found.
    """
    group = ray.util.get_current_placement_group()
    assert group is not None, "Ray Train's workers sit in one"
    desk = Desk.meet(group)
    desk.sit(_own_seat(job))
    if _context().get_world_rank() != 0:
        return _follow(desk)
    try:
        driven = _lead(desk, job, group, resume=resume, fresh=fresh, verbose=verbose, notes=notes)
    except BaseException as error:
        desk.say_last(_told(error))
        raise
    return driven


def _own_seat(job: Job) -> Seat:
    here = ray.get_runtime_context()
    ids: Mapping[str, list[str]] = here.get_accelerator_ids()
    held = next((name for name in ("GPU", "TPU") if ids.get(name)), "")
    return Seat(
        rank=_context().get_world_rank(),
        node_id=here.get_node_id(),
        run=job.name,
        accelerator=held,
        accelerators=tuple(str(number) for number in ids.get(held, ())),
    )


def _lead(
    desk: Desk, job: Job, group: PlacementGroup, *, resume: bool, fresh: bool, verbose: bool, notes: Sequence[str]
) -> tuple[Drives, Decision]:
    table: dict[str, Any] = placement_group_table(group)
    seating = Seating.of(desk.seats(), table["bundles_to_node_id"], group.bundle_specs)
    job = seating.job(job)
    again = _is_again(job)
    with kept_alive(run_name(open_store(job.storage).uri_of(job.name))):
        prepared = prepare(job, resume=resume or again, fresh=fresh and not again)
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]  # without what is in placement groups
        decision = plan_for(prepared, seating.cluster(nodes_by_id()))
        decision = seating.seated(decision, data_cpus=free.get("CPU", 0.0))
        head = RunLog(prepared.store, job.name).head()
        session: Drives
        if again and head is not None and head.outcome == "done":
            session = Past(prepared)
        else:
            room, progress = SeatRoom(seating, group, decision.chosen), Progress(decision, verbose=verbose)
            session = heard(prepared, decision, progress, fresh=fresh and not again, notes=notes, room=room)
    desk.say(Opening(decision=decision, storage=prepared.store.uri))
    return Leader(desk, session, prepared), decision


def _follow(desk: Desk) -> tuple[Drives, Decision]:
    opening = desk.take()
    if isinstance(opening, BaseException):
        _hold()
        raise opening
    return Follower(desk, open_store(opening.storage)), opening.decision


class Leader:
    """Drives the run on rank 0, and has what there is to tell reported on every rank.

    Args:
        session: of the run.
    """

    def __init__(self, desk: Desk, session: Drives, prepared: Prepared) -> None:
        self._desk, self._session, self.store = desk, session, prepared.store
        run = prepared.job.name

        def pointer(step: int, path: str) -> Mapping[str, str | int]:
            return {"checkpoint": self.store.uri_of(f"{run}/{path}"), "step": step, **_mark(self.store, run)}

        self._teller = Teller(prepared.steps_per_epoch, pointer)
        self._trouble: TrainwrightError | None = None

    def run(self) -> Finish:
        """Until the run has ended and every rank knows."""
        self._session.listen(self._teller)
        telling = threading.Thread(target=self._tell, name="trainwright-ray-train", daemon=True)
        telling.start()
        try:
            finish = self._session.run()
        except BaseException as error:
            finish = Finish(outcome="failed", step=0, error=_told(error))
        self._teller.end(silently=finish.error is not None)
        telling.join()
        if self._trouble is not None and finish.error is None:
            finish = Finish(outcome="failed", step=finish.step, error=self._trouble)
        self._desk.say_last(finish)
        return finish

    def stop(self, now: bool = False) -> None:
        """Ask the run to end."""
        self._session.stop(now)

    def flush(self) -> None:
        """Write the events so far."""
        self._session.flush()

    def listen(self, listener: Listener) -> None:
        """Add somebody who hears every event."""
        self._session.listen(listener)

    def _tell(self) -> None:
        """Ray Train's report is one of all ranks: they are told of it first."""
        try:
            for report in self._teller.news():
                self._desk.say(Report(metrics=report.metrics))
                _report(report)
        except Exception as error:  # it would be lost with this thread, and the run would go on unseen
            self._trouble = _unreported(error)
            self._session.stop()


class Follower:
    """Waits for the end of the run on another rank."""

    def __init__(self, desk: Desk, store: Store) -> None:
        self._desk, self.store = desk, store

    def run(self) -> Finish:
        """Report what rank 0 reports, until it says how the run ended."""
        while not isinstance(word := self._desk.take(), Finish):
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

    def listen(self, listener: Listener) -> None:
        """Refused: raises ResourceError."""
        raise ResourceError("the run is heard on rank 0 of Ray Train only", remedy="call listen where the rank is 0")


class Past:
    """A run that had come to its end when Ray Train started the train function again."""

    def __init__(self, prepared: Prepared) -> None:
        self.store, self._prepared = prepared.store, prepared

    def run(self) -> Finish:
        """It is done."""
        return Finish(outcome="done", step=self._prepared.total_steps)

    def stop(self, now: bool = False) -> None:
        """It has ended."""

    def flush(self) -> None:
        """All is written."""

    def listen(self, listener: Listener) -> None:
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
        file = Path(folder) / POINTER
        found = json.loads(file.read_text()) if file.exists() else {}
    return {**found, **_mark(open_store(job.storage), job.name)} == found


def _report(report: Report) -> None:
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
        (Path(folder) / POINTER).write_text(json.dumps(pointer))
        yield train.Checkpoint.from_directory(folder)


def _told(error: BaseException) -> TrainwrightError:
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
    threading.Event().wait(HOLD_S)
