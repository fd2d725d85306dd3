"""Studies: which runs they make, and what their tables and charts say. Real runs: tests/e2e/test_study.py."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import trainwright as tw
from tests.support.cli_job import JOB
from tests.support.html_pages import Balance
from tests.support.run_views import printed, record, storage
from tests.support.sample_run import started, stepped
from tests.support.work_orders import table_job
from trainwright import api
from trainwright.cli.main import app
from trainwright.core import events
from trainwright.core.cluster import Cluster
from trainwright.core.errors import JobError, NonFiniteLoss, PlanError, RunFinished, Stopped
from trainwright.core.formatting import duration
from trainwright.reporting.stored_run import open_run
from trainwright.studies import study_predictions, study_report, study_trials
from trainwright.studies.study_predictions import check_larger, predict_scaling
from trainwright.studies.study_report import Mean, StudyReport, metric_of
from trainwright.studies.study_trials import StudyTrial, batch_trials, convergence_trials, run_trials, scaling_trials


def job(**fields: Any) -> tw.Job:
    return table_job(evaluate=tw.datasets.table({"x": [[1.0]], "y": [0]}), batch_size=64, **fields)


def test_a_scaling_study_has_a_short_run_for_each_number_mode_and_seed() -> None:
    trials = scaling_trials(job(seed=5), [1, 2], ["synchronous", "asynchronous"], seeds=2, steps=30)
    assert [(each.label, each.x, each.seed) for each in trials] == [
        (mode, count, seed)
        for mode, count in (("synchronous", 1), ("synchronous", 2), ("asynchronous", 2))
        for seed in (0, 1)
    ]
    assert len({each.job.name for each in trials}) == 6
    last = trials[-1].job
    assert (last.scaling.workers, last.training.seed, last.epochs, last.data.epoch_samples) == (2, 6, 1, 30 * 64)
    assert (last.planning.strategy, last.planning.consistency, last.batch_size) == ("parameter_server", "async", 64)
    assert trials[0].job.planning.strategy is None


def test_a_trial_keeps_its_number_of_workers_and_its_mode() -> None:
    elastic = job(min_workers=2, max_workers=8, on_loss="shrink", strategy="parameter_server", consistency="async")
    (trial,) = scaling_trials(elastic, [1], ["synchronous"], 1, 10)
    scaling = trial.job.scaling
    assert (scaling.workers, scaling.min_workers, scaling.max_workers) == (1, None, None)
    assert (trial.job.recovery.on_loss, trial.job.planning.consistency) == ("wait", "sync")


def test_the_linear_rule_scales_the_jobs_own_schedule_up_from_its_rate() -> None:
    trials = batch_trials(
        job(schedule=tw.schedules.linear, early_stop=tw.EarlyStop("loss", patience=3), max_time=60), [32, 256], seeds=1
    )
    rates: dict[Any, Any] = {(each.label, each.x): each.job.training.schedule for each in trials}
    assert rates["same rate", 256](30, 100) == tw.schedules.linear(30, 100)
    larger: Any = pickle.loads(pickle.dumps(rates["linear rule", 256]))
    assert larger(0, 100) == pytest.approx(1 + 3 * 0.1), "the first of ten steps from 1 to 4"
    assert larger(50, 100) == pytest.approx(4 * tw.schedules.linear(40, 90)), "the job's own follows the warm-up"
    assert rates["linear rule", 32](50, 100) == pytest.approx(0.5 * tw.schedules.linear(40, 90))
    assert {each.job.epochs for each in trials} == {job().epochs}
    assert all(each.job.checkpointing.early_stop is None and each.job.checkpointing.max_time is None for each in trials)


def test_a_schedule_that_follows_the_batch_size_is_scaled_once() -> None:
    follows = partial(tw.schedules.linear_scaling, reference=64, warmup_steps=5)
    rates: dict[Any, Any] = {
        (each.label, each.x): each.job.training.schedule for each in batch_trials(job(schedule=follows), [64, 256], 1)
    }
    assert rates["same rate", 256](50, 100) == rates["same rate", 64](50, 100) == pytest.approx(1.0)
    assert rates["linear rule", 256](50, 100) == pytest.approx(4.0)


def test_what_cannot_be_studied_is_refused() -> None:
    with pytest.raises(JobError, match="evaluate= is missing"):
        convergence_trials(table_job(), [1], ["synchronous"], 1)
    with pytest.raises(JobError, match="which the linear rule cannot scale"):
        batch_trials(job(schedule=lambda optimizer: None), [32], 1)


@pytest.fixture
def three_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster without accelerators that is connected already."""
    monkeypatch.setattr(study_trials, "discover", lambda: Cluster.parse("3xCPU"))
    monkeypatch.setattr(study_trials, "connect", lambda: True)


