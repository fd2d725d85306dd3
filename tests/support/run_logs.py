"""What the tests of the run's log share: stores to run on, a clock that moves when somebody sleeps, entries."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from trainwright.core.engine import CheckpointRef, checkpoint_path
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_log import Owner, RunLog

KINDS = ("folder", "memory", "s3")
RUN = "digits"
JOB = {"model": "net", "batch_size": "256"}
FAR = Owner(host="far", boot="another", namespace="pid:[1]", pid=7, started=1)


def store_of(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store in a folder, in memory or on a real S3 server."""
    if kind == "s3":
        return open_store(request.getfixturevalue("s3_bucket").uri)
    return open_store(str(tmp_path)) if kind == "folder" else memory_store()


def memory_store() -> Store:
    """An empty store in memory."""
    return open_store(f"memory://{uuid.uuid4().hex}")


class Clock:
    """A clock that moves when somebody sleeps; `on_sleep` is called each time."""

    def __init__(self, on_sleep: Callable[[], None] = lambda: None) -> None:
        self.now_s, self.on_sleep = 0.0, on_sleep

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.on_sleep()


def log_of(store: Store, clock: Clock | None = None, *, dead: Callable[[Owner], bool] = lambda _: False) -> RunLog:
    clock = clock or Clock()
    return RunLog(store, RUN, clock=clock, sleep=clock.sleep, dead=dead)


def ref(step: int, token: int, parent: str = "") -> CheckpointRef:
    return CheckpointRef(step=step, path=checkpoint_path(step, token), manifest_sha256="0" * 64, parent=parent)
