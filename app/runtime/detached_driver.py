"""A driver in an actor of the cluster: it outlives whoever started it, and Ray starts it again when it dies."""

from __future__ import annotations

import threading
from typing import Any

import ray
from ray.exceptions import RayError

from trainwright.core.errors import JobError, ResourceError, TrainwrightError
from trainwright.core.job import Job
from trainwright.driver.messages import Finish
from trainwright.planning.job_preparation import Prepared
from trainwright.runtime.takeover import NAMESPACE, lasting, run_name
from trainwright.storage.event_log import Listener
from trainwright.storage.store import Store
from trainwright.worker.job_pickle import pack, unpack

LINGER_S, OVER_S = 60.0, 1.0  # for callers to hear of the end; for a driver to say that it is over
# What is larger Ray keeps with the caller: it would be lost with it, and the driver could not be started again. It
# carries smaller arguments with the actor's entry in its register, up to 10 MiB in all.
PIECE_BYTES, MOST_BYTES = 64 * 1024, 8 * 1024**2


class DriverProcess:
    """Runs a job. Begun again after a death, it goes on where the one before was, with the workers that live."""

    def __init__(self, *job: bytes, resume: bool, fresh: bool) -> None:
        again = ray.get_runtime_context().was_current_actor_reconstructed
        self._options = {"resume": resume or again, "fresh": fresh and not again}
        self._job = b"".join(job)
        self._run: Any = None
        self._began = threading.Event()
        self._finish: Finish | None = None
        self._thread = threading.Thread(target=self._drive, name="trainwright-detached", daemon=True)
        self._thread.start()

    def _drive(self) -> None:
        from trainwright import api

        try:
            job = unpack(self._job).replace(preflight=False)  # who asked for this driver has tried it
            self._run = api.start(job, **self._options)
            self._began.set()
            self._run.wait()
            self._finish = self._run.finish
        except TrainwrightError as error:
            self._finish = Finish(outcome="failed", step=0, error=error)
        except Exception as error:  # nobody else would hear of it
            told = TrainwrightError(f"{type(error).__name__}: {error}", where="the detached driver")
            self._finish = Finish(outcome="failed", step=0, error=told)
        self._began.set()
        threading.Timer(LINGER_S, self._leave).start()

    def _leave(self) -> None:
        """Nobody may ever ask for the end; a process that only exits would be begun again."""
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    @ray.method(concurrency_group="end")
    def begun(self) -> Finish | None:
        """Waits until the run is under way; its end, where it could not be begun."""
        self._began.wait()
        return self._finish if self._run is None else None

    @ray.method(concurrency_group="end")
    def end(self) -> Finish:
        """Waits for the end of the run, however often this driver dies before."""
        self._thread.join()
        assert self._finish is not None, "the thread ends with a result"
        return self._finish

    def stop(self, now: bool) -> None:
        """Ask the run to end."""
        self._began.wait()
        if self._run is not None:
            self._run.stop(now)


_OPTIONS: dict[str, Any] = {
    "num_cpus": 0,
    "max_restarts": -1,
    "max_task_retries": -1,
    "concurrency_groups": {"end": 8},
}
DRIVER: Any = ray.remote(**_OPTIONS)(DriverProcess)
"""The actor class."""


def _pieces(job: Job) -> list[bytes]:
    packed = pack(job)
    if len(packed) > MOST_BYTES:
        size, most = (f"{value / 1024**2:.1f} MiB" for value in (len(packed), MOST_BYTES))
        problem = f"the job is {size} large, a detached driver takes {most}: let train= and evaluate= read files"
        raise JobError([problem])
    return [packed[start : start + PIECE_BYTES] for start in range(0, len(packed), PIECE_BYTES)]


def _retire(name: str) -> None:
    """A driver whose run is over, but which still waits for callers to hear of it, goes now."""
    try:
        driver: Any = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return  # there is none
    over, _ = ray.wait([driver.end.remote()], timeout=OVER_S)
    if over:
        ray.kill(driver, no_restart=True)


class RemoteSession:
    """A session that is driven by an actor: what a Run needs of one."""

    def __init__(self, prepared: Prepared, job: Job, *, resume: bool, fresh: bool) -> None:
        self.store: Store = prepared.store
        name = f"{run_name(prepared.store.uri_of(job.name))}/driver"
        _retire(name)
        try:
            self._driver = DRIVER.options(**lasting(name)).remote(*_pieces(job), resume=resume, fresh=fresh)
        except ValueError as error:
            raise ResourceError(
                f"the run {job.name!r} has a detached driver already",
                where=name,
                remedy=f"follow it with: trainwright logs {job.name} --follow",
            ) from error

    def begin(self) -> None:
        """Wait until the driver has taken up the run. Raises what keeps it from that, as `tw.start` without it does."""
        finish: Finish | None = self._answer(self._driver.begun.remote())
        if finish is not None and finish.error is not None:
            ray.kill(self._driver, no_restart=True)
            raise finish.error

    def run(self) -> Finish:
        """Wait for the end."""
        finish: Finish = self._answer(self._driver.end.remote())
        ray.kill(self._driver, no_restart=True)
        return finish

    def _answer(self, asked: Any) -> Any:
        try:
            return ray.get(asked)
        except RayError as error:
            raise ResourceError(
                f"the detached driver cannot be reached: {error}", remedy="see trainwright show; the run may go on"
            ) from error

    def stop(self, now: bool = False) -> None:
        """Ask the run to end."""
        self._driver.stop.remote(now)

    def flush(self) -> None:
        """The driver writes its events itself."""

    def listen(self, listener: Listener) -> None:
        """Refused: raises ResourceError."""
        raise ResourceError(
            "a detached driver's events are not heard here", remedy="read them: trainwright logs --json"
        )
