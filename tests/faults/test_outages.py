"""A store that goes away while a run trains, and clocks that differ."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import trainwright as tw
from tests.support import torch_jobs
from tests.support.checkpoint_jobs import stop_at
from tests.support.faulty_proxy import FaultyProxy
from tests.support.finished_runs import State, final_state, told
from tests.support.processes import FORKING, ROOT
from tests.support.s3_server import S3Bucket
from trainwright.core import events
from trainwright.reporting.run_history import read_history
from trainwright.storage.event_log import EventLog
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog

HOUR_S = 3600.0
JOB = """
import functools, pathlib, threading
from tests.support import torch_jobs
from trainwright.core.events import Steps
from trainwright.reporting.progress_bar import RunProgress
from trainwright.storage.checkpoints import CheckpointWriter

signs = pathlib.Path({signs!r})

def await_sign(name):
    tick, patience = threading.Event(), 6000
    while not (signs / name).exists():
        tick.wait(0.02)
        patience -= 1
        assert patience, name

def eventful(step):
    def wrapped(model, batch):
        now = int(getattr(model, "module", model).steps)
        if now == 6:
            await_sign("began")
        if now == 22:
            (signs / f"reached-{{torch_jobs.rank()}}").touch()
            await_sign("over")
        return step(model, batch)
    return wrapped

def on(self, event, before=RunProgress.on):
    before(self, event)
    if isinstance(event, Steps) and event.step[-1] == 22:
        (signs / "told").touch()

RunProgress.on = on  # in the driver's process, which executes this file

def build():
    init = CheckpointWriter.__init__
    CheckpointWriter.__init__ = lambda self, store, *more: init(self, store.impatient(), *more)
    return torch_jobs.make_model(())()

job = torch_jobs.job({storage!r}, model=build, step=eventful(torch_jobs.make_step(())))
"""


@contextmanager
def training(folder: Path, storage: str) -> Iterator[subprocess.Popen[bytes]]:
    """`fit` of the job above in a process of its own; what it says is in `folder/said`."""
    (folder / "job.py").write_text(JOB.format(signs=str(folder), storage=storage))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(":"), str(ROOT)]),
    }
    environment.pop("RAY_ADDRESS", None)
    with (folder / "said").open("wb") as said:
        command = [sys.executable, "-m", FORKING, "fit", str(folder / "job.py")]
        process = subprocess.Popen(command, stdout=said, stderr=said, cwd=ROOT, env=environment)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(30)


def await_all(conditions: dict[str, Callable[[], bool]], said: Path, deadline_s: float = 150) -> None:
    """Wait for all conditions, by name."""
    tick, until_s = threading.Event(), time.monotonic() + deadline_s
    while waiting := [name for name, holds in conditions.items() if not holds()]:
        assert time.monotonic() < until_s, f"not within {deadline_s} s: {waiting}\n{said.read_text()}"
        tick.wait(0.05)


def test_training_goes_on_while_the_store_is_away_and_loses_nothing(
    tmp_path: Path, s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch, unbroken: Callable[[int], State]
) -> None:
    """The network is lost while the first checkpoint is uploaded, for as long as 16 steps and two lines take."""
    said = tmp_path / "said"
    with FaultyProxy(s3_bucket.server.endpoint) as proxy:

        def strike(request: str) -> None:
            if "PUT" in request and "checkpoints/00000005-" in request and not (tmp_path / "began").exists():
                proxy.cut()
                (tmp_path / "began").touch()

        proxy.heard = strike
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        with training(tmp_path, s3_bucket.uri) as process:
            reached = {f"rank {rank}": (tmp_path / f"reached-{rank}").exists for rank in range(2)}
            lines = ("Training continues in memory", "no checkpoint at step 5: ")
            heard = {line: (lambda line=line: line in said.read_text()) for line in lines}
            await_all({**reached, **heard, "step 22 told": (tmp_path / "told").exists}, said)
            away_s = time.time()
            proxy.mend()
            await_all({"back": lambda: "the store answers again, after " in said.read_text()}, said)
            (tmp_path / "over").touch()
            assert process.wait(150) == 0, said.read_text()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_bucket.server.endpoint)
    text = said.read_text()
    assert text.count("the store answers again, after ") == text.count("Training continues in memory") == 1
    assert final_state(s3_bucket.uri, "faulty") == unbroken(2)
    steps = [step for event in told(s3_bucket.uri, "faulty", events.Steps) for step in event.step]
    assert steps == list(range(1, 28)), "each step once: nothing was done again and no record is lost"
    skipped = {event.step for event in told(s3_bucket.uri, "faulty", events.CheckpointSkipped)}
    assert {5, 10, 15, 20, 25} >= skipped >= {5} and not told(s3_bucket.uri, "faulty", events.Failed)
    assert [event.step for event in told(s3_bucket.uri, "faulty", events.Steps) if event.time_s < away_s][-1][-1] == 22


def test_a_driver_whose_clock_is_behind_goes_on_like_any_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, unbroken: Callable[[int], State]
) -> None:
    """It stamps its events six hours before the first driver, whose files are stamped with days to come."""
    stop_at(folder, 12)
    for path in folder.rglob("*"):
        os.utime(path, (time.time() + 48 * HOUR_S,) * 2)

    def clock() -> float:
        return time.time() - 6 * HOUR_S

    monkeypatch.setattr("trainwright.runtime.run_setup.EventLog", functools.partial(EventLog, clock=clock))
    monkeypatch.setattr("trainwright.storage.run_store.RunLog", functools.partial(RunLog, now=clock))
    tw.fit(torch_jobs.job(folder), resume=True)
    assert final_state(folder, "faulty") == unbroken(2)
    assert told(folder, "faulty", events.Formed)[-1].step == 10
    assert len(list((folder / "faulty" / "checkpoints").iterdir())) == 3, "retained by what the log names, not by age"
    history = read_history(open_store(str(folder)), "faulty")
    assert history.state == "done" and [session.token for session in history.summary.time.sessions] == [1, 5]
    assert [record.step for record in history.records] == list(range(1, 28))
    times = vars(history.totals)
    assert all(value >= 0 for value in times.values()) and history.totals.wall_s < 600, times
