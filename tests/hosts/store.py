"""The S3 server on a host of its own, and what is asked of it there. Run as `python -m tests.hosts.store VERB ...`.

Runs are read where the server is reached, and copied into a folder that the test sees.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import s3_server
from tests.support.finished_runs import told
from trainwright.core import events
from trainwright.storage.object_store import open_store

BUCKET = "hosts"
STORAGE = f"s3://{BUCKET}/runs"
ENVIRONMENT = "storage.env"


def serve(address: str, folder: str, data: str) -> None:
    """Serve until the host ends; data sets are there, and how to reach it is told in `folder`, before it is."""
    with s3_server.running(address) as server:
        server.make_bucket(BUCKET)
        os.environ |= server.environment()
        store = open_store(f"s3://{BUCKET}/data")
        for file in Path(data).rglob("*.parquet"):
            store.put(str(file.relative_to(data)), file.read_bytes())
        lines = "".join(f"{name}={value}\n" for name, value in server.environment().items())
        partial = Path(folder) / f"{ENVIRONMENT}.new"
        partial.write_text(lines)
        partial.rename(Path(folder) / ENVIRONMENT)
        signal.pause()


def steps(run: str) -> int:
    """Steps that the run has told of."""
    found: Any = told(STORAGE, run, events.Steps)
    return max((event.step[-1] for event in found if event.step), default=0)


def workers(run: str) -> int:
    """Of the newest generation that the run has told of."""
    formed: Any = told(STORAGE, run, events.Formed)
    return formed[-1].workers if formed else 0


def recovered(run: str) -> int:
    """Hosts whose workers failed, and that a newer generation has followed.

    A failure without a host is that of a worker which Ray had sent to a lost one before it knew.
    """
    failed: Any = told(STORAGE, run, events.Failed)
    formed: Any = told(STORAGE, run, events.Formed)
    return len({failure.node for failure in failed if failure.generation < formed[-1].generation} - {""})


def wait(what: str, run: str, least: str, patience_s: str) -> None:
    """Return once there are so many of what one of the functions above counts."""
    count: Callable[[str], int] = {"steps": steps, "workers": workers, "recovered": recovered}[what]
    until_s = time.monotonic() + float(patience_s)
    while (found := count(run)) < int(least):
        if time.monotonic() > until_s:
            sys.exit(f"{run} has {what}={found} and not {least} after {patience_s} s")
        time.sleep(0.2)


def copy(folder: str) -> None:
    """All runs, as a folder store holds them."""
    here, there = open_store(STORAGE), open_store(folder)
    for path, _ in here.list():
        there.put(path, here.get(path))
    print(json.dumps([path for path, _ in there.list()]))


if __name__ == "__main__":
    {"serve": serve, "wait": wait, "copy": copy}[sys.argv[1]](*sys.argv[2:])
