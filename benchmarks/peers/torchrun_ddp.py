"""Data parallelism under torch's elastic agent, as torch's tutorial on fault tolerance with torchrun has it.

Run as a script by torch.distributed.run, with its settings as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from problem import THREADS, batches, build_model
from stamps import is_last, stamping
from torch import distributed
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from peers import Settings


def main(settings: Settings) -> None:
    """What each worker runs; after a failure the agent runs it anew on all of them."""
    torch.set_num_threads(THREADS)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    model = build_model()
    optimizer = stamping(settings.stamps, settings.pause_s)(model.parameters())
    snapshot = Path(settings.stamps, "snapshot.pt")
    step = _resume(snapshot, model, optimizer)
    parallel = DistributedDataParallel(model)
    for inputs, targets in batches(settings.rows, rank, settings.workers):
        optimizer.zero_grad()
        functional.cross_entropy(parallel(inputs), targets).backward()
        optimizer.step()
        step += 1
        if rank == 0 and step % settings.checkpoint_steps == 0:
            _save(snapshot, step, model, optimizer)
        if is_last(settings.stamps, step):
            break
    distributed.destroy_process_group()


def _resume(snapshot: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the snapshot, where there is one; returns its step, 0 without."""
    if not snapshot.exists():
        return 0
    state: dict[str, Any] = torch.load(snapshot)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _save(snapshot: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    unseen = snapshot.with_suffix(".new")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, unseen)
    os.replace(unseen, snapshot)


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
