"""The worker as a Ray actor: one thread that steps, others that upload, watch and wait for the end."""

from __future__ import annotations

import gc
import os
import socket
import threading
import traceback
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError

from trainwright.core.errors import (
    DataError,
    FencedError,
    JobError,
    NonFiniteLoss,
    PeerLost,
    StorageError,
    TrainwrightError,
    UserCodeError,
)
from trainwright.core.events import Steps
from trainwright.core.group import Generation
from trainwright.core.redaction import without_secrets
from trainwright.driver.messages import Failure, FailureKind, KeptState, Living
from trainwright.runtime.call_arguments import joined
from trainwright.runtime.takeover import NAMESPACE, Adopted, Orphanage, keeper_name
from trainwright.storage.memory_checkpoints import Fetch, Shelf
from trainwright.strategies.common.host_address import be_at
from trainwright.worker.preemption_notice import Notices
from trainwright.worker.print_capture import Prints
from trainwright.worker.worker import Worker
from trainwright.worker.worker_config import WorkOrder

FETCH_S = 120.0

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
        node_id: as Ray names the node.
        accelerators: ids of those that Ray gave it.
        trouble: why it is of no use as a spare.
    """

    node: str
    node_id: str
    pid: int
    accelerators: tuple[str, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class Berth:
    """Who a worker process is.

    Attributes:
        slot: of which it holds the bundle; None for a spare beside others.
        run: the run's name in the cluster.
        lent: ids of the accelerators of a seat that is another's; None where Ray gives the process its own.
    """

    worker: int
    slot: int | None
    run: str
    lent: tuple[str, ...] | None = None


class WorkerProcess:
    """Answers are `value | Failure`: an error of ours never travels as Ray's."""

    def __init__(self, order: WorkOrder, berth: Berth, token: int) -> None:
        self._berth, self._token = berth, token
        self._rank = -1  # that it was given last
        self._turn = threading.Condition()  # guards the token
        self._orphanage = Orphanage(lent=berth.lent is not None)
        self._notices = Notices(order.preemption_s)  # here, since this is the main thread
        self._where = f"worker {berth.worker} on {socket.gethostname()}, pid {os.getpid()}"
        self._order = order
        self._worker: Worker | None = None
        self._broken: Failure | None = None
        self._prints = Prints.installed()

    def hello(self, spare: bool = False) -> Hello:
        """Build the worker, framework imports included, and say who and where this process is; a spare rehearses first.

        What goes wrong with that is the answer to every verb, so that it is told as it is and not as a lost worker. Of
        a spare it is told at once.
        """
        gc.disable()  # until the engine is built: imports make no garbage, and looking for some takes an eighth longer
        if self._berth.lent is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self._berth.lent)
        try:
            be_at(str(ray.util.get_node_ip_address()))  # type: ignore[no-untyped-call]
            self._worker = Worker(self._order, socket.gethostname(), fetch_from(self._berth.run))
            if spare:
                self._worker.rehearse()
                self._prints.take(0.0)  # which rank 0 has told, or will tell
        except Exception as error:
            self._broken = _failure(error, self._where)
        return Hello(
            node=socket.gethostname(),
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            accelerators=_accelerators(self._berth),
            trouble=self._broken.error.summary if spare and self._broken else "",
        )

    def call(self, verb: str, own: Any, token: int, common: bytes = b"") -> Any:
        """A verb of the stepping thread. Its argument comes in two parts (see `arguments`), as in the next two."""
        argument = joined(own, common)
        if verb == "form":
            self._rank, self._berth = argument.rank, replace(self._berth, slot=argument.slot)
        return self._answer(verb, argument, token)

    @ray.method(concurrency_group="upload")
    def upload(self, verb: str, own: Any, token: int, common: bytes = b"") -> Any:
        """A verb of the upload thread."""
        return self._answer(verb, joined(own, common), token)

    @ray.method(concurrency_group="keep")
    def keep(self, verb: str, own: Any, token: int, common: bytes = b"") -> Any:
        """A verb of the thread that writes into memory."""
        return self._answer(verb, joined(own, common), token)

    @ray.method(concurrency_group="watch")
    def watch(self, after: int, timeout_s: float, token: int) -> Steps | Failure:
        """News of completed steps."""
        assert self._worker is not None, "hello comes first"
        return self._refusal(token) or self._worker.watch(after, timeout_s)

    @ray.method(concurrency_group="watch")
    def stop(self, token: int) -> Failure | None:
        """Wish to stop."""
        assert self._worker is not None, "hello comes first"
        refusal = self._refusal(token)
        if refusal is None:
            self._worker.stop()
        return refusal

    @ray.method(concurrency_group="watch")
    def interrupt(self, number: int, explain: bool, token: int) -> str | Failure:
        """Free the stepping thread from a collective of that generation; says where the threads stood, on request."""
        generation = Generation(token=token, number=number)
        refusal = self._refusal(token)
        return refusal or (self._worker.interrupt(generation, explain) if self._worker is not None else "")

    @ray.method(concurrency_group="life")
    def printed(self, timeout_s: float, token: int) -> list[str] | Failure:
        """Lines that the job printed since the last call; waits a while for the first one."""
        return self._refusal(token) or self._prints.take(timeout_s)

    @ray.method(concurrency_group="life")
    def notice(self, token: int) -> float | Failure:
        """Returns when this process is told that it will be ended: in so many seconds."""
        left_s = self._notices.wait()
        return self._refusal(token) or left_s

    @ray.method(concurrency_group="life")
    def live(self, token: int) -> Failure:
        """Ends with the process, which is how a death is told at once; returns when another driver takes over."""
        with self._turn:
            self._turn.wait_for(lambda: self._token != token)
        return self._refusal(token) or _fenced(self._where)

    @ray.method(concurrency_group="watch")
    def keep_alive(self) -> None:
        """Somebody prepares to take this process over: stay."""
        self._orphanage.heard()

    @ray.method(concurrency_group="watch")
    def beat(self, token: int) -> Failure | None:
        """The driver lives."""
        refusal = self._refusal(token)
        if refusal is None:
            self._orphanage.heard()
        return refusal

    @ray.method(concurrency_group="watch")
    def end(self, token: int) -> Failure | None:
        """The run goes on without this process."""
        refusal = self._refusal(token)
        if refusal is None:
            self._orphanage.end()
        return refusal

    @ray.method(concurrency_group="watch")
    def adopt(self, order: WorkOrder, token: int) -> Adopted | Failure:
        """Belong to another driver of the same job: the group of the one before is let go of."""
        refusal = self._refusal(token)
        if refusal is not None:
            return refusal
        self._orphanage.heard()
        if self._worker is None or self._broken is not None or order.identity != self._order.identity:
            return Adopted(trouble="it belongs to another job, or is not up")
        with self._turn:
            self._token = token
            self._turn.notify_all()
        self._order = order
        self._worker.renew(order, token)
        here, berth, (plan, step) = ray.get_runtime_context(), self._berth, self._worker.held
        living = Living(
            worker=berth.worker, node=socket.gethostname(), pid=os.getpid(), slot=berth.slot,
            waiting=self._rank < 0, rank=self._rank, accelerators=_accelerators(berth), home=here.get_node_id(),
            plan=plan, step=step,
        )  # fmt: skip
        return Adopted(living=living, node_id=here.get_node_id(), group=ray.util.get_current_placement_group())

    def _answer(self, verb: str, argument: Any, token: int) -> Any:
        refusal = self._refusal(token)
        if refusal is not None:
            return refusal
        self._orphanage.heard()
        if self._broken is not None:
            return self._broken
        assert self._worker is not None, "hello comes first"
        method = getattr(self._worker, verb)
        try:
            return method() if argument is None else method(argument)
        except Exception as error:
            failure = _failure(error, self._where)
        if verb == "run":
            failure = replace(failure, step=self._worker.newest)
        if verb not in ("upload", "keep"):
            self._let_go(self._worker, failure)
        return failure

    def _refusal(self, token: int) -> Failure | None:
        """What a driver is answered that another one has replaced."""
        return _fenced(self._where) if token < self._token else None

    def _let_go(self, worker: Worker, failure: Failure) -> None:
        """Leave the group, so that the other ranks notice at once instead of at their deadline."""
        try:
            worker.leave()
        except Exception:  # told below the failure that came first
            failure.error.detail += f"\nwhile leaving the group:\n{traceback.format_exc()}"


