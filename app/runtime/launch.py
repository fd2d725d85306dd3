"""A run is begun: prepared, planned, and heard by all who tell of it; and waited for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from trainwright.core.errors import ResourceError
from trainwright.core.job import Job
from trainwright.integrations.ray_train import inside, refuse
from trainwright.planning.function_trial import Preflight
from trainwright.planning.job_preparation import Prepared, decide_plan, opens, prepare
from trainwright.planning.planner import Decision
from trainwright.reporting.html import ReportListener
from trainwright.reporting.progress import Progress
from trainwright.reporting.tensorboard import TensorBoard
from trainwright.runtime.cluster_discovery import TOKEN, connect, has_cluster
from trainwright.runtime.controller import Session
from trainwright.runtime.detached_driver import RemoteSession
from trainwright.runtime.placement_groups import Room
from trainwright.runtime.run_handle import Drives, Run
from trainwright.runtime.signals import stopping
from trainwright.runtime.takeover import kept_alive, run_name
from trainwright.storage.store import open_store
from trainwright.tracking.base import check
from trainwright.tracking.prometheus import Metrics
from trainwright.tracking.tracker_thread import Tracking


def ready(
    job: Job, *, resume: bool, fresh: bool, verbose: bool, detached: bool = False, notes: Sequence[str] = ()
) -> tuple[Drives, Decision]:
    """What drives a job's run, heard by all who tell of it, and its plan. Raises as `tw.start`.

    Args:
        job, resume, fresh, verbose, detached: as of `tw.start`.
        notes: of what happened before, for a run that is driven from here.
    """
    check(job.trackers)
    if inside():
        return _ready_inside(job, detached, resume=resume, fresh=fresh, verbose=verbose, notes=notes)
    if detached and not has_cluster():
        raise ResourceError(
            "a detached driver needs a cluster that outlives this process",
            remedy="set RAY_ADDRESS to that of a running cluster, or leave detached out; if the cluster asks for a "
            f"token, {TOKEN}",
        )
    started: list[bool] = []  # whether each call did

    def connected() -> None:
        started.append(connect(verbose))

    if opens(job) or has_cluster():
        connected()
    with kept_alive(run_name(open_store(job.storage).uri_of(job.name))) if started else nullcontext():
        prepared = prepare(job, resume=resume, fresh=fresh, connect=connected)
        with Preflight(prepared, resume=resume) as trial:
            connected()
            decision = decide_plan(prepared)
            notes = [*notes, *trial.settle(decision)]
        if detached:
            return _detached(job, prepared, resume=resume, fresh=fresh), decision
        progress = Progress(decision, verbose=verbose)  # a look at a row may open a model, which takes long
        return heard(prepared, decision, progress, fresh=fresh, notes=notes), decision


def _ready_inside(job: Job, detached: bool, **options: Any) -> tuple[Drives, Decision]:
    """The same in a train function of Ray Train's."""
    from trainwright.integrations.ray_train.rank_loop import ready_inside

    if detached:
        refuse("tw.start(detached=True)", "leave detached out: FailureConfig(max_failures=...) starts rank 0 again")
    return ready_inside(job, **options)


def heard(
    prepared: Prepared,
    decision: Decision,
    progress: Progress,
    *,
    fresh: bool = False,
    notes: Sequence[str] = (),
    room: Room | None = None,
) -> Session:
    """What drives a run, heard by who shows it and by all who keep what they hear; `room` as of a Session."""
    session = Session(prepared, decision, fresh=fresh, notes=notes, room=room)
    session.listen(progress)
    session.listen(TensorBoard(prepared.store, prepared.job.name))
    session.listen(ReportListener(prepared.store, prepared.job.name))
    session.listen(Metrics())
    for tracker in prepared.job.trackers:
        session.listen(Tracking(tracker, prepared.store, prepared.job.name, say=session.say))
    return session


def _detached(job: Job, prepared: Prepared, **options: bool) -> Drives:
    session = RemoteSession(prepared, job, **options)
    session.begin()
    return session


def awaited(run: Run) -> None:
    """Until a run has ended; signals stop it. Raises as `Run.wait`."""
    with stopping(run) as stops:
        while not run.wait(timeout_s=0.5):  # a join without a timeout would not let signals through
            continue
    run.signal = stops.last
