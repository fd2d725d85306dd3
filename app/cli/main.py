"""The command line `trainwright`: the list of commands, those that show runs, and how errors become exit codes.

Results go to stdout, messages to stderr. Commands that only read need neither Ray nor a framework.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from trainwright.cli import cluster_commands, plan_commands, run_commands
from trainwright.cli.data_commands import data as data_commands
from trainwright.cli.options import AsJson, Storage, print_json, terminal_console
from trainwright.core.errors import JobError, Stopped, TrainwrightError, escape_control_characters
from trainwright.core.redaction import redact
from trainwright.submit.job_credentials import received_credentials

app = typer.Typer(
    name="trainwright",
    help="Distributed training on Ray that survives failures and explains itself.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for _command in (
    run_commands.fit,
    run_commands.distill,
    plan_commands.plan,
    plan_commands.strategies,
    run_commands.evaluate,
    run_commands.export,
    run_commands.predict,
    run_commands.submit,
    run_commands.chaos,
    plan_commands.simulate,
    plan_commands.probe,
    cluster_commands.init,
    cluster_commands.doctor,
):
    app.command()(_command)
app.add_typer(data_commands, name="data")

_RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")]


@app.command()
def runs(storage: Storage = "runs", as_json: AsJson = False) -> None:
    """List the runs of a storage."""
    from trainwright.reporting import run_views

    _show(run_views.runs_view(storage), as_json)


@app.command()
def show(run: _RunName, storage: Storage = "runs", as_json: AsJson = False) -> None:
    """Show state, plan, progress, metrics and failures of a run."""
    from trainwright.reporting import run_views

    _show(run_views.run_view(storage, run), as_json)


@app.command()
def logs(
    run: _RunName,
    storage: Storage = "runs",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the run ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the events of a run, one line each."""
    from trainwright.reporting import run_views

    for line in run_views.log_lines(storage, run, follow=follow, as_json=as_json):
        print(line, flush=follow)


def main() -> None:
    """Run the command line. Errors become plain text; the exit code is 2 for an invalid job, 1 for a failed run."""
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
    error.remedy = plan_commands.with_option_names(error.remedy)
    print(escape_control_characters(redact(f"error: {error}")), file=sys.stderr)
    sys.exit(code)


def _show(view: Any, as_json: bool) -> None:
    if as_json:
        print_json(view.data)
    else:
        terminal_console().print(view)
