"""`tf.distribute.OneDeviceStrategy`: a model on one device of one worker."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainwright.core.topology import Group
from trainwright.strategies.tensorflow.tensorflow_engine import TensorFlowEngine


class OneDevice(TensorFlowEngine):
    """One device, no communication."""

    def open_strategy(self, group: Group) -> Any:
        """On the worker's device."""
        assert group.size == 1, "one device is driven by one worker"
        return tf.distribute.OneDeviceStrategy("/gpu:0" if group.devices[0].startswith("cuda") else "/cpu:0")
