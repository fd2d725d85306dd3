"""Parameter servers under kills, torch's and TensorFlow's: workers cost little, the rest goes back to a cut."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

import trainwright as tw
from tests.support import processes, server_jobs, torch_jobs
from tests.support.finished_runs import final_state, told
from tests.support.server_jobs import Strike
from trainwright.core import events
from trainwright.runtime import worker_registry
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog

BAND = 0.1  # of accuracy, between runs of which no two are alike
KILLED = {
    "torch": (Strike(step=6, ranks=(2,)), Strike(step=13, ranks=(1,)), Strike(step=20, ranks=(0, 3))),
    "tensorflow": (
        Strike(step=6, ranks=(3,)), Strike(step=13, ranks=(4,), number=signal.SIGSTOP),
        Strike(step=18, ranks=(1,), number=signal.SIGSTOP),
        Strike(step=23, ranks=(0,)), Strike(step=28, ranks=(0, 2)),
    ),
}  # fmt: skip
"""A worker, a server, both frozen, TensorFlow's chief, and two at once of which one is a server."""
SILENT_S, BEAT_S = 6.0, 1.0  # for the frozen ones, in place of half a minute


@pytest.fixture(scope="module")
def unbroken(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The folder of an unbroken run."""
    folders: dict[tuple[str, str], Path] = {}

    def run(framework: str, consistency: str) -> Path:
        key = framework, consistency
        if key not in folders:
            folder = tmp_path_factory.mktemp("unbroken") / "runs"
            tw.fit(server_jobs.job(folder, framework, consistency=consistency))
            folders[key] = folder
        return folders[key]

    return run


CASES = [("torch", "sync"), ("torch", "async"), ("torch", "async(pushes=2)"), ("tensorflow", "async")]


@pytest.mark.parametrize(("framework", "consistency"), [*CASES[:-1], pytest.param(*CASES[-1], marks=pytest.mark.soak)])
def test_processes_are_killed_and_frozen(
    framework: str,
    consistency: str,
    folder: Path,
    unbroken: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kills = KILLED[framework]
    tolerated = sum(min(kill.ranks) >= server_jobs.FIRST_WORKER[framework] for kill in kills)
    monkeypatch.setattr(worker_registry, "SILENT_S", SILENT_S)
    monkeypatch.setattr(worker_registry, "BEAT_S", BEAT_S)
    with server_jobs.striking(folder, *kills) as striker:
        run = tw.fit(server_jobs.job(folder, framework, consistency=consistency, gate=10 * (framework == "tensorflow")))
    assert run.state == "done" and not striker.plan
    joined: Any = told(folder, "faulty", events.Joined)
    assert joined[0].rank == kills[0].ranks[0] and joined[0].generation == 1, "a worker's death ends no generation"
    formed: Any = told(folder, "faulty", events.Formed)
    assert len(formed) == 1 + len(kills) - tolerated and {event.source for event in formed[1:]} == {"checkpoint"}
    check_frozen(folder, [kill for kill in kills if kill.number == signal.SIGSTOP])
    assert not [pid for pid in striker.struck if Path(f"/proc/{pid}").exists()], "a frozen process is ended"
    check_end(framework, consistency, folder, unbroken)


def test_a_server_that_dies_within_its_save_leaves_no_checkpoint(
    folder: Path, unbroken: Callable[[str, str], Path]
) -> None:
    """Half of its shard is written, where it belongs; the log never names it, and all go on from the one before."""
    kill = torch_jobs.Kill(rank=1, step=10, point="upload", folder=str(folder.parent))
    run = tw.fit(server_jobs.job(folder, "torch", consistency="sync", model=server_jobs.Torn(kill=kill)))
    assert run.state == "done" and kill.mark.exists()
    died, *_ = told(folder, "faulty", events.Failed)
    saved: Any = [each for each in told(folder, "faulty", events.Checkpointed) if each.time_s < died.time_s]
    formed: Any = told(folder, "faulty", events.Formed)
    assert [(event.source, event.step) for event in formed[1:]] == [("checkpoint", saved[-1].step)]
    check_end("torch", "sync", folder, unbroken)


@pytest.mark.parametrize(
    ("framework", "consistency"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.soak) for case in CASES[1:])]
)
def test_the_driver_is_killed(
    framework: str, consistency: str, folder: Path, tmp_path: Path, unbroken: Callable[[str, str], Path]
) -> None:
    """Another one goes on: with the processes that are there, where these may form another group."""
    file = tmp_path / "job.py"
    file.write_text(
        "from pathlib import Path\nfrom tests.support import server_jobs\n"
        f"job = server_jobs.job(Path({str(folder)!r}), {framework!r}, consistency={consistency!r}, gate=18)\n"
    )
    with processes.trainwright("fit", file, cluster=processes.address()) as driver:
        processes.wait_until(lambda: committed(folder) > 0, driver)
        processes.kill(driver)
    saved = committed(folder)
    (tmp_path / "gate").touch()
    run = tw.fit(server_jobs.job(folder, framework, consistency=consistency, gate=18), resume=True)
    assert run.state == "done"
    formed: Any = told(folder, "faulty", events.Formed)
    assert len(formed) == 2 and formed[1].step >= saved
    assert formed[1].survivors == (4 if framework == "torch" else 0)
    check_end(framework, consistency, folder, unbroken)


def check_frozen(folder: Path, strikes: Sequence[Strike]) -> None:
    """The report says which ranks did not answer, in the generation that went on without them."""
    failed: Any = told(folder, "faulty", events.Failed)
    silent = [(event.generation, event.rank) for event in failed if "did not answer for" in event.cause]
    assert silent == [(1, rank) for strike in strikes for rank in strike.ranks]


def check_end(framework: str, consistency: str, folder: Path, unbroken: Callable[[str, str], Path]) -> None:
    """Each step was counted, and the end is as it would have been."""
    state, total = final_state(folder, "faulty"), server_jobs.steps(framework)
    steps: Any = told(folder, "faulty", events.Steps)
    assert state.step == total and {step for event in steps for step in event.step} == set(range(1, total + 1))
    if framework == "tensorflow":
        ends = [told(at, "faulty", events.Evaluated)[-1] for at in (folder, unbroken(framework, consistency))]
        broken, whole = (event.metrics["accuracy"] for event in ends)  # type: ignore[attr-defined]
        assert whole > 0.5 and abs(broken - whole) < BAND
        return
    if consistency == "sync":
        assert state == final_state(unbroken(framework, consistency), "faulty")
    seen = seen_of(folder)
    rows = server_jobs.BATCH / (2 if consistency == "async" else 1)  # of an update
    counted = server_jobs.EPOCHS[framework] * server_jobs.RATE / rows
    np.testing.assert_allclose(-seen[: server_jobs.ROWS], counted, rtol=0, atol=1e-12)


def seen_of(folder: Path) -> Any:
    """The account of samples."""
    files = final_state(folder, "faulty").files
    tensors = (
        value for name, content in files.items() if name.endswith(".safetensors") for value in load(content).values()
    )
    return next(value for value in tensors if value.shape == (torch_jobs.ROWS,))


def committed(folder: Path) -> int:
    """Step of the newest checkpoint that the log names."""
    entry = RunLog(open_store(str(folder)), "faulty").head() if folder.exists() else None
    return entry.checkpoints[-1].step if entry and entry.checkpoints else 0