_OPTIONS: dict[str, Any] = {
    "max_restarts": 0,
    "max_task_retries": 0,
    "concurrency_groups": {"upload": 1, "keep": 1, "watch": 3, "life": 8},
}
WORKER: Any = ray.remote(**_OPTIONS)(WorkerProcess)
"""The actor class of workers."""


class KeeperProcess:
    """Guards a run's copies on one node: gives them to other nodes, and removes them at the end."""

    def __init__(self, uri: str, token: int) -> None:
        self._shelf = Shelf(uri)
        self._token = token
        self._sealed: KeptState | None = None
        self._orphanage = Orphanage(self._shelf.remove)

    def keep_alive(self) -> None:
        """Somebody prepares to take this process over: stay."""
        self._orphanage.heard()

    def beat(self, token: int) -> Failure | None:
        """The driver lives."""
        refusal = self._refusal(token)
        if refusal is None:
            self._orphanage.heard()
        return refusal

    def end(self, token: int) -> Failure | None:
        """The run goes on without these copies."""
        refusal = self._refusal(token)
        if refusal is None:
            self._orphanage.end()
        return refusal

    def seal(self, kept: bytes, token: int) -> Failure | None:
        """This state, as `arguments` send it, is whole: remember it for a driver to come. None: forget the last one."""
        refusal = self._refusal(token)
        if refusal is None:
            self._sealed = joined(None, kept)
        return refusal

    def adopt(self, token: int) -> KeptState | Failure | None:
        """Belong to another driver; answers the newest state that is whole."""
        refusal = self._refusal(token)
        if refusal is not None:
            return refusal
        self._token = token
        self._orphanage.heard()
        return self._sealed

    def read(self, version: int, name: str) -> bytes | Failure:
        """A file, for another node."""
        try:
            return self._shelf.read(version, name)
        except StorageError as error:
            return Failure(kind="storage", error=error)

    def remove(self, token: int) -> Failure | None:
        """The run has ended."""
        refusal = self._refusal(token)
        if refusal is None:
            self._shelf.remove()
        return refusal

    def _refusal(self, token: int) -> Failure | None:
        return _fenced(f"keeper on {socket.gethostname()}, pid {os.getpid()}") if token < self._token else None


