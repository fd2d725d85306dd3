"""`trainwright doctor`: look at this machine, at every node of a cluster, or at a cluster file, with remedies."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

_WIDTH = 120  # of tables in files and pipes


def doctor(
    file: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="A cluster file, .yaml or .sbatch; else machines are looked at."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="A Ray cluster, all nodes of it; by default RAY_ADDRESS, else only this."
        ),
    ] = None,
    storage: Annotated[
        str | None, typer.Option(metavar="URI", help="Try this storage: a folder, s3://, gs://, az://.")
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="FILE.py", help="Try the storage of this job, and look for its data.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Do not import Ray and the frameworks.")] = False,
    deadline: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="For a node to answer.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: every finding.")] = False,
) -> None:
    """Say what is wrong with this machine or cluster, and what to do: exit 1 when something is bad, else 0."""
    from rich.console import Console

    from trainwright import api

    found = api.doctor(file, address=address, storage=storage, job=job, imports=not quick, deadline_s=deadline)
    if as_json:
        print(json.dumps(found.data(), indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False).print(found)
    if found.verdict == "bad":
        raise typer.Exit(1)
