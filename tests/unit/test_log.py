"""The run's log: who wins, who is fenced, how the head is found. On a folder, in memory and on a real S3 server."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import obstore
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.exceptions import GenericError

from trainwright.checkpoints import checkpoint_path
from trainwright.core.checkpoint import CheckpointRef
from trainwright.core.errors import FencedError, OwnedError, RunConflict, StorageError
from trainwright.log import Entry, Heartbeat, Owner, RunLog, provably_dead
from trainwright.owner import heartbeat_path
from trainwright.store import Store, open_store

RUN = "digits"
JOB = {"model": "net", "batch_size": "256"}
FAR = Owner(host="far", boot="another", namespace="pid:[1]", pid=7, started=1)


@pytest.fixture(params=["folder", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        return open_store(request.getfixturevalue("s3_bucket").uri)
    return open_store(str(tmp_path) if request.param == "folder" else f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def memory() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


class Clock:
    """A clock that moves when somebody sleeps; `on_sleep` is called each time."""

    def __init__(self, on_sleep: Callable[[], None] = lambda: None) -> None:
        self.now_s, self.on_sleep = 0.0, on_sleep

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.on_sleep()


def log_of(store: Store, clock: Clock | None = None, *, dead: Callable[[Owner], bool] = lambda _: False) -> RunLog:
    clock = clock or Clock()
    return RunLog(store, RUN, clock=clock, sleep=clock.sleep, dead=dead)


def ref(step: int, token: int, parent: str = "") -> CheckpointRef:
    return CheckpointRef(step=step, path=checkpoint_path(step, token), manifest_sha256="0" * 64, parent=parent)


# --- one driver -------------------------------------------------------------------------------------------------------


def test_a_run_from_beginning_to_end(store: Store) -> None:
    log = log_of(store)
    assert log.head() is None and log.entries() == []
    first = log.acquire(Owner.here(ray_job="01"), JOB)
    assert (first.number, first.token, first.kind, first.job) == (1, 1, "acquire", JOB)
    assert first.owner.ray_job == "01" and first.owned

    refs: list[CheckpointRef] = []
    for step in (10, 20, 30, 40):
        refs.append(ref(step, 1, refs[-1].path if refs else ""))
        entry = log.commit(first.token, refs[-1], 3)
        assert entry.checkpoints == tuple(refs[-3:])
    last = log.release(first.token, "done")
    assert (last.number, last.kind, last.outcome, last.checkpoints) == (6, "release", "done", tuple(refs[-3:]))
    assert log.release(first.token, "done") == last

    other = log_of(store)
    assert other.head() == last and not last.owned
    assert [entry.number for entry in other.entries()] == [1, 2, 3, 4, 5, 6]
    assert [entry.kind for entry in other.entries()] == ["acquire", "commit", "commit", "commit", "commit", "release"]

    again = other.acquire(Owner.here(), {"model": "other"})
    assert (again.number, again.token, again.checkpoints, again.outcome) == (7, 7, tuple(refs[-3:]), "")
    with pytest.raises(FencedError):
        log.commit(first.token, ref(50, 1, refs[-1].path), 3)


def test_a_fresh_start_names_no_checkpoint_and_deletes_no_entry(store: Store) -> None:
    log = log_of(store)
    token = log.acquire(FAR, JOB).token
    log.commit(token, ref(10, token), 3)
    log.release(token, "stopped")
    fresh = log.acquire(FAR, JOB, fresh=True)
    assert fresh.checkpoints == () and fresh.number == 4
    assert log.commit(fresh.token, ref(5, fresh.token), 3).checkpoints == (ref(5, fresh.token),)
    assert len(log.entries()) == 5


def test_what_came_after_the_parent_is_named_no_longer(memory: Store) -> None:
    log = log_of(memory)
    token = log.acquire(FAR, JOB).token
    good, damaged = ref(10, token), ref(20, token, ref(10, token).path)
    log.commit(token, good, 3)
    log.commit(token, damaged, 3)
    new = ref(15, token, good.path)
    assert log.commit(token, new, 3).checkpoints == (good, new)
    restart = ref(5, token)
    assert log.commit(token, restart, 3).checkpoints == (restart,)


def test_misuse_is_refused(memory: Store) -> None:
    log = log_of(memory)
    with pytest.raises(ValueError, match="never acquired"):
        log.release(1, "done")
    token = log.acquire(FAR, JOB).token
    with pytest.raises(ValueError, match="no token"):
        log.commit(token + 1, ref(1, 2), 3)
    with pytest.raises(ValueError, match="keep=0"):
        log.commit(token, ref(1, 1), 0)
    log.release(token, "stopped")
    with pytest.raises(FencedError, match="released already"):
        log.commit(token, ref(1, 1), 3)
    assert [entry.kind for entry in log.entries()] == ["acquire", "release"]


@pytest.mark.parametrize("lands", [True, False])
def test_a_commit_whose_answer_was_lost_is_written_once(
    memory: Store, monkeypatch: pytest.MonkeyPatch, lands: bool
) -> None:
    log = log_of(memory)
    token = log.acquire(FAR, JOB).token
    put, left = obstore.put, [1]

    def fail(client: object, path: str, data: bytes, **more: object) -> object:
        if left[0] and path.endswith("00000002.json"):
            left[0] = 0
            if lands:
                put(client, path, data, **more)
            raise GenericError("kind: Timeout")
        return put(client, path, data, **more)

    monkeypatch.setattr(obstore, "put", fail)
    assert log.commit(token, ref(10, token), 3).number == 2
    assert [entry.number for entry in log.entries()] == [1, 2]


def test_a_commit_that_was_given_up_and_landed_is_read_on(memory: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(memory)
    token = log.acquire(FAR, JOB).token
    create = Store.create

    def give_up(self: Store, path: str, data: bytes) -> bool:
        create(self, path, data)
        raise StorageError("the store did not answer in time")

    monkeypatch.setattr(Store, "create", give_up)
    with pytest.raises(StorageError):
        log.commit(token, ref(10, token), 3)
    monkeypatch.setattr(Store, "create", create)
    second = ref(20, token, ref(10, token).path)
    entry = log.commit(token, second, 3)
    assert entry.number == 3 and entry.checkpoints == (ref(10, token), second)


# --- the head ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hint", [None, b"", b"1", b"3", b"5", b"6", b"99999999", b"00000000", b"\x00\xff", b"{torn"])
def test_the_head_is_found_with_any_hint(store: Store, hint: bytes | None) -> None:
    log = log_of(store)
    token = log.acquire(FAR, JOB).token
    for step in range(1, 5):
        last = log.commit(token, ref(step, token), 1)
    assert store.get(f"{RUN}/log/HINT") == b"5"
    if hint is None:
        store.delete([f"{RUN}/log/HINT"])
    else:
        store.put(f"{RUN}/log/HINT", hint)
    assert log_of(store).head() == last


def test_a_hint_that_cannot_be_written_is_no_failure(memory: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(memory)

    def fail(*_: object, **__: object) -> None:
        raise StorageError("no")

    monkeypatch.setattr(Store, "put", fail)
    entry = log.acquire(FAR, JOB)
    assert log.hint_error is not None and log_of(memory).head() == entry


def altered(data: bytes, **changes: object) -> bytes:
    return json.dumps({**json.loads(data), **changes}).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-20],
        lambda data: b"\xff\xfe\x00",
        lambda data: b"[]",
        lambda data: b"null",
        lambda data: altered(data, number=9),
        lambda data: altered(data, token=9),
        lambda data: altered(data, kind="other"),
        lambda data: altered(data, format=2),
        lambda data: altered(data, checkpoints=[{"step": 1}]),
        lambda data: altered(data, owner=None),
    ],
)
def test_an_altered_entry_is_named(memory: Store, damage: Callable[[bytes], bytes]) -> None:
    log_of(memory).acquire(FAR, JOB)
    path = f"{RUN}/log/00000001.json"
    memory.put(path, damage(memory.get(path)))
    for attempt in (log_of(memory).head, log_of(memory).entries, lambda: log_of(memory).acquire(FAR, JOB)):
        with pytest.raises(StorageError, match="altered") as caught:
            attempt()
        assert caught.value.where == memory.uri_of(path) and caught.value.remedy


def test_a_folder_of_something_else_is_no_run(store: Store) -> None:
    store.put(f"{RUN}/holiday.jpg", b"1")
    for attempt in (log_of(store).head, lambda: log_of(store).acquire(FAR, JOB)):
        with pytest.raises(RunConflict, match=r"holiday\.jpg"):
            attempt()
    assert list(store.list()) == [(f"{RUN}/holiday.jpg", 1)]


def test_a_run_that_begins_while_it_is_looked_for_is_found(memory: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    list_files, left = Store.list, [1]

    def begin_meanwhile(self: Store, prefix: str = "", after: str | None = None) -> Iterator[tuple[str, int]]:
        if prefix == RUN and left:
            left.clear()
            log_of(memory).acquire(FAR, JOB)
        return list_files(self, prefix, after)

    monkeypatch.setattr(Store, "list", begin_meanwhile)
    head = log_of(memory).head()
    assert head is not None and head.number == 1 and not left


# --- two drivers ------------------------------------------------------------------------------------------------------


def test_a_dead_process_is_taken_over_at_once(store: Store) -> None:
    program = "from trainwright.log import Owner; import json, dataclasses; " \
        "print(json.dumps(dataclasses.asdict(Owner.here())), flush=True); input()"  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    owner = Owner(**json.loads(process.stdout.readline()))
    first = RunLog(store, RUN).acquire(owner, JOB)
    assert owner.pid == process.pid and not provably_dead(owner)

    process.kill()
    process.stdout.read()  # until it has ended: from here on it is a zombie, nobody has waited for it
    clock = Clock()
    second = RunLog(store, RUN, clock=clock, sleep=clock.sleep).acquire(Owner.here(), JOB)
    assert clock.now_s == 0.0 and second.token == 2
    process.communicate(timeout=10)
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

    def race(pid: int) -> Entry | None:
        log = RunLog(store, RUN, dead=lambda owner: owner.pid == 1)
        barrier.wait(10)
        try:
            entry = log.acquire(replace(FAR, pid=pid), JOB, patience_s=1.0)
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
    assert [entry.kind for entry in log_of(store).entries()] == ["acquire", "acquire"]


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


# --- any interleaving -------------------------------------------------------------------------------------------------

Act = tuple[int, str]
DRIVERS = 4
acts = st.lists(
    st.tuples(st.integers(0, DRIVERS - 1), st.sampled_from(["acquire", "commit", "commit", "release", "hint"])),
    max_size=30,
)


class Model:
    """Drivers that act in any order on one log, and what must be true after each act.

    Every driver keeps its own view of the log, so that it acts on old knowledge whenever another one was faster.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.logs = [log_of(store, dead=lambda _: True) for _ in range(DRIVERS)]
        self.tokens = [0] * DRIVERS
        self.expected: list[tuple[str, int]] = []

    @property
    def holder(self) -> int:
        kind, token = self.expected[-1] if self.expected else ("release", 0)
        return 0 if kind == "release" else token

    def act(self, driver: int, name: str) -> None:
        log, token = self.logs[driver], self.tokens[driver]
        if name == "hint":
            if not self.expected:
                return
            self.store.put(f"{RUN}/log/HINT", b"%d" % (driver * 7))
        elif name == "acquire":
            self.tokens[driver] = log.acquire(replace(FAR, pid=driver + 1), JOB).token
            self.expected.append(("acquire", self.tokens[driver]))
        elif token:
            self._write(log, token, name)

    def _write(self, log: RunLog, token: int, name: str) -> None:
        again = name == "release" and self.expected[-1] == ("release", token)
        try:
            if name == "commit":
                log.commit(token, ref(len(self.expected), token), 2)
            else:
                log.release(token, "stopped")
        except FencedError:
            assert token != self.holder and not again
        else:
            assert token == self.holder or again
            self.expected += [] if again else [(name, token)]

    def check(self) -> None:
        entries = self.logs[0].entries()
        assert [(entry.kind, entry.token) for entry in entries] == self.expected
        assert [entry.number for entry in entries] == list(range(1, len(entries) + 1))
        assert log_of(self.store).head() == (entries[-1] if entries else None)


