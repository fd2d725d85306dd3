"""Two drivers on one run: who is dead, who lives, who is fenced. In a folder, in memory and on a real S3 server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.finished_runs import log_entries
from tests.support.processes import wait_for
from tests.support.run_logs import FAR, JOB, KINDS, RUN, Clock, log_of, memory_store, ref, store_of
from trainwright.core.errors import FencedError, OwnedError, StorageError
from trainwright.storage import run_log
from trainwright.storage.object_store import Store
from trainwright.storage.run_log import LEASE_S, Heartbeat, LogEntry, Owner, RunLog, heartbeat_path, provably_dead


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return store_of(request.param, request, tmp_path)


@pytest.fixture
def memory() -> Store:
    return memory_store()


def test_a_dead_process_is_taken_over_at_once(store: Store) -> None:
    program = "from trainwright.storage.run_log import Owner; import json, dataclasses; " \
        "print(json.dumps(dataclasses.asdict(Owner.here())), flush=True); input()"  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    owner = Owner(**json.loads(process.stdout.readline()))
    first = RunLog(store, RUN).acquire(owner, JOB)
    assert owner.pid == process.pid and not provably_dead(owner)

    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, but as a zombie that nobody buried yet
    clock = Clock()
    second = RunLog(store, RUN, clock=clock, sleep=clock.sleep).acquire(Owner.here(), JOB)
    assert clock.now_s == 0.0 and second.token == 2
    process.communicate()
    assert provably_dead(owner)
    with pytest.raises(FencedError, match=r"taken over by process \d+ on"):
        RunLog(store, RUN).commit(first.token, ref(10, 1), 3)


@pytest.mark.parametrize(
    "change",
    [{"boot": "other"}, {"namespace": "other"}, {"boot": ""}, {"namespace": ""}, {"pid": 0}, {"started": 0}],
)
def test_what_cannot_be_known_is_no_proof(change: dict[str, object]) -> None:
    gone = replace(Owner.here(), started=1)
    assert provably_dead(gone)
    assert not provably_dead(replace(gone, **change))
    assert not provably_dead(Owner.here())


HIDDEN = """
import os, sys
from trainwright.storage.run_log import Owner, provably_dead
living = Owner.parent()
gone = Owner(boot=living.boot, namespace=living.namespace, pid=int(sys.argv[1]), started=1)
os.setgroups([]), os.setgid(65534), os.setuid(65534)
assert not os.path.exists(f"/proc/{living.pid}/stat"), "hidepid does nothing here"
print(provably_dead(living), provably_dead(gone))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts /proc anew, which only root may")
def test_an_owner_that_proc_hides_is_not_provably_dead() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    command = 'mount -t proc -o hidepid=2 proc /proc && "$@"; exit $?'
    answer = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, "sh", sys.executable, "-c", HIDDEN, str(gone.pid)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert answer.stdout.split() == ["False", "True"], answer.stderr


