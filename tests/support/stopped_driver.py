"""A stand-in for the driver of an observed run: `python -m tests.support.stopped_driver ORDER FD`.

The first one of an order trains until it is stopped. Then the order's text says what it does when it may go on: `ends`,
`acts` (it forms a group of a run that is another's), `succeeds` or `hangs`. The next one takes the run over.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

from trainwright.core.events import Event, Formed, Placed, RunEnded, RunStarted, Steps


def main(order: Path, pipe: int) -> int:
    """Play one driver."""
    with os.fdopen(pipe, "w", encoding="utf-8") as told:

        def tell(event: Event) -> None:
            event = type(event)(**{**vars(event), "time_s": time.time()})
            told.write(f"{event.to_json()}\n")
            told.flush()

        first = order.with_suffix(".first")
        tell(RunStarted())
        if first.exists():
            assert "State:\tT" in Path(f"/proc/{first.read_text()}/status").read_text(), "it does not stand still"
            tell(Formed(step=5))
            tell(RunEnded(outcome="done", step=5))
            return 0
        first.write_text(str(os.getpid()))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
        tell(Placed(worker=0, node=socket.gethostname(), pid=os.getpid()))
        tell(Formed())
        ones = [1.0] * 5
        tell(Steps(step=[1, 2, 3, 4, 5], loss=ones, learning_rate=ones, samples=[1] * 5, step_s=ones, wait_s=ones))
        signal.sigwait({signal.SIGCONT})
        how = order.read_text()
        if how == "hangs":
            signal.sigwait({signal.SIGTERM})
        if how == "acts":
            tell(Formed(step=3))
    return 0 if how == "succeeds" else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
