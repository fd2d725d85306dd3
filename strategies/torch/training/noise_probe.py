"""What a step's gradients tell of their noise: the squared norm of each micro-batch's own, and of their sum.

A micro-batch's gradient is seen by hooks that autograd calls before DDP does, in sampled steps alone; they change
nothing. Its norm is known only after the reduction has begun, so it travels in the one of the step after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from trainwright.core.data import Feed
from trainwright.core.gradient_noise import Scatter, due
from trainwright.strategies.torch.training.objective import Objective, Share
from trainwright.strategies.torch.training.train_state import hooked


class Probe:
    """Samples the steps of one formation, the same ones on all ranks.

    Args:
        objective: whose reduction the news travel in.
        parameters: all that are trained.
    """

    def __init__(self, objective: Objective, parameters: Sequence[nn.Parameter]) -> None:
        self._objective, self._parameters = objective, parameters
        self._norms: list[Tensor] = []  # of the gradients of a micro-batch's backward
        self._news: tuple[Tensor, ...] = ()  # of a sampled step: parts, samples and shares of this rank
        self._whole: float | None = None  # its reduced gradient's squared norm

    def due(self, feed: Feed) -> bool:
        """Whether a step is to be sampled; never where there are no parameters whose gradients could be seen."""
        return bool(self._parameters) and due(feed.step, feed.total * len(feed.parts[0]))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See the gradients of all backwards within."""
        zero = torch.zeros((), dtype=self._objective.carry.dtype, device=self._objective.carry.device)
        self._news = (zero, zero, zero)
        handles = [hooked(parameter, self._see) for parameter in self._parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, gradient: Tensor) -> None:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        self._norms.append(torch.linalg.vector_norm(values.detach(), dtype=self._objective.carry.dtype))

    def count(self, share: Share) -> None:
        """The backward of one micro-batch is over."""
        norms, self._norms = self._norms, []
        samples = int(np.count_nonzero(share.batch.weights))
        if samples and norms:
            unit = (share.rows / self._objective.world / self._objective.scale) ** 2 / samples  # see `Objective.pull`
            parts, counted, shares = self._news
            self._news = (parts + torch.stack(norms).square().sum() * unit, counted + samples, shares + 1)

    def send(self) -> None:
        """Let the news of the step before, if there are any, travel with this one."""
        if self._whole is not None:
            self._objective.news = self._news

    def heard(self, told: Sequence[float]) -> Scatter | None:
        """What came of what travelled."""
        whole, self._whole = self._whole, None
        if whole is None:
            return None
        parts, samples, shares = told
        return Scatter(parts=parts, samples=samples, shares=shares, whole=whole)

    def keep(self, norm: float, rows: int) -> None:
        """A sampled step was applied; its averaged gradient has this norm."""
        self._whole = (norm * rows) ** 2
