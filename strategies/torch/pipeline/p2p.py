"""What a stage of a pipeline receives for its operations and sends to other stages, or to its own next section.

When a connection ends, gloo reports it only to messages that have not started (gloo/transport/tcp/pair.cc,
`signalException`). A half-written send or a half-read receive would wait until the group's deadline. So a rank waits
only for empty receives, which cannot be half done: an empty message follows all tensors, and has come only after them.
The receiver answers with another one, which tells the sender that its tensors have been taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, Work

from trainwright.core.plan import Plan, section_of, stage_of_section
from trainwright.strategies.cost_model.pipeline_schedules import Operation
from trainwright.strategies.torch.pipeline.split import SplitModel
from trainwright.strategies.torch.step_trace import PhaseTimer
from trainwright.strategies.torch.tensor_parallel.sharded_tensor import full_tensor
from trainwright.strategies.torch.training.objective import MicroBatchShare

_Direction = Literal["forward", "backward"]
_TAGS: Mapping[_Direction, int] = {"forward": 0, "backward": 1}  # over gloo, in one group
_ANSWERS: Mapping[_Direction, int] = {"forward": 2, "backward": 3}
_TYPES = tuple(sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str))


@dataclass(frozen=True, kw_only=True)
class _P2PTransfer:
    """Tensors under way; they must not change, and their works must be held, until it has ended."""

    tensors: list[Tensor]
    works: list[Work]  # of the tensors; over gloo the last one's end is that of all
    stage: int  # the other one's
    way: _Direction

    def wait(self) -> None:
        """Wait until it has ended. Raises RuntimeError where the other rank is gone."""
        for work in reversed(self.works):
            work.wait()


class StageLinks:
    """A rank's place in a pipeline, and its messages under way.

    Every rank of the world makes one at the same time, since it makes groups.

    Args:
        plan: with the mesh of the group.
        rank: in the group.
        device: where tensors are received.
        deadline: of every message.

    Attributes:
        columns: the ranks of each pipeline, by stage.
        stage: of this rank.
        receives: receives under way, by the operation that needs them.
        sent: sends of this step.
        early_sends: sends for the next step, which may be taken only then.
        acknowledgements: sends of the newest steps. Nothing waits for them: a rank that takes part in a step has
            received those of the step before, and those of early sends one step later.

    After an error all of these may have entries, and this object must outlive the group: at a message whose buffer is
    gone, gloo stops to read a connection for good (gloo/transport/tcp/pair.cc, `prepareRead`; `write` likewise). It
    then reports nothing to those who wait for later messages, and does not see the connection's end.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device, deadline: timedelta) -> None:
        mesh = plan.mesh
        width = mesh.size // mesh.pipeline
        rows = [list(range(stage * width, (stage + 1) * width)) for stage in range(mesh.pipeline)]
        self.stage, self._place = divmod(rank, width)
        self.columns: tuple[tuple[int, ...], ...] = tuple(zip(*rows, strict=True))
        self.device = device
        self.receives: dict[Operation, _P2PTransfer] = {}
        self.sent: list[_P2PTransfer] = []
        self.early_sends: list[_P2PTransfer] = []
        self.acknowledgements: deque[list[Work]] = deque([[]], maxlen=4)
        # Over NCCL one group for activations and one for gradients, from each stage to each neighbour: in one group
        # messages would wait for each other.
        self._groups: dict[tuple[_Direction, int, int], ProcessGroup] = {}
        for column in self.columns if device.type == "cuda" else ():
            for way, source, target in dict.fromkeys(_neighbor_pairs(plan)):
                group = distributed.new_group([column[source], column[target]], timeout=deadline)
                if column == self.column:
                    self._groups[way, source, target] = group

    @property
    def column(self) -> tuple[int, ...]:
        """The ranks of this pipeline, by stage."""
        return self.columns[self._place]

    def send(self, tensors: Sequence[Tensor], stage: int, way: _Direction, *, ahead: bool = False) -> None:
        """Start to send tensors, which must not change until `settle`, of this step or the next."""
        group = self._groups.get((way, self.stage, stage))
        there, tag = self.column[stage], _TAGS[way]
        given = [*tensors, *self._mark(tensors)]
        works = [self._begun(distributed.isend(each, there, group=group, tag=tag)) for each in given]
        works += [self._begun(distributed.irecv(each, there, tag=_ANSWERS[way])) for each in self._mark(tensors)]
        message = _P2PTransfer(tensors=list(tensors), works=works, stage=stage, way=way)
        (self.early_sends if ahead else self.sent).append(message)

    def receive(self, tensors: Sequence[Tensor], stage: int, way: _Direction) -> _P2PTransfer:
        """Start to receive into tensors."""
        group = self._groups.get((way, stage, self.stage))
        there, tag = self.column[stage], _TAGS[way]
        given = [*tensors, *self._mark(tensors)]
        works = [self._begun(distributed.irecv(each, there, group=group, tag=tag)) for each in given]
        return _P2PTransfer(tensors=list(tensors), works=works, stage=stage, way=way)

    def take(self, message: _P2PTransfer) -> list[Tensor]:
        """Wait for a message, acknowledge it and return its tensors."""
        message.wait()
        there, tag = self.column[message.stage], _ANSWERS[message.way]
        marks = self._mark(message.tensors)
        self.acknowledgements[-1].extend(self._begun(distributed.isend(each, there, tag=tag)) for each in marks)
        return message.tensors

    def settle(self) -> None:
        """End a step: wait until all that was sent for it has been taken."""
        for message in self.sent:
            message.wait()
        self.sent[:] = self.early_sends
        self.early_sends.clear()
        self.acknowledgements.append([])

    def forget(self) -> None:
        """Forget the messages that an error may have left."""
        self.receives.clear()
        self.sent.clear()
        self.early_sends.clear()

    def _mark(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the empty message that goes with tensors over gloo."""
        return [torch.empty(0)] if tensors and not self._groups else []

    @staticmethod
    def _begun(work: Work | None) -> Work:
        assert work is not None, "this rank is in the group"
        return work


@dataclass(kw_only=True)
class StageMessages:
    """The activations and gradients that enter and leave a stage."""

    cut: SplitModel  # the model, which knows the shapes of what passes between sections
    links: StageLinks  # to the other stages
    schedule: str  # says which stage holds a section
    laps: PhaseTimer  # takes the time of waiting
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
        buffers = self.links.take(self.links.receives[operation])
        del self.links.receives[operation]  # only now: an error may leave it under way
        self.laps.wait()
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
        self.laps.wait()

    def receive_dtypes(self, operation: Operation, rows: int) -> None:
        """Learn in which types the values that enter a section come, from the stage before."""
        section = self.section(operation)
        if section and (before := self.stage_of(section - 1)) != self.links.stage:
            numbers = torch.zeros(len(self.cut.taken(section, rows)), dtype=torch.int64, device=self.links.device)
            self.links.take(self.links.receive([numbers], before, "forward"))
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
            self.links.take(message)
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


def _neighbor_pairs(plan: Plan) -> Iterator[tuple[_Direction, int, int]]:
    """Yield which stage sends activations and gradients to which one."""
    stages = [
        stage_of_section(plan.schedule, section=each, stages=plan.mesh.pipeline)[0] for each in range(plan.sections)
    ]
    for before, after in pairwise(stages):
        if before != after:
            yield "forward", before, after
            yield "backward", after, before
