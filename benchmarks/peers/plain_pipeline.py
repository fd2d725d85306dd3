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
        part = stage_of(rank, cut)
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


class StageAlone:
    """One stage that waits for no other: what a pipeline's step cannot be quicker than.

    Args:
        rank: of two.
        cut: name of the layer with which the second stage begins.
        micro_batches: of a step.
    """

    def __init__(self, rank: int, cut: str, micro_batches: int) -> None:
        self._part, self._count, self._rank = stage_of(rank, cut), micro_batches, rank
        self._optimizer = adam(self._part.parameters())
        inputs, self._targets = next(batches(ROWS, 0, workers=1))
        first = self._part[0] if rank == 0 else next(layer for layer in self._part if isinstance(layer, nn.Linear))
        width = first.in_features
        self._inputs = inputs if rank == 0 else torch.randn(len(inputs), width, requires_grad=True)

    def run(self, steps: int) -> list[float]:
        """Seconds of each of so many steps, as long as they would take with the idle time of a perfect pipeline.

        With p stages and m micro-batches, forward and backward take (m + p - 1) / m times as long (Huang et al., 2019).
        """
        seconds = []
        for _ in range(steps):
            begun = time.perf_counter()
            self._optimizer.zero_grad()
            for inputs, targets in zip(self._inputs.chunk(self._count), self._targets.chunk(self._count), strict=True):
                outputs = self._part(inputs)
                if self._rank:
                    functional.cross_entropy(outputs, targets).backward()
                else:
                    outputs.backward(torch.ones_like(outputs))
            computed = time.perf_counter()
            self._optimizer.step()
            idle = (computed - begun) / self._count
            seconds.append(time.perf_counter() - begun + idle)
        return seconds


def stage_of(rank: int, cut: str) -> nn.Sequential:
    """The layers of a stage."""
    layers = dict(build_deep().named_children())
    return nn.Sequential(*[layer for name, layer in layers.items() if (int(name) >= int(cut)) == bool(rank)])
