"""The size rule: no file over 900 lines, no function over 60. Takes files and folders, prints each offence."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES, FUNCTION_LINES = 900, 60


def offences(path: Path) -> Iterator[str]:
    """Lines that name what is too long in one Python file."""
    text = path.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    if lines > FILE_LINES:
        yield f"{path}: {lines} lines, at most {FILE_LINES}"
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"


def files(arguments: list[str]) -> Iterator[Path]:
    """The Python files named, or below the folders named."""
    for argument in map(Path, arguments):
        yield from sorted(argument.rglob("*.py")) if argument.is_dir() else [argument]


def main(arguments: list[str]) -> int:
    """Print every offence; 0 when there is none."""
    checked = list(files(arguments))
    found = [offence for path in checked for offence in offences(path)]
    print("\n".join([*found, f"sizes: {len(checked)} files, {len(found)} too long"]))
    return 1 if found or not checked else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
