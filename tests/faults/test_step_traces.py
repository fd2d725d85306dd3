"""Traces of chosen steps under the driver: a file of each rank, of these steps alone; the run keeps its bits."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

import trainwright as tw
from tests.support import keras_jobs, torch_jobs
from tests.support.finished_runs import State, final_state, told
from trainwright.core import events

PHASES = {"data wait", "forward", "backward", "reduce", "optimizer"}


def traces(folder: Path, ending: str = ".trace.json.gz") -> dict[tuple[int, int, int], Path]:
    """The file of each trace that the run told of, by rank and by first and last step."""
    written: Any = told(folder, "faulty", events.TraceWritten)
    found = {(event.rank, event.first, event.last): folder / "faulty" / event.path for event in written}
    assert sorted(found.values()) == sorted((folder / "faulty" / "profile").rglob(f"*{ending}")), "no other file"
    return found


def names(file: Path) -> list[str]:
    """The names of all events of a Chrome trace."""
    return [str(event.get("name")) for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]


def steps_of(file: Path) -> list[int]:
    """The numbers of the steps of a trace, in order; a GPU's trace names each again."""
    return sorted({int(name.partition("#")[2]) for name in names(file) if name.startswith("ProfilerStep#")})


def notes(folder: Path) -> list[str]:
    written: Any = told(folder, "faulty", events.Noted)
    return [note.text for note in written]


def test_each_rank_writes_the_chosen_steps_and_the_run_keeps_its_bits(
    folder: Path, unbroken: Callable[[int], State]
) -> None:
    """The steps lie on both sides of the checkpoint of step 5; the last ones are those of the run."""
    run = tw.fit(torch_jobs.job(folder, profile="4:8"))
    assert run.state == "done"
    assert final_state(folder, "faulty") == unbroken(2)
    found = traces(folder)
    assert sorted(found) == [(0, 4, 7), (1, 4, 7)]
    for file in found.values():
        assert steps_of(file) == [4, 5, 6, 7]
        assert set(names(file)) >= PHASES
    page = Path(str(run.report).removeprefix("file://")).read_text(encoding="utf-8")
    assert all(f'href="profile/steps-4-7/rank-{rank}.trace.json.gz"' in page for rank in range(2))


def test_steps_up_to_the_end_of_the_run_are_written_before_it_ends(folder: Path) -> None:
    tw.fit(torch_jobs.job(folder, profile="26:40"))
    assert sorted(traces(folder)) == [(0, 26, 27), (1, 26, 27)]
    assert any(text.startswith("profile=26:40: only steps 26 to 27 are traced") for text in notes(folder))


def test_a_kill_among_the_steps_drops_what_was_recorded_and_the_rest_is_traced(
    folder: Path, unbroken: Callable[[int], State]
) -> None:
    kill = torch_jobs.Kill(rank=1, step=12, point="synchronisation", folder=str(folder.parent))
    run = tw.fit(torch_jobs.job(folder, (kill,), profile="11:17"))
    assert run.state == "done" and kill.mark.exists()
    assert final_state(folder, "faulty") == unbroken(2)
    found = traces(folder)
    assert sorted(found) == [(0, 13, 16), (1, 13, 16)]
    assert all(steps_of(file) == [13, 14, 15, 16] for file in found.values())
    assert any("the traces of steps 11 to 12 were dropped" in text for text in notes(folder))


def test_sharded_parameters(ray_cluster: None, folder: Path) -> None:
    assert tw.fit(torch_jobs.job(folder, profile="4:8", strategy="sharded")).state == "done"
    found = traces(folder)
    assert sorted(found) == [(0, 4, 7), (1, 4, 7)]
    assert all(steps_of(file) == [4, 5, 6, 7] and set(names(file)) >= PHASES for file in found.values())


def stages() -> nn.Module:
    return nn.Sequential(
        nn.Linear(torch_jobs.WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, torch_jobs.CLASSES)
    )


def test_a_pipeline(ray_cluster: None, folder: Path) -> None:
    own = {"step": None, "model": stages, "optimizer": torch_jobs.momentum, "loss": torch_jobs.cross_entropy}
    plan = {"plan": "pp=2,schedule=1f1b,accumulation=4", "inputs": "x", "targets": "y"}
    assert tw.fit(torch_jobs.job(folder, profile="4:6", **own, **plan)).state == "done"
    found = traces(folder)
    assert sorted(found) == [(0, 4, 5), (1, 4, 5)]
    for file in found.values():
        assert steps_of(file) == [4, 5]
        assert names(file).count("forward") == names(file).count("backward") == 2 * 4


def test_asynchronous_workers_trace_their_own_parts_of_the_steps(ray_cluster: None, folder: Path) -> None:
    job = torch_jobs.job(folder, profile="4:8", strategy="parameter_server", consistency="async")
    assert tw.fit(job).state == "done"
    found = traces(folder)
    assert {rank for rank, _, _ in found} <= {1, 2}, "rank 0 is the server"
    assert {step for file in found.values() for step in steps_of(file)} == {4, 5, 6, 7}
    assert all(set(names(file)) >= {"forward", "backward", "pull", "push"} for file in found.values())


def test_tensorflow_writes_the_files_of_tensorboard(ray_cluster: None, folder: Path) -> None:
    run = tw.fit(keras_jobs.job(folder, profile="4:6"))
    assert run.state == "done"
    found = traces(folder, ".xplane.pb")
    assert sorted(found) == [(0, 4, 5), (1, 4, 5)]
    for rank, file in enumerate(found[rank, 4, 5] for rank in range(2)):
        assert file == folder / "faulty/profile/plugins/profile/steps-4-5" / f"rank-{rank}.xplane.pb"
        assert b"step_num" in file.read_bytes()
