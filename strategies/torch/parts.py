"""What a rank holds of a model that is divided: a pipeline's stage, and rows of each parameter as FSDP2 cuts them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, order=True)
class Part:
    """One of `stages` stages, and of what is divided by rows the part that `rows` says.

    Attributes:
        index, of: which of so many parts of each divided tensor.
        stage, stages: which of so many stages of the model.
    """

    index: int = 0
    of: int = 1
    stage: int = 0
    stages: int = 1

    def rows(self, size: int) -> range:
        """Of so many rows. The last parts may be shorter, or empty."""
        each = -(-size // self.of)
        return range(min(self.index * each, size), min((self.index + 1) * each, size))

    @property
    def name(self) -> str:
        """As state tags name it."""
        return f"stage-{self.stage}" if self.stages > 1 else f"shard-{self.index}"

    @property
    def every(self) -> tuple[Part, ...]:
        """All parts, in order."""
        places = ((stage, index) for stage in range(self.stages) for index in range(self.of))
        return tuple(Part(index=index, of=self.of, stage=stage, stages=self.stages) for stage, index in places)

    @property
    def whole(self) -> frozenset[str]:
        """Names of all parts."""
        return frozenset(part.name for part in self.every)

    @property
    def suffix(self) -> str:
        """In the names of a checkpoint's files; empty for all of a model."""
        count = self.stages * self.of
        return f".{self.name}-of-{count}" if count > 1 else ""

    @classmethod
    def read(cls, kind: str, place: int, count: int) -> Part:
        """The part of which a suffix tells."""
        return cls(stage=place, stages=count) if kind == "stage" else cls(index=place, of=count)


WHOLE = Part()


def divided(tensor: Tensor) -> bool:
    """Whether a tensor is one of which this rank holds a part."""
    return hasattr(tensor, "to_local")  # a DTensor, without importing what one-device jobs never need


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the tensor's own memory; all of one that is not divided."""
    if not divided(tensor):
        return tensor
    with torch.no_grad():
        held: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return held.detach()
