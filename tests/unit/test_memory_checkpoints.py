"""Copies of the state in the nodes' memory: who makes them, when, and that they are files which outlive a process."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.driver_harness import Story, progressed
from trainwright.core import events
from trainwright.core.engine import CheckpointFile, StateSnapshot
from trainwright.core.errors import PeerLost, StorageError
from trainwright.core.topology import StateTag
from trainwright.driver import messages as m
from trainwright.driver.checkpointing import (
    TOKEN_BITS,
    checkpoint_interval_s,
    choose_memory_copy_ranks,
    choose_neighbours,
)
from trainwright.driver.driver_state import Phase
from trainwright.runtime import worker_actor
from trainwright.storage import memory_checkpoints
from trainwright.storage.memory_checkpoints import (
    GUARD_FILE,
    MemoryCheckpointReader,
    MemoryCheckpointStore,
    MemoryPart,
    PeerMemory,
    remove_stale_copies,
)
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import Owner
from trainwright.worker.worker import StateCopies

FIRST = (3 << TOKEN_BITS) + 1  # version of the driver with token 3
FILE = CheckpointFile(name="state", size_bytes=5, sha256=hashlib.sha256(b"12345").hexdigest())
TAKEN = m.MemoryCopyTaken(files=(m.NodeMemoryFile(node="n0", file=FILE),))


def alone(**settings: object) -> Story:
    """One worker that steps, with a copy due each 10 s."""
    return Story(**{"workers": 1, "keep_s": 10.0, "total_steps": 100, "steps_per_epoch": 100, **settings}).running()


def paused(story: Story, step: int) -> Story:
    """The time for a copy comes, and the ranks are copied after `step`."""
    story.now_s += 10.0
    story.expires("pause").segment(step)
    return story.returns("snapshot", m.SnapshotTaken(step=step, size_bytes=5, blocked_s=0.01))


def kept(story: Story, step: int) -> Story:
    """The time for a copy comes, it is made after `step`, and delivered."""
    return paused(story, step).returns("keep", TAKEN)


def test_a_copy_is_made_when_its_time_has_come_and_the_ranks_go_on_meanwhile() -> None:
    story = alone()
    story.now_s += 10.0
    story.expires("pause")
    assert [call.verb for call in story.all(m.CallWorker)] == ["stop"]
    story.segment(7)
    assert story.calls("snapshot")[0].argument == m.SnapshotRequest(step=7, verbs=("keep",))
    story.returns("snapshot", m.SnapshotTaken(step=7, size_bytes=5, blocked_s=0.01))
    assert [call.verb for call in story.all(m.CallWorker)] == ["keep", "run"]
    assert story.calls("keep")[0].argument == m.MemoryCopyRequest(version=FIRST, hold=())
    story.returns("keep", TAKEN)
    assert story.emitted(events.Kept)[0].step == 7 and story.state.phase is Phase.RUNNING
    assert kept(story, 9).state.memory.kept == m.MemoryCheckpoint(
        version=FIRST + 1, step=9, files=(m.NodeMemoryFile(node="n0", file=FILE),)
    )


def test_when_all_are_dead_the_state_comes_from_memory() -> None:
    story = kept(alone(), 7).tell(m.WorkerDied(worker=0, cause="killed")).start().formed()
    restore_plan = story.calls("restore")[0].argument
    assert (restore_plan.source, restore_plan.step, restore_plan.kept) == ("keeper", 7, story.state.memory.kept)
    story.returns("restore", StateTag(step=7))
    assert story.emitted(events.Formed)[0].source == "keeper"


def test_an_older_copy_yields_to_a_newer_checkpoint() -> None:
    story = kept(alone(checkpoint_steps=20), 7).segment(20).snapshot(20)
    story.returns("upload", (FILE,)).committed(20)
    story.tell(m.WorkerDied(worker=0, cause="killed")).start().formed()
    assert story.calls("restore")[0].argument.source == "checkpoint"


def ended(story: Story | None = None, **settings: object) -> Story:
    """Rank 0 of three has died after step 7, and each epoch needs new processes; rank 1 has lost its peer."""
    fields = {"workers": 3, "keep_s": 10.0, "total_steps": 100, "steps_per_epoch": 100, "reform": "new_process"}
    story = progressed(story or Story(**fields | settings).running(), 7)
    dead, lost, _ = (member.worker for member in story.state.membership.members)
    story.tell(m.WorkerDied(worker=dead, cause="killed"))
    return story.raises(lost, "run", "peer", PeerLost("gone"))


def test_one_survivor_copies_its_state_before_its_process_ends() -> None:
    story = ended()
    (call,) = story.calls("leave")
    assert (call.worker, call.argument) == (1, m.MemoryCopyRequest(version=FIRST)) and not story.all(m.KillWorker)
    story.raises(2, "run", "peer", PeerLost("gone"))
    assert not story.calls("leave") and story.all(m.KillWorker) == [m.KillWorker(worker=2)]
    story.returns("leave", replace(TAKEN, step=7), workers=[1])
    assert story.all(m.KillWorker) == [m.KillWorker(worker=1)]
    assert [(event.step, event.size_bytes, event.nodes) for event in story.emitted(events.Kept)] == [(7, 5, ["n0"])]
    copy = m.MemoryCheckpoint(version=FIRST, step=7, files=TAKEN.files)
    assert story.all(m.MarkComplete) == [m.MarkComplete(kept=copy)]
    restore_plan = story.start().formed().calls("restore")[0].argument
    assert (restore_plan.source, restore_plan.step, restore_plan.kept) == ("keeper", 7, copy)
    story.returns("restore", StateTag(step=7))
    again = ended(progressed(story, 9)).calls("leave")
    assert [call.argument for call in again] == [m.MemoryCopyRequest(version=FIRST + 1, hold=(FIRST,))]


@pytest.mark.parametrize(
    "settings", [{"keep_s": None}, {"topology": "coordinator"}, {"devices": ("cuda:0",)}], ids=["off", "led", "GPU"]
)
def test_no_survivor_copies_its_state_where_it_is_not_wanted_or_not_safe(settings: dict[str, Any]) -> None:
    story = ended(**settings)
    assert not story.calls("leave") and m.KillWorker(worker=1) in story.all(m.KillWorker)


def test_a_survivor_that_holds_a_part_of_the_state_makes_no_copy() -> None:
    tags = [StateTag(step=0, layout="sharded", pieces=frozenset({piece}), total=3) for piece in "abc"]
    story = Story(workers=3, keep_s=10.0, reform="new_process", total_steps=100, steps_per_epoch=100)
    story = ended(story.up().formed(*tags).returns("restore", *tags))
    assert not story.calls("leave") and story.all(m.KillWorker) == [m.KillWorker(worker=1)]


def test_a_survivor_is_not_asked_when_it_has_no_more_steps_than_a_copy_or_its_node_is_to_end() -> None:
    fields = {"workers": 3, "keep_s": 10.0, "total_steps": 100, "steps_per_epoch": 100, "reform": "new_process"}
    story = Story(**fields).running().tell(m.WorkerDied(worker=0, cause="killed"))
    assert not story.raises(1, "run", "peer", PeerLost("gone")).calls("leave"), "no step is done"
    story = ended(Story(**fields).running().tell(m.PreemptionNoticed(worker=1, left_s=60.0)))
    assert not story.calls("leave") and m.KillWorker(worker=1) in story.all(m.KillWorker)
    assert [call.worker for call in story.raises(2, "run", "peer", PeerLost("gone")).calls("leave")] == [2]


def test_a_rank_that_hangs_is_told_of_alone() -> None:
    """Another one that copied its state would be awaited beside it, and taken for hung."""
    story = progressed(Story(reform="new_process", keep_s=10.0, total_steps=100, steps_per_epoch=100).running(), 7)
    story.returns("run", m.SegmentReport(step=7), workers=[0]).expires("hang")
    assert not story.calls("leave") and story.all(m.KillWorker) == [m.KillWorker(worker=0)]


def test_a_copy_of_a_survivor_that_failed_or_is_of_no_newer_step_is_not_used() -> None:
    story = ended().returns("leave", m.MemoryCopyTaken(files=(), trouble="no room in /dev/shm"), workers=[1])
    assert "no room in /dev/shm" in story.emitted(events.Noted)[0].text and story.state.memory.kept is None
    assert not story.raises(2, "run", "peer", PeerLost("gone")).calls("leave"), "the others have no room either"
    old = ended().returns("leave", replace(TAKEN, step=0), workers=[1])
    assert old.state.memory.kept is None and not old.emitted(events.Kept)


@pytest.mark.parametrize("answer", [None, m.MemoryCopyTaken(files=()), m.WorkerDied(worker=1, cause="killed")])
def test_another_survivor_is_asked_where_the_first_one_cannot_copy(answer: Any) -> None:
    """It has no state, a step ended in the middle of its update, or it died."""
    died = isinstance(answer, m.WorkerDied)
    story = ended().tell(answer) if died else ended().returns("leave", answer, workers=[1])
    story.raises(2, "run", "peer", PeerLost("gone"))
    assert [call.worker for call in story.calls("leave")] == [2]
    story.returns("leave", replace(TAKEN, step=7), workers=[2])
    assert story.start().formed().calls("restore")[0].argument.step == 7


def test_a_survivor_that_copies_for_too_long_is_replaced_and_not_taken_for_hung() -> None:
    story = ended().raises(2, "run", "peer", PeerLost("gone")).expires("leave")
    story.now_s += story.state.settings.deadlines.call_deadline_s
    story.expires("leave")
    assert story.all(m.KillWorker) == [m.KillWorker(worker=1)] and not story.emitted(events.Failed)
    assert "did not copy its state within" in story.emitted(events.Noted)[0].text
    assert story.start().formed().calls("restore")[0].argument.source == "initial"


def test_where_the_copy_of_a_survivor_cannot_be_read_that_before_it_is_used() -> None:
    fields = {"workers": 3, "keep_s": 10.0, "total_steps": 100, "steps_per_epoch": 100, "reform": "new_process"}
    story = Story(**fields).running()
    story.now_s += 10.0
    story.expires("pause").segment(5).returns(
        "snapshot", m.SnapshotTaken(step=5, size_bytes=5, blocked_s=0.01), workers=[0, 1]
    )
    before = story.returns("keep", replace(TAKEN, step=5), workers=[0, 1]).state.memory.kept
    story = ended(story).raises(2, "run", "peer", PeerLost("gone"))
    story.returns("leave", replace(TAKEN, step=7), workers=[1]).start().formed()
    assert story.calls("restore")[0].argument.step == 7
    worker = story.state.membership.members[0].worker
    story.raises(worker, "restore", "storage", StorageError("a copy of the state in memory cannot be read"))
    assert before is not None and story.state.memory.kept == before and story.state.memory.former is None


def test_a_node_that_makes_no_later_copy_gives_its_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any survivor may have made the last copy; the next ones are on other nodes."""
    monkeypatch.setattr(worker_actor, "DriverWatchdog", MagicMock())
    process, copies = worker_actor.MemoryStoreProcess("file:///runs/one", 3), MemoryCheckpointStore("one", tmp_path)
    process._copies = copies
    copies.write(1, 8, ()).write("state", b"12345678")
    for version, left in ((1, ["1"]), (2, ["1"]), (3, [])):
        complete = m.MemoryCheckpoint(version=version, step=version, files=())
        assert process.seal(cloudpickle.dumps(complete), 3) is None
        assert [entry.name for entry in copies.folder.glob("[0-9]*")] == left
    assert process.adopt(4) == complete


