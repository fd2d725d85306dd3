"""One training step: backward over the micro-batches, one reduction, then finite or not, scale, clip, apply."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from trainwright.core.data import Feed, StepReport, fold
from trainwright.core.errors import JobError
from trainwright.strategies.common.error_mapping import non_finite, shown, spoiled
from trainwright.strategies.torch.torch_compat import multiply
from trainwright.strategies.torch.training.batch_losses import BatchLayout
from trainwright.strategies.torch.training.batch_norm import average, counted
from trainwright.strategies.torch.training.error_mapping import user_code
from trainwright.strategies.torch.training.loss_scaler import FLOOR
from trainwright.strategies.torch.training.noise_probe import Probe
from trainwright.strategies.torch.training.objective import Objective, Share
from trainwright.strategies.torch.training.train_state import Replica


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over the whole global batch.

    Attributes:
        told: what travelled beside them.
        norm: of the averaged gradient, where it is wanted.
    """

    weight: float
    loss: float
    wish: bool
    told: tuple[float, ...]
    norm: float | None


@dataclass(frozen=True, kw_only=True)
class Runner:
    """How a micro-batch is run.

    Attributes:
        objective: the objective itself.
        reduced: the objective, or DDP around it.
        probe: samples the noise of its gradients.
        local: a context in which backward does not reduce.
        every_used: every trainable parameter must get a gradient in each step, or DDP would wait for it forever.
        tells_own: what a rank does by itself can be told from what it waits for.
        others: groups of ranks with other data, which together reach all of them.
    """

    objective: Objective
    reduced: nn.Module
    probe: Probe
    local: Callable[[], AbstractContextManager[Any]] = nullcontext
    every_used: bool = False
    tells_own: bool = True
    others: tuple[distributed.ProcessGroup, ...] = ()

    @property
    def where(self) -> str:
        """The rank, for errors."""
        return self.objective.caller.where

    def ending(self) -> AbstractContextManager[Any]:
        """A context for a step's last micro-batch."""
        return nullcontext()

    def accumulate(self, replica: Replica, feed: Feed, *, sampled: bool) -> None:
        """Forward and backward of every micro-batch; the last backward reduces what all of them gave."""
        self.objective.begin()
        each = shares(feed)
        for number, (micro, share) in enumerate(each):
            replica.reseed(fold(replica.spec.seed, feed.step, micro, share.data_rank, 0))
            last = number == len(each) - 1
            if replica.synchronized is not None:
                replica.synchronized.counts = counted(share.batch) > 0
            with self.ending() if last else self.local():
                run(self, share, replica.laps.forward)
            replica.laps.backward(reduced=last and self.reduced is not self.objective)
            if sampled:
                self.probe.count(share)

    def settle(self, replica: Replica, *, wants_norm: bool) -> tuple[list[Tensor], Totals]:
        """The averaged gradients and the sums over all ranks. Raises JobError where DDP could not average one."""
        gradients = _gradients(replica, self)
        return gradients, totals_of(self, gradients, wants_norm=wants_norm)


def train(replica: Replica, runner: Runner, feed: Feed) -> StepReport:
    """One step of this rank. All ranks apply it, or none does.

    Raises:
        NonFiniteLoss: on every rank, with nothing applied.
        PeerLost, UserCodeError, JobError: with nothing applied, unless the optimizer itself raised.
    """
    laps, probe, spec, scale = replica.laps, runner.probe, replica.spec, replica.scale
    runner.objective.scale = scale.factor if scale else 1.0
    laps.begin(feed.step)
    sampled = probe.due(feed)
    with replica.attempt() as attempt:
        probe.send()
        with probe.watching() if sampled else nullcontext():
            runner.accumulate(replica, feed, sampled=sampled)
        average(replica.norms, feed, runner.others)
        wants_norm = spec.clip_norm is not None or spec.guard or scale is not None
        gradients, totals = runner.settle(replica, wants_norm=wants_norm or sampled)
        length = None if totals.norm is None else totals.norm / runner.objective.scale
        totals, scatter = replace(totals, norm=length if wants_norm else None), probe.heard(totals.told)
        overflowed = scale is not None and scale.factor > FLOOR and overflows(totals)
        if not overflowed:
            check_finite(runner, totals, feed)
        rate = replica.set_rates(feed.step, runner.where)
        if replica.versions is not None:
            replica.versions.turn()
        norm = None
        if overflowed and scale is not None:
            replica.scale = scale.overflowed()
        elif totals.weight:
            norm = _scale(runner, gradients, totals, rows=feed.rows, largest=spec.clip_norm)
            replica.apply(feed.step, runner.where)
            attempt.applied = True
            replica.scale = scale.applied() if scale else None
            laps.optimizer()
            if sampled and length is not None:
                probe.keep(length, feed.rows)
    replica.step = feed.step + 1
    phases = laps.ended()
    return StepReport(
        step=replica.step,
        loss=totals.loss / totals.weight if totals.weight else 0.0,
        weight=totals.weight,
        learning_rate=rate,
        gradient_norm=norm,
        wish=totals.wish,
        overflowed=overflowed,
        own_s=laps.own_s if runner.tells_own else None,
        phases=None if sampled else phases,
        scatter=scatter,
    )


