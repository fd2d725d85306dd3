"""What a server's shard of the parameters is to the rest of the server; frameworks implement `Bank`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from trainwright.core.staleness import Unit

Kind = Literal["trained", "buffer", "frozen"]


@dataclass(frozen=True, kw_only=True)
class Slot:
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
    kind: Kind = "trained"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What one server holds, as it lies in its region: trained slots, then buffers, then frozen ones.

    Attributes:
        slots: each kind in the model's order.
        trained_bytes: of the region's beginning that holds what is trained.
        pulled_bytes: of its beginning that changes: trained and buffers.
        size_bytes: of the region.
    """

    slots: tuple[Slot, ...]
    trained_bytes: int
    pulled_bytes: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Push:
    """What a worker says of a unit to one server.

    Attributes:
        unit: that it computed.
        weight: sum of the weights of the unit's samples; at 0 the payload means nothing.
        payload: the unit's weighted mean gradient of the shard's trained slots, in the plan's wire form; with local
            steps, how far the parameters went (after minus before). Must not be written into, nor kept after the call.
        buffers: the shard's buffers after the unit, as they lie in the region; empty where it has none.
    """

    unit: Unit
    weight: float
    payload: memoryview
    buffers: memoryview


class Bank(Protocol):
    """One server's shard and the optimizer's state of it. Calls come from one thread at a time."""

    @property
    def shard(self) -> Shard:
        """What it holds."""

    def attach(self, region: memoryview) -> None:
        """The parameters live in this region of `shard.size_bytes` from now on: fill it with those held now."""

    def rate(self, step: int) -> float:
        """The learning rate of a step, by the job's schedule. Raises UserCodeError."""

    def check(self, push: Push) -> None:
        """Raise ValueError where the payload or the buffers of a push cannot be read, such as for their size."""

    def norm2(self, pushes: Sequence[Push]) -> float:
        """The squared norm of what `apply` would make of these pushes, over this shard. Changes nothing."""

    def apply(self, pushes: Sequence[Push], *, step: int, rate_factor: float, clip_factor: float) -> None:
        """One update: the mean of the pushes by their weights, added up in the order given.

        With no weight at all nothing is applied. Of buffers the first push that has some counts.

        Args:
            pushes: at least one.
            step: of the units; with local steps, the first of each.
            rate_factor: on the learning rate.
            clip_factor: on the gradient.
        """
