"""`trainwright --help`, as a new user reads it."""

from __future__ import annotations

from typer.testing import CliRunner

from trainwright.cli.main import app


def test_each_command_has_a_whole_sentence() -> None:
    shown = CliRunner().invoke(app, ["--help"], terminal_width=80).stdout
    commands = shown.partition("Commands:")[2].strip().splitlines()
    assert len(commands) == len(app.registered_commands) + len(app.registered_groups)
    assert all(line.endswith(".") and not line.endswith("...") for line in commands), shown
