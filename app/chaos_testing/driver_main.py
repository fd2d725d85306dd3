"""Run the driver of an observed run in its own process: `python -m trainwright.chaos_testing.driver_main JOB_FILE FD`.

It trains as `fit` does, and writes each event to a pipe at once, so that a fault can follow an event within
milliseconds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trainwright.core.errors import TrainwrightError
from trainwright.core.events import Event
from trainwright.runtime.launch import prepare_run
from trainwright.runtime.run_handle import Run, wait_for_run
from trainwright.worker.worker_config import unpickle_job


class _EventWriter:
    """Writes events to a pipe, and stops the run when the reader has closed it."""

    def __init__(self, run: Run, pipe: int) -> None:
        self._run, self._pipe = run, os.fdopen(pipe, "w", encoding="utf-8")

    def on(self, event: Event) -> None:
        """Write one event."""
        try:
            self._pipe.write(f"{event.to_json()}\n")
            self._pipe.flush()
        except BrokenPipeError:
            self._run.stop(now=True)

    def close(self) -> None:
        """Do nothing: the process ends soon."""


def _main(job_file: Path, pipe: int) -> int:
    """Train to the end; return 0 if the run is done."""
    os.set_inheritable(pipe, False)
    try:
        job = unpickle_job(job_file.read_bytes())
        run = Run(job, *prepare_run(job, resume=False, fresh=False, verbose=False))
        run.listen(_EventWriter(run, pipe))
        wait_for_run(run)
    except TrainwrightError as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if run.state == "done" else 3


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), int(sys.argv[2])))
