"""Runs a module as `python -m` does, in a process that can only be told of a script."""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
