"""Which nodes measure their link, and when: in a round each node is in one pair at most. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

ALL_PAIRS = 16  # nodes, up to which every pair is measured
EXTRA = 4  # random pairings beside the ring

Pair = tuple[str, str]
Round = tuple[Pair, ...]


def rounds(nodes: Sequence[str], *, seed: int = 0) -> tuple[Round, ...]:
    """Rounds of pairs: all of them up to 16 nodes, else those of a ring and some at random.

    All pairs come by the circle method: one node stays, the others turn
    (https://en.wikipedia.org/wiki/Round-robin_tournament#Circle_method).
    """
    return _tournament(nodes) if len(nodes) <= ALL_PAIRS else _sampled(nodes, seed)


def _tournament(nodes: Sequence[str]) -> tuple[Round, ...]:
    seats: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        found.append(tuple((one, other) for one, other in facing if one is not None and other is not None))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(each for each in found if each)


def _sampled(nodes: Sequence[str], seed: int) -> tuple[Round, ...]:
    """The ring in two rounds, or three where the nodes are odd; then pairings at random, without those met before."""
    ring = [(node, nodes[(number + 1) % len(nodes)]) for number, node in enumerate(nodes)]
    last = [ring.pop()] if len(nodes) % 2 else []
    found, met = [tuple(ring[::2]), tuple(ring[1::2]), tuple(last)], {frozenset(pair) for pair in (*ring, *last)}
    drawn = random.Random(seed)
    for _ in range(EXTRA):
        shuffled = drawn.sample(list(nodes), len(nodes))
        pairs = [(one, other) for one, other in zip(shuffled[::2], shuffled[1::2], strict=False)]
        new = tuple(pair for pair in pairs if frozenset(pair) not in met)
        met |= {frozenset(pair) for pair in new}
        found.append(new)
    return tuple(each for each in found if each)
