"""Which server holds which tensors: balanced by bytes, the same answer wherever it is computed. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from trainwright.strategies.ps.shard_store import Kind, Shard, Slot

ALIGNMENT = 64  # bytes: what vector instructions and every dtype are content with


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One of the model's tensors.

    Attributes:
        name: full name.
        shape: of all of it.
        dtype: of its elements, in the framework's own words.
        item_bytes: size of an element.
        kind: `trained`, `buffer` or `frozen`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    kind: Kind = "trained"

    @property
    def size_bytes(self) -> int:
        """Bytes of all of it."""
        return math.prod(self.shape) * self.item_bytes


def deal(tensors: Sequence[Tensor], servers: int, *, cut: bool = True) -> tuple[Shard, ...]:
    """Each server's shard.

    A tensor that is larger than a fair share, total / servers, is cut by rows of its first dimension into nearly equal
    pieces, one a server. Then the largest first, each to the server that holds least so far (Graham, 1969). So no
    server holds more than the fair share, the largest piece and a row of each tensor that was cut. Trained tensors are
    balanced by themselves, as those are that are frozen; buffers are all on the first server.

    Args:
        tensors: in the model's order.
        servers: how many.
        cut: whether tensors may be cut; not where the optimizer looks at whole ones.
    """
    held: list[list[tuple[int, Slot]]] = [[] for _ in range(servers)]
    for kind in ("trained", "frozen"):
        mine = [(place, tensor) for place, tensor in enumerate(tensors) if tensor.kind == kind]
        total = sum(tensor.size_bytes for _, tensor in mine)
        loads = [0] * servers
        for place, tensor in sorted(mine, key=lambda one: (-one[1].size_bytes, one[0])):
            pieces = _pieces(tensor, servers if cut and _large(tensor.size_bytes, servers, total) else 1)
            # a server holds one piece of a tensor at most
            emptiest = sorted(range(servers), key=lambda server: (loads[server], server))
            for server, piece in zip(emptiest, pieces, strict=False):
                loads[server] += piece.size
                held[server].append((place, piece))
    held[0] += [(place, _slot(tensor)) for place, tensor in enumerate(tensors) if tensor.kind == "buffer"]
    return tuple(_laid_out(one) for one in held)


def busy(trained: Sequence[tuple[int, int]], servers: int) -> int:
    """How many of so many servers hold something to train, where tensors may be cut: `deal` fills empty ones first.

    Args:
        trained: rows and bytes of each tensor that is trained.
        servers: how many there are.
    """
    total = sum(size for _, size in trained)
    pieces = sum(min(rows, servers) if _large(size, servers, total) else 1 for rows, size in trained if size)
    return min(servers, pieces)


def _large(size_bytes: int, servers: int, total: int) -> bool:
    """Whether a tensor is more than a fair share."""
    return size_bytes * servers > total


def _pieces(tensor: Tensor, parts: int) -> Sequence[Slot]:
    """A tensor in so many pieces of whole rows, or as many as it has rows; the largest first."""
    whole, rows = _slot(tensor), tensor.shape[0] if tensor.shape else 1
    if min(rows, parts) < 2:
        return (whole,)
    row_bytes, more = tensor.size_bytes // rows, rows % min(rows, parts)
    counts = [rows // min(rows, parts) + (part < more) for part in range(min(rows, parts))]
    return tuple(
        replace(whole, shape=(end - start, *tensor.shape[1:]), rows=(start, end), size=(end - start) * row_bytes)
        for start, end in pairwise(accumulate(counts, initial=0))
    )


def _slot(tensor: Tensor) -> Slot:
    return Slot(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        rows=None,
        offset=0,
        size=tensor.size_bytes,
        kind=tensor.kind,
    )


def _laid_out(pieces: Sequence[tuple[int, Slot]]) -> Shard:
    """The slots of one server with their offsets, each kind in the model's order."""
    slots: list[Slot] = []
    ends: dict[Kind, int] = {}
    end = 0
    kinds: tuple[Kind, ...] = ("trained", "buffer", "frozen")
    for kind in kinds:
        for _, slot in sorted((one for one in pieces if one[1].kind == kind), key=lambda one: one[0]):
            slots.append(replace(slot, offset=end))
            end += -(-slot.size // ALIGNMENT) * ALIGNMENT
        ends[kind] = end
    return Shard(
        slots=tuple(slots), trained_bytes=ends["trained"], pulled_bytes=ends["buffer"], size_bytes=ends["frozen"]
    )
