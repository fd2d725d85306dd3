"""What engines of the coordinator topology share: the chief holds state and feeds, the others follow."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from trainwright.core.checkpoint import Reader, Writer
from trainwright.core.data import Columns, Feed, Sums
from trainwright.core.engine import ModelSpec, StateCopy
from trainwright.core.group import Address, Generation, Group, Move, Role, StateTag
from trainwright.core.plan import Plan
from trainwright.strategies.common.host_address import own_host
from trainwright.strategies.tensorflow.base import TensorFlowEngine
from trainwright.strategies.tensorflow.ps.membership import Seat, Seats


class Led(TensorFlowEngine):
    """A member of such a group. Only the chief holds a state, is fed and steps; the others have nothing to tell."""

    def __init__(self) -> None:
        super().__init__()
        self._seats: Seats | None = None
        self._seat: Seat | None = None

    @abstractmethod
    def lead(self, group: Group, servers: Mapping[int, Address]) -> Any:
        """Of the chief: the strategy, given where each other member serves. Raises PeerLost, JobError."""

    @abstractmethod
    def serve(self, group: Group, address: Address) -> Any:
        """Of another member: what serves at an address; anything but None."""

    # --- the group ----------------------------------------------------------------------------------------

    def reserve(self, generation: Generation, role: Role) -> Address:
        """The chief binds the port at which the others meet it; where they serve they tell it there."""
        self._check_new()
        if role != "chief":
            return Address(host=own_host(), port=0)
        if self._seats is not None:
            self._seats.end()
        self._seats = Seats()
        return self._seats.address

    def open_strategy(self, group: Group) -> Any:
        """The chief's strategy, once all others serve; of those what serves."""
        if group.rank:
            served: list[Any] = []
            self._seat = Seat(group, lambda address: served.append(self.serve(group, address)))
            return served[0]
        assert self._seats is not None, "reserve() comes first"
        until = time.monotonic() + group.deadline_s
        self._seats.open(group)
        return self.lead(group, self._seats.gather(group, until))

    def follow(self) -> None:
        """Serve until the chief leaves or is gone; TensorFlow's threads do the work, before and after this too."""
        if self._seat is not None:
            self._seat.wait()

    def interrupt(self, deadline_s: float) -> bool:
        """A follower's `follow` returns, so that who then owes an answer is who does not run. False: of the chief."""
        if self._seat is None:
            return super().interrupt(deadline_s)
        self._seat.leave()
        return True

    def leave(self) -> None:
        """The chief tells the others that the group is over; of another rank the chief notices that it is gone."""
        if self._seats is not None:
            self._seats.end()
        if self._seat is not None:
            self._seat.leave()
        super().leave()

    # --- the others' part of what all are asked -----------------------------------------------------------

    def build(self, spec: ModelSpec, plan: Plan) -> StateTag:
        """Make model and optimizer, at the chief."""
        return super().build(spec, plan) if self._leads else self._tag()

    def transfer(self, moves: Sequence[Move]) -> StateTag:
        """A fresh build stands at step 0 from then on."""
        return super().transfer(moves) if self._leads else self._tag()

    def snapshot(self) -> StateCopy:
        """Copy the state to the chief's memory."""
        return super().snapshot() if self._leads else StateCopy(step=0, size_bytes=0, state=None)

    def restore(self, copy: StateCopy) -> StateTag:
        """Take a state copied by `snapshot`."""
        return super().restore(copy) if self._leads else self._tag()

    def save(self, copy: StateCopy, writer: Writer) -> None:
        """Write a snapshot's files; only the chief has any."""
        if copy.state is not None:
            super().save(copy, writer)

    def load(self, reader: Reader) -> StateTag:
        """Take the state of a checkpoint of any engine of TensorFlow's."""
        return super().load(reader) if self._leads else self._tag()

    def warm(self, feed: Feed) -> None:
        """Compile the step, in a throwaway one that applies nothing."""
        if self._leads:
            super().warm(feed)

    def evaluate_step(self, feed: Feed) -> Sums:
        """Sums over the feed; nothing on other ranks than the chief."""
        return super().evaluate_step(feed) if self._leads else Sums()

    def predict_step(self, feed: Feed) -> Columns:
        """The model's outputs; nothing on other ranks than the chief."""
        return super().predict_step(feed) if self._leads else {}

    @property
    def _leads(self) -> bool:
        return self._group is not None and self._group.rank == 0

    def _tag(self) -> StateTag:
        return super()._tag() if self._leads else StateTag(step=None, pieces=frozenset())
