"""Commands that run a job or use a finished run: fit, distill, evaluate, export, predict, submit and chaos."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.cli.options import (
    AsJson,
    Fresh,
    JobFile,
    Overrides,
    Profile,
    Resume,
    Strategy,
    Verbose,
    Workers,
    print_json,
    terminal_console,
    with_pins,
)
from trainwright.core import formatting
from trainwright.core.errors import JobError, nearest

if TYPE_CHECKING:
    from trainwright.submit.job_submission import Submission, SubmitOptions

_Student = Annotated[str | None, typer.Option(metavar="NAME", help="Use this student of the file's distillation.")]


def _parse_step(text: str) -> int | str:
    """Return the value of --step. Raises BadParameter."""
    if text != "best" and not text.isdigit():
        raise typer.BadParameter(f"{text!r}: give the number of a step, or best")
    return text if text == "best" else int(text)


_Step = Annotated[
    Any,
    typer.Option(
        parser=_parse_step, metavar="STEP",
        help="Use the checkpoint of this step, or `best`, that of the best evaluation; by default the newest.",
    ),
]  # fmt: skip
_Address = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Address of Ray's dashboard; by default RAY_ADDRESS or http://127.0.0.1:8265."),
]
_Env = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Also send this environment variable, as a secret. Repeatable.")
]
_Folder = Annotated[str | None, typer.Option(metavar="DIR", help="Pack this folder; by default that of the job file.")]


def fit(
    file: JobFile,
    overrides: Overrides = None,
    strategy: Strategy = None,
    workers: Workers = None,
    profile: Profile = None,
    resume: Resume = False,
    fresh: Fresh = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Let the cluster drive the run, and return at once.")
    ] = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Train a job, recover from failures, and report. The same command resumes a stopped run."""
    from trainwright import api

    if detach:
        job = _job(file, overrides, strategy, workers, profile)
        api.start(job, resume=resume, fresh=fresh, verbose=verbose, detached=True)
        print(f"the cluster drives {job.name}; follow it with: trainwright logs {job.name} -f --storage {job.storage}")
        print(f"stop it with: trainwright stop {job.name} --storage {job.storage}")
        return
    if not as_json and Path(file).is_file():
        _print_message(f"loading {file}, trying its functions and choosing a plan")  # which takes seconds
    run = api.fit(_job(file, overrides, strategy, workers, profile), resume=resume, fresh=fresh, verbose=verbose)
    if as_json:
        from trainwright.reporting.run_views import run_view

        print_json(run_view(run.job.storage, run.name).data)
    if run.state == "stopped":
        raise typer.Exit(128 + (run.signal or signal.SIGINT))
    if as_json:
        return
    from trainwright.runtime.run_handle import loading_code

    _print_result(run, loading_code(run.job, file, overrides or []), _command_arguments(file, overrides))


def distill(
    file: Annotated[str, typer.Argument(metavar="FILE.py", help="Python with a Distillation or a recipe in it.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="Override a field of the distillation, the student's job or the loss."
        ),
    ] = None,
    strategy: Strategy = None,
    workers: Workers = None,
    profile: Profile = None,
    resume: Resume = False,
    fresh: Fresh = False,
    verbose: Verbose = False,
) -> None:
    """Train students on teacher outputs and compare both. The same command resumes a stopped run."""
    from trainwright import api
    from trainwright.distillation.distilled_run import DistilledRun
    from trainwright.distillation.trained_student import student_loading_code
    from trainwright.planning.job_file import load_distillation

    found = load_distillation(file, with_pins(overrides, strategy, workers, profile))
    done: Any = api.distill(found, resume=resume, fresh=fresh, verbose=verbose)
    if getattr(done, "state", "done") == "stopped":
        raise typer.Exit(128 + (done.signal or signal.SIGINT))
    if isinstance(done, DistilledRun):
        student = next(iter(done.students))  # as an example
        arguments = f"{_command_arguments(file, overrides)} --student {student}"
        _print_result(done, student_loading_code(file, overrides or []), arguments)
    else:
        print(done)


