"""Compression of pushed gradients, and the byte range of each gradient in a push.

Worker and server compute the same layout from the shard, so each gradient is written and sent as soon as it is ready.
NaN and infinite values stay non-finite in every encoding, so that a server never applies them unnoticed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainwright.core.errors import JobError
from trainwright.core.topology import GradientCompression
from trainwright.strategies.ps.parameter_shards import ALIGNMENT, ParameterShard

_Floats = npt.NDArray[np.floating[Any]]
_STRETCH = 2**16  # values that are converted at once, so that intermediate results stay in the cache
_CODEC_ALIGNMENT = 8
_SAMPLED = 61  # `topk` samples one value of so many; prime, so that it meets all columns of a matrix


class _PayloadRange(NamedTuple):
    """Byte range of one gradient in a push."""

    offset: int
    size: int


class GradientLayout:
    """Byte ranges and encoding of a shard's gradients in a push.

    Args:
        shard: only its trained parameters are pushed.
        wire: the plan's compression: `full` sends the numbers as they are, other kinds encode float32 alone.

    Attributes:
        places: byte range of each gradient, by name.
        size_bytes: size of all of them.

    Raises:
        JobError: a compressed parameter is not of float32.
    """

    def __init__(self, shard: ParameterShard, wire: str) -> None:
        self._codec = gradient_codec(wire)
        trained = [slot for slot in shard.slots if slot.kind == "trained"]
        other = [slot for slot in trained if self._codec and slot.dtype != "float32"]
        if other:
            what = f"parameter {other[0].name!r} is of {other[0].dtype}"
            raise JobError([f'{what}, which wire={wire!r} cannot encode: use wire="full", or float32'])
        self.places: dict[str, _PayloadRange] = {}
        offset = 0
        for slot in trained:
            size = self._codec.size_bytes(math.prod(slot.shape)) if self._codec else slot.size
            self.places[slot.name] = _PayloadRange(offset=offset, size=size)
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        self.size_bytes = offset

    @property
    def plain(self) -> bool:
        """Whether gradients are sent uncompressed."""
        return self._codec is None

    @property
    def keeps(self) -> bool:
        """Whether a push leaves values for the next one (error feedback): `write` then needs a residual."""
        return self._codec is not None and self._codec.keeps

    def view(self, payload: memoryview, name: str, like: Tensor) -> Tensor:
        """Return an uncompressed gradient as a tensor in the memory of the push."""
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
        """Write a gradient, times a factor; `values` are contiguous, in host memory."""
        if self._codec is None:
            torch.mul(values, factor, out=self.view(payload, name, values))
            return
        flat = (values * factor).reshape(-1)
        self._codec.encode(flat, self._part(payload, name), None if residual is None else residual.view(-1))

    def check(self, payload: memoryview, name: str, like: Tensor) -> None:
        """Raise ValueError if a gradient of the push cannot be decoded."""
        if self._codec is not None:
            self._codec.check(self._part(payload, name), like.numel())

    def fill(self, payload: memoryview, name: str, into: Tensor, factor: float = 1.0) -> None:
        """Set a tensor to a gradient, times a factor."""
        if self._codec is None:
            torch.mul(self.view(payload, name, into), factor, out=into)
        else:
            self._codec.fill(self._part(payload, name), into.view(-1), factor)

    def add(self, payload: memoryview, name: str, into: Tensor, factor: float) -> None:
        """Add a gradient, times a factor, to a tensor."""
        if self._codec is None:
            into.add_(self.view(payload, name, into), alpha=factor)
        else:
            self._codec.add(self._part(payload, name), into.view(-1), factor)

    def _part(self, payload: memoryview, name: str) -> memoryview:
        place = self.places[name]
        return payload[place.offset : place.offset + place.size]


class GradientCodec(ABC):
    """An encoding of gradients. Tensors are flat, contiguous, of float32, in host memory; data has `size_bytes`."""

    # the worker keeps the values that were not sent in a residual, and sends them later (error feedback)
    keeps: ClassVar[bool] = False

    @abstractmethod
    def size_bytes(self, count: int) -> int:
        """Return the bytes of `count` values: a multiple of 8, so that adjacent ranges are aligned."""

    @abstractmethod
    def encode(self, values: Tensor, into: memoryview, residual: Tensor | None = None) -> None:
        """Write values into `into`.

        If the codec keeps a residual, it is added to the values, and the values that are not sent replace it. `add` of
        the data to the residual takes a push back that was not counted.
        """

    @abstractmethod
    def add(self, data: memoryview, into: Tensor, factor: float = 1.0) -> None:
        """`into` += `factor` times the values."""

    def fill(self, data: memoryview, into: Tensor, factor: float = 1.0) -> None:
        """`into` = `factor` times the values."""
        into.zero_()
        self.add(data, into, factor)

    def check(self, data: memoryview, count: int) -> None:
        """Raise ValueError for data of the right size that cannot be decoded; by default all data can."""
        return


def gradient_codec(wire: str) -> GradientCodec | None:
    """Return the codec of a plan's `wire`, see GradientCompression; None for `full`. Raises PlanError."""
    compression = GradientCompression.parse(wire)
    match compression.kind:
        case "full":
            return None
        case "fp16":
            return _HalfPrecisionCodec(dtype=torch.float16, scaled=True)
        case "bf16":
            return _HalfPrecisionCodec(dtype=torch.bfloat16, scaled=False)
        case "int8":
            return _Int8Codec()
        case "topk":
            return _TopKCodec(compression.share)


