"""One unit of a worker that steps alone: the mean gradient of its micro-batches. Nothing is applied here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from trainwright.core.data import Feed
from trainwright.strategies.torch.ps.transfer import Outgoing
from trainwright.strategies.torch.training.loss_scaler import FLOOR
from trainwright.strategies.torch.training.objective import Caller, Objective, Pull, Share
from trainwright.strategies.torch.training.step import Runner, check_finite, overflows, to_mean, totals_of
from trainwright.strategies.torch.training.train_state import Replica


class UnitObjective(Objective):
    """An objective that knows the unit's weight before its last backward.

    Attributes:
        factor: from the gradients as they are computed to those of the unit's weighted mean; a tensor on a GPU, where
            nothing is waited for.
    """

    def __init__(self, model: nn.Module, caller: Caller) -> None:
        super().__init__(model, caller, world=1)
        self.factor: float | Tensor = 1.0
        self._weight: Tensor | None = None

    def begin(self) -> None:
        """Forget the unit before."""
        super().begin()
        self._weight = None

    def pull(self, share: Share, values: Tensor, weights: Tensor, carry: Tensor) -> Pull:
        """What backward starts from, given what `forward` returned; remembers the losses, and the weight so far."""
        pull = super().pull(share, values, weights, carry)
        self._weight = pull.sums[0] if self._weight is None else self._weight + pull.sums[0]
        rows = max(share.rows, 1)
        if self._weight.device.type == "cpu":
            weight = float(self._weight)
            self.factor = to_mean(weight, rows, self.carry.dtype) / self.scale if weight else 0.0
        else:
            self.factor = torch.where(self._weight > 0, rows / self._weight, 0.0) / self.scale
        return pull


@dataclass(frozen=True, kw_only=True)
class UnitRunner(Runner):
    """Runs a unit's micro-batches.

    Attributes:
        unit: the objective.
        outgoing: takes gradients as they come; None where they are clipped as a whole first.
    """

    unit: UnitObjective
    outgoing: Outgoing | None

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Of the last backward each gradient goes out once it is there."""
        if self.outgoing is None:
            yield
            return
        with self.outgoing.watching(lambda: self.unit.factor):
            yield


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What a unit came to.

    Attributes:
        weight: sum of its samples' weights; 0 where nothing of it counts.
        loss: weighted sum of its losses.
        norm: of its mean gradient, before it was clipped; None where nobody wants to know.
        overflowed: its gradient was too large for `fp16`.
    """

    weight: float
    loss: float
    norm: float | None
    overflowed: bool


def own(feed: Feed) -> Feed:
    """The same feed, as one that is alone: what it brings is all that its step has."""
    rows = sum(int((batch.weights > 0).sum()) for part in feed.parts for batch in part)
    return replace(feed, rows=max(rows, 1))


def compute(replica: Replica, runner: UnitRunner, outgoing: Outgoing, feed: Feed, *, largest: float | None) -> Computed:
    """Forward and backward of a unit; its gradient lies where it is pushed from.

    Args:
        largest: norm to which the gradient is clipped here; None where servers do it, or nobody.

    Raises:
        NonFiniteLoss: the loss or the gradient is not finite, with the samples.
        UserCodeError, JobError: the user's code raised or is wrong.
    """
    spec, scale, objective = replica.spec, replica.scale, runner.unit
    feed = own(feed)
    objective.scale = scale.factor if scale else 1.0
    runner.accumulate(replica, feed, sampled=False)
    gradients = [each.grad for each in replica.trainable if each.grad is not None]
    totals = totals_of(runner, gradients, wants_norm=largest is not None or spec.guard or scale is not None)
    if totals.norm is not None:
        totals = replace(totals, norm=totals.norm / objective.scale)
    overflowed = scale is not None and scale.factor > FLOOR and overflows(totals)
    if not overflowed:
        check_finite(runner, totals, feed)
    if scale is not None and (totals.weight or overflowed):
        replica.scale = scale.overflowed() if overflowed else scale.applied()
    if overflowed or not totals.weight:
        return Computed(weight=0.0, loss=totals.loss, norm=None, overflowed=overflowed)
    factor = objective.factor
    norm = None if totals.norm is None else totals.norm * to_mean(totals.weight, feed.rows, objective.carry.dtype)
    if norm is not None and largest is not None and norm > largest:
        factor = factor * (largest / norm)
    outgoing.rest(factor)
    return Computed(weight=totals.weight, loss=totals.loss, norm=norm, overflowed=False)