def test_processes_that_wait_to_form_their_first_group_are_kept_at_a_takeover() -> None:
    """They answer `leave` as the others do that are not to copy anything."""
    waiting = tuple(
        m.SurvivingWorker(worker=n, node=f"n{n}", pid=n, slot=n, waiting=True, rank=-1) for n in range(3)
    )  # fmt: skip
    story = Story(workers=3, keep_s=10.0, reform="new_process")
    story.tell(m.LeaseAcquired(token=3, head=None, living=waiting)).returns("leave", None)
    assert not story.all(m.KillWorker) and [call.worker for call in story.calls("reserve")] == [0, 1, 2]


def test_a_copy_that_cannot_be_read_is_not_tried_again() -> None:
    story = kept(alone(), 7).tell(m.WorkerDied(worker=0, cause="killed")).start().formed()
    story.raises(1, "restore", "storage", StorageError("a copy of the state in memory cannot be read"))
    story.returns("leave", None).formed()
    assert story.calls("restore")[0].argument.source == "initial" and story.state.memory.kept is None


def test_a_node_without_room_ends_the_copies_and_not_the_run() -> None:
    story = alone()
    story.now_s += 10.0
    story.expires("pause").segment(7).returns("snapshot", m.SnapshotTaken(step=7, size_bytes=5, blocked_s=0.01))
    story.raises(0, "keep", "storage", StorageError("the state does not fit into shared memory"))
    assert "does not fit" in story.emitted(events.Noted)[0].text
    assert story.state.phase is Phase.RUNNING and story.state.memory.keepers == () and not story.emitted(events.Failed)


