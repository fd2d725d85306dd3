"""A worker's transfer of tensors: parameters from the servers into its model, and gradients into the outboxes.

In the last micro-batch of a unit, each gradient is written as soon as backward has computed it: the mean over the unit,
in the memory that the transport sends from.

Pulled parameters arrive in the model's order. A module waits for its own tensors before its forward, and each torch
function for its arguments, since a forward can use tensors of another module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright.core.errors import JobError
from trainwright.core.topology import WorkUnit
from trainwright.strategies.ps.lease_table import Grant
from trainwright.strategies.ps.parameter_client import ParameterClient
from trainwright.strategies.ps.parameter_shards import ParameterShard, ShardSlot
from trainwright.strategies.torch.ps.gradient_compression import GradientLayout
from trainwright.strategies.torch.ps.shard_store import SPARSE_REFUSED, named_tensors
from trainwright.strategies.torch.training.phase_timer import PhaseTimer
from trainwright.strategies.torch.training.train_state import TorchReplica


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
    found: dict[str, list[TensorPiece]] = {}
    for server, shard in enumerate(shards):
        for slot in shard.slots:
            found.setdefault(slot.name, []).append(TensorPiece(server=server, slot=slot))
    return found


class ParameterPull:
    """Copies of the servers' regions in host memory, from which the model's tensors are filled.

    On the CPU a tensor that one server holds as a whole lives in the copy. To a GPU all is copied from pinned memory.

    Attributes:
        memory: of each server's copy.
    """

    def __init__(self, model: nn.Module, shards: Sequence[ParameterShard], device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._bytes = [torch.empty(shard.size_bytes, dtype=torch.uint8, pin_memory=pinned) for shard in shards]
        self.memory: list[memoryview] = [each.numpy().data for each in self._bytes]
        self._copied: dict[tuple[int, ShardSlot], tuple[Tensor, Tensor]] = {}  # by server and slot, source and target
        where = tensor_pieces(shards)
        for name, tensor in named_tensors(model):
            for piece in where[name] if tensor.numel() else ():
                place = self._place(piece, piece.of(tensor.detach()))
                if piece.slot.rows is None and not pinned:
                    tensor.data = place.copy_(tensor.detach())
                else:
                    self._copied[piece.server, piece.slot] = place, piece.of(tensor.detach())

    def take(self, pieces: Iterable[TensorPiece] | None = None) -> None:
        """Copy these tensors, by default all, into the model after they arrived."""
        keys = self._copied if pieces is None else [(piece.server, piece.slot) for piece in pieces]
        for place, tensor in [self._copied[key] for key in keys if key in self._copied]:
            tensor.copy_(place, non_blocking=True)

    def _place(self, piece: TensorPiece, like: Tensor) -> Tensor:
        slot = piece.slot
        held = self._bytes[piece.server][slot.offset : slot.offset + like.numel() * like.element_size()]
        return held.view(like.dtype).view(like.shape)


@dataclass(kw_only=True)
class _StagedGradient:
    """A gradient that is being copied from the GPU."""

    arrived: torch.cuda.Event
    piece: TensorPiece
    values: Tensor


@dataclass(kw_only=True)
class GradientSender:
    """Writes the gradients of a unit into the outboxes.

    Args:
        replica: the worker's.
        where: pieces of each tensor.
        forms: of what is pushed to each server.
        leaves_out: whether a round may go on without a push that a server has taken.
    """

    replica: TorchReplica
    where: Mapping[str, Sequence[TensorPiece]]
    forms: Sequence[GradientLayout]
    leaves_out: bool = False
    _clients: ParameterClient | None = None
    _outbox: Sequence[memoryview] = ()
    _kept: dict[tuple[int, str], Tensor] = field(
        default_factory=dict
    )  # by server and name, the residual of the next push
    _left: dict[tuple[int, str], Tensor] = field(
        default_factory=dict
    )  # the residual after the current push, if it counts
    _doubted: dict[tuple[int, int, WorkUnit], dict[str, Tensor]] = field(default_factory=dict)  # that return to _kept
    _written: set[nn.Parameter] = field(default_factory=set)
    _late: list[_StagedGradient] = field(default_factory=list)

    def begin(self, clients: ParameterClient) -> None:
        """Start a push; a former one that was not pushed leaves nothing in the residual."""
        self._clients, self._outbox = clients, clients.outbox
        self._left.clear()
        self._written.clear()
        self._late.clear()

    @contextmanager
    def watching(self, factor: Callable[[], float | Tensor]) -> Iterator[None]:
        """Send each gradient of a backward pass within the block, times a factor, as soon as it is computed."""
        told = partial(self._told, factor)
        handles = [each.register_post_accumulate_grad_hook(told) for each in self.replica.trainable]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def rest(self, factor: float | Tensor) -> None:
        """Send the gradients that were not sent yet; zeros if there is none."""
        for parameter in self.replica.trainable:
            if parameter not in self._written:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self.put(parameter, gradient, factor)
        self._sent(wait=True)

    def buffers(self, shards: Sequence[ParameterShard]) -> None:
        """Send the model's buffers, after the gradients."""
        for name, buffer in self.replica.model.named_buffers():
            for piece in self.where.get(name, ()):
                if buffer.numel():
                    shard, form = shards[piece.server], self.forms[piece.server]
                    offset = form.size_bytes + piece.slot.offset - shard.trained_bytes
                    target = torch.frombuffer(
                        self._outbox[piece.server], dtype=buffer.dtype, count=buffer.numel(), offset=offset
                    )
                    target.view(buffer.shape).copy_(buffer)

    def put(self, parameter: nn.Parameter, values: Tensor, factor: float | Tensor = 1.0) -> None:
        """Write the gradient of a parameter."""
        self._written.add(parameter)
        name = self.replica.names[parameter]
        if values.is_sparse:
            raise JobError([f"parameter {name!r} {SPARSE_REFUSED}"])
        for piece in self.where[name]:
            part = piece.of(values.detach())
            if part.device.type == "cuda":
                self._late.append(_stage_gradient(piece, part * factor))
            else:
                self._write(piece, part, factor)
        self._sent(wait=False)

    def _told(self, factor: Callable[[], float | Tensor], parameter: nn.Parameter) -> None:
        assert parameter.grad is not None, "it was accumulated"
        self.put(parameter, parameter.grad, factor())

    def counted(self, by: Sequence[bool], grant: Grant) -> None:
        """Take which servers accepted the push: for the others the residual stays as it was."""
        for (server, name), kept in self._left.items():
            if by[server]:
                if self.leaves_out:
                    before = self._kept.get((server, name))
                    gone = -kept if before is None else before - kept
                    self._doubted.setdefault((server, grant.at, grant.unit), {})[name] = gone
                self._kept[server, name] = kept
        self._left.clear()

    def settle(self, left_out: Iterable[tuple[int, int, WorkUnit]], versions: Sequence[int]) -> None:
        """Return pushes that did not count to the residual; see `ParameterClient.left_out` and `versions`.

        Another worker pushes the gradients of these units: no part of a gradient is lost or counted twice.
        """
        for server, at, unit in left_out:
            for name, gone in self._doubted.pop((server, at, unit), {}).items():
                self._kept[server, name] += gone
        self._doubted = {key: gone for key, gone in self._doubted.items() if key[1] >= versions[key[0]]}

    def forget(self) -> None:
        """Forget former pushes: the servers are others."""
        self._doubted.clear()

    def _write(self, piece: TensorPiece, values: Tensor, factor: float | Tensor = 1.0) -> None:
        name, form = piece.slot.name, self.forms[piece.server]
        kept = None
        if form.keeps:
            before = self._kept.get((piece.server, name))
            kept = torch.zeros(values.shape, dtype=values.dtype) if before is None else before.clone()
            self._left[piece.server, name] = kept
        if values.numel():
            form.write(self._outbox[piece.server], name, values.contiguous(), factor, kept)
        place = form.places[name]
        assert self._clients is not None, "begin() comes first"
        self._clients.ready(piece.server, place.offset, place.size)

    def _sent(self, *, wait: bool) -> None:
        """Write the gradients that have arrived from the GPU, in order; `wait` for the rest."""
        while self._late and (wait or self._late[0].arrived.query()):  # type: ignore[no-untyped-call]
            late = self._late.pop(0)
            late.arrived.synchronize()
            self._write(late.piece, late.values)


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
        model: of the worker.
        where: pieces of each tensor, by name.
        incoming: takes what has come.
        laps: counts the time that is waited.
    """

    def __init__(
        self, model: nn.Module, where: Mapping[str, Sequence[TensorPiece]], incoming: ParameterPull, laps: PhaseTimer
    ) -> None:
        super().__init__()
        self._model, self._incoming, self._laps = model, incoming, laps
        self._pieces = {id(tensor): (tensor, where[name]) for name, tensor in named_tensors(model)}
        self._away: dict[int, tuple[Tensor, Sequence[TensorPiece]]] = {}
        self._clients: ParameterClient | None = None
        self._arrived: _Arrived = lambda tensor: None

    @property
    def sees(self) -> bool:
        """Whether every use of a tensor can be intercepted; not in scripted modules."""
        return not any(isinstance(module, torch.jit.ScriptModule) for module in self._model.modules())

    def begin(self, clients: ParameterClient, arrived: _Arrived) -> None:
        """Start to wait for a pull; `arrived` is called for each tensor before its first use."""
        self._clients, self._arrived, self._away = clients, arrived, dict(self._pieces)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Run the model within the block; at its end all tensors have arrived. Raises PeerLost."""
        with ExitStack() as stack:
            for module in self._model.modules():
                held = (*module._parameters.values(), *module._buffers.values())
                own = [tensor for tensor in held if tensor is not None and id(tensor) in self._pieces]
                if own:
                    hook = partial(self._before, own)
                    stack.callback(module.register_forward_pre_hook(hook, prepend=True).remove)
            stack.callback(self.finish)
            stack.enter_context(self)
            yield

    def finish(self) -> None:
        """Wait for all tensors that were not used. Raises PeerLost."""
        self._need([tensor for tensor, _ in self._away.values()])

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait for the tensors among a function's arguments."""
        kwargs = kwargs or {}
        if self._away:
            self._need(_tensors_in((args, kwargs)))
        return func(*args, **kwargs)

    def _before(self, own: Iterable[Tensor], module: nn.Module, given: Any) -> None:
        if self._away:
            self._need(own)

    def _need(self, tensors: Iterable[Tensor]) -> None:
        """Wait for these tensors if they have not arrived."""
        late = [found for tensor in tensors if (found := self._away.pop(id(tensor), None)) is not None]
        if not late:
            return
        assert self._clients is not None, "begin() comes first"
        self._laps.forward()
        for tensor, pieces in late:
            for piece in pieces:
                self._clients.pulled(piece.server, piece.slot.offset, piece.slot.size)
            self._incoming.take(pieces)
            self._arrived(tensor)
        self._laps.wait()


def _tensors_in(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        yield from _tensors_in(given.values())
    elif isinstance(given, (tuple, list, type({}.values()))):
        for each in given:
            yield from _tensors_in(each)
