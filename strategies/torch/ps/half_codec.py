"""Half precision on the wire by torch, which converts ten times as fast as numpy; the bits are those of `codecs`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_STRETCH = 2**16  # values that are worked on at once, so that what is in between stays in the cache
_EXPONENT_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Narrow:
    """A form of two bytes a value. Tensors are flat, of float32, in host memory and in one piece.

    Args:
        dtype: of the values on the wire.
        scaled: by a power of two that brings the largest finite one to at most 2^15; its exponent comes first.
    """

    dtype: torch.dtype
    scaled: bool

    def encode(self, values: Tensor, into: memoryview) -> None:
        """Write values into `into`."""
        if not len(values):
            return
        there = self._values(into, len(values))
        if not self.scaled:
            there.copy_(values)
            return
        exponent = min(max(math.frexp(_largest(values))[1] - 15, -126), 126)
        into[:_EXPONENT_BYTES] = exponent.to_bytes(_EXPONENT_BYTES, "little", signed=True)
        scratch = torch.empty(min(len(values), _STRETCH))
        for stretch in _stretches(len(values)):
            part = values[stretch]
            there[stretch] = torch.mul(part, math.ldexp(1.0, -exponent), out=scratch[: len(part)])

    def fill(self, data: memoryview, into: Tensor, factor: float = 1.0) -> None:
        """`into` = `factor` times the values."""
        for stretch, values, scale in self._read(data, len(into), factor):
            torch.mul(values, scale, out=into[stretch])

    def add(self, data: memoryview, into: Tensor, factor: float) -> None:
        """`into` += `factor` times the values."""
        for stretch, values, scale in self._read(data, len(into), factor):
            into[stretch].add_(values.mul_(scale))  # add_(alpha=) rounds once, where numpy rounds twice

    def _read(self, data: memoryview, count: int, factor: float) -> Iterator[tuple[slice, Tensor, float]]:
        """Stretches of the values as float32, in memory that is used again, and what they are to be multiplied with."""
        if not count:
            return
        there, scratch = self._values(data, count), torch.empty(min(count, _STRETCH))
        exponent = int.from_bytes(data[:_EXPONENT_BYTES], "little", signed=True) if self.scaled else 0
        scale = math.ldexp(factor, exponent)
        for stretch in _stretches(count):
            part = there[stretch]
            yield stretch, scratch[: len(part)].copy_(part), scale

    def _values(self, data: memoryview, count: int) -> Tensor:
        return torch.frombuffer(data, dtype=self.dtype, count=count, offset=_EXPONENT_BYTES if self.scaled else 0)


NARROW = {"fp16": Narrow(dtype=torch.float16, scaled=True), "bf16": Narrow(dtype=torch.bfloat16, scaled=False)}


def _largest(values: Tensor) -> float:
    """The largest finite magnitude; 0 where there is none."""
    low, high = (float(each) for each in torch.aminmax(values))
    if math.isfinite(low) and math.isfinite(high):
        return max(-low, high)
    return float(values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max())


def _stretches(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _STRETCH, count)) for start in range(0, count, _STRETCH))
