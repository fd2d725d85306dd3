"""The worker as a Ray actor: one thread that steps, others that upload, watch and wait for the end.

A group of n ranks names n peers. If each rank were sent all of them, the driver would pickle and send n * n.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import ray
from ray.exceptions import RayError

from trainwright.core.errors import (
    DataError,
    DeviceError,
    DeviceOutOfMemory,
    FencedError,
    JobError,
    NonFiniteLoss,
    PeerLost,
    StorageError,
    TrainwrightError,
    UserCodeError,
    escape_control_characters,
)
from trainwright.core.events import MediaLogged, Steps
from trainwright.core.frameworks import keep_freed_memory
from trainwright.core.redaction import redact
from trainwright.core.topology import Generation, Group
from trainwright.driver.messages import (
    CallFailure,
    CallFailureKind,
    MemoryCheckpoint,
    SurvivingWorker,
    WorkerStarted,
)
from trainwright.runtime.forked_workers import start_fork_server
from trainwright.runtime.takeover import NAMESPACE, DriverWatchdog, TakeoverAnswer, memory_store_name
from trainwright.storage.memory_checkpoints import MemoryCheckpointStore, MemoryPart, PeerMemory
from trainwright.strategies.common.socket_transport import set_own_host
from trainwright.worker.cloud_notices import NodeNotice, await_cloud_notice
from trainwright.worker.worker import Worker
from trainwright.worker.worker_config import WorkerConfig

_FETCH_S = 120.0
_STARTED_S = 5.0  # time for Ray to register an actor of another node

_KINDS: tuple[tuple[tuple[type[Exception], ...], CallFailureKind], ...] = (
    ((UserCodeError, NonFiniteLoss, JobError), "user"),
    ((PeerLost,), "peer"),
    ((StorageError,), "storage"),
    ((DataError,), "data"),
    ((DeviceError,), "internal"),
)


@dataclass(frozen=True, kw_only=True)
class WorkerSlot:
    """The place of a worker process in the run."""

    worker: int
    slot: int | None  # slot of its rank; None for a warm standby
    bundle: int  # slot in whose bundle it was placed; a warm standby shares it
    run: str  # the run's name in the cluster
    # ids of accelerators that another process holds for it; None if Ray gives the process its own
    lent: tuple[str, ...] | None = None


class WorkerCalls:
    """Carries out the driver's calls of one worker. Methods return a value or a `CallFailure`; they raise no errors.

    Args:
        prints: prints and logs of the job, which the driver polls.
    """

    def __init__(self, order: WorkerConfig, place: WorkerSlot, token: int, prints: PrintCapture) -> None:
        self._place, self._token, self._prints = place, token, prints
        self._rank = -1  # of the last rendezvous
        self._changed = threading.Condition()  # guards the token; notified of a preemption notice
        self._where = f"worker {place.worker} on {socket.gethostname()}, pid {os.getpid()}"
        self._order = order
        self._worker: Worker | None = None
        self._broken: CallFailure | None = None

    def hello(self, spare: bool = False) -> WorkerStarted | str:
        """Build the worker, framework imports included, and return facts of this process; warm up a standby.

        An error in that is the answer to every verb, so that it is not reported as a lost worker. For a standby, it is
        returned as a text in place of the facts.
        """
        keep_freed_memory()
        gc.disable()  # until the engine is built: imports make no garbage; collections add an eighth to their time
        if self._place.lent is not None and not spare:  # a standby may take those of another slot
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self._place.lent)
        try:
            set_own_host(str(ray.util.get_node_ip_address()))  # type: ignore[no-untyped-call]
            self._worker = Worker(
                self._order, socket.gethostname(), _ClusterMemory(self._place.run), emit=self._prints.add
            )
            if spare:
                self._worker.rehearse()
                self._prints.take(0.0)  # rank 0 prints the same
        except Exception as error:
            self._broken = _failure(error, self._where)
        if spare and self._broken is not None:
            return self._broken.error.summary
        return WorkerStarted(
            worker=self._place.worker, node=socket.gethostname(), pid=os.getpid(),
            accelerators=_accelerators(self._place), home=ray.get_runtime_context().get_node_id(),
        )  # fmt: skip

    def call(self, verb: str, own_part: Any, token: int, common: bytes = b"") -> Any:
        """Run a verb on the thread of steps. Its argument comes in two parts (see `ArgumentPickler`)."""
        argument = join_argument(own_part, common)
        if verb == "form":
            lent = argument.accelerators or self._place.lent  # a standby has none of its own
            self._rank, self._place = argument.rank, replace(self._place, slot=argument.slot, lent=lent)
        return self._answer(verb, argument, token)

    @ray.method(concurrency_group="upload")
    def upload(self, verb: str, own_part: Any, token: int, common: bytes = b"") -> Any:
        """Run a verb on the upload thread."""
        return self._answer(verb, join_argument(own_part, common), token)

    @ray.method(concurrency_group="keep")
    def keep(self, verb: str, own_part: Any, token: int, common: bytes = b"") -> Any:
        """Run a verb on the thread that writes copies into memory."""
        return self._answer(verb, join_argument(own_part, common), token)

    @ray.method(concurrency_group="watch")
    def watch(self, step: int, timeout_s: float, token: int) -> Steps | CallFailure:
        """Return the steps completed after `step`; wait up to `timeout_s` for the first one."""
        assert self._worker is not None, "hello comes first"
        return self._refusal(token) or self._worker.watch(step, timeout_s)

    @ray.method(concurrency_group="watch")
    def stop(self, token: int) -> CallFailure | None:
        """Ask the ranks to stop, all after the same step."""
        assert self._worker is not None, "hello comes first"
        refusal = self._refusal(token)
        if refusal is None:
            self._worker.stop()
        return refusal

    @ray.method(concurrency_group="watch")
    def interrupt(self, number: int, explain: bool, token: int) -> str | CallFailure:
        """Interrupt the collectives of a rendezvous epoch; return the stack traces of all threads on request."""
        generation = Generation(token=token, number=number)
        refusal = self._refusal(token)
        return refusal or (self._worker.interrupt(generation, explain) if self._worker is not None else "")

    @ray.method(concurrency_group="life")
    def printed(self, timeout_s: float, flushes: int, token: int) -> list[str | MediaLogged] | CallFailure:
        """Return prints and logs of the job since the last call; wait up to `timeout_s` for the first one.

        Args:
            flushes: number of this driver's calls so far that did not wait.
        """
        return self._refusal(token) or self._prints.take(timeout_s, (token, flushes))

    @ray.method(concurrency_group="watch")
    def beat(self, token: int) -> CallFailure | None:
        """Note that the driver lives."""
        return self._refusal(token)

    def _answer(self, verb: str, argument: Any, token: int) -> Any:
        refusal = self._refusal(token)
        if refusal is not None:
            return refusal
        if self._broken is not None:
            return self._broken
        assert self._worker is not None, "hello comes first"
        method = getattr(self._worker, verb)
        try:
            return method() if argument is None else method(argument)
        except Exception as error:
            failure = _failure(error, self._where)
        if isinstance(failure.error, DeviceOutOfMemory):
            failure = replace(failure, memory=self._worker.peak_memory)
        if verb == "run":
            failure = replace(failure, step=self._worker.newest)
        if verb not in ("upload", "keep", "trace"):
            self._leave_group(self._worker, failure)
        return failure

    def _refusal(self, token: int) -> CallFailure | None:
        """Return the answer to a driver that another one has replaced; None for the current driver."""
        return _fenced_failure(self._where) if token < self._token else None

    def _leave_group(self, worker: Worker, failure: CallFailure) -> None:
        """Leave the group, so that the other ranks notice at once instead of at their deadline."""
        try:
            worker.leave()
        except Exception:  # reported below the first failure
            failure.error.detail += f"\nwhile leaving the group:\n{traceback.format_exc()}"


class WorkerProcess(WorkerCalls):
    """The actor of a worker, which ends when no driver calls, and which the next driver can take over."""

    def __init__(self, order: WorkerConfig, place: WorkerSlot, token: int) -> None:
        super().__init__(order, place, token, PrintCapture.installed())
        self._watchdog = DriverWatchdog(lent=place.lent is not None)
        self._notices = _PreemptionNotices(order.preemption_s, self._changed)  # here, since this is the main thread

    @ray.method(concurrency_group="life")
    def notice(self, token: int) -> float | CallFailure:
        """Wait for a preemption notice; return the seconds until the process ends. Another driver ends the wait too."""
        with self._changed:
            self._changed.wait_for(lambda: self._notices.left_s is not None or self._token != token)
        return self._refusal(token) or self._notices.left_s or 0.0

    @ray.method(concurrency_group="life")
    def node_notice(self, known_keys: frozenset[str], token: int) -> NodeNotice | CallFailure | None:
        """Wait for a notice of the cloud for this node; None if the node is no machine of a cloud.

        Args:
            known_keys: keys of the notices that the driver knows.
        """

        def replaced(after_s: float) -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: self._token != token, after_s)

        notice = await_cloud_notice(known_keys, replaced)
        return self._refusal(token) or notice

    @ray.method(concurrency_group="life")
    def live(self, token: int) -> CallFailure:
        """Return when another driver takes over. The call fails when the process ends, which reports that at once."""
        with self._changed:
            self._changed.wait_for(lambda: self._token != token)
        return self._refusal(token) or _fenced_failure(self._where)

    @ray.method(concurrency_group="watch")
    def keep_alive(self) -> None:
        """Stay alive, because a driver prepares to take this process over."""
        self._watchdog.heard()

    @ray.method(concurrency_group="life")
    def start_fork_server(self, module: str, threads: int, token: int) -> str | CallFailure:
        """Start the fork server of this node unless there is one; return the command that orders workers there."""
        return self._refusal(token) or start_fork_server(module, threads)

    @ray.method(concurrency_group="watch")
    def end(self, token: int) -> CallFailure | None:
        """End this process, because the run continues without it."""
        refusal = self._refusal(token)
        if refusal is None:
            self._watchdog.end()
        return refusal

    @ray.method(concurrency_group="watch")
    def adopt(self, order: WorkerConfig, token: int) -> TakeoverAnswer | CallFailure | None:
        """Belong to another driver of the same job, and leave the group of the previous one.

        None: this process belongs to another job, or is not up.
        """
        refusal = self._refusal(token)
        if refusal is not None:
            return refusal
        if self._worker is None or self._broken is not None or order.identity != self._order.identity:
            return None
        with self._changed:
            self._token = token
            self._changed.notify_all()
        self._order = order
        self._worker.renew(order, token)
        place, (plan, step) = self._place, self._worker.held
        living = SurvivingWorker(
            worker=place.worker, node=socket.gethostname(), pid=os.getpid(), slot=place.slot,
            waiting=self._rank < 0, rank=self._rank, accelerators=_accelerators(place),
            home=ray.get_runtime_context().get_node_id(), plan=plan, step=step,
        )  # fmt: skip
        group = ray.util.get_current_placement_group()
        assert group is not None, "workers are in a placement group"
        return TakeoverAnswer(living=living, bundle=place.bundle, group=group)

    def _refusal(self, token: int) -> CallFailure | None:
        refusal = super()._refusal(token)
        if refusal is None:
            self._watchdog.heard()
        return refusal


_OPTIONS: dict[str, Any] = {
    "max_restarts": 0,
    "max_task_retries": 0,
    "concurrency_groups": {"upload": 1, "keep": 1, "watch": 3, "life": 8},
}
WORKER_ACTOR: Any = ray.remote(**_OPTIONS)(WorkerProcess)
"""Actor class of workers."""


class MemoryStoreProcess:
    """The actor that holds a run's copies on one node: other nodes read them, and it removes them at the end."""

    def __init__(self, uri: str, token: int) -> None:
        self._copies = MemoryCheckpointStore(uri)
        self._token = token
        self._complete: MemoryCheckpoint | None = None
        self._watchdog = DriverWatchdog(self._copies.remove)

    def keep_alive(self) -> None:
        """Stay alive, because a driver prepares to take this process over."""
        self._watchdog.heard()

    def beat(self, token: int) -> CallFailure | None:
        """Note that the driver lives."""
        refusal = self._refusal(token)
        if refusal is None:
            self._watchdog.heard()
        return refusal

    def end(self, token: int) -> CallFailure | None:
        """End this process, because the run continues without its copies."""
        refusal = self._refusal(token)
        if refusal is None:
            self._watchdog.end()
        return refusal

    def seal(self, checkpoint: bytes, token: int) -> CallFailure | None:
        """Remember the complete copy, as `ArgumentPickler` sends it, for the next driver; None forgets the last one.

        Copies before the last one are removed: where a survivor has made one, no later copy may come.
        """
        refusal = self._refusal(token)
        if refusal is None:
            former, self._complete = self._complete, join_argument(None, checkpoint)
            if former is not None and self._complete is not None:
                self._copies.remove_before(former.version)
        return refusal

    def adopt(self, token: int) -> MemoryCheckpoint | CallFailure | None:
        """Belong to another driver; return the newest complete copy."""
        refusal = self._refusal(token)
        if refusal is not None:
            return refusal
        self._token = token
        self._watchdog.heard()
        return self._complete

    def read(self, version: int, name: str) -> bytes | CallFailure:
        """Return a file, for another node."""
        try:
            return self._copies.read(version, name)
        except StorageError as error:
            return CallFailure(kind="storage", error=error)

    def receive(self, part: MemoryPart) -> CallFailure | None:
        """Write a part of a file of another node."""
        try:
            self._copies.receive(part)
        except StorageError as error:
            return CallFailure(kind="storage", error=error)
        return None

    def remove(self, token: int) -> CallFailure | None:
        """Remove all copies, because the run has ended."""
        refusal = self._refusal(token)
        if refusal is None:
            self._copies.remove()
        return refusal

    def _refusal(self, token: int) -> CallFailure | None:
        return _fenced_failure(f"keeper on {socket.gethostname()}, pid {os.getpid()}") if token < self._token else None


