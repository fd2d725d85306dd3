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
from trainwright.core.peer_options import PEER_COMMANDS, PEER_OPTIONS, PEER_STRATEGIES
from trainwright.strategies.search.registry import STRATEGIES


def test_each_command_has_a_whole_sentence() -> None:
    shown = CliRunner().invoke(app, ["--help"], terminal_width=80).stdout
    listed = shown.partition("Training:")[2].splitlines()
    commands = [line.strip() for line in listed if line.startswith("  ")]
    assert len(commands) == len(app.registered_commands) + len(app.registered_groups)
    assert all(line.endswith(".") and not line.endswith("...") for line in commands), shown


def test_the_version_is_that_of_the_package() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"trainwright {tw.__version__}\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["fit", "job.py", "--num-workers=4"], "--num-workers\n  -> use --workers \n"),
        (["fit", "job.py", "--epochs=3"], "--epochs\n  -> use --set epochs=3\n"),
        (["plan", "job.py", "--batch-size", "64"], "--batch-size\n  -> use --set batch_size=VALUE\n"),
        (["study", "batch", "job.py", "--lr=1"], "--lr\n  -> use the function of --set optimizer=: "),
        (["evaluate", "job.py", "--num_workers=2"], "--num_workers\n  -> it is an option of training: the run is used"),
        (["predict", "job.py", "--per_device_batch_size", "64"], "--per_device_batch_size\n  -> use --batch-size\n"),
        (["fit", "job.py", "--backend=nccl"], "--backend\n  -> no option is needed: it is gloo on"),
    ],
)
def test_fields_of_a_job_and_options_of_other_trainers_are_explained(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["trainwright", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and capsys.readouterr().err.startswith(f"error: there is no option {told}")


@pytest.mark.parametrize(
    ("words", "what", "where"),
    [
        (["fit", "--json"], "Missing argument 'FILE.py'.", "trainwright fit"),
        (["show", "run", "--json", "--lines=3"], "No such option: --lines", "trainwright show"),
        (["compare", "one", "--json"], "give the names of two runs or more", "trainwright compare"),
        (["status", "--json"], "There is no command 'status'. Use 'trainwright show'.", "trainwright"),
    ],
)
def test_a_wrong_use_is_an_object_for_programs(
    words: list[str], what: str, where: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["trainwright", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    told = json.loads(shown.err)["error"]
    assert (ended.value.code, told["exit_code"], told["where"], shown.out) == (2, 2, where, "") and what in told["what"]


@pytest.mark.parametrize(("word", "command"), [("status", "show"), ("train", "fit"), ("list", "runs")])
def test_commands_of_other_tools_are_explained(word: str, command: str) -> None:
    found = CliRunner().invoke(app, [word, "my-run"])
    assert found.exit_code == 2 and f"Use 'trainwright {command}'." in found.output


def test_names_of_other_tools_lead_to_commands_and_strategies() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert {*PEER_COMMANDS.values()} <= {*commands} and not {*PEER_COMMANDS} & {*commands}
    assert {*PEER_STRATEGIES.values()} <= {*STRATEGIES} and not {*PEER_STRATEGIES} & {*STRATEGIES}


def test_no_option_of_ours_is_taken_for_another_trainers() -> None:
    commands = [*get_command(app).commands.values()]  # type: ignore[attr-defined]
    ours = {name.strip("-").replace("-", "_") for each in commands for option in each.params for name in option.opts}
    assert {"workers", "storage", "fresh"} <= ours and not ours & PEER_OPTIONS.keys()


@pytest.mark.parametrize(("words", "told"), [
    (["compare", "one"], "two runs or more"), (["watch", "one", "--port", "99"], "--host and --port need --web"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(words: list[str], told: str) -> None:
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2 and told in refused.stderr


def test_a_traceback_comes_before_the_error(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    """As Python prints it: what happened stands last, where one looks."""
    file = tmp_path / "job.py"
    file.write_text('raise ValueError("no file of labels")\n', encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["trainwright", "plan", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and lines[0] == "Traceback (most recent call last):"
    assert lines[-2:] == ["", f"error: the job file raised ValueError: no file of labels ({file})"]


def test_errors_are_objects_for_programs(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["trainwright", "show", "lost", "--storage", str(tmp_path), "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert ended.value.code == 1 and shown.out == ""
    told = json.loads(shown.err)["error"]
    assert (told["type"], told["what"], told["exit_code"]) == ("StorageError", "there is no run 'lost'", 1)
    assert told["where"] == str(tmp_path) and told["remedy"] == "there are no runs; check --storage"
