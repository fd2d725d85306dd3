"""Point-to-point messages of a pipeline's rank with the stages before and after it.

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

from trainwright.core.plan import Plan, stage_of_section
from trainwright.strategies.cost_model.pipeline_schedules import Operation

Direction = Literal["forward", "backward"]
_TAGS: Mapping[Direction, int] = {"forward": 0, "backward": 1}  # over gloo, in one group
_ANSWERS: Mapping[Direction, int] = {"forward": 2, "backward": 3}
_TYPES = tuple(sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str))


@dataclass(frozen=True, kw_only=True)
class _P2PTransfer:
    """Tensors under way; they must not change, and their works must be held, until it has ended.

    Attributes:
        works: of the tensors; over gloo the last one's end is that of all.
        stage: the other one's.
    """

    tensors: list[Tensor]
    works: list[Work]
    stage: int
    way: Direction

    def wait(self) -> None:
        """Wait until it has ended. Raises RuntimeError where the other rank is gone."""
        for work in reversed(self.works):
            work.wait()


@dataclass(frozen=True, kw_only=True)
class StageLinks:
    """A rank's place in a pipeline, and its messages under way.

    Attributes:
        columns: the ranks of each pipeline, by stage.
        place: this rank's pipeline among them.
        stage: of this rank.
        groups: over NCCL one group for activations and one for gradients, from each stage to each neighbour: in one
            group messages would wait for each other.
        device: where tensors are received.
        deadline: of every message.
        receives: receives under way, by the operation that needs them.
        sent: sends of this step.
        early_sends: sends for the next step, which may be taken only then.
        acknowledgements: sends of the newest steps. Nothing waits for them: a rank that takes part in a step has
            received those of the step before, and those of early sends one step later.

    After an error all of these may have entries, and this object must outlive the group: at a message whose buffer is
    gone, gloo stops to read a connection for good (gloo/transport/tcp/pair.cc, `prepareRead`; `write` likewise). It
    then reports nothing to those who wait for later messages, and does not see the connection's end.
    """

    columns: tuple[tuple[int, ...], ...]
    place: int
    stage: int
    groups: Mapping[tuple[Direction, int, int], ProcessGroup]
    device: torch.device
    deadline: timedelta
    receives: dict[Operation, _P2PTransfer] = field(default_factory=dict)
    sent: list[_P2PTransfer] = field(default_factory=list)
    early_sends: list[_P2PTransfer] = field(default_factory=list)
    acknowledgements: deque[list[Work]] = field(default_factory=lambda: deque([[]], maxlen=4))

    @classmethod
    def of(cls, plan: Plan, rank: int, device: torch.device, deadline_s: float) -> StageLinks:
        """Return the links of a rank; every rank of the world calls it, since it makes groups."""
        deadline, mesh = timedelta(seconds=deadline_s), plan.mesh
        width = mesh.size // mesh.pipeline
        rows = [list(range(stage * width, (stage + 1) * width)) for stage in range(mesh.pipeline)]
        stage, place = divmod(rank, width)
        columns = tuple(zip(*rows, strict=True))
        ways = {}
        for column in columns if device.type == "cuda" else ():
            for way, source, target in dict.fromkeys(_neighbor_pairs(plan)):
                group = distributed.new_group([column[source], column[target]], timeout=deadline)
                if column == columns[place]:
                    ways[way, source, target] = group
        return cls(
            columns=columns,
            stage=stage,
            place=place,
            groups=ways,
            device=device,
            deadline=deadline,
        )

    def group(self, ranks: Sequence[int]) -> ProcessGroup:
        """Make a group of some ranks; every rank of the world calls it."""
        made: ProcessGroup = distributed.new_group(list(ranks), timeout=self.deadline)
        return made

    @property
    def column(self) -> tuple[int, ...]:
        """The ranks of this pipeline, by stage."""
        return self.columns[self.place]

    def send(self, tensors: Sequence[Tensor], stage: int, way: Direction, *, ahead: bool = False) -> None:
        """Start to send tensors, which must not change until `settle`, of this step or the next."""
        group = self.groups.get((way, self.stage, stage))
        there, tag = self.column[stage], _TAGS[way]
        given = [*tensors, *self._mark(tensors)]
        works = [self._begun(distributed.isend(each, there, group=group, tag=tag)) for each in given]
        works += [self._begun(distributed.irecv(each, there, tag=_ANSWERS[way])) for each in self._mark(tensors)]
        message = _P2PTransfer(tensors=list(tensors), works=works, stage=stage, way=way)
        (self.early_sends if ahead else self.sent).append(message)

    def receive(self, tensors: Sequence[Tensor], stage: int, way: Direction) -> _P2PTransfer:
        """Start to receive into tensors."""
        group = self.groups.get((way, stage, self.stage))
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

    def send_dtypes(self, types: Sequence[torch.dtype], stage: int) -> None:
        """Send types to the stage of the next section, which calls `receive_dtypes`."""
        self.send([torch.tensor([_TYPES.index(each) for each in types], device=self.device)], stage, "forward")

    def receive_dtypes(self, count: int, stage: int) -> list[torch.dtype]:
        """Receive types from the stage of the section before, which calls `send_dtypes`."""
        room = torch.zeros(count, dtype=torch.int64, device=self.device)
        (numbers,) = self.take(self.receive([room], stage, "forward"))
        return [_TYPES[number] for number in numbers.tolist()]

    def _mark(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the empty message that goes with tensors over gloo."""
        return [torch.empty(0)] if tensors and not self.groups else []

    @staticmethod
    def _begun(work: Work | None) -> Work:
        assert work is not None, "this rank is in the group"
        return work


def _neighbor_pairs(plan: Plan) -> Iterator[tuple[Direction, int, int]]:
    """Yield which stage sends activations and gradients to which one."""
    stages = [
        stage_of_section(plan.schedule, section=each, stages=plan.mesh.pipeline)[0] for each in range(plan.sections)
    ]
    for before, after in pairwise(stages):
        if before != after:
            yield "forward", before, after
            yield "backward", after, before
