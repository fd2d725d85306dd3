"""The devices of a worker as TensorFlow names them."""

from __future__ import annotations

import tensorflow as tf

from trainwright.core.group import Group


def names_of(group: Group) -> list[str]:
    """Names of the group's devices; several on the CPU are made as logical devices, before anything else runs."""
    if not group.devices[0].startswith("cuda"):
        (host,) = tf.config.list_physical_devices("CPU")
        if len(group.devices) > 1:
            logical = [tf.config.LogicalDeviceConfiguration() for _ in group.devices]
            tf.config.set_logical_device_configuration(host, logical)
        return [f"/cpu:{number}" for number in range(len(group.devices))]
    return [f"/gpu:{number}" for number in range(len(group.devices))]
