"""The engine of a single device: no process group, otherwise as in data parallelism."""

from __future__ import annotations

from trainwright.core.group import Group, StateTag
from trainwright.strategies.torch.base import TorchEngine


class OneDevice(TorchEngine):
    """A model on one device of one worker."""

    def form(self, group: Group) -> StateTag:
        """Take threads and device."""
        assert group.size == 1, "one device is driven by one worker"
        return super().form(group)
