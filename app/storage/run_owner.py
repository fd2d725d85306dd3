"""The owner of a run: facts that prove that its driver is dead, and the heartbeat that shows that it is alive."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from trainwright.core import formatting
from trainwright.core.errors import FencedError, StorageError
from trainwright.storage.object_store import Store

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # also counts while the machine is suspended
HEARTBEAT_S = 1.0
LEASE_S = 5.0  # after a heartbeat the run is not taken over for at least this long: others wait for 10 s
CONFIRM_S = 15.0  # a heartbeat under way and one more


def boottime_s() -> float:
    """Return seconds from any origin, which also count while the process or the machine is stopped."""
    return time.clock_gettime(_CLOCK)


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Facts about a driver's process. Empty or 0 where the platform does not provide them.

    Attributes:
        host: name of the machine, for messages.
        boot: id of the machine's boot.
        namespace: namespace of process ids; in another one the same id means another process.
        pid: process id.
        started: when the process started, in the kernel's clock ticks since boot.
        ray_job: Ray's id of the job; empty outside of one.
    """

    host: str = ""
    boot: str = ""
    namespace: str = ""
    pid: int = 0
    started: int = 0
    ray_job: str = ""

    @classmethod
    def here(cls, *, ray_job: str = "") -> Owner:
        """Return the facts of this process."""
        return cls._of(os.getpid(), ray_job)

    @classmethod
    def parent(cls) -> Owner:
        """Return the facts of the process that started this one."""
        return cls._of(os.getppid(), "")

    @classmethod
    def _of(cls, pid: int, ray_job: str) -> Owner:
        return cls(
            host=socket.gethostname(),
            boot=_boot(),
            namespace=_namespace(),
            pid=pid,
            started=process_start_ticks(pid) or 0,
            ray_job=ray_job,
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host or 'an unknown host'}"


def provably_dead(owner: Owner) -> bool:
    """Return whether the process certainly ended: same boot and namespace, but no process with its id and start time.

    False means that nothing is known; then the heartbeat decides.
    """
    if not (owner.boot and owner.namespace and owner.pid and owner.started):
        return False
    if (owner.boot, owner.namespace) != (_boot(), _namespace()):
        return False
    try:
        return _ticks(_stat(owner.pid)) != owner.started
    except OSError:
        return not _may_exist(owner.pid)


def _may_exist(pid: int) -> bool:
    """Return whether such a process may exist; with hidepid /proc hides the processes of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_start_ticks(pid: int) -> int | None:
    """Return the start time of a running process; None when there is none or it is a zombie."""
    try:
        return _ticks(_stat(pid))
    except OSError:
        return None


def _stat(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text()


def _ticks(stat: str) -> int | None:
    fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return None if fields[0] in ("Z", "X") else int(fields[19])


def heartbeat_path(run: str, token: int) -> str:
    """Return the path of the heartbeat counter of the owner with this token."""
    return f"{run}/owner/{token}.json"


class Heartbeat:
    """Overwrites a counter in storage every second, so that other drivers see that the owner is alive.

    A failed heartbeat does not end the run: the error is kept in `error`, and the next heartbeat tries again. Other
    drivers take the run over when the counter does not change for some time. The heartbeat also notices first that the
    store cannot be reached, and that it can be reached again: it reports each once.

    Args:
        note: takes a line for the user; called from the heartbeat's thread.
        confirm: raises FencedError where the log names another owner. Called before a heartbeat that is so late that
            another driver may have taken the run over.
        clock: returns seconds from any origin, which also count while the process or the machine is stopped.

    Attributes:
        error: why the last heartbeat failed; None when it succeeded.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        token: int,
        *,
        every_s: float = HEARTBEAT_S,
        note: Callable[[str], object] = lambda text: None,
        confirm: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = boottime_s,
    ) -> None:
        self.error: StorageError | None = None
        self._store, self._path, self._every_s = store, heartbeat_path(run, token), every_s
        self._note, self._confirm, self._clock = note, confirm, clock
        self._count = 0
        self._stopped = threading.Event()
        self._turn = threading.Condition()  # guards what follows
        self._beaten_s = self._tried_s = clock()  # start of the last stored heartbeat, and of the last attempt
        self._hung_behind_s: float | None = None  # `_tried_s` of a heartbeat whose successor did not come
        self._fenced: FencedError | None = None
        self._thread = threading.Thread(target=self._beat_on, name="trainwright-heartbeat", daemon=True)

    def start(self) -> None:
        """Send a heartbeat now, and then regularly."""
        self._thread.start()

    def stop(self, *, patience_s: float = 5.0) -> None:
        """Stop, and wait up to `patience_s` for a heartbeat under way. Safe to call twice or before `start`."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(patience_s)

    def beat(self) -> None:
        """Increase the counter once. Raises StorageError."""
        self._count += 1
        self._store.put(self._path, json.dumps({"count": self._count}).encode(), sync=False)

    def assure(self) -> bool:
        """Return whether this driver certainly still owns the run.

        Returns at once while heartbeats succeed. After a stall of this process it waits for the next heartbeat, which
        checks the log first. False means unknown: the store cannot be reached, or it hangs, which is reported once.

        Raises:
            FencedError: another driver has taken the run over.
        """
        now_s, hung = self._clock(), False
        with self._turn:
            late = now_s - self._beaten_s >= LEASE_S and self.error is None and self._thread.is_alive()
            if late and self._hung_behind_s != self._tried_s:
                answered = self._turn.wait_for(lambda: self._fenced or self._tried_s > now_s - LEASE_S, CONFIRM_S)
                hung = not answered and self.error is None
                self._hung_behind_s = self._tried_s if hung else None
            if self._fenced is not None:
                raise self._fenced
            sure = now_s - self._beaten_s < LEASE_S
        if hung:
            self._note(
                f"a heartbeat has not been answered for {formatting.duration(self._clock() - self._tried_s)}: the "
                "store hangs. Training continues in memory; no checkpoint is written before the store answers"
            )
        return sure

    def _beat_on(self) -> None:
        down_s = 0.0
        while not self._stopped.is_set():
            began_s, before = self._clock(), self.error
            error = self._try(began_s)
            with self._turn:
                hung, self._hung_behind_s = self._hung_behind_s == self._tried_s, None
                self.error, self._tried_s = error, began_s
                self._beaten_s = began_s if error is None else self._beaten_s
                self._turn.notify_all()
                if self._fenced is not None:
                    return
            if error is not None and before is None:
                down_s = began_s
                self._say_down(error, began_s)
            elif error is None and (before is not None or hung):
                self._say_back(began_s if before is None else down_s)
            self._stopped.wait(self._every_s)

    def _try(self, now_s: float) -> StorageError | None:
        try:
            if now_s - self._beaten_s >= LEASE_S:
                self._confirm()
            self.beat()
        except FencedError as error:
            self._fenced = error
        except StorageError as error:
            return error
        except Exception as error:  # without this thread another driver would take over a healthy run
            return StorageError(f"cannot write: {type(error).__name__}: {error}", detail=traceback.format_exc())
        return None

    def _say_down(self, error: StorageError, since_s: float) -> None:
        since = datetime.now().astimezone() - timedelta(seconds=self._clock() - since_s)
        cause = error.what.removeprefix("cannot write: ")
        self._note(
            f"since {since:%H:%M:%S} the driver cannot write to the store: {cause}. Training continues in memory; "
            "due checkpoints are tried and events are kept until the store answers"
        )

    def _say_back(self, since_s: float) -> None:
        down = formatting.duration(self._clock() - since_s)
        self._note(f"the store answers again, after {down}; checkpoints are written again")