def test_a_keeper_that_dies_on_the_way_leaves_the_version_before() -> None:
    story = kept(alone(), 7)
    story.now_s += 10.0
    story.expires("pause").segment(9).returns("snapshot", m.SnapshotTaken(step=9, size_bytes=5, blocked_s=0.01))
    assert story.calls("keep")[0].argument == m.MemoryCopyRequest(version=FIRST + 1, hold=(FIRST,))
    story.tell(m.WorkerDied(worker=0, cause="killed")).start().formed()
    assert story.calls("restore")[0].argument.step == 7


def test_the_next_copy_waits_for_the_answers_to_one_that_will_not_be() -> None:
    """An answer does not say to which copy; it must not be taken for one to a newer."""
    tags = [StateTag(step=0, layout="sharded", pieces=frozenset({piece}), total=2) for piece in "ab"]
    story = Story(keep_s=10.0, total_steps=100, steps_per_epoch=100).up().formed(*tags).returns("restore", *tags)
    story.now_s += 10.0
    story.expires("pause").segment(7)
    story.returns("snapshot", m.SnapshotTaken(step=7, size_bytes=5, blocked_s=0.01)).tell(
        m.WorkerDied(worker=1, cause="killed")
    )
    assert story.state.memory.keeping is not None and story.state.memory.keeping.owing == {0}
    story.returns("keep", TAKEN, workers=[0])
    assert story.state.memory.keeping is None and story.state.memory.kept is None and not story.emitted(events.Kept)


