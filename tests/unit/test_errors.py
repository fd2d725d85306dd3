"""Errors as they are shown: Python's words, options on the command line, and few lines in a notebook."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trainwright.core.errors import JobError, RunConflict, UserCodeError
from trainwright.options import as_options


@pytest.mark.parametrize(
    ("remedy", "options"),
    [
        (
            "resume=True goes on from its last checkpoint, fresh=True begins again, or give the job a new name",
            "--resume goes on from its last checkpoint, --fresh begins again, or give the job a new name",
        ),
        ('on_crash_loop="skip" (with resume=True)', 'on_crash_loop="skip" (with --resume)'),
        ("give another folder, or step=12 to go on", "give another folder, or --step 12 to go on"),
        ("give it in samples: critical_batch=2000", "give it in samples: --critical-batch 2000"),
        ("here=True, or for predictions workers=", "--here, or for predictions --workers"),
        ("give either loss= with inputs=, or step=", "give either loss= with inputs=, or step="),
    ],
)
def test_what_to_do_is_said_in_options_on_the_command_line_alone(remedy: str, options: str) -> None:
    assert as_options(remedy) == options


NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="NoColor")
shell.run_cell("import trainwright as tw")
shell.run_cell("tw.fit(tw.Job(nam=3))")
"""


def test_a_notebook_shows_what_is_wrong_and_no_frames_of_ours() -> None:
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, timeout=60)
    shown = done.stdout.strip().splitlines()
    assert (
        shown[0].startswith("JobError: the job has") and "nam= is no field of Job: did you mean 'name'?" in done.stdout
    )
    assert "Traceback" not in done.stdout and ".py" not in done.stdout


def test_a_long_traceback_of_the_users_is_cut_at_its_beginning() -> None:
    error = UserCodeError("loss= raised KeyError", detail="\n".join(f"line {number}" for number in range(50)))
    lines = error._render_traceback_()
    assert lines[:2] == ["...", "line 30"] and lines[-2:] == ["line 49", "UserCodeError: loss= raised KeyError"]
    assert RunConflict("taken", remedy="fresh=True")._render_traceback_() == ["RunConflict: taken\n  -> fresh=True"]
    assert JobError(["a"])._render_traceback_() == ["JobError: the job has 1 problem\n  1. a"]
