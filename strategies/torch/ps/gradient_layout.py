"""How the gradients of a shard lie in what is pushed: one after the other, each as the plan's wire has it.

Both sides know the shard's tensors and reckon the same places, so that a gradient is written, and sent, as soon as it
is there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainwright.core.errors import JobError
from trainwright.strategies.ps.gradient_codecs import codec_of
from trainwright.strategies.ps.shard_store import Shard
from trainwright.strategies.ps.tensor_placement import ALIGNMENT
from trainwright.strategies.torch.ps.half_codec import NARROW

PLAIN = "full"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one gradient lies, in bytes."""

    offset: int
    size: int


class Form:
    """Places and forms of a shard's gradients.

    Args:
        shard: of which only what is trained is pushed.
        wire: of the plan: `full` leaves numbers as they are, other forms are of float32.

    Attributes:
        places: of each, by name.
        size_bytes: of all.

    Raises:
        JobError: numbers of another type than float32 in such a form.
    """

    def __init__(self, shard: Shard, wire: str) -> None:
        self._codec = None if wire == PLAIN else codec_of(wire)
        self._narrow = NARROW.get(wire)
        trained = [slot for slot in shard.slots if slot.kind == "trained"]
        other = [slot for slot in trained if self._codec and slot.dtype != "float32"]
        if other:
            what = f"parameter {other[0].name!r} is of {other[0].dtype}"
            raise JobError([f'{what}, of which wire={wire!r} has no form: use wire="full", or float32'])
        self.places: dict[str, Place] = {}
        offset = 0
        for slot in trained:
            size = self._codec.size_bytes(math.prod(slot.shape)) if self._codec else slot.size
            self.places[slot.name] = Place(offset=offset, size=size)
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        self.size_bytes = offset

    @property
    def plain(self) -> bool:
        """Gradients lie there as they are."""
        return self._codec is None

    @property
    def keeps(self) -> bool:
        """What a push leaves out is added to the next one (error feedback): `write` wants a residual."""
        return self._codec is not None and self._codec.keeps

    def view(self, payload: memoryview, name: str, like: Tensor) -> Tensor:
        """A gradient that lies there as it is, in its own memory there."""
        if not like.numel():
            return torch.empty_like(like)
        offset = self.places[name].offset
        return torch.frombuffer(payload, dtype=like.dtype, count=like.numel(), offset=offset).view(like.shape)

    def write(
        self,
        payload: memoryview,
        name: str,
        values: Tensor,
        factor: float | Tensor = 1.0,
        residual: Tensor | None = None,
    ) -> None:
        """Put a gradient there, times a factor; `values` are of the host, in one piece."""
        if self._codec is None:
            torch.mul(values, factor, out=self.view(payload, name, values))
            return
        flat, part = (values * factor).reshape(-1), self._part(payload, name)
        if self._narrow is not None:
            self._narrow.encode(flat, part)
        else:
            self._codec.encode(flat.numpy(), part, None if residual is None else residual.view(-1).numpy())

    def check(self, payload: memoryview, name: str, like: Tensor) -> None:
        """Raise ValueError where the part of a payload that is a gradient cannot be decoded."""
        if self._codec is not None:
            self._codec.check(self._part(payload, name), like.numel())

    def fill(self, payload: memoryview, name: str, into: Tensor, factor: float = 1.0) -> None:
        """Fill a tensor with a gradient, times a factor."""
        if self._codec is None:
            torch.mul(self.view(payload, name, into), factor, out=into)
        elif self._narrow is not None:
            self._narrow.fill(self._part(payload, name), into.view(-1), factor)
        else:
            into.zero_()
            self.add(payload, name, into, factor)

    def add(self, payload: memoryview, name: str, into: Tensor, factor: float) -> None:
        """Add a gradient, times a factor."""
        if self._codec is None:
            into.add_(self.view(payload, name, into), alpha=factor)
        elif self._narrow is not None:
            self._narrow.add(self._part(payload, name), into.view(-1), factor)
        else:
            self._codec.add(self._part(payload, name), into.view(-1).numpy(), factor)

    def _part(self, payload: memoryview, name: str) -> memoryview:
        place = self.places[name]
        return payload[place.offset : place.offset + place.size]