def test_copies_take_a_hundredth_of_the_time_at_most() -> None:
    story = alone()
    story.now_s += 10.0
    story.expires("pause").segment(7).returns("snapshot", m.SnapshotTaken(step=7, size_bytes=5, blocked_s=0.5))
    assert [timer.after_s for timer in story.all(m.SetTimer) if timer.name == "pause"] == [50.0]


def test_checkpoints_by_time_follow_their_cost_and_the_failures() -> None:
    story = Story(workers=1, checkpoint_auto=True, total_steps=100, steps_per_epoch=10).running()
    assert [timer.after_s for timer in story.all(m.SetTimer) if timer.name == "pause"] == [pytest.approx(6, abs=6)]
    assert story.calls("run")[0].argument.steps.stop == 100, "no milestone but the end"
    story.now_s += 10.0
    story.expires("pause").segment(40)
    assert story.calls("snapshot")[0].argument.verbs == ("upload",)
    story.returns("snapshot", m.SnapshotTaken(step=40, size_bytes=5, blocked_s=0.5)).returns(
        "upload", (FILE,)
    ).committed(40)
    assert checkpoint_interval_s(story.state) == pytest.approx((2 * 0.5 * 86400) ** 0.5)
    story.tell(m.WorkerDied(worker=0, cause="killed"))
    assert checkpoint_interval_s(story.state) == pytest.approx((2 * 0.5 * 3600) ** 0.5)


