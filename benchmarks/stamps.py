"""When steps were completed, told by the optimizer itself: the same clock and the same code for ours and for peers.

A hook that runs right after each `optimizer.step()` appends a line to a file of the process: time.time(), rank, process
id and the optimizer's own count of steps, which checkpoints carry. So a step that is done again after a restart shows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
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


def stamping(
    folder: Path | str, pause_s: float = 0.0, rank: int | None = None, *, fused: bool | None = None
) -> OptimizerOf:
    """A builder of an AdamW that stamps its steps into `folder` and then pauses, so that a fast job can be watched.

    The rank is that of the process group, where none is given; a trial without a group leaves no stamps.
    """

    def build(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = adam(parameters, fused=fused)
        pid = os.getpid()
        path = os.path.join(folder, f"{pid}.stamps")

        def stamp(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if rank is None and not distributed.is_initialized():
                return
            now = time.time()
            first = optimizer.param_groups[0]["params"][0]
            own = distributed.get_rank() if rank is None else rank
            with open(path, "a", encoding="ascii") as file:
                file.write(f"{now!r} {own} {pid} {int(optimizer.state[first]['step'])}\n")
            time.sleep(pause_s)

        optimizer.register_step_post_hook(stamp)
        return optimizer

    return build


class Stamps:
    """Reads what was stamped into a folder, each line once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def news(self) -> list[Stamp]:
        """All since the last call, in order of time; a line that is still being written is left for the next."""
        return sorted(stamp for path in self._folder.glob("*.stamps") for stamp in self._of(path))

    def _of(self, path: Path) -> Iterator[Stamp]:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            lines = file.read().decode("ascii").splitlines(keepends=True)
        for line in lines:
            if line.endswith("\n"):
                self._read[path] = self._read.get(path, 0) + len(line)
                time_s, rank, pid, step = line.split()
                yield Stamp(time_s=float(time_s), rank=int(rank), pid=int(pid), step=int(step))


def read_stamps(folder: Path) -> list[Stamp]:
    """All stamps so far, in order of time."""
    return Stamps(folder).news()


def set_last(folder: Path, step: int) -> None:
    """Tell every process of a run, well before it gets there, which step is the last."""
    unseen = folder / "last.new"
    unseen.write_text(str(step), encoding="ascii")
    unseen.rename(folder / "last")


def is_last(folder: Path | str, step: int) -> bool:
    """Whether a run that has completed this step is to end."""
    file = Path(folder, "last")
    return file.exists() and step >= int(file.read_text(encoding="ascii"))
