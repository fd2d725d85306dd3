"""A pipeline by hand: torch.distributed.pipelining's 1F1B, as torch's tutorial on pipelines has it."""

from __future__ import annotations

import time

import torch
from problem import ROWS, adam, batches, build_deep
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional


class PlainPipeline:
    """One stage's training loop; the process group is there already.

    Args:
        rank: of two.
        cut: name of the layer with which the second stage begins.
        micro_batches: of a step.
    """

    def __init__(self, rank: int, cut: str, micro_batches: int) -> None:
        layers = dict(build_deep().named_children())
        own = [layer for name, layer in layers.items() if (int(name) >= int(cut)) == bool(rank)]
        part = nn.Sequential(*own)
        self._rank = rank
        self._schedule = Schedule1F1B(
            PipelineStage(part, rank, 2, torch.device("cpu")), micro_batches, loss_fn=functional.cross_entropy
        )
        self._optimizer = adam(part.parameters())
        self._batches = batches(ROWS, 0, workers=1)

    def run(self, steps: int) -> list[float]:
        """Seconds of each of so many steps."""
        seconds = []
        for _ in range(steps):
            begun = time.perf_counter()
            inputs, targets = next(self._batches)
            self._optimizer.zero_grad()
            if self._rank:
                self._schedule.step(target=targets, losses=[])
            else:
                self._schedule.step(inputs)
            self._optimizer.step()
            seconds.append(time.perf_counter() - begun)
        return seconds
