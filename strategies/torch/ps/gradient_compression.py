"""How the gradients of a shard lie in what is pushed: one after the other, each as the plan's wire has it.

Both sides know the shard's tensors and reckon the same places, so that a gradient is written, and sent, as soon as it
is there.

Each says how many bytes so many values take, writes them into an outbox, and adds what came to an array. What is not a
number, or is infinite, stays so, that nobody applies it unseen.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainwright.core.errors import JobError, PlanError
from trainwright.strategies.ps.parameter_shards import ALIGNMENT, ParameterShard

_UNCOMPRESSED = "full"


@dataclass(frozen=True, kw_only=True)
class _PayloadRange:
    """Where one gradient lies, in bytes."""

    offset: int
    size: int


class GradientLayout:
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

    def __init__(self, shard: ParameterShard, wire: str) -> None:
        self._codec = None if wire == _UNCOMPRESSED else gradient_codec(wire)
        self._narrow = HALF_PRECISION.get(wire)
        trained = [slot for slot in shard.slots if slot.kind == "trained"]
        other = [slot for slot in trained if self._codec and slot.dtype != "float32"]
        if other:
            what = f"parameter {other[0].name!r} is of {other[0].dtype}"
            raise JobError([f'{what}, of which wire={wire!r} has no form: use wire="full", or float32'])
        self.places: dict[str, _PayloadRange] = {}
        offset = 0
        for slot in trained:
            size = self._codec.size_bytes(math.prod(slot.shape)) if self._codec else slot.size
            self.places[slot.name] = _PayloadRange(offset=offset, size=size)
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


# --- Half precision on the wire by torch, which converts ten times as fast as numpy -----------------------------------


_HALF_STRETCH = 2**16  # values that are worked on at once, so that what is in between stays in the cache
_EXPONENT_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class _HalfPrecision:
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
        exponent = min(max(math.frexp(_largest_magnitude(values))[1] - 15, -126), 126)
        into[:_EXPONENT_BYTES] = exponent.to_bytes(_EXPONENT_BYTES, "little", signed=True)
        scratch = torch.empty(min(len(values), _HALF_STRETCH))
        for stretch in _half_stretches(len(values)):
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
        there, scratch = self._values(data, count), torch.empty(min(count, _HALF_STRETCH))
        exponent = int.from_bytes(data[:_EXPONENT_BYTES], "little", signed=True) if self.scaled else 0
        scale = math.ldexp(factor, exponent)
        for stretch in _half_stretches(count):
            part = there[stretch]
            yield stretch, scratch[: len(part)].copy_(part), scale

    def _values(self, data: memoryview, count: int) -> Tensor:
        return torch.frombuffer(data, dtype=self.dtype, count=count, offset=_EXPONENT_BYTES if self.scaled else 0)


HALF_PRECISION = {
    "fp16": _HalfPrecision(dtype=torch.float16, scaled=True),
    "bf16": _HalfPrecision(dtype=torch.bfloat16, scaled=False),
}


def _largest_magnitude(values: Tensor) -> float:
    """The largest finite magnitude; 0 where there is none."""
    low, high = (float(each) for each in torch.aminmax(values))
    if math.isfinite(low) and math.isfinite(high):
        return max(-low, high)
    return float(values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max())


def _half_stretches(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _HALF_STRETCH, count)) for start in range(0, count, _HALF_STRETCH))


# --- Forms in which gradients and differences of parameters go over the wire, on numpy arrays -------------------------


_Floats = npt.NDArray[np.floating[Any]]
_STRETCH = 2**16  # values that are worked on at once, so that what is in between stays in the cache
_CODEC_ALIGNMENT = 8
_SAMPLED = 61  # one of so many values stands for all; prime, so that it meets all columns of a matrix
_REMEDY = 'write "full", "fp16", "bf16", "int8" or "topk(0.01)"'


class GradientCodec(ABC):
    """A form on the wire. Arrays are flat, of float32 or float64; data is of exactly `size_bytes` bytes.

    Attributes:
        keeps: the worker keeps what was not sent, in a residual, and sends it later (error feedback).
    """

    keeps: ClassVar[bool] = False

    @abstractmethod
    def size_bytes(self, count: int) -> int:
        """Bytes of so many values: a multiple of 8, so that ranges that follow each other stand aligned."""

    @abstractmethod
    def encode(self, values: _Floats, into: memoryview, residual: _Floats | None = None) -> None:
        """Write values into `into`. Where the codec keeps one, the residual is added to them, and what is left stays.

        When it turns out that what was sent does not count, `add` of it to the residual takes it back.
        """

    @abstractmethod
    def add(self, data: memoryview, into: _Floats, factor: float = 1.0) -> None:
        """`into` += `factor` times the values."""

    @abstractmethod
    def check(self, data: memoryview, count: int) -> None:
        """Raise ValueError where data of the right size cannot be added to so many values."""

    def decode(self, data: memoryview, into: _Floats) -> None:
        """Fill `into` with the values."""
        into.fill(0)
        self.add(data, into)


def gradient_codec(text: str, dtype: npt.DTypeLike = np.float32) -> GradientCodec:
    """The codec of a name: `full` (values of `dtype` as they are), `fp16`, `bf16`, `int8`, `topk(share)`.

    Raises PlanError.
    """
    simple: dict[str, GradientCodec] = {
        "full": _FullCodec(np.dtype(dtype)),
        "fp16": _Float16Codec(),
        "bf16": _BFloat16Codec(),
        "int8": _Int8Codec(),
    }
    found = re.fullmatch(r"topk\(\s*([0-9.eE+-]+)\s*\)", text)
    try:
        return _TopKCodec(float(found[1])) if found else simple[text]
    except (KeyError, ValueError) as error:
        raise PlanError(f"{text!r} is no form on the wire", remedy=_REMEDY) from error


@dataclass(frozen=True)
class _FullCodec(GradientCodec):
    """The values as they are."""

    dtype: np.dtype[Any]

    def size_bytes(self, count: int) -> int:
        """4 or 8 a value."""
        return _padded(self.dtype.itemsize * count)

    def encode(self, values: _Floats, into: memoryview, residual: _Floats | None = None) -> None:
        """One copy."""
        np.copyto(_as_array(into, self.dtype, len(values)), values)

    def check(self, data: memoryview, count: int) -> None:
        """Any bits are numbers."""

    def add(self, data: memoryview, into: _Floats, factor: float = 1.0) -> None:
        """In one pass over stretches."""
        values = _as_array(data, self.dtype, len(into))
        for stretch in _stretches(len(into)):
            into[stretch] += factor * values[stretch] if factor != 1.0 else values[stretch]


@dataclass(frozen=True)
class _Float16Codec(GradientCodec):
    """float16 times a power of two, which brings the largest finite value to at most 2^15: nothing overflows.

    Error: 2^-11 of a value, or 2^-40 of the largest one where that is more.
    """

    def size_bytes(self, count: int) -> int:
        """2 a value, and 8 for the exponent."""
        return _padded(2 * count) + _CODEC_ALIGNMENT

    def encode(self, values: _Floats, into: memoryview, residual: _Floats | None = None) -> None:
        """Two passes: the largest value, then all."""
        exponent = np.clip(np.frexp(_largest(values))[1] - 15, -126, 126)
        into[:_CODEC_ALIGNMENT] = np.int64(exponent).tobytes()
        scale, halves = (
            np.float32(np.ldexp(1.0, -exponent)),
            _as_array(into[_CODEC_ALIGNMENT:], np.float16, len(values)),
        )
        with np.errstate(over="ignore"):  # float64 beyond float32's range, or infinite
            for stretch in _stretches(len(values)):
                halves[stretch] = values[stretch] * scale

    def check(self, data: memoryview, count: int) -> None:
        """Any bits are numbers."""

    def add(self, data: memoryview, into: _Floats, factor: float = 1.0) -> None:
        """In one pass."""
        exponent = int(np.frombuffer(data[:_CODEC_ALIGNMENT], np.int64)[0])
        halves = _as_array(data[_CODEC_ALIGNMENT:], np.float16, len(into))
        scale = into.dtype.type(np.ldexp(factor, exponent))
        for stretch in _stretches(len(into)):
            into[stretch] += scale * halves[stretch].astype(into.dtype)


@dataclass(frozen=True)
class _BFloat16Codec(GradientCodec):
    """bfloat16: the upper half of float32, rounded to nearest, ties to even. Error: 2^-9 of a value."""

    def size_bytes(self, count: int) -> int:
        """2 a value."""
        return _padded(2 * count)

    def encode(self, values: _Floats, into: memoryview, residual: _Floats | None = None) -> None:
        """In one pass; the bits are those of torch's `to(torch.bfloat16)`, except in what is not a number."""
        upper = _as_array(into, np.uint16, len(values))
        for stretch in _stretches(len(values)):
            with np.errstate(over="ignore"):
                single = np.ascontiguousarray(values[stretch], np.float32)
            bits = single.view(np.uint32)
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
            upper[stretch] = np.where(np.isnan(single), np.uint32(0x7FC0), rounded)

    def check(self, data: memoryview, count: int) -> None:
        """Any bits are numbers."""

    def add(self, data: memoryview, into: _Floats, factor: float = 1.0) -> None:
        """In one pass."""
        upper = _as_array(data, np.uint16, len(into))
        for stretch in _stretches(len(into)):
            values = (upper[stretch].astype(np.uint32) << 16).view(np.float32)
            into[stretch] += into.dtype.type(factor) * values


