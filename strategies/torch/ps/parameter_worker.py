"""An asynchronous worker: it pulls parameters, computes a unit, and pushes the unit's gradients or local change.

In the last micro-batch of a unit, each gradient is written as soon as backward has computed it: the mean over the unit,
in the memory that the transport sends from.

Pulled parameters arrive in the model's order. A module waits for its own tensors before its forward, and each torch
function for its arguments, since a forward can use tensors of another module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright.core.data import Feed, StepReport, clipping_factor
from trainwright.core.errors import JobError
from trainwright.core.plan import Plan
from trainwright.core.topology import Consistency
from trainwright.strategies.ps.lease_table import Grant
from trainwright.strategies.ps.parameter_client import ParameterClient
from trainwright.strategies.ps.parameter_shards import ParameterShard, ShardSlot
from trainwright.strategies.torch.ps.gradient_compression import GradientLayout
from trainwright.strategies.torch.ps.shard_store import SPARSE_REFUSED, named_tensors, persistent_buffers, server_shards
from trainwright.strategies.torch.step_trace import PhaseTimer, span
from trainwright.strategies.torch.training import train_step
from trainwright.strategies.torch.training.objective import BackwardRoots, JobFunctions, MicroBatchShare, Objective
from trainwright.strategies.torch.training.train_state import TorchReplica
from trainwright.strategies.torch.training.train_step import (
    StepRunner,
    StepTotals,
    has_overflowed,
    mean_factor,
    read_totals,
)


class ParameterWorker:
    """A worker's model, and its exchange with the servers.

    Args:
        replica: with the model on the worker's device. Its optimizer steps where steps are local alone.
        plan: has the consistency, the compression of gradients, and the number of local steps.
        where: the rank, for errors.

    Raises:
        JobError: the servers cannot hold the model.
    """

    def __init__(self, replica: TorchReplica, plan: Plan, where: str) -> None:
        shards = server_shards(replica.spec, plan, replica.model, where)
        self.replica, self._shards = replica, shards
        self._joined: ParameterClient | None = None
        self._forms = [GradientLayout(shard, plan.wire) for shard in shards]
        pieces = tensor_pieces(shards)
        self._incoming = ParameterPull(replica.model, shards, replica.device)
        self._outgoing = GradientSender(replica, pieces, self._forms)
        self._arrivals = OverlappedPull(replica.model, pieces, self._incoming, replica.phase_timer)
        self._ahead = replica.spec.compile != "inductor" and self._arrivals.sees  # of what comes, forward may run
        self._largest = None if Consistency.parse(plan.consistency or "sync").waits else replica.spec.clip_norm
        self._local = plan.local_steps > 1
        self._buffers = persistent_buffers(replica.model)
        self._changing = [*(replica.trainable if self._local else ()), *(buffer for _, _, buffer in self._buffers)]
        self._pulled: dict[Tensor, Tensor] = {}  # those, as they were before a unit changed them
        self._reports: list[StepReport] = []  # of the unit's steps so far

    def join(self, clients: ParameterClient) -> None:
        """Exchange with the servers of a group from now on."""
        self._joined = clients
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

    def _undo(self) -> None:
        for module, key, buffer in self._buffers:
            module._buffers[key] = buffer  # the user's code may have put another one there
        for tensor, pulled in self._pulled.items():
            tensor.detach().copy_(pulled)
        self._pulled = {}

    def _begin(self, grant: Grant) -> None:
        """Start a unit with the servers' parameters."""
        with span("pull"):
            self.pull(grant.needs)
        for tensor in self._changing:
            self._remember(tensor)

    def _remember(self, tensor: Tensor) -> None:
        """Keep the pulled values of a tensor that a unit changes."""
        self._pulled[tensor] = tensor.detach().clone()

    @contextmanager
    def _begun(self, grant: Grant) -> Iterator[None]:
        """Compute a unit of one step, which starts while parameters of other machines still arrive."""
        if self._clients.shares or not self._ahead:
            self._begin(grant)
            self.replica.phase_timer.wait()
            yield
            return
        self._undo()
        self._clients.pull(grant.needs, wait=False)
        self.replica.phase_timer.wait()
        changing = set(self._changing)
        self._arrivals.begin(self._clients, lambda tensor: self._remember(tensor) if tensor in changing else None)
        with self._arrivals.waiting():
            yield

    def runner(self, caller: JobFunctions) -> StepRunner:
        """Return the runner for micro-batches of a unit."""
        if self._local:
            return StepRunner(objective=Objective(self.replica.model, caller, world=1))
        outgoing = self._outgoing if self._largest is None else None
        return _UnitRunner(objective=_UnitObjective(self.replica.model, caller), outgoing=outgoing)

    def train(self, runner: StepRunner, feed: Feed) -> StepReport:
        """Compute one step of the unit that was leased last.

        Raises:
            NonFiniteLoss: nothing of the step counts.
            PeerLost, UserCodeError, JobError: nothing was pushed.
        """
        grant = self._clients.grant
        assert grant is not None and feed.step in range(grant.unit.step, grant.unit.step + grant.unit.steps)
        if isinstance(runner, _UnitRunner):
            return self._train_unit(runner, feed, grant)
        return self._train_locally(runner, feed, grant)

    def _train_unit(self, runner: _UnitRunner, feed: Feed, grant: Grant) -> StepReport:
        """Compute and push a unit of one step."""
        replica, outgoing, clients = self.replica, self._outgoing, self._clients
        replica.phase_timer.begin(feed.step)
        with replica.attempt() as attempt:
            with self._begun(grant):
                outgoing.begin(clients)
                done, overflowed = self._compute_unit(runner, _as_own_feed(feed))
            outgoing.buffers(self._shards)
            sums, logged = [(done.loss, done.weight)], [train_step.logged_sums(runner, done)]
            with span("push"):
                by = clients.push(weight=done.weight, sums=sums, norm=done.norm or 0.0, logged=logged)
            outgoing.counted(by)
            attempt.applied = done.weight > 0
        replica.phase_timer.wait()
        replica.phase_timer.optimizer()
        return StepReport(
            step=feed.step + 1,
            loss=done.loss / done.weight if done.weight else 0.0,
            weight=done.weight,
            learning_rate=replica.rates.begin(feed.step, None, runner.where),
            gradient_norm=done.norm if self._largest is not None else None,
            overflowed=overflowed,
            own_s=replica.phase_timer.own_s,
            phases=replica.phase_timer.ended(),
        )

    def _compute_unit(self, runner: _UnitRunner, feed: Feed) -> tuple[StepTotals, bool]:
        """Compute a unit, and leave its gradient in the outbox, clipped where servers do not clip it.

        Returns:
            The unit's sums, with weight 0 where nothing of it counts, and the norm of its mean gradient before it was
            clipped, where it is wanted; and whether the gradient was too large for `fp16`.

        Raises:
            NonFiniteLoss: the loss or the gradient is not finite, with the samples.
            UserCodeError, JobError: the user's code raised or is wrong.
        """
        replica, objective, largest = self.replica, runner.objective, self._largest
        spec, scale = replica.spec, replica.scale
        objective.scale = scale.factor if scale else 1.0
        runner.accumulate(replica, feed, sampled=False)
        gradients = [each.grad for each in replica.trainable if each.grad is not None]
        totals = read_totals(runner, gradients, wants_norm=largest is not None or spec.guard or scale is not None)
        if totals.norm is not None:
            totals = replace(totals, norm=totals.norm / objective.scale)
        overflowed = has_overflowed(runner, scale, totals, feed)
        if scale is not None and (totals.weight or overflowed):
            replica.scale = scale.overflowed() if overflowed else scale.applied()
        if overflowed or not totals.weight:
            return replace(totals, weight=0.0, norm=None), overflowed
        factor, norm = objective.factor, totals.norm
        if norm is not None:
            norm *= mean_factor(totals.weight, feed.rows, objective.sums_parameter.dtype)
            if largest is not None:
                factor = factor * clipping_factor(norm, largest)
        self._outgoing.rest(factor)
        return replace(totals, norm=norm), False

    def _train_locally(self, runner: StepRunner, feed: Feed, grant: Grant) -> StepReport:
        """Take a local step; after the last one, push the change of the parameters."""
        unit, trainable = grant.unit, self.replica.trainable
        if feed.step == unit.step:
            self._begin(grant)
            self._reports = []
        report = train_step.train(self.replica, runner, _as_own_feed(feed))
        self._reports.append(report)
        if feed.step == unit.step + unit.steps - 1:
            self._outgoing.begin(self._clients)
            for parameter in trainable:
                self._outgoing.put(parameter, parameter.detach() - self._pulled[parameter])
            self._outgoing.rest(1.0)
            self._outgoing.buffers(self._shards)
            sums = [(each.loss * each.weight, each.weight) for each in self._reports]
            logged = [each.logged for each in self._reports]
            with span("push"):
                by = self._clients.push(weight=sum(weight for _, weight in sums), sums=sums, logged=logged)
            self._outgoing.counted(by)
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

    def backward_roots(
        self, share: MicroBatchShare, values: Tensor, weights: Tensor, sums_parameter: Tensor
    ) -> BackwardRoots:
        """Return the roots of backward, given the result of `forward`; add up losses and weight."""
        roots = super().backward_roots(share, values, weights, sums_parameter)
        self._weight = roots.sums[0] if self._weight is None else self._weight + roots.sums[0]
        rows = max(share.rows, 1)
        if self._weight.device.type == "cpu":
            weight = float(self._weight)
            self.factor = mean_factor(weight, rows, self.sums_parameter.dtype) / self.scale if weight else 0.0
        else:
            self.factor = torch.where(self._weight > 0, rows / self._weight, 0.0) / self.scale
        return roots


