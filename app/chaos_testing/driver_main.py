"""Run the driver of an observed run in its own process.

`python -m trainwright.chaos_testing.driver_main ORDER FD` starts it.

It does what `fit` does, and writes each event to a pipe at once, so that a fault can follow an event within
milliseconds.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from trainwright.core.errors import TrainwrightError
from trainwright.core.events import Event
from trainwright.runtime.run_handle import Run


class _EventWriter:
    """Writes events to a pipe; when nobody reads it any longer, the run is ended."""

    def __init__(self, run: Run, pipe: int) -> None:
        self._run, self._pipe = run, os.fdopen(pipe, "w", encoding="utf-8")

    def on(self, event: Event) -> None:
        """Tell one event."""
        try:
            self._pipe.write(f"{event.to_json()}\n")
            self._pipe.flush()
        except BrokenPipeError:
            self._run.stop(now=True)

    def close(self) -> None:
        """Nothing: the process ends soon."""


def write_job_file(path: Path, job: bytes) -> None:
    """What the process needs: a packed job, and beside it where the user's modules are."""
    path.write_bytes(job)
    path.with_suffix(".path").write_text(json.dumps(sys.path))


def _main(order: Path, pipe: int) -> int:
    """Train to the end; 0 when the run is done."""
    os.set_inheritable(pipe, False)
    wanted: list[str] = json.loads(order.with_suffix(".path").read_text())
    sys.path += [entry for entry in wanted if entry not in sys.path]
    from trainwright import api
    from trainwright.runtime.run_handle import stop_on_signals
    from trainwright.worker.worker_config import unpickle_job

    try:
        run = api.start(unpickle_job(order.read_bytes()))
        run.listen(_EventWriter(run, pipe))
        with stop_on_signals(run):
            while not run.wait(timeout_s=0.5):
                continue
    except TrainwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if run.state == "done" else 3


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), int(sys.argv[2])))
