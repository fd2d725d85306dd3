"""When steps were completed, told by the optimizer itself: the same clock and the same code for ours and for peers.

A hook that runs right after each `optimizer.step()` appends a line to a file of the process: time.time(), rank, process
id and the optimizer's own count of steps, which checkpoints carry. So a step that is done again after a restart shows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from problem import OptimizerOf, adam
from torch import distributed, nn


@dataclass(frozen=True, kw_only=True, order=True)
class Stamp:
    """A completed optimizer step. `step` counts from 1, over restarts; `time_s` is seconds since the epoch."""

    time_s: float
    rank: int
    pid: int
    step: int


def stamping(folder: Path | str, pause_s: float = 0.0) -> OptimizerOf:
    """A builder of an AdamW that stamps its steps into `folder` and then pauses, so that a fast job can be watched."""

    def build(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = adam(parameters)
        pid = os.getpid()
        path = os.path.join(folder, f"{pid}.stamps")

        def stamp(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            now = time.time()
            first = optimizer.param_groups[0]["params"][0]
            with open(path, "a", encoding="ascii") as file:
                file.write(f"{now!r} {distributed.get_rank()} {pid} {int(optimizer.state[first]['step'])}\n")
            time.sleep(pause_s)

        optimizer.register_step_post_hook(stamp)
        return optimizer

    return build


def read_stamps(folder: Path) -> list[Stamp]:
    """All stamps so far, in order of time; a line that is still being written is left out."""
    found = []
    for path in folder.glob("*.stamps"):
        for line in path.read_text(encoding="ascii").splitlines(keepends=True):
            if line.endswith("\n"):
                time_s, rank, pid, step = line.split()
                found.append(Stamp(time_s=float(time_s), rank=int(rank), pid=int(pid), step=int(step)))
    return sorted(found)
