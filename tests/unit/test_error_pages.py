"""The page of errors: it has each error that users can get, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from trainwright.core import errors

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"


def test_the_page_lists_the_errors_that_there_are() -> None:
    listed = {
        name
        for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE.read_text(), re.M)
        for name in re.findall(r"\w+", row)
    }
    kinds = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.TrainwrightError)
    }
    assert listed == kinds - {"TrainwrightError"}