def test_replicas_on_two_nodes_need_no_copy_unless_processes_end_with_each_failure() -> None:
    tags = dict.fromkeys(range(4), StateTag(step=3))
    assert choose_memory_copy_ranks(tags, ["a", "a", "a", "a"], "in_place") == (0,)
    assert choose_memory_copy_ranks(tags, ["a", "a", "b", "b"], "in_place") == ()
    assert choose_memory_copy_ranks(tags, ["a", "a", "b", "c"], "new_process") == (0, 2)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sets(st.integers(0, 4), min_size=1)), min_size=1, max_size=6))
def test_each_piece_is_on_two_nodes_or_as_many_as_hold_it(ranks: list[tuple[str, set[int]]]) -> None:
    nodes = [node for node, _ in ranks]
    tags = {
        rank: StateTag(step=1, pieces=frozenset(map(str, pieces)), total=5) for rank, (_, pieces) in enumerate(ranks)
    }
    keepers = choose_memory_copy_ranks(tags, nodes, "new_process")
    for piece in map(str, range(5)):
        holders = {nodes[rank] for rank in tags if piece in tags[rank].pieces}
        copies = {nodes[rank] for rank in keepers if piece in tags[rank].pieces}
        assert len(copies) >= min(2, len(holders))
    neighbours = dict(choose_neighbours(tags, nodes, keepers))
    assert all(node != after for node, after in neighbours.items())
    if len({nodes[rank] for rank in keepers}) > 1:
        for piece in {piece for rank in keepers for piece in tags[rank].pieces}:
            copies = {nodes[rank] for rank in keepers if piece in tags[rank].pieces}
            assert len(copies | {neighbours[node] for node in copies & neighbours.keys()}) >= 2, (
                "a lost node is survived"
            )


def test_only_what_one_node_alone_holds_goes_to_its_neighbour() -> None:
    stages = {rank: StateTag(step=1, pieces=frozenset({piece}), total=3) for rank, piece in enumerate("aabbc")}
    nodes = ["n0", "n1", "n1", "n2", "n2"]
    assert choose_neighbours(stages, nodes, range(5)) == (("n2", "n0"),)
    assert choose_neighbours(stages, ["n0"] * 5, (0, 2, 4)) == ()


def test_a_neighbour_without_room_is_told_once_and_the_copies_stay_on_their_nodes() -> None:
    tags = [StateTag(step=0, layout="sharded", pieces=frozenset({piece}), total=2) for piece in "ab"]
    story = Story(keep_s=10.0, total_steps=100, steps_per_epoch=100).up().formed(*tags).returns("restore", *tags)
    paused(story, 7)
    assert story.calls("keep")[0].argument.neighbours == (("n0", "n1"), ("n1", "n0"))
    there = replace(TAKEN, files=(*TAKEN.files, m.NodeMemoryFile(node="n1", file=FILE)))
    story.returns("keep", there, replace(TAKEN, trouble="n0: the state does not fit into shared memory"))
    assert len(story.state.memory.kept.files) == 3 and "does not fit" in story.emitted(events.Noted)[0].text
    assert not paused(story, 9).calls("keep")[0].argument.neighbours


def test_trouble_with_a_neighbour_that_was_lost_is_none_of_the_next_ones() -> None:
    tags = [StateTag(step=0, layout="sharded", pieces=frozenset({piece}), total=2) for piece in "ab"]
    story = Story(keep_s=10.0, total_steps=100, steps_per_epoch=100).up().formed(*tags).returns("restore", *tags)
    paused(story, 7).tell(m.WorkerDied(worker=1, cause="killed"))
    story.returns("keep", replace(TAKEN, trouble="n1: the memory of n1 cannot be reached"), workers=[0])
    assert story.state.memory.neighbours and not story.emitted(events.Noted)


# --- the files --------------------------------------------------------------------------------------------------------


def kept_state(*nodes: str, version: int = 2, size_bytes: int = 5) -> m.MemoryCheckpoint:
    file = replace(FILE, size_bytes=size_bytes)
    return m.MemoryCheckpoint(
        version=version, step=9, files=tuple(m.NodeMemoryFile(node=node, file=file) for node in nodes)
    )


