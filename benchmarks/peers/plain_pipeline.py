"""A pipeline by hand: torch.distributed.pipelining's 1F1B, as torch's tutorial on pipelines has it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

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
        (chunk,) = chunks_of(rank, (cut,))
        part, self._rank = chunk.layers, rank
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
        cuts: names of the layers with which a further chunk begins: one, or the three of a pipeline that folds back.
        micro_batches: of a step.
        idle: micro-batches for whose time a stage cannot compute.
    """

    def __init__(self, rank: int, cuts: Sequence[str], micro_batches: int, idle: float) -> None:
        self._chunks, self._count, self._idle = chunks_of(rank, cuts), micro_batches, idle
        self._optimizer = adam(parameter for chunk in self._chunks for parameter in chunk.layers.parameters())
        inputs, self._targets = next(batches(ROWS, 0, workers=1))
        self._inputs = [
            inputs if chunk.first else torch.randn(len(inputs), chunk.width, requires_grad=True)
            for chunk in self._chunks
        ]

    def run(self, steps: int) -> list[float]:
        """Seconds of each of so many steps, as long as they would take with the idle time of a perfect pipeline."""
        seconds = []
        for _ in range(steps):
            begun = time.perf_counter()
            self._optimizer.zero_grad()
            for chunk, given in zip(self._chunks, self._inputs, strict=True):
                for inputs, targets in zip(given.chunk(self._count), self._targets.chunk(self._count), strict=True):
                    outputs = chunk.layers(inputs)
                    if chunk.last:
                        functional.cross_entropy(outputs, targets).backward()
                    else:
                        outputs.backward(torch.ones_like(outputs))
            computed = time.perf_counter()
            self._optimizer.step()
            idle_s = self._idle * (computed - begun) / self._count
            seconds.append(time.perf_counter() - begun + idle_s)
        return seconds


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Layers that follow each other on one stage."""

    layers: nn.Sequential
    first: bool  # of the model
    last: bool

    @property
    def width(self) -> int:
        """Features of its input."""
        return next(layer for layer in self.layers if isinstance(layer, nn.Linear)).in_features


def chunks_of(rank: int, cuts: Sequence[str]) -> list[Chunk]:
    """The chunks of one of two stages: the one of its number, or of four the outer or the inner ones."""
    layers = {int(name): layer for name, layer in build_deep().named_children()}
    bounds = [0, *map(int, cuts), max(layers) + 1]
    owners = (0, 1) if len(cuts) == 1 else (0, 1, 1, 0)
    return [
        Chunk(
            layers=nn.Sequential(*[layer for name, layer in layers.items() if low <= name < high]),
            first=number == 0,
            last=number == len(cuts),
        )
        for number, (owner, low, high) in enumerate(zip(owners, bounds, bounds[1:], strict=False))
        if owner == rank
    ]
