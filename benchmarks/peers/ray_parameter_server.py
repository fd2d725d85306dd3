"""A parameter server over Ray's object store, as Ray's example of an asynchronous one has it, in shards.

https://docs.ray.io/en/latest/ray-core/examples/plot_parameter_server.html: a worker's gradients are its task's results,
which the driver hands to the server's task, whose results are the weights for the worker's next task. Here each worker
has a result for each server.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch

Floats = npt.NDArray[np.float32]
_DEADLINE_S = 300.0


@ray.remote(num_cpus=1)
class ParameterServer:
    """One shard."""

    def __init__(self, size: int, rate: float) -> None:
        torch.set_num_threads(1)
        self._weights, self._rate = torch.zeros(size), rate

    def apply_gradients(self, gradient: Floats) -> Floats:
        """One step of SGD; the weights after it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what stands in the object store cannot be written
            self._weights.add_(torch.from_numpy(gradient), alpha=-self._rate)
        return self._weights.numpy()

    def get_weights(self) -> Floats:
        """As they are."""
        return self._weights.numpy()


@ray.remote(num_cpus=1)
class Worker:
    """Has its gradient in memory of its own, and takes the weights there too."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._gradients = [np.ones(size, np.float32) for size in sizes]
        self._weights = [np.zeros(size, np.float32) for size in sizes]

    def compute_gradients(self, *weights: Floats) -> list[Floats]:
        """A gradient for each server."""
        for own, pulled in zip(self._weights, weights, strict=True):
            np.copyto(own, pulled)
        return self._gradients


@contextmanager
def parameter_server(sizes: Sequence[int], workers: int, rate: float) -> Iterator[Callable[[int], float]]:
    """Actors on the cluster that is up; gives a function (steps of each worker) -> seconds for each push and pull."""
    servers = [ParameterServer.remote(size, rate) for size in sizes]
    crew = [Worker.options(num_cpus=1).remote(sizes) for _ in range(workers)]

    def turn(steps: int) -> float:
        weights = [server.get_weights.remote() for server in servers]
        ray.wait(weights, num_returns=len(weights), timeout=_DEADLINE_S)
        begun = time.perf_counter()
        out: dict[Any, tuple[Any, list[Any], int]] = {}
        for worker in crew:
            _compute(worker, weights, steps, out)
        while out:
            ready, _ = ray.wait(list(out), timeout=_DEADLINE_S)
            worker, gradients, left = out.pop(ready[0])
            pulled = [
                server.apply_gradients.remote(gradient) for server, gradient in zip(servers, gradients, strict=True)
            ]
            if left:
                _compute(worker, pulled, left, out)
            else:
                weights = pulled
        ray.wait(weights, num_returns=len(weights), timeout=_DEADLINE_S)
        return (time.perf_counter() - begun) / (steps * workers)

    yield turn
    for actor in (*servers, *crew):
        ray.kill(actor)


def _compute(worker: Any, weights: Sequence[Any], left: int, out: dict[Any, tuple[Any, list[Any], int]]) -> None:
    gradients = worker.compute_gradients.options(num_returns=len(weights)).remote(*weights)
    out[gradients[-1]] = (worker, gradients, left - 1)
