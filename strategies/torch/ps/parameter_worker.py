"""An asynchronous worker: it pulls parameters, computes a unit, and pushes the unit's gradients or local change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from trainwright.core.data import Feed, StepReport
from trainwright.core.plan import Plan
from trainwright.core.topology import Consistency
from trainwright.strategies.ps.lease_table import Grant
from trainwright.strategies.ps.parameter_client import ParameterClient
from trainwright.strategies.ps.parameter_shards import ParameterShard
from trainwright.strategies.torch.ps.gradient_compression import GradientLayout
from trainwright.strategies.torch.ps.parameter_transfer import (
    GradientSender,
    OverlappedPull,
    ParameterPull,
    tensor_pieces,
)
from trainwright.strategies.torch.ps.shard_store import persistent_buffers
from trainwright.strategies.torch.training import train_step
from trainwright.strategies.torch.training.objective import BackwardRoots, JobFunctions, MicroBatchShare, Objective
from trainwright.strategies.torch.training.train_state import MIN_LOSS_SCALE, TorchReplica
from trainwright.strategies.torch.training.train_step import (
    GradientNoiseProbe,
    StepRunner,
    check_finite,
    mean_factor,
    overflows,
    read_totals,
)


class ParameterWorker:
    """A worker's model, and its exchange with the servers.

    Args:
        replica: with the model on the worker's device. Its optimizer steps where steps are local alone.
        shards: what each server holds.
        plan: has the consistency, the compression of gradients, and the number of local steps.
    """

    def __init__(self, replica: TorchReplica, shards: Sequence[ParameterShard], plan: Plan) -> None:
        self._replica, self._shards = replica, shards
        self._joined: ParameterClient | None = None
        self._forms = [GradientLayout(shard, plan.wire) for shard in shards]
        where = tensor_pieces(shards)
        self._incoming = ParameterPull(replica.model, shards, replica.device)
        consistency = Consistency.parse(plan.consistency or "sync")
        self._outgoing = GradientSender(
            replica=replica, where=where, forms=self._forms, leaves_out=consistency.backup > 0
        )
        self._arrivals = OverlappedPull(replica.model, where, self._incoming, replica.laps)
        self._ahead = replica.spec.compile != "inductor" and self._arrivals.sees  # of what comes, forward may run
        self._largest = None if consistency.waits else replica.spec.clip_norm
        self._local = plan.local_steps > 1
        self._buffers = persistent_buffers(replica.model)
        self._changing = [*(replica.trainable if self._local else ()), *(buffer for _, _, buffer in self._buffers)]
        self._pulled: dict[Tensor, Tensor] = {}  # those, as they were before a unit changed them
        self._sums: list[tuple[float, float]] = []  # of the unit's steps so far: losses and weights

    def join(self, clients: ParameterClient) -> None:
        """Exchange with the servers of a group from now on."""
        self._joined = clients
        self._outgoing.forget()
        clients.lay(self._shards, [form.size_bytes for form in self._forms], self._incoming.memory)

    @property
    def _clients(self) -> ParameterClient:
        assert self._joined is not None, "join() comes first"
        return self._joined

    def pull(self, needs: int = 0) -> None:
        """Copy the pulled parameters into the model: newer ones, and those that a unit changed."""
        self._undo()
        if self._clients.pull(needs):
            self._incoming.take()
        self._settle()

    def _settle(self) -> None:
        """Return pushes that did not count to the residual."""
        self._outgoing.settle(self._clients.left_out, self._clients.versions)

    def _undo(self) -> None:
        for module, key, buffer in self._buffers:
            module._buffers[key] = buffer  # the user's code may have put another one there
        for tensor, pulled in self._pulled.items():
            tensor.detach().copy_(pulled)
        self._pulled = {}

    def _begin(self, grant: Grant) -> None:
        """Start a unit with the servers' parameters."""
        self.pull(grant.needs)
        for tensor in self._changing:
            self._remember(tensor)

    def _remember(self, tensor: Tensor) -> None:
        """Return the pulled values of a tensor that a unit changes."""
        self._pulled[tensor] = tensor.detach().clone()

    @contextmanager
    def _begun(self, grant: Grant) -> Iterator[None]:
        """Compute a unit of one step, which starts while parameters of other machines still arrive."""
        if self._clients.shares or not self._ahead:
            self._begin(grant)
            self._replica.laps.wait()
            yield
            return
        self._undo()
        self._clients.pull(grant.needs, wait=False)
        self._settle()
        self._replica.laps.wait()
        changing = set(self._changing)
        self._arrivals.begin(self._clients, lambda tensor: self._remember(tensor) if tensor in changing else None)
        with self._arrivals.waiting():
            yield

    def runner(self, caller: JobFunctions) -> StepRunner:
        """Return the runner for micro-batches of a unit."""
        if self._local:
            objective = Objective(self._replica.model, caller, world=1)
            return StepRunner(objective=objective, reduced=objective, probe=GradientNoiseProbe(objective, ()))
        unit = _UnitObjective(self._replica.model, caller)
        outgoing = self._outgoing if self._largest is None else None
        return _UnitRunner(
            objective=unit, reduced=unit, probe=GradientNoiseProbe(unit, ()), unit=unit, outgoing=outgoing
        )

    def train(self, runner: StepRunner, feed: Feed) -> StepReport:
        """Compute one step of the unit that was leased last.

        Raises:
            NonFiniteLoss: nothing of the step counts.
            PeerLost, UserCodeError, JobError: nothing was pushed.
        """
        grant = self._clients.grant
        assert grant is not None and feed.step in range(grant.unit.step, grant.unit.step + grant.unit.steps)
        if isinstance(runner, _UnitRunner):
            return self._whole(runner, feed, grant)
        return self._one_of_several(runner, feed, grant)

    def _whole(self, runner: _UnitRunner, feed: Feed, grant: Grant) -> StepReport:
        """Compute and push a unit of one step."""
        replica, outgoing, clients = self._replica, self._outgoing, self._clients
        replica.laps.begin(feed.step)
        with replica.attempt() as attempt:
            with self._begun(grant):
                outgoing.begin(clients)
                done = _compute_unit(replica, runner, outgoing, feed, largest=self._largest)
            outgoing.buffers(self._shards)
            by = clients.push(weight=done.weight, sums=[(done.loss, done.weight)], norm=done.norm or 0.0)
            outgoing.counted(by, grant)
            attempt.applied = done.weight > 0
        replica.laps.wait()
        replica.laps.optimizer()
        return StepReport(
            step=feed.step + 1,
            loss=done.loss / done.weight if done.weight else 0.0,
            weight=done.weight,
            learning_rate=replica.set_rates(feed.step, runner.where),
            gradient_norm=done.norm if self._largest is not None else None,
            overflowed=done.overflowed,
            own_s=replica.laps.own_s,
            phases=replica.laps.ended(),
        )

    def _one_of_several(self, runner: StepRunner, feed: Feed, grant: Grant) -> StepReport:
        """Take a local step; after the last one, push the change of the parameters."""
        unit, trainable = grant.unit, self._replica.trainable
        if feed.step == unit.step:
            self._begin(grant)
            self._sums = []
        report = train_step.train(self._replica, runner, _as_own_feed(feed))
        self._sums.append((report.loss * report.weight, report.weight))
        if feed.step == unit.step + unit.steps - 1:
            self._outgoing.begin(self._clients)
            for parameter in trainable:
                self._outgoing.put(parameter, parameter.detach() - self._pulled[parameter])
            self._outgoing.rest(1.0)
            self._outgoing.buffers(self._shards)
            by = self._clients.push(weight=sum(weight for _, weight in self._sums), sums=self._sums)
            self._outgoing.counted(by, grant)
        return report


