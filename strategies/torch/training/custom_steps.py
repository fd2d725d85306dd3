"""Steps with several updates, or several evaluations of the loss: optimizers in turn, and those with a closure.

`step=` yields the name of an optimizer and a loss; when it goes on, that optimizer has made its update. An optimizer
such as LBFGS computes the loss of the same batch several times. Each gradient is reduced by an all-reduce of its own,
without DDP. After an error in the middle, such as a lost peer, the replica is as before the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor, distributed, nn

from trainwright.core.data import Feed, MetricSums, StepReport, fold_seed
from trainwright.core.errors import JobError
from trainwright.strategies.torch.torch_errors import TorchUserCode
from trainwright.strategies.torch.training import train_step
from trainwright.strategies.torch.training.batch_norm import average_statistics, sample_rows
from trainwright.strategies.torch.training.objective import MicroBatchShare
from trainwright.strategies.torch.training.optimizers import NamedOptimizers
from trainwright.strategies.torch.training.train_state import TorchReplica
from trainwright.strategies.torch.training.train_step import StepRunner, StepTotals

_UNEQUAL = (
    "step= yielded other names, or another number of them, for one part of the batch than for another: yield the same "
    "names in the same order for every batch"
)


def train(replica: TorchReplica, runner: StepRunner, feed: Feed) -> StepReport:
    """Run one step of this rank. All ranks apply it, or none does; raises as `train_step.train`."""
    replica.laps.begin(feed.step)
    with replica.attempt() as attempt, _undone(replica):
        replica.sound = False
        rate = replica.rates.begin(feed.step, feed.metrics, runner.where)
        if isinstance(replica.optimizer, NamedOptimizers):
            updates = [*_updates_in_turn(replica, replica.optimizer, runner, feed)]
        else:
            updates = [("", _update_with_closure(replica, runner, feed))]
        average_statistics(replica.norms, feed, runner.others)
        replica.skip(feed.step, runner.where)
        attempt.applied = any(totals.weight for _, totals in updates)
    replica.laps.optimizer()
    logged = MetricSums()
    for name, totals in updates:
        logged += train_step.logged_sums(runner, totals)
        logged += MetricSums(totals={name: (totals.loss, totals.weight)} if name else {})
    norms = [totals.norm for _, totals in updates if totals.norm is not None]
    return StepReport(
        step=feed.step + 1,
        loss=sum(totals.loss / totals.weight for _, totals in updates if totals.weight),
        weight=updates[0][1].weight,
        learning_rate=rate,
        gradient_norm=norms[-1] if norms and replica.spec.clip_norm is not None else None,
        wish=any(totals.wish for _, totals in updates),
        logged=logged,
    )


def rehearse(runner: StepRunner, share: MicroBatchShare) -> None:
    """Run forward and backward of a micro-batch without any update."""
    optimizers = runner.objective.caller.spec.optimizer
    if not isinstance(optimizers, Mapping):
        train_step.run_micro_batch(runner, share)
        return
    for _ in _turns(runner, share, tuple(optimizers)):
        pass


def _undone(replica: TorchReplica) -> AbstractContextManager[None]:
    """Return the context that sets a replica back after an error."""
    kept = replica.rates.state

    def restore() -> None:
        replica.rates.state = kept
        replica.sound = True

    return replica.undo.after_errors(restore)


def _updates_in_turn(
    replica: TorchReplica, optimizer: NamedOptimizers, runner: StepRunner, feed: Feed
) -> Iterator[tuple[str, StepTotals]]:
    """Make the updates of a step; yield the name and the sums of each."""
    names, shares = tuple(optimizer.named), train_step.micro_batches_of(feed)
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
        sums, gradients = _reduced(runner, replica, trained, place=names.index(name) + 1 if name else 0)
        if not name:
            if number == 0:
                raise JobError(["step= yielded no loss"], where=runner.where)
            return
        totals = _settled(replica, runner, feed, sums, gradients)
        yield name, totals
        if totals.weight:
            with TorchUserCode(f"the step() of optimizer {name!r}", runner.where):
                optimizer.named[name].step()


def _turns(runner: StepRunner, share: MicroBatchShare, names: tuple[str, ...]) -> Iterator[str]:
    """Run a micro-batch's step up to each loss, and its backward; yield the name of the optimizer whose turn it is."""
    objective = runner.objective
    columns = objective.caller.tensors(share.batch)
    for name, (values, weights) in objective.caller.turns(objective.model, columns, share.batch, share.layout, names):
        pull = objective.pull(share, values, weights, objective.carry)
        with TorchUserCode("the backward pass", runner.where):
            pull.backward()
        yield name


def _update_with_closure(replica: TorchReplica, runner: StepRunner, feed: Feed) -> StepTotals:
    """Let an optimizer make its update; it may ask for the loss several times. Return the sums of the first time."""
    first: list[StepTotals] = []

    def closure() -> Tensor:
        _forget_gradients(replica, runner)
        runner.accumulate(replica, feed, sampled=False)
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
    norm = float(torch.nn.utils.get_total_norm(gradients)) if wants_norm and gradients else None
    totals = StepTotals.of(sums, norm)
    train_step.has_overflowed(runner, None, totals, feed)
    if not totals.weight:
        return totals
    length = train_step.scale_gradients(runner, gradients, totals, rows=feed.rows, largest=spec.clip_norm)
    return replace(totals, norm=length)
