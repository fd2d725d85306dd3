"""A search before and after its runs: what it refuses, and what it makes of figures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn import functional

import trainwright as tw
from tests.support import torch_jobs
from tests.support.run_views import record
from tests.support.sample_run import whole_run
from tests.support.small_distillation import wide
from trainwright.core.errors import JobError, NonFiniteLoss, RunConflict, TrainwrightError, WorkerLost
from trainwright.distillation import hyperparameter_search
from trainwright.distillation.hyperparameter_search import Score, SearchResult, Setting
from trainwright.reporting.scorecard import ModelScore, Scorecard, StudentTeacherScore
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog
from trainwright.tuning.trials import TrialWatcher

DATA = tw.datasets.table(torch_jobs.data())


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(-1) == targets


def build() -> nn.Module:
    return nn.Linear(torch_jobs.WIDTH, torch_jobs.CLASSES)


def student(**fields: Any) -> tw.Job:
    own = {
        "name": "small", "model": build, "loss": cross_entropy, "optimizer": torch.optim.SGD, "inputs": "x",
        "targets": "y", "train": DATA, "evaluate": DATA, "metrics": {"accuracy": accuracy}, "batch_size": 32, "seed": 4,
    }  # fmt: skip
    return tw.Job(**{**own, **fields})


def distillation(job: tw.Job | None = None, **fields: Any) -> tw.Distillation:
    teacher = tw.Teacher(name="big", model=build, inputs="x")
    return tw.Distillation(**{"student": job or student(), "teachers": (teacher,), **fields})


@pytest.mark.parametrize(
    ("changed", "fields", "said"),
    [
        ({"students": {"tiny": build}}, {}, "a search is of one student"),
        ({"teachers": ()}, {}, "there is no teacher"),
        ({"job": student(evaluate=None)}, {}, "evaluate= is missing: give the test set"),
        ({"job": student(targets=()), "loss": tw.SoftLoss(alpha=0)}, {"alphas": (0.0,)}, "no targets= and loss="),
        ({}, {"metric": "loss"}, 'metric="loss" differs with the setting'),
        ({}, {"metric": "acuracy"}, "metric='acuracy' is none of the student's: did you mean 'accuracy'"),
        ({}, {"temperatures": (1.0, 1.0)}, "temperatures= names one twice"),
        ({}, {"alphas": (1.0,)}, "alpha=1 leaves nothing to learn from a teacher"),
        ({"loss": tw.SoftLoss(kind="regression")}, {}, "temperature= is for logits"),
        ({}, {"name": "a/b"}, "name='a/b'"),
        ({}, {"validation": 1.5}, "validation=1.5"),
    ],
)
def test_what_cannot_be_searched_is_refused(changed: dict[str, Any], fields: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as error:
        tw.Search(distillation=distillation(**changed), **fields)
    assert any(said in problem for problem in error.value.problems), error.value.problems


def test_settings_are_all_pairs_with_their_losses() -> None:
    soft = tw.SoftLoss(divergence="reverse_kl")
    search = tw.Search(distillation=distillation(loss=soft), temperatures=(1, 2.5), alphas=(0, 0.25), seeds=2)
    found = search.settings()
    assert list(found) == ["t1-alpha0", "t1-alpha0.25", "t2.5-alpha0", "t2.5-alpha0.25"]
    setting, loss = found["t2.5-alpha0.25"]
    assert (loss.temperature, loss.alpha, loss.divergence) == (2.5, 0.25, "reverse_kl")
    assert setting.text == "T = 2.5, alpha = 0.25"
    assert search.run_name == "small-search" and search.seed_values == (4, 5)


def test_a_search_from_the_beginning_deletes_its_folder_alone_and_nothing_while_a_run_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hyperparameter_search, "_train", Mock(side_effect=InterruptedError))
    uri = str(tmp_path)
    teacher = tw.Teacher(name="big", model=wide, inputs="x")
    search = tw.Search(distillation=distillation(student(storage=uri), teachers=(teacher,), way="inline"))
    with pytest.raises(InterruptedError):
        tw.search(search, fresh=True)  # there is nothing to delete yet
    store = open_store(search.folder)
    record(search.folder, whole_run()[:5], name="t1-alpha0.1-seed4")  # this process is its driver
    store.put("found.json", b"old")
    open_store(uri).put("other/notes.txt", b"of the user")
    with pytest.raises(RunConflict, match=r"run 't1-alpha0\.1-seed4' is running"):
        tw.search(search, fresh=True)
    assert store.find("found.json") == b"old"
    RunLog(store, "t1-alpha0.1-seed4").release(1, "stopped")
    with pytest.raises(InterruptedError):
        tw.search(search, fresh=True)
    assert [path for path, _ in store.list()] == ["search.json"] and open_store(uri).find("other/notes.txt")


SCORES = Scorecard(
    kind="classification", rows=60, of_rows=60, units=60.0, step=30, device="2 CPU cores",
    marks=[
        ModelScore(name="student", student=True, scores={"top-1": 0.84}, parameters=12_730, size_bytes=50_920,
                   latency_s={"1": 2e-4, "64": 1e-3}),
        ModelScore(name="big", student=False, scores={"top-1": 0.9}, parameters=10**6, size_bytes=4 * 10**6),
    ],
    pairs=[StudentTeacherScore(student="student", teacher="big", scores={"agreement": 0.9}, kept=0.84 / 0.9)],
)  # fmt: skip


def found(test: tuple[float, ...], alone: tuple[float, ...], **fields: Any) -> SearchResult:
    settings = (
        Setting(name="t1-alpha0.1", temperature=1, alpha=0.1, validation=Score(values=(0.84, 0.85))),
        Setting(name="t4-alpha0.1", temperature=4, alpha=0.1, validation=Score(values=(0.8,))),
    )
    own: dict[str, Any] = {
        "name": "small-search", "metric": "accuracy", "mode": "max", "seeds": tuple(range(len(test))),
        "settings": settings, "alone": Setting(name="alone", validation=Score(values=(0.82, 0.83))),
        "chosen": "t1-alpha0.1", "test": Score(values=test), "test_alone": Score(values=alone), "scorecard": SCORES,
        "uri": "runs/small-search",
    }  # fmt: skip
    return SearchResult(**{**own, **fields})


@pytest.mark.parametrize(
    ("test", "alone", "helped", "said"),
    [
        ((0.83, 0.84, 0.85), (0.80, 0.81, 0.82), True, "Distillation helped: accuracy 0.8400 ± 0.0100"),
        ((0.83, 0.84, 0.85), (0.809, 0.81, 0.811), True, "better by 3.0 times the larger deviation"),
        ((0.8, 0.84, 0.88), (0.809, 0.81, 0.811), False, "did not help: accuracy 0.8400 ± 0.0400"),
        ((0.81, 0.82, 0.83), (0.80, 0.81, 0.82), False, "they differ by 1.0 times the larger deviation"),
        ((0.77, 0.78, 0.79), (0.80, 0.81, 0.82), False, "Distillation made it worse"),
        ((0.85,), (0.80,), False, "One seed cannot tell whether distillation helped"),
        ((0.85, math.nan), (0.80, 0.81), False, "A run without a finite accuracy leaves open whether distillation"),
        ((0.85, 0.86), (math.inf, -math.inf), False, "accuracy 0.8550 ± 0.0071 on the test set with T = 1"),
    ],
)
def test_it_says_plainly_whether_distillation_helped(
    test: tuple[float, ...], alone: tuple[float, ...], helped: bool, said: str
) -> None:
    one = found(test, alone)
    assert one.helped is helped
    assert said in one.sentence


def test_less_is_better_where_the_search_says_so() -> None:
    one = found((2.0, 2.1, 2.2), (2.5, 2.6, 2.7), mode="min")
    assert one.helped and one.gain == pytest.approx(0.5)


@pytest.mark.parametrize("test", [(0.83, 0.84, 0.85), (0.85,)])
def test_it_is_the_same_after_a_round_trip(test: tuple[float, ...]) -> None:
    one = found(test, test)
    assert SearchResult.decode(one.encode()) == one
    told = json.loads(one.encode(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["told"]
    assert told["helped"] is False and told["sentence"] == one.sentence


def test_the_table_has_every_figure() -> None:
    said = repr(found((0.83, 0.84, 0.85), (0.80, 0.81, 0.82)))
    rows = [line.split() for line in said.splitlines()]
    assert ["T", "=", "1,", "alpha", "=", "0.1", "0.8450", "±", "0.0071", "0.8400", "±", "0.0100", "chosen"] in rows
    assert ["T", "=", "4,", "alpha", "=", "0.1", "0.8000", "first", "seed", "only"] in rows
    assert ["student", "alone", "0.8250", "±", "0.0071", "0.8100", "±", "0.0100"] in rows
    assert ["student", "0.8400", "93.3%", "12,730", "49.7", "KiB", "0.2", "ms", "1", "ms"] in rows
    assert "student keeps 93.3% of the top-1 of big" in said and "mean ± standard deviation of 3 seeds" in said
    assert "  iou[/road], validation" in repr(found((0.83,), (0.80,), metric="iou[/road]"))


def test_a_score_of_one_seed_has_no_deviation() -> None:
    assert math.isnan(Score(values=(1.0,)).deviation)
    assert str(Score(values=(0.5,))) == "0.5000"


def runs(search: tw.Search, names: Sequence[str], seeds: Sequence[int]) -> dict[str, tw.Job]:
    return {run: student(name=run) for run in (f"{name}-seed{seed}" for name in names for seed in seeds)}


@pytest.mark.parametrize(("mode", "values"), [("max", (0.9, 0.8)), ("min", (0.8, 0.9))])
def test_a_setting_whose_loss_or_metric_is_not_finite_is_the_last_and_ends_no_search(
    mode: Any, values: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {
        "t1-alpha0.1-seed4": math.inf if mode == "max" else -math.inf, "t2-alpha0.1-seed4": values[1],
        "t4-alpha0.1-seed4": values[0], "t4-alpha0.1-seed5": math.nan, "alone-seed4": 0.7, "alone-seed5": 0.7,
    }  # fmt: skip

    errors: list[TrainwrightError] = [NonFiniteLoss("the loss is nan")]

    def train(jobs: Iterable[tw.Job], metric: str, *, watcher: TrialWatcher, **_: Any) -> dict[str, float]:
        for job in jobs:
            if job.name not in told:
                watcher.failed(job, errors[0])
        return told

    search = tw.Search(distillation=distillation(), mode=mode, temperatures=(1, 2, 4, 8), alphas=(0.1,), seeds=2)
    jobs: Any = SimpleNamespace(runs=runs, test=DATA)
    monkeypatch.setattr(hyperparameter_search, "train_trials", train)
    monkeypatch.setattr(hyperparameter_search, "evaluate", lambda job: {"accuracy": 0.8})
    monkeypatch.setattr(hyperparameter_search, "_scorecard", lambda *_: SCORES)
    metrics = hyperparameter_search._train(search, jobs, open_store("memory://diverged"), False)
    assert math.isnan(metrics["t8-alpha0.1-seed4"]) and math.isnan(metrics["t2-alpha0.1-seed5"])
    result = hyperparameter_search._test(search, jobs, "runs/small-search", metrics, False)
    assert result.chosen == "t4-alpha0.1" and result.test.values[0] == 0.8 and math.isnan(result.test.values[1])
    assert "leaves open whether distillation helped" in repr(SearchResult.decode(result.encode()))
    with pytest.raises(TrainwrightError, match="'accuracy' is NaN or infinite with each setting"):
        hyperparameter_search._test(search, jobs, "runs", {**dict.fromkeys(metrics, math.nan)}, False)
    errors[0] = WorkerLost("the process ended")
    with pytest.raises(WorkerLost):
        hyperparameter_search._train(search, jobs, open_store("memory://diverged"), False)
