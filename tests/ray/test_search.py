"""A search: its runs side by side, the student alone beside them, and what is confirmed on the test set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainwright as tw
from tests.support import torch_jobs
from tests.support.distillation_jobs import accuracy, job, narrow, wide
from tests.support.finished_runs import told
from tests.support.keras_distillation import keras_linear, keras_loss, keras_sgd
from trainwright.core import events
from trainwright.core.errors import RunConflict, TrainwrightError
from trainwright.distillation.hyperparameter_search import SearchJobs, SearchResult
from trainwright.runtime.takeover import NAMESPACE

SEED, SHARE = 5, 0.25


def build_teacher() -> torch.nn.Module:
    """The answer, softened: no run is needed for a good teacher."""
    model = wide()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        rows = torch.arange(torch_jobs.CLASSES)
        model[0].weight[rows, rows] = 0.3
        model[2].weight[rows, rows] = 9.0
    return model


def search_in(folder: Path, **fields: Any) -> tw.Search:
    student = job(folder, "small", narrow, epochs=3, workers=None, strategy=None, evaluate=TEST)
    teacher = tw.Teacher(name="big", model=build_teacher, inputs="x")
    own = {
        "distillation": tw.Distillation(student=student, teachers=(teacher,)), "temperatures": (1.0, 4.0),
        "alphas": (0.1,), "seeds": 2, "validation": SHARE, "finalists": 1,
    }  # fmt: skip
    return tw.Search(**{**own, **fields})


TEST = tw.datasets.table({name: column[:60] for name, column in torch_jobs.data().items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("search")


@pytest.fixture(scope="module")
def found(folder: Path, ray_cluster: None) -> SearchResult:
    return tw.search(search_in(folder))


def files(folder: Path) -> dict[Path, int]:
    """Of the runs, with when they were written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def last(folder: Path, run: str) -> events.Evaluated:
    *_, newest = told(folder / "small-search", run, events.Evaluated)
    assert isinstance(newest, events.Evaluated)
    return newest


def test_figures_are_those_of_the_runs(found: SearchResult, folder: Path) -> None:
    first = {each.name: each.validation.values[0] for each in found.settings}
    (finalist,) = [each for each in found.settings if len(each.validation.values) == 2]
    assert len(found.settings) == 2 and first[finalist.name] == max(first.values()) and found.chosen == finalist.name
    for each in (*found.settings, found.alone):
        seeds = (SEED, SEED + 1) if each in (finalist, found.alone) else (SEED,)
        runs = [last(folder, f"{each.name}-seed{seed}") for seed in seeds]
        assert each.validation.values == tuple(run.metrics["accuracy"] for run in runs)
        assert {run.step for run in runs} == {last(folder, f"alone-seed{SEED}").step}
        assert each in (finalist, found.alone) or not (folder / "small-search" / f"{each.name}-seed{SEED + 1}").exists()


def test_the_test_set_is_told_of_the_chosen_and_of_the_student_alone(found: SearchResult, folder: Path) -> None:
    parts = SearchJobs.of(search_in(folder), False)
    for name, score in ((found.chosen, found.test), ("alone", found.test_alone)):
        jobs_of = parts.runs(search_in(folder), (name,), found.seeds)
        for run, value in zip(jobs_of.values(), score.values, strict=True):
            model = tw.load_model(run).eval()
            columns = TEST.read(TEST.index(), range(60))
            with torch.no_grad():
                right = accuracy(model(torch.tensor(columns["x"])), torch.tensor(columns["y"]))
            assert value == pytest.approx(float(right.float().mean()))
    student, teacher = found.scorecard.marks
    assert teacher.name == "big" and teacher.metrics["accuracy"] > 0.9
    assert student.metrics["accuracy"] == pytest.approx(found.test.values[0])
    assert student.parameters == torch_jobs.WIDTH * 4 + 4 + 4 * torch_jobs.CLASSES + torch_jobs.CLASSES
    assert set(student.latency_s) == {"1", "32"} and found.scorecard.rows == 60


