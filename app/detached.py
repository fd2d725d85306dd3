"""A driver in an actor of the cluster: it outlives whoever started it, and Ray starts it again when it dies."""

from __future__ import annotations

import threading
from typing import Any

import ray
from ray.exceptions import RayError

from trainwright.adoption import NAMESPACE, lasting, run_name
from trainwright.core.errors import ResourceError, TrainwrightError
from trainwright.core.job import Job
from trainwright.driver.messages import Finish
from trainwright.journal import Listener
from trainwright.prepare import Prepared
from trainwright.store import Store
from trainwright.travel import pack, unpack

LINGER_S, OVER_S = 60.0, 1.0  # for callers to hear of the end; for a driver to say that it is over


class DriverProcess:
    """Runs a job. Begun again after a death, it goes on where the one before was, with the workers that live."""

    def __init__(self, job: bytes, *, resume: bool, fresh: bool) -> None:
        again = ray.get_runtime_context().was_current_actor_reconstructed
        self._options = {"resume": resume or again, "fresh": fresh and not again}
        self._job = job
        self._run: Any = None
        self._began = threading.Event()
        self._finish: Finish | None = None
        self._thread = threading.Thread(target=self._drive, name="trainwright-detached", daemon=True)
        self._thread.start()

    def _drive(self) -> None:
        from trainwright import api

        try:
            self._run = api.start(unpack(self._job), **self._options)
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
            self._driver = DRIVER.options(**lasting(name)).remote(pack(job), resume=resume, fresh=fresh)
        except ValueError as error:
            raise ResourceError(
                f"the run {job.name!r} has a detached driver already",
                where=name,
                remedy=f"follow it with: trainwright logs {job.name} --follow",
            ) from error

    def run(self) -> Finish:
        """Wait for the end."""
        try:
            finish: Finish = ray.get(self._driver.end.remote())
        except RayError as error:
            raise ResourceError(
                f"the detached driver cannot be reached: {error}", remedy="see trainwright show; the run may go on"
            ) from error
        ray.kill(self._driver, no_restart=True)
        return finish

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
