"""The best checkpoint, and runs that end before their last step: what the driver decides, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import trainwright as tw
from tests.support.driver_harness import FILES, HEAD, Story
from tests.support.planner_cases import LAPTOP
from trainwright import api
from trainwright.cli.main import app
from trainwright.core.data import MetricSums
from trainwright.core.engine import CheckpointRef
from trainwright.core.errors import JobError
from trainwright.core.events import CheckpointSkipped, Evaluated, RunEnded
from trainwright.core.metric_goals import best_evaluation, goal_notes
from trainwright.core.topology import StateTag
from trainwright.driver import messages as m
from trainwright.driver.driver_state import Phase
from trainwright.planning.job_description import describe
from trainwright.planning.job_file import load_job
from trainwright.planning.job_preparation import plan_for, prepare
from trainwright.runtime.run_handle import loading_code

STOP = tw.EarlyStop("loss", patience=2)


def evaluations(*values: float, every: int = 2, metric: str = "loss") -> tuple[Evaluated, ...]:
    return tuple(Evaluated(step=every * n, metrics={metric: value}) for n, value in enumerate(values, 1))


def judged(story: Story, step: int, loss: float) -> Story:
    """The ranks reach a step and evaluate it."""
    return story.segment(step).returns("evaluate", MetricSums(totals={"loss": (loss, 1.0)}))


def saved(story: Story, step: int) -> Story:
    """A checkpoint of the current step is written and committed."""
    return story.snapshot(step).returns("upload", FILES, workers=[0]).committed(step)


def story(**fields: Any) -> Story:
    return Story(**{"evaluate_steps": 2, "checkpoint_steps": 100, **fields})


# --- goals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("goal", "values", "step"),
    [
        ("acc", (1.0, 3.0, 3.0, 2.0), 4),  # the earlier of equal ones
        ("-acc", (3.0, math.nan, 1.0, 1.0), 6),
        ("acc", (math.nan, 1.0), 4),
        ("acc", (math.nan,), 0),
        ("other", (1.0,), 0),
    ],
)
def test_the_best_evaluation(goal: str, values: tuple[float, ...], step: int) -> None:
    best = best_evaluation(goal, evaluations(*values, metric="acc"))
    assert (best.step if best else 0) == step


@pytest.mark.parametrize("goal", ["loss", "-loss"])
def test_a_loss_is_minimized_whatever_its_sign(goal: str) -> None:
    best = best_evaluation(goal, evaluations(2.0, 1.0, 3.0))
    assert best is not None and best.step == 4


@pytest.mark.parametrize(
    ("rule", "values", "ends"),
    [
        (tw.EarlyStop("loss", patience=2), (3.0, 2.0, 2.0), False),
        (tw.EarlyStop("loss", patience=2), (3.0, 2.0, 2.0, math.nan), True),
        (tw.EarlyStop("loss", patience=2), (3.0, 2.0, 2.0, 1.9), False),
        (tw.EarlyStop("loss", patience=2, min_delta=0.2), (3.0, 2.0, 2.0, 1.9), True),
        (tw.EarlyStop("acc", patience=1), (1.0,), True),  # a metric that is never there
        (tw.EarlyStop("loss"), (math.nan, math.nan), False),
    ],
)
def test_when_a_metric_has_not_improved_for_long_enough(
    rule: tw.EarlyStop, values: tuple[float, ...], ends: bool
) -> None:
    assert bool(rule.reason(evaluations(*values))) == ends


@pytest.mark.parametrize("goal", ["mae", "val_loss", "word_error_rate", "RMSE"])
def test_a_note_says_that_an_error_is_maximized(goal: str) -> None:
    (note,) = goal_notes({"best": goal})
    assert note == f"best: the largest {goal} counts as the best; for the smallest write '-{goal}'"


@pytest.mark.parametrize("goal", ["loss", "-mae", "accuracy", "terror", "neg_mse", "error_detection_f1"])
def test_no_note_is_made_where_a_metric_is_minimized_or_has_no_name_of_an_error(goal: str) -> None:
    assert not goal_notes({"best": goal, "early_stop": goal})


# --- the best checkpoint ----------------------------------------------------------------------------------------------


def test_steps_wait_for_the_checkpoint_of_the_best_evaluation_which_is_held_and_named() -> None:
    told = judged(story(best="-loss").running(), 2, 1.0)
    assert told.calls("snapshot") and not told.calls("run")
    told.snapshot(2)
    assert told.state.phase is Phase.WAITING and not told.calls("run")
    (commit,) = told.returns("upload", FILES, workers=[0]).all(m.CommitCheckpoint)
    assert commit.step == 2 and told.committed(2).calls("run")
    for step, loss in ((4, 2.0), (6, math.nan)):
        assert judged(told, step, loss).calls("run"), "a worse one is not saved"
    told.segment(8).snapshot(8).returns("evaluate", MetricSums(totals={"loss": (1.0, 1.0)}))
    (last,) = told.returns("upload", FILES, workers=[0]).all(m.CommitCheckpoint)
    assert last.hold == (commit.path,)
    (held, new) = (CheckpointRef(step=each.step, path=each.path, manifest_sha256="0") for each in (commit, last))
    (ended,) = told.tell(m.CheckpointCommitted(checkpoint=new, older=(held,))).emitted(RunEnded)
    assert (ended.outcome, ended.reason, ended.best) == ("done", "", "loss 1 at step 2")


def test_the_best_checkpoint_is_written_again_where_its_writer_dies() -> None:
    told = judged(story(best="loss", spares=0).running(), 2, 1.0).snapshot(2)
    told.tell(m.WorkerDied(worker=0, cause="killed"))
    assert told.emitted(CheckpointSkipped)
    told.returns("leave", None, workers=[1]).start().formed(StateTag(step=None), StateTag(step=2))
    told.returns("restore", StateTag(step=2))
    assert told.calls("snapshot") and not told.calls("evaluate") and not told.calls("run")


def test_an_older_upload_ends_before_the_best_checkpoint_is_written() -> None:
    told = story(best="loss", checkpoint_steps=1).running().segment(1).snapshot(1)
    judged(told, 2, 1.0)
    assert told.state.phase is Phase.WAITING and not told.emitted(CheckpointSkipped)
    told.returns("upload", FILES, workers=[0]).committed(1)
    assert told.calls("snapshot")


def test_a_store_that_refuses_the_best_checkpoint_does_not_end_training() -> None:
    told = judged(story(best="loss").running(), 2, 1.0).snapshot(2)
    assert told.raises(0, "upload", "storage", OSError("full")).calls("run")
    hanging = judged(story(best="loss").running(), 2, 1.0).snapshot(2).expires("upload")
    assert hanging.calls("run")


def test_an_evaluation_without_the_metric_ends_the_run() -> None:
    ended = judged(story(best="accuracy").running(), 2, 1.0)
    assert isinstance(ended.state.shutdown.error, JobError)
    assert "best='accuracy' is not an evaluated metric: valid names: loss" in str(ended.state.shutdown.error)


# --- early stop -------------------------------------------------------------------------------------------------------


def test_a_run_ends_early_with_a_checkpoint_and_says_why() -> None:
    told = story(early_stop=STOP, total_steps=20).running()
    for step, loss in ((2, 1.0), (4, 1.0)):
        assert judged(told, step, loss).calls("run")
    assert judged(told, 6, 1.0).calls("snapshot")
    saved(told, 6)
    (ended,) = told.emitted(RunEnded)
    assert (ended.outcome, ended.step) == ("done", 6)
    assert ended.reason == "stopped early after step 6: loss has not improved in 2 evaluations"


def test_the_end_is_decided_again_after_all_workers_and_the_evaluation_are_lost() -> None:
    told = story(early_stop=STOP, total_steps=20, spares=0).running(HEAD)  # at step 4, where nothing was evaluated
    told.returns("evaluate", MetricSums(totals={"loss": (1.0, 1.0)}))
    for step in (6, 8):
        judged(told, step, 1.0)
    assert told.calls("snapshot")
    told.tell(*(m.WorkerDied(worker=worker, cause="killed") for worker in (0, 1))).start().formed()
    assert told.returns("restore", StateTag(step=4)).calls("run"), (
        "step 4 was evaluated, and the later ones count no more"
    )
    assert judged(told, 6, 1.0).calls("run") and judged(told, 8, 1.0).calls("snapshot")


@pytest.mark.parametrize(("patience", "goes_on"), [(2, False), (3, True)])
def test_the_next_driver_knows_the_end_from_stored_evaluations(patience: int, goes_on: bool) -> None:
    rule, head = tw.EarlyStop("loss", patience=patience), CheckpointRef(step=6, path="p", manifest_sha256="0")
    told = story(early_stop=rule, total_steps=20)
    told.tell(m.LeaseAcquired(token=3, head=head, evaluations=evaluations(1.0, 1.0, 1.0)))
    assert bool(told.all(m.StartWorker)) == goes_on
    assert [event.reason for event in told.emitted(RunEnded)] == (
        [] if goes_on else ["stopped early after step 6: loss has not improved in 2 evaluations"]
    )


@pytest.mark.parametrize(("known", "source"), [((1.0, 2.0), "checkpoint"), ((1.0, 2.0, 3.0), "replica")])
def test_workers_that_passed_an_evaluation_that_was_not_stored_go_back(known: tuple[float, ...], source: str) -> None:
    told, kept = story(best="loss", total_steps=20), m.MemoryCheckpoint(version=1, step=7, files=())
    living = tuple(m.SurvivingWorker(worker=n, node=f"n{n}", pid=n, slot=n, rank=n, step=7) for n in range(2))
    told.tell(m.LeaseAcquired(token=3, head=HEAD, living=living, evaluations=evaluations(*known), told=7, kept=kept))
    told.returns("leave", None).formed(StateTag(step=7))
    assert told.state.epoch.restore_plan is not None and told.state.epoch.restore_plan.source == source


# --- max_time ---------------------------------------------------------------------------------------------------------


def test_the_time_of_a_run_ends_it_at_the_next_step_without_an_evaluation() -> None:
    told = story(max_time_s=12.0, total_steps=20).running()
    assert [timer.name for timer in told.all(m.SetTimer)].count("pause") == 1
    told.now_s = 13.0
    assert told.expires("pause").calls("stop")
    assert told.segment(2).calls("snapshot") and not told.calls("evaluate")
    saved(told, 2)
    (ended,) = told.emitted(RunEnded)
    assert (ended.outcome, ended.reason) == ("done", "stopped after step 2: max_time of 12 s is over")


@pytest.mark.parametrize(("spent_s", "goes_on"), [(11.0, True), (12.0, False)])
def test_the_time_of_earlier_drivers_counts(spent_s: float, goes_on: bool) -> None:
    told = story(max_time_s=12.0).tell(m.LeaseAcquired(token=3, head=HEAD, spent_s=spent_s))
    assert bool(told.all(m.StartWorker)) == goes_on
    assert [event.outcome for event in told.emitted(RunEnded)] == ([] if goes_on else ["done"])


# --- options ----------------------------------------------------------------------------------------------------------


def squared(outputs: Any, targets: Any) -> Any:
    return (outputs[:, 0] - targets) ** 2


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def job(folder: Path, **fields: Any) -> tw.Job:
    data = tw.datasets.table({"x": np.ones((8, 3), np.float32), "y": np.ones(8, np.float32)})
    given: dict[str, Any] = {
        "name": "n", "model": lambda: nn.Linear(3, 1), "optimizer": list, "loss": squared, "train": data,
        "evaluate": data, "inputs": "x", "targets": "y", "batch_size": 4, "storage": str(folder),
        "metrics": {"error": squared},
    }  # fmt: skip
    return tw.Job(**{**given, **fields})


def test_a_plan_has_the_note_of_a_maximized_error(tmp_path: Path) -> None:
    for goal, notes in (("error", 1), ("-error", 0)):
        told = plan_for(prepare(job(tmp_path, best=goal, optimizer=sgd)), LAPTOP).chosen.notes
        assert sum("the largest error counts as the best" in note for note in told) == notes


def test_the_model_of_a_run_with_a_best_checkpoint_is_the_best(tmp_path: Path) -> None:
    """The last line of `fit` is pasted into Python."""
    assert loading_code(job(tmp_path), "job.py", []).endswith("model = tw.load_model('job.py')")
    best = job(tmp_path, best="-error")
    assert loading_code(best, "job.py", []).endswith("""model = tw.load_model('job.py', step="best")""")
    changed = loading_code(best, "job.py", ["epochs=3"])
    assert changed.endswith("""tw.load_model(tw.load_job('job.py', ['epochs=3']), step="best")""")


@pytest.mark.parametrize(("text", "seconds"), [("2h30m", 9000.0), ("1d 1s", 86401.0), (1.5, 1.5), ("0.5m", 30.0)])
def test_times_are_seconds_or_texts(text: Any, seconds: float, tmp_path: Path) -> None:
    assert job(tmp_path, max_time=text).checkpointing.max_time == seconds


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_time": "2 hours"}, "max_time='2 hours': give seconds, or a text such as 2h30m"),
        ({"max_time": 0}, "max_time=0"),
        ({"early_stop": {"metric": "loss", "patience": 0}}, r"EarlyStop\(patience=0\): use 1 or more"),
    ],
)
def test_wrong_options_are_refused(fields: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=told):
        job(tmp_path, **fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"best": "eror"}, r"best='eror' is not an evaluated metric: did you mean 'error'\?"),
        (
            {"early_stop": tw.EarlyStop("-acc")},
            "early_stop='-acc' is not an evaluated metric: valid names: error, loss",
        ),
        ({"best": "loss", "evaluate": None}, "best= needs evaluate=: give the job a data set to evaluate on"),
    ],
)
def test_a_metric_that_is_not_evaluated_is_refused_before_workers_start(
    fields: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=told):
        prepare(job(tmp_path, **fields))


def test_options_are_described_and_read_from_texts(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(
        "from pathlib import Path\nfrom tests.unit.test_best_and_early_stop import job\n"
        f"job = job(Path({str(tmp_path)!r}))\n"
    )
    texts = ["best=-error", "early_stop={'metric': 'error', 'patience': 5}", "max_time=1h"]
    told = describe(load_job(str(file), texts))
    assert (told["best"], told["max_time"]) == ("-error", "3600.0")
    assert told["early_stop"] == "EarlyStop(metric='error', patience=5, min_delta=0.0)"


@pytest.mark.parametrize(("typed", "step"), [("best", "best"), ("12", 12)])
def test_the_command_line_takes_the_best_step(
    typed: str, step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(api, "export", lambda job, path, step: asked.append(step) or path)
    monkeypatch.setattr("trainwright.cli.run_commands._trained", lambda *_: None)
    done = CliRunner().invoke(app, ["export", "job.py", str(tmp_path / "m.pt"), "--step", typed])
    assert done.exit_code == 0 and asked == [step]
    wrong = CliRunner().invoke(app, ["export", "job.py", "m.pt", "--step", "worst"])
    assert wrong.exit_code == 2 and asked == [step]