@settings(deadline=None, max_examples=60)
@given(acts)
def test_no_interleaving_lets_two_drivers_write_in_memory(plan: list[Act]) -> None:
    model = Model(open_store(f"memory://{uuid.uuid4().hex}"))
    for driver, name in plan:
        model.act(driver, name)
    model.check()


@settings(deadline=None, max_examples=15)
@given(acts)
def test_no_interleaving_lets_two_drivers_write_in_a_folder(plan: list[Act]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Model(open_store(folder))
        for driver, name in plan:
            model.act(driver, name)
        model.check()


def test_threads_that_take_over_and_commit_at_once_never_share_a_number(store: Store) -> None:
    """Real races: each thread acquires, commits until it is fenced, and keeps what it was told was written."""
    barrier = threading.Barrier(4)

    def drive(pid: int) -> list[Entry]:
        log, written = RunLog(store, RUN, dead=lambda _: True), []
        barrier.wait(10)
        for _ in range(3):
            written.append(log.acquire(replace(FAR, pid=pid), JOB))
            token = written[-1].token
            try:
                for step in range(4):
                    written.append(log.commit(token, ref(step, token), 2))
            except FencedError:
                continue
        return written

    with ThreadPoolExecutor(4) as pool:
        told = [entry for entries in pool.map(drive, range(1, 5)) for entry in entries]
    stored = log_of(store).entries()
    assert sorted(told, key=lambda entry: entry.number) == stored
    assert [entry.number for entry in stored] == list(range(1, len(stored) + 1))
    assert [entry.token for entry in stored] == sorted(entry.token for entry in stored)