# --- One unit of a worker that steps alone ----------------------------------------------------------------------------


class _UnitObjective(Objective):
    """An objective that knows the unit's weight before its last backward pass.

    Attributes:
        factor: from the gradients as they are computed to those of the unit's weighted mean; a tensor on a GPU, where
            nothing is waited for.
    """

    def __init__(self, model: nn.Module, caller: JobFunctions) -> None:
        super().__init__(model, caller, world=1)
        self.factor: float | Tensor = 1.0
        self._weight: Tensor | None = None

    def begin(self) -> None:
        """Forget the former unit."""
        super().begin()
        self._weight = None

    def pull(self, share: MicroBatchShare, values: Tensor, weights: Tensor, carry: Tensor) -> BackwardRoots:
        """Return the tensor to start backward from, given the result of `forward`; add up losses and weight."""
        pull = super().pull(share, values, weights, carry)
        self._weight = pull.sums[0] if self._weight is None else self._weight + pull.sums[0]
        rows = max(share.rows, 1)
        if self._weight.device.type == "cpu":
            weight = float(self._weight)
            self.factor = mean_factor(weight, rows, self.carry.dtype) / self.scale if weight else 0.0
        else:
            self.factor = torch.where(self._weight > 0, rows / self._weight, 0.0) / self.scale
        return pull


