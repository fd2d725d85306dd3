"""What a user calls: plan, fit, start, evaluate, load_model. Each takes a Job, or the path of a job file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.core.job import Job
    from trainwright.planner import Decision
    from trainwright.run import Run


def plan(job: Job | str) -> Decision:
    """The plan for this job on the connected cluster (or this machine), and the rejected ones, with reasons."""
    from trainwright.discover import connect
    from trainwright.prepare import decide_plan, prepare

    prepared = prepare(_job(job), resume=True)
    connect()
    return decide_plan(prepared)


def start(job: Job | str, *, resume: bool = False, fresh: bool = False, verbose: bool = False) -> Run:
    """Plan, provision and train in the background; returns a handle at once.

    Args:
        resume: go on with a run of this name although the job was changed.
        fresh: begin the run of this name again.
        verbose: show Ray's own output.

    Raises:
        TrainwrightError: the job, its data, its storage or the cluster is not right; nothing was started.
    """
    from trainwright.discover import connect
    from trainwright.prepare import decide_plan, prepare
    from trainwright.progress import Progress
    from trainwright.report import ReportListener
    from trainwright.run import Run
    from trainwright.session import Session
    from trainwright.tensorboard import TensorBoard

    job = _job(job)
    prepared = prepare(job, resume=resume, fresh=fresh)
    connect(verbose)
    decision = decide_plan(prepared)
    session = Session(prepared, decision, fresh=fresh)
    session.listen(Progress(decision, verbose=verbose))
    session.listen(TensorBoard(prepared.store, job.name))
    session.listen(ReportListener(prepared.store, job.name))
    return Run(job, session, decision)


def fit(job: Job | str, *, resume: bool = False, fresh: bool = False, verbose: bool = False) -> Run:
    """Plan, provision, train, recover, report; returns when the run has ended.

    The first Ctrl-C takes a checkpoint and stops, the second stops at once; SIGTERM counts as a preemption notice and
    does as the first. The run's `state` is then `stopped`, and the same call resumes it.

    Raises:
        TrainwrightError: the run could not start, or failed; the first failing rank's own error.
    """
    from trainwright.signals import stopping

    run = start(job, resume=resume, fresh=fresh, verbose=verbose)
    with stopping(run) as stops:
        while not run.wait(timeout_s=0.5):  # a join without a timeout would not let signals through
            continue
    run.signal = stops.last
    return run


def evaluate(job: Job | str, *, step: int | None = None) -> dict[str, float]:
    """Loss and metrics of a checkpoint over the job's evaluation set, in this process on one device.

    Args:
        step: the checkpoint at this step; by default the newest.

    Raises:
        TrainwrightError: there is no evaluation set, no checkpoint, or it does not fit the model.
    """
    from trainwright import use

    return use.evaluate(_job(job), step)


def load_model(job: Job | str, *, step: int | None = None) -> Any:
    """The job's model with the weights of its run's newest checkpoint, or of the one at `step`.

    Raises:
        TrainwrightError: there is no checkpoint, or it does not fit the model.
    """
    from trainwright import use

    return use.load_model(_job(job), step)


def _job(job: Job | str) -> Job:
    """The job itself, or that of a job file."""
    from trainwright.jobfile import load_job

    return load_job(job) if isinstance(job, str) else job
