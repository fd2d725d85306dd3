"""Training loops by hand: DistributedDataParallel, and FSDP2, as torch's tutorials on them have them."""

from __future__ import annotations

import time

from problem import ROWS, adam, batches, build_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


class PlainLoop:
    """One rank's training loop; the process group is there already."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._model, self._optimizer = model, adam(model.parameters())
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


def data_parallel_loop(rank: int) -> PlainLoop:
    """Every rank has the whole model."""
    return PlainLoop(DistributedDataParallel(build_model()), rank)


def sharded_loop(rank: int) -> PlainLoop:
    """Every rank has a shard of each layer."""
    return PlainLoop(shard_layers(build_model()), rank)


def shard_layers(model: nn.Module) -> nn.Module:
    """Return the model, whose linear layers and whose rest are divided over the ranks."""
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)
