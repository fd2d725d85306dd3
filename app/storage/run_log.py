"""The run log: numbered entries, each written by a create-only put, so that only one driver can continue a run.

    <run>/log/00000017.json     acquire | commit | release; each has the complete small state, none is ever deleted
    <run>/log/HINT              a number near the end, where listing starts; may be stale, torn or missing
    <run>/owner/<token>.json    the owner's heartbeat counter
    <run>/owner/<token>-stop    a request to stop, which the owner reads with each heartbeat

The fencing token of a driver is the number of its acquire entry. A driver that finds the number of its next entry taken
reads that entry: a higher token means that another driver has the run, and this one must stop.

A power cut may leave the newest entry empty or torn. All readers skip such a number: its writer never got an
acknowledgement, and the next entry takes the next number.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

from trainwright.core import formatting
from trainwright.core.engine import CheckpointRef
from trainwright.core.errors import FencedError, OwnedError, RunConflict, StorageError
from trainwright.storage.object_store import Store
from trainwright.storage.store_errors import MissingFile

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # also counts while the machine is suspended
_HEARTBEAT_S = 1.0
LEASE_S = 5.0  # after a heartbeat the run is not taken over for at least this long: others wait for 10 s
CONFIRM_S = 15.0  # a heartbeat under way and one more


def boottime_s() -> float:
    """Return seconds from any origin, which also count while the process or the machine is stopped."""
    return time.clock_gettime(_CLOCK)


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Facts about a driver's process. Empty or 0 where the platform does not provide them."""

    host: str = ""
    boot: str = ""
    namespace: str = ""  # namespace of process ids; in another one the same id means another process
    pid: int = 0
    started: int = 0  # when the process started, in the kernel's clock ticks since boot

    @classmethod
    def here(cls) -> Owner:
        """Return the facts of this process."""
        return cls._of(os.getpid())

    @classmethod
    def parent(cls) -> Owner:
        """Return the facts of the process that started this one."""
        return cls._of(os.getppid())

    @classmethod
    def _of(cls, pid: int) -> Owner:
        started = process_start_ticks(pid) or 0
        return cls(host=socket.gethostname(), boot=_boot(), namespace=_namespace(), pid=pid, started=started)

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


def stop_request_path(run: str, token: int) -> str:
    """Return the path of a request to the owner with this token: `now`, or anything else for after a checkpoint."""
    return f"{run}/owner/{token}-stop"


