"""`trainwright chaos`: train a job unbroken and under faults, and say whether that changes a bit."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

_WIDTH = 120  # of tables in files and pipes


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
    from trainwright.chaos_testing.verdict_view import as_data, as_table
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
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(as_table(verdict))
    if not verdict.passed:
        raise typer.Exit(1)
