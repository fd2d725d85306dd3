"""Engines with a process group; and synchronous data parallelism: DistributedDataParallel, over gloo or NCCL."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import ClassVar

from torch import distributed
from torch.distributed import ProcessGroup

from trainwright.core.data import Feed, StepReport
from trainwright.core.errors import JobError
from trainwright.core.topology import Address, Capabilities, Group, Role, StateTag, StateTransfer
from trainwright.strategies.torch.checkpoint import host_state, replica_digests
from trainwright.strategies.torch.distributed.process_group import (
    ProcessGroupHandle,
    all_gather_ints,
    all_gather_json,
)
from trainwright.strategies.torch.engines.base import TorchEngine
from trainwright.strategies.torch.torch_compat import ddp_without_buffer_sync
from trainwright.strategies.torch.training.train_step import StepRunner, UnusedParameters


class ProcessGroupEngine(TorchEngine):
    """An engine whose ranks form a process group."""

    def __init__(self) -> None:
        super().__init__()
        self._membership = ProcessGroupHandle()
        self._sharers: ProcessGroup | None = None
        self._confirm = lambda: self._membership.confirm(self._device)
        self._aborted = lambda: self._membership.aborted

    def reserve(self, role: Role) -> Address:
        """Bind a port that the system chooses and keep it until `form`."""
        return self._membership.reserve()

    def form(self, group: Group) -> StateTag:
        """Join the process group."""
        self._sharers = None
        super().form(group)
        self._membership.join(group, self._device)
        return self._tag()

    def leave(self) -> None:
        """Drop what holds the process group, end it and close its sockets; the state stays."""
        self._sharers = None
        super().leave()
        self._membership.leave()

    def interrupt(self, deadline_s: float) -> bool:
        """End blocked collectives, so that whoever waits for one raises PeerLost at once."""
        return self._membership.interrupt()

    def _all_names(self, own: Collection[str]) -> tuple[str, ...]:
        named = all_gather_json(sorted(own), self._device)
        return super()._all_names({name for names in named for name in names})

    def _wants_check(self, feed: Feed) -> bool:
        """Return the same on all ranks; every rank calls it."""
        self.replica.checked = any(flag for (flag,) in all_gather_ints([int(self.replica.checked)], self._device))
        return super()._wants_check(feed)

    @property
    def _batch_group(self) -> Callable[[], ProcessGroup] | None:
        """Make a group of its own for a batch: DDP reduces gradients in backward, at moments that differ by rank."""
        return self._shared_batch

    def _shared_batch(self) -> ProcessGroup:
        """Return the group; the first call, on all ranks, makes it."""
        if self._sharers is None:
            self._sharers = self._make_batch_group()
        return self._sharers

    def _make_batch_group(self) -> ProcessGroup:
        assert self._group is not None, "form() comes first"
        made: ProcessGroup = distributed.new_group(timeout=timedelta(seconds=self._group.deadline_s))
        return made


class DataParallel(ProcessGroupEngine):
    """A replica on each worker; gradients are averaged by all-reduce while they are computed.

    DDP chooses its buckets by the order in which gradients came in the first backward, which changes the order of
    sums. `warm` makes that backward a throwaway after each formation, so that equal steps give equal bits; not so with
    two ranks, since a sum of two has one order.
    """

    capabilities: ClassVar[Capabilities] = replace(
        ProcessGroupEngine.capabilities, local_state=True, synchronized_batch_norm=True, custom_steps=True
    )

    def transfer(self, moves: Sequence[StateTransfer]) -> StateTag:
        """Copy the state of the first move's source to every rank, bit by bit."""
        if moves:
            source = moves[0].source
            self._guarded(lambda: host_state.broadcast(self.replica, source, self._rank, self._device))
        return super().transfer(moves)

    def verify(self) -> None:
        """Check that all ranks hold the same state."""
        assert self._group is not None, "form() comes first"
        keys = [("whole", "whole")] * self._group.size
        self._guarded(lambda: replica_digests.check_replicas(self.replica, keys, self._device, self._where))

    def train_step(self, feed: Feed) -> StepReport:
        """Run this rank's part of one global step.

        Where a parameter gets no gradient for the first time, nothing is applied: DDP looks for such parameters from
        then on, and the step is taken again.

        Raises:
            JobError: the step would be taken again with a batch that it changed in place.
        """
        try:
            return super().train_step(feed)
        except UnusedParameters:
            if changed := self._ready.objective.changed:
                names = ", ".join(map(repr, sorted(changed)))
                problem = (
                    f"the model, loss= or step= changes the batch in place ({names}), and step {feed.step + 1} must be "
                    "taken again, since a parameter got no gradient for the first time: change a copy, such as "
                    "tensor.clone()"
                )
                raise JobError([problem], where=self._where) from None
            self._runner, self.replica.sometimes_unused = None, True
        return super().train_step(feed)

    def _warmed(self, feed: Feed) -> StepRunner:
        """Return a runner with DDP around the objective, whose buckets are fixed."""
        assert self._group is not None, "form() comes first"
        self.verify()
        alone, replica = self._alone(world=self._group.size), self.replica
        if replica.synchronized is not None:
            replica.synchronized.on = False
        check = self._wants_check(feed)
        untried = check or replica.every_used is None
        if any(flag for (flag,) in all_gather_ints([int(untried)], self._device)):  # all of them: a loss may gather
            replica.every_used = self._throwaway(alone, feed, check=check)
        else:
            alone.objective.add_logged_names(replica.logged)
        assert replica.every_used is not None, "it was tried, here or where the state comes from"
        # A parameter that only an earlier micro-batch uses has a gradient, and DDP would wait for another one. Ranks
        # decide together: after a loss, one may have the micro-batches of several data ranks.
        own = int(replica.every_used and sum(map(len, feed.parts)) == 1)
        flags = all_gather_ints([own, int(replica.sometimes_unused)], self._device)
        replica.sometimes_unused = any(unused for _, unused in flags)
        every_used = all(used for used, _ in flags) and not replica.sometimes_unused
        if replica.every_used and not every_used:
            warnings.filterwarnings("ignore", "find_unused_parameters=True was specified", UserWarning)
        world = distributed.group.WORLD
        assert world is not None, "form() comes first"
        runner = replace(alone, data_groups=(world,))
        if not replica.custom:
            parallel = ddp_without_buffer_sync(
                alone.objective, gradient_as_bucket_view=True, find_unused_parameters=not every_used
            )
            required = replica.trainable if every_used else ()
            runner = replace(runner, parallel=parallel, no_sync=parallel.no_sync, required=required)
            if self._group.size != 2:
                self._throwaway(runner, feed, check=False)
        if replica.synchronized is not None:
            replica.synchronized.on = True
        return runner