class Heartbeat:
    """Overwrites a counter in storage every second, so that other drivers see that the owner is alive.

    It reads requests to stop too.

    A failed heartbeat does not end the run: the error is kept in `error`, and the next heartbeat tries again. Other
    drivers take the run over when the counter does not change for some time. The heartbeat also notices first that the
    store cannot be reached, and that it can be reached again: it reports each once.

    Args:
        note: takes a line for the user; called from the heartbeat's thread.
        confirm: raises FencedError where the log names another owner. Called before a heartbeat that is so late that
            another driver may have taken the run over.
        on_stop: called when a stop is requested, with whether at once; from the heartbeat's thread.
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
        every_s: float = _HEARTBEAT_S,
        note: Callable[[str], object] = lambda text: None,
        confirm: Callable[[], object] = lambda: None,
        on_stop: Callable[[bool], object] = lambda now: None,
        clock: Callable[[], float] = boottime_s,
    ) -> None:
        self.error: StorageError | None = None
        self._store, self._path, self._every_s = store, heartbeat_path(run, token), every_s
        self._note, self._confirm, self._on_stop, self._clock = note, confirm, on_stop, clock
        self._request_path, self._request, self._unread = stop_request_path(run, token), b"", 0
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
            began_s, previous_error = self._clock(), self.error
            error = self._try(began_s)
            with self._turn:
                hung, self._hung_behind_s = self._hung_behind_s == self._tried_s, None
                self.error, self._tried_s = error, began_s
                self._beaten_s = began_s if error is None else self._beaten_s
                self._turn.notify_all()
                if self._fenced is not None:
                    return
            if error is not None and previous_error is None:
                down_s = began_s
                self._say_down(error, began_s)
            elif error is None and (previous_error is not None or hung):
                self._say_back(began_s if previous_error is None else down_s)
            self._stopped.wait(self._every_s)

    def _try(self, now_s: float) -> StorageError | None:
        try:
            if now_s - self._beaten_s >= LEASE_S:
                self._confirm()
            self.beat()
            self._read_request()
        except FencedError as error:
            self._fenced = error
        except StorageError as error:
            return error
        except Exception as error:  # without this thread another driver would take over a healthy run
            return StorageError(f"cannot write: {type(error).__name__}: {error}", detail=traceback.format_exc())
        return None

    def _read_request(self) -> None:
        try:
            request = self._store.find(self._request_path) or b""
        except StorageError as error:
            self._unread += 1
            if self._unread == 2:  # where the store went away in between, the next heartbeat reports it instead
                self._note(f"requests to stop cannot be read: {error.what.removeprefix('cannot read: ')}")
            return
        self._unread = 0
        if request != self._request:
            self._on_stop(request == b"now")
            self._request = request

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


# --- The log ----------------------------------------------------------------------------------------------------------


_TAKEOVER_WAIT_S = 10.0
_POLL_S = 0.5
_FORMAT = 1
_NUMBER = re.compile(r"\d{8}")

_EntryKind = Literal["acquire", "commit", "release"]
Outcome = Literal["", "done", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """One entry. It contains the complete state of the run after it."""

    number: int  # from 1, without gaps
    kind: _EntryKind
    token: int  # number of the acquire entry of the driver that wrote this entry
    time_s: float  # seconds since the epoch on that driver's clock; only for messages
    job: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: tuple[CheckpointRef, ...] = ()  # the retained ones, each the parent of the next, newest last
    outcome: Outcome = ""  # of the last release; empty while a driver owns the run
    owner: Owner = field(default_factory=Owner)
    nonce: str = ""  # a random number by which a writer recognizes its own entry

    @property
    def owned(self) -> bool:
        """Whether a driver owns the run, alive or not."""
        return self.kind != "release"

    def to_json(self) -> bytes:
        """Return the entry as it is stored."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode()

    @classmethod
    def of(cls, fields: Any) -> LogEntry:
        """Parse an entry. Raises ValueError, TypeError, KeyError or AttributeError for anything else."""
        if fields.pop("format") != _FORMAT:
            raise ValueError("another format version")
        fields["checkpoints"] = tuple(CheckpointRef(**item) for item in fields["checkpoints"])
        fields["owner"] = Owner(**{name: fields["owner"][name] for name in Owner.__dataclass_fields__})
        entry = cls(**fields)
        if entry.kind not in ("acquire", "commit", "release") or not 0 < entry.token <= entry.number:
            raise ValueError("inconsistent")
        return entry


