"""A run is begun: prepared, planned, and heard by all who tell of it; and waited for."""

from __future__ import annotations

from trainwright.core.errors import ResourceError
from trainwright.core.job import Job
from trainwright.detached import RemoteSession
from trainwright.discover import connect
from trainwright.planner import Decision
from trainwright.prepare import Prepared, decide_plan, opens, prepare
from trainwright.progress import Progress
from trainwright.report import ReportListener
from trainwright.run import Drives, Run
from trainwright.session import Session
from trainwright.signals import stopping
from trainwright.tensorboard import TensorBoard


def ready(job: Job, *, resume: bool, fresh: bool, verbose: bool, detached: bool = False) -> tuple[Drives, Decision]:
    """What drives a job's run, heard by all who tell of it, and its plan. Raises as `tw.start`."""
    own = opens(job) and connect(verbose)
    prepared = prepare(job, resume=resume, fresh=fresh)
    own = connect(verbose) or own
    decision = decide_plan(prepared)
    if detached:
        return _detached(job, prepared, own, resume=resume, fresh=fresh), decision
    session = Session(prepared, decision, fresh=fresh)
    session.listen(Progress(decision, verbose=verbose))
    session.listen(TensorBoard(prepared.store, job.name))
    session.listen(ReportListener(prepared.store, job.name))
    return session, decision


def _detached(job: Job, prepared: Prepared, own: bool, **options: bool) -> Drives:
    if own:
        raise ResourceError(
            "a detached driver needs a cluster that outlives this process",
            remedy="set RAY_ADDRESS to that of a running cluster, or leave detached out",
        )
    return RemoteSession(prepared, job, **options)


def awaited(run: Run) -> None:
    """Until a run has ended; signals stop it. Raises as `Run.wait`."""
    with stopping(run) as stops:
        while not run.wait(timeout_s=0.5):  # a join without a timeout would not let signals through
            continue
    run.signal = stops.last
