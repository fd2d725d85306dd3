"""Runs are stopped and removed through their storage alone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.processes import wait_for
from tests.support.run_logs import FAR, JOB, KINDS, RUN, memory_store, ref, store_of
from trainwright.cli.main import app
from trainwright.core.errors import RunConflict, StorageError, StoreDown
from trainwright.storage import run_log
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_control import await_end, remove_run, request_stop
from trainwright.storage.run_log import Heartbeat, Owner, RunLog, heartbeat_path


@pytest.fixture
def memory() -> Store:
    return memory_store()


def driven(store: Store, owner: Owner | None = None) -> RunLog:
    """The log of a run that this process drives."""
    log = RunLog(store, RUN)
    log.acquire(owner or Owner.here(), JOB)
    return log


def test_the_driver_hears_each_request_once(memory: Store) -> None:
    driven(memory)
    heard: list[bool] = []
    heart = Heartbeat(memory, RUN, 1, every_s=0.01, on_stop=heard.append)
    heart.start()
    try:
        request_stop(memory, RUN)
        wait_for(lambda: heard == [False])
        request_stop(memory, RUN)
        request_stop(memory, RUN, now=True)
        wait_for(lambda: heard == [False, True])
    finally:
        heart.stop()
    assert heart.error is None


def test_a_request_to_the_driver_before_is_none_to_this_one(memory: Store) -> None:
    log = driven(memory)
    request_stop(memory, RUN, now=True)
    log.release(1, "stopped")
    token = RunLog(memory, RUN).acquire(Owner.here(), JOB).token
    heard: list[bool] = []
    heart = Heartbeat(memory, RUN, token, every_s=0.01, on_stop=heard.append)
    heart._try(heart._beaten_s)
    assert heart.error is None and not heard


def test_a_request_that_cannot_be_read_is_no_lost_heartbeat(memory: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    heart = Heartbeat(memory, RUN, 1, note=notes.append)

    def fail(*_: object) -> bytes:
        raise StorageError("unreachable")

    monkeypatch.setattr(Store, "find", fail)
    assert heart._try(heart._beaten_s) is None and not notes
    assert heart._try(heart._beaten_s) is None and heart._try(heart._beaten_s) is None
    assert notes == ["requests to stop cannot be read: unreachable"], "told once"


def test_a_store_that_goes_away_between_heartbeat_and_request_is_reported_as_an_outage_alone(
    memory: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    told, back = threading.Event(), threading.Event()

    def note(text: str) -> None:
        notes.append(text)
        (back if "answers again" in text else told).set()

    def fail(*_: object, **__: object) -> bytes:
        raise StoreDown("cannot write: unreachable")

    def go_away(*_: object) -> bytes:
        monkeypatch.setattr(Store, "put", fail)
        raise StoreDown("cannot read: unreachable")

    heart = Heartbeat(memory, RUN, 1, every_s=0.01, note=note)
    put = Store.put
    monkeypatch.setattr(Store, "find", go_away)
    heart.start()
    try:
        assert told.wait(10)
        monkeypatch.setattr(Store, "find", lambda *_: None)
        monkeypatch.setattr(Store, "put", put)
        assert back.wait(10)
    finally:
        heart.stop()
    assert len(notes) == 2 and "the driver cannot write to the store: unreachable" in notes[0]


def test_it_waits_until_the_driver_has_released_the_run(memory: Store) -> None:
    log = driven(memory)
    request_stop(memory, RUN)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            log.release(1, "stopped")

    assert await_end(memory, RUN, timeout_s=60, wait=wait) and waits == [1.0, 1.0, 1.0]
    assert await_end(memory, RUN, timeout_s=60, wait=wait) and len(waits) == 3, "it is over"


def test_a_driver_that_does_not_stop_is_waited_for_until_the_deadline(memory: Store) -> None:
    driven(memory)
    assert not await_end(memory, RUN, timeout_s=0.05, wait=lambda _: None)


def test_a_driver_that_dies_meanwhile_is_said(memory: Store) -> None:
    driven(memory)
    entry = RunLog(memory, RUN).head()
    assert entry is not None
    gone = replace(entry, owner=replace(entry.owner, started=entry.owner.started + 1))
    memory.delete([f"{RUN}/log/00000001.json"])
    memory.put(f"{RUN}/log/00000001.json", gone.to_json())
    with pytest.raises(RunConflict, match="ended before it released the run"):
        await_end(memory, RUN, timeout_s=3, wait=lambda _: None)


def test_a_driver_that_takes_over_meanwhile_has_not_heard_the_request(memory: Store) -> None:
    driven(memory)

    def wait(_: float) -> None:
        RunLog(memory, RUN, dead=lambda owner: True).acquire(Owner.here(), JOB)

    with pytest.raises(RunConflict, match=r"another driver has taken over run 'digits' meanwhile(.|\n)*ask again"):
        await_end(memory, RUN, timeout_s=3, wait=wait)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda log: log.release(1, "done"), "is not running: it is done"),
        (lambda log: None, "is not running: its driver is gone"),
    ],
)
def test_a_run_that_is_over_is_not_stopped(memory: Store, end: Callable[[RunLog], object], told: str) -> None:
    end(driven(memory, FAR))
    with pytest.raises(RunConflict, match=told):
        request_stop(memory, RUN, wait=lambda _: None)
    with pytest.raises(StorageError, match=r"there is no run 'digit'(.|\n)*did you mean 'digits'"):
        request_stop(memory, "digit")


@pytest.mark.parametrize("kind", KINDS)
def test_a_removed_run_leaves_nothing_and_a_driven_one_stays(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    store = store_of(kind, request, tmp_path)
    log = driven(store)
    log.commit(1, ref(5, 1), 3)
    store.put(f"{RUN}/{ref(5, 1).path}/model.safetensors", b"weights")
    store.put("other/log/00000001.json", b"another run")
    with pytest.raises(RunConflict, match=r"is running(.|\n)*trainwright stop digits"):
        remove_run(store, RUN)
    log.release(1, "stopped")
    assert remove_run(store, RUN) == 5  # three entries, the hint and a file
    assert [path for path, _ in store.list()] == ["other/log/00000001.json"]
    if kind == "folder":
        assert os.listdir(tmp_path) == ["other"]


def test_the_log_is_removed_last_so_that_a_removal_can_be_repeated(
    memory: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven(memory).release(1, "done")
    memory.put(f"{RUN}/report.html", b"report")
    deleted: list[str] = []

    def fail(self: Store, paths: object) -> None:
        deleted.extend(paths)  # type: ignore[arg-type]
        raise StorageError("unreachable")

    monkeypatch.setattr(Store, "delete", fail)
    with pytest.raises(StorageError, match="unreachable"):
        remove_run(memory, RUN)
    assert deleted == [f"{RUN}/log/HINT", f"{RUN}/report.html"]


@pytest.mark.parametrize("clock_s", [0.0, 4000.0])
def test_a_run_whose_driver_is_slow_or_whose_clock_seems_wrong_is_not_removed(
    memory: Store, clock_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that answers slowly, or another machine's clock, must not look like a dead driver."""
    driven(memory, FAR)
    place, waited = heartbeat_path(RUN, 1), [0.0]
    memory.put(place, b"0")
    now_s = time.time() + clock_s
    monkeypatch.setattr(run_log.time, "time", lambda: now_s)

    def wait(seconds: float) -> None:
        waited[0] += seconds
        memory.put(place, str(int(waited[0] / 5.5)).encode())

    with pytest.raises(RunConflict, match="is running"):
        remove_run(memory, RUN, wait=wait)
    waited[0] = 0.0
    request_stop(memory, RUN, wait=wait)
    with pytest.raises(RunConflict, match="its driver is gone"):
        request_stop(memory, RUN, wait=lambda seconds: None)


def test_a_run_is_removed_after_a_question(tmp_path: Path) -> None:
    driven(open_store(str(tmp_path))).release(1, "done")
    command = ["rm", RUN, "--storage", str(tmp_path)]
    refused = CliRunner().invoke(app, command, input="n\n")
    assert refused.exit_code == 1 and (tmp_path / RUN / "log").exists()
    assert "with all its checkpoints?" in refused.stderr
    removed = CliRunner().invoke(app, [*command, "--yes"])
    assert removed.exit_code == 0 and removed.stdout == "deleted digits: 3 files\n" and not (tmp_path / RUN).exists()
