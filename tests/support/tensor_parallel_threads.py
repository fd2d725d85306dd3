"""Tensor-parallel ranks as threads of one process, which count what they exchange."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainwright.strategies.torch.shard_layout import ShardSlice
from trainwright.strategies.torch.tensor_parallel.sharded_tensor import ShardedTensor
from trainwright.strategies.torch.tensor_parallel.tensor_group import TensorParallelGroup


@dataclass(kw_only=True)
class Meeting:
    """Where threads exchange tensors: each puts its own and takes all."""

    of: int
    table: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.of, timeout=20.0)

    def exchange(self, index: int, tensor: Tensor) -> list[Tensor]:
        self.table[index] = tensor
        self.barrier.wait()
        every = [self.table[each] for each in range(self.of)]
        self.barrier.wait()
        return every


@dataclass(kw_only=True)
class ThreadGroup(TensorParallelGroup):
    """A group of threads.

    Attributes:
        calls, numbers: its collectives, and what this rank puts into them.
        asks: operations that gather.
        kept: sizes of what autograd saves.
    """

    meeting: Meeting
    calls: Counter[str] = field(default_factory=Counter)
    asks: list[str] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    numbers: Counter[str] = field(default_factory=Counter)

    def _exchanged(self, name: str, tensor: Tensor) -> list[Tensor]:
        self.calls[name] += 1
        self.numbers[name] += tensor.numel()
        return self.meeting.exchange(self.index, tensor.detach().clone())

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchanged("all_reduce", tensor)).sum(0)

    def keep(self, tensor: Tensor) -> Tensor:
        """Autograd saves it: a plain tensor of so many numbers."""
        if not isinstance(tensor, ShardedTensor):
            self.kept.add(tensor.numel())
        return tensor

    def before_gather(self, func: Any) -> None:
        self.asks.append(str(func._overloadpacket))

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchanged("all_reduce_max", tensor)).amax(0)

    def all_gather(self, tensor: Tensor, width: int, dim: int = -1) -> Tensor:
        return torch.cat(self._exchanged("all_gather", tensor), dim=dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        box = ShardSlice.share((tensor.shape[dim],), 0, self.index, self.size)
        return torch.stack(self._exchanged("reduce_scatter", tensor)).sum(0).narrow(dim, box.start[0], box.count)


def on_ranks(of: int, run: Callable[[ThreadGroup], Any], *, sequence: bool = False) -> list[Any]:
    """What each of so many ranks gives."""
    meeting = Meeting(of=of)

    def one(index: int) -> Any:
        try:
            return run(ThreadGroup(index=index, size=of, meeting=meeting, sequence=sequence))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(of) as pool:
        return [each.result() for each in [pool.submit(one, index) for index in range(of)]]
