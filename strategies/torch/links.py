"""Who a pipeline's rank exchanges tensors with: the stages before and after it, and the replicas of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, Work

from trainwright.core.plan import Mesh

Way = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True)
class Links:
    """A rank's place in a pipeline.

    Attributes:
        columns: the ranks of each pipeline, by stage.
        place: of this one among them.
        replicas: those that hold the same stage; None for this rank alone.
        ways: for activations and for their gradients: over NCCL a pair's messages in two directions would wait for each
            other in one group.
        device: where tensors are received.
        deadline: of every message.
    """

    columns: tuple[tuple[int, ...], ...]
    place: int
    replicas: ProcessGroup | None
    ways: dict[Way, ProcessGroup | None]
    device: torch.device
    deadline: timedelta

    @classmethod
    def of(cls, mesh: Mesh, rank: int, device: torch.device, deadline_s: float) -> Links:
        """Of a rank; every rank of the world calls it, since it makes groups."""
        deadline = timedelta(seconds=deadline_s)
        width = mesh.size // mesh.pipeline
        rows = [list(range(stage * width, (stage + 1) * width)) for stage in range(mesh.pipeline)]
        groups = [distributed.new_group(row, timeout=deadline) for row in rows] if width > 1 else []
        ways: dict[Way, ProcessGroup | None] = {"forward": None, "backward": None}
        if device.type == "cuda":
            ways = {way: distributed.new_group(timeout=deadline) for way in ways}
        stage, place = divmod(rank, width)
        return cls(
            columns=tuple(zip(*rows, strict=True)),
            place=place,
            replicas=groups[stage] if groups else None,
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
        return [self._begun(distributed.isend(each, self.column[stage], group=self.ways[way])) for each in tensors]

    def receive(self, tensors: Sequence[Tensor], stage: int, way: Way) -> list[Work]:
        """Begin to receive into tensors."""
        return [self._begun(distributed.irecv(each, self.column[stage], group=self.ways[way])) for each in tensors]

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
