"""Runs one benchmark in this process: `measure.py NAME OUTPUT FOLDER [--quick]`. Started by run.py."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from figures import write_figures


def main(name: str, output: str, folder: str, *options: str) -> None:
    """Measure, and leave the figures in `output`."""
    write_figures(Path(output), importlib.import_module(name).measure(Path(folder), quick="--quick" in options))


if __name__ == "__main__":
    main(*sys.argv[1:])