@pytest.fixture
def ran(three_cpus: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs that were started; one whose name ends with `seed1` is finished already."""
    names: list[str] = []

    def fit(job: tw.Job, *, fresh: bool = False) -> Any:
        assert job.scaling.threads_per_worker in ((1, 4) if "-batch-" not in job.name else (None,))
        if job.name.endswith("seed1") and not fresh:
            raise RunFinished(f"{job.name} is finished")
        names.append(job.name)
        return open_run(job.name, job.storage)

    monkeypatch.setattr(api, "fit", fit)
    return names


def done(trials: list[StudyTrial], value: Any, evaluations: tuple[int, ...] = (10, 20)) -> None:
    """Store a run of each, whose last accuracy and pace are `value(trial)`, evaluated after these steps."""
    for trial in trials:
        accuracy, step_s = value(trial)
        steps = replace(stepped(range(1, 21), time_s=102), step_s=[step_s] * 20)
        evaluated = [
            events.Evaluated(time_s=103, step=step, metrics={"loss": 0.5, "accuracy": accuracy - (20 - step) / 100})
            for step in evaluations
        ]
        record(
            trial.job.storage, [started(), events.Formed(time_s=101), steps, *evaluated], name=trial.job.name,
            outcome="done",
        )  # fmt: skip


def test_finished_runs_are_not_run_again(ran: list[str]) -> None:
    trials = convergence_trials(job(storage=storage()), [1, 2], ["synchronous"], 2)
    done(trials, lambda trial: (0.9, 0.1))
    said: list[str] = []
    found = run_trials(trials, say=said.append)
    assert ran == [each.job.name for each in trials if each.seed == 0]
    assert all(each.history is not None and each.history.metrics["accuracy"] == 0.9 for each in found)
    assert said[0].startswith("1/4  synchronous, 1, seed 0: run ") and "  it is finished already" in said
    run_trials(trials, fresh=True, say=said.append)
    assert len(ran) == 6


@pytest.mark.usefixtures("three_cpus")
def test_a_stopped_run_stops_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        state, signal = "stopped", 15

    monkeypatch.setattr(api, "fit", lambda job, fresh: Interrupted())
    with pytest.raises(Stopped, match=r"was stopped in run (.|\n)*the same command continues") as raised:
        run_trials(scaling_trials(job(storage=storage()), [1], ["synchronous"], 1, 10), say=lambda line: None)
    assert raised.value.signal == 15


def test_a_run_that_diverges_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = batch_trials(job(storage=storage()), [32, 64], 2)
    done(trials, lambda trial: (0.9, 0.1))

    def fit(job: tw.Job, *, fresh: bool) -> Any:
        if job.batch_size == 64 and job.name.endswith("seed1"):
            raise NonFiniteLoss("the loss became nan in step 3")
        return open_run(job.name, job.storage)

    monkeypatch.setattr(api, "fit", fit)
    found = report("batch", trials)
    assert math.isnan(found.means["same rate", 64].mean) and found.means["same rate", 32].mean == pytest.approx(0.9)
    assert [row["mean"] for row in found.data()["rows"]] == [pytest.approx(0.9), None, pytest.approx(0.9), None]
    assert "64-seed1 failed, so that its row has no figure: the loss became nan" in " ".join(
        printed(found.view()).split()
    )
    assert "accuracy by batch size" in found.page()


def test_the_mean_of_seeds_has_students_interval() -> None:
    found = Mean.of([1.0, 2.0, 3.0])
    assert (found.mean, found.count) == (2.0, 3) and found.high - 2.0 == pytest.approx(4.303 / math.sqrt(3))
    assert math.isnan(Mean.of([1.0]).low) and math.isnan(Mean.of([1.0, math.inf]).mean)
    eleven = Mean.of([float(number) for number in range(11)])
    assert eleven.high - 5.0 == pytest.approx(2.228 * math.sqrt(11) / math.sqrt(11))


def report(kind: Any, trials: list[StudyTrial]) -> StudyReport:
    found = run_trials(trials, say=lambda line: None)
    metric = "samples/s" if kind == "scaling" else metric_of(found, None)
    return StudyReport(kind=kind, name="demo", metric=metric, trials=found)


def test_a_scaling_study_shows_speed_up_and_efficiency(ran: list[str]) -> None:
    trials = scaling_trials(job(storage=storage()), [1, 2], ["synchronous"], 2, 20)
    done(trials, lambda trial: (0.9, 0.2 / (1 + 0.6 * (trial.x - 1))))
    found = report("scaling", trials)
    row = next(line.split() for line in printed(found.view()).splitlines() if line.split()[:2] == ["synchronous", "2"])
    assert row[-3:] == ["2", "1.60", "80%"], "seeds, speed-up, efficiency"
    data = found.data()
    assert [(entry["x"], entry["seeds"]) for entry in data["rows"]] == [(1, 2), (2, 2)] and len(data["runs"]) == 4
    assert data["rows"][1]["mean"] == pytest.approx(2048.0)
    assert ">ideal<" in found.page()


@pytest.fixture
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster and the model that predictions start from."""
    monkeypatch.setattr(study_predictions, "discover", lambda: Cluster.parse("2xCPU"))
    monkeypatch.setattr(study_predictions, "connect", lambda: True)
    model = tw.transformer_profile(hidden=64, layers=2, heads=2, sequence=16, vocabulary=100)
    monkeypatch.setattr(study_predictions, "profile_of", lambda prepared: model)


@pytest.mark.usefixtures("two_cpus")
def test_more_workers_than_were_measured_are_predicted_on_another_cluster(ran: list[str]) -> None:
    trials = scaling_trials(job(storage=storage()), [1, 2], ["synchronous"], 1, 20)
    done(trials, lambda trial: (0.9, 0.2 / trial.x))
    measured = report("scaling", trials)
    predictions = predict_scaling(measured.trials, Cluster.parse("9x1xCPU@10Gb"))
    ((label, (four, eight)),) = predictions.items()
    assert (label, four.x, eight.x) == ("synchronous", 4, 8)
    assert all(each.low < each.mean < each.high for each in (four, eight))
    assert 640 < four.mean < eight.mean, "the model is fitted to 640 samples/s with two workers"
    found = replace(measured, predictions=predictions, predicted_for="9x1xCPU@10Gb")
    assert "for 9x1xCPU@10Gb" in printed(found.view()) and ">synchronous, predicted<" in found.page()
    assert [entry["x"] for entry in found.data()["predicted"]] == [4, 8]
    for cluster, batch_size, told in (
        ("3x1xCPU", 64, "3 workers are not twice"),
        ("4x1xCPU", 3, "batch_size=3 has no"),
    ):
        with pytest.raises(PlanError, match=told):
            check_larger(Cluster.parse(cluster), 2, batch_size)


def test_a_finished_run_whose_workers_had_other_threads_is_refused(ran: list[str]) -> None:
    trials = scaling_trials(job(storage=storage(), threads_per_worker=4), [2], ["synchronous"], 1, 20)
    done(trials, lambda trial: (0.9, 0.1))
    with pytest.raises(JobError, match=r"was made with 1 CPU threads for each worker, and this study has 4"):
        run_trials(trials, say=lambda line: None)


def test_one_asynchronous_worker_is_refused() -> None:
    with pytest.raises(JobError, match="needs two workers or more"):
        scaling_trials(job(), [1], ["asynchronous"], 1, 10)


def test_a_batch_study_compares_final_metrics_at_equal_epochs(ran: list[str]) -> None:
    trials = batch_trials(job(storage=storage()), [32, 64], 3)
    done(trials, lambda trial: (0.9 - 0.01 * trial.seed - (trial.x == 64) / 10, 0.1))
    found = report("batch", trials)
    assert found.means["same rate", 64].mean == pytest.approx(0.79)
    assert found.means["same rate", 32].low == pytest.approx(0.89 - 4.303 * 0.01 / math.sqrt(3))
    assert "accuracy by batch size" in found.page() and "linear rule" in printed(found.view())
    assert "iou[/road]" in printed(replace(found, metric="iou[/road]").view())


def test_a_convergence_study_has_curves_over_time_and_samples_on_a_page_without_scripts(ran: list[str]) -> None:
    trials = convergence_trials(job(storage=storage()), [1, 2], ["synchronous", "asynchronous"], 2)
    done(trials, lambda trial: (0.9, 0.1))
    page, html = Balance(), report("convergence", trials).page()
    page.feed(html)
    assert page.open == [] and "script" not in page.tags and all(target.startswith("#") for target in page.fetched)
    for told in ("accuracy over time", "accuracy over samples", "asynchronous, 2 workers", "1 node, 2 CPUs"):
        assert told in html


@pytest.mark.usefixtures("two_cpus")
def test_more_synchronous_workers_converge_as_the_measured_ones_at_a_predicted_throughput(
    ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = convergence_trials(job(storage=storage()), [1, 2], ["synchronous"], 2)
    done(trials, lambda trial: (0.9, 0.2 / trial.x))
    measured = report("convergence", trials)
    predictions = predict_scaling(measured.trials, Cluster.parse("4x1xCPU@10Gb"))
    found = replace(measured, predictions=predictions, predicted_for="4x1xCPU@10Gb")
    assert "synchronous, 4 workers, predicted" in found.page()
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(study_report, "bands_chart", lambda name, *_, beyond=None: str(drawn.update({name: beyond})))
    found.page()
    assert drawn["accuracy by samples"] is None
    ((name, curve),) = drawn["accuracy by seconds of steps"].items()
    history = measured.trials[-1].history
    assert history is not None and name == "synchronous, 4 workers"
    samples = [sum(record.samples for record in history.records if record.step <= at.step) for at in history.evaluated]
    rate = predictions["synchronous"][0].mean
    assert [band.x for band in curve] == pytest.approx([count / rate for count in samples])
    assert [band.mean for band in curve] == pytest.approx([at.metrics["accuracy"] for at in history.evaluated])
    (row,) = [line.split() for line in printed(found.view()).splitlines() if line.split()[1:2] == ["predicted"]]
    assert row == ["synchronous,", "predicted", "4", "-", "-", "-", *duration(curve[-1].x).split()]


def test_runs_that_were_evaluated_once_have_points_with_intervals_and_no_curves(ran: list[str]) -> None:
    trials = convergence_trials(job(storage=storage()), [1], ["synchronous"], 2)
    done(trials, lambda trial: (0.9 - 0.1 * trial.seed, 0.1), evaluations=(20,))
    html = report("convergence", trials).page()
    assert "The runs were evaluated once, so that there are no curves: see evaluate_epochs=." in html
    assert html.count('stroke-opacity="0.5"') == 2, "the interval of the point, over time and over samples"


def test_a_metric_that_was_not_evaluated_is_refused_with_the_known_ones(ran: list[str]) -> None:
    trials = convergence_trials(job(storage=storage()), [1], ["synchronous"], 1)
    done(trials, lambda trial: (0.9, 0.1))
    with pytest.raises(KeyError, match="loss, accuracy"):
        metric_of(run_trials(trials, say=lambda line: None), "f1")


def test_the_command_refuses_what_is_not_a_size_and_a_metric_that_no_run_evaluates(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(JOB.format(storage=str(tmp_path / "runs")))
    for wrong, told in (("50,x", "are not numbers"), ("50 --metric f1", "--metric f1 is neither 'loss' nor one of")):
        found = CliRunner().invoke(app, ["study", "batch", str(file), "--sizes", *wrong.split()])
        assert isinstance(found.exception, JobError) and told in str(found.exception), found.output
    two = ["--workers", "1,2", "--mode", "asynchronous", "--predict", "2x1xCPU"]
    alone = ["--mode", "asynchronous", "--predict", "16x1xCPU@10Gb"]
    found = CliRunner().invoke(app, ["study", "convergence", str(file), *alone])
    assert isinstance(found.exception, JobError) and "of synchronous training" in str(found.exception)
    found = CliRunner().invoke(app, ["study", "scaling", str(file), *two])
    assert isinstance(found.exception, PlanError) and "asynchronous, 1: left out" in found.output
    assert not (tmp_path / "runs").exists()