def test_the_student_alone_sees_the_same_rows(folder: Path, found: SearchResult) -> None:
    parts = SearchJobs.of(search_in(folder), False)
    rows = {}
    for name, data in (("taught", parts.train), ("alone", parts.alone.train), ("validation", parts.validation)):
        index = data.index()
        rows[name] = data.read(index, range(index.rows), ("id",))["id"]
    np.testing.assert_array_equal(rows["taught"], rows["alone"])
    assert sorted([*rows["taught"], *rows["validation"]]) == list(range(torch_jobs.ROWS))
    assert len(rows["validation"]) == pytest.approx(SHARE * torch_jobs.ROWS, abs=25)


def test_nothing_is_left_and_nothing_is_done_again(found: SearchResult, folder: Path) -> None:
    import ray

    named = ray.util.list_named_actors(all_namespaces=True)
    assert [each for each in named if each["namespace"] == NAMESPACE and "small" in each["name"]] == []
    before = files(folder)
    assert tw.search(search_in(folder)) == found
    with pytest.raises(RunConflict, match=r"(?s)temperatures: \(1.0, 4.0\) -> \(1.0,\)"):
        tw.search(search_in(folder, temperatures=(1.0,)))
    changed = {path for path, when in files(folder).items() if before.get(path) != when}
    assert {path.name for path in changed} <= {"search.json"}


def test_only_what_is_missing_is_made(found: SearchResult, folder: Path) -> None:
    home = folder / "small-search"
    run = f"alone-seed{SEED + 1}"
    (home / "found.json").unlink()
    for path in sorted((home / run).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    before = files(home)
    again = tw.search(search_in(folder))
    assert {path.relative_to(home).parts[0] for path, when in files(home).items() if before.get(path) != when} == {
        run, "found.json", "search.json",
    }  # fmt: skip
    assert again.test_alone == found.test_alone and again.settings == found.settings


def failing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such metric")


def test_a_run_that_fails_ends_the_search_with_its_error(ray_cluster: None, tmp_path: Path) -> None:
    search = search_in(tmp_path)
    student = search.student.replace(metrics={"accuracy": failing}, failures=0)
    with pytest.raises(TrainwrightError, match="no such metric"):
        tw.search(search.replace(distillation=search.distillation.replace(student=student), seeds=1))


def keras_narrow() -> Any:
    import keras

    return keras.Sequential([keras.Input((torch_jobs.WIDTH,)), keras.layers.Dense(torch_jobs.CLASSES)])


def keras_accuracy(outputs: Any, targets: Any) -> Any:
    import tensorflow as tf

    return tf.argmax(outputs, 1) == tf.cast(targets, tf.int64)


@pytest.mark.soak
def test_a_keras_student_is_searched_whose_teacher_is_in_its_step(ray_cluster: None, tmp_path: Path) -> None:
    weights = np.zeros((torch_jobs.WIDTH, torch_jobs.CLASSES), np.float32)
    weights[range(torch_jobs.CLASSES), range(torch_jobs.CLASSES)] = 9.0
    search = search_in(tmp_path, temperatures=(2.0,), seeds=1)
    student = search.student.replace(
        model=keras_narrow, loss=keras_loss, optimizer=keras_sgd, metrics={"accuracy": keras_accuracy}, epochs=1
    )
    teacher = tw.Teacher(name="big", model=keras_linear(weights), inputs="x")
    inline = tw.Distillation(student=student, teachers=(teacher,), way="inline")
    found = tw.search(search.replace(distillation=inline))
    for name, score in ((found.chosen, found.test), ("alone", found.test_alone)):
        columns = TEST.read(TEST.index(), range(60))
        model = tw.load_model(student.replace(name=f"{name}-seed{SEED}", storage=str(tmp_path / "small-search")))
        right = np.argmax(model.predict(columns["x"], verbose=0), 1) == columns["y"]
        assert score.values == (pytest.approx(right.mean()),)
    student, teacher = found.scorecard.marks
    assert teacher.metrics["accuracy"] == 1.0
    assert student.parameters == torch_jobs.WIDTH * torch_jobs.CLASSES + torch_jobs.CLASSES
