"""Options, output and helpers that several commands share."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.core.errors import ResourceError

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 120  # of tables in files and pipes

JobFile = Annotated[str, typer.Argument(metavar="FILE.py", help="A job file: Python with a trainwright.Job in it.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the job, such as epochs=5. Repeatable."),
]
Strategy = Annotated[
    str | None, typer.Option(help="Use this strategy, such as data_parallel; by default the planner's.")
]
Workers = Annotated[int | None, typer.Option(help="Use this number of workers; by default the planner's.")]
Profile = Annotated[
    str | None,
    typer.Option(metavar="START:STOP", help="Trace these steps with the profiler: 20:25 is steps 20 to 24."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint although the job changed.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start this run again from step 0, without its checkpoints.")]
Storage = Annotated[str, typer.Option(help="Where the runs are stored: a folder or a URI.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show Ray's own output and every checkpoint.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Html = Annotated[
    str | None, typer.Option(metavar="FILE", help="Also write the result as an HTML page with pictures to FILE.")
]


def terminal_console(width: int = _WIDTH, *, highlight: bool = True) -> Console:
    """Return a console for stdout: as wide as the terminal, or `width` columns in files and pipes.

    Lines there have no blanks at their ends, with which rich fills the last column of a table.
    """
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=highlight)
    return Console(file=_WithoutTrailingBlanks(), width=width, highlight=highlight)


class _WithoutTrailingBlanks(io.StringIO):
    """Standard output, for whole lines."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.stdout.encoding

    def write(self, text: str) -> int:
        sys.stdout.write(re.sub(r" +(?=\n)", "", text))
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


def print_json(data: Any) -> None:
    """Print data as JSON; values without a JSON form become text."""
    print(json.dumps(data, indent=2, default=str))


def write_file(path: str | Path, text: str, option: str) -> None:
    """Write a file that an option names. Raises ResourceError."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror}"
        raise ResourceError(what, where=option, remedy="name a file in an existing folder") from error


def with_pins(
    overrides: list[str] | None, strategy: str | None, workers: int | None, profile: str | None = None
) -> list[str]:
    """Return all overrides, with those of --strategy, --workers and --profile at the end."""
    options = {"strategy": strategy, "workers": workers, "profile": profile}
    return [*(overrides or []), *(f"{name}={value}" for name, value in options.items() if value is not None)]