@dataclass(frozen=True, kw_only=True)
class _HalfPrecisionCodec(GradientCodec):
    """Two bytes a value, converted by torch, which is ten times as fast as numpy.

    Error: float16 2^-11 of a value, or 2^-40 of the largest one if that is more; bfloat16 2^-9 of a value.

    Args:
        dtype: of the encoded values.
        scaled: by a power of two that brings the largest finite value to at most 2^15, so that float16 does not
            overflow; its exponent comes first.
    """

    dtype: torch.dtype
    scaled: bool

    def size_bytes(self, count: int) -> int:
        return _padded(2 * count) + self._prefix

    def encode(self, values: Tensor, into: memoryview, residual: Tensor | None = None) -> None:
        """Write the values; with a scale in two passes: the largest value, then all."""
        if not len(values):
            return
        encoded = self._values(into, len(values))
        if not self.scaled:
            encoded.copy_(values)
            return
        exponent = min(max(math.frexp(_largest_magnitude(values))[1] - 15, -126), 126)
        into[:_CODEC_ALIGNMENT] = exponent.to_bytes(_CODEC_ALIGNMENT, "little", signed=True)
        scratch = torch.empty(min(len(values), _STRETCH))
        for stretch in _stretches(len(values)):
            part = values[stretch]
            encoded[stretch] = torch.mul(part, math.ldexp(1.0, -exponent), out=scratch[: len(part)])

    def fill(self, data: memoryview, into: Tensor, factor: float = 1.0) -> None:
        for stretch, values, scale in self._read(data, len(into), factor):
            torch.mul(values, scale, out=into[stretch])

    def add(self, data: memoryview, into: Tensor, factor: float = 1.0) -> None:
        for stretch, values, scale in self._read(data, len(into), factor):
            into[stretch].add_(values.mul_(scale))

    @property
    def _prefix(self) -> int:
        return _CODEC_ALIGNMENT if self.scaled else 0

    def _read(self, data: memoryview, count: int, factor: float) -> Iterator[tuple[slice, Tensor, float]]:
        """Yield ranges, their values as float32 in memory that is used again, and the factor to multiply them with."""
        if not count:
            return
        encoded, scratch = self._values(data, count), torch.empty(min(count, _STRETCH))
        exponent = int.from_bytes(data[:_CODEC_ALIGNMENT], "little", signed=True) if self.scaled else 0
        scale = math.ldexp(factor, exponent)
        for stretch in _stretches(count):
            part = encoded[stretch]
            yield stretch, scratch[: len(part)].copy_(part), scale

    def _values(self, data: memoryview, count: int) -> Tensor:
        return torch.frombuffer(data, dtype=self.dtype, count=count, offset=self._prefix)


def _largest_magnitude(values: Tensor) -> float:
    """Return the largest finite magnitude; 0 if no value is finite."""
    low, high = (float(each) for each in torch.aminmax(values))
    if math.isfinite(low) and math.isfinite(high):
        return max(-low, high)
    return float(values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max())