class RunLog:
    """The log of one run. Not thread-safe.

    Attributes:
        torn: numbers after the newest entry whose files are torn.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.time,
        dead: Callable[[Owner], bool] = provably_dead,
    ) -> None:
        self._store, self._run = store, run
        self._clock, self._sleep, self._now, self._dead = clock, sleep, now, dead
        self._last: LogEntry | None = None
        self.torn: tuple[int, ...] = ()
        self._top = 0  # the highest number seen, torn entries included

    # --- reading ------------------------------------------------------------------------------------------

    def head(self) -> LogEntry | None:
        """Return the newest entry; None for a run that has none.

        Raises:
            RunConflict: the folder of that name has files, but no run log.
            StorageError: the store cannot be read, or an entry was altered.
        """
        numbers = self._numbers(self._hint()) or self._numbers(0)
        if not numbers:
            stranger = next(self._store.list(self._run), None)
            if stranger is None:
                return None
            numbers = self._numbers(0)  # a driver started just now and wrote its log first
            if not numbers:
                raise self._no_run(stranger[0])
        return self._newest(numbers) or self._newest(self._numbers(0))

    def confirm(self, token: int) -> None:
        """Check that no other driver has taken the run over. Raises FencedError, StorageError."""
        head = self.head()
        if head is not None:
            self._refuse_if_fenced(head, token)

    def _newest(self, numbers: Sequence[int]) -> LogEntry | None:
        """Return the newest of these entries that is not torn."""
        self._top = max(self._top, *numbers)
        torn: list[int] = []
        for number in reversed(numbers):
            entry = self._read(number)
            if entry is not None:
                self.torn = tuple(torn)
                return entry
            torn.append(number)
        return None

    def _hint(self) -> int:
        hint = self._store.find(f"{self._run}/log/HINT") or b""
        return int(hint) if re.fullmatch(rb"\d{1,8}", hint) else 0

    def _numbers(self, start: int) -> list[int]:
        """Return the numbers of the entries from `start` on."""
        previous_path = self._path(start - 1) if start > 1 else None
        names = (path.rpartition("/")[2] for path, _ in self._store.list(f"{self._run}/log", previous_path))
        stems = (name.removesuffix(".json") for name in names if name.endswith(".json"))
        return [int(stem) for stem in stems if _NUMBER.fullmatch(stem)]

    def _no_run(self, file: str) -> RunConflict:
        return RunConflict(
            f"the folder of run {self._run!r} has files, such as {file}, but no run log: it is not a run",
            where=self._store.uri_of(self._run),
            remedy="give the job another name= or storage=, or move those files away",
        )

    def _read(self, number: int) -> LogEntry | None:
        """Read an entry; None for a torn one."""
        path = self._path(number)
        try:
            fields = json.loads(self._store.get(path))
        except ValueError:
            return None
        try:
            entry = LogEntry.of(fields)
            if entry.number != number:
                raise ValueError("another number")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StorageError(
                "an entry of the run log is not valid: it was altered, or another version of trainwright wrote it",
                where=self._store.uri_of(path),
                remedy="restore this file from a copy, or give the job another name=",
            ) from error
        return entry

    def _path(self, number: int) -> str:
        return f"{self._run}/log/{number:08d}.json"

    # --- writing ------------------------------------------------------------------------------------------

    def acquire(
        self, owner: Owner, job: Mapping[str, Any], *, patience_s: float = _TAKEOVER_WAIT_S, fresh: bool = False
    ) -> LogEntry:
        """Acquire the run. Every later write needs the token of the new entry.

        A provably dead driver is replaced at once, another one when its heartbeat did not change for `patience_s`.

        Args:
            fresh: start again from step 0, without the existing checkpoints.

        Raises:
            OwnedError: another driver has the run and is alive.
            RunConflict: the folder of that name has files, but no run log.
            StorageError: the store cannot be used.
        """
        watched: LogEntry | None = None
        while True:
            head = self.head()
            if head is not None and head.owned and not self._dead(head.owner):
                if watched is not None and watched.token == head.token:
                    raise self._owned(head)  # it wrote an entry while it was watched
                self._outwait(head, patience_s)
                watched = head
            number = self._top + 1
            checkpoints = () if fresh or head is None else head.checkpoints
            entry = self._entry(number, "acquire", number, job=job, checkpoints=checkpoints, owner=owner)
            if self._append(entry):
                return entry

    def commit(self, token: int, checkpoint: CheckpointRef, keep: int, hold: Collection[str] = ()) -> LogEntry:
        """Write an entry that names a checkpoint; from then on the checkpoint exists. Its folder must be complete.

        Checkpoints after this one's parent were skipped as damaged: the new entry does not name them.

        Args:
            keep: how many checkpoints the entry names, this one included; at least 1.
            hold: paths of older checkpoints that it names too.

        Raises:
            FencedError: another driver has the run; nothing was written.
            StorageError: the store cannot be used. The next entry shows whether this one was written.
        """
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1")

        def state(last: LogEntry) -> dict[str, Any]:
            chain = [*_up_to(last.checkpoints, checkpoint.parent), checkpoint]
            held_checkpoints = (item for item in chain[:-keep] if item.path in hold)
            return {"checkpoints": (*held_checkpoints, *chain[-keep:])}

        return self._write(token, "commit", state)

    def release(self, token: int, outcome: Outcome) -> LogEntry:
        """Release the run; a second call changes nothing. Raises the errors of `commit`."""
        return self._write(token, "release", lambda _: {"outcome": outcome})

    def _write(self, token: int, kind: _EntryKind, state: Callable[[LogEntry], dict[str, Any]]) -> LogEntry:
        """Append an entry of the owner `token` after the entries that exist by now."""
        newest = self._last or self.head()
        number = newest.number + 1 if newest else 0
        while newest is not None:
            if kind == newest.kind == "release" and newest.token == token:
                return newest
            self._refuse_if_fenced(newest, token)
            entry = self._entry(
                number,
                kind,
                token,
                **{"job": newest.job, "checkpoints": newest.checkpoints, "owner": newest.owner, **state(newest)},
            )
            if self._append(entry):
                return entry
            newest, number = self._read(number) or newest, number + 1
        raise ValueError(f"run {self._run!r} was never acquired")

    def _refuse_if_fenced(self, newest: LogEntry, token: int) -> None:
        if newest.token < token:
            raise ValueError(f"run {self._run!r} has no token {token}")
        if newest.token > token or not newest.owned:
            raise FencedError(
                f"run {self._run!r} was taken over by {newest.owner} at {formatting.timestamp(newest.time_s)}"
                if newest.token > token
                else f"run {self._run!r} was released already",
                where=self._store.uri_of(self._path(newest.number)),
                remedy="none needed: the other driver continues the run from its newest checkpoint",
            )

    def _entry(self, number: int, kind: _EntryKind, token: int, **state: Any) -> LogEntry:
        nonce = uuid.uuid4().hex
        return LogEntry(number=number, kind=kind, token=token, time_s=self._now(), nonce=nonce, **state)

    def _append(self, entry: LogEntry) -> bool:
        """Write an entry. Returns False when its number is taken."""
        if not self._store.create(self._path(entry.number), entry.to_json()):
            return False
        self._last = entry
        with contextlib.suppress(StorageError):  # without a new hint only finding the newest entry takes longer
            self._store.put(f"{self._run}/log/HINT", str(entry.number).encode(), sync=False)
        return True

    # --- takeover -----------------------------------------------------------------------------------------

    def refuse_running(self) -> None:
        """Refuse a run whose driver is alive on this machine, before anything is started for it.

        A driver that is frozen is left to `acquire`, and so is one on another machine. Raises OwnedError, StorageError,
        and RunConflict as `head`.
        """
        head = self.head()
        if head is not None and head.owned and not self._dead(head.owner) and _is_here(head.owner):
            self._outwait(head, 2.5 * _HEARTBEAT_S)

    def _outwait(self, head: LogEntry, patience_s: float) -> None:
        """Watch the owner's heartbeat for `patience_s` by this process's clock. Raises OwnedError when it changes."""
        path = heartbeat_path(self._run, head.token)
        counter = self._store.find(path)
        until_s = self._clock() + patience_s
        while self._clock() < until_s:
            self._sleep(min(_POLL_S, patience_s))
            if self._store.find(path) != counter:
                raise self._owned(head)

    def _owned(self, head: LogEntry) -> OwnedError:
        acquired = self._read(head.token) or head
        return OwnedError(
            f"run {self._run!r} is in use by {head.owner}, since {formatting.timestamp(acquired.time_s)}",
            where=self._store.uri_of(self._run),
            remedy=f"wait, or trainwright stop {self._run} --storage {self._store.uri_of('')}, or another name=",
        )


def _up_to(chain: tuple[CheckpointRef, ...], parent: str) -> tuple[CheckpointRef, ...]:
    """Return the part of the chain that ends with `parent`; empty where `parent` is not part of it."""
    paths = [item.path for item in chain]
    return chain[: paths.index(parent) + 1] if parent in paths else ()


# --- whether owners are alive -----------------------------------------------------------------------------------------


_HEARTBEAT_WATCH_S = 4 * _HEARTBEAT_S
_DEAD_S = 10.0  # without a heartbeat, as for a takeover
_STALE_HEARTBEAT_S = 3600.0  # no clock is that wrong: object stores refuse one that is a quarter of an hour off
_HEARTBEAT_READERS = 32
WaitFunction = Callable[[float], Any]


def owner_alive(
    store: Store,
    run: str,
    head: LogEntry | None,
    *,
    careful: bool = False,
    wait: WaitFunction | None = None,
) -> bool:
    """Return whether the run's owner is alive; see `owners_alive`."""
    heads = {} if head is None else {run: head}
    return run in owners_alive(store, heads, careful=careful, wait=wait)


