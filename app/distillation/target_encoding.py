"""Encodings of stored teacher outputs: float32, float16, or the largest logits and the mass of the rest.

`topk(k)` stores the k largest logits of the last axis (half precision), their indices, and the logarithm of the
probability that all other classes have together at temperature 1. When they are read, the other classes get equal
logits with this probability in sum: the softmax at temperature 1 has the same mass on the k classes and on the rest.
Readers need not know the encoding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import JobError

_Array = npt.NDArray[Any]

_INDEX, _REST, _CLASSES = "_index", "_rest", "_classes"  # suffixes of the further columns of one output
_TOPK = re.compile(r"topk\((\d+)\)")
_SMALL = 1 << 16  # classes that fit two bytes


@dataclass(frozen=True, kw_only=True)
class TargetEncoding:
    """How outputs are stored."""

    bits: int = 16  # of each number, 32 or 16
    largest: int | None = None  # number of logits that are stored of the last axis; None for all

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `fp32`, `fp16` or `topk(8)`. Raises JobError for anything else."""
        found = _TOPK.fullmatch(text.replace(" ", ""))
        if found and int(found[1]):
            return cls(largest=int(found[1]))
        if text not in ("fp32", "fp16"):
            raise JobError([f'keep={text!r}: use "fp32", "fp16", or "topk(8)" for the 8 largest logits and the rest'])
        return cls(bits=int(text.removeprefix("fp")))

    def __str__(self) -> str:
        return f"fp{self.bits}" if self.largest is None else f"topk({self.largest})"

    @property
    def layers(self) -> TargetEncoding:
        """Encoding of hidden states."""
        return TargetEncoding(bits=self.bits)

    def row_bytes(self, shape: Sequence[int | None]) -> int:
        """Return the bytes of a row of an output of this shape; unknown sizes count as 1."""
        *others, last = [size or 1 for size in shape[1:]] or [1]
        each = self.bits // 8 * last if self.largest is None else self.largest * (2 + (2 if last <= _SMALL else 4)) + 4
        return math.prod(others) * each

    def encode(self, name: str, values: _Array) -> dict[str, _Array]:
        """Return the columns that store an output.

        Args:
            name: of the columns, with different endings.
            values: (rows, ...) floats; (rows, ..., classes) where only the largest are kept.

        Raises:
            JobError: values are no floats, not finite, too large for half precision, or of too few classes.
        """
        _check(name, values)
        if self.largest is None:
            return {name: _half(name, values) if self.bits == 16 else values.astype(np.float32)}
        if values.ndim < 2 or values.shape[-1] <= self.largest:
            raise _wrong(
                f"{name} has the shape {values.shape[1:]} in each row, and topk({self.largest}) is for the logits of "
                f'more than {self.largest} classes: use keep="fp16"'
            )
        return self._largest(name, values, self.largest)

    def _largest(self, name: str, values: _Array, count: int) -> dict[str, _Array]:
        classes = values.shape[-1]
        index = np.argpartition(values, classes - count, axis=-1)[..., classes - count :]
        order = np.argsort(-np.take_along_axis(values, index, -1), axis=-1, kind="stable")
        index = np.take_along_axis(index, order, -1)
        others = values.astype(np.float64)
        total = log_sum(others)
        np.put_along_axis(others, index, -np.inf, -1)
        return {
            name: _half(name, np.take_along_axis(values, index, -1)),
            name + _INDEX: index.astype(np.uint16 if classes <= _SMALL else np.uint32),
            name + _REST: (log_sum(others) - total).astype(np.float32),
            name + _CLASSES: np.full(len(values), classes, dtype=np.int32),  # a few bytes in the file, by its encoding
        }


def decode_targets(form: TargetEncoding, name: str, columns: dict[str, _Array]) -> _Array:
    """Return an output as it was before `encode`: (rows, ...) float32."""
    values = columns[name].astype(np.float32)
    if form.largest is None:
        return values
    classes = int(columns[name + _CLASSES].max(initial=form.largest + 1))
    rest = columns[name + _REST].astype(np.float64)
    with np.errstate(divide="ignore"):
        odds = rest - np.log(-np.expm1(np.minimum(rest, -np.finfo(np.float32).tiny)))
    share = odds + log_sum(values.astype(np.float64)) - np.log(classes - form.largest)
    share = np.minimum(share, values[..., -1])  # rounding must not make them larger than a kept logit
    whole = np.repeat(share.astype(np.float32)[..., None], classes, axis=-1)
    np.put_along_axis(whole, columns[name + _INDEX].astype(np.int64), values, -1)
    return whole


def log_sum(values: _Array) -> _Array:
    """Return log(sum(exp(values))) over the last axis; minus infinity if all values are."""
    top = values.max(axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.exp(values - top).sum(axis=-1)) + top[..., 0])


def _check(name: str, values: _Array) -> None:
    if values.dtype.kind != "f":
        raise _wrong(f"{name} is {values.dtype}: a teacher's outputs are floats; name the one with output=")
    bad = np.isnan(values) | (values == np.inf)  # minus infinity masks a class
    if bad.any():
        raise _wrong(f"{name} is NaN or infinite in {int(bad.any(axis=tuple(range(1, values.ndim))).sum())} rows")


def _half(name: str, values: _Array) -> _Array:
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if np.isposinf(half).any() or (np.isneginf(half) & np.isfinite(values)).any():
        raise _wrong(f'{name} has values up to {np.abs(values[np.isfinite(values)]).max():g}: use keep="fp32"')
    return half


def _wrong(problem: str) -> JobError:
    return JobError([f"the teacher's {problem}"])
