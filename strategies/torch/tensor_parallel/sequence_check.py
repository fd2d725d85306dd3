"""Whether tokens may be divided between the regions that tensor parallelism divides: one forward without data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.strategies.torch.checkpoint.shard_layout import Box
from trainwright.strategies.torch.pipeline.call_survey import skeleton
from trainwright.strategies.torch.tensor_parallel.layers import Ring, Split, divide


def unsuited(model: nn.Module, split: Split, run: Callable[..., object], degree: int, where: str) -> str:
    """Why not: above all, what a forward needs all tokens for before its last divided layer; empty where nothing.

    Args:
        run: calls a model without data, with `rows` of them.
        degree: ranks that divide it.
    """
    tried = (_tried(model, split, partial(run, rows=rows), degree, where) for rows in (1, 2))  # one row hides views
    return next(filter(None, tried), "")


def _tried(model: nn.Module, split: Split, run: Callable[[nn.Module], object], degree: int, where: str) -> str:
    """The same of one run."""
    bones, ring = skeleton(model).train(), _Rehearsal(index=0, of=degree, sequence=True)
    divide(bones, split, ring, where)
    try:
        with torch.enable_grad():
            run(bones)
    except Exception as error:
        return f"without data it raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if ring.shortest < degree:
        return f"there are {ring.shortest} tokens, and {degree} ranks to divide them"
    if not ring.scatters:
        return "no divided layer ends with a sum over the ranks"
    return next((f"it needs all for {what}" for what, before in ring.asks if 0 < before < ring.scatters), "")


@dataclass(kw_only=True)
class _Rehearsal(Ring):
    """A ring of which no other rank is there, on the meta device.

    Attributes:
        asks: what gathered tokens, and after how many sums.
        scatters: sums so far.
        shortest: fewest tokens that were divided.
    """

    asks: list[tuple[str, int]] = field(default_factory=list)
    scatters: int = 0
    shortest: int = 2**62

    def summed(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def highest(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def joined(self, tensor: Tensor, width: int, along: int = -1) -> Tensor:
        shape = [*tensor.shape]
        shape[along] = width
        return tensor.new_empty(shape)

    def scattered(self, tensor: Tensor, along: int) -> Tensor:
        self.scatters, self.shortest = self.scatters + 1, min(self.shortest, tensor.shape[along])
        return tensor.narrow(along, 0, Box.share((tensor.shape[along],), 0, self.index, self.of).count).clone()

    def enter(self, device: torch.device) -> None:
        """Random numbers of nobody."""

    def leave(self) -> None:
        """Random numbers of nobody."""

    def asked(self, func: Any) -> None:
        self.asks.append((str(func._overloadpacket), self.scatters))
