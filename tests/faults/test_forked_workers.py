"""Workers that the fork server of their node forks: the same training, also where the server is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from tests.support import torch_jobs
from tests.support.finished_runs import State, final_state, told
from trainwright.core import events


def parent_of(process: int | str) -> tuple[int, str]:
    """Return the id and the command of a process's parent."""
    parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return parent, Path(f"/proc/{parent}/cmdline").read_text().replace("\0", " ")


def is_fork_server(command: str) -> bool:
    """Whether that is the command of a node's fork server, not of the tests'."""
    return "fork_server.py serve " in command and "trainwright-tests-" not in command


def fit(folder: Path, kill_step: int, **fields: Any) -> tuple[list[bool], set[int]]:
    """Train with a kill of rank 1; return of each process, in order, whether it was forked, and the ids of servers."""
    kills = (torch_jobs.Kill(rank=1, step=kill_step, folder=str(folder.parent)),)
    folder.parent.mkdir(exist_ok=True)
    parents = folder.parent / "parents"
    parents.mkdir()

    def model() -> Any:
        parent, command = parent_of(os.getpid())
        (parents / str(os.getpid())).write_text(f"{parent} {command}")
        return torch_jobs.make_model(kills)()

    tw.fit(torch_jobs.job(folder, kills, model=model, **fields))
    assert kills[0].mark.exists()
    placed: Any = told(folder, "faulty", events.Placed)
    lines = [(parents / str(event.pid)).read_text() for event in placed]
    servers = {int(line.partition(" ")[0]) for line in lines if is_fork_server(line)}
    return [is_fork_server(line) for line in lines], servers


def test_workers_are_forked_and_train_as_others_do(
    ray_cluster: None, tmp_path: Path, unbroken: Callable[[int], State], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = unbroken(2)
    monkeypatch.setenv("TRAINWRIGHT_FORK_SERVER", "")
    monkeypatch.setattr("trainwright.runtime.forked_workers._AFTER_S", 1000.0)  # only a standby has one started
    monkeypatch.setattr("trainwright.runtime.forked_workers._STARTED_S", 1000.0)  # on a busy machine imports take long
    last = {7: torch_jobs.Awaited(kind=events.Placed, spare=True)}
    # Until the second standby is up: Ray would give its process to the next run, however it was started.
    ready = last | {20: torch_jobs.Awaited(kind=events.Placed, number=2, spare=True)}

    forked, servers = fit(tmp_path / "1" / "runs", 8, spares=1, awaits=ready)
    assert forked[:3] == [False, False, True] and len(servers) == 1, "the first standby is the first one that is forked"
    assert final_state(tmp_path / "1" / "runs", "faulty") == expected
    (server,) = servers

    forked, servers = fit(tmp_path / "2" / "runs", 8, spares=0)
    assert all(forked) and servers == {server}, "a later run finds the server"
    assert final_state(tmp_path / "2" / "runs", "faulty") == expected

    os.kill(server, signal.SIGKILL)
    forked, servers = fit(tmp_path / "3" / "runs", 8, spares=1, awaits=last)
    assert forked[:2] == [False, False], "workers import by themselves where the server is gone"
    assert forked[2] and server not in servers, "a standby has it started again"
    assert final_state(tmp_path / "3" / "runs", "faulty") == expected
    for each in servers:
        os.kill(each, signal.SIGKILL)