def owners_alive(
    store: Store,
    heads: Mapping[str, LogEntry],
    *,
    careful: bool = False,
    wait: WaitFunction | None = None,
) -> set[str]:
    """Return the runs whose owner is alive.

    A driver of this machine is looked up by its process. For drivers elsewhere the heartbeat counters of all runs are
    watched together: clocks of other machines are not trusted. Only a counter last written more than an hour ago counts
    as dead at once.

    Args:
        careful: watch for as long as a driver that takes over, and trust no clock at all.
        wait: waits for some seconds.
    """
    owned = {run: head for run, head in heads.items() if head.owned and not provably_dead(head.owner)}
    alive = {run for run, head in owned.items() if _is_here(head.owner)}
    paths = {run: heartbeat_path(run, head.token) for run, head in owned.items() if run not in alive}
    return alive | _runs_with_heartbeat(store, paths, careful, wait or threading.Event().wait) if paths else alive


def _is_here(owner: Owner) -> bool:
    """Return whether an owner that is not provably dead is a process of this machine, and so alive."""
    this_process = Owner.here()
    complete = bool(owner.boot and owner.namespace and owner.pid and owner.started)
    return complete and (owner.boot, owner.namespace) == (this_process.boot, this_process.namespace)


def _runs_with_heartbeat(store: Store, paths: Mapping[str, str], careful: bool, pause: WaitFunction) -> set[str]:
    """Return the runs whose heartbeat counters, at these paths, change."""
    alive: set[str] = set()
    patience_s = _DEAD_S if careful else _HEARTBEAT_WATCH_S
    with ThreadPoolExecutor(min(_HEARTBEAT_READERS, len(paths))) as pool:
        first_counters = dict(zip(paths, pool.map(store.find, paths.values()), strict=True))
        ages = zip(paths, pool.map(partial(_is_old, store), paths.values()), strict=True)
        watched, waited_s = [run for run, old in ages if careful or not old], 0.0
        while waited_s < patience_s and (silent := [run for run in watched if run not in alive]):
            pause(_HEARTBEAT_S / 2)
            waited_s += _HEARTBEAT_S / 2
            counters = zip(silent, pool.map(store.find, [paths[run] for run in silent]), strict=True)
            alive |= {run for run, counter in counters if counter != first_counters[run]}
    return alive


def _is_old(store: Store, path: str) -> bool:
    """Return whether a counter was last written long ago; False where there is none: its owner may just start."""
    try:
        return time.time() - store.modified_s(path) > _STALE_HEARTBEAT_S
    except MissingFile:
        return False