@dataclass(frozen=True)
class _Int8Codec(GradientCodec):
    """Whole numbers from -127 to 127 times a float32 for each block. Error: half of that, the block's largest / 254.

    A block with a value that is infinite or not a number comes out as not a number, all of it.
    """

    block: int = 256

    def size_bytes(self, count: int) -> int:
        """1 a value, and 4 for each block."""
        return _padded(4 * self._blocks(count)) + _padded(count)

    def encode(self, values: _Floats, into: memoryview, residual: _Floats | None = None) -> None:
        """Two passes over stretches that stay in the cache."""
        scales, whole = self._parts(into, len(values))
        for stretch in _stretches(len(values)):
            part = values[stretch]
            starts = np.arange(0, len(part), self.block)
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                scale = (np.maximum.reduceat(np.abs(part), starts) / 127).astype(np.float32)
                scale[~np.isfinite(scale)] = np.nan
                quotient = part / self._spread(np.where(scale > 0, scale, 1), len(part))
            scales[stretch.start // self.block :][: len(starts)] = scale
            whole[stretch] = np.rint(np.clip(np.nan_to_num(quotient, nan=0.0), -127, 127))

    def check(self, data: memoryview, count: int) -> None:
        """Any bits are numbers."""

    def add(self, data: memoryview, into: _Floats, factor: float = 1.0) -> None:
        """In one pass over stretches."""
        scales, whole = self._parts(data, len(into))
        for stretch in _stretches(len(into)):
            size = stretch.stop - stretch.start
            scale = scales[stretch.start // self.block :][: self._blocks(size)].astype(into.dtype) * factor
            into[stretch] += whole[stretch] * self._spread(scale, size)

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _spread(self, scale: _Floats, count: int) -> _Floats:
        return np.repeat(scale, self.block)[:count]

    def _parts(self, data: memoryview, count: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int8]]:
        first = _padded(4 * self._blocks(count))
        return _as_array(data, np.float32, self._blocks(count)), _as_array(data[first:], np.int8, count)


@dataclass(frozen=True)
class _TopKCodec(GradientCodec):
    """The values that are largest by magnitude, and where they stand; the others wait in the residual.

    Values and what is left come to what was there, exactly: `add` of the data to the new residual gives values plus the
    old residual (Stich et al., NeurIPS 2018).

    Args:
        share: of the values that are sent, above 0, at most 1; at least one is.
    """

    share: float
    keeps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError("a share is above 0 and at most 1")

    def size_bytes(self, count: int) -> int:
        """8 for each value sent."""
        return 8 * self._sent(count)

    def encode(self, values: _Floats, into: memoryview, residual: _Floats | None = None) -> None:
        """Without a residual what is not sent is lost."""
        sent = self._sent(len(values))
        whole = np.array(values, np.float32) if residual is None else np.add(values, residual, dtype=np.float32)
        places = _top_indices(np.abs(whole), sent)
        _as_array(into, np.uint32, sent)[:] = places
        _as_array(into[4 * sent :], np.float32, sent)[:] = whole[places]
        if residual is not None:
            whole[places] = 0
            np.copyto(residual, whole)

    def add(self, data: memoryview, into: _Floats, factor: float = 1.0) -> None:
        """At the places sent; the others get nothing. Raises ValueError for a place that is none."""
        self.check(data, len(into))
        sent = self._sent(len(into))
        places, values = _as_array(data, np.uint32, sent), _as_array(data[4 * sent :], np.float32, sent)
        into[places] += into.dtype.type(factor) * values

    def check(self, data: memoryview, count: int) -> None:
        """Raise ValueError for a place that is none."""
        sent = self._sent(count)
        if sent and _as_array(data, np.uint32, sent).max() >= count:
            raise ValueError("a place outside the array")

    def _sent(self, count: int) -> int:
        return min(count, max(1, int(np.ceil(self.share * count))))


def _top_indices(values: _Floats, count: int) -> npt.NDArray[np.uint32]:
    """Where the largest of some magnitudes stand, in order; what is not a number counts as larger than all.

    Most are ruled out by a bound from a sample, so that few have to be put in order; where too few are above it, all.
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


def _largest(values: _Floats) -> float:
    """The largest finite magnitude; 0 where there is none."""
    if not len(values):
        return 0.0
    largest = float(np.maximum(np.fmax.reduce(values), -np.fmin.reduce(values)))
    if np.isfinite(largest):
        return largest
    return float(np.max(np.abs(values), where=np.isfinite(values), initial=0.0))