def test_a_process_that_may_not_be_asked_may_live(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(Owner.here(), pid=2**22 + 1)
    assert provably_dead(other)

    def refuse(pid: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert not provably_dead(other)


def test_without_proc_nothing_is_provable(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr("os.readlink", missing)
    owner = Owner.here()
    assert (owner.boot, owner.namespace, owner.started) == ("", "", 0) and owner.pid and owner.host
    assert not provably_dead(owner)


def test_a_living_owner_is_never_taken_over(store: Store) -> None:
    first = log_of(store).acquire(FAR, JOB)
    heart = Heartbeat(store, RUN, first.token)
    heart.beat()
    clock = Clock(heart.beat)
    with pytest.raises(OwnedError, match=r"process 7 on far, since \d{4}-\d\d-\d\d") as caught:
        log_of(store, clock).acquire(Owner.here(), JOB, patience_s=10)
    assert clock.now_s < 10 and "name=" in caught.value.remedy
    assert log_of(store).head() == first


def test_a_run_with_a_living_driver_here_is_refused_before_anything_starts(memory: Store) -> None:
    first = log_of(memory).acquire(Owner.here(), JOB)
    heart = Heartbeat(memory, RUN, first.token)
    heart.beat()
    clock = Clock(heart.beat)
    with pytest.raises(OwnedError, match=f"process {os.getpid()} on "):
        log_of(memory, clock).refuse_running()
    assert clock.now_s < 2


@pytest.mark.parametrize("owner", [FAR, Owner.here(), None], ids=["on another machine", "frozen here", "released"])
def test_a_run_that_may_be_taken_over_is_not_refused_beforehand(memory: Store, owner: Owner | None) -> None:
    log = log_of(memory)
    log.refuse_running()  # there is none
    first = log.acquire(owner or Owner.here(), JOB)
    if owner is None:
        log.release(first.token, "stopped")
    clock = Clock()
    log_of(memory, clock).refuse_running()
    assert clock.now_s == (2.5 if owner not in (FAR, None) else 0)


def test_an_owner_that_beats_slowly_is_never_taken_over(memory: Store) -> None:
    first = log_of(memory).acquire(FAR, JOB)
    heart = Heartbeat(memory, RUN, first.token)
    beats: Iterator[bool] = iter([False] * 19 + [True])
    clock = Clock(lambda: heart.beat() if next(beats) else None)
    with pytest.raises(OwnedError):
        log_of(memory, clock).acquire(Owner.here(), JOB, patience_s=10)
    assert clock.now_s == 10


@pytest.mark.parametrize("beats", [0, 3])
def test_a_silent_owner_is_taken_over_after_patience(store: Store, beats: int) -> None:
    log = log_of(store)
    first = log.acquire(FAR, JOB)
    log.commit(first.token, ref(10, 1), 3)
    for _ in range(beats):
        store.put(heartbeat_path(RUN, first.token), b"3")
    clock = Clock()
    second = log_of(store, clock).acquire(Owner.here(), JOB, patience_s=10)
    assert clock.now_s >= 10 and second.number == second.token == 3
    assert second.checkpoints == (ref(10, 1),)
    for attempt in (lambda: log.commit(first.token, ref(20, 1), 3), lambda: log.release(first.token, "done")):
        with pytest.raises(FencedError):
            attempt()
    assert log.head() == second


def test_an_owner_that_commits_without_a_heartbeat_lives(memory: Store) -> None:
    log = log_of(memory)
    token = log.acquire(FAR, JOB).token
    steps = iter(range(1, 1000))
    clock = Clock(lambda: log.commit(token, ref(next(steps), token), 1))
    with pytest.raises(OwnedError):
        log_of(memory, clock).acquire(Owner.here(), JOB, patience_s=2)
    log.commit(token, ref(1000, token), 1)


def test_a_release_ends_the_wait(memory: Store) -> None:
    log = log_of(memory)
    first = log.acquire(FAR, JOB)
    clock = Clock(lambda: log.release(first.token, "stopped"))
    assert log_of(memory, clock).acquire(Owner.here(), JOB, patience_s=2).token == 3


def test_of_many_that_acquire_at_once_one_wins(store: Store) -> None:
    log_of(store).acquire(replace(FAR, pid=1), JOB)
    barrier = threading.Barrier(8)

    def race(pid: int) -> LogEntry | None:
        log = RunLog(store, RUN, dead=lambda owner: owner.pid == 1)
        barrier.wait(10)
        try:
            entry = log.acquire(replace(FAR, pid=pid), JOB, patience_s=10.0)  # ends with the first heartbeat
        except OwnedError:
            return None
        heart = Heartbeat(store, RUN, entry.token, every_s=0.05)
        heart.start()
        hearts.append(heart)
        return entry

    hearts: list[Heartbeat] = []
    with ThreadPoolExecutor(8) as pool:
        won = [entry for entry in pool.map(race, range(2, 10)) if entry is not None]
    for heart in hearts:
        heart.stop()
    assert [entry.token for entry in won] == [2]
    assert [entry.kind for entry in log_entries(store, RUN)] == ["acquire", "acquire"]


# --- the heartbeat ----------------------------------------------------------------------------------------------------


def test_a_heartbeat_counts_until_it_is_stopped(memory: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = threading.Event()
    put = Store.put

    def watch(self: Store, path: str, data: bytes, **more: bool) -> None:
        put(self, path, data, **more)
        if json.loads(data)["count"] == 3:
            counted.set()

    monkeypatch.setattr(Store, "put", watch)
    heart = Heartbeat(memory, RUN, 4, every_s=0.01)
    heart.stop()
    heart = Heartbeat(memory, RUN, 4, every_s=0.01)
    heart.start()
    assert counted.wait(10) and heart.error is None
    heart.stop()
    last = memory.get(f"{RUN}/owner/4.json")
    assert json.loads(last)["count"] >= 3
    assert "trainwright-heartbeat" not in [thread.name for thread in threading.enumerate()]


def test_a_heartbeat_remembers_its_error_and_goes_on(memory: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, mended = threading.Event(), threading.Event()
    put, broken = Store.put, [True]
    heart = Heartbeat(memory, RUN, 1, every_s=0.01)

    def flaky(self: Store, path: str, data: bytes, **more: bool) -> None:
        if heart.error is not None:
            failed.set()
        if broken[0]:
            raise StorageError("no space left")
        put(self, path, data, **more)
        mended.set()

    monkeypatch.setattr(Store, "put", flaky)
    heart.start()
    assert failed.wait(10) and "no space left" in str(heart.error)
    broken[0] = False
    assert mended.wait(10)
    heart.stop()
    assert heart.error is None


# --- the lease --------------------------------------------------------------------------------------------------------


@pytest.fixture
def beating(memory: Store) -> Iterator[tuple[RunLog, Heartbeat, Clock]]:
    """An owner whose clock stands still, so that every moment is one right after a heartbeat, until it is moved."""
    log, clock = log_of(memory), Clock()
    token = log.acquire(FAR, JOB).token
    heart = Heartbeat(
        memory, RUN, token, every_s=0.01, confirm=lambda: log_of(memory).confirm(token), clock=lambda: clock.now_s
    )
    heart.start()
    yield log, heart, clock
    heart.stop()


def test_an_owner_whose_heartbeats_arrive_is_sure_of_its_run(beating: tuple[RunLog, Heartbeat, Clock]) -> None:
    _, heart, clock = beating
    for _ in range(3):
        assert heart.assure()
        clock.now_s += LEASE_S


def test_after_a_stall_the_log_is_asked_before_anything_else(
    memory: Store, beating: tuple[RunLog, Heartbeat, Clock]
) -> None:
    _, heart, clock = beating
    log_of(memory, dead=lambda owner: True).acquire(Owner.here(), JOB)
    assert heart.assure()  # it cannot know yet, and nobody takes over from one who was heard of just now
    clock.now_s += 100
    with pytest.raises(FencedError, match="taken over"):
        heart.assure()
    with pytest.raises(FencedError, match="taken over"):
        heart.assure()


def test_while_the_store_is_away_nothing_is_known_and_nobody_waits(
    memory: Store, beating: tuple[RunLog, Heartbeat, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, heart, clock = beating

    def fail(*_: object, **__: object) -> None:
        raise StorageError("away")

    monkeypatch.setattr(Store, "put", fail)
    wait_for(lambda: heart.error is not None)
    assert heart.assure()
    clock.now_s += LEASE_S
    assert not heart.assure()
    monkeypatch.undo()
    wait_for(lambda: heart.error is None)
    assert heart.assure()


def test_a_store_that_hangs_is_waited_for_once_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network folder that is mounted hard gives no error: a driver must not stand still at each event."""
    monkeypatch.setattr(run_log, "CONFIRM_S", 0.2)
    store, clock, notes, answers = memory_store(), Clock(), list[str](), threading.Event()
    monkeypatch.setattr(Store, "put", lambda *_, **__: answers.wait(30))
    heart = Heartbeat(store, RUN, 1, every_s=0.01, note=notes.append, clock=lambda: clock.now_s)
    heart.start()
    clock.now_s += LEASE_S
    begun_s = time.monotonic()
    assert not any(heart.assure() for _ in range(20)) and time.monotonic() - begun_s < 2.0
    (told,) = notes
    assert "a heartbeat has not been answered for 5.0 s: the store hangs" in told
    answers.set()
    wait_for(lambda: len(notes) == 2)
    assert "the store answers again" in notes[1] and heart.assure()
    heart.stop()


def test_a_heartbeat_outlives_an_error_that_nobody_expected(memory: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put, notes = Store.put, []

    def break_once(self: Store, path: str, data: bytes, **more: bool) -> None:
        if not notes:
            raise ZeroDivisionError("a bug")
        put(self, path, data, **more)

    monkeypatch.setattr(Store, "put", break_once)
    heart = Heartbeat(memory, RUN, 1, every_s=0.01, note=notes.append)
    heart.start()
    wait_for(lambda: len(notes) == 2)
    heart.stop()
    assert "ZeroDivisionError: a bug" in notes[0] and "the store answers again" in notes[1] and heart.error is None
