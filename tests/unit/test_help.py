"""`trainwright --help`, as a new user reads it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import trainwright as tw
from trainwright.cli.main import app, main
from trainwright.core.peer_options import PEER_OPTIONS


def test_each_command_has_a_whole_sentence() -> None:
    shown = CliRunner().invoke(app, ["--help"], terminal_width=80).stdout
    listed = shown.partition("Training:")[2].splitlines()
    commands = [line.strip() for line in listed if line.startswith("  ")]
    assert len(commands) == len(app.registered_commands) + len(app.registered_groups)
    assert all(line.endswith(".") and not line.endswith("...") for line in commands), shown


def test_the_version_is_that_of_the_package() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"trainwright {tw.__version__}\n"


def test_options_of_other_trainers_are_explained_and_none_of_ours(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["trainwright", "fit", "job.py", "--num-workers=4"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(
        "error: there is no option --num-workers=4\n  -> use workers=; fields of the job are set with"
    )
    commands = [*get_command(app).commands.values()]  # type: ignore[attr-defined]
    ours = {name.strip("-").replace("-", "_") for each in commands for option in each.params for name in option.opts}
    assert {"workers", "storage", "fresh"} <= ours and not ours & PEER_OPTIONS.keys()


def test_errors_are_objects_for_programs(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["trainwright", "show", "lost", "--storage", str(tmp_path), "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert ended.value.code == 1 and shown.out == ""
    told = json.loads(shown.err)["error"]
    assert (told["type"], told["what"], told["exit_code"]) == ("StorageError", "there is no run 'lost'", 1)
    assert told["where"] == str(tmp_path) and told["remedy"] == "there are no runs; check --storage"
