"""Starts a Ray worker process as Ray's own `setup_worker.py` does, only sooner.

That imports all of Ray, half a second of a core, before it makes way for the worker, which imports it again; where no
runtime environment is to be set up there is nothing to do in between, and the tests' nursery forks the worker.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def bare(arguments: list[str]) -> list[str] | None:
    """What a worker without an environment of its own is to run; None where there is one to set up."""
    contexts = [argument.removeprefix(CONTEXT) for argument in arguments if argument.startswith(CONTEXT)]
    if any(context != "{}" for context in contexts):
        return None
    return [argument for argument in arguments if not argument.startswith((CONTEXT, LANGUAGE))]


def rays_own() -> str:
    """Ray's `setup_worker.py`; a script here would take the tests beside it for Ray."""
    beside = str(Path(__file__).parent)
    found = PathFinder.find_spec("ray", [place for place in sys.path if place != beside])
    assert found is not None and found.origin is not None
    return str(Path(found.origin).parent / "_private" / "workers" / "setup_worker.py")


if __name__ == "__main__":
    from nursery import VARIABLE, order

    worker = bare(sys.argv[1:])
    if worker is None:
        os.execv(sys.executable, [sys.executable, rays_own(), *sys.argv[1:]])
    order(os.environ[VARIABLE], worker)