MEMORY_STORE_ACTOR: Any = ray.remote(num_cpus=0, max_restarts=0)(MemoryStoreProcess)
"""The actor class of in-memory checkpoint stores."""


class _ClusterMemory(PeerMemory):
    """The in-memory checkpoint stores of a run's other nodes."""

    def __init__(self, run: str) -> None:
        self._run = run

    def fetch(self, node: str, version: int, name: str) -> bytes:
        """Read a file. Raises StorageError."""
        return bytes(self._ask(node, "read", version, name))

    def send(self, node: str, part: MemoryPart) -> None:
        """Write a part of a file. Raises StorageError."""
        self._ask(node, "receive", part)

    def _ask(self, node: str, method: str, *arguments: Any) -> Any:
        try:
            answer: Any = ray.get(getattr(self._store_of(node), method).remote(*arguments), timeout=_FETCH_S)
        except (ValueError, RayError) as error:
            raise StorageError(f"the memory of {node} cannot be reached: {error}") from error
        if isinstance(answer, CallFailure):
            raise answer.error
        return answer

    def _store_of(self, node: str) -> Any:
        """Return the store's actor, which the driver may be about to start. Raises ValueError."""
        until_s = time.monotonic() + _STARTED_S
        while True:
            try:
                return ray.get_actor(memory_store_name(self._run, node), namespace=NAMESPACE)
            except ValueError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.1)


