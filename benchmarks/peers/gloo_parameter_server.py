"""A parameter server by hand on gloo's point-to-point calls: the servers' ranks come first, then the workers'."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import distributed

_DEADLINE = timedelta(seconds=120)


class GlooServer:
    """Receives a gradient of whoever has one, applies it, sends the parameters back."""

    def __init__(self, size: int, workers: int, rate: float) -> None:
        self._workers, self._rate = workers, rate
        self._held, self._gradient = torch.zeros(size), torch.empty(size)

    def __call__(self, steps: int, meet: Callable[[], None]) -> tuple[float, float]:
        """So many steps of each worker."""
        meet()
        for _ in range(steps * self._workers):
            source = distributed.recv(self._gradient)
            self._held.add_(self._gradient, alpha=-self._rate)
            distributed.send(self._held, source)
        return 0.0, 0.0


class GlooWorker:
    """Sends its gradient to all servers at once, and receives the parameters of all at once."""

    def __init__(self, gradients: Sequence[torch.Tensor], held: Sequence[torch.Tensor]) -> None:
        self._gradients, self._held = gradients, held

    def __call__(self, steps: int, meet: Callable[[], None]) -> tuple[float, float]:
        """So many steps."""
        meet()
        begun = time.perf_counter()
        for _ in range(steps):
            works = [distributed.isend(part, server) for server, part in enumerate(self._gradients)]
            works += [distributed.irecv(part, server) for server, part in enumerate(self._held)]
            for work in works:
                assert work is not None, "this rank is of the group"
                work.wait()
        return begun, time.perf_counter()


def join(rank: int, size: int, rendezvous: str) -> None:
    """Make the group of all servers and workers."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=_DEADLINE
    )
