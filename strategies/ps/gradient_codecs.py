"""Forms in which gradients and differences of parameters go over the wire, on numpy arrays.

Each says how many bytes so many values take, writes them into an outbox, and adds what came to an array. What is not a
number, or is infinite, stays so, that nobody applies it unseen.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import PlanError

Floats = npt.NDArray[np.floating[Any]]
_STRETCH = 2**16  # values that are worked on at once, so that what is in between stays in the cache
_ALIGNED = 8
_SAMPLED = 61  # one of so many values stands for all; prime, so that it meets all columns of a matrix
_REMEDY = 'write "full", "fp16", "bf16", "int8" or "topk(0.01)"'


class Codec(ABC):
    """A form on the wire. Arrays are flat, of float32 or float64; data is of exactly `size_bytes` bytes.

    Attributes:
        keeps: the worker keeps what was not sent, in a residual, and sends it later (error feedback).
    """

    keeps: ClassVar[bool] = False

    @abstractmethod
    def size_bytes(self, count: int) -> int:
        """Bytes of so many values: a multiple of 8, so that ranges that follow each other stand aligned."""

    @abstractmethod
    def encode(self, values: Floats, into: memoryview, residual: Floats | None = None) -> None:
        """Write values into `into`. Where the codec keeps one, the residual is added to them, and what is left stays.

        When it turns out that what was sent does not count, `add` of it to the residual takes it back.
        """

    @abstractmethod
    def add(self, data: memoryview, into: Floats, factor: float = 1.0) -> None:
        """`into` += `factor` times the values."""

    @abstractmethod
    def check(self, data: memoryview, count: int) -> None:
        """Raise ValueError where data of the right size cannot be added to so many values."""

    def decode(self, data: memoryview, into: Floats) -> None:
        """Fill `into` with the values."""
        into.fill(0)
        self.add(data, into)


def codec_of(text: str, dtype: npt.DTypeLike = np.float32) -> Codec:
    """The codec of a name: `full` (values of `dtype` as they are), `fp16`, `bf16`, `int8`, `topk(share)`.

    Raises PlanError.
    """
    simple: dict[str, Codec] = {"full": Full(np.dtype(dtype)), "fp16": Half(), "bf16": Brain(), "int8": Int8()}
    found = re.fullmatch(r"topk\(\s*([0-9.eE+-]+)\s*\)", text)
    try:
        return TopK(float(found[1])) if found else simple[text]
    except (KeyError, ValueError) as error:
        raise PlanError(f"{text!r} is no form on the wire", remedy=_REMEDY) from error


@dataclass(frozen=True)
class Full(Codec):
    """The values as they are."""

    dtype: np.dtype[Any]

    def size_bytes(self, count: int) -> int:
        """4 or 8 a value."""
        return _padded(self.dtype.itemsize * count)

    def encode(self, values: Floats, into: memoryview, residual: Floats | None = None) -> None:
        """One copy."""
        np.copyto(_array(into, self.dtype, len(values)), values)

    def check(self, data: memoryview, count: int) -> None:
        """Any bits are numbers."""

    def add(self, data: memoryview, into: Floats, factor: float = 1.0) -> None:
        """In one pass over stretches."""
        values = _array(data, self.dtype, len(into))
        for stretch in _stretches(len(into)):
            into[stretch] += factor * values[stretch] if factor != 1.0 else values[stretch]


@dataclass(frozen=True)
class Half(Codec):
    """float16 times a power of two, which brings the largest finite value to at most 2^15: nothing overflows.

    Error: 2^-11 of a value, or 2^-40 of the largest one where that is more.
    """

    def size_bytes(self, count: int) -> int:
        """2 a value, and 8 for the exponent."""
        return _padded(2 * count) + _ALIGNED

    def encode(self, values: Floats, into: memoryview, residual: Floats | None = None) -> None:
        """Two passes: the largest value, then all."""
        exponent = np.clip(np.frexp(_largest(values))[1] - 15, -126, 126)
        into[:_ALIGNED] = np.int64(exponent).tobytes()
        scale, halves = np.float32(np.ldexp(1.0, -exponent)), _array(into[_ALIGNED:], np.float16, len(values))
        with np.errstate(over="ignore"):  # float64 beyond float32's range, or infinite
            for stretch in _stretches(len(values)):
                halves[stretch] = values[stretch] * scale

    def check(self, data: memoryview, count: int) -> None:
        """Any bits are numbers."""

    def add(self, data: memoryview, into: Floats, factor: float = 1.0) -> None:
        """In one pass."""
        exponent = int(np.frombuffer(data[:_ALIGNED], np.int64)[0])
        halves = _array(data[_ALIGNED:], np.float16, len(into))
        scale = into.dtype.type(np.ldexp(factor, exponent))
        for stretch in _stretches(len(into)):
            into[stretch] += scale * halves[stretch].astype(into.dtype)


@dataclass(frozen=True)
class Brain(Codec):
    """bfloat16: the upper half of float32, rounded to nearest, ties to even. Error: 2^-9 of a value."""

    def size_bytes(self, count: int) -> int:
        """2 a value."""
        return _padded(2 * count)

    def encode(self, values: Floats, into: memoryview, residual: Floats | None = None) -> None:
        """In one pass; the bits are those of torch's `to(torch.bfloat16)`, except in what is not a number."""
        upper = _array(into, np.uint16, len(values))
        for stretch in _stretches(len(values)):
            with np.errstate(over="ignore"):
                single = np.ascontiguousarray(values[stretch], np.float32)
            bits = single.view(np.uint32)
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
            upper[stretch] = np.where(np.isnan(single), np.uint32(0x7FC0), rounded)

    def check(self, data: memoryview, count: int) -> None:
        """Any bits are numbers."""

    def add(self, data: memoryview, into: Floats, factor: float = 1.0) -> None:
        """In one pass."""
        upper = _array(data, np.uint16, len(into))
        for stretch in _stretches(len(into)):
            values = (upper[stretch].astype(np.uint32) << 16).view(np.float32)
            into[stretch] += into.dtype.type(factor) * values


