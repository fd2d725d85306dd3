"""Data parallelism with torchft, as its README and its example `train_ddp.py` have it.

Run as a script by torch.distributed.run, one replica group of one worker in each, with its settings as JSON.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from problem import THREADS, batches, build_model
from stamps import is_last, stamping
from torch.nn import functional

from peers import Settings

INSTALLED = importlib.util.find_spec("torchft") is not None
QUORUM_TICK_MS, JOIN_TIMEOUT_MS = 100, 10_000
HEARTBEAT_TIMEOUT_MS = 1_000


@contextlib.contextmanager
def lighthouse() -> Iterator[str]:
    """A lighthouse with the settings of the README, but for the heartbeats, whose 5 s would be all one saw of it."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        quorum_tick_ms=QUORUM_TICK_MS,
        join_timeout_ms=JOIN_TIMEOUT_MS,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
    )
    try:
        yield server.address()
    finally:
        server.shutdown()


def main(settings: Settings) -> None:
    """What each replica group runs; after a failure its agent runs it anew."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(THREADS)
    group = int(os.environ["REPLICA_GROUP_ID"])
    model = build_model()
    inner = stamping(settings.stamps, settings.pause_s, rank=group)(model.parameters())

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"group_{group}",
        timeout=timedelta(seconds=30),
    )
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    for inputs, targets in batches(settings.rows, group, settings.workers):
        optimizer.zero_grad()
        functional.cross_entropy(parallel(inputs), targets).backward()
        optimizer.step()
        if is_last(settings.stamps, manager.current_step()):
            break
    manager.shutdown()


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
