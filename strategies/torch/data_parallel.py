"""The engine of synchronous data parallelism: torch's DistributedDataParallel, over gloo or NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainwright.core.data import Feed
from trainwright.core.group import Move, StateTag
from trainwright.strategies.torch import state
from trainwright.strategies.torch.compat import ddp_without_buffer_sync
from trainwright.strategies.torch.group import compared, same_start
from trainwright.strategies.torch.member import Member
from trainwright.strategies.torch.step import Runner, layout_of


class DataParallel(Member):
    """A replica on each worker; gradients are averaged by all-reduce while they are computed.

    DDP chooses its buckets by the order in which gradients came in the first backward, which changes the order of
    sums. `warm` makes that backward a throwaway after each formation, so that equal steps give equal bits; not so with
    two ranks, since a sum of two has one order.
    """

    def transfer(self, moves: Sequence[Move]) -> StateTag:
        """Make every rank equal to the first move's source, bit by bit. Raises PeerLost."""
        if moves:
            source = moves[0].source
            self._guarded(lambda: state.broadcast(self._built, source, self._rank, self._device))
        return super().transfer(moves)

    def _warmed(self, feed: Feed) -> Runner:
        """DDP around the objective, with its buckets fixed."""
        assert self._group is not None, "form() comes first"
        alone, replica = self._alone(world=self._group.size), self._built
        untried = replica.every_used is None or (replica.uncut and not layout_of(feed).whole)
        if any(flag for (flag,) in compared([int(untried)], self._device)):  # all of them: a loss may gather
            replica.every_used = self._throwaway(alone, feed)
        assert replica.every_used is not None, "it was tried, here or where the state comes from"
        every_used = self._agree(replica.every_used)
        parallel = ddp_without_buffer_sync(
            alone.objective, gradient_as_bucket_view=True, find_unused_parameters=not every_used
        )
        runner = replace(alone, reduced=parallel, local=parallel.no_sync, every_used=every_used)
        if self._group.size != 2:
            self._throwaway(runner, feed)
        return runner

    def _agree(self, every_used: bool) -> bool:
        """Whether all ranks gave every parameter a gradient. Raises JobError where their first parameters differ."""
        checksum = 0 if self._built.step else state.checksum(self._built.model)  # later ones come from a rank or a file
        answers = compared([int(every_used), checksum], self._device)
        same_start([checksum for _, checksum in answers], self._where)
        return all(flag for flag, _ in answers)
