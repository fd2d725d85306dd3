"""A search of hyper-parameters without its runs: spaces, settings, jobs, and which trials are stopped."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule

import trainwright as tw
from tests.support import torch_jobs
from tests.support.run_views import record, storage
from tests.support.sample_run import whole_run
from trainwright.core.errors import JobError, NonFiniteLoss, RunConflict, TrainwrightError, UserCodeError
from trainwright.core.events import Evaluated
from trainwright.reporting.run_views import runs_view
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog
from trainwright.tuning.trials import RANK, SearchMetric, TrialWatcher
from trainwright.tuning.tuner import Trial, TuneResult, _remove_runs, draw_settings, job_of

DATA = tw.datasets.table(torch_jobs.data())
RATES = tune.loguniform(1e-4, 1e-1)


def build(width: int = 8) -> torch.nn.Module:
    return torch.nn.Linear(torch_jobs.WIDTH, torch_jobs.CLASSES)


def job(lr: float = 0.1, **fields: Any) -> tw.Job:
    own = {
        "name": "small", "model": build, "loss": torch_jobs.cross_entropy, "optimizer": partial(torch.optim.SGD, lr=lr),
        "inputs": "x", "targets": "y", "train": DATA, "evaluate": DATA, "batch_size": 32,
    }  # fmt: skip
    return tw.Job(**{**own, **fields})


def of_rate(lr: float, depth: int = 1) -> tw.Job:
    return job(lr)


@pytest.mark.parametrize(
    ("target", "space", "fields", "said"),
    [
        (job(), {}, {}, "space= is empty"),
        (job(), {"bach_size": [1, 2]}, {}, "space='bach_size' is not an option of a job: did you mean 'batch_size'"),
        (job(), {"training.clip_nrm": [1.0]}, {}, "not an option of training=: did you mean 'clip_norm'"),
        (job(), {"training.spares": [1]}, {}, "it belongs to recovery="),
        (job(), {"model.widht": [4]}, {}, "space='model.widht' is not a parameter of model=: did you mean 'width'"),
        (job(), {"batch_size.x": [4]}, {}, "a parameter of batch_size=, which is not a function"),
        (job(), {"name": ["a"]}, {}, "cannot be varied"),
        (job(), {"batch_size": 32}, {}, "space='batch_size' has the value 32: give a list"),
        (job(), {"batch_size": tune.grid_search([])}, {}, "space='batch_size' has no values"),
        (job(), {"batch_size": [0]}, {}, "(with batch_size = 0)"),
        (job(), {"batch_size": [32]}, {"metric": "los"}, "metric='los' is neither 'loss' nor one of metrics=: did you"),
        (job(evaluate=None), {"batch_size": [32]}, {}, "evaluate= is missing"),
        (job(), {"batch_size": [32]}, {"trials": 0}, "trials=0"),
        (job(), {"batch_size": [32]}, {"scheduler": MedianStoppingRule()}, 'use "asha"'),
        (job(), {"batch_size": [32]}, {"scheduler": ASHAScheduler(metric="x", mode="min")}, "leave them out"),
        (of_rate, {"lr": RATES, "dept": [1]}, {}, "not a parameter of the function: did you mean 'depth'"),
        (of_rate, {"depth": [1]}, {}, "no values for the parameter 'lr'"),
        (lambda lr: lr, {"lr": RATES}, {}, "returned float: return a tw.Job"),
    ],
)
def test_a_wrong_search_is_refused(target: Any, space: dict[str, Any], fields: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as error:
        tw.tune(target, space, **fields)
    assert said in str(error.value)


def test_a_search_from_the_beginning_deletes_runs_alone_and_none_while_one_is_alive() -> None:
    uri = storage()
    record(uri, whole_run(), name="small-0", outcome="done")
    record(uri, whole_run()[:5], name="small-1")  # this process is its driver
    open_store(uri).put("small-2/notes.txt", b"of the user")
    with pytest.raises(RunConflict, match="run 'small-1' is running"):
        tw.tune(job(storage=uri), {"batch_size": [32, 16, 8]}, trials=3, fresh=True)
    assert {row["name"] for row in runs_view(uri).data} == {"small-0", "small-1"}
    RunLog(open_store(uri), "small-1").release(1, "stopped")
    _remove_runs([job(storage=uri, name=f"small-{number}") for number in range(4)])
    assert open_store(uri).folders() == ("small-2",)


def test_settings_follow_from_the_seed_and_more_trials_add_some() -> None:
    space = {"optimizer.lr": RATES, "batch_size": tune.grid_search([32, 64])}
    few, many = (draw_settings(space, trials, seed=3) for trials in (2, 5))
    assert [each["batch_size"] for each in few] == [32, 64, 32, 64] and many[:4] == few and len(many) == 10
    assert all(1e-4 <= each["optimizer.lr"] <= 1e-1 for each in many) and draw_settings(space, 2, seed=4) != few


def test_a_setting_is_trained_once_however_often_it_is_drawn() -> None:
    assert len(draw_settings({"batch_size": [32, 64]}, 40, seed=0)) == 2
    grid = {"batch_size": tune.grid_search([32, 64]), "epochs": tune.grid_search([1, 2, 3])}
    assert len(draw_settings(grid, 20, seed=0)) == 6
    half = tw.datasets.table({name: column[::2] for name, column in torch_jobs.data().items()})
    other = tw.datasets.table({name: column[1::2][::-1] for name, column in torch_jobs.data().items()})
    objects = {"train": [DATA, half, other], "loss": [lambda o, t: o - t, lambda o, t: t - o], "clip_norm": [0.1, 0.1]}
    assert len(draw_settings(objects, 200, seed=0)) == 6


def test_a_setting_changes_options_and_parameters_of_functions() -> None:
    changed = job_of(job(), {"batch_size": 64, "training.clip_norm": 2.0, "optimizer.lr": 0.5, "model.width": 3})
    assert changed.batch_size == 64 and changed.training.clip_norm == 2.0
    assert (changed.model.func, changed.model.keywords) == (build, {"width": 3})  # type: ignore[attr-defined]
    assert changed.optimizer.keywords == {"lr": 0.5}  # type: ignore[union-attr]
    other = job_of(job(), {"optimizer": torch.optim.Adam, "optimizer.lr": 0.25}).optimizer
    assert (other.func, other.keywords) == (torch.optim.Adam, {"lr": 0.25})  # type: ignore[union-attr]


def watcher(*names: str) -> TrialWatcher:
    scheduler = ASHAScheduler(max_t=8, reduction_factor=2, metric=RANK, mode="max", stop_last_trials=False)
    return TrialWatcher(scheduler, SearchMetric.parse("-loss"), [job(name=name) for name in names])


def test_trials_are_stopped_by_the_rank_of_their_evaluations_and_never_by_the_last_one() -> None:
    watched = watcher("a", "b", "c", "d")
    steps = [("a", 1, 1.0), ("b", 1, 2.0), ("c", 1, float("nan")), ("a", 2, 0.9), ("a", 2, 5.0), ("d", 1, 0.5)]
    asked = [watched.evaluated(name, Evaluated(step=step, metrics={"loss": loss}), 8) for name, step, loss in steps]
    assert asked == [False, True, True, False, False, False] and watched.stopped == {"b", "c"}
    assert not watched.evaluated("d", Evaluated(step=8, metrics={"loss": 9.0}), 8)


def test_a_search_ends_where_the_job_is_wrong_and_not_where_settings_diverge() -> None:
    watched = watcher("a", "b", "c", "d", "e", "f")
    for name in "abc":
        watched.failed(job(name=name), NonFiniteLoss("the loss is NaN"))
    for name in "de":
        watched.failed(job(name=name), UserCodeError("no such layer"))
    with pytest.raises(UserCodeError, match="no such layer"):
        watched.failed(job(name="f"), UserCodeError("no such layer"))


def test_a_result_prints_the_best_first() -> None:
    trials = [
        Trial(job=job(name=f"small-{number}"), params={"lr": 10.0**-number}, value=value, step=40, state=state)
        for number, (value, state) in enumerate(
            [(0.5, "done"), (0.25, "done"), (0.1, "stopped"), (float("nan"), "failed")]
        )
    ]
    assert SearchMetric.parse("loss") == SearchMetric.parse("-loss"), "as in best= and early_stop= of a job"
    found = TuneResult(metric=SearchMetric.parse("-loss"), trials=tuple(trials))
    rows = [line.split() for line in repr(found).splitlines()]
    assert rows[0][:6] == ["Best", "loss:", "0.2500", "with", "lr", "="]
    assert [row[0] for row in rows[3:]] == ["small-1", "small-0", "small-2", "small-3"]
    assert rows[3] == ["small-1", "0.1", "0.2500", "40", "best"] and rows[5][-2:] == ["stopped", "early"]
    assert list(found.table.columns) == ["run", "lr", "loss", "step", "state"] and found.table["lr"][0] == 0.1
    trial = Trial(job=job(name="small"), params={"mode": "[bold]"}, value=0.5, step=40, state="done")
    bracketed = repr(TuneResult(metric=SearchMetric.parse("iou[/road]"), trials=(trial,)))
    assert [line.split()[1:3] for line in bracketed.splitlines()[2:]] == [["mode", "iou[/road]"], ["[bold]", "0.5000"]]


def test_where_no_trial_was_evaluated_none_is_the_best() -> None:
    nan = float("nan")
    trials = [Trial(job=job(name=f"small-{n}"), params={"lr": n}, value=nan, step=0, state="done") for n in range(2)]
    found = TuneResult(metric=SearchMetric.parse("-loss"), trials=tuple(trials))
    assert repr(found).startswith("No best loss: no trial was evaluated") and "nan" not in repr(found)
    assert "max_time=" in repr(found) and "epoch_samples=" in repr(found) and "small-1" in repr(found)
    with pytest.raises(TrainwrightError, match="no trial has a best loss: none of 2 trials was evaluated"):
        print(found.best)
    stopped = Trial(job=job(name="small-2"), params={"lr": 2}, value=0.5, step=9, state="done")
    assert TuneResult(metric=found.metric, trials=(*trials, stopped)).best is stopped