def _fenced_failure(where: str) -> CallFailure:
    error = FencedError(
        "another driver has taken over the run's processes",
        where=where,
        remedy="nothing is lost: the run goes on in the other driver",
    )
    return CallFailure(kind="internal", error=error)


def _accelerators(place: WorkerSlot) -> tuple[str, ...]:
    """Return the ids of the accelerators of this process."""
    if place.lent is not None:
        return place.lent
    ids = ray.get_runtime_context().get_accelerator_ids()
    return tuple(str(number) for numbers in ids.values() for number in numbers)


def _failure(error: Exception, where: str) -> CallFailure:
    """Return the answer for an error, without the secrets of this process."""
    failure = _classify_error(error, where)
    failure.error.hide(redact)
    return failure


def _classify_error(error: Exception, where: str) -> CallFailure:
    if isinstance(error, NonFiniteLoss) and error.elsewhere:
        return CallFailure(kind="peer", error=error)
    for kinds, kind in _KINDS:
        if isinstance(error, kinds):
            assert isinstance(error, TrainwrightError)
            error.where = f"{error.where}; {where}" if error.where else where
            return CallFailure(kind=kind, error=error)
    unknown = TrainwrightError(
        f"{type(error).__name__}: {error}", where=where, detail="".join(traceback.format_exception(error))
    )
    return CallFailure(kind="internal", error=unknown)


