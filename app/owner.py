"""Who owns a run: facts by which another driver can prove a death, and the heartbeat by which it sees life."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from trainwright import words
from trainwright.core.errors import StorageError
from trainwright.store import Store

HEARTBEAT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Facts about a driver's process. Empty or 0 where the platform does not tell.

    Attributes:
        host: name of the machine, for people.
        boot: id of the machine's boot.
        namespace: of process ids; the same number means another process in another one.
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
        """This process."""
        return cls._of(os.getpid(), ray_job)

    @classmethod
    def parent(cls) -> Owner:
        """The process that started this one."""
        return cls._of(os.getppid(), "")

    @classmethod
    def _of(cls, pid: int, ray_job: str) -> Owner:
        return cls(
            host=socket.gethostname(),
            boot=_boot(),
            namespace=_namespace(),
            pid=pid,
            started=started_ticks(pid) or 0,
            ray_job=ray_job,
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host or 'an unknown host'}"


def provably_dead(owner: Owner) -> bool:
    """Whether that process is surely gone: same boot, same namespace, and no such process of that start time.

    False means that nothing is known; then its heartbeat tells.
    """
    if not (owner.boot and owner.namespace and owner.pid and owner.started):
        return False
    if (owner.boot, owner.namespace) != (_boot(), _namespace()):
        return False
    return started_ticks(owner.pid) != owner.started


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


def started_ticks(pid: int) -> int | None:
    """Start time of a living process; None when there is none, or only its unburied rest (a zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return None if fields[0] in ("Z", "X") else int(fields[19])


def heartbeat_path(run: str, token: int) -> str:
    """Where the owner with this token counts."""
    return f"{run}/owner/{token}.json"


class Heartbeat:
    """Overwrites a counter in storage every second, so that others see that its owner lives.

    A beat that fails is not the end of a run: it is kept in `error`, and the next one tries again. Others take the run
    over when they have seen no change for their patience, and then the next commit raises FencedError. The heart is
    also the first to notice that the store is gone, and that it is back: it says so once each.

    Args:
        note: takes a line for the user; from the heart's thread.
        clock: seconds, from any origin.

    Attributes:
        error: why the last beat failed; None when it did not.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        token: int,
        *,
        every_s: float = HEARTBEAT_S,
        note: Callable[[str], object] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.error: StorageError | None = None
        self._store, self._path, self._every_s = store, heartbeat_path(run, token), every_s
        self._note, self._clock = note, clock
        self._count = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="trainwright-heartbeat", daemon=True)

    def start(self) -> None:
        """Beat now and from now on."""
        self._thread.start()

    def stop(self, *, patience_s: float = 5.0) -> None:
        """Beat no more; waits up to `patience_s` for a beat that is under way. Safe to call twice or before `start`."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(patience_s)

    def beat(self) -> None:
        """Count on, once. Raises StorageError."""
        self._count += 1
        self._store.put(self._path, json.dumps({"count": self._count}).encode(), sync=False)

    def _beat_on(self) -> None:
        down_s = 0.0
        while not self._stopped.is_set():
            began_s = self._clock()
            try:
                self.beat()
            except StorageError as error:
                before, self.error = self.error, error
                if before is None:
                    down_s = began_s
                    self._say_down(error, began_s)
            else:
                before, self.error = self.error, None
                if before is not None:
                    self._say_back(down_s)
            self._stopped.wait(self._every_s)

    def _say_down(self, error: StorageError, since_s: float) -> None:
        since = datetime.now().astimezone() - timedelta(seconds=self._clock() - since_s)
        cause = error.what.removeprefix("cannot write: ")
        self._note(
            f"since {since:%H:%M:%S} the store takes nothing from the driver: {cause}. Training goes on from memory; "
            "checkpoints that fall due are tried, and events are kept, until it is back"
        )

    def _say_back(self, since_s: float) -> None:
        self._note(f"the store is back, after {words.duration(self._clock() - since_s)}; checkpoints are written again")
