"""The kills of the parameter server tests come in order, and none while a process cannot answer an interrupt."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.server_jobs import Strike, Striker
from trainwright.core import events
from trainwright.core.topology import Generation, Group, Peer
from trainwright.driver import dynamic_members
from trainwright.driver import messages as m

GENERATION = Generation(token=1, number=1)
PEERS = tuple(Peer(rank=rank, address=dynamic_members.NO_ADDRESS) for rank in range(4))


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Processes and signals, instead of their deaths."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: found.append((pid, number)))
    return found


def steps(*numbers: int) -> events.Steps:
    return events.Steps(
        generation=1, step=[*numbers], loss=[], learning_rate=[], gradient_norm=[], samples=[], step_s=[], wait_s=[]
    )


def striker(folder: Path, *plan: Strike) -> Striker:
    """Of four ranks whose processes are 100 to 103."""
    made = Striker(plan=[*plan], folder=folder)
    for rank in range(4):
        group = Group(generation=GENERATION, rank=rank, peers=PEERS)
        made.carried(m.CallWorker(worker=rank, generation=GENERATION, verb="form", argument=group))
        made.carried(m.EmitEvent(event=events.Placed(worker=rank, node="here", pid=100 + rank)))
    return made


def test_workers_wait_from_the_step_on_until_a_checkpoint_is_there(
    tmp_path: Path, killed: list[tuple[int, int]]
) -> None:
    """The run cannot end before its first strike, however long the first checkpoint takes."""
    made = striker(tmp_path, Strike(step=6, ranks=(2,)))
    made.told(steps(1, 5))
    assert not (tmp_path / "held").exists()
    made.told(steps(6, 10))
    assert (tmp_path / "held").read_text().split() == ["100", "101", "102", "103"] and not killed
    made.carried(m.EmitEvent(event=events.Checkpointed(step=5, path="", size_bytes=0, blocked_s=0, seconds=0)))
    assert killed == [(102, signal.SIGKILL)] and not made.plan


def test_no_strike_while_workers_wait_for_a_new_one(tmp_path: Path, killed: list[tuple[int, int]]) -> None:
    """A server's death then would end the generation, and the rank that waits would be taken for hung."""
    made = striker(tmp_path, Strike(step=6, ranks=(2,)), Strike(step=13, ranks=(1,)))
    made.saved = True
    made.told(steps(21))
    made.told(steps(22))
    assert killed == [(102, signal.SIGKILL)] and not (tmp_path / "gate").exists()
    made.carried(m.EmitEvent(event=events.Joined(generation=1, worker=4, rank=2, node="here", former=2, seconds=1.0)))
    made.told(steps(23))
    assert killed == [(102, signal.SIGKILL), (101, signal.SIGKILL)] and (tmp_path / "gate").exists()
