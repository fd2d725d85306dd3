"""`trainwright submit`: a job file run by a cluster, followed from here."""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.core.errors import JobError

if TYPE_CHECKING:
    from trainwright.submit.job_submission import Submission, SubmitOptions

_WIDTH = 120  # of lines in files and pipes


_Address = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Of Ray's dashboard; by default RAY_ADDRESS or http://127.0.0.1:8265."),
]
_Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the job.")
]


def submit(
    file: Annotated[str, typer.Argument(metavar="FILE.py", help="Python with a Job, Distillation or recipe in it.")],
    address: _Address = None,
    overrides: _Overrides = None,
    strategy: Annotated[str | None, typer.Option(help="Pin a strategy.")] = None,
    workers: Annotated[int | None, typer.Option(help="Pin the number of workers.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on although the job was changed.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin the run of this name again.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Submit, and return at once.")] = False,
    attach: Annotated[bool, typer.Option("--attach", help="Submit nothing: follow the run's job as it is.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the run's job with a checkpoint.")] = False,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Send this environment variable too, as a secret.")
    ] = None,
    no_credentials: Annotated[
        bool, typer.Option("--no-credentials", help="Send none of storage; nodes have their own.")
    ] = False,
    folder: Annotated[str | None, typer.Option(metavar="DIR", help="To pack; by default the file's own.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show Ray's own output and every checkpoint.")
    ] = False,
) -> None:
    """Run a job file on a cluster: pack its folder, send it, follow its log; exit with the job's own code.

    The same command follows the job where it is under way already, and resumes the run where it was stopped. Ctrl-C
    leaves it running.
    """
    from rich.console import Console

    from trainwright.submit.job_log import LogDisplay
    from trainwright.submit.job_server import job_server_address
    from trainwright.submit.job_submission import Submission, SubmitOptions, SubmitOutput

    if stop and attach:
        raise JobError(["--stop and --attach: give one of them"])
    pinned = [f"strategy={strategy}"] if strategy is not None else []
    pinned += [f"workers={workers}"] if workers is not None else []
    flags = {"--resume": resume, "--fresh": fresh, "--verbose": verbose}
    wish = SubmitOptions(
        file=file, overrides=(*(overrides or ()), *pinned), options=tuple(name for name, on in flags.items() if on),
        env=tuple(env or ()), credentials=not no_credentials, folder=folder,
    )  # fmt: skip
    out = Console(width=None if sys.stdout.isatty() else _WIDTH)
    talk = SubmitOutput(say=_say, screen=lambda: LogDisplay(out, verbose=verbose), again=_attach_command(wish, address))
    submission = Submission(wish, job_server_address(address, os.environ), os.environ, talk)
    code = submission.stop() if stop else _run(submission, attach=attach, wait=not no_wait)
    if code:
        raise typer.Exit(code)


def _run(submission: Submission, *, attach: bool, wait: bool) -> int:
    """Submit or attach, and follow; the exit code."""
    name = submission.submit(attach=attach)
    if not wait:
        _say(submission.ways())
        return 0
    return submission.follow(name)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _attach_command(wish: SubmitOptions, address: str | None) -> str:
    """The command that comes back to the same job."""
    parts = ["trainwright", "submit", wish.file, *(["--address", address] if address else [])]
    parts += [part for item in wish.overrides for part in ("--set", item)]
    return shlex.join(parts)


# --- `trainwright chaos` ----------------------------------------------------------------------------------------------


_TABLE_WIDTH = 120  # of tables in files and pipes


def chaos(
    file: Annotated[str, typer.Argument(metavar="FILE.py", help="A job file: Python with a trainwright.Job in it.")],
    faults: Annotated[
        str, typer.Option(metavar="NAME,...", help="Faults to give; by default all that fit the job.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Of the schedule of faults.")] = 0,
    every: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Go on with random faults until the end, so far apart."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the job.")
    ] = None,
    twice: Annotated[bool, typer.Option("--twice", help="Ask too whether two unbroken runs agree.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the runs where they are.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train the job unbroken and under faults: exit 0 when the two agree bitwise, 1 when they do not."""
    from rich.console import Console

    from trainwright import api
    from trainwright.chaos_testing.chaos_report import as_data, as_table
    from trainwright.planning.job_file import load_job

    talk = Console(stderr=True, highlight=False)
    names = [name.strip() for name in faults.split(",") if name.strip()]
    verdict = api.chaos(
        load_job(file, overrides or ()), faults=names, seed=seed, every_s=every, twice=twice, keep=keep,
        say=lambda line: talk.print(line, soft_wrap=True, markup=False),
    )  # fmt: skip
    if as_json:
        print(json.dumps(as_data(verdict), indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH).print(as_table(verdict))
    if not verdict.passed:
        raise typer.Exit(1)