# --- Arguments of the calls to workers --------------------------------------------------------------------------------


INLINE_BYTES = 4096  # up to here, sending the bytes is quicker than fetching them from the object store


class ArgumentPickler:
    """Pickles the driver's arguments for workers. For one thread."""

    def __init__(self) -> None:
        self._last: tuple[Any, Any] = (None, pickle.dumps(None))

    def of(self, argument: Any) -> tuple[Any, Any]:
        """Split an argument into the part of one worker and the part that all get; `join_argument` is the inverse."""
        if isinstance(argument, Group):
            return replace(argument, peers=()), self.common(argument.peers)
        return None, self.common(argument)

    def common(self, value: Any) -> Any:
        """Return the pickled value, or a reference to it in Ray's object store.

        The same object as in the last call is not pickled again, so that a call of many workers pickles once. The store
        keeps it while calls with it are under way; it is gone when this process ends.
        """
        if self._last[0] is not value:
            data = pickle.dumps(value)
            self._last = value, data if len(data) <= INLINE_BYTES else ray.put(data)
        return self._last[1]


def join_argument(own_part: Any, common: bytes) -> Any:
    """Join the parts of an argument in the worker, where Ray has resolved the reference.

    Args:
        common: empty if the whole argument is the worker's own.
    """
    if not common:
        return own_part
    value = cloudpickle.loads(common)
    return value if own_part is None else replace(own_part, peers=value)


