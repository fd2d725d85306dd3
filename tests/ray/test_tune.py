"""`tw.tune`: the best setting, trials that are stopped early or fail, and a search whose process is killed."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch

import trainwright as tw
from tests.ray import tuned_world as world
from tests.ray.tuned_world import BEST, NAMES, RATES
from tests.support import processes
from tests.support.finished_runs import final_state, told
from trainwright.core import events
from trainwright.core.errors import RunConflict
from trainwright.tuning.tuner import TuneResult

GOOD, STOPPED, FAILED, LAST = NAMES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tuned")


@pytest.fixture(scope="module")
def found(folder: Path, ray_cluster: None) -> TuneResult:
    return world.search(str(folder))


def files(folder: Path, *runs: str) -> dict[Path, int]:
    """Of runs, with when each was written."""
    return {path: path.stat().st_mtime_ns for run in runs for path in (folder / "runs" / run).rglob("*")}


def figures(found: TuneResult) -> list[tuple[object, ...]]:
    return [(each.run, each.params, repr(each.value), each.step, each.state) for each in found.trials]


def test_the_best_trial_is_found_and_bad_ones_are_stopped_after_an_evaluation(found: TuneResult, folder: Path) -> None:
    assert [each.run for each in found.trials] == list(NAMES)
    assert [each.params for each in found.trials] == [{"lr": rate} for rate in RATES]
    assert [each.state for each in found.trials] == ["done", "stopped", "failed", "done"]
    assert [each.step for each in found.trials] == [42, 7, 0, 42]
    assert found.best.params == {"lr": BEST} and found.table["run"][0] == found.best.run == LAST
    assert "the loss became nan in step 2" in found.trials[2].error
    model, data = tw.load_model(found.best.job).eval(), world.DATA
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(torch.tensor(data["x"])), torch.tensor(data["y"]))
    assert found.best.value == pytest.approx(float(loss), rel=1e-6)
    assert found.best.value == min(each.metrics["loss"] for each in told(folder / "runs", LAST, events.Evaluated))


def test_a_changed_job_is_refused(found: TuneResult) -> None:
    job = found.best.job.replace(name="tuned", clip_norm=1.0)
    with pytest.raises(RunConflict, match=r"clip_norm: None -> 1"):
        tw.tune(job, {"batch_size": [32]}, scheduler=None)


@pytest.mark.soak
def test_a_killed_search_continues_as_if_unbroken(found: TuneResult, folder: Path, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    context = multiprocessing.get_context("spawn")  # a fork server may be older than the cluster's token
    process = context.Process(target=world.drive, args=(processes.address(), str(tmp_path)))
    process.start()
    try:
        processes.wait_for(lambda: hold.with_suffix(".reached").exists() or not process.is_alive())
        assert process.is_alive(), "the search ended before it was killed"
        processes.wait_for(lambda: bool(told(tmp_path / "runs", LAST, events.Checkpointed)))
    finally:
        process.kill()
        process.join(30)
    ended = files(tmp_path, GOOD, STOPPED)
    hold.unlink()
    again = world.search(str(tmp_path))
    assert figures(again) == figures(found)
    assert files(tmp_path, GOOD, STOPPED) == ended, "a trial that had ended was touched"
    assert len(told(tmp_path / "runs", LAST, events.Formed)) == 2
    for run in (GOOD, LAST):
        assert final_state(tmp_path / "runs", run) == final_state(folder / "runs", run)