def test_what_one_process_wrote_another_reads(tmp_path: Path) -> None:
    writer = MemoryCheckpointStore("s3://b/run", tmp_path).write(2, 5, hold=())
    writer.write("state", memoryview(b"12345"))
    assert writer.entries == (FILE,)
    reader = MemoryCheckpointReader(
        MemoryCheckpointStore("s3://b/run", tmp_path), kept_state("here"), "here", PeerMemory().fetch
    )
    assert reader.names() == ("state",) and reader.read("state") == b"12345"


def test_a_new_version_spares_what_is_held_and_removes_the_rest(tmp_path: Path) -> None:
    shelf = MemoryCheckpointStore("s3://b/run", tmp_path)
    for version, hold in ((1, ()), (2, (1,)), (3, (1,))):
        shelf.write(version, 1, hold).write("state", b"x")
    assert sorted(entry.name for entry in shelf.folder.glob("[0-9]*")) == ["1", "3"]
    shelf.remove()
    assert not list(tmp_path.iterdir())


def test_a_torn_copy_is_read_from_another_node(tmp_path: Path) -> None:
    shelf = MemoryCheckpointStore("s3://b/run", tmp_path)
    shelf.write(2, 5, hold=()).write("state", b"123")
    asked = []

    def fetch(node: str, version: int, name: str) -> bytes:
        asked.append((node, version, name))
        return b"12345"

    assert MemoryCheckpointReader(shelf, kept_state("here", "there"), "here", fetch).read("state") == b"12345"
    assert asked == [("there", 2, "state")]
    with pytest.raises(StorageError, match="3 bytes, not 5; there: the memory of there cannot be reached"):
        MemoryCheckpointReader(shelf, kept_state("here", "there"), "here", PeerMemory().fetch).read("state")


def test_a_neighbour_has_the_same_files_and_the_network_is_used_a_tenth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_checkpoints, "_PART_BYTES", 2)
    clock, paused_s, sizes = [0.0], [], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    here, there = (
        MemoryCheckpointStore("s3://b/run", tmp_path / name, pause=paused_s.append) for name in ("here", "there")
    )
    for store in (here, there):
        store.folder.parent.mkdir()
    there.write(1, 1, hold=()).write("state", b"old")
    mine = there.write(2, 1, hold=(1,))
    mine.write("own", b"of its own rank")
    mine.write("both", b"of its own rank too")
    writer = here.write(2, 5, hold=(1,))
    for name, data in (("state", b"12345"), ("even", b"1234"), ("empty", b""), ("both", b"x")):
        writer.write(name, data)

    def send(part: MemoryPart) -> None:
        sizes.append(part.size_bytes)
        clock[0] += 1.0 if part.name == "even" else 0.125
        there.receive(part)

    here.send(2, writer.entries, (1,), send)
    assert [there.read(2, name) for name in ("state", "even", "empty")] == [b"12345", b"1234", b""]
    assert (there.read(1, "state"), there.read(2, "own")) == (b"old", b"of its own rank")
    assert there.read(2, "both") == b"of its own rank too", "another node's does not take its place"
    assert paused_s == [9 / 8] * 3 + [2.0] * 2 + [9 / 8] * 2
    assert sizes == [10, 10, 10, 5, 5, 1, 1], "what is left, so that all of it has room"
    late = MemoryPart(version=2, name="state", offset=4, data=b"5", size_bytes=5)
    with pytest.raises(StorageError, match="it has 5 bytes, not 4"):
        there.receive(late)
    with pytest.raises(StorageError, match="bytes are needed"):
        there.receive(replace(late, offset=0, size_bytes=1 << 60))
    with pytest.raises(StorageError, match="a newer version has taken its place"):
        there.receive(replace(late, name="gone"))


def test_a_state_that_does_not_fit_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="bytes are needed") as caught:
        MemoryCheckpointStore("s3://b/run", tmp_path).write(1, 1 << 60, hold=())
    assert "--shm-size" in caught.value.remedy and not list(tmp_path.iterdir())