# --- SIGTERM as a preemption notice -----------------------------------------------------------------------------------


_EXIT_CODE = 128 + signal.SIGTERM


class _PreemptionNotices:
    """Handles SIGTERM; created in the main thread. The process ends itself `preemption_s` after the first signal.

    `news` is notified of the signal.

    In Ray's workers the main thread seldom runs Python code, so that a Python handler would come late. The wake-up
    descriptor gets the number of the signal at once.
    """

    def __init__(self, preemption_s: float, news: threading.Condition) -> None:
        self._preemption_s, self._news = preemption_s, news
        self._ends_s: float | None = None
        self._wakeup_reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._wakeup_writer = writer  # kept open
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        os.register_at_fork(after_in_child=_restore_sigterm)
        threading.Thread(target=self._listen, name="notices", daemon=True).start()

    def _listen(self) -> None:
        while signal.SIGTERM not in self._wakeup_reader.recv(64):
            pass
        self._ends_s = time.monotonic() + self._preemption_s
        with self._news:
            self._news.notify_all()
        threading.Event().wait(self._preemption_s)
        os._exit(_EXIT_CODE)

    @property
    def left_s(self) -> float | None:
        """The seconds until the process ends; None before the signal."""
        return None if self._ends_s is None else max(0.0, self._ends_s - time.monotonic())


