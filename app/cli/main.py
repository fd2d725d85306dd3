"""The command line. Data goes to stdout, talk to stderr; read commands need no Ray and no framework."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from typing import Annotated, Any

import typer

from trainwright.cli.cluster_commands import doctor, init
from trainwright.cli.data_commands import data as data_commands
from trainwright.cli.plan_commands import simulate
from trainwright.cli.run_commands import chaos, submit
from trainwright.core.errors import JobError, Stopped, TrainwrightError, escape_control_characters, nearest
from trainwright.core.redaction import redact
from trainwright.submit.job_credentials import received_credentials

app = typer.Typer(
    name="trainwright",
    help="Distributed training on Ray that survives failures and explains itself.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(data_commands, name="data")
app.command()(chaos)
app.command()(doctor)
app.command()(init)
app.command()(simulate)
app.command()(submit)

_WIDTH = 120  # of tables in files and pipes

_JobFile = Annotated[str, typer.Argument(metavar="FILE.py", help="A job file: Python with a trainwright.Job in it.")]
_Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the job.")
]
_Strategy = Annotated[str | None, typer.Option(help="Pin a strategy.")]
_Workers = Annotated[int | None, typer.Option(help="Pin the number of workers.")]
_Resume = Annotated[bool, typer.Option("--resume", help="Go on although the job was changed.")]
_Fresh = Annotated[bool, typer.Option("--fresh", help="Begin the run of this name again.")]
_Student = Annotated[str | None, typer.Option(metavar="NAME", help="Of the file's distillation: this student alone.")]
_Storage = Annotated[str, typer.Option(help="Where the runs are: a folder or a URI.")]
_RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show Ray's own output and every checkpoint.")]


@app.command()
def fit(
    file: _JobFile,
    overrides: _Overrides = None,
    strategy: _Strategy = None,
    workers: _Workers = None,
    resume: _Resume = False,
    fresh: _Fresh = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Drive the run from the cluster and return at once.")
    ] = False,
    verbose: _Verbose = False,
) -> None:
    """Plan, provision, train, recover, report. The same command resumes a run that was stopped."""
    from trainwright import api

    if detach:
        job = _job(file, overrides, strategy, workers)
        api.start(job, resume=resume, fresh=fresh, verbose=verbose, detached=True)
        print(f"the cluster drives {job.name}; follow it with: trainwright logs {job.name} -f --storage {job.storage}")
        return
    run = api.fit(_job(file, overrides, strategy, workers), resume=resume, fresh=fresh, verbose=verbose)
    if run.state == "stopped":
        raise typer.Exit(128 + (run.signal or signal.SIGINT))
    _print_result(run, file, overrides or [])


@app.command()
def distill(
    file: Annotated[str, typer.Argument(metavar="FILE.py", help="Python with a Distillation, or a recipe, in it.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of it, of the student's job, of the loss."),
    ] = None,
    strategy: _Strategy = None,
    workers: _Workers = None,
    resume: _Resume = False,
    fresh: _Fresh = False,
    verbose: _Verbose = False,
) -> None:
    """Train students on what teachers say, and judge them beside these. The same command resumes what was stopped."""
    from trainwright import api
    from trainwright.distillation.distilled_run import DistilledRun
    from trainwright.planning.job_file import load_distillation

    found = load_distillation(file, _with_pins(overrides, strategy, workers))
    done: Any = api.distill(found, resume=resume, fresh=fresh, verbose=verbose)
    if getattr(done, "state", "done") == "stopped":
        raise typer.Exit(128 + (done.signal or signal.SIGINT))
    if isinstance(done, DistilledRun):
        _print_student_results(done, file, overrides or [])
    else:
        print(done)


@app.command()
def plan(
    file: _JobFile,
    overrides: _Overrides = None,
    strategy: _Strategy = None,
    workers: _Workers = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NxGxKIND", help="One that is not there: 128x8xH100-80GB, 4x8xA100-80GB@800Gb."),
    ] = None,
    aim: Annotated[
        str | None, typer.Option("--for", metavar="AIM", help="With --cluster: fastest (default), cheapest, smallest.")
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(metavar="PRICE", help="With --cluster: on-demand (default), spot, or dollars an hour of one."),
    ] = None,
    mtbf: Annotated[
        str | None, typer.Option(metavar="TIME", help="With --cluster: between failures of one accelerator: 50000h.")
    ] = None,
    critical_batch: Annotated[
        float | None, typer.Option(metavar="SAMPLES", help="With --cluster: the gradient noise scale.")
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(metavar="N,N", help="With --cluster: to compare by time to the target: 256,512.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="PLAN.json", help="Write the plan: --set plan=PLAN.json asks for it again.")
    ] = None,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write it as a page, with pictures.")] = None,
    as_json: _AsJson = False,
) -> None:
    """Show the chosen plan and the rejected ones, with reasons."""
    from dataclasses import asdict

    from trainwright import api
    from trainwright.cli.plan_commands import plan_arguments, write_html
    from trainwright.planning import job_file
    from trainwright.planning.planner import write_plan

    given = {
        "aim": aim, "price": price, "mtbf_hours": mtbf, "critical_batch": critical_batch, "batch_sizes": batch_sizes,
    }  # fmt: skip
    answer: Any = api.plan(
        job_file.load(file, _with_pins(overrides, strategy, workers)), **plan_arguments(cluster, given, out)
    )
    if out:
        write_plan(out, answer)
    if html:
        write_html(answer, html)
    if as_json:
        _print_json(asdict(answer))
    else:
        print(answer)


@app.command()
def probe(
    everything: Annotated[
        bool, typer.Option("--all", help="Also accelerators whose data sheet is known, and a core of a CPU.")
    ] = False,
) -> None:
    """Measure accelerators that nothing is known of; prints lines for a job file, so that plans know them."""
    from trainwright.planning.profiler import benchmark_accelerators as measure
    from trainwright.planning.profiler import format_as_python

    found = measure(everything=everything)
    if not found:
        print("the cluster has no accelerator that is not in the table; --all measures those as well", file=sys.stderr)
        return
    print("from trainwright.core.cluster import ACCELERATORS, Accelerator\n")
    print("\n".join(map(format_as_python, found)))


@app.command()
def evaluate(
    file: _JobFile,
    overrides: _Overrides = None,
    student: _Student = None,
    step: Annotated[int | None, typer.Option(help="The checkpoint at this step; by default the newest.")] = None,
    here: Annotated[bool, typer.Option("--here", help="In this process on one CPU.")] = False,
    verbose: _Verbose = False,
    as_json: _AsJson = False,
) -> None:
    """Loss and metrics of a run's checkpoint over the job's evaluation set.

    On workers of the cluster, under the plan that the run was trained under; in this process where it has one worker.
    """
    from trainwright import api

    metrics = api.evaluate(_trained(file, overrides, student), step=step, here=here, verbose=verbose)
    if as_json:
        _print_json(metrics)
    else:
        print("\n".join(f"{name:<20} {value:.6g}" for name, value in metrics.items()))


@app.command()
def export(
    file: _JobFile,
    path: Annotated[str, typer.Argument(metavar="PATH", help="By its ending: see below.")],
    overrides: _Overrides = None,
    student: _Student = None,
    step: Annotated[int | None, typer.Option(help="The checkpoint at this step; by default the newest.")] = None,
) -> None:
    """Write a run's model for use elsewhere.

    torch: `.safetensors` or `.pt`. Keras: `.keras`, `.weights.h5`, or no ending for the folder of a SavedModel.
    """
    from trainwright import api

    print(api.export(_trained(file, overrides, student), path, step=step))


@app.command()
def predict(
    file: _JobFile,
    to: Annotated[str, typer.Option(metavar="PATH", help="Folder of the predictions: a folder or a URI.")],
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Parquet files; by default the job's evaluation set.")
    ] = None,
    columns: Annotated[list[str] | None, typer.Option("--column", help="An output wanted; by default all.")] = None,
    keep: Annotated[list[str] | None, typer.Option("--keep", help="A column of the data to write too.")] = None,
    overrides: _Overrides = None,
    student: _Student = None,
    step: Annotated[int | None, typer.Option(help="The checkpoint at this step; by default the newest.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Workers of a pool; by default what the cluster has room for.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows given to the model at once.")] = None,
    range_rows: Annotated[int | None, typer.Option(min=1, help="Rows of a part, at most.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Compute again what the folder holds.")] = False,
    verbose: _Verbose = False,
    as_json: _AsJson = False,
) -> None:
    """Write the model's outputs for every row of a data set. The same command goes on where it was stopped.

    On workers of the cluster: those of the layout that the run was trained in where that divides the model, else, or
    with --workers, a pool of which each holds all of it.
    """
    from dataclasses import asdict

    from trainwright import api

    found = api.predict(
        _trained(file, overrides, student), data, to=to, columns=columns, keep=keep or (), step=step, workers=workers,
        batch_size=batch_size, range_rows=range_rows, fresh=fresh, verbose=verbose,
    )  # fmt: skip
    if as_json:
        _print_json(asdict(found))
    else:
        print(found)


@app.command()
def runs(storage: _Storage = "runs", as_json: _AsJson = False) -> None:
    """List the runs of a storage."""
    from trainwright.reporting import run_views

    _show(run_views.runs_view(storage), as_json)


@app.command()
def show(run: _RunName, storage: _Storage = "runs", as_json: _AsJson = False) -> None:
    """State, plan, progress, metrics, checkpoints and failures of a run."""
    from trainwright.reporting import run_views

    _show(run_views.run_view(storage, run), as_json)


@app.command()
def logs(
    run: _RunName,
    storage: _Storage = "runs",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    as_json: _AsJson = False,
) -> None:
    """What happened in a run, line by line."""
    from trainwright.reporting import run_views

    for line in run_views.log_lines(storage, run, follow=follow, as_json=as_json):
        print(line, flush=follow)


def main() -> None:
    """Entry of the console script: errors of ours in plain words, exit 2 for a wrong job and 1 for a failed run."""
    try:
        with received_credentials():
            app()
    except JobError as error:
        _exit_with_error(error, 2)
    except Stopped as error:
        _exit_with_error(error, 128 + error.signal)
    except TrainwrightError as error:
        _exit_with_error(error, 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _exit_with_error(error: TrainwrightError, code: int) -> None:
    from trainwright.cli.plan_commands import with_option_names

    error.remedy = with_option_names(error.remedy)
    print(escape_control_characters(redact(f"error: {error}")), file=sys.stderr)
    sys.exit(code)


def _job(file: str, overrides: list[str] | None, strategy: str | None, workers: int | None) -> Any:
    from trainwright.planning.job_file import load_job

    return load_job(file, _with_pins(overrides, strategy, workers))


def _trained(file: str, overrides: list[str] | None, student: str | None) -> Any:
    """The job of a file, or of one student of its distillation."""
    if student is None:
        return _job(file, overrides, None, None)
    from trainwright.distillation.trained_student import students
    from trainwright.planning.job_file import load_distillation

    found = students(load_distillation(file, overrides or ()))
    if student not in found:
        raise JobError([f"--student {student}: there is no such student: {nearest(student, found)}"])
    return found[student].job


def _with_pins(overrides: list[str] | None, strategy: str | None, workers: int | None) -> list[str]:
    """All overrides."""
    pinned = [f"strategy={strategy}"] if strategy is not None else []
    pinned += [f"workers={workers}"] if workers is not None else []
    return [*(overrides or []), *pinned]


def _show(view: Any, as_json: bool) -> None:
    from rich.console import Console

    if as_json:
        _print_json(view.data)
    else:
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(view)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, default=str))


def _print_result(run: Any, file: str, overrides: list[str]) -> None:
    """Where everything is, and how to use the model."""
    from trainwright.runtime.model_loading import loading_code

    again = "".join(f" --set {shlex.quote(item)}" for item in overrides)
    lines = [
        *_result_lines(run),
        f"model        {loading_code(file, overrides)}",
        f"evaluate     trainwright evaluate {shlex.quote(file)}{again}",
    ]
    print("\n".join(lines))


def _print_student_results(run: Any, file: str, overrides: list[str]) -> None:
    """The same of a distillation."""
    from trainwright.distillation.trained_student import student_loading_code

    again = "".join(f" --set {shlex.quote(item)}" for item in overrides)
    name = next(iter(run.students))
    lines = [
        *_result_lines(run),
        f"model        {student_loading_code(file, overrides)}",
        f"evaluate     trainwright evaluate {shlex.quote(file)}{again} --student {name}",
    ]
    print("\n".join(lines))


def _result_lines(run: Any) -> list[str]:
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in run.metrics.items())
    return [
        f"result       {metrics or 'no evaluation set'}",
        f"report       {run.report}",
        f"checkpoints  {run.folder}/checkpoints",
        f"tensorboard  {run.folder}/tensorboard",
    ]
