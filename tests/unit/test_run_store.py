"""The driver's log and checkpoints behind three words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trainwright.core.engine import CheckpointFile, checkpoint_path
from trainwright.core.errors import CheckpointError, StorageError
from trainwright.core.events import Noted
from trainwright.driver import messages as m
from trainwright.storage.checkpoints import CheckpointWriter
from trainwright.storage.event_files import read_events
from trainwright.storage.event_log import EventLog
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog
from trainwright.storage.run_store import RunStore


def run_store(
    folder: Path,
    notes: list[str],
    *,
    fresh: bool = False,
    begin: Callable[[int], object] = int,
    tell: Callable[[], object] = list,
) -> RunStore:
    return RunStore(
        open_store(str(folder)), "run", job={}, keep=2, fresh=fresh, note=notes.append, begin=begin, tell=tell
    )


def commit(folder: Path, step: int, parent: str = "", again: int = 0) -> m.CommitCheckpoint:
    writer = CheckpointWriter(open_store(str(folder)), "run", checkpoint_path(step, 1, again))
    writer.write("state", b"x" * step)
    path = checkpoint_path(step, 1, again)
    return m.CommitCheckpoint(step=step, path=path, files=writer.entries, parent=parent)


def test_a_second_try_of_a_step_is_a_checkpoint_like_any_other(tmp_path: Path) -> None:
    owner = run_store(tmp_path, [])
    owner.acquire()
    assert owner.chain() == ()
    first = owner.commit(commit(tmp_path, 5)).checkpoint
    commit(tmp_path, 10)  # given up before it was named
    again = owner.commit(commit(tmp_path, 10, first.path, again=1)).checkpoint
    committed = owner.commit(commit(tmp_path, 15, again.path))
    assert committed.older == (again,)
    owner.release(m.ReleaseLease(outcome="stopped", step=15))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["00000010-1.1", "00000015-1"]
    taken = run_store(tmp_path, [])
    taken.acquire()
    assert taken.chain() == (again, committed.checkpoint)
    taken.give_up()


def test_the_best_checkpoint_is_not_deleted_until_a_better_one_is_stored(tmp_path: Path) -> None:
    owner, parent, held = run_store(tmp_path, []), "", ("checkpoints/00000005-1",)
    owner.acquire()
    for step, hold in ((5, ()), (10, held), (15, held), (20, held), (25, ())):
        done = owner.commit(replace(commit(tmp_path, step, parent), hold=hold))
        parent, known = done.checkpoint.path, {ref.step for ref in (*done.older, done.checkpoint)}
        assert {int(path.name[:8]) for path in (tmp_path / "run" / "checkpoints").iterdir()} == known
        assert (5 in known) == (step < 25)
    owner.give_up()


def test_events_are_stored_before_the_log_names_a_checkpoint_and_before_it_is_given_back(tmp_path: Path) -> None:
    """So that the driver may be killed at any moment, and the next one's story has no gap."""
    named: list[tuple[int, bool]] = []

    def tell() -> None:
        head = RunLog(open_store(str(tmp_path)), "run").head()
        assert head is not None
        named.append((len(head.checkpoints), head.owned))

    owner = run_store(tmp_path, [], tell=tell)
    owner.acquire()
    first = owner.commit(commit(tmp_path, 5)).checkpoint
    owner.commit(commit(tmp_path, 10, first.path))
    owner.give_up()
    assert named == [(0, True), (1, True), (2, True)]


def test_the_beginning_is_stored_before_anything_is_asked_for(tmp_path: Path) -> None:
    """So that a driver killed in its first seconds has left what it was told of the runs before this one."""
    journal = EventLog(open_store(str(tmp_path)), "run")

    def begin(token: int) -> None:
        journal.open(token)
        journal.write(Noted(text="rows 0 to 9 start again on another worker"))
        assert journal.flush()

    owner = run_store(tmp_path, [], begin=begin)
    token = owner.acquire()
    owner.chain()
    (event,) = read_events(open_store(str(tmp_path)), "run")
    assert isinstance(event, Noted) and event.text == "rows 0 to 9 start again on another worker"
    head = RunLog(open_store(str(tmp_path)), "run").head()
    assert head is not None and head.token == token
    owner.give_up()
    journal.close()


def test_files_that_the_driver_cannot_see_are_no_checkpoint(tmp_path: Path) -> None:
    owner = run_store(tmp_path, [])
    owner.acquire()
    elsewhere = CheckpointFile(name="state", size_bytes=3, sha256="0" * 64)
    wanted = m.CommitCheckpoint(step=5, path=checkpoint_path(5, 1), files=(elsewhere,), parent="")
    with pytest.raises(StorageError, match="cannot find the file state") as caught:
        owner.commit(wanted)
    assert "all nodes share" in str(caught.value)
    owner.give_up()
    head = RunLog(open_store(str(tmp_path)), "run").head()
    assert head is not None and head.outcome == "failed" and not head.checkpoints


def test_a_run_with_no_whole_checkpoint_is_not_begun_again_by_itself(tmp_path: Path) -> None:
    owner, notes = run_store(tmp_path, []), []
    owner.acquire()
    path = owner.commit(commit(tmp_path, 5)).checkpoint.path
    owner.release(m.ReleaseLease(outcome="stopped", step=5))
    shard = tmp_path / "run" / path / "state"
    shard.write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="no checkpoint of the run is complete"):
        taken = run_store(tmp_path, notes)
        taken.acquire()
        taken.chain()
    assert shard.read_bytes() == b"torn", "nothing was changed"
    fresh = run_store(tmp_path, notes, fresh=True)
    fresh.acquire()
    assert fresh.chain() == ()
    fresh.give_up()


def test_a_fresh_start_deletes_the_report_and_the_quarantine_of_the_run_before_it(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for fresh in (False, True):
        owner = run_store(tmp_path, [], fresh=fresh)
        owner.acquire()
        for name in ("report.html", "quarantine/train-000000000003.parquet"):
            store.put(f"run/{name}", b"old")
        owner.chain()
        owner.give_up()
        assert store.exists("run/report.html") is not fresh
        assert [path for path, _ in store.list("run/quarantine")] == (
            [] if fresh else ["run/quarantine/train-000000000003.parquet"]
        )
