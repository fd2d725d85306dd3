"""Starts a Ray worker process as Ray's own `setup_worker.py` does, only sooner.

That imports all of Ray, half a second of a core, before it makes way for the worker, which imports it again; where the
runtime environment is none, or variables alone, there is nothing else to do in between, and the tests' fork server
forks the worker, if there is one.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

VARIABLE = "TRAINWRIGHT_TEST_FORK_SERVER"  # names the socket of the fork server
CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def bare(arguments: list[str]) -> tuple[list[str], dict[str, str]] | None:
    """What a worker is to run and its variables beside this process's; None where Ray has more to set up."""
    variables: dict[str, str] = {}
    for argument in arguments:
        if argument.startswith(CONTEXT):
            context = json.loads(argument.removeprefix(CONTEXT))
            variables |= context.pop("env_vars", {})
            own = context.pop("py_executable", sys.executable) == sys.executable
            if not own or any(context.values()) or any("$" in value for value in variables.values()):
                return None
    return [argument for argument in arguments if not argument.startswith((CONTEXT, LANGUAGE))], variables


def rays_own() -> str:
    """Ray's `setup_worker.py`; a script here would take the tests beside it for Ray."""
    beside = str(Path(__file__).parent)
    found = PathFinder.find_spec("ray", [place for place in sys.path if place != beside])
    assert found is not None and found.origin is not None
    return str(Path(found.origin).parent / "_private" / "workers" / "setup_worker.py")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "app" / "runtime"))  # to import no more than this one module
    from fork_server import request_fork

    worker = bare(sys.argv[1:])
    if worker is not None and VARIABLE in os.environ:
        command, variables = worker
        with suppress(OSError):  # it has ended, or is too busy
            request_fork(os.environ[VARIABLE], command, environment={**os.environ, **variables})
            sys.exit()
    os.execv(sys.executable, [sys.executable, rays_own(), *sys.argv[1:]])
