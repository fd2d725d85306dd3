"""Data parallelism by hand: torch.distributed and DistributedDataParallel, as torch's tutorial on DDP has it."""

from __future__ import annotations

import time

from problem import ROWS, adam, batches, build_model
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


class PlainLoop:
    """One rank's training loop; the process group is there already."""

    def __init__(self, rank: int) -> None:
        self._model = DistributedDataParallel(build_model())
        self._optimizer = adam(self._model.parameters())
        self._batches = batches(ROWS, rank)

    def run(self, steps: int) -> list[float]:
        """Seconds of each of so many steps."""
        seconds = []
        for _ in range(steps):
            begun = time.perf_counter()
            inputs, targets = next(self._batches)
            self._optimizer.zero_grad()
            functional.cross_entropy(self._model(inputs), targets).backward()
            self._optimizer.step()
            seconds.append(time.perf_counter() - begun)
        return seconds
