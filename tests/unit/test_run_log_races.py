"""Drivers in any interleaving and in real races: each number has one writer, and who was fenced never writes again."""

from __future__ import annotations

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.finished_runs import log_entries
from tests.support.run_logs import FAR, JOB, KINDS, RUN, log_of, memory_store, ref, store_of
from trainwright.core.errors import FencedError
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_log import LogEntry, RunLog


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return store_of(request.param, request, tmp_path)


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
        again = name == "release" and ("release", token) in self.expected
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
        entries = log_entries(self.store, RUN)
        assert [(entry.kind, entry.token) for entry in entries] == self.expected
        assert [entry.number for entry in entries] == list(range(1, len(entries) + 1))
        assert log_of(self.store).head() == (entries[-1] if entries else None)


@settings(max_examples=60)
@given(acts)
def test_no_interleaving_lets_two_drivers_write_in_memory(plan: list[Act]) -> None:
    model = Model(memory_store())
    for driver, name in plan:
        model.act(driver, name)
    model.check()


@settings(max_examples=15)
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

    def drive(pid: int) -> list[LogEntry]:
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
    stored = log_entries(store, RUN)
    assert sorted(told, key=lambda entry: entry.number) == stored
    assert [entry.number for entry in stored] == list(range(1, len(stored) + 1))
    assert [entry.token for entry in stored] == sorted(entry.token for entry in stored)