@dataclass(frozen=True, kw_only=True)
class _UnitRunner(StepRunner):
    """Runs a unit's micro-batches."""

    objective: _UnitObjective
    outgoing: GradientSender | None  # takes gradients as they come; None where they are clipped as a whole first

    @contextmanager
    def last_micro_batch(self) -> Iterator[None]:
        """Send each gradient of the last backward pass as soon as it is computed."""
        if self.outgoing is None:
            yield
            return
        with self.outgoing.watching(lambda: self.objective.factor):
            yield


def _as_own_feed(feed: Feed) -> Feed:
    """Return the feed as one of a single worker: its rows are the whole step."""
    rows = sum(int((batch.weights > 0).sum()) for part in feed.parts for batch in part)
    return replace(feed, rows=max(rows, 1))


# --- Transfer of tensors ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TensorPiece:
    """One server's part of one tensor."""

    server: int
    slot: ShardSlot

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part's rows as a view of the tensor."""
        return tensor if self.slot.rows is None else tensor[self.slot.rows[0] : self.slot.rows[1]]


def tensor_pieces(shards: Sequence[ParameterShard]) -> dict[str, list[TensorPiece]]:
    """Return the parts of each tensor, by name."""
    pieces: dict[str, list[TensorPiece]] = {}
    for server, shard in enumerate(shards):
        for slot in shard.slots:
            pieces.setdefault(slot.name, []).append(TensorPiece(server=server, slot=slot))
    return pieces


