"""The run's log under one driver, and how its head is found. In a folder, in memory and on a real S3 server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import GenericError

from tests.support.finished_runs import log_entries
from tests.support.run_logs import FAR, JOB, KINDS, RUN, log_of, memory_store, ref, store_of
from trainwright.core.engine import CheckpointRef
from trainwright.core.errors import FencedError, RunConflict, StorageError
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_log import Owner


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return store_of(request.param, request, tmp_path)


@pytest.fixture
def memory() -> Store:
    return memory_store()


def test_a_run_from_beginning_to_end(store: Store) -> None:
    log = log_of(store)
    assert log.head() is None and log_entries(store, RUN) == []
    first = log.acquire(Owner.here(), JOB)
    assert (first.number, first.token, first.kind, first.job) == (1, 1, "acquire", JOB)
    assert first.owner == Owner.here() and first.owned

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
    entries = log_entries(store, RUN)
    assert [entry.number for entry in entries] == [1, 2, 3, 4, 5, 6]
    assert [entry.kind for entry in entries] == ["acquire", "commit", "commit", "commit", "commit", "release"]

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
    assert len(log_entries(store, RUN)) == 5


def test_a_held_checkpoint_is_named_beside_the_newest(memory: Store) -> None:
    log, parent = log_of(memory), ""
    token = log.acquire(FAR, JOB).token
    for step, hold, named in ((1, (), [1]), (2, (1,), [1, 2]), (3, (1,), [1, 3]), (4, (3,), [3, 4]), (5, (), [5])):
        held = [ref(each, token).path for each in hold]
        entry = log.commit(token, ref(step, token, parent), 1, held)
        assert [each.step for each in entry.checkpoints] == named
        parent = ref(step, token).path


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
    assert [entry.kind for entry in log_entries(memory, RUN)] == ["acquire", "release"]


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
    assert [entry.number for entry in log_entries(memory, RUN)] == [1, 2]


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
    assert log_of(memory).head() == entry


def altered(data: bytes, **changes: object) -> bytes:
    return json.dumps({**json.loads(data), **changes}).encode()


@pytest.mark.parametrize(
    "damage",
    [
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
    for attempt in (log_of(memory).head, lambda: log_of(memory).acquire(FAR, JOB)):
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


# --- torn entries -----------------------------------------------------------------------------------------------------


def test_a_torn_newest_entry_costs_that_entry_and_no_more(tmp_path: Path) -> None:
    """The last write torn at every byte, or of zeros from there on, as file systems leave it after a power cut."""
    store = open_store(str(tmp_path))
    log = log_of(store)
    token = log.acquire(FAR, JOB).token
    good = log.commit(token, ref(10, token), 3)
    torn = log.commit(token, ref(20, token, ref(10, token).path), 3)
    place = tmp_path / f"{RUN}/log/{torn.number:08d}.json"
    whole = place.read_bytes()
    for length in range(len(whole)):
        for left in (whole[:length], whole[:length].ljust(len(whole), b"\0")):
            place.write_bytes(left)
            assert log_of(store).head() == good
    assert [entry.number for entry in log_entries(store, RUN)] == [1, 2]
    again = log_of(store)
    entry = again.acquire(FAR, JOB, patience_s=0)
    assert (entry.number, again.torn, entry.checkpoints) == (4, (3,), good.checkpoints)
    with pytest.raises(FencedError):
        log_of(store).commit(token, ref(30, token), 3)
    assert again.commit(entry.token, ref(20, entry.token), 3).number == 5


def test_a_driver_goes_on_behind_an_entry_of_its_own_that_was_torn(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    log = log_of(store)
    token = log.acquire(FAR, JOB).token
    (tmp_path / f"{RUN}/log/00000002.json").write_bytes(b"")
    committed = log.commit(token, ref(10, token), 3)
    (tmp_path / f"{RUN}/log/HINT").write_bytes(b"2")
    assert committed.number == 3 and log_of(store).head() == committed
