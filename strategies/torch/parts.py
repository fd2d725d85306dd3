"""What a rank holds of a model that is divided: rows of each parameter, as `torch.chunk` and FSDP2 cut them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, order=True)
class Part:
    """One of `of` parts of every divided tensor: the rows of its first dimension that `rows` says."""

    index: int = 0
    of: int = 1

    def rows(self, size: int) -> range:
        """Of so many rows. The last parts may be shorter, or empty."""
        each = -(-size // self.of)
        return range(min(self.index * each, size), min((self.index + 1) * each, size))

    @property
    def name(self) -> str:
        """As state tags name it."""
        return f"shard-{self.index}"

    @property
    def whole(self) -> frozenset[str]:
        """Names of all parts."""
        return frozenset(Part(index=index, of=self.of).name for index in range(self.of))

    @property
    def suffix(self) -> str:
        """In the names of a checkpoint's files; empty for all of a tensor."""
        return f".{self.name}-of-{self.of}" if self.of > 1 else ""


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
