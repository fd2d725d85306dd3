"""The command line `trainwright`: the list of commands, those that show runs, and how errors become exit codes.

Results go to stdout, messages to stderr. Commands that only read need neither Ray nor a framework.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trainwright.cli import cluster_commands, plan_commands, run_commands
from trainwright.cli.data_commands import data as data_commands
from trainwright.cli.options import AsJson, Html, Storage, print_json, terminal_console, write_file
from trainwright.cli.study_commands import study as study_commands
from trainwright.core.errors import JobError, Stopped, TrainwrightError, escape_control_characters
from trainwright.core.peer_options import PEER_OPTIONS
from trainwright.core.redaction import redact
from trainwright.submit.job_credentials import received_credentials

_GROUPS = {
    "Training": ("fit", "distill", "submit", "study", "chaos"),
    "Runs": ("runs", "show", "watch", "logs", "compare", "stop", "rm"),
    "Trained models": ("evaluate", "predict", "export"),
    "Planning": ("plan", "strategies", "simulate", "probe"),
    "Data and clusters": ("data", "init", "doctor"),
}


class _GroupedCommands(TyperGroup):
    """Lists the commands in groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each group under its heading."""
        for heading, names in _GROUPS.items():
            with formatter.section(heading):
                width = formatter.width - formatter.current_indent - max(map(len, self.commands)) - 4
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in names])


app = typer.Typer(
    name="trainwright",
    cls=_GroupedCommands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for _command in (
    *(run_commands.fit, run_commands.distill, run_commands.submit, run_commands.chaos),
    *(run_commands.evaluate, run_commands.predict, run_commands.export),
    *(plan_commands.plan, plan_commands.strategies, plan_commands.simulate, plan_commands.probe),
    *(cluster_commands.init, cluster_commands.doctor),
):
    app.command()(_command)
app.add_typer(data_commands, name="data")
app.add_typer(study_commands, name="study")

_RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"trainwright {version('trainwright')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Distributed training on Ray that survives failures and explains itself."""


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
def watch(run: _RunName, storage: Storage = "runs") -> None:
    """Show a run while it trains, until it ends. Ctrl-C ends only this command."""
    from rich.live import Live

    from trainwright.reporting import run_views

    with Live(console=terminal_console(), auto_refresh=False, vertical_overflow="crop") as live:
        run_views.watch_run(storage, run, lambda content: live.update(content, refresh=True))


@app.command()
def compare(
    names: Annotated[list[str], typer.Argument(metavar="RUN RUN ...", help="Names of the runs.")],
    storage: Storage = "runs",
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Show runs side by side: figures, and how their jobs differ."""
    from trainwright.reporting.run_comparison import compare as compare_runs

    comparison = compare_runs(*names, storage=storage)
    if html is not None:
        write_file(html, comparison.page(), "--html")
    _show(comparison.view(), as_json)


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


@app.command()
def stop(
    run: _RunName,
    storage: Storage = "runs",
    now: Annotated[bool, typer.Option("--now", help="Stop at once, without a checkpoint.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return as soon as the stop is requested.")] = False,
) -> None:
    """Stop a run with a checkpoint, wherever its driver is. The command that started the run resumes it."""
    from trainwright.reporting.stored_run import open_run

    found = open_run(run, storage)
    found.stop(now)
    print(f"asked the driver of {run} to stop", file=sys.stderr)
    if not no_wait:
        found.wait()
        print(f"{run} is {found.state} after step {found.read().summary.step:,}")


@app.command()
def rm(
    run: _RunName,
    storage: Storage = "runs",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a run with its checkpoints, events and report."""
    from trainwright.storage.object_store import open_store
    from trainwright.storage.run_control import check_run, remove_run

    store = open_store(storage)
    check_run(store, run)
    if not yes:
        typer.confirm(f"delete {store.uri_of(run)} with all its checkpoints?", abort=True, err=True)
    print(f"deleted {run}: {remove_run(store, run):,} files")


def main() -> None:
    """Run the command line. Errors become plain text; the exit code is 2 for an invalid job, 1 for a failed run."""
    try:
        _refuse_peer_options(sys.argv[1:])
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


def _refuse_peer_options(arguments: Sequence[str]) -> None:
    """Exit with what an option of another trainer is called here."""
    for argument in arguments:
        name = argument[2:].partition("=")[0].replace("-", "_")
        if argument.startswith("--") and name in PEER_OPTIONS:
            remedy = f"use {PEER_OPTIONS[name]}; fields of the job are set with --set NAME=VALUE"
            _exit_with_error(TrainwrightError(f"there is no option --{argument[2:]}", remedy=remedy), 2)


def _exit_with_error(error: TrainwrightError, code: int) -> None:
    error.remedy = plan_commands.with_option_names(error.remedy)
    print(escape_control_characters(redact(f"error: {error}")), file=sys.stderr)
    sys.exit(code)


def _show(view: Any, as_json: bool) -> None:
    if as_json:
        print_json(view.data)
    else:
        terminal_console().print(view)
