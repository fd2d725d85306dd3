"""A worker's outbox: what a server keeps where it lies is not written before its round is applied."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.strategies.ps.parameter_client import SendBuffer

SIZE = 100


class Opened:
    """Memory that was opened, the newest last."""

    def __init__(self) -> None:
        self.memories: list[bytearray] = []

    def __call__(self, size_bytes: int) -> memoryview:
        self.memories.append(bytearray(size_bytes))
        return memoryview(self.memories[-1])


@given(st.lists(st.sampled_from(["push", "drop", "apply", "break"]), max_size=30))
def test_what_is_kept_stays_as_it_is_until_its_round_is_applied(turns: list[str]) -> None:
    opened = Opened()
    outbox = SendBuffer(opened, SIZE)
    kept: dict[int, tuple[memoryview, bytes]] = {}
    version = at = 0
    for number, turn in enumerate(turns):
        outbox.view[:] = content = bytes([number + 1]) * SIZE
        if turn == "apply":
            version = at
            kept.clear()
            outbox.applied(version)
        elif turn == "break":
            outbox.reopen(opened)
            assert outbox.view == content
        elif turn == "drop":
            outbox.pushed(opened, kept=None, copied=False)
        else:
            here, keeps = outbox.view, outbox.keeps
            assert here == memoryview(opened.memories[-1])[outbox.offset :][:SIZE]
            if keeps:
                kept[at] = here, content
            outbox.pushed(opened, kept=at if keeps else None, copied=not keeps)
            at += 1
        assert all(memory == before for memory, before in kept.values())


def test_a_connection_that_fails_as_it_is_opened_again_leaves_the_next_push_as_it_is() -> None:
    opened = Opened()
    outbox = SendBuffer(opened, SIZE)
    outbox.pushed(opened, kept=None, copied=True)
    outbox.view[:] = b"a" * SIZE
    outbox.pushed(opened, kept=0, copied=False)
    outbox.view[:] = content = b"b" * SIZE

    def broken(size_bytes: int) -> memoryview:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        outbox.reopen(broken)
    outbox.reopen(opened)
    assert outbox.view == content


def test_a_sync_worker_has_its_pushes_copied_once_and_then_left_where_they_lie() -> None:
    opened = Opened()
    outbox = SendBuffer(opened, SIZE)
    left = []
    for at in range(5):
        left.append(outbox.keeps)
        outbox.pushed(opened, kept=at if left[-1] else None, copied=not left[-1])
        outbox.applied(at + 1)
    assert left == [False, True, True, True, True]
    assert len(opened.memories) == 2
    assert len(opened.memories[1]) >= 2 * SIZE