class ParameterPull:
    """Copies of the servers' regions in host memory, from which the model's tensors are filled.

    On the CPU, a tensor that one server holds as a whole is a view of the copy. A GPU gets copies from pinned memory.

    Attributes:
        memory: the memory of each server's copy.
    """

    def __init__(self, model: nn.Module, shards: Sequence[ParameterShard], device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._bytes = [torch.empty(shard.size_bytes, dtype=torch.uint8, pin_memory=pinned) for shard in shards]
        self.memory: list[memoryview] = [each.numpy().data for each in self._bytes]
        self._copies: dict[tuple[int, ShardSlot], tuple[Tensor, Tensor]] = {}  # by server and slot, source and target
        where = tensor_pieces(shards)
        for name, tensor in named_tensors(model):
            for piece in where[name] if tensor.numel() else ():
                place = self._place(piece, piece.of(tensor.detach()))
                if piece.slot.rows is None and not pinned:
                    tensor.data = place.copy_(tensor.detach())
                else:
                    self._copies[piece.server, piece.slot] = place, piece.of(tensor.detach())

    def take(self, pieces: Iterable[TensorPiece] | None = None) -> None:
        """Copy these pieces, by default all, into the model after they arrived."""
        keys = self._copies if pieces is None else [(piece.server, piece.slot) for piece in pieces]
        for place, tensor in [self._copies[key] for key in keys if key in self._copies]:
            tensor.copy_(place, non_blocking=True)

    def _place(self, piece: TensorPiece, like: Tensor) -> Tensor:
        slot = piece.slot
        values = self._bytes[piece.server][slot.offset : slot.offset + like.numel() * like.element_size()]
        return values.view(like.dtype).view(like.shape)


class _StagedGradient(NamedTuple):
    """A gradient that is being copied from the GPU."""

    arrived: torch.cuda.Event
    piece: TensorPiece
    values: Tensor


class GradientSender:
    """Writes the gradients of a unit into the outboxes.

    Args:
        replica: the worker's.
        where: pieces of each tensor.
        forms: of what is pushed to each server.
    """

    def __init__(
        self, replica: TorchReplica, where: Mapping[str, Sequence[TensorPiece]], forms: Sequence[GradientLayout]
    ) -> None:
        self._replica, self._where, self._forms = replica, where, forms
        self._clients: ParameterClient | None = None
        self._outbox: Sequence[memoryview] = ()
        self._residuals: dict[tuple[int, str], Tensor] = {}  # by server and name, the residual of the next push
        self._new_residuals: dict[tuple[int, str], Tensor] = {}  # the residual after the current push, if it counts
        self._sent_parameters: set[nn.Parameter] = set()
        self._staged: list[_StagedGradient] = []

    def begin(self, clients: ParameterClient) -> None:
        """Start a push. An earlier one that was not pushed does not change the residuals."""
        self._clients, self._outbox = clients, clients.outbox
        self._new_residuals.clear()
        self._sent_parameters.clear()
        self._staged.clear()

    @contextmanager
    def watching(self, factor: Callable[[], float | Tensor]) -> Iterator[None]:
        """Send each gradient of a backward pass within the block, times a factor, as soon as it is computed."""
        hook = partial(self._send_accumulated, factor)
        handles = [each.register_post_accumulate_grad_hook(hook) for each in self._replica.trainable]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def rest(self, factor: float | Tensor) -> None:
        """Send the gradients that were not sent yet; zeros if there is none."""
        for parameter in self._replica.trainable:
            if parameter not in self._sent_parameters:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self.put(parameter, gradient, factor)
        self._write_staged(wait=True)

    def buffers(self, shards: Sequence[ParameterShard]) -> None:
        """Send the model's buffers, after the gradients."""
        for name, buffer in self._replica.model.named_buffers():
            for piece in self._where.get(name, ()):
                if buffer.numel():
                    shard, form = shards[piece.server], self._forms[piece.server]
                    offset = form.size_bytes + piece.slot.offset - shard.trained_bytes
                    target = torch.frombuffer(
                        self._outbox[piece.server], dtype=buffer.dtype, count=buffer.numel(), offset=offset
                    )
                    target.view(buffer.shape).copy_(buffer)

    def put(self, parameter: nn.Parameter, values: Tensor, factor: float | Tensor = 1.0) -> None:
        """Write the gradient of a parameter."""
        self._sent_parameters.add(parameter)
        name = self._replica.names[parameter]
        if values.is_sparse:
            raise JobError([f"parameter {name!r} {SPARSE_REFUSED}"])
        for piece in self._where[name]:
            part = piece.of(values.detach())
            if part.device.type == "cuda":
                self._staged.append(_stage_gradient(piece, part * factor))
            else:
                self._write(piece, part, factor)
        self._write_staged(wait=False)

    def _send_accumulated(self, factor: Callable[[], float | Tensor], parameter: nn.Parameter) -> None:
        assert parameter.grad is not None, "it was accumulated"
        self.put(parameter, parameter.grad, factor())

    def counted(self, accepted: Sequence[bool]) -> None:
        """Update the residuals of the servers that accepted the push."""
        self._residuals |= {key: value for key, value in self._new_residuals.items() if accepted[key[0]]}
        self._new_residuals.clear()

    def _write(self, piece: TensorPiece, values: Tensor, factor: float | Tensor = 1.0) -> None:
        name, form = piece.slot.name, self._forms[piece.server]
        residual = None
        if form.keeps:
            old_residual = self._residuals.get((piece.server, name))
            residual = torch.zeros(values.shape, dtype=values.dtype) if old_residual is None else old_residual.clone()
            self._new_residuals[piece.server, name] = residual
        if values.numel():
            form.write(self._outbox[piece.server], name, values.contiguous(), factor, residual)
        place = form.places[name]
        assert self._clients is not None, "begin() comes first"
        self._clients.ready(piece.server, place.offset, place.size)

    def _write_staged(self, *, wait: bool) -> None:
        """Write the gradients that have arrived from the GPU, in order; with `wait`, write all."""
        while self._staged and (wait or self._staged[0].arrived.query()):  # type: ignore[no-untyped-call]
            staged = self._staged.pop(0)
            staged.arrived.synchronize()
            self._write(staged.piece, staged.values)


def _stage_gradient(piece: TensorPiece, values: Tensor) -> _StagedGradient:
    """Start a copy to pinned memory, after the device's current work."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return _StagedGradient(arrived=arrived, piece=piece, values=host)


# --- Forward while parameters still arrive ---------------------------------------------------------------------------


_Arrived = Callable[[Tensor], None]


class OverlappedPull(TorchFunctionMode):
    """Waits for parameters and buffers of a pull that has not finished.

    Args:
        model: the worker's model.
        where: pieces of each tensor, by name.
        incoming: copies the tensors that have arrived into the model.
        timer: counts the waiting time.
    """

    def __init__(
        self, model: nn.Module, where: Mapping[str, Sequence[TensorPiece]], incoming: ParameterPull, timer: PhaseTimer
    ) -> None:
        super().__init__()
        self._model, self._incoming, self._timer = model, incoming, timer
        self._pieces = {id(tensor): (tensor, where[name]) for name, tensor in named_tensors(model)}
        self._missing: dict[int, tuple[Tensor, Sequence[TensorPiece]]] = {}
        self._clients: ParameterClient | None = None
        self._arrived: _Arrived = lambda tensor: None

    @property
    def sees(self) -> bool:
        """Whether every use of a tensor can be intercepted; not in scripted modules."""
        return not any(isinstance(module, torch.jit.ScriptModule) for module in self._model.modules())

    def begin(self, clients: ParameterClient, arrived: _Arrived) -> None:
        """Start to wait for a pull; `arrived` is called for each tensor before its first use."""
        self._clients, self._arrived, self._missing = clients, arrived, dict(self._pieces)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Run the model within the block; at its end all tensors have arrived. Raises PeerLost."""
        with ExitStack() as stack:
            for module in self._model.modules():
                tensors = (*module._parameters.values(), *module._buffers.values())
                pulled = [tensor for tensor in tensors if tensor is not None and id(tensor) in self._pieces]
                if pulled:
                    hook = partial(self._wait_before_forward, pulled)
                    stack.callback(module.register_forward_pre_hook(hook, prepend=True).remove)
            stack.callback(self.finish)
            stack.enter_context(self)
            yield

    def finish(self) -> None:
        """Wait for all tensors that were not used. Raises PeerLost."""
        self._wait_for([tensor for tensor, _ in self._missing.values()])

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait for the tensors among a function's arguments."""
        kwargs = kwargs or {}
        if self._missing:
            self._wait_for(_tensors_in((args, kwargs)))
        return func(*args, **kwargs)

    def _wait_before_forward(self, tensors: Iterable[Tensor], module: nn.Module, inputs: Any) -> None:
        if self._missing:
            self._wait_for(tensors)

    def _wait_for(self, tensors: Iterable[Tensor]) -> None:
        """Wait for these tensors if they have not arrived."""
        waiting = [entry for tensor in tensors if (entry := self._missing.pop(id(tensor), None)) is not None]
        if not waiting:
            return
        assert self._clients is not None, "begin() comes first"
        self._timer.forward()
        for tensor, pieces in waiting:
            for piece in pieces:
                self._clients.pulled(piece.server, piece.slot.offset, piece.slot.size)
            self._incoming.take(pieces)
            self._arrived(tensor)
        self._timer.wait()


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(value.values())
    elif isinstance(value, (tuple, list, type({}.values()))):
        for each in value:
            yield from _tensors_in(each)
