"""Record when each process completes an optimizer step, with the same code and clock for trainwright and its peers.

A hook that runs right after each `optimizer.step()` appends a line to a file of the process: time.time(), rank, process
id and the optimizer's own step count, which checkpoints save. So the file shows a step that is computed again after a
restart.
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
    """A completed optimizer step. `step` counts from 1, across restarts; `time_s` is seconds since the epoch."""

    time_s: float
    rank: int
    pid: int
    step: int


def stamping(
    folder: Path | str, pause_s: float = 0.0, rank: int | None = None, *, fused: bool | None = None
) -> OptimizerOf:
    """Return a builder of an AdamW that records its steps in `folder`.

    Args:
        folder: for a file of each process.
        pause_s: that the optimizer waits after each step, so that a fast job can be observed.
        rank: to record; None for that of the process group, without which nothing is recorded.
        fused: as torch's AdamW takes it.
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
    """A reader of the stamps in a folder, which returns each of them once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def read_new(self) -> list[Stamp]:
        """Return all stamps since the last call, in order of time. An incomplete line is left for the next call."""
        return sorted(stamp for path in self._folder.glob("*.stamps") for stamp in self._read_file(path))

    def _read_file(self, path: Path) -> Iterator[Stamp]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            lines = file.read().decode("ascii").splitlines(keepends=True)
        for line in lines:
            if line.endswith("\n"):
                self._offsets[path] = self._offsets.get(path, 0) + len(line)
                time_s, rank, pid, step = line.split()
                yield Stamp(time_s=float(time_s), rank=int(rank), pid=int(pid), step=int(step))


def read_stamps(folder: Path) -> list[Stamp]:
    """Return all stamps so far, in order of time."""
    return Stamps(folder).read_new()


def set_last(folder: Path, step: int) -> None:
    """Write the number of the last step to a file that all processes of a run read; well before they get there."""
    unseen = folder / "last.new"
    unseen.write_text(str(step), encoding="ascii")
    unseen.rename(folder / "last")


def is_last(folder: Path | str, step: int) -> bool:
    """Return whether a run ends after this step."""
    file = Path(folder, "last")
    return file.exists() and step >= int(file.read_text(encoding="ascii"))
