"""Text for a terminal, which would carry out what stands in it: colours, titles, moves of the cursor, links."""

from __future__ import annotations

import re
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # not tab and newline; with bidi's


def printable(value: Any) -> Any:
    """The same text, or JSON value, with control characters as escapes of Python's (`\\x1b`)."""
    match value:
        case str():
            return _CONTROL.sub(lambda found: repr(found[0])[1:-1], value)
        case list():
            return [printable(item) for item in value]
        case dict():
            return {printable(key): printable(item) for key, item in value.items()}
    return value
