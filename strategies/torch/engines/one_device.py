"""The engine of a single device: no process group, otherwise as in data parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from trainwright.core.topology import Capabilities, Group, StateTag
from trainwright.strategies.torch.engines.base import TorchEngine


class OneDevice(TorchEngine):
    """A model on one device of one worker."""

    capabilities: ClassVar[Capabilities] = replace(
        TorchEngine.capabilities, local_state=True, synchronized_batch_norm=True
    )

    def form(self, group: Group) -> StateTag:
        """Set threads and device."""
        assert group.size == 1, "one device is driven by one worker"
        return super().form(group)
