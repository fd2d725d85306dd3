"""Workers that the fork server of their node forks: the same training, also where the server is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
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


# That a standby is up before the kill.
STANDBY = {7: torch_jobs.Awaited(kind=events.Placed, spare=True)}


class Servers:
    """The run that has a fork server started, and the server that is there now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Until the second standby is up: Ray would give its process to the next run, however it was started.
        ready = STANDBY | {20: torch_jobs.Awaited(kind=events.Placed, number=2, spare=True)}
        self.forked, servers = fit(folder / "1" / "runs", 8, spares=1, awaits=ready)
        (self.current,) = servers


@pytest.fixture(scope="module")
def servers(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A fork server that the first standby of a run had started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINWRIGHT_FORK_SERVER", "")
        patch.setattr("trainwright.runtime.forked_workers._AFTER_S", 1000.0)  # only a standby has one started
        patch.setattr("trainwright.runtime.forked_workers._STARTED_S", 1000.0)  # on a busy machine imports take long
        found = Servers(tmp_path_factory.mktemp("forked"))
        yield found
        os.kill(found.current, signal.SIGKILL)


def test_the_first_standby_is_the_first_process_that_is_forked(
    servers: Servers, unbroken: Callable[[int], State]
) -> None:
    assert servers.forked[:3] == [False, False, True]
    assert final_state(servers.folder / "1" / "runs", "faulty") == unbroken(2)


def test_a_later_run_finds_the_server(servers: Servers, unbroken: Callable[[int], State]) -> None:
    forked, used = fit(servers.folder / "2" / "runs", 8, spares=0)
    assert all(forked) and used == {servers.current}
    assert final_state(servers.folder / "2" / "runs", "faulty") == unbroken(2)


def test_where_the_server_is_gone_workers_import_by_themselves_and_a_standby_has_it_started_again(
    servers: Servers, unbroken: Callable[[int], State]
) -> None:
    former = servers.current
    os.kill(former, signal.SIGKILL)
    forked, used = fit(servers.folder / "3" / "runs", 8, spares=1, awaits=STANDBY)
    assert forked[:2] == [False, False] and forked[2] and former not in used
    (servers.current,) = used
    assert final_state(servers.folder / "3" / "runs", "faulty") == unbroken(2)