def test_shelves_whose_guard_is_gone_are_swept_up_and_no_others(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    for uri, pid in (("s3://b/gone", int(ended.stdout)), ("s3://b/here", 0)):
        shelf = MemoryCheckpointStore(uri, tmp_path)
        shelf.write(1, 1, hold=()).write("state", b"x")
        if pid:
            (shelf.folder / GUARD_FILE).write_text(json.dumps({**asdict(Owner.here()), "pid": pid}))
    (tmp_path / "trainwright-begun").mkdir()
    remove_stale_copies(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {shelf.folder.name, "trainwright-begun"}


def test_copies_are_open_to_nobody_else_whatever_was_there_before(tmp_path: Path) -> None:
    shelf = MemoryCheckpointStore("s3://b/run", tmp_path)
    shelf.folder.mkdir(mode=0o755)
    umask = os.umask(0)
    try:
        shelf.write(2, 5, hold=()).write("state", b"12345")
    finally:
        os.umask(umask)
    modes = {path.relative_to(tmp_path).name: path.stat().st_mode & 0o777 for path in shelf.folder.rglob("*")}
    assert modes == {GUARD_FILE: 0o600, "2": 0o700, "state": 0o600} and shelf.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("planted", ["a link", "a file", "another user's folder"])
def test_what_another_user_planted_is_neither_written_nor_read(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, elsewhere = tmp_path / "memory", tmp_path / "elsewhere"
    (elsewhere / "2").mkdir(parents=True)
    (elsewhere / "2" / "state").write_bytes(b"12345")
    memory.mkdir()
    shelf = MemoryCheckpointStore("s3://b/run", memory)
    if planted == "a link":
        shelf.folder.symlink_to(elsewhere)
    elif planted == "a file":
        shelf.folder.write_bytes(b"")
    else:
        elsewhere.rename(shelf.folder)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StorageError, match="not safe in this folder"):
        shelf.write(3, 5, hold=())
    with pytest.raises(StorageError, match="not safe in this folder"):
        shelf.read(2, "state")
    kept = shelf.folder if planted == "another user's folder" else elsewhere
    assert planted == "a file" or (kept / "2" / "state").read_bytes() == b"12345", "nothing was removed"


def test_links_in_place_of_files_are_not_followed(tmp_path: Path) -> None:
    shelf, victim = MemoryCheckpointStore("s3://b/run", tmp_path / "memory"), tmp_path / "victim"
    victim.write_bytes(b"mine")
    shelf.folder.parent.mkdir()
    writer = shelf.write(2, 5, hold=())
    (shelf.folder / "2" / "state").symlink_to(victim)
    with pytest.raises(StorageError):
        shelf.read(2, "state")
    writer.write("state", b"12345")
    assert victim.read_bytes() == b"mine" and shelf.read(2, "state") == b"12345"


def test_an_altered_copy_of_the_same_size_is_read_from_another_node(tmp_path: Path) -> None:
    shelf = MemoryCheckpointStore("s3://b/run", tmp_path)
    shelf.write(2, 5, hold=()).write("state", b"54321")
    reader = MemoryCheckpointReader(shelf, kept_state("here", "there"), "here", lambda node, version, name: b"12345")
    assert reader.read("state") == b"12345"
    with pytest.raises(StorageError, match="here: altered"):
        MemoryCheckpointReader(shelf, kept_state("here"), "here", PeerMemory().fetch).read("state")


@pytest.mark.parametrize("where", ["the folder", "the guard"])
def test_a_pipe_in_shared_memory_does_not_hold_the_sweep(where: str, tmp_path: Path) -> None:
    folder = tmp_path / f"trainwright-{os.geteuid()}-0123456789ab"
    if where == "the guard":
        folder.mkdir(mode=0o700)
    os.mkfifo(folder / GUARD_FILE if where == "the guard" else folder)
    signal.alarm(10)  # ends this process where it hangs
    remove_stale_copies(tmp_path)
    signal.alarm(0)
    assert folder.exists()


class Engine:
    """Copies a state of one file, or fails to."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error, self.checks = error, 0

    def check_unsaved(self) -> None:
        self.checks += 1

    def snapshot(self) -> StateSnapshot:
        if self._error is not None:
            raise self._error
        return StateSnapshot(step=7, size_bytes=5, state=np.zeros(5, np.uint8))

    def save(self, copy: StateSnapshot, writer: Any) -> None:
        writer.write("state", b"12345")


def copies_at(tmp_path: Path, peers: Any = None) -> StateCopies:
    copies = StateCopies(open_store(str(tmp_path / "runs")), "one", "n0", peers or PeerMemory())
    copies._memory = MemoryCheckpointStore("one", tmp_path)
    return copies


def test_a_snapshot_is_freed_before_it_is_sent_to_the_neighbour(tmp_path: Path) -> None:
    """Sending takes a tenth of the time, and the next snapshot may come before it ends."""
    alive, peers = list[bool](), MagicMock()
    copies, engine = copies_at(tmp_path, peers), Engine()
    copies.take(cast(Any, engine), m.SnapshotRequest(step=7, verbs=("keep",)))
    state = weakref.ref(copies._snapshots["keep"][0].state)
    peers.send.side_effect = lambda *_: alive.append(state() is not None)
    taken = copies.keep(m.MemoryCopyRequest(version=1, neighbours=(("n0", "n1"),)))
    assert alive == [False] and [item.node for item in taken.files] == ["n0", "n1"] and taken.step == 7


def test_only_a_snapshot_for_the_store_checks_what_it_leaves_out(tmp_path: Path) -> None:
    """The check reads the parameters on the device, and copies in memory are taken often."""
    copies, engine, checks = copies_at(tmp_path), Engine(), []
    for verbs in (("keep",), ("upload",), ("upload", "keep")):
        copies.take(cast(Any, engine), m.SnapshotRequest(step=7, verbs=cast(Any, verbs)))
        checks.append(engine.checks)
    assert checks == [0, 1, 2]


@pytest.mark.parametrize(
    ("error", "trouble"),
    [(None, ""), (PeerLost("half an update"), ""), (ValueError("no such variable"), "ValueError: no such variable")],
)
def test_a_worker_that_leaves_answers_whether_it_has_copied_its_state(
    tmp_path: Path, error: Exception | None, trouble: str
) -> None:
    taken = copies_at(tmp_path).copy_just_in_time(cast(Any, Engine(error)), m.MemoryCopyRequest(version=3))
    assert (len(taken.files), taken.step, taken.trouble) == ((0, -1, trouble) if error else (1, 7, ""))
    if error is None:
        kept = m.MemoryCheckpoint(version=3, step=7, files=taken.files)
        store = MemoryCheckpointStore("one", tmp_path)
        assert MemoryCheckpointReader(store, kept, "n0", MagicMock()).read("state") == b"12345"


@pytest.mark.parametrize(
    ("kind", "limit", "used"),
    [("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")],
    ids=["version 2", "version 1"],
)
def test_copies_leave_room_below_the_limits_of_control_groups(tmp_path: Path, kind: str, limit: str, used: str) -> None:
    own, job = tmp_path / "own", tmp_path / kind / "slurm" / "job_1"
    (job / "step_0").mkdir(parents=True)
    own.write_text(f"1:other:/\n0:{kind}:/slurm/job_1/step_0\n")
    assert memory_checkpoints.control_group_room(tmp_path, own) == math.inf
    for folder, allowed in ((job, "1000"), (job / "step_0", "max")):
        (folder / limit).write_text(f"{allowed}\n")
        (folder / used).write_text("900\n")
        (folder / "memory.stat").write_text("anon 500\ninactive_file 30\nactive_file 20\n")
    assert memory_checkpoints.control_group_room(tmp_path, own) == 100 + 50
    assert memory_checkpoints.control_group_room(tmp_path, tmp_path / "missing") == math.inf


def test_a_copy_that_a_control_group_does_not_allow_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_checkpoints, "control_group_room", lambda: 1000.0)
    store = MemoryCheckpointStore("memory://x", tmp_path)
    with pytest.raises(StorageError, match="1,000 are free"):
        store.write(1, 2000, ())
    store.write(1, 500, ())
