"""Which server holds which tensors: balanced by bytes, the same answer wherever it is computed. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal, Protocol

from trainwright.core.topology import WorkUnit

ALIGNMENT = 64  # bytes: what vector instructions and every dtype are content with


@dataclass(frozen=True, kw_only=True)
class ModelTensor:
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
    kind: TensorKind = "trained"

    @property
    def size_bytes(self) -> int:
        """Bytes of all of it."""
        return math.prod(self.shape) * self.item_bytes


def place_tensors(tensors: Sequence[ModelTensor], servers: int, *, cut: bool = True) -> tuple[ParameterShard, ...]:
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
    held: list[list[tuple[int, ShardSlot]]] = [[] for _ in range(servers)]
    for kind in ("trained", "frozen"):
        mine = [(place, tensor) for place, tensor in enumerate(tensors) if tensor.kind == kind]
        total = sum(tensor.size_bytes for _, tensor in mine)
        loads = [0] * servers
        for place, tensor in sorted(mine, key=lambda one: (-one[1].size_bytes, one[0])):
            pieces = _split_rows(
                tensor, servers if cut and _exceeds_fair_share(tensor.size_bytes, servers, total) else 1
            )
            # a server holds one piece of a tensor at most
            emptiest = sorted(range(servers), key=lambda server: (loads[server], server))
            for server, piece in zip(emptiest, pieces, strict=False):
                loads[server] += piece.size
                held[server].append((place, piece))
    held[0] += [(place, _whole_slot(tensor)) for place, tensor in enumerate(tensors) if tensor.kind == "buffer"]
    return tuple(_lay_out(one) for one in held)


def count_busy_servers(trained: Sequence[tuple[int, int]], servers: int) -> int:
    """How many of so many servers hold something to train, where tensors may be cut: `place_tensors` fills empty ones
    first.

    Args:
        trained: rows and bytes of each tensor that is trained.
        servers: how many there are.
    """
    total = sum(size for _, size in trained)
    pieces = sum(
        min(rows, servers) if _exceeds_fair_share(size, servers, total) else 1 for rows, size in trained if size
    )
    return min(servers, pieces)


def _exceeds_fair_share(size_bytes: int, servers: int, total: int) -> bool:
    """Whether a tensor is more than a fair share."""
    return size_bytes * servers > total


def _split_rows(tensor: ModelTensor, parts: int) -> Sequence[ShardSlot]:
    """A tensor in so many pieces of whole rows, or as many as it has rows; the largest first."""
    whole, rows = _whole_slot(tensor), tensor.shape[0] if tensor.shape else 1
    if min(rows, parts) < 2:
        return (whole,)
    row_bytes, more = tensor.size_bytes // rows, rows % min(rows, parts)
    counts = [rows // min(rows, parts) + (part < more) for part in range(min(rows, parts))]
    return tuple(
        replace(whole, shape=(end - start, *tensor.shape[1:]), rows=(start, end), size=(end - start) * row_bytes)
        for start, end in pairwise(accumulate(counts, initial=0))
    )


def _whole_slot(tensor: ModelTensor) -> ShardSlot:
    return ShardSlot(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        rows=None,
        offset=0,
        size=tensor.size_bytes,
        kind=tensor.kind,
    )


def _lay_out(pieces: Sequence[tuple[int, ShardSlot]]) -> ParameterShard:
    """The slots of one server with their offsets, each kind in the model's order."""
    slots: list[ShardSlot] = []
    ends: dict[TensorKind, int] = {}
    end = 0
    kinds: tuple[TensorKind, ...] = ("trained", "buffer", "frozen")
    for kind in kinds:
        for _, slot in sorted((one for one in pieces if one[1].kind == kind), key=lambda one: one[0]):
            slots.append(replace(slot, offset=end))
            end += -(-slot.size // ALIGNMENT) * ALIGNMENT
        ends[kind] = end
    return ParameterShard(
        slots=tuple(slots), trained_bytes=ends["trained"], pulled_bytes=ends["buffer"], size_bytes=ends["frozen"]
    )


# --- What a server's shard of the parameters is to the rest of the server ---------------------------------------------


TensorKind = Literal["trained", "buffer", "frozen"]


@dataclass(frozen=True, kw_only=True)
class ShardSlot:
    """A tensor, or some rows of one, in a shard.

    Attributes:
        name: full name of the tensor.
        shape: of what is here.
        dtype: of its elements, in the framework's own words.
        rows: of the tensor's first dimension that are here, from and to; None where it is here as a whole.
        offset, size: bytes in the shard's region, from the region's start; offsets are multiples of `deal.ALIGNMENT`.
        kind: `trained` is pulled and pushed; `buffer` is pulled, and pushed as it is; `frozen` is pulled once.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rows: tuple[int, int] | None
    offset: int
    size: int
    kind: TensorKind = "trained"


@dataclass(frozen=True, kw_only=True)
class ParameterShard:
    """What one server holds, as it lies in its region: trained slots, then buffers, then frozen ones.

    Attributes:
        slots: each kind in the model's order.
        trained_bytes: of the region's beginning that holds what is trained.
        pulled_bytes: of its beginning that changes: trained and buffers.
        size_bytes: of the region.
    """

    slots: tuple[ShardSlot, ...]
    trained_bytes: int
    pulled_bytes: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class GradientPush:
    """What a worker says of a unit to one server.

    Attributes:
        unit: that it computed.
        weight: sum of the weights of the unit's samples; at 0 the payload means nothing.
        payload: the unit's weighted mean gradient of the shard's trained slots, in the plan's wire form; with local
            steps, how far the parameters went (after minus before). Must not be written into, nor kept after the call.
        buffers: the shard's buffers after the unit, as they lie in the region; empty where it has none.
    """

    unit: WorkUnit
    weight: float
    payload: memoryview
    buffers: memoryview


class ShardStore(Protocol):
    """One server's shard and the optimizer's state of it. Calls come from one thread at a time."""

    @property
    def shard(self) -> ParameterShard:
        """What it holds."""

    def attach(self, region: memoryview) -> None:
        """The parameters live in this region of `shard.size_bytes` from now on: fill it with those held now."""

    def rate(self, step: int) -> float:
        """The learning rate of a step, by the job's schedule. Raises UserCodeError."""

    def check(self, push: GradientPush) -> None:
        """Raise ValueError where the payload or the buffers of a push cannot be read, such as for their size."""

    def norm2(self, pushes: Sequence[GradientPush]) -> float:
        """The squared norm of what `apply` would make of these pushes, over this shard. Changes nothing."""

    def apply(self, pushes: Sequence[GradientPush], *, step: int, rate_factor: float, clip_factor: float) -> None:
        """One update: the mean of the pushes by their weights, added up in the order given.

        With no weight at all nothing is applied. Of buffers the first push that has some counts.

        Args:
            pushes: at least one.
            step: of the units; with local steps, the first of each.
            rate_factor: on the learning rate.
            clip_factor: on the gradient.
        """
