"""What the torch engines share whose ranks are a process group."""

from __future__ import annotations

from trainwright.core.group import Address, Generation, Group, Role, StateTag
from trainwright.strategies.torch.base import TorchEngine
from trainwright.strategies.torch.group import Membership


class Member(TorchEngine):
    """A rank of a process group."""

    def __init__(self) -> None:
        super().__init__()
        self._membership = Membership()

    def reserve(self, generation: Generation, role: Role) -> Address:
        """Bind a port that the system chooses and keep it until `form`."""
        return self._membership.reserve()

    def form(self, group: Group) -> StateTag:
        """Join the process group. Raises PeerLost where it does not form by the group's deadline."""
        super().form(group)
        self._membership.join(group, self._device)
        return self._tag()

    def leave(self) -> None:
        """Drop what holds the process group, end it and close its sockets; the state stays."""
        super().leave()
        self._membership.leave()

    def interrupt(self, deadline_s: float) -> bool:
        """Shut the group's connections: a blocked collective raises PeerLost at once. False over NCCL."""
        return self._membership.interrupt()
