"""The process group of engines whose ranks train together."""

from __future__ import annotations

from datetime import timedelta

from torch import distributed
from torch.distributed import ProcessGroup

from trainwright.core.topology import Address, Generation, Group, Role, StateTag
from trainwright.strategies.torch.distributed.process_group import ProcessGroupHandle
from trainwright.strategies.torch.engines.base import TorchEngine
from trainwright.strategies.torch.training.batch_losses import GroupFactory


class ProcessGroupEngine(TorchEngine):
    """An engine whose ranks form a process group."""

    def __init__(self) -> None:
        super().__init__()
        self._membership = ProcessGroupHandle()
        self._sharers: ProcessGroup | None = None

    def reserve(self, generation: Generation, role: Role) -> Address:
        """Bind a port that the system chooses and keep it until `form`."""
        return self._membership.reserve()

    def form(self, group: Group) -> StateTag:
        """Join the process group. Raises PeerLost where it does not form by the group's deadline."""
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
        """Shut the group's connections, so that a blocked collective raises PeerLost at once. False over NCCL."""
        return self._membership.interrupt()

    @property
    def _batch_group(self) -> GroupFactory | None:
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
