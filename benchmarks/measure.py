"""Runs one benchmark in this process: `measure.py NAME OUTPUT FOLDER [--smoke]`. Started by run.py."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import machine
from figures import write_figures


def main(name: str, output: str, folder: str, *options: str) -> None:
    """Measure, and leave the figures in `output`."""
    smoke = "--smoke" in options
    if smoke:
        machine.SETTLE_S = 0.0
    write_figures(Path(output), importlib.import_module(name).measure(Path(folder), smoke=smoke))


if __name__ == "__main__":
    main(*sys.argv[1:])