def evaluate(
    file: JobFile,
    overrides: Overrides = None,
    student: _Student = None,
    step: _Step = None,
    here: Annotated[bool, typer.Option("--here", help="Evaluate in this process on one CPU.")] = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Compute loss and metrics of a run on the job's evaluation set.

    Workers of the cluster compute them, with the plan that the run was trained with. If the plan has one worker, this
    process computes them.
    """
    from trainwright.inference.run_inference import evaluate as evaluate_run

    metrics = evaluate_run(_trained(file, overrides, student), step=step, here=here, verbose=verbose)
    if as_json:
        print_json(metrics)
    else:
        print("\n".join(f"{name:<20} {value:.6g}" for name, value in metrics.items()))


def export(
    file: JobFile,
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="File or folder to write. Its ending is the format: see above.")
    ],
    overrides: Overrides = None,
    student: _Student = None,
    step: _Step = None,
) -> None:
    """Export the model of a run for use without trainwright.

    The ending of PATH is the format. torch: `.safetensors`, `.pt`, `.pt2` (torch.export), `.onnx`, or `/` for a folder
    of save_pretrained. Keras: `.keras`, `.weights.h5`, or no ending for the folder of a SavedModel.
    """
    from trainwright import api

    print(api.export(_trained(file, overrides, student), path, step=step))


def predict(
    file: JobFile,
    to: Annotated[str, typer.Option(metavar="PATH", help="Write the predictions to this folder or URI.")],
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Read these parquet files; by default the job's evaluation set.")
    ] = None,
    columns: Annotated[
        list[str] | None, typer.Option("--column", help="Write this output of the model; by default all. Repeatable.")
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option("--keep", help="Also write this column of the data. Repeatable.")
    ] = None,
    overrides: Overrides = None,
    student: _Student = None,
    step: _Step = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Use a pool of this many workers; by default as many as the cluster has resources for."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Give this number of rows to the model at once.")
    ] = None,
    range_rows: Annotated[
        int | None, typer.Option(min=1, help="Write at most this number of rows into one part.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Compute again the rows that the folder already has.")] = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Write the model's outputs for every row of a data set. The same command resumes after a stop.

    If the run divided its model over workers, the same layout computes the outputs. Otherwise, or with --workers, each
    worker of a pool has the whole model.
    """
    from trainwright.inference.batch_inference import predict as predict_rows

    found = predict_rows(
        _trained(file, overrides, student), data, to=to, columns=columns, keep=keep or (), step=step, workers=workers,
        batch_size=batch_size, range_rows=range_rows, fresh=fresh, verbose=verbose,
    )  # fmt: skip
    if as_json:
        print_json(asdict(found))
    else:
        print(found)


def submit(
    file: Annotated[
        str, typer.Argument(metavar="FILE.py", help="Python with a Job, a Distillation or a recipe in it.")
    ],
    address: _Address = None,
    overrides: Overrides = None,
    strategy: Strategy = None,
    workers: Workers = None,
    profile: Profile = None,
    resume: Resume = False,
    fresh: Fresh = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Submit the job and return at once.")] = False,
    attach: Annotated[bool, typer.Option("--attach", help="Submit nothing; follow the run's latest job.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the run's job with a checkpoint.")] = False,
    env: _Env = None,
    no_credentials: Annotated[
        bool, typer.Option("--no-credentials", help="Send no storage credentials; the nodes have their own.")
    ] = False,
    folder: _Folder = None,
    verbose: Verbose = False,
) -> None:
    """Run a job file on a cluster, and follow its log. Send its folder, and exit with the job's exit code.

    If the job already runs, the same command follows it. If the run was stopped, the same command resumes it. Ctrl-C
    ends only this command: the job continues on the cluster.
    """
    from rich.text import Text

    from trainwright.submit.job_server import LogDisplay, job_server_address
    from trainwright.submit.job_submission import Submission, SubmitOptions, SubmitOutput

    if stop and attach:
        raise JobError(["--stop and --attach cannot be used together"])
    flags = {"--resume": resume, "--fresh": fresh, "--verbose": verbose}
    options = SubmitOptions(
        file=file,
        overrides=tuple(with_pins(overrides, strategy, workers, profile)),
        fit_options=tuple(name for name, on in flags.items() if on),
        env=tuple(env or ()),
        credentials=not no_credentials,
        folder=folder,
    )
    console = terminal_console()
    output = SubmitOutput(
        write_line=_print_message,
        make_display=lambda: LogDisplay(
            lambda line: console.print(Text(line), soft_wrap=True, highlight=False), verbose=verbose
        ),
        attach_command=_attach_command(options, address),
    )
    submission = Submission(options, job_server_address(address, os.environ), os.environ, output)
    code = submission.stop() if stop else _submit_and_follow(submission, attach=attach, wait=not no_wait)
    if code:
        raise typer.Exit(code)


def _submit_and_follow(submission: Submission, *, attach: bool, wait: bool) -> int:
    """Submit or attach, and follow the job if `wait` is set; return the exit code."""
    name = submission.submit(attach=attach)
    if not wait:
        _print_message(submission.follow_hint())
        return 0
    return submission.follow(name)


def _print_message(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _attach_command(options: SubmitOptions, address: str | None) -> str:
    """Return the command that follows the same job again."""
    parts = ["trainwright", "submit", options.file, *(["--address", address] if address else [])]
    parts += [part for item in options.overrides for part in ("--set", item)]
    return shlex.join(parts)


def chaos(
    file: JobFile,
    faults: Annotated[
        str, typer.Option(metavar="NAME,...", help="Inject these faults; by default all that fit the job.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Seed of the schedule of faults.")] = 0,
    every: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Inject random faults until the run ends, this far apart."),
    ] = None,
    overrides: Overrides = None,
    twice: Annotated[bool, typer.Option("--twice", help="Also check whether two runs without faults agree.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the runs after the test.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train with and without injected faults, and compare bitwise. Exit 0 if the two runs agree, else 1."""
    from rich.console import Console

    from trainwright import api
    from trainwright.chaos_testing.chaos_report import as_data, as_table
    from trainwright.planning.job_file import load_job

    messages = Console(stderr=True, highlight=False)
    names = [name.strip() for name in faults.split(",") if name.strip()]
    report = api.chaos(
        load_job(file, overrides or ()), faults=names, seed=seed, every_s=every, twice=twice, keep=keep,
        say=lambda line: messages.print(line, soft_wrap=True, markup=False),
    )  # fmt: skip
    if as_json:
        print(json.dumps(as_data(report), indent=2))
    else:
        terminal_console().print(as_table(report))
    if not report.passed:
        raise typer.Exit(1)


def _job(
    file: str, overrides: list[str] | None, strategy: str | None, workers: int | None, profile: str | None = None
) -> Any:
    from trainwright.planning.job_file import load_job

    return load_job(file, with_pins(overrides, strategy, workers, profile))


def _trained(file: str, overrides: list[str] | None, student: str | None) -> Any:
    """Return the job of a file, or that of one student of its distillation."""
    if student is None:
        return _job(file, overrides, None, None)
    from trainwright.distillation.trained_student import students
    from trainwright.planning.job_file import load_distillation

    found = students(load_distillation(file, overrides or ()))
    if student not in found:
        raise JobError([f"--student {student}: the distillation has no such student; {nearest(student, found)}"])
    return found[student].job


def _command_arguments(file: str, overrides: list[str] | None) -> str:
    return shlex.quote(file) + "".join(f" --set {shlex.quote(item)}" for item in overrides or ())


def _program() -> str:
    """Return what a shell calls this program by: its path where its environment is not activated."""
    called = Path(sys.argv[0])
    return os.path.relpath(called) if called.name == "trainwright" and not shutil.which(called.name) else "trainwright"


def _print_result(run: Any, loading_code: str, arguments: str) -> None:
    """Print where the results are, and how to use the model."""
    lines = [
        f"result       {formatting.metrics(run.metrics) or 'not evaluated'}",
        f"report       {run.report}",
        f"checkpoints  {run.folder}/checkpoints",
        f"tensorboard  {run.folder}/tensorboard",
        f"model        {loading_code}",
        f"evaluate     {_program()} evaluate {arguments}",
    ]
    print("\n".join(lines))