def run(runner: Runner, share: Share, forward_done: Callable[[], None] = lambda: None) -> None:
    """Forward and backward of one micro-batch; tells a lost peer from an error in the user's code."""
    where = runner.where
    pull = runner.objective.pull(share, *runner.reduced(share))
    forward_done()
    try:
        pull.backward()
    except Exception as error:
        raise user_code("the backward pass", where).meaning(error) from None


def shares(feed: Feed, *, muted: bool = False) -> list[tuple[int, Share]]:
    """Micro-batches in order with their number; the wish goes with the last."""
    flat = [
        (micro, Share(batch=batch, data_rank=data_rank, rows=feed.rows, muted=muted, layout=layout_of(feed)))
        for data_rank, part in zip(feed.data_ranks, feed.parts, strict=True)
        for micro, batch in enumerate(part)
    ]
    if feed.wish:
        micro, last = flat[-1]
        flat[-1] = micro, replace(last, wish=True)
    return flat


def layout_of(feed: Feed) -> BatchLayout:
    """Into what the global batch is cut."""
    return BatchLayout(ranks=feed.total, micro_batches=len(feed.parts[0]))


def _gradients(replica: Replica, runner: Runner) -> list[Tensor]:
    """The averaged gradients. Raises JobError where DDP could not average one."""
    gradients = [parameter.grad for parameter in replica.trainable]
    present = [gradient for gradient in gradients if gradient is not None]
    if runner.every_used and len(present) < len(gradients):
        missing = replica.names[replica.trainable[gradients.index(None)]]
        raise JobError(
            [
                f"parameter {missing!r} got no gradient in this batch but did in others: use every parameter in every "
                "batch, for instance by adding 0.0 * parameter.sum() to the loss"
            ],
            where=runner.where,
        )
    return present


def totals_of(runner: Runner, gradients: list[Tensor], *, wants_norm: bool) -> Totals:
    """Read what travelled in the reduction: the step's only wait for the device."""
    carried = runner.objective.carry.grad
    assert carried is not None, "carry is part of every objective"
    if not wants_norm:
        weight, loss, wish, *told = carried.tolist()
        return Totals(weight=weight, loss=loss, wish=wish > 0.5, told=tuple(told), norm=None)
    norm = torch.nn.utils.get_total_norm(gradients)
    weight, loss, wish, *told, length = torch.cat((carried, norm.reshape(1).to(carried.dtype))).tolist()
    return Totals(weight=weight, loss=loss, wish=wish > 0.5, told=tuple(told), norm=length)


def _scale(
    runner: Runner, gradients: list[Tensor], totals: Totals, *, rows: int, largest: float | None
) -> float | None:
    """Scale the gradients to the weighted mean's, then clip, in one pass; returns the norm before clipping.

    Args:
        totals: with the norm of the gradients as they would be without the scale of the losses.
    """
    factor = to_mean(totals.weight, rows, runner.objective.carry.dtype)
    norm = None if totals.norm is None else totals.norm * factor
    if norm is not None and largest is not None and norm > largest:
        factor *= largest / norm
    factor /= runner.objective.scale
    if factor != 1.0:
        multiply(gradients, factor)
    return norm


def to_mean(weight: float, rows: int, kind: torch.dtype) -> float:
    """From a mean over so many rows to that over the sum of their weights, added up in numbers of a kind."""
    return 1.0 if abs(weight - rows) <= 4 * torch.finfo(kind).eps * rows else rows / weight


def overflows(totals: Totals) -> bool:
    """Whether a gradient that counts is not finite, though its loss is."""
    finite = math.isfinite(totals.loss) and math.isfinite(totals.weight)
    return finite and bool(totals.weight) and totals.norm is not None and not math.isfinite(totals.norm)


def check_finite(runner: Runner, totals: Totals, feed: Feed) -> None:
    """Raise NonFiniteLoss on every rank alike; the rank where it happened names the samples."""
    if math.isfinite(totals.loss) and math.isfinite(totals.weight):
        if not totals.weight or totals.norm is None or math.isfinite(totals.norm):
            return  # what has no weight is not applied
        raise non_finite(f"the gradient's norm became {totals.norm} in step {feed.step + 1}", runner.where)
    for share, losses in runner.objective.tallies:
        bad = ~torch.isfinite(losses)
        if bool(bad.any()):
            rows = bad.reshape(bad.shape[0], -1).any(1).cpu().numpy()
            samples = share.batch.samples[rows].tolist()
            where = f"{runner.where}, data rank {share.data_rank}"
            what = f"the loss became {totals.loss} in step {feed.step + 1}, in samples {shown(samples)}"
            raise non_finite(what, where, samples, cause=spoiled(share.batch, rows))
    what = f"the loss became {totals.loss} in step {feed.step + 1}, on another data rank"
    raise non_finite(what, runner.where, elsewhere=True)
