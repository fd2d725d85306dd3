"""Who a pipeline's rank exchanges tensors with: the stages before and after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, Work

from trainwright.core.plan import Plan
from trainwright.core.sections import place_of
from trainwright.strategies.orders import Operation

Message = tuple[list[Tensor], list[Work]]
Way = Literal["forward", "backward"]
TAGS: Mapping[Way, int] = {"forward": 0, "backward": 1}  # over gloo, in one group


@dataclass(frozen=True, kw_only=True)
class Links:
    """A rank's place in a pipeline.

    Attributes:
        columns: the ranks of each pipeline, by stage.
        place: of this one among them.
        stage: of this rank.
        ways: over NCCL a group for activations, and one for gradients, from each stage to each neighbour: in one group
            messages would wait for each other.
        device: where tensors are received.
        deadline: of every message.
        coming: what was begun to be received, by the operation that needs it.
        sent: what was begun to be sent.

    An error may leave some of both, and it must outlive the group: at a message whose buffer is gone gloo stops to read
    a connection for good (gloo/transport/tcp/pair.cc, `prepareRead`; `write` likewise), with no word to those who wait
    for what comes behind it, and it is not told of the connection's end.
    """

    columns: tuple[tuple[int, ...], ...]
    place: int
    stage: int
    ways: Mapping[tuple[Way, int, int], ProcessGroup]
    device: torch.device
    deadline: timedelta
    coming: dict[Operation, Message] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)

    @classmethod
    def of(cls, plan: Plan, rank: int, device: torch.device, deadline_s: float) -> Links:
        """Of a rank; every rank of the world calls it, since it makes groups."""
        deadline, mesh = timedelta(seconds=deadline_s), plan.mesh
        width = mesh.size // mesh.pipeline
        rows = [list(range(stage * width, (stage + 1) * width)) for stage in range(mesh.pipeline)]
        stage, place = divmod(rank, width)
        columns = tuple(zip(*rows, strict=True))
        ways = {}
        for column in columns if device.type == "cuda" else ():
            for way, source, target in dict.fromkeys(_pairs(plan)):
                group = distributed.new_group([column[source], column[target]], timeout=deadline)
                if column == columns[place]:
                    ways[way, source, target] = group
        return cls(
            columns=columns,
            stage=stage,
            place=place,
            ways=ways,
            device=device,
            deadline=deadline,
        )

    def group(self, ranks: Sequence[int]) -> ProcessGroup:
        """A group of some ranks; every rank of the world calls it."""
        made: ProcessGroup = distributed.new_group(list(ranks), timeout=self.deadline)
        return made

    @property
    def column(self) -> tuple[int, ...]:
        """The ranks of this pipeline, by stage."""
        return self.columns[self.place]

    def send(self, tensors: Sequence[Tensor], stage: int, way: Way) -> list[Work]:
        """Begin to send; the tensors must stay as they are until what is returned has been waited for."""
        group = self.ways.get((way, self.stage, stage))
        there, tag = self.column[stage], TAGS[way]
        return [self._begun(distributed.isend(each, there, group=group, tag=tag)) for each in tensors]

    def receive(self, tensors: Sequence[Tensor], stage: int, way: Way) -> list[Work]:
        """Begin to receive into tensors."""
        group = self.ways.get((way, stage, self.stage))
        there, tag = self.column[stage], TAGS[way]
        return [self._begun(distributed.irecv(each, there, group=group, tag=tag)) for each in tensors]

    def tell(self, words: list[str], stage: int) -> None:
        """Send words to a stage, which calls `hear`."""
        distributed.send_object_list(list(words), self.column[stage], device=self.device)

    def hear(self, count: int, stage: int) -> list[str]:
        """The words that a stage tells."""
        words: list[str] = [""] * count
        distributed.recv_object_list(words, self.column[stage], device=self.device)
        return words

    @staticmethod
    def _begun(work: Work | None) -> Work:
        assert work is not None, "this rank is in the group"
        return work


def _pairs(plan: Plan) -> Iterator[tuple[Way, int, int]]:
    """Who sends what to whom: activations to the stage of the next section, gradients to that of the one before."""
    stages = [place_of(plan.schedule, section=each, stages=plan.mesh.pipeline)[0] for each in range(plan.sections)]
    for before, after in pairwise(stages):
        if before != after:
            yield "forward", before, after
            yield "backward", after, before
