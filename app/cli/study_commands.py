"""Commands of studies: many runs of one job, and what they found in one table and one figure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.cli.options import AsJson, Html, JobFile, Overrides, print_json, terminal_console, write_file
from trainwright.core.errors import JobError, nearest

if TYPE_CHECKING:
    from trainwright.core.cluster import Cluster
    from trainwright.core.job import Job
    from trainwright.reporting.html.run_charts import Band
    from trainwright.studies.study_report import StudyReport
    from trainwright.studies.study_trials import StudyTrial

study = typer.Typer(
    name="study", help="Run a job many times: scaling, convergence, batch sizes.", no_args_is_help=True,
    rich_markup_mode=None,
)  # fmt: skip

_WorkerCounts = Annotated[str, typer.Option("--workers", metavar="N,...", help="Numbers of workers.")]
_Seeds = Annotated[int, typer.Option(min=1, help="Run each with this number of seeds.")]
_Mode = Annotated[
    list[str] | None,
    typer.Option("--mode", help="synchronous, asynchronous; by default the first alone. Repeatable."),
]
_Metric = Annotated[str | None, typer.Option(help="Compare this metric; by default the first beside the loss.")]
_Fresh = Annotated[bool, typer.Option("--fresh", help="Run finished trials again.")]
_Predict = Annotated[
    str | None, typer.Option(metavar="CLUSTER", help="Also predict more workers on this cluster: 8x1xCPU@10Gb.")
]


@study.command()
def scaling(
    file: JobFile,
    workers: _WorkerCounts = "1,2",
    mode: _Mode = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each run.")] = 200,
    seeds: _Seeds = 3,
    predict: _Predict = None,
    overrides: Overrides = None,
    fresh: _Fresh = False,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Measure throughput by the number of workers. The same command continues a stopped study."""
    from trainwright.studies.study_report import StudyReport
    from trainwright.studies.study_trials import scaling_trials

    job = _job(file, overrides)
    counts, modes = _compared(workers, mode)
    larger = _larger(predict, counts, job)
    trials = _run_all(scaling_trials(job, counts, modes, seeds, steps), fresh)
    report = StudyReport(
        kind="scaling", name=job.name, metric="samples/s", trials=trials, predictions=_predictions(trials, larger),
        predicted_for=predict or "",
    )  # fmt: skip
    _show(report, html, as_json)


@study.command()
def convergence(
    file: JobFile,
    workers: _WorkerCounts = "1,2",
    mode: _Mode = None,
    metric: _Metric = None,
    seeds: _Seeds = 3,
    predict: _Predict = None,
    overrides: Overrides = None,
    fresh: _Fresh = False,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Measure a metric over time and samples by the number of workers. The same command continues a stopped study.

    Predictions are of synchronous training alone.
    """
    from trainwright.studies.study_report import StudyReport
    from trainwright.studies.study_trials import convergence_trials

    job = _job(file, overrides)
    _check_metric(job, metric)
    counts, modes = _compared(workers, mode)
    if predict is not None and "synchronous" not in modes:
        raise JobError(["--predict: predictions are of synchronous training: add --mode synchronous, or leave it out"])
    larger = _larger(predict, counts, job)
    trials = _run_all(convergence_trials(job, counts, modes, seeds), fresh)
    synchronous = [trial for trial in trials if trial.label == "synchronous"]
    report = StudyReport(
        kind="convergence", name=job.name, metric=_compared_metric(trials, metric), trials=trials,
        predictions=_predictions(synchronous, larger), predicted_for=predict or "",
    )  # fmt: skip
    _show(report, html, as_json)


@study.command()
def batch(
    file: JobFile,
    sizes: Annotated[str, typer.Option(metavar="N,...", help="Batch sizes.")] = "64,256,1024,4096",
    metric: _Metric = None,
    seeds: _Seeds = 3,
    concurrent: Annotated[
        int, typer.Option(min=1, help="Most runs at a time, each on an equal share of the cluster.")
    ] = 1,
    overrides: Overrides = None,
    fresh: _Fresh = False,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Measure the final metric by batch size at equal epochs, with and without the linear rule for learning rates."""
    from trainwright.studies.study_report import StudyReport
    from trainwright.studies.study_trials import batch_trials

    job = _job(file, overrides)
    _check_metric(job, metric)
    done = _run_all(batch_trials(job, _numbers(sizes), seeds), fresh, concurrent)
    compared = _compared_metric(done, metric)
    _show(StudyReport(kind="batch", name=job.name, metric=compared, trials=done), html, as_json)


def _compared_metric(done: Sequence[StudyTrial], wanted: str | None) -> str:
    """Return the metric that a study compares. Raises JobError where the wanted one was not evaluated."""
    from trainwright.studies.study_report import metric_of

    try:
        return metric_of(done, wanted)
    except KeyError as known:
        raise JobError([f"--metric {wanted} was not evaluated; known: {known.args[0]}"]) from None


def _larger(predict: str | None, counts: Sequence[int], job: Job) -> Cluster | None:
    """Return the cluster that more workers are predicted on. Raises PlanError where it has no room for them."""
    from trainwright.core.cluster import Cluster
    from trainwright.studies.study_predictions import check_larger

    if predict is None:
        return None
    larger = Cluster.parse(predict)
    check_larger(larger, max(counts), job.batch_size)
    return larger


def _predictions(trials: Sequence[StudyTrial], larger: Cluster | None) -> dict[str, list[Band]]:
    from trainwright.studies.study_predictions import predict_scaling

    return predict_scaling(trials, larger) if larger is not None and trials else {}


def _run_all(trials: Sequence[StudyTrial], fresh: bool, concurrent: int = 1) -> list[StudyTrial]:
    from trainwright.studies.study_trials import run_trials

    return run_trials(
        trials, fresh=fresh, concurrent=concurrent, say=lambda line: print(line, file=sys.stderr, flush=True)
    )


def _show(report: StudyReport, html: str | None, as_json: bool) -> None:
    if html is not None:
        write_file(html, report.page(), "--html")
    view = report.view()
    if as_json:
        print_json(view.data)
    else:
        terminal_console().print(view.content)


def _job(file: str, overrides: list[str] | None) -> Job:
    from trainwright.planning.job_file import load_job

    return load_job(file, overrides or ())


def _check_metric(job: Job, metric: str | None) -> None:
    """Refuse a metric that no run will evaluate, before any run. Raises JobError."""
    known = ["loss", *job.metrics]
    if metric is not None and metric not in known and job.tensorflow.run == "step":
        raise JobError([f"--metric {metric} is neither 'loss' nor one of metrics=: {nearest(metric, known)}"])


def _numbers(text: str) -> list[int]:
    """Return `1,2,4` as numbers. Raises JobError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise JobError([f"{text!r} are not numbers: write them with commas, such as 1,2,4"])
    return sorted({int(part) for part in parts})


def _compared(workers: str, modes: list[str] | None) -> tuple[list[int], list[str]]:
    """Return numbers of workers and modes; say which of them do not go together. Raises JobError."""
    counts, known = _numbers(workers), _modes(modes)
    if 1 in counts and "asynchronous" in known:
        print("asynchronous, 1: left out, for a single worker never waits for another", file=sys.stderr)
    return counts, known


def _modes(given: list[str] | None) -> list[str]:
    from trainwright.studies.study_trials import MODES

    for mode in given or ():
        if mode not in MODES:
            raise JobError([f"--mode {mode}: {nearest(mode, MODES)}"])
    return [*dict.fromkeys(given or ("synchronous",))]