@dataclass(frozen=True)
class _Int8Codec(GradientCodec):
    """Integers from -127 to 127 with a float32 scale for each block. Error: half a scale, the block's largest / 254.

    A block with an infinite value or a NaN is decoded as NaN, all of it.
    """

    block: int = 256

    def size_bytes(self, count: int) -> int:
        return _padded(4 * self._blocks(count)) + _padded(count)

    def encode(self, values: Tensor, into: memoryview, residual: Tensor | None = None) -> None:
        scales, whole = self._parts(into, len(values))
        for stretch in _stretches(len(values)):
            part = values[stretch].numpy()
            starts = np.arange(0, len(part), self.block)
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                scale = (np.maximum.reduceat(np.abs(part), starts) / 127).astype(np.float32)
                scale[~np.isfinite(scale)] = np.nan
                quotient = part / self._spread(np.where(scale > 0, scale, 1), len(part))
            scales[stretch.start // self.block :][: len(starts)] = scale
            whole[stretch] = np.rint(np.clip(np.nan_to_num(quotient, nan=0.0), -127, 127))

    def add(self, data: memoryview, into: Tensor, factor: float = 1.0) -> None:
        target: _Floats = into.numpy()
        scales, whole = self._parts(data, len(target))
        for stretch in _stretches(len(target)):
            size = stretch.stop - stretch.start
            scale = scales[stretch.start // self.block :][: self._blocks(size)].astype(target.dtype) * factor
            target[stretch] += whole[stretch] * self._spread(scale, size)

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _spread(self, scale: _Floats, count: int) -> _Floats:
        return np.repeat(scale, self.block)[:count]

    def _parts(self, data: memoryview, count: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int8]]:
        first = _padded(4 * self._blocks(count))
        return _as_array(data, np.float32, self._blocks(count)), _as_array(data[first:], np.int8, count)


@dataclass(frozen=True)
class _TopKCodec(GradientCodec):
    """The values of largest magnitude with their indices; the others stay in the residual.

    Nothing is lost: `add` of the data to the new residual gives the values plus the old residual exactly (Stich et al.,
    NeurIPS 2018).

    Args:
        share: fraction of the values that is sent, above 0 and at most 1; at least one value is sent.
    """

    share: float
    keeps: ClassVar[bool] = True

    def size_bytes(self, count: int) -> int:
        return 8 * self._sent(count)

    def encode(self, values: Tensor, into: memoryview, residual: Tensor | None = None) -> None:
        """Write indices and values. Without a residual, values that are not sent are lost."""
        sent = self._sent(len(values))
        whole = (values.clone() if residual is None else values + residual).numpy()
        places = _top_indices(np.abs(whole), sent)
        _as_array(into, np.uint32, sent)[:] = places
        _as_array(into[4 * sent :], np.float32, sent)[:] = whole[places]
        if residual is not None:
            whole[places] = 0
            residual.copy_(torch.from_numpy(whole))

    def add(self, data: memoryview, into: Tensor, factor: float = 1.0) -> None:
        self.check(data, len(into))
        sent, target = self._sent(len(into)), into.numpy()
        places, values = _as_array(data, np.uint32, sent), _as_array(data[4 * sent :], np.float32, sent)
        target[places] += target.dtype.type(factor) * values

    def check(self, data: memoryview, count: int) -> None:
        sent = self._sent(count)
        if sent and _as_array(data, np.uint32, sent).max() >= count:
            raise ValueError("an index outside the tensor")

    def _sent(self, count: int) -> int:
        return min(count, max(1, int(np.ceil(self.share * count))))


def _top_indices(values: _Floats, count: int) -> npt.NDArray[np.uint32]:
    """Return the indices of the largest magnitudes, ascending; NaN counts as the largest of all.

    A bound from a sample rules most values out, so that few are partitioned; if too few exceed it, all are.
    """
    sample = values[::_SAMPLED]
    expected = count / max(1, len(values)) * len(sample)
    rank = int(expected + 4 * np.sqrt(expected)) + 8
    near = np.arange(len(values))
    if count and rank < len(sample):
        bound = np.partition(sample, len(sample) - rank)[len(sample) - rank]
        above = np.flatnonzero(~(values < bound))
        near = above if len(above) >= count else near
    first = len(near) - count
    order = np.argpartition(values[near], first)[first:] if count else near[:0]
    return np.sort(near[order]).astype(np.uint32)


def _as_array(data: memoryview, dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
    return np.frombuffer(data, dtype, count)


def _padded(size: int) -> int:
    return -(-size // _CODEC_ALIGNMENT) * _CODEC_ALIGNMENT


def _stretches(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _STRETCH, count)) for start in range(0, count, _STRETCH))
