"""How a strategy may lay a model over devices, for the ranking: a module of `OFFERS` gives its `shapes`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.core.plan import Mesh


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A mesh and how it is used; micro-batches and recomputation are left to the ranking."""

    mesh: Mesh
    zero: int = 0
    schedule: str = ""
    chunks: int = 1


def divisors(number: int) -> Iterator[int]:
    """All of them, from 1 up."""
    yield from (each for each in range(1, number + 1) if number % each == 0)
