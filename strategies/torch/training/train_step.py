"""One training step: backward of the micro-batches, one reduction, check for finite values, scale, clip, apply.

In sampled steps hooks see the gradient of each micro-batch before DDP does, to measure gradient noise; they change
nothing. The norm of the averaged gradient is known only after the reduction has started, so that the measurements are
reduced with the sums of the next step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn

from trainwright.core.data import (
    Feed,
    GradientScatter,
    MetricSums,
    StepReport,
    clipping_factor,
    fold_seed,
    noise_is_due,
)
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError, TrainwrightError
from trainwright.core.loss_api import BATCH_LOSS
from trainwright.strategies.common.user_code_errors import format_samples, non_finite_error, nonfinite_columns_hint
from trainwright.strategies.torch.step_trace import span
from trainwright.strategies.torch.torch_compat import foreach_multiply
from trainwright.strategies.torch.torch_errors import TorchUserCode
from trainwright.strategies.torch.training.batch_losses import BatchLayout
from trainwright.strategies.torch.training.batch_norm import average_statistics, sample_rows
from trainwright.strategies.torch.training.batch_tensors import copy_batch
from trainwright.strategies.torch.training.objective import MicroBatchShare, Objective
from trainwright.strategies.torch.training.optimizers import NamedOptimizers
from trainwright.strategies.torch.training.train_state import MIN_LOSS_SCALE, LossScale, TorchReplica, add_gradient_hook


class UnusedParameters(Exception):
    """A parameter for whose gradient DDP waits got none on some rank; nothing was applied. Every rank raises it."""


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Sums over the whole global batch."""

    weight: float
    loss: float
    stop_requested: bool
    unused: bool  # a parameter for whose gradient DDP waits got none on some rank
    told: tuple[float, ...]  # sums of gradient noise, reduced beside them
    logged: tuple[float, ...]  # sum and weight of each logged value in turn
    norm: float | None  # of the averaged gradient, where it is wanted

    @classmethod
    def of(cls, sums: Sequence[float], norm: float | None) -> StepTotals:
        """Return the totals from the reduced gradient of `Objective.carry`."""
        weight, loss, stop_requested, unused, *others = sums
        return cls(
            weight=weight, loss=loss, stop_requested=stop_requested > 0.5, unused=unused > 0, told=tuple(others[:3]),
            logged=tuple(others[3:]), norm=norm,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepRunner:
    """Runs the micro-batches of a step."""

    objective: Objective  # the objective itself
    parallel: nn.Module | None = None  # DDP around it; None without
    # parameters of whose gradients this rank sees those of each micro-batch, to sample their noise
    observed: Sequence[nn.Parameter] = ()
    local: Callable[[], AbstractContextManager[Any]] = nullcontext  # a context in which backward does not reduce
    # parameters that must get a gradient in each step, since DDP waits for it
    required: Sequence[nn.Parameter] = ()
    measures_own_time: bool = True  # a rank's own work can be timed apart from its waits
    # groups of ranks with other data, which together reach all of them
    others: tuple[distributed.ProcessGroup, ...] = ()

    @cached_property
    def probe(self) -> GradientNoiseProbe:
        """Samples the noise of the objective's gradients."""
        return GradientNoiseProbe(self.objective, self.observed)

    @property
    def where(self) -> str:
        """The rank, for errors."""
        return self.objective.caller.where

    def unused(self) -> list[nn.Parameter]:
        """Return the required parameters without a gradient. Raises JobError where DDP cannot do without it."""
        found = [each for each in self.required if each.grad is None]
        for name, module in self.objective.model.named_modules() if found else ():
            sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
            if sparse and any(each is module.weight for each in found):
                problem = f"embedding {name!r} has sparse gradients, and is not used in this batch, which DDP of torch "
                raise JobError(
                    [f"{problem}cannot reduce: set sparse=False, or use it in every batch"], where=self.where
                )
        return found

    def ending(self) -> AbstractContextManager[Any]:
        """Return a context for a step's last micro-batch."""
        return nullcontext()

    def accumulate(self, replica: TorchReplica, feed: Feed, *, sampled: bool) -> None:
        """Run forward and backward of every micro-batch; the last backward reduces the gradients."""
        self.objective.begin()
        each = micro_batches_of(feed)
        for number, (micro, share) in enumerate(each):
            replica.reseed(fold_seed(replica.spec.seed, feed.step, micro, share.data_rank, 0))
            last = number == len(each) - 1
            if replica.synchronized is not None:
                replica.synchronized.counts = sample_rows(share.batch) > 0
            with self.ending() if last else self.local():
                _run_micro_batch(self, share, replica.laps.forward)
            replica.laps.backward(reduced=last and self.parallel is not None)
            if sampled:
                self.probe.count(share)

    def settle(self, replica: TorchReplica, *, wants_norm: bool) -> tuple[list[Tensor], StepTotals]:
        """Return averaged gradients and sums over all ranks."""
        present = [parameter.grad for parameter in replica.trainable if parameter.grad is not None]
        return present, read_totals(self, present, wants_norm=wants_norm)


def train(replica: TorchReplica, runner: StepRunner, feed: Feed) -> StepReport:
    """Run one step of this rank. All ranks apply it, or none does.

    Raises:
        NonFiniteLoss, UnusedParameters: on every rank, with nothing applied.
        PeerLost, UserCodeError, JobError: with nothing applied, unless the optimizer itself raised.
    """
    if replica.custom:
        return _train_by_turns(replica, runner, feed)
    laps, probe, spec, scale = replica.laps, runner.probe, replica.spec, replica.scale
    _scale_losses(runner.objective, scale)
    laps.begin(feed.step)
    sampled = probe.due(feed)
    with replica.attempt() as attempt:
        probe.send()
        with probe.watching() if sampled else nullcontext():
            runner.accumulate(replica, feed, sampled=sampled)
        with span("reduce"):
            average_statistics(replica.norms, feed, runner.others)
            wants_norm = spec.clip_norm is not None or spec.guard or scale is not None
            gradients, totals = runner.settle(replica, wants_norm=wants_norm or sampled)
            replica.confirm()
        if totals.unused:
            raise UnusedParameters
        length = None if totals.norm is None else totals.norm / runner.objective.scale
        scatter = probe.heard(totals.told)
        if length is not None:
            totals = replace(totals, norm=length if wants_norm else None)
        overflowed = has_overflowed(runner, scale, totals, feed)
        rate = replica.rates.begin(feed.step, feed.metrics, runner.where)
        if replica.versions is not None:
            replica.versions.turn()
        norm = None
        if overflowed and scale is not None:
            replica.scale = scale.overflowed()
        elif totals.weight:
            with span("optimizer"):
                norm = _scale_gradients(runner, gradients, totals, rows=feed.rows, largest=spec.clip_norm)
                replica.apply(feed.step, runner.where)
            attempt.applied = True
            replica.scale = scale.applied() if scale else None
            laps.optimizer()
            if sampled and length is not None:
                probe.keep(length, feed.rows)
        if not attempt.applied:
            replica.skip(feed.step, runner.where)
    phases = laps.ended()
    return StepReport(
        step=feed.step + 1,
        loss=totals.loss / totals.weight if totals.weight else 0.0,
        weight=totals.weight,
        learning_rate=rate,
        gradient_norm=norm,
        stop_requested=totals.stop_requested,
        overflowed=overflowed,
        logged=logged_sums(runner, totals),
        own_s=laps.own_s if runner.measures_own_time else None,
        phases=None if sampled else phases,
        scatter=scatter,
    )


def _scale_losses(objective: Objective, scale: LossScale | None) -> None:
    factor = scale.factor if scale else 1.0
    if objective.scale != factor:  # to set an attribute of a module takes longer
        objective.scale = factor


def _run_micro_batch(
    runner: StepRunner, share: MicroBatchShare, forward_done: Callable[[], None] = lambda: None
) -> None:
    """Run forward and backward of one micro-batch; raise PeerLost, UserCodeError or JobError for what fails."""
    where = runner.where
    forward = runner.objective if runner.parallel is None else runner.parallel
    with span("forward"):
        pull = runner.objective.pull(share, *forward(share))
    forward_done()
    try:
        with span("backward"):
            if runner.required:
                pull.backward_apart(runner.unused)
            else:
                pull.backward()
    except TrainwrightError:
        raise
    except Exception as error:
        problem = _undefined_problem(error) if runner.required else ""
        if problem:
            raise JobError([problem], where=where) from None
        raise TorchUserCode("the backward pass", where).meaning(error) from None


def _undefined_problem(error: Exception) -> str:
    """Return why DDP counts a parameter's gradient twice; empty for another error.

    It counts an undefined gradient too. The parameter is then one without a gradient, which gets zeros.
    """
    if "mark a variable ready only once" not in str(error):
        return ""
    named = re.search(r"with name model\.(\S+) has been", str(error))
    which = f"parameter {named[1]!r}" if named else "a parameter"
    return (
        f"DDP got the gradient of {which} twice in a step: if the backward of a torch.autograd.Function returned None "
        "for it, let it return torch.zeros_like(parameter); if the model recomputes activations, use "
        "checkpoint(..., use_reentrant=False)"
    )


def micro_batches_of(feed: Feed) -> list[tuple[int, MicroBatchShare]]:
    """Return the numbered micro-batches of a feed, without skipped samples; the last one carries the stop request."""
    flat = [
        (micro, MicroBatchShare(batch=batch.counted(), data_rank=data_rank, rows=feed.rows, layout=_batch_layout(feed)))
        for data_rank, part in zip(feed.data_ranks, feed.parts, strict=True)
        for micro, batch in enumerate(part)
    ]
    if feed.stop_requested:
        micro, last = flat[-1]
        flat[-1] = micro, replace(last, stop_requested=True)
    return flat


def throwaway_micro_batches(feed: Feed) -> Iterator[tuple[int, MicroBatchShare]]:
    """Yield copies of a feed's micro-batches whose weights count as 0, and which request no stop."""
    for micro, share in micro_batches_of(feed):
        yield micro, replace(share, batch=copy_batch(share.batch), zero_weight=True, stop_requested=False)


def _batch_layout(feed: Feed) -> BatchLayout:
    """Return how the global batch is divided."""
    return BatchLayout(ranks=feed.total, micro_batches=len(feed.parts[0]), step=feed.step)


def needs_check(spec: ModelSpec, feed: Feed) -> bool:
    """Return whether a batch is divided, and its loss must not depend on that."""
    return not _batch_layout(feed).whole and BATCH_LOSS not in spec.inexact


def has_several_samples(shares: Iterable[MicroBatchShare]) -> bool:
    """Return whether a check of these micro-batches tells anything: one sample has one loss, however often it comes."""
    return any(len(np.unique(share.batch.samples)) > 1 for share in shares)


def read_totals(runner: StepRunner, gradients: list[Tensor], *, wants_norm: bool) -> StepTotals:
    """Read the reduced sums: the step's only wait for the device."""
    carried = runner.objective.carry.grad
    assert carried is not None, "carry is part of every objective"
    if not wants_norm:
        return StepTotals.of(carried.tolist(), None)
    norm = _total_norm(gradients)
    *sums, length = torch.cat((carried, norm.reshape(1).to(carried.dtype))).tolist()
    return StepTotals.of(sums, length)


def _total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients together, also of sparse ones."""
    return torch.nn.utils.get_total_norm([_values(each) for each in gradients])


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def logged_sums(runner: StepRunner, totals: StepTotals) -> MetricSums:
    """Return the sums of the logged values."""
    pairs = zip(totals.logged[::2], totals.logged[1::2], strict=True)
    return MetricSums(totals=dict(zip(runner.objective.logged.names or (), pairs, strict=True)))


def _scale_gradients(
    runner: StepRunner, gradients: list[Tensor], totals: StepTotals, *, rows: int, largest: float | None
) -> float | None:
    """Scale the gradients to the weighted mean's, then clip, in one pass; returns the norm before clipping.

    Args:
        totals: with the norm of the gradients as they would be without the scale of the losses.
    """
    factor = mean_factor(totals.weight, rows, runner.objective.carry.dtype)
    norm = None if totals.norm is None else totals.norm * factor
    if norm is not None and largest is not None:
        factor *= clipping_factor(norm, largest)
    factor /= runner.objective.scale
    if factor != 1.0:
        foreach_multiply(gradients, factor)
    return norm


def mean_factor(weight: float, rows: int, kind: torch.dtype) -> float:
    """Return the factor from a mean over rows to a mean over the sum of their weights, rounded as `kind` is."""
    return 1.0 if abs(weight - rows) <= 4 * torch.finfo(kind).eps * rows else rows / weight


def has_overflowed(runner: StepRunner, scale: LossScale | None, totals: StepTotals, feed: Feed) -> bool:
    """Return whether a gradient is not finite though the loss is, and a smaller loss scale can help.

    Raises:
        NonFiniteLoss: it is not finite otherwise; on every rank alike. The rank where it happened names the samples.
    """
    if math.isfinite(totals.loss) and math.isfinite(totals.weight):
        if not totals.weight or totals.norm is None or math.isfinite(totals.norm):
            return False  # what has no weight is not applied
        items = max(1.0, totals.weight / feed.rows)  # of a row, such as pixels, whose gradients are yet to be divided
        if scale is not None and scale.factor * items > MIN_LOSS_SCALE:
            return True
        raise non_finite_error(f"the gradient's norm became {totals.norm} in step {feed.step + 1}", runner.where)
    for share, losses in runner.objective.micro_losses:
        # Finite ones whose sum is not: one of them is larger than this at least.
        largest = torch.finfo(runner.objective.carry.dtype).max / (
            feed.rows * max(1, losses.numel() // max(1, len(losses)))
        )
        bad = ~(losses.abs() <= largest)
        if bool(bad.any()):
            rows = bad.reshape(bad.shape[0], -1).any(1).cpu().numpy()
            samples = share.batch.samples[rows].tolist()
            where = f"{runner.where}, data rank {share.data_rank}"
            what = f"the loss became {totals.loss} in step {feed.step + 1}, in samples {format_samples(samples)}"
            raise non_finite_error(what, where, samples, cause=nonfinite_columns_hint(share.batch, rows))
    what = f"the loss became {totals.loss} in step {feed.step + 1}, on another data rank"
    raise non_finite_error(what, runner.where, elsewhere=True)


# --- Gradient noise ---------------------------------------------------------------------------------------------------


class GradientNoiseProbe:
    """Measures the gradient noise of sampled steps, the same ones on all ranks."""

    def __init__(self, objective: Objective, parameters: Sequence[nn.Parameter]) -> None:
        self._objective, self._parameters = objective, parameters
        self._norms: list[Tensor] = []  # of the gradients of a micro-batch's backward
        self._news: tuple[Tensor, ...] = ()  # of a sampled step: parts, samples and shares of this rank
        self._whole: float | None = None  # its reduced gradient's squared norm

    def due(self, feed: Feed) -> bool:
        """Return whether a step is sampled; never without parameters whose gradients can be seen."""
        return bool(self._parameters) and noise_is_due(feed.step, feed.total * len(feed.parts[0]))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the gradients of all backwards in this context."""
        zero = torch.zeros((), dtype=self._objective.carry.dtype, device=self._objective.carry.device)
        self._news = (zero, zero, zero)
        handles = [add_gradient_hook(parameter, self._see) for parameter in self._parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, gradient: Tensor) -> None:
        values = _values(gradient.detach())
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        self._norms.append(torch.linalg.vector_norm(values, dtype=self._objective.carry.dtype))

    def count(self, share: MicroBatchShare) -> None:
        """Note the end of a micro-batch's backward."""
        norms, self._norms = self._norms, []
        samples = int(np.count_nonzero(share.batch.weights))
        if samples and norms:
            unit = (share.rows / self._objective.world / self._objective.scale) ** 2 / samples  # see `Objective.pull`
            parts, counted, shares = self._news
            self._news = (parts + torch.stack(norms).square().sum() * unit, counted + samples, shares + 1)

    def send(self) -> None:
        """Send the measurements of the step before, if there are any, with this step's sums."""
        if self._whole is not None:
            self._objective.news = self._news

    def heard(self, told: Sequence[float]) -> GradientScatter | None:
        """Return the gradient scatter from the reduced measurements."""
        whole, self._whole = self._whole, None
        if whole is None:
            return None
        parts, samples, shares = told
        return GradientScatter(parts=parts, samples=samples, shares=shares, whole=whole)

    def keep(self, norm: float, rows: int) -> None:
        """Record the norm of the averaged gradient of a sampled step."""
        self._whole = (norm * rows) ** 2


# --- Steps with several updates, or several evaluations of the loss ---------------------------------------------------

# `step=` yields the name of an optimizer and a loss; when it goes on, that optimizer has made its update. An optimizer
# such as LBFGS computes the loss of the same batch several times. Each gradient is reduced by an all-reduce of its own,
# without DDP. After an error in the middle, such as a lost peer, the replica is as before the step.


_UNEQUAL = (
    "step= yielded other names, or another number of them, for one part of the batch than for another: yield the same "
    "names in the same order for every batch"
)


def _train_by_turns(replica: TorchReplica, runner: StepRunner, feed: Feed) -> StepReport:
    """Run one step of this rank with several updates, or several evaluations of the loss; raises as `train`."""
    kept = replica.rates.state

    def restore() -> None:
        replica.rates.state = kept
        replica.sound = True

    replica.laps.begin(feed.step)
    with replica.attempt() as attempt, replica.undo.after_errors(restore):
        replica.sound = False
        rate = replica.rates.begin(feed.step, feed.metrics, runner.where)
        if isinstance(replica.optimizer, NamedOptimizers):
            updates = [*_updates_in_turn(replica, replica.optimizer, runner, feed)]
        else:
            updates = [("", _update_with_closure(replica, runner, feed))]
        average_statistics(replica.norms, feed, runner.others)
        replica.confirm()
        replica.skip(feed.step, runner.where)
        attempt.applied = any(totals.weight for _, totals in updates)
    replica.laps.optimizer()
    logged = MetricSums()
    for name, totals in updates:
        logged += logged_sums(runner, totals)
        logged += MetricSums(totals={name: (totals.loss, totals.weight)} if name else {})
    norms = [totals.norm for _, totals in updates if totals.norm is not None]
    return StepReport(
        step=feed.step + 1,
        loss=sum(totals.loss / totals.weight for _, totals in updates if totals.weight),
        weight=updates[0][1].weight,
        learning_rate=rate,
        gradient_norm=norms[-1] if norms and replica.spec.clip_norm is not None else None,
        stop_requested=any(totals.stop_requested for _, totals in updates),
        logged=logged,
    )


def rehearse(runner: StepRunner, share: MicroBatchShare) -> None:
    """Run forward and backward of a micro-batch without any update."""
    optimizers = runner.objective.caller.spec.optimizer
    if not isinstance(optimizers, Mapping):
        _run_micro_batch(runner, share)
        return
    for _ in _turns(runner, share, tuple(optimizers)):
        pass


def _updates_in_turn(
    replica: TorchReplica, optimizer: NamedOptimizers, runner: StepRunner, feed: Feed
) -> Iterator[tuple[str, StepTotals]]:
    """Make the updates of a step; yield the name and the sums of each."""
    names, shares = tuple(optimizer.named), micro_batches_of(feed)
    turns = [_turns(runner, share, names) for _, share in shares]
    for number in count():
        _forget_gradients(replica, runner)
        found = set()
        for (micro, share), turn in zip(shares, turns, strict=True):
            replica.reseed(fold_seed(replica.spec.seed, feed.step, micro, share.data_rank, number))
            if replica.synchronized is not None:
                replica.synchronized.counts = sample_rows(share.batch) > 0
            found.add(next(turn, ""))
        if len(found) > 1:
            raise JobError([_UNEQUAL], where=runner.where)
        name = found.pop()
        trained = optimizer.parameters(name) if name else []
        with span("reduce"):
            sums, gradients = _reduced(runner, replica, trained, place=names.index(name) + 1 if name else 0)
        if not name:
            if number == 0:
                raise JobError(["step= yielded no loss"], where=runner.where)
            return
        totals = _settled(replica, runner, feed, sums, gradients)
        yield name, totals
        if totals.weight:
            with TorchUserCode(f"the step() of optimizer {name!r}", runner.where), span("optimizer"):
                optimizer.named[name].step()


def _turns(runner: StepRunner, share: MicroBatchShare, names: tuple[str, ...]) -> Iterator[str]:
    """Run a micro-batch's step up to each loss, and its backward; yield the name of the optimizer whose turn it is."""
    objective = runner.objective
    columns = objective.caller.tensors(share.batch)
    for name, (values, weights) in objective.caller.turns(objective.model, columns, share.batch, share.layout, names):
        pull = objective.pull(share, values, weights, objective.carry)
        with TorchUserCode("the backward pass", runner.where), span("backward"):
            pull.backward()
        yield name


def _update_with_closure(replica: TorchReplica, runner: StepRunner, feed: Feed) -> StepTotals:
    """Let an optimizer make its update; it may ask for the loss several times. Return the sums of the first time."""
    first: list[StepTotals] = []

    def closure() -> Tensor:
        _forget_gradients(replica, runner)
        runner.accumulate(replica, feed, sampled=False)
        with span("reduce"):
            sums, gradients = _reduced(runner, replica, replica.trainable, place=1)
        totals = _settled(replica, runner, feed, sums, gradients)
        first.append(totals)
        return torch.tensor(totals.loss / totals.weight if totals.weight else 0.0, dtype=runner.objective.carry.dtype)

    with TorchUserCode("the optimizer's step()", runner.where):
        replica.optimizer.step(closure)  # type: ignore[arg-type]  # LBFGS wants a tensor, others a number
    return first[0]


def _forget_gradients(replica: TorchReplica, runner: StepRunner) -> None:
    runner.objective.begin()
    for parameter in replica.trainable:
        parameter.grad = None


def _reduced(
    runner: StepRunner, replica: TorchReplica, trained: list[nn.Parameter], *, place: int
) -> tuple[list[float], list[Tensor]]:
    """Reduce the sums and the gradients of some parameters over the ranks; drop those that no rank has.

    Args:
        place: number of the optimizer that is to make its update; it must be the same on all ranks.
    """
    objective = runner.objective
    carry = objective.carry.grad if objective.carry.grad is not None else torch.zeros_like(objective.carry)
    if not runner.others:
        return carry.tolist(), [parameter.grad for parameter in trained if parameter.grad is not None]
    (group,) = runner.others
    has = [float(parameter.grad is not None) for parameter in trained]
    facts = torch.tensor([place, place**2, *has], dtype=torch.float64, device=carry.device)
    sizes = len(carry), len(facts)
    sums = torch.cat((carry.double() / objective.world, facts))
    sums = nn.functional.pad(sums, (0, sizes[0] + 2 + len(replica.trainable) - len(sums)))  # alike for all places
    distributed.all_reduce(sums, group=group)
    placed, squared, *having = sums[sizes[0] :].tolist()
    if placed**2 != squared * objective.world:
        raise JobError([_UNEQUAL], where=runner.where)
    gradients = []
    for parameter, ranks in zip(trained, having, strict=False):
        if ranks:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad.div_(objective.world)
            gradients.append(parameter.grad)
    for work in [distributed.all_reduce(each, group=group, async_op=True) for each in gradients]:
        assert work is not None, "this rank is in the group"
        work.wait()
    return sums[: sizes[0]].tolist(), gradients


def _settled(
    replica: TorchReplica, runner: StepRunner, feed: Feed, sums: list[float], gradients: list[Tensor]
) -> StepTotals:
    """Check and scale the reduced gradients. Raises NonFiniteLoss on every rank."""
    spec = replica.spec
    wants_norm = spec.clip_norm is not None or spec.guard
    norm = float(_total_norm(gradients)) if wants_norm and gradients else None
    totals = StepTotals.of(sums, norm)
    has_overflowed(runner, None, totals, feed)
    if not totals.weight:
        return totals
    length = _scale_gradients(runner, gradients, totals, rows=feed.rows, largest=spec.clip_norm)
    return replace(totals, norm=length)
