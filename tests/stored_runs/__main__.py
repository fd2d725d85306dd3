"""Store the runs of this version: train each job until its checkpoint of step 8, then stop."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import trainwright as tw
from tests.stored_runs import HERE, JOBS, PAUSE, STOPPED_AT, job
from trainwright.core import events

SCRATCH = Path("/tmp/trainwright-stored-runs")


class Stopper:
    """Ends a run at its checkpoint of step 8."""

    def __init__(self, run: tw.Run) -> None:
        self._run = run

    def on(self, event: events.Event) -> None:
        """Hear an event."""
        if isinstance(event, events.Checkpointed) and event.step == STOPPED_AT:
            self._run.stop(now=True)

    def close(self) -> None:
        """Nothing is left to do."""


def main(version: str) -> None:
    """Store a run of each job."""
    os.environ[PAUSE] = "0.3"
    for name in JOBS:
        place = SCRATCH / name  # the path is stored, too
        run = tw.start(job(name, SCRATCH))
        run.listen(Stopper(run))
        assert run.wait(240) and run.state == "stopped", f"{name} was not stored"
        shutil.rmtree(place / "tensorboard")
        (place / "report.html").unlink()
    shutil.rmtree(HERE / version, ignore_errors=True)
    shutil.move(SCRATCH, HERE / version)


if __name__ == "__main__":
    main(sys.argv[1])