KEEPER: Any = ray.remote(num_cpus=0, max_restarts=0)(KeeperProcess)
"""The actor class of keepers."""


def fetch_from(run: str) -> Fetch:
    """Reads files of a state from the keepers of other nodes."""

    def fetch(node: str, version: int, name: str) -> bytes:
        try:
            keeper: Any = ray.get_actor(keeper_name(run, node), namespace=NAMESPACE)
            found: Any = ray.get(keeper.read.remote(version, name), timeout=FETCH_S)
        except (ValueError, RayError) as error:
            raise StorageError(f"the memory of {node} cannot be reached: {error}") from error
        if isinstance(found, Failure):
            raise found.error
        return bytes(found)

    return fetch


def _fenced(where: str) -> Failure:
    error = FencedError(
        "another driver has taken over the run's processes",
        where=where,
        remedy="nothing is lost: the run goes on in the other driver",
    )
    return Failure(kind="internal", error=error)


def _accelerators(berth: Berth) -> tuple[str, ...]:
    """Ids of those that Ray gave this process, or of its seat."""
    if berth.lent is not None:
        return berth.lent
    ids = ray.get_runtime_context().get_accelerator_ids()
    return tuple(str(number) for numbers in ids.values() for number in numbers)


def _failure(error: Exception, where: str) -> Failure:
    """What is told of it. The secrets of this process stay here."""
    failure = _classified(error, where)
    failure.error.hide(without_secrets)
    return failure


def _classified(error: Exception, where: str) -> Failure:
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
