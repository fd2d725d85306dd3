"""Runs of the command line as processes of their own, with deadlines."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support import fork_server, ray_worker_start

ROOT = Path(__file__).parents[2]
# The command line with forked workers; needs the fixture `forked_workers`.
FORKING = "tests.support.ray_clusters"
JOB_FILE = """
import os, time
from tests.support import torch_jobs

def slow(step):
    def wrapped(model, batch):
        if next(model.parameters()).device.type != "meta" and not os.path.exists({quick!r}):  # planning is quick, too
            time.sleep(float(os.environ.get("STEP_S", "{step_s}")))
        return step(model, batch)
    return wrapped

job = torch_jobs.job({storage!r}, step=slow(torch_jobs.make_step(())){fields})
"""


def write_job(folder: Path, storage: Path, *, step_s: float = 0.0, **fields: object) -> Path:
    """A job file for `tests.support.torch_jobs.job` with further fields.

    Args:
        step_s: slows steps where STEP_S does not say otherwise, until there is a file `quick` beside the job's.
    """
    file, more = folder / "job.py", "".join(f", {k}={v!r}" for k, v in fields.items())
    quick = str(folder / "quick")
    file.write_text(JOB_FILE.format(storage=str(storage), step_s=step_s, quick=quick, fields=more))
    return file


@contextlib.contextmanager
def trainwright(
    *arguments: object, step_s: float = 0.0, cluster: str = "", module: str = "trainwright"
) -> Iterator[subprocess.Popen[str]]:
    """A `python -m trainwright` process with pipes, on a Ray cluster or its own; killed when the block is left.

    It is forked where the cluster's workers are: see `tests.support.fork_server`.
    """
    with python("-m", module, *arguments, step_s=step_s, cluster=cluster) as process:
        yield process


@contextlib.contextmanager
def python(*arguments: object, step_s: float = 0.0, cluster: str = "") -> Iterator[subprocess.Popen[str]]:
    """A Python process of the same kind."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, **({"STEP_S": str(step_s)} if step_s else {})}
    environment.pop("RAY_ADDRESS", None)
    if cluster:
        environment["RAY_ADDRESS"] = cluster
    process: Any
    if ray_worker_start.VARIABLE in environment and arguments[0] == "-m" and (cluster or FORKING in arguments):
        process = fork_server.Forked(
            environment[ray_worker_start.VARIABLE], [*map(str, arguments)], environment, str(ROOT)
        )
    else:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


def address() -> str:
    """Of the cluster that this process is connected to."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def finish(
    *arguments: object, timeout_s: float = 150, cluster: str = "", module: str = "trainwright"
) -> tuple[int, str, str]:
    """Run to the end: exit code, stdout, stderr."""
    with trainwright(*arguments, cluster=cluster, module=module) as process:
        out, err = process.communicate(timeout=timeout_s)
        return process.returncode, out, err


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], deadline_s: float = 100) -> None:
    """Wait for a condition while the process lives."""
    tick = threading.Event()
    for _ in range(int(deadline_s / 0.05)):
        if condition():
            return
        assert process.poll() is None, f"it ended early: {process.communicate()}"
        tick.wait(0.05)
    raise AssertionError(f"not within {deadline_s} s")


def wait_for(condition: Callable[[], bool], deadline_s: float = 100) -> None:
    """Wait for a condition."""
    tick = threading.Event()
    for _ in range(int(deadline_s / 0.05)):
        if condition():
            return
        tick.wait(0.05)
    raise AssertionError(f"not within {deadline_s} s")


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL, and wait for the end."""
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
