"""The collective engines: every rank steps together, and every rank holds the whole state."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

from tests.support.reference.model import Array
from tests.support.reference.reference_engine import ReferenceEngine, zero_weighted
from tests.support.reference.star_transport import StarGroup
from tests.support.reference.state import from_bytes, to_bytes
from tests.support.reference.user_functions import apply_step
from trainwright.core.data import Feed, StepReport
from trainwright.core.topology import Capabilities, Group, StateTag, StateTransfer


class Reference(ReferenceEngine):
    """Ranks in a star, the whole state on each of them; a new generation forms in the surviving processes."""

    capabilities: ClassVar[Capabilities] = Capabilities()

    @property
    def star(self) -> StarGroup:
        """The formed group's connections."""
        assert isinstance(self._connections, StarGroup), "form comes first"
        return self._connections

    def form(self, group: Group) -> StateTag:
        """Meet the others within the group's deadline. Raises PeerLost."""
        self._connections = star = StarGroup(group, self._enter(group))
        with self._acting():
            star.open()
        return self._tag()

    def transfer(self, moves: Sequence[StateTransfer]) -> StateTag:
        """Each source's state goes to its targets, in the order of source ranks."""
        targets: dict[int, list[int]] = {}
        for move in moves:
            targets.setdefault(move.source, []).append(move.target)
        with self._acting():
            self._settle(self.state)
            held, rank = to_bytes(self.state), self.group.rank
            for source in sorted(targets):
                received = self.star.relay(source, targets[source], held, self.star.until())
                if rank in targets[source] and rank != source:
                    self._settle(from_bytes(received))
        return self._tag()

    def _shares(self, feed: Feed) -> Array:
        """The vector of sums over this actor's data ranks, in their order."""
        vectors = [
            self.program.share(self.state.parameters, part, step=feed.step, data_rank=data_rank)
            for data_rank, part in zip(feed.data_ranks, feed.parts, strict=True)
        ]
        total = sum(vectors[1:], start=vectors[0])
        total[-1] = float(feed.stop_requested)
        return total

    def warm(self, feed: Feed) -> None:
        """One throwaway step of weight 0, its sum included. Nothing is applied."""
        with self._acting():
            self.star.sum(self._shares(zero_weighted(feed)))

    def train_step(self, feed: Feed) -> StepReport:
        """This rank's part of one global step.

        Raises:
            PeerLost: another rank went away; this rank stands where it stood.
            NonFiniteLoss, JobError, UserCodeError: at this rank; nothing was applied on any.
        """
        with self._acting():
            self._expect(feed)
            times = [time.perf_counter()]
            shares = self._shares(feed)
            times.append(time.perf_counter())
            total = self.star.sum(shares)
            times.append(time.perf_counter())
            self._state, report = apply_step(self.program, self.state, feed, total)
            times.append(time.perf_counter())
        spent = [after - before for before, after in pairwise(times)]
        return replace(report, phases=dict(zip(("forward+backward", "wait", "optimizer"), spent, strict=True)))
