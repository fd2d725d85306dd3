"""`tf.distribute.experimental.CentralStorageStrategy`: variables in the host's memory, a replica on each device."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

from trainwright.core.topology import Capabilities, Group
from trainwright.strategies.tensorflow.tensorflow_engine import TensorFlowEngine, device_names


class CentralStorage(TensorFlowEngine):
    """All devices of one node compute with variables that the CPU holds."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        reform="new_process", topology="collective", devices_per_worker=None, xla=True
    )

    def open_strategy(self, group: Group) -> Any:
        """On the worker's devices; several on a CPU are logical ones."""
        assert group.size == 1, "the devices of one node are driven by one worker"
        return tf.distribute.experimental.CentralStorageStrategy(device_names(group), parameter_device="/cpu:0")
