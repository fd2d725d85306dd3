"""The worker as a Ray actor: one thread that steps, others that upload, watch and wait for the end."""

from __future__ import annotations

import os
import socket
import threading
import traceback
from dataclasses import dataclass
from typing import Any

import ray

from trainwright.core.errors import (
    DataError,
    JobError,
    NonFiniteLoss,
    PeerLost,
    StorageError,
    TrainwrightError,
    UserCodeError,
)
from trainwright.core.events import Steps
from trainwright.driver.messages import Failure, FailureKind
from trainwright.worker import Worker, WorkOrder

_KINDS: tuple[tuple[tuple[type[Exception], ...], FailureKind], ...] = (
    ((UserCodeError, NonFiniteLoss, JobError), "user"),
    ((PeerLost,), "peer"),
    ((StorageError,), "storage"),
    ((DataError,), "data"),
)


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A process that is up.

    Attributes:
        accelerators: ids of those that Ray gave it.
        trouble: why it is of no use as a spare.
    """

    node: str
    pid: int
    accelerators: tuple[str, ...] = ()
    trouble: str = ""


class WorkerProcess:
    """Answers are `value | Failure`: an error of ours never travels as Ray's."""

    def __init__(self, order: WorkOrder, worker: int) -> None:
        self._where = f"worker {worker} on {socket.gethostname()}, pid {os.getpid()}"
        self._order = order
        self._worker: Worker | None = None
        self._broken: Failure | None = None

    def hello(self, spare: bool = False) -> Hello:
        """Build the worker, framework imports included, and say who and where this process is; a spare rehearses first.

        What goes wrong with that is the answer to every verb, so that it is told as it is and not as a lost worker. Of
        a spare it is told at once.
        """
        try:
            self._worker = Worker(self._order)
            if spare:
                self._worker.rehearse()
        except Exception as error:
            self._broken = _failure(error, self._where)
        ids = ray.get_runtime_context().get_accelerator_ids()
        return Hello(
            node=socket.gethostname(),
            pid=os.getpid(),
            accelerators=tuple(str(number) for numbers in ids.values() for number in numbers),
            trouble=self._broken.error.summary if spare and self._broken else "",
        )

    def call(self, verb: str, argument: Any) -> Any:
        """A verb of the stepping thread."""
        return self._answer(verb, argument)

    @ray.method(concurrency_group="upload")
    def upload(self, verb: str, argument: Any) -> Any:
        """A verb of the upload thread."""
        return self._answer(verb, argument)

    @ray.method(concurrency_group="watch")
    def watch(self, after: int, timeout_s: float) -> Steps:
        """News of completed steps."""
        assert self._worker is not None, "hello comes first"
        return self._worker.watch(after, timeout_s)

    @ray.method(concurrency_group="watch")
    def stop(self) -> None:
        """Wish to stop."""
        assert self._worker is not None, "hello comes first"
        self._worker.stop()

    @ray.method(concurrency_group="watch")
    def interrupt(self, generation: int, explain: bool) -> str:
        """Free the stepping thread from a collective of that generation; says where the threads stood, on request."""
        return self._worker.interrupt(generation, explain) if self._worker is not None else ""

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Never returns: its future ends with the process, which is how a death is told at once."""
        threading.Event().wait()

    def _answer(self, verb: str, argument: Any) -> Any:
        if self._broken is not None:
            return self._broken
        assert self._worker is not None, "hello comes first"
        method = getattr(self._worker, verb)
        try:
            return method() if argument is None else method(argument)
        except Exception as error:
            failure = _failure(error, self._where)
        if verb != "upload":
            self._let_go(self._worker, failure)
        return failure

    def _let_go(self, worker: Worker, failure: Failure) -> None:
        """Leave the group, so that the other ranks notice at once instead of at their deadline."""
        try:
            worker.leave()
        except Exception:  # told below the failure that came first
            failure.error.detail += f"\nwhile leaving the group:\n{traceback.format_exc()}"


_OPTIONS: dict[str, Any] = {
    "max_restarts": 0,
    "max_task_retries": 0,
    "concurrency_groups": {"upload": 1, "watch": 2, "life": 1},
}
WORKER: Any = ray.remote(**_OPTIONS)(WorkerProcess)
"""The actor class."""


def _failure(error: Exception, where: str) -> Failure:
    if isinstance(error, NonFiniteLoss) and error.elsewhere:
        return Failure(kind="peer", error=error)
    for kinds, kind in _KINDS:
        if isinstance(error, kinds):
            assert isinstance(error, TrainwrightError)
            error.where = f"{error.where}; {where}" if error.where else where
            return Failure(kind=kind, error=error)
    told = TrainwrightError(
        f"{type(error).__name__}: {error}", where=where, detail="".join(traceback.format_exception(error))
    )
    return Failure(kind="internal", error=told)
