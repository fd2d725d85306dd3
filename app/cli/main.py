"""The command line `trainwright`: the list of commands, and how errors become exit codes.

Results go to stdout, messages to stderr. Commands that only read need neither Ray nor a framework.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from trainwright.cli import cluster_commands, plan_commands, run_commands, stored_run_commands
from trainwright.cli.data_commands import data as data_commands
from trainwright.cli.study_commands import study as study_commands
from trainwright.core.errors import JobError, Stopped, TrainwrightError, escape_control_characters
from trainwright.core.peer_options import PEER_COMMANDS, advice_of
from trainwright.core.redaction import redact
from trainwright.submit.job_credentials import received_credentials

_COMMANDS: Mapping[str, tuple[Any, ...]] = {
    "Training": (run_commands.fit, run_commands.distill, run_commands.submit, study_commands, run_commands.chaos),
    "Runs": (
        *(stored_run_commands.runs, stored_run_commands.show, stored_run_commands.watch, stored_run_commands.logs),
        *(stored_run_commands.compare, stored_run_commands.stop, stored_run_commands.rm),
    ),
    "Trained models": (run_commands.evaluate, run_commands.predict, run_commands.export),
    "Planning": (plan_commands.plan, plan_commands.strategies, plan_commands.simulate, plan_commands.probe),
    "Data and clusters": (data_commands, cluster_commands.init, cluster_commands.doctor),
}
"""Functions and groups of commands, by the heading under which the help lists them."""


_TRAINING = ("fit", "distill", "submit", "study", "chaos", "plan")  # with options that are fields of a job
_TRAINED = ("evaluate", "predict", "export")  # of a run, which has its plan
_UsageError: Any = typer.BadParameter.__base__  # of click, or of typer's own copy of it


class _GroupedCommands(TyperGroup):
    """Lists the commands in groups."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command; for a name from another trainer, say which one it is here."""
        if args and args[0] in PEER_COMMANDS and not ctx.resilient_parsing:
            ctx.fail(f"There is no command '{args[0]}'. Use 'trainwright {PEER_COMMANDS[args[0]]}'.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each group under its heading."""
        for heading, commands in _COMMANDS.items():
            names = [str(each.info.name) if isinstance(each, typer.Typer) else each.__name__ for each in commands]
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
for _command in (each for commands in _COMMANDS.values() for each in commands):
    if isinstance(_command, typer.Typer):
        app.add_typer(_command)
    else:
        app.command()(_command)


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


def main() -> None:
    """Run the command line. Errors become plain text; the exit code is 2 for an invalid job, 1 for a failed run."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # a job file imports Keras before trainwright's own engines do
    try:
        _refuse_unknown_options(sys.argv[1:])
        with received_credentials():
            _run(for_program="--json" in sys.argv[1:])
    except JobError as error:
        _exit_with_error(error, 2)
    except Stopped as error:
        _exit_with_error(error, 128 + error.signal)
    except TrainwrightError as error:
        _exit_with_error(error, 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _run(*, for_program: bool) -> None:
    """Run the command; for a program, a wrong use of it is an object too."""
    if not for_program:
        app()
        return
    try:
        code = app(standalone_mode=False, prog_name="trainwright")
    except _UsageError as error:
        used = error.ctx.command_path if error.ctx else "trainwright"
        told = TrainwrightError(error.format_message(), where=used, remedy=f"see `{used} --help`")
        _exit_with_error(told, 2)
    except typer.Abort:  # Ctrl-C, or a question that was not answered with yes
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _refuse_unknown_options(arguments: Sequence[str]) -> None:
    """Exit with what to write, where an option is a field of the job, or one of another trainer."""
    command: Any = get_command(app)
    words = list(arguments)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    if not arguments or arguments[0] not in (*_TRAINING, *_TRAINED):
        return
    advice_on = _advice if arguments[0] in _TRAINING else _advice_on_trained
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        option, _, value = word.partition("=")
        if option.startswith("--") and option not in known and (advice := advice_on(option[2:], value, known)):
            _exit_with_error(TrainwrightError(f"there is no option {option}", remedy=advice), 2)


def _advice(option: str, value: str, known: Collection[str]) -> str:
    """Return what to write instead of an option that a command does not have; empty where nothing is known."""
    from trainwright.core.job import GROUP_OF, Job

    name = option.replace("-", "_")
    if name in Job.model_fields or name in GROUP_OF:
        return f"use --set {name}={value or 'VALUE'}"
    fields = "|".join(sorted({*Job.model_fields, *GROUP_OF}, key=len, reverse=True))
    return re.sub(
        rf"(?<![\w(])({fields})=",
        lambda found: f"--{found[1]} " if f"--{found[1]}" in known else f"--set {found[1]}=",
        advice_of(name),
    )


def _advice_on_trained(option: str, _value: str, known: Collection[str]) -> str:
    """Return what to write for a command that takes a run as it was trained; empty where nothing is known."""
    from trainwright.core.job import GROUP_OF, Job

    name = option.replace("-", "_")
    meant = advice_of(name) or (f"{name}=" if name in Job.model_fields or name in GROUP_OF else "")
    own = [word for word in re.findall(r"(\w+)=", meant) if f"--{word.replace('_', '-')}" in known]
    if own:
        return f"use --{own[0].replace('_', '-')}"
    return "it is an option of training: the run is used as it was trained" if meant else ""


def _exit_with_error(error: TrainwrightError, code: int) -> None:
    """Print an error and exit; with `--json` in the command as an object, for programs."""
    error.remedy = plan_commands.with_option_names(error.remedy)
    if "--json" in sys.argv[1:]:
        fields = {name: redact(getattr(error, name)) for name in ("what", "where", "remedy", "detail")}
        print(json.dumps({"error": {"type": type(error).__name__, **fields, "exit_code": code}}), file=sys.stderr)
        sys.exit(code)
    detail = f"{error.detail.rstrip()}\n\n" if error.detail else ""  # what happened stands last, where one looks
    print(escape_control_characters(redact(f"{detail}error: {error.summary}")), file=sys.stderr)
    sys.exit(code)