def _restore_sigterm() -> None:
    """Let SIGTERM end a child that the job forks; it is no notice for the parent."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


# --- Captured prints --------------------------------------------------------------------------------------------------


BURST_LINES, _LINES_PER_S = 300, 10.0  # lines at once, and in the long run
MAX_LINES = 1000  # newest lines that are kept
MAX_LINE_LENGTH = 2000  # characters
_MAX_MEDIA_BYTES = 64 << 20  # of images that wait
_RECEIPT_S = 5.0  # to wait for a driver, which may be gone, to take an image
_RAY_MARKERS = (":actor_name:", ":task_name:", ":job_id:")  # lines that Ray itself writes into its log files


class PrintCapture:
    """A text stream that passes text on to another one, and keeps the lines until the driver polls them. Thread-safe.

    Lines that a job prints faster than the driver polls are left out here, and counted. Images and texts of callbacks
    go the same way, in their order.

    Args:
        behind: stream that gets the text, such as Ray's log file.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, behind: Any, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._behind, self._clock = behind, clock
        self._news = threading.Condition()
        self._lines: deque[str | MediaLogged] = deque(maxlen=MAX_LINES)
        self._open = ""  # the unfinished line
        self._left_out = self._media_bytes = 0
        self._flushed = (0, 0)  # the last call that did not wait: the driver's token, and the number of such calls
        self._added = self._sent = self._received = 0  # images and texts: in all, in answers, in the driver
        self._driver_away = False  # whether an image or a text waited too long
        self._allowed, self._allowed_s = float(BURST_LINES), clock()

    @classmethod
    def installed(cls) -> PrintCapture:
        """Make a capture the standard output of this process, and return it."""
        if not isinstance(sys.stdout, cls):
            sys.stdout = cls(sys.stdout)
        capture: PrintCapture = sys.stdout
        return capture

    def write(self, text: str) -> int:
        """Pass text on, and keep its lines; keep the final text of a line that is overwritten (`\\r`)."""
        written: int = self._behind.write(text)
        with self._news:
            *ended, self._open = (self._open + text).split("\n")
            self._open = self._open[-MAX_LINE_LENGTH:]
            for line in ended:
                self._add(line.rstrip("\r").rpartition("\r")[2])
            if ended:
                self._news.notify_all()
        return written

    def _add(self, line: str) -> None:
        if line.startswith(_RAY_MARKERS):
            return
        now_s = self._clock()
        self._allowed = min(self._allowed + (now_s - self._allowed_s) * _LINES_PER_S, float(BURST_LINES))
        self._allowed_s = now_s
        if self._allowed < 1.0:
            self._left_out += 1
            return
        self._allowed -= 1.0
        self._tell_left_out()
        self._lines.append(line)

    def _tell_left_out(self) -> None:
        if self._left_out:
            self._lines.append(f"... {self._left_out:,} lines are left out here; Ray's log of this process has them")
            self._left_out = 0

    def add(self, media: MediaLogged) -> None:
        """Keep an image or a text, too, and wait until the driver has it, as this process may end.

        Training goes on without a driver. Where too many wait for one, this image is left out.
        """
        with self._news:
            if self._media_bytes + len(media.image) > _MAX_MEDIA_BYTES:
                self._lines.append(f"... an image of step {media.step}, {media.name!r}, is left out: too many wait")
                return
            self._media_bytes += len(media.image)
            self._lines.append(media)
            self._added = number = self._added + 1
            self._news.notify_all()
            if not self._driver_away:
                self._driver_away = not self._news.wait_for(lambda: self._received >= number, _RECEIPT_S)

    def take(self, timeout_s: float, flush: tuple[int, int] = (0, 1)) -> list[str | MediaLogged]:
        """Return lines, images and texts since the last call; lines are printable and without secrets.

        Args:
            timeout_s: wait that long for the first item, or until a later flush comes; 0 for a flush, which is the
                last call of a verb.
            flush: the driver's token, and its number of flushes so far. Calls arrive in any order: a call that a flush
                overtook does not wait, since the driver waits for its answer.
        """
        with self._news:
            self._received, self._driver_away = self._sent, False  # the driver calls again only with the last answer
            self._news.notify_all()
            if not timeout_s:
                self._tell_left_out()
                self._flushed = max(self._flushed, flush)
            elif not self._news.wait_for(lambda: self._lines or self._flushed > flush, timeout_s):
                return []
            if timeout_s and self._flushed > flush:
                return []  # the flush has taken the items
            items, self._lines, self._media_bytes = self._lines, deque(maxlen=MAX_LINES), 0
            self._sent = self._added
        return [
            escape_control_characters(redact(item[:MAX_LINE_LENGTH])) if isinstance(item, str) else item
            for item in items
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)
