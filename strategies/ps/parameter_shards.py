"""Placement of a model's tensors on servers, balanced by bytes, and the interface of a server's shard. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal, Protocol

from trainwright.core.topology import WorkUnit

ALIGNMENT = 64  # bytes; enough for vector instructions and every dtype


def place_tensors(tensors: Sequence[ShardSlot], servers: int, *, cut: bool = True) -> tuple[ParameterShard, ...]:
    """Return each server's shard.

    A tensor larger than a fair share, total / servers, is split by rows of its first dimension into nearly equal
    pieces, one for each server. Then each piece, the largest first, goes to the server that holds least (Graham, 1969):
    no server holds more than the fair share, the largest piece and a row of each split tensor. Trained and frozen
    tensors are balanced separately; all buffers are on the first server.

    Args:
        tensors: whole tensors, in the model's order.
        servers: number of servers.
        cut: whether tensors may be split; False for optimizers that need whole tensors.
    """
    server_pieces: list[list[tuple[int, ShardSlot]]] = [[] for _ in range(servers)]
    for kind in ("trained", "frozen"):
        kind_tensors = [(place, tensor) for place, tensor in enumerate(tensors) if tensor.kind == kind]
        total = sum(tensor.size for _, tensor in kind_tensors)
        loads = [0] * servers
        for place, tensor in sorted(kind_tensors, key=lambda entry: (-entry[1].size, entry[0])):
            pieces = _split_rows(tensor, servers if cut and _exceeds_fair_share(tensor.size, servers, total) else 1)
            # a server holds one piece of a tensor at most
            emptiest = sorted(range(servers), key=lambda server: (loads[server], server))
            for server, piece in zip(emptiest, pieces, strict=False):
                loads[server] += piece.size
                server_pieces[server].append((place, piece))
    server_pieces[0] += [(place, tensor) for place, tensor in enumerate(tensors) if tensor.kind == "buffer"]
    return tuple(map(_lay_out, server_pieces))


def count_busy_servers(trained: Sequence[tuple[int, int]], servers: int) -> int:
    """Return how many servers `place_tensors` gives trained tensors to, if tensors may be split.

    Args:
        trained: rows and bytes of each trained tensor.
        servers: number of servers.
    """
    total = sum(size for _, size in trained)
    pieces = sum(
        min(rows, servers) if _exceeds_fair_share(size, servers, total) else 1 for rows, size in trained if size
    )
    return min(servers, pieces)


def _exceeds_fair_share(size_bytes: int, servers: int, total: int) -> bool:
    """Whether a tensor is larger than a fair share."""
    return size_bytes * servers > total


def _split_rows(tensor: ShardSlot, parts: int) -> Sequence[ShardSlot]:
    """Split a tensor into this many pieces of whole rows, or one for each row; the largest first."""
    rows = tensor.shape[0] if tensor.shape else 1
    if min(rows, parts) < 2:
        return (tensor,)
    row_bytes, remainder = tensor.size // rows, rows % min(rows, parts)
    counts = [rows // min(rows, parts) + (part < remainder) for part in range(min(rows, parts))]
    return tuple(
        replace(tensor, shape=(end - start, *tensor.shape[1:]), rows=(start, end), size=(end - start) * row_bytes)
        for start, end in pairwise(accumulate(counts, initial=0))
    )


def _lay_out(pieces: Sequence[tuple[int, ShardSlot]]) -> ParameterShard:
    """Return the shard of one server, its slots with offsets, each kind in the model's order."""
    slots: list[ShardSlot] = []
    ends: dict[TensorKind, int] = {}
    end = 0
    kinds: tuple[TensorKind, ...] = ("trained", "buffer", "frozen")
    for kind in kinds:
        for _, slot in sorted((entry for entry in pieces if entry[1].kind == kind), key=lambda entry: entry[0]):
            slots.append(replace(slot, offset=end))
            end += -(-slot.size // ALIGNMENT) * ALIGNMENT
        ends[kind] = end
    return ParameterShard(
        slots=tuple(slots), trained_bytes=ends["trained"], pulled_bytes=ends["buffer"], size_bytes=ends["frozen"]
    )


# --- The shard of a server ---------------------------------------------


TensorKind = Literal["trained", "buffer", "frozen"]


@dataclass(frozen=True, kw_only=True)
class ShardSlot:
    """A tensor, or some rows of one, in a shard."""

    name: str  # full name of the tensor
    shape: tuple[int, ...]  # of the part that is here
    dtype: str  # of its elements, as the framework names it
    rows: tuple[int, int] | None = None  # start and end in the tensor's first dimension; None for a whole tensor
    # offset, size: bytes in the shard's region, from the region's start; offsets are multiples of `ALIGNMENT`
    offset: int = 0
    size: int
    # `trained` is pulled and pushed; `buffer` is pulled, and pushed unencoded; `frozen` is pulled once
    kind: TensorKind = "trained"


@dataclass(frozen=True, kw_only=True)
class ParameterShard:
    """Layout of the tensors of one server in its region: trained slots, then buffers, then frozen ones."""

    slots: tuple[ShardSlot, ...]  # each kind in the model's order
    trained_bytes: int  # length of the region's first part, the trained slots
    pulled_bytes: int  # length of the first part that changes: trained slots and buffers
    size_bytes: int  # of the region


@dataclass(frozen=True, kw_only=True)
class GradientPush:
    """A worker's result of a unit for one server."""

    unit: WorkUnit  # that it computed
    weight: float  # sum of the weights of the unit's samples; if it is 0, the payload is ignored
    # the unit's weighted mean gradient of the trained slots, encoded as the plan says; with local steps, the change
    # of the parameters (after minus before). Read-only, and valid during the call alone.
    payload: memoryview
    buffers: memoryview  # the shard's buffers after the unit, as in the region; empty if it has none


class ShardStore(Protocol):
    """One server's shard with its optimizer state. Calls come from one thread at a time."""

    @property
    def shard(self) -> ParameterShard:
        """Layout of the shard."""

    def attach(self, region: memoryview) -> None:
        """Copy the parameters into a region of `shard.size_bytes`, and keep them there from now on."""

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, by the job's schedule. Raises UserCodeError."""

    def check(self, push: GradientPush) -> None:
        """Raise ValueError if payload or buffers of a push cannot be decoded, such as for their size."""

    def norm2(self, pushes: Sequence[GradientPush]) -> float:
        """Return the squared norm of the gradient that `apply` would use for these pushes, over this shard."""

    def apply(self, pushes: Sequence[GradientPush], *, step: int, rate_factor: float, clip_factor: float) -> None:
        """Apply one update: the weighted mean of the pushes, added up in the order given.

        Without any weight nothing is applied. Buffers come from the first push that has them.

        Args:
            pushes: at least one.
            step: of the units; with local steps, the first of each.
            rate_factor: on the learning rate.
            clip_factor: on the gradient.
        """
