"""What a stage of a pipeline receives for its operations and sends to other stages, or to its own next section."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from socket import socket
from typing import Literal

import torch
from torch import Tensor, distributed

from trainwright.core.errors import PeerLost
from trainwright.core.plan import Plan, section_of, stage_of_section
from trainwright.core.topology import Address, Group
from trainwright.strategies.common.socket_transport import (
    LOOPBACK,
    LOST_PEER_REMEDY,
    ConnectionCanceller,
    SocketListener,
    own_host,
)
from trainwright.strategies.cost_model.pipeline_schedules import Operation
from trainwright.strategies.torch.distributed.process_group import all_gather_ints, is_one_host
from trainwright.strategies.torch.pipeline.split import SplitModel
from trainwright.strategies.torch.pipeline.stage_channels import (
    Channel,
    GroupChannel,
    SocketChannel,
    Waits,
    accept_channel,
    open_channel,
)
from trainwright.strategies.torch.step_trace import PhaseTimer
from trainwright.strategies.torch.tensor_parallel.sharded_tensor import full_tensor
from trainwright.strategies.torch.training.objective import MicroBatchShare

_Direction = Literal["forward", "backward"]
_ChannelKey = tuple[_Direction, int, int]  # source and target stage
_TYPES = tuple(sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str))


@dataclass(frozen=True, kw_only=True)
class _P2PTransfer:
    """Tensors under way; they must not change, and be held, until it has ended."""

    tensors: list[Tensor]
    waits: Waits

    def wait(self) -> list[Tensor]:
        """Wait until it has ended, and return the tensors. Raises PeerLost or RuntimeError if a rank is gone."""
        for wait in self.waits:
            wait()
        return self.tensors


class StageLinks:
    """A rank's place in a pipeline, and its messages under way.

    Attributes:
        columns: the ranks of each pipeline, by stage.
        stage: of this rank.
        receives: receives under way, by the operation that needs them.
        sent: sends of this step.
        early_sends: sends for the next step, which may be taken only then.

    After an error the last three may have entries.
    """

    def __init__(self, plan: Plan, group: Group, device: torch.device) -> None:
        mesh = plan.mesh
        width = mesh.size // mesh.pipeline
        rows = [list(range(stage * width, (stage + 1) * width)) for stage in range(mesh.pipeline)]
        self.stage, self._place = divmod(group.rank, width)
        self.columns: tuple[tuple[int, ...], ...] = tuple(zip(*rows, strict=True))
        self._group, self.device = group, device
        self.receives: dict[Operation, _P2PTransfer] = {}
        self.sent: list[_P2PTransfer] = []
        self.early_sends: list[_P2PTransfer] = []
        # One for activations and one for gradients, from each stage to each neighbour: in one channel messages would
        # wait for each other.
        self._keys: tuple[_ChannelKey, ...] = tuple(dict.fromkeys(_neighbor_pairs(plan)))
        self._channels: dict[_ChannelKey, Channel] = {}
        self._canceller, self._listener = ConnectionCanceller(), None if device.type == "cuda" else _listen(group)

    @property
    def column(self) -> tuple[int, ...]:
        """The ranks of this pipeline, by stage."""
        return self.columns[self._place]

    def connect(self) -> None:
        """Connect to the neighbours, by the group's deadline. Every rank of the group calls it at the same time.

        Raises:
            PeerLost, RuntimeError: a rank is gone, or `cut` was called.
        """
        if self._listener is None:
            self._make_groups()
            return
        own = self._listener.address
        ports = all_gather_ints([own.port], self.device)
        hosts = [own.host if is_one_host(self._group) else peer.address.host for peer in self._group.peers]
        addresses = [Address(host=host, port=port) for host, (port,) in zip(hosts, ports, strict=True)]
        try:
            self._open_sockets(addresses, self._listener)
        except OSError as error:
            raise PeerLost(f"a stage cannot be reached ({error})", remedy=LOST_PEER_REMEDY) from error
        finally:
            self._listener.close()

    def _make_groups(self) -> None:
        deadline = timedelta(seconds=self._group.deadline_s)
        for column in self.columns:
            for key in self._keys:
                _, source, target = key
                group = distributed.new_group([column[source], column[target]], timeout=deadline)
                if column == self.column and self.stage in (source, target):
                    self._channels[key] = GroupChannel(group, column[target if self.stage == source else source])

    def _open_sockets(self, addresses: Sequence[Address], listener: SocketListener) -> None:
        """Open the channels in one order on all ranks, so that no two wait for each other."""
        key, until, accepted = self._group.key, time.monotonic() + self._group.deadline_s, dict[int, socket]()
        for number, (way, source, target) in enumerate(self._keys):
            if self.stage == source:
                there = self.column[target]
                connection = open_channel(addresses[there], key, number, until, self._canceller)
            elif self.stage == target:
                there = self.column[source]
                while number not in accepted:
                    accepted.update([found] if (found := accept_channel(listener, key, until, self._canceller)) else [])
                connection = accepted.pop(number)
            else:
                continue
            self._channels[way, source, target] = SocketChannel(connection, f"rank {there}", self._group.deadline_s)
            if self._canceller.off:  # read last, as `cut` sets it first
                raise ConnectionAbortedError("cut")

    def cut(self) -> None:
        """End all channels, from any thread: whoever waits for one raises."""
        self._canceller.cut()
        if self._listener is not None:
            self._listener.cut()
        for channel in [*self._channels.values()]:
            channel.cut()

    def close(self) -> None:
        """End and free all channels."""
        self.cut()
        if self._listener is not None:
            self._listener.close()
        for channel in self._channels.values():
            channel.close()

    def send(self, tensors: Sequence[Tensor], stage: int, way: _Direction, *, ahead: bool = False) -> None:
        """Start to send tensors, which must not change until `settle`, of this step or the next."""
        if tensors:
            waits = self._channels[way, self.stage, stage].send(tensors)
            (self.early_sends if ahead else self.sent).append(_P2PTransfer(tensors=list(tensors), waits=waits))

    def receive(self, tensors: Sequence[Tensor], stage: int, way: _Direction) -> _P2PTransfer:
        """Start to receive into tensors."""
        waits = self._channels[way, stage, self.stage].receive(tensors) if tensors else []
        return _P2PTransfer(tensors=list(tensors), waits=waits)

    def settle(self) -> None:
        """End a step: wait until all that was sent for it has been taken."""
        for channel in self._channels.values():
            channel.read_answers()  # first on all: a neighbour may wait for the room
        for channel in self._channels.values():
            channel.send_answers()
        for message in self.sent:
            message.wait()
        self.sent[:] = self.early_sends
        self.early_sends.clear()

    def forget(self) -> None:
        """Forget the messages that an error may have left."""
        self.receives.clear()
        self.sent.clear()
        self.early_sends.clear()


@dataclass(kw_only=True)
class StageMessages:
    """The activations and gradients that enter and leave a stage."""

    cut: SplitModel  # the model, which knows the shapes of what passes between sections
    links: StageLinks  # to the other stages
    schedule: str  # says which stage holds a section
    phase_timer: PhaseTimer  # takes the time of waiting
    # of the values that enter a section, where autocast makes them others than in a run without data
    dtypes: dict[int, list[torch.dtype]] = field(default_factory=dict)
    _local_values: dict[Operation, list[Tensor]] = field(default_factory=dict)  # from section to section on this stage

    def section(self, operation: Operation) -> int:
        """Return the section that an operation of this stage runs."""
        return section_of(self.schedule, stage=self.links.stage, stages=len(self.links.column), chunk=operation.chunk)

    def stage_of(self, section: int) -> int:
        """Return the stage that holds a section."""
        return stage_of_section(self.schedule, section=section, stages=len(self.links.column))[0]

    def expect(self, operation: Operation, shares: Sequence[tuple[int, MicroBatchShare]]) -> None:
        """Start to receive what an operation needs from another stage, once."""
        if operation.kind == "weights" or operation in self.links.receives:
            return
        forward = operation.kind == "forward"
        rows = shares[operation.micro_batch][1].batch.rows
        source = self.section(operation) + (-1 if forward else 1)
        if not 0 <= source < self.cut.sections or self.stage_of(source) == self.links.stage:
            return
        if forward:
            metas = self.input_metas(operation, rows)
        else:
            metas = [meta for meta in self.output_metas(operation, rows) if meta.requires_grad]
        buffers = [torch.empty(meta.shape, dtype=meta.dtype, device=self.links.device) for meta in metas]
        way: _Direction = "forward" if forward else "backward"
        self.links.receives[operation] = self.links.receive(buffers, self.stage_of(source), way)

    def received(self, operation: Operation) -> list[Tensor]:
        """Return what an operation needs, once it is there."""
        if operation not in self.links.receives:
            return self._local_values.pop(operation, [])  # nothing is given to the first section
        buffers = self.links.receives[operation].wait()
        del self.links.receives[operation]  # only now: an error may leave it under way
        self.phase_timer.wait()
        return buffers

    def input_metas(self, operation: Operation, rows: int) -> list[Tensor]:
        """Return what enters an operation's section, without data."""
        section = self.section(operation)
        return self._metas(section, rows) if section else []

    def output_metas(self, operation: Operation, rows: int) -> list[Tensor]:
        """Return what an operation's section gives to the next one, without data."""
        return self._metas(self.section(operation) + 1, rows)

    def send(self, tensors: Sequence[Tensor], operation: Operation, *, ahead: bool = False) -> None:
        """Give the results of an operation to the section that needs them.

        Gradients of the first section's inputs are dropped. What is sent ahead of its step is copied: it may be a view
        of parameters, which change while it is under way.
        """
        way: _Direction = "forward" if operation.kind == "forward" else "backward"
        target = self.section(operation) + (1 if way == "forward" else -1)
        if target < 0:
            return
        stage, chunk = stage_of_section(self.schedule, section=target, stages=len(self.links.column))
        sent = [full_tensor(each.detach()).resolve_conj().resolve_neg().contiguous() for each in tensors]
        if stage == self.links.stage:
            self._local_values[Operation(operation.kind, operation.micro_batch, chunk)] = sent
        else:
            self.links.send([each.clone() for each in sent] if ahead else sent, stage, way, ahead=ahead)

    def settle(self) -> None:
        """Wait until all has been sent."""
        self.links.settle()
        self.phase_timer.wait()

    def receive_dtypes(self, operation: Operation, rows: int) -> None:
        """Learn in which types the values that enter a section come, from the stage before."""
        section = self.section(operation)
        if section and (before := self.stage_of(section - 1)) != self.links.stage:
            numbers = torch.zeros(len(self.cut.taken(section, rows)), dtype=torch.int64, device=self.links.device)
            self.links.receive([numbers], before, "forward").wait()
            self.dtypes[section] = [_TYPES[number] for number in numbers.tolist()]

    def send_dtypes(self, operation: Operation, outputs: Sequence[Tensor]) -> None:
        """Say in which types the values come that a section gives to the next one."""
        section = self.section(operation) + 1
        self.dtypes[section] = [each.dtype for each in outputs]
        if (after := self.stage_of(section)) != self.links.stage:
            numbers = torch.tensor([_TYPES.index(each.dtype) for each in outputs], device=self.links.device)
            self.links.send([numbers], after, "forward")

    def take_early(self) -> None:
        """Take what other stages have sent for the next step, and wait until what this one sent has been taken."""
        for message in self.links.receives.values():
            message.wait()
        self.links.settle()

    def renumber(self, count: int) -> None:
        """Count the micro-batches of the next step from 0, after a step of `count`."""
        coming = [(each._replace(micro_batch=each.micro_batch - count), it) for each, it in self.links.receives.items()]
        self.links.receives.clear()
        self.links.receives.update(coming)

    def clear(self) -> None:
        """Forget what an error may have left."""
        self._local_values.clear()
        self.links.forget()

    def _metas(self, section: int, rows: int) -> list[Tensor]:
        metas, dtypes = self.cut.taken(section, rows), self.dtypes.get(section)
        if dtypes is None:
            return metas
        return [
            torch.empty_like(meta, dtype=dtype, requires_grad=meta.requires_grad)
            for meta, dtype in zip(metas, dtypes, strict=True)
        ]


def _listen(group: Group) -> SocketListener:
    try:
        return SocketListener(LOOPBACK if is_one_host(group) else own_host())
    except OSError as error:
        raise PeerLost(f"no port is free for the other stages ({error})", remedy=LOST_PEER_REMEDY) from error


def _neighbor_pairs(plan: Plan) -> Iterator[_ChannelKey]:
    """Yield which stage sends activations and gradients to which one."""
    stages = [
        stage_of_section(plan.schedule, section=each, stages=plan.mesh.pipeline)[0] for each in range(plan.sections)
    ]
    for before, after in pairwise(stages):
        if before != after:
            yield "forward", before, after
            yield "backward", after, before
