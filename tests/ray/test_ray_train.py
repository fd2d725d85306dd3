"""A job in a train function of Ray Train's: the same result in its seats, its figures there, and its failures."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray import tune
from ray.train import DataConfig, FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
from ray.train.tensorflow import TensorflowTrainer
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback
from ray.util.placement_group import placement_group_table
from safetensors.numpy import load

import trainwright as tw
from tests.support import keras_jobs, torch_jobs
from tests.support.finished_runs import State, final_state, told
from tests.support.processes import wait_for
from trainwright.core import events
from trainwright.integrations.ray_train import POINTER_FILE

pytestmark = pytest.mark.usefixtures("ray_cluster")

SEATS = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1})  # all that the cluster has
WEIGHTS = ("model.safetensors", "average.safetensors")
KILLED = 12  # steps of which the checkpoint after the tenth is stored


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Train looks at its workers oftener than every 2 seconds, and leaves out what is not looked at here."""
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    monkeypatch.setenv("RAY_TRAIN_METRICS_ENABLED", "0")
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")


def trainer(kind: Any, function: Callable[[], Any], folder: Path, failures: int = 0) -> Any:
    config = RunConfig(
        name="ray-train", storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=failures)
    )
    return kind(function, scaling_config=SEATS, run_config=config)


def left() -> list[str]:
    """Actors of ours that have a name, and placement groups that hold something."""
    listed = ray.util.list_named_actors(all_namespaces=True)
    table: dict[str, Any] = placement_group_table()
    groups = [f"group {number}" for number, facts in table.items() if facts["state"] != "REMOVED"]
    return [item["name"] for item in listed if item["namespace"] == "trainwright"] + groups


def torch_job(folder: Path, **fields: Any) -> tw.Job:
    return torch_jobs.job(folder, evaluate=tw.datasets.table(torch_jobs.data()), **fields)


