"""The files of `clusters/` with a user's values."""

from __future__ import annotations

import re
from collections.abc import Mapping


def changed(text: str, values: Mapping[str, object]) -> str:
    """The text with these values on the lines below those that mark them: `# CHANGE name: what it is`."""
    for name, value in values.items():
        pattern = re.compile(rf"(# CHANGE {name}: .*\n\s*(?:\w+: |- |\w+=|#SBATCH --[\w-]+=)).*")
        text, count = pattern.subn(lambda found, value=value: f"{found[1]}{value}", text)  # type: ignore[misc]
        assert count == 1, f"{name} is marked {count} times"
    return text
