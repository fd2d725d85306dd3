"""Runs whose driver is killed, and their progress as storage tells it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from tests.support import processes
from tests.support.finished_runs import told
from trainwright.core import events
from trainwright.runtime.takeover import NAMESPACE
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog


def committed(folder: Path) -> int:
    """Step of the newest checkpoint that the log names."""
    entry = RunLog(open_store(str(folder)), "faulty").head() if folder.exists() else None
    return entry.checkpoints[-1].step if entry and entry.checkpoints else 0


STEP_S = 0.3
MODULE = "trainwright.runtime.worker_actor"
BY_REFERENCE = f"\nimport {MODULE}\n{MODULE}.INLINE_BYTES = 0\n"  # as large groups are sent


def lasting_actors() -> list[dict[str, str]]:
    """Actors that would outlive a driver."""
    return [item for item in ray.util.list_named_actors(all_namespaces=True) if item["namespace"] == NAMESPACE]


def steps_told(folder: Path) -> int:
    found: Any = told(folder, "faulty", events.Steps) if folder.exists() else []
    return max((event.step[-1] for event in found if event.step), default=0)


def _standbys_up(folder: Path) -> int:
    found: Any = told(folder, "faulty", events.Placed)
    return sum(event.spare for event in found)


def killed_driver(folder: Path, tmp_path: Path, *, spares: int = 0, step_s: float = STEP_S, **fields: object) -> Path:
    """A run whose driver was killed after some steps, when its standbys were up; no checkpoint but the last.

    What this driver and the next one send to several workers lies in Ray's object store, and goes with its driver.
    """
    file = processes.write_job(tmp_path, folder, step_s=step_s, checkpoint_steps=1000, spares=spares, **fields)
    with file.open("a") as source:
        source.write(BY_REFERENCE)
    with processes.trainwright("fit", file, cluster=processes.address()) as driver:
        processes.wait_until(lambda: steps_told(folder) >= 5 and _standbys_up(folder) == spares, driver)
        processes.kill(driver)
    return file