@dataclass(frozen=True)
class Int8(Codec):
    """Whole numbers from -127 to 127 times a float32 for each block. Error: half of that, the block's largest / 254.

    A block with a value that is infinite or not a number comes out as not a number, all of it.
    """

    block: int = 256

    def size_bytes(self, count: int) -> int:
        """1 a value, and 4 for each block."""
        return _padded(4 * self._blocks(count)) + _padded(count)

    def encode(self, values: Floats, into: memoryview, residual: Floats | None = None) -> None:
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

    def add(self, data: memoryview, into: Floats, factor: float = 1.0) -> None:
        """In one pass over stretches."""
        scales, whole = self._parts(data, len(into))
        for stretch in _stretches(len(into)):
            size = stretch.stop - stretch.start
            scale = scales[stretch.start // self.block :][: self._blocks(size)].astype(into.dtype) * factor
            into[stretch] += whole[stretch] * self._spread(scale, size)

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _spread(self, scale: Floats, count: int) -> Floats:
        return np.repeat(scale, self.block)[:count]

    def _parts(self, data: memoryview, count: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int8]]:
        first = _padded(4 * self._blocks(count))
        return _array(data, np.float32, self._blocks(count)), _array(data[first:], np.int8, count)


@dataclass(frozen=True)
class TopK(Codec):
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

    def encode(self, values: Floats, into: memoryview, residual: Floats | None = None) -> None:
        """Without a residual what is not sent is lost."""
        sent = self._sent(len(values))
        whole = np.array(values, np.float32) if residual is None else np.add(values, residual, dtype=np.float32)
        places = _largest_places(np.abs(whole), sent)
        _array(into, np.uint32, sent)[:] = places
        _array(into[4 * sent :], np.float32, sent)[:] = whole[places]
        if residual is not None:
            whole[places] = 0
            np.copyto(residual, whole)

    def add(self, data: memoryview, into: Floats, factor: float = 1.0) -> None:
        """At the places sent; the others get nothing. Raises ValueError for a place that is none."""
        self.check(data, len(into))
        sent = self._sent(len(into))
        places, values = _array(data, np.uint32, sent), _array(data[4 * sent :], np.float32, sent)
        into[places] += into.dtype.type(factor) * values

    def check(self, data: memoryview, count: int) -> None:
        """Raise ValueError for a place that is none."""
        sent = self._sent(count)
        if sent and _array(data, np.uint32, sent).max() >= count:
            raise ValueError("a place outside the array")

    def _sent(self, count: int) -> int:
        return min(count, max(1, int(np.ceil(self.share * count))))


def _largest_places(values: Floats, count: int) -> npt.NDArray[np.uint32]:
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


def _array(data: memoryview, dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
    return np.frombuffer(data, dtype, count)


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _stretches(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _STRETCH, count)) for start in range(0, count, _STRETCH))


def _largest(values: Floats) -> float:
    """The largest finite magnitude; 0 where there is none."""
    if not len(values):
        return 0.0
    largest = float(np.maximum(np.fmax.reduce(values), -np.fmin.reduce(values)))
    if np.isfinite(largest):
        return largest
    return float(np.max(np.abs(values), where=np.isfinite(values), initial=0.0))
