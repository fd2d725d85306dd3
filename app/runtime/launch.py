"""Start a run: prepare and plan its job, and drive it from here or from a detached driver in the cluster."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from trainwright.core.errors import JobError, ResourceError, StorageError, TrainwrightError
from trainwright.core.job import Job
from trainwright.driver.messages import FinishRun
from trainwright.planning.decision import Decision
from trainwright.planning.job_preparation import PreparedJob, decide_plan, needs_cluster_to_open, prepare
from trainwright.ray_cluster.discovery import TOKEN_HELP, connect, has_cluster
from trainwright.reporting.progress_bar import RunProgress
from trainwright.runtime.function_trial import Preflight
from trainwright.runtime.run_handle import Run, RunDriver
from trainwright.runtime.run_listeners import create_controller
from trainwright.runtime.takeover import NAMESPACE, detached_options, kept_alive, run_name
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_log import RunLog
from trainwright.tracking.experiment_trackers import check_trackers
from trainwright.worker.worker_config import pickle_job, unpickle_job

if TYPE_CHECKING:
    from trainwright.storage.event_log import EventListener


def refuse_running(job: Job) -> None:
    """Refuse a job whose run has a living driver on this machine. Raises OwnedError."""
    with suppress(StorageError):  # `prepare` says what is wrong with the store
        RunLog(open_store(job.storage).impatient(), job.name).refuse_running()


def prepare_run(
    job: Job, *, resume: bool, fresh: bool, verbose: bool, detached: bool = False, notes: Sequence[str] = ()
) -> tuple[RunDriver, Decision]:
    """Return the driver of a job's run, with its listeners, and its plan. Raises as `tw.start`.

    Args:
        job, resume, fresh, verbose, detached: as of `tw.start`.
        notes: for the user, for a run that is driven from here.
    """
    check_trackers(job.trackers)
    if detached and not has_cluster():
        raise ResourceError(
            "a detached driver needs a cluster that outlives this process",
            remedy="set RAY_ADDRESS to that of a running cluster, or leave detached out; if the cluster asks for a "
            f"token, {TOKEN_HELP}",
        )
    if not detached:
        refuse_running(job)
    started: list[bool] = []  # whether each `connect` started a cluster

    def connected() -> None:
        started.append(connect(verbose))

    if needs_cluster_to_open(job) or has_cluster():
        connected()
    with kept_alive(run_name(open_store(job.storage).uri_of(job.name))) if started else nullcontext():
        prepared = prepare(job, resume=resume, fresh=fresh, connect=connected)
        with Preflight(prepared, resume=resume) as trial:
            connected()
            decision = decide_plan(prepared, trial.time_step)
            notes = [*notes, *trial.settle(decision)]
        if detached:
            detached_run = RemoteRunController(prepared, job, resume=resume, fresh=fresh)
            detached_run.begin()
            return detached_run, decision
        progress = RunProgress(decision.chosen, verbose=verbose)  # reading a row may open a model, which takes long
        return create_controller(prepared, decision, progress, fresh=fresh, notes=notes), decision


# --- Detached driver --------------------------------------------------------------------------------------------------


_LINGER_S, _OVER_S = 60.0, 1.0  # for callers to read the result; for a driver to say that its run is over
# Ray keeps larger arguments with the caller: they would be lost with it, and the driver could not be restarted. It
# stores smaller arguments with the actor's entry in the GCS, up to 10 MiB in all.
_PIECE_BYTES, _MAX_JOB_BYTES = 64 * 1024, 8 * 1024**2


class _DriverProcess:
    """Drives a job. Restarted by Ray after its death, it takes over the run with the surviving workers."""

    def __init__(self, *job: bytes, resume: bool, fresh: bool) -> None:
        again = ray.get_runtime_context().was_current_actor_reconstructed
        self._resume, self._fresh = resume or again, fresh and not again
        self._job = b"".join(job)
        self._run: Run | None = None
        self._began = threading.Event()
        self._finish: FinishRun | None = None
        self._thread = threading.Thread(target=self._drive, name="trainwright-detached", daemon=True)
        self._thread.start()

    def _drive(self) -> None:
        try:
            job = unpickle_job(self._job).replace(preflight=False)  # the caller has run it
            self._run = Run(job, *prepare_run(job, resume=self._resume, fresh=self._fresh, verbose=False))
            self._began.set()
            self._run.wait()
            self._finish = self._run.finish
        except TrainwrightError as error:
            self._finish = FinishRun(outcome="failed", step=0, error=error)
        except Exception as error:  # it would vanish in the thread
            what, where = f"{type(error).__name__}: {error}", "the detached driver"
            fault = TrainwrightError(what, where=where, detail=traceback.format_exc())
            self._finish = FinishRun(outcome="failed", step=0, error=fault)
        self._began.set()
        threading.Timer(_LINGER_S, self._leave).start()

    def _leave(self) -> None:
        """End this actor, even if nobody asked for the result; Ray would restart a process that only exits."""
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    @ray.method(concurrency_group="end")
    def begun(self) -> FinishRun | None:
        """Wait until the run has started; return its end if it could not start."""
        self._began.wait()
        return self._finish if self._run is None else None

    @ray.method(concurrency_group="end")
    def end(self) -> FinishRun:
        """Wait for the end of the run, however often this driver dies before."""
        self._thread.join()
        assert self._finish is not None, "the thread ends with a result"
        return self._finish

    def stop(self, now: bool) -> None:
        """Ask the run to end."""
        self._began.wait()
        if self._run is not None:
            self._run.stop(now)


_DRIVER_OPTIONS: dict[str, Any] = {
    "num_cpus": 0,
    "max_restarts": -1,
    "max_task_retries": -1,
    "concurrency_groups": {"end": 8},
}
_DRIVER_ACTOR: Any = ray.remote(**_DRIVER_OPTIONS)(_DriverProcess)
"""The actor class."""


def _split_job(job: Job) -> list[bytes]:
    packed = pickle_job(job)
    if len(packed) > _MAX_JOB_BYTES:
        size, limit = (f"{value / 1024**2:.1f} MiB" for value in (len(packed), _MAX_JOB_BYTES))
        problem = f"the job is {size} large, a detached driver takes {limit}: let train= and evaluate= read files"
        raise JobError([problem])
    return [packed[start : start + _PIECE_BYTES] for start in range(0, len(packed), _PIECE_BYTES)]


def _end_finished_driver(name: str) -> None:
    """End a driver whose run is over, and which still waits for callers to read the result."""
    try:
        driver: Any = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return  # there is none
    over, _ = ray.wait([driver.end.remote()], timeout=_OVER_S)
    if over:
        ray.kill(driver, no_restart=True)


class RemoteRunController:
    """The RunDriver of a run that an actor drives."""

    def __init__(self, prepared: PreparedJob, job: Job, *, resume: bool, fresh: bool) -> None:
        self.store: Store = prepared.store
        name = f"{run_name(prepared.store.uri_of(job.name))}/driver"
        _end_finished_driver(name)
        try:
            self._driver = _DRIVER_ACTOR.options(**detached_options(name)).remote(
                *_split_job(job), resume=resume, fresh=fresh
            )
        except ValueError as error:
            raise ResourceError(
                f"the run {job.name!r} has a detached driver already",
                where=name,
                remedy=f"follow it with: trainwright logs {job.name} --follow",
            ) from error
        # Asked here: with `--detach` the process exits soon, and a thread that then is within Ray would crash it.
        self._end: Future[FinishRun] = self._driver.end.remote().future()

    def begin(self) -> None:
        """Wait until the driver has started the run. Raises as `tw.start` if it could not."""
        finish: FinishRun | None = self._answer(self._driver.begun.remote().future())
        if finish is not None and finish.error is not None:
            ray.kill(self._driver, no_restart=True)
            raise finish.error

    def run(self) -> FinishRun:
        """Wait for the end."""
        finish: FinishRun = self._answer(self._end)
        ray.kill(self._driver, no_restart=True)
        return finish

    def _answer(self, answer: Future[Any]) -> Any:
        try:
            return answer.result()
        except RayError as error:
            raise ResourceError(
                f"the detached driver cannot be reached: {error}", remedy="see trainwright show; the run may go on"
            ) from error

    def stop(self, now: bool = False) -> None:
        """Ask the run to end."""
        self._driver.stop.remote(now)

    def flush(self) -> None:
        """Do nothing: the driver writes its events itself."""

    def listen(self, listener: EventListener) -> None:
        """Refused: raises ResourceError."""
        raise ResourceError(
            "listeners cannot be added to a detached driver", remedy="read them: trainwright logs --json"
        )