@pytest.fixture(scope="module")
def unbroken(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> State:
    """The same run outside of Ray Train."""
    folder = tmp_path_factory.mktemp("plain")
    tw.fit(torch_job(folder))
    return final_state(folder, "faulty")


@pytest.mark.soak
@pytest.mark.parametrize("processes", [None, "own"])
def test_torch(tmp_path: Path, unbroken: State, processes: Any) -> None:
    job = torch_job(tmp_path, workers=None)

    def train() -> None:
        run = tw.fit(job, processes=processes)
        found = {"state": run.state, "metrics": run.metrics, "workers": run.plan.workers, "pid": os.getpid()}
        (tmp_path / f"rank-{ray.train.get_context().get_world_rank()}.json").write_text(json.dumps(found))

    result = trainer(TorchTrainer, train, tmp_path).fit()
    assert final_state(tmp_path, "faulty") == unbroken
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    pids = {first.pop("pid"), second.pop("pid")}
    assert first == second and first["state"] == "done" and first["workers"] == 2
    assert (pids == process_ids(tmp_path)) is (processes is None)
    evaluation = {f"evaluation/{name}": value for name, value in first["metrics"].items()}
    assert evaluation and evaluation.items() <= result.metrics.items()
    assert result.metrics["step"] == 27 and result.metrics["epoch"] == 3
    assert reported_weights(result) == {name: unbroken.files[name] for name in WEIGHTS}
    assert left() == []


def process_ids(folder: Path) -> set[int]:
    """Processes that trained as ranks."""
    placed: Any = told(folder, "faulty", events.Placed)
    return {process.pid for process in placed}


def reported_weights(result: Any) -> dict[str, bytes]:
    """Files of the checkpoint that Ray Train has, beside the pointer to that of the last step."""
    with result.checkpoint.as_directory() as folder:
        files = {file.name: file.read_bytes() for file in Path(folder).iterdir() if not file.name.startswith(".")}
    pointer = json.loads(files.pop(POINTER_FILE))
    assert pointer["step"] == result.metrics["step"]
    assert Path(pointer["checkpoint"].removeprefix("file://"), "MANIFEST.json").exists()
    return files


@pytest.mark.soak
@pytest.mark.parametrize("processes", [None, "own"])
def test_tensorflow(tmp_path: Path, processes: Any) -> None:
    tw.fit(keras_jobs.job(tmp_path / "plain", epochs=1))
    job = keras_jobs.job(tmp_path / "inside", epochs=1, workers=None)

    def train() -> None:
        assert "TF_CONFIG" in os.environ
        tw.fit(job, processes=processes)
        (tmp_path / f"pid-{os.getpid()}").touch()

    result = trainer(TensorflowTrainer, train, tmp_path).fit()
    final = final_state(tmp_path / "inside", "faulty")
    assert final == final_state(tmp_path / "plain", "faulty") and result.metrics["step"] == 9
    pids = {int(file.name.removeprefix("pid-")) for file in tmp_path.glob("pid-*")}
    assert (pids == process_ids(tmp_path / "inside")) is (processes is None)
    weights = {name: data for name, data in final.files.items() if name.startswith(("state.index", "state.data"))}
    assert len(weights) == 2 and reported_weights(result) == weights
    (start,) = told(tmp_path / "inside", "faulty", events.RunStarted)
    assert any("TF_CONFIG" in note for note in start.plan["notes"])  # type: ignore[attr-defined]
    assert left() == []


@pytest.mark.parametrize(
    ("victim", "processes"), [(0, None), (1, None), pytest.param(0, "own", marks=pytest.mark.soak)]
)
def test_a_lost_train_worker_and_a_failure_after_the_end_repeat_nothing(
    tmp_path: Path, unbroken: State, victim: int, processes: Any
) -> None:
    """A process of Ray Train is killed in the middle; then the train function fails once the run is done.

    Rank 0's process also drives the run.
    """
    pid, struck, over = (tmp_path / name for name in ("pid", "struck", "over"))
    paced = torch_jobs.make_step((), str(tmp_path))

    def step(model: Any, batch: Any) -> Any:
        net = getattr(model, "module", model)
        if net.training and int(net.steps) == KILLED and torch_jobs.rank() == victim and not struck.exists():
            struck.touch()
            os.kill(int(pid.read_text()), signal.SIGKILL)
            threading.Event().wait()  # until Ray Train's room goes, and this process with it
        return paced(model, batch)

    job = torch_job(tmp_path, step=step)

    def train() -> None:
        rank = ray.train.get_context().get_world_rank()
        if rank == victim:
            pid.write_text(str(os.getpid()))
        run = tw.fit(job, fresh=True, processes=processes)
        assert run.state == "done"
        (tmp_path / f"pid-{os.getpid()}").touch()
        if not over.exists() and rank == 0:
            over.touch()
            raise RuntimeError("after the end")

    result = trainer(TorchTrainer, train, tmp_path, failures=2).fit()
    assert struck.exists() and over.exists()
    assert final_state(tmp_path, "faulty") == unbroken
    assert result.metrics["step"] == 27
    starts: Any = told(tmp_path, "faulty", events.RunStarted)
    assert len(starts) == 2, "what was done is not done again"
    trained = process_ids(tmp_path)
    finished = {int(file.name.removeprefix("pid-")) for file in tmp_path.glob("pid-*")}
    assert len(trained & finished) == (0 if processes else 2), "Ray Train's processes trained"
    for pid in trained:
        wait_for(lambda pid=pid: not Path(f"/proc/{pid}").exists(), 20)
    assert left() == []


def test_a_wrong_job_is_told_once(tmp_path: Path) -> None:
    job = torch_job(tmp_path, workers=3)
    with pytest.raises(WorkerGroupError, match="the job asks for 3 workers, and Ray Train started 2") as caught:
        trainer(TorchTrainer, lambda: tw.fit(job), tmp_path).fit()
    assert list(caught.value.worker_failures) == [0]
    assert "set ScalingConfig(num_workers=3)" in str(caught.value)
    assert left() == []


@pytest.mark.soak
def test_ray_tune_over_a_trainer(tmp_path: Path) -> None:
    """Each trial runs a trainer of one worker, as Ray Tune's documentation says; the metrics are those of its run."""

    def trial(config: dict[str, Any]) -> None:
        job = torch_job(tmp_path / config["name"], workers=1, epochs=config["epochs"])
        run = RunConfig(name=config["name"], storage_path=str(tmp_path / "ray"), callbacks=[TuneReportCallback()])
        seat = ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1})

        def train() -> None:
            tw.fit(job)

        TorchTrainer(train, scaling_config=seat, run_config=run).fit()

    space = {"trial": tune.grid_search([{"name": "short", "epochs": 1}, {"name": "long", "epochs": 2}])}
    tuner = tune.Tuner(
        lambda config: trial(config["trial"]),
        param_space=space,
        tune_config=tune.TuneConfig(max_concurrent_trials=1),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    )
    results = tuner.fit()
    steps = {result.config["trial"]["name"]: result.metrics["step"] for result in results}
    assert not results.errors and steps == {"short": 9, "long": 18}
    assert all(Path(result.metrics["checkpoint_path"]).exists() for result in results)


@pytest.mark.parametrize(("divided", "streamed"), [("all", True), pytest.param([], False, marks=pytest.mark.soak)])
def test_a_shard_of_ray_train_stands_for_its_data_set(tmp_path: Path, divided: Any, streamed: bool) -> None:
    rows = [{name: column[number] for name, column in torch_jobs.data().items()} for number in range(torch_jobs.ROWS)]
    dataset = ray.data.from_items(rows).map(lambda row: row)
    dataset = dataset if streamed else dataset.materialize()
    options: dict[str, Any] = {"workers": 1, "epochs": 1}
    tw.fit(torch_jobs.job(tmp_path / "plain", train=dataset, **options))

    def train() -> None:
        tw.fit(torch_jobs.job(tmp_path / "inside", train=ray.train.get_dataset_shard("train"), **options))

    TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(tmp_path / "ray")),
        datasets={"train": dataset},
        dataset_config=DataConfig(datasets_to_split=divided),
    ).fit()
    found, expected = (
        load(final_state(tmp_path / name, "faulty").files["model.safetensors"]) for name in ("inside", "plain")
    )
    assert found.keys() == expected.keys()
    for name, array in expected.items():  # threads differ, and with them the order of sums
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-7, err_msg=name)