@dataclass(frozen=True, kw_only=True)
class _UnitRunner(StepRunner):
    """Runs a unit's micro-batches.

    Attributes:
        unit: the objective.
        outgoing: takes gradients as they come; None where they are clipped as a whole first.
    """

    unit: _UnitObjective
    outgoing: GradientSender | None

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Send each gradient of the last backward pass as soon as it is computed."""
        if self.outgoing is None:
            yield
            return
        with self.outgoing.watching(lambda: self.unit.factor):
            yield


@dataclass(frozen=True, kw_only=True)
class _UnitGradient:
    """Result of a unit.

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


def _as_own_feed(feed: Feed) -> Feed:
    """Return the feed as one of a single worker: its rows are the whole step."""
    rows = sum(int((batch.weights > 0).sum()) for part in feed.parts for batch in part)
    return replace(feed, rows=max(rows, 1))


def _compute_unit(
    replica: TorchReplica, runner: _UnitRunner, outgoing: GradientSender, feed: Feed, *, largest: float | None
) -> _UnitGradient:
    """Compute a unit; its gradient is left in the outbox.

    Args:
        largest: norm to which the gradient is clipped here; None where servers do it, or nobody.

    Raises:
        NonFiniteLoss: the loss or the gradient is not finite, with the samples.
        UserCodeError, JobError: the user's code raised or is wrong.
    """
    spec, scale, objective = replica.spec, replica.scale, runner.unit
    feed = _as_own_feed(feed)
    objective.scale = scale.factor if scale else 1.0
    runner.accumulate(replica, feed, sampled=False)
    gradients = [each.grad for each in replica.trainable if each.grad is not None]
    totals = read_totals(runner, gradients, wants_norm=largest is not None or spec.guard or scale is not None)
    if totals.norm is not None:
        totals = replace(totals, norm=totals.norm / objective.scale)
    overflowed = scale is not None and scale.factor > MIN_LOSS_SCALE and overflows(totals)
    if not overflowed:
        check_finite(runner, totals, feed)
    if scale is not None and (totals.weight or overflowed):
        replica.scale = scale.overflowed() if overflowed else scale.applied()
    if overflowed or not totals.weight:
        return _UnitGradient(weight=0.0, loss=totals.loss, norm=None, overflowed=overflowed)
    factor = objective.factor
    norm = None if totals.norm is None else totals.norm * mean_factor(totals.weight, feed.rows, objective.carry.dtype)
    if norm is not None and largest is not None and norm > largest:
        factor = factor * (largest / norm)
    outgoing.rest(factor)
    return _UnitGradient(weight=totals.weight, loss=totals.loss, norm=norm, overflowed=False)
