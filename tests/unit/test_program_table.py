"""The table of `docs/programs.md` has the lines that the programs have now."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import program_table
from tests.support.program_table import FOLDER, PROGRAMS, lines, table

PROGRAM = '''
"""A program."""

import torch

ROWS = 3


class Net:
    """Used by both."""

    def forward(self): ...


def helper():
    # a comment
    return ROWS


def job():
    """A job."""
    return Net()


def plain():
    import math

    model = Net()

    return helper(model)
'''


def test_lines_are_those_of_a_version_and_of_what_it_alone_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_table, "FOLDER", tmp_path)
    (tmp_path / "own.py").write_text(PROGRAM)
    assert lines("own", ("job", "plain")) == {"job": 2, "plain": 3 + 2 + 1}
    (tmp_path / "other.py").write_text(
        "from own import helper\n\n\ndef job():\n    return helper()\n\n\ndef plain(): ...\n"
    )
    assert lines("other", ("job", "plain")) == {"job": 2 + 2 + 1, "plain": 1}


def test_the_page_has_the_table_of_today() -> None:
    page = (FOLDER.parents[1] / "docs" / "programs.md").read_text()
    assert table() in page, "run `python -m tests.support.program_table` and put what it prints into docs/programs.md"


def test_every_program_is_in_the_table() -> None:
    assert {program.name for program in PROGRAMS} == {path.stem for path in FOLDER.glob("*.py")} - {"toy_data"}
