"""One training step: backward of the micro-batches, one reduction, check for finite values, scale, clip, apply.

In sampled steps, hooks measure the gradient noise: they read the gradient of each micro-batch before DDP reduces it.
The norm of the averaged gradient is known only after the reduction has started. Therefore the next step reduces these
measurements with its sums.
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
    """A parameter got no gradient on some rank, and DDP waits for it. Nothing was applied; every rank raises this."""


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Sums over the whole global batch."""

    weight: float
    loss: float
    stop_requested: bool
    unused: bool  # on some rank a required parameter got no gradient
    noise_sums: tuple[float, ...]  # of the gradient noise
    logged: tuple[float, ...]  # alternating sum and weight of each logged value
    norm: float | None  # of the averaged gradient; None where it is not requested

    @classmethod
    def of(cls, sums: Sequence[float], norm: float | None) -> StepTotals:
        """Return the totals from the reduced gradient of `Objective.sums_parameter`."""
        weight, loss, stop_requested, unused, *optional_sums = sums
        return cls(
            weight=weight, loss=loss, stop_requested=stop_requested > 0.5, unused=unused > 0,
            noise_sums=tuple(optional_sums[:3]), logged=tuple(optional_sums[3:]), norm=norm,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepRunner:
    """Runs the micro-batches of a step."""

    objective: Objective
    parallel: nn.Module | None = None  # DDP around the objective; None without DDP
    # parameters whose gradients of each micro-batch this rank reads, to sample their noise
    observed: Sequence[nn.Parameter] = ()
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext  # a context in which backward does not reduce
    # parameters that must get a gradient in each step, since DDP waits for it
    required: Sequence[nn.Parameter] = ()
    measures_own_time: bool = True  # the time of a rank's own work is measured without its waits
    # groups of ranks with other data; together they reach all data ranks
    data_groups: tuple[distributed.ProcessGroup, ...] = ()

    @cached_property
    def probe(self) -> GradientNoiseProbe:
        """Samples the noise of the objective's gradients."""
        return GradientNoiseProbe(self.objective, self.observed)

    @property
    def where(self) -> str:
        """The rank, for errors."""
        return self.objective.caller.where

    def unused_parameters(self) -> list[nn.Parameter]:
        """Return the required parameters without a gradient. Raises JobError for an embedding with sparse gradients."""
        unused = [parameter for parameter in self.required if parameter.grad is None]
        for name, module in self.objective.model.named_modules() if unused else ():
            sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
            if sparse and any(parameter is module.weight for parameter in unused):
                problem = f"embedding {name!r} has sparse gradients, and is not used in this batch, which DDP of torch "
                raise JobError(
                    [f"{problem}cannot reduce: set sparse=False, or use it in every batch"], where=self.where
                )
        return unused

    def last_micro_batch(self) -> AbstractContextManager[Any]:
        """Return a context for a step's last micro-batch."""
        return nullcontext()

    def accumulate(self, replica: TorchReplica, feed: Feed, *, sampled: bool) -> None:
        """Run forward and backward of every micro-batch; the last backward reduces the gradients."""
        self.objective.begin()
        micro_batches = micro_batches_of(feed)
        for number, (micro, share) in enumerate(micro_batches):
            replica.reseed(fold_seed(replica.spec.seed, feed.step, micro, share.data_rank, 0))
            last = number == len(micro_batches) - 1
            if replica.synchronized is not None:
                replica.synchronized.counts = sample_rows(share.batch) > 0
            with self.last_micro_batch() if last else self.no_sync():
                _run_micro_batch(self, share, replica.phase_timer.forward)
            replica.phase_timer.backward(reduced=last and self.parallel is not None)
            if sampled:
                self.probe.end_micro_batch(share)

    def settle(self, replica: TorchReplica, *, wants_norm: bool) -> tuple[list[Tensor], StepTotals]:
        """Return averaged gradients and sums over all ranks."""
        gradients = [parameter.grad for parameter in replica.trainable if parameter.grad is not None]
        return gradients, read_totals(self, gradients, wants_norm=wants_norm)


def train(replica: TorchReplica, runner: StepRunner, feed: Feed) -> StepReport:
    """Run one step of this rank. All ranks apply it, or none does.

    Raises:
        NonFiniteLoss, UnusedParameters: on every rank, with nothing applied.
        PeerLost, UserCodeError, JobError: with nothing applied, unless the optimizer itself raised.
    """
    if replica.custom:
        return _train_several_updates(replica, runner, feed)
    timer, probe, spec, scale = replica.phase_timer, runner.probe, replica.spec, replica.scale
    _scale_losses(runner.objective, scale)
    timer.begin(feed.step)
    sampled = probe.due(feed)
    with replica.attempt() as attempt:
        probe.send_sums()
        with probe.watching() if sampled else nullcontext():
            runner.accumulate(replica, feed, sampled=sampled)
        with span("reduce"):
            average_statistics(replica.norms, feed, runner.data_groups)
            wants_norm = spec.clip_norm is not None or spec.guard or scale is not None
            gradients, totals = runner.settle(replica, wants_norm=wants_norm or sampled)
            replica.confirm()
        if totals.unused:
            raise UnusedParameters
        unscaled_norm = None if totals.norm is None else totals.norm / runner.objective.scale
        scatter = probe.read_scatter(totals.noise_sums)
        if unscaled_norm is not None:
            totals = replace(totals, norm=unscaled_norm if wants_norm else None)
        overflowed = has_overflowed(runner, scale, totals, feed)
        rate = replica.rates.begin(feed.step, feed.metrics, runner.where)
        if replica.versions is not None:
            replica.versions.turn()
        norm = None
        if overflowed and scale is not None:
            replica.scale = scale.overflowed()
        elif totals.weight:
            with span("optimizer"):
                norm = _scale_gradients(runner, gradients, totals, rows=feed.rows, max_norm=spec.clip_norm)
                replica.apply(feed.step, runner.where)
            attempt.applied = True
            replica.scale = scale.applied() if scale else None
            timer.optimizer()
            if sampled and unscaled_norm is not None:
                probe.record_norm(unscaled_norm, feed.rows)
        if not attempt.applied:
            replica.skip(feed.step, runner.where)
    phases = timer.ended()
    return StepReport(
        step=feed.step + 1,
        loss=totals.loss / totals.weight if totals.weight else 0.0,
        weight=totals.weight,
        learning_rate=rate,
        gradient_norm=norm,
        stop_requested=totals.stop_requested,
        overflowed=overflowed,
        logged=logged_sums(runner, totals),
        own_s=timer.own_s if runner.measures_own_time else None,
        phases=None if sampled else phases,
        scatter=scatter,
    )


def _scale_losses(objective: Objective, scale: LossScale | None) -> None:
    factor = scale.factor if scale else 1.0
    if objective.scale != factor:  # setting an attribute of a module is slower than this comparison
        objective.scale = factor


def _run_micro_batch(
    runner: StepRunner, share: MicroBatchShare, forward_done: Callable[[], None] = lambda: None
) -> None:
    """Run forward and backward of one micro-batch. Raises PeerLost, UserCodeError, JobError."""
    where = runner.where
    forward = runner.objective if runner.parallel is None else runner.parallel
    with span("forward"):
        roots = runner.objective.backward_roots(share, *forward(share))
    forward_done()
    try:
        with span("backward"):
            if runner.required:
                roots.backward_losses_first(runner.unused_parameters)
            else:
                roots.backward()
    except TrainwrightError:
        raise
    except Exception as error:
        problem = _undefined_problem(error) if runner.required else ""
        if problem:
            raise JobError([problem], where=where) from None
        raise TorchUserCode("the backward pass", where).meaning(error) from None


def _undefined_problem(error: Exception) -> str:
    """Return why DDP counts a parameter's gradient twice; empty for another error.

    It counts an undefined gradient too, and again when the parameter, which has no gradient, gets zeros.
    """
    if "mark a variable ready only once" not in str(error):
        return ""
    match = re.search(r"with name model\.(\S+) has been", str(error))
    which = f"parameter {match[1]!r}" if match else "a parameter"
    return (
        f"DDP got the gradient of {which} twice in a step: if the backward of a torch.autograd.Function returned None "
        "for it, let it return torch.zeros_like(parameter); if the model recomputes activations, use "
        "checkpoint(..., use_reentrant=False)"
    )


def micro_batches_of(feed: Feed) -> list[tuple[int, MicroBatchShare]]:
    """Return the numbered micro-batches of a feed, without skipped samples; the last one carries the stop request."""
    micro_batches = [
        (micro, MicroBatchShare(batch=batch.counted(), data_rank=data_rank, rows=feed.rows, layout=_batch_layout(feed)))
        for data_rank, part in zip(feed.data_ranks, feed.parts, strict=True)
        for micro, batch in enumerate(part)
    ]
    if feed.stop_requested:
        micro, last = micro_batches[-1]
        micro_batches[-1] = micro, replace(last, stop_requested=True)
    return micro_batches


def throwaway_micro_batches(feed: Feed) -> Iterator[tuple[int, MicroBatchShare]]:
    """Yield copies of a feed's micro-batches, with weights that count as 0 and without a stop request."""
    for micro, share in micro_batches_of(feed):
        yield micro, replace(share, batch=copy_batch(share.batch), zero_weight=True, stop_requested=False)


def _batch_layout(feed: Feed) -> BatchLayout:
    """Return how the global batch is divided."""
    return BatchLayout(ranks=feed.total, micro_batches=len(feed.parts[0]), step=feed.step)


def needs_check(spec: ModelSpec, feed: Feed) -> bool:
    """Return whether a batch is divided, and its loss must not depend on the division."""
    return not _batch_layout(feed).whole and BATCH_LOSS not in spec.inexact


def has_several_samples(shares: Iterable[MicroBatchShare]) -> bool:
    """Return whether a micro-batch has several samples; copies of one sample cannot show a division-dependent loss."""
    return any(len(np.unique(share.batch.samples)) > 1 for share in shares)


def read_totals(runner: StepRunner, gradients: list[Tensor], *, wants_norm: bool) -> StepTotals:
    """Read the reduced sums: the step's only wait for the device."""
    reduced = runner.objective.sums_parameter.grad
    assert reduced is not None, "backward of each objective sets the sums"
    if not wants_norm:
        return StepTotals.of(reduced.tolist(), None)
    *sums, norm = torch.cat((reduced, _total_norm(gradients).reshape(1).to(reduced.dtype))).tolist()
    return StepTotals.of(sums, norm)


def _total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the total norm of dense and sparse gradients."""
    return torch.nn.utils.get_total_norm([_values(gradient) for gradient in gradients])


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def logged_sums(runner: StepRunner, totals: StepTotals) -> MetricSums:
    """Return the sums of the logged values."""
    pairs = zip(totals.logged[::2], totals.logged[1::2], strict=True)
    return MetricSums(totals=dict(zip(runner.objective.logged.names or (), pairs, strict=True)))


def _scale_gradients(
    runner: StepRunner, gradients: list[Tensor], totals: StepTotals, *, rows: int, max_norm: float | None
) -> float | None:
    """Scale the gradients to those of the weighted mean, and clip them, in one pass; return the norm before clipping.

    Args:
        totals: with the norm of the gradients without the loss scale.
    """
    factor = mean_factor(totals.weight, rows, runner.objective.sums_parameter.dtype)
    norm = None if totals.norm is None else totals.norm * factor
    if norm is not None and max_norm is not None:
        factor *= clipping_factor(norm, max_norm)
    factor /= runner.objective.scale
    if factor != 1.0:
        foreach_multiply(gradients, factor)
    return norm


def mean_factor(weight: float, rows: int, dtype: torch.dtype) -> float:
    """Return the factor from a mean over rows to a mean over their weights; 1 where rounding in `dtype` hides it."""
    return 1.0 if abs(weight - rows) <= 4 * torch.finfo(dtype).eps * rows else rows / weight


def has_overflowed(runner: StepRunner, scale: LossScale | None, totals: StepTotals, feed: Feed) -> bool:
    """Return whether a gradient is not finite though the loss is, and a smaller loss scale can help.

    Raises:
        NonFiniteLoss: any other value is not finite. Every rank raises it; the rank with the samples names them.
    """
    if math.isfinite(totals.loss) and math.isfinite(totals.weight):
        if not totals.weight or totals.norm is None or math.isfinite(totals.norm):
            return False  # a step without weight is not applied
        items = max(1.0, totals.weight / feed.rows)  # of a row, such as pixels; the gradients are still sums over them
        if scale is not None and scale.factor * items > MIN_LOSS_SCALE:
            return True
        raise non_finite_error(f"the gradient's norm became {totals.norm} in step {feed.step + 1}", runner.where)
    for share, losses in runner.objective.micro_losses:
        # If finite losses have an infinite sum, at least one loss exceeds this limit.
        limit = torch.finfo(runner.objective.sums_parameter.dtype).max / (
            feed.rows * max(1, losses.numel() // max(1, len(losses)))
        )
        bad = ~(losses.abs() <= limit)
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
    """Measures the gradient noise of sampled steps; all ranks sample the same steps."""

    def __init__(self, objective: Objective, parameters: Sequence[nn.Parameter]) -> None:
        self._objective, self._parameters = objective, parameters
        self._norms: list[Tensor] = []  # of the gradients of a micro-batch
        self._sums: tuple[Tensor, ...] = ()  # of a sampled step: squared norms, samples and micro-batches of this rank
        self._squared_norm: float | None = None  # of the reduced gradient of a sampled step

    def due(self, feed: Feed) -> bool:
        """Return whether a step is sampled; never without observed parameters."""
        return bool(self._parameters) and noise_is_due(feed.step, feed.total * len(feed.parts[0]))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the norms of the gradients of each backward in this context."""
        zero = torch.zeros((), dtype=self._objective.sums_parameter.dtype, device=self._objective.sums_parameter.device)
        self._sums = (zero, zero, zero)
        handles = [add_gradient_hook(parameter, self._add_norm) for parameter in self._parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _add_norm(self, gradient: Tensor) -> None:
        values = _values(gradient.detach())
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        self._norms.append(torch.linalg.vector_norm(values, dtype=self._objective.sums_parameter.dtype))

    def end_micro_batch(self, share: MicroBatchShare) -> None:
        """Add the norms of a micro-batch's gradients to the sums."""
        norms, self._norms = self._norms, []
        samples = int(np.count_nonzero(share.batch.weights))
        if samples and norms:
            unit = (share.rows / self._objective.world / self._objective.scale) ** 2 / samples  # see `backward_roots`
            parts, sample_count, shares = self._sums
            self._sums = (parts + torch.stack(norms).square().sum() * unit, sample_count + samples, shares + 1)

    def send_sums(self) -> None:
        """Send the measurements of the previous step, if it was sampled, with this step's sums."""
        if self._squared_norm is not None:
            self._objective.noise_sums = self._sums

    def read_scatter(self, noise_sums: Sequence[float]) -> GradientScatter | None:
        """Return the gradient scatter from the reduced measurements."""
        squared_norm, self._squared_norm = self._squared_norm, None
        if squared_norm is None:
            return None
        parts, samples, shares = noise_sums
        return GradientScatter(parts=parts, samples=samples, shares=shares, whole=squared_norm)

    def record_norm(self, norm: float, rows: int) -> None:
        """Record the norm of the averaged gradient of a sampled step."""
        self._squared_norm = (norm * rows) ** 2


# --- Steps with several updates, or several evaluations of the loss ---------------------------------------------------

# `step=` yields the name of an optimizer and a loss; that optimizer makes its update before `step=` goes on. An
# optimizer such as LBFGS computes the loss of the same batch several times. An all-reduce without DDP reduces each
# gradient. After an error in the middle, such as a lost peer, the replica has the state from before the step.


_UNEQUAL_UPDATES = (
    "step= yielded other names, or another number of them, for one part of the batch than for another: yield the same "
    "names in the same order for every batch"
)


def _train_several_updates(replica: TorchReplica, runner: StepRunner, feed: Feed) -> StepReport:
    """Run one step of this rank with several updates, or several evaluations of the loss; raises as `train`."""
    rates_state = replica.rates.state

    def restore() -> None:
        replica.rates.state = rates_state
        replica.sound = True

    replica.phase_timer.begin(feed.step)
    with replica.attempt() as attempt, replica.undo.after_errors(restore):
        replica.sound = False
        rate = replica.rates.begin(feed.step, feed.metrics, runner.where)
        if isinstance(replica.optimizer, NamedOptimizers):
            updates = [*_named_updates(replica, replica.optimizer, runner, feed)]
        else:
            updates = [("", _update_with_closure(replica, runner, feed))]
        average_statistics(replica.norms, feed, runner.data_groups)
        replica.confirm()
        replica.skip(feed.step, runner.where)
        attempt.applied = any(totals.weight for _, totals in updates)
    replica.phase_timer.optimizer()
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
    for _ in _run_losses(runner, share, tuple(optimizers)):
        pass


def _named_updates(
    replica: TorchReplica, optimizer: NamedOptimizers, runner: StepRunner, feed: Feed
) -> Iterator[tuple[str, StepTotals]]:
    """Make the updates of a step; yield the optimizer name and the totals of each update."""
    names, shares = tuple(optimizer.named), micro_batches_of(feed)
    losses = [_run_losses(runner, share, names) for _, share in shares]
    for number in count():
        _clear_gradients(replica, runner)
        next_names = set()
        for (micro, share), loss_names in zip(shares, losses, strict=True):
            replica.reseed(fold_seed(replica.spec.seed, feed.step, micro, share.data_rank, number))
            if replica.synchronized is not None:
                replica.synchronized.counts = sample_rows(share.batch) > 0
            next_names.add(next(loss_names, ""))
        if len(next_names) > 1:
            raise JobError([_UNEQUAL_UPDATES], where=runner.where)
        name = next_names.pop()
        trained = optimizer.parameters(name) if name else []
        with span("reduce"):
            sums, gradients = _reduce_gradients(runner, replica, trained, place=names.index(name) + 1 if name else 0)
        if not name:
            if number == 0:
                raise JobError(["step= yielded no loss"], where=runner.where)
            return
        totals = _scaled_totals(replica, runner, feed, sums, gradients)
        yield name, totals
        if totals.weight:
            with TorchUserCode(f"the step() of optimizer {name!r}", runner.where), span("optimizer"):
                optimizer.named[name].step()


def _run_losses(runner: StepRunner, share: MicroBatchShare, names: tuple[str, ...]) -> Iterator[str]:
    """Run a micro-batch's step up to each loss, and its backward; yield the name of the optimizer of the loss."""
    objective, caller = runner.objective, runner.objective.caller
    columns = caller.tensors(share.batch)
    for name, (values, weights) in caller.update_losses(objective.model, columns, share.batch, share.layout, names):
        roots = objective.backward_roots(share, values, weights, objective.sums_parameter)
        with TorchUserCode("the backward pass", runner.where), span("backward"):
            roots.backward()
        yield name


def _update_with_closure(replica: TorchReplica, runner: StepRunner, feed: Feed) -> StepTotals:
    """Run an optimizer's step, which may call the closure several times; return the totals of the first call."""
    call_totals: list[StepTotals] = []

    def closure() -> Tensor:
        _clear_gradients(replica, runner)
        runner.accumulate(replica, feed, sampled=False)
        with span("reduce"):
            sums, gradients = _reduce_gradients(runner, replica, replica.trainable, place=1)
        totals = _scaled_totals(replica, runner, feed, sums, gradients)
        call_totals.append(totals)
        loss = totals.loss / totals.weight if totals.weight else 0.0
        return torch.tensor(loss, dtype=runner.objective.sums_parameter.dtype)

    with TorchUserCode("the optimizer's step()", runner.where):
        replica.optimizer.step(closure)  # type: ignore[arg-type]  # LBFGS expects a tensor, other optimizers a number
    return call_totals[0]


def _clear_gradients(replica: TorchReplica, runner: StepRunner) -> None:
    runner.objective.begin()
    for parameter in replica.trainable:
        parameter.grad = None


def _reduce_gradients(
    runner: StepRunner, replica: TorchReplica, trained: list[nn.Parameter], *, place: int
) -> tuple[list[float], list[Tensor]]:
    """Reduce the sums and the gradients of some parameters over the ranks; drop gradients that no rank has.

    Args:
        place: number of the optimizer of this update; it must be the same on all ranks.
    """
    objective = runner.objective
    own_sums = objective.sums_parameter.grad
    own_sums = torch.zeros_like(objective.sums_parameter) if own_sums is None else own_sums
    if not runner.data_groups:
        return own_sums.tolist(), [parameter.grad for parameter in trained if parameter.grad is not None]
    (group,) = runner.data_groups
    has_gradient = [float(parameter.grad is not None) for parameter in trained]
    facts = torch.tensor([place, place**2, *has_gradient], dtype=torch.float64, device=own_sums.device)
    size = len(own_sums)
    sums = torch.cat((own_sums.double() / objective.world, facts))
    sums = nn.functional.pad(sums, (0, size + 2 + len(replica.trainable) - len(sums)))  # one length for all places
    distributed.all_reduce(sums, group=group)
    place_sum, square_sum, *rank_counts = sums[size:].tolist()
    if place_sum**2 != square_sum * objective.world:
        raise JobError([_UNEQUAL_UPDATES], where=runner.where)
    gradients = []
    for parameter, rank_count in zip(trained, rank_counts, strict=False):
        if rank_count:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad.div_(objective.world)
            gradients.append(parameter.grad)
    for work in [distributed.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]:
        assert work is not None, "this rank is in the group"
        work.wait()
    return sums[:size].tolist(), gradients


def _scaled_totals(
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
    norm = _scale_gradients(runner, gradients, totals, rows=feed.rows, max_norm=spec.clip_norm)
    return replace(totals, norm=norm)
