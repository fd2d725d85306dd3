"""Commands that read or change runs through their storage alone: runs, show, watch, logs, compare, stop and rm."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from trainwright.cli.options import AsJson, Html, Storage, print_json, terminal_console, write_file
from trainwright.core.errors import RunConflict

_STOP_DEADLINE_S = 600.0
_RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")]


def runs(storage: Storage = "runs", as_json: AsJson = False) -> None:
    """List the runs of a storage."""
    from trainwright.reporting import run_views

    _show(run_views.runs_view(storage), as_json)


def show(run: _RunName, storage: Storage = "runs", as_json: AsJson = False) -> None:
    """Show state, plan, progress, metrics and failures of a run."""
    from trainwright.reporting import run_views

    _show(run_views.run_view(storage, run), as_json)


def watch(
    run: _RunName,
    storage: Storage = "runs",
    web: Annotated[bool, typer.Option("--web", help="Show it in a browser instead, as a live page.")] = False,
    host: Annotated[
        str,
        typer.Option(help="With --web, listen on this address; others than this machine's need the token in the URL."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --web, listen on this port; 0 for any.")] = 0,
) -> None:
    """Show a run while it trains, until it ends. Ctrl-C ends only this command."""
    if not web and (host, port) != ("127.0.0.1", 0):
        raise typer.BadParameter("--host and --port need --web")
    if web:
        from trainwright.reporting.live_page import LivePage
        from trainwright.reporting.stored_run import open_run

        page = LivePage(open_run(run, storage), host, port)
        print(f"{run} is shown at {page.url} until Ctrl-C", flush=True)
        page.serve()
        return
    from rich.live import Live

    from trainwright.reporting import run_views

    with Live(console=terminal_console(), auto_refresh=False, vertical_overflow="crop") as live:
        run_views.watch_run(storage, run, lambda content: live.update(content, refresh=True))


def compare(
    names: Annotated[list[str], typer.Argument(metavar="RUN RUN ...", help="Names of the runs.")],
    price: Annotated[
        float | None,
        typer.Option(metavar="DOLLARS", help="Dollars an hour of one accelerator: adds the cost."),
    ] = None,
    storage: Storage = "runs",
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Show runs side by side: figures, and how their jobs differ."""
    from trainwright.reporting.run_comparison import compare as compare_runs

    if len(set(names)) < 2:
        raise typer.BadParameter("give the names of two runs or more")

    comparison = compare_runs(*names, storage=storage, price=price)
    if html is not None:
        write_file(html, comparison.page(), "--html")
    _show(comparison.view(), as_json)


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
        if not found.wait(_STOP_DEADLINE_S):
            raise RunConflict(
                f"{run} still runs after {_STOP_DEADLINE_S:g} s",
                where=found.folder,
                remedy=f"`trainwright show {run} --storage {storage}` shows what it does; --now stops it at once",
            )
        print(f"{run} is {found.state} after step {found.read().summary.step:,}")


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


def _show(view: Any, as_json: bool) -> None:
    if as_json:
        print_json(view.data)
    else:
        terminal_console().print(view)
