"""Sharded data parallelism by hand: torch's FSDP2, as torch's tutorial on it has it."""

from __future__ import annotations

import time

from problem import ROWS, adam, batches, build_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional


class PlainSharded:
    """One rank's training loop; the process group is there already."""

    def __init__(self, rank: int) -> None:
        self._model = build_model()
        for layer in self._model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(self._model)
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
