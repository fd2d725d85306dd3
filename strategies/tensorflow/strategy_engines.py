"""Engines that differ only in the `tf.distribute.Strategy` that they open: one device, one node, several workers."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import replace
from typing import Any, ClassVar

import tensorflow as tf

from trainwright.core.data import Feed
from trainwright.core.errors import JobError, PeerLost
from trainwright.core.topology import Address, Capabilities, Group, Role
from trainwright.strategies.common.socket_transport import bind_socket, own_host
from trainwright.strategies.tensorflow.tensorflow_engine import TensorFlowEngine

_TF_CONFIG = "TF_CONFIG"
_CROSS_DEVICE_OPS = {
    "nccl": tf.distribute.NcclAllReduce,
    "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
    "reduce_to_one_device": tf.distribute.ReductionToOneDevice,
}
_POLL_S = 0.01  # between attempts to reach the chief
_ALL_DEVICES = replace(TensorFlowEngine.capabilities, devices_per_worker=None)


class TensorFlowOneDevice(TensorFlowEngine):
    """`OneDeviceStrategy`: the model on one device of one worker, without communication."""

    def open_strategy(self, group: Group) -> Any:
        """Open the strategy on the worker's device."""
        assert group.size == 1, "one device is driven by one worker"
        return tf.distribute.OneDeviceStrategy("/gpu:0" if group.devices[0].startswith("cuda") else "/cpu:0")

    def warm(self, feed: Feed) -> None:
        """Check a loss of a divided batch, also for the trial before other strategies; compile the step."""
        self._guarded(lambda: self._ready().check_divided(feed))
        super().warm(feed)


class Mirrored(TensorFlowEngine):
    """`MirroredStrategy`: a replica on each device of one worker; gradients are summed between them."""

    capabilities: ClassVar[Capabilities] = _ALL_DEVICES
    cross_device_ops: ClassVar[str] = ""  # of the plan; empty where TensorFlow chooses

    def open_strategy(self, group: Group) -> Any:
        """Open the strategy on the worker's devices; several devices of a CPU are logical ones."""
        assert group.size == 1, "the devices of one node are driven by one worker"
        sums = _CROSS_DEVICE_OPS[self.cross_device_ops]() if self.cross_device_ops else None
        return tf.distribute.MirroredStrategy(_device_names(group), cross_device_ops=sums)


class CentralStorage(TensorFlowEngine):
    """`CentralStorageStrategy`: variables in host memory, and a replica on each device of one worker."""

    capabilities: ClassVar[Capabilities] = _ALL_DEVICES

    def open_strategy(self, group: Group) -> Any:
        """Open the strategy on the worker's devices; several devices of a CPU are logical ones."""
        assert group.size == 1, "the devices of one node are driven by one worker"
        return tf.distribute.experimental.CentralStorageStrategy(_device_names(group), parameter_device="/cpu:0")


class MultiWorkerMirrored(TensorFlowEngine):
    """`MultiWorkerMirroredStrategy`: a replica in each worker; gradients are summed by collectives.

    The cluster spec comes from the group: rank 0 is the chief, the others are workers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._socket: socket.socket | None = None

    def reserve(self, role: Role) -> Address:
        """Bind a port that the system chooses, and keep it until TensorFlow's server has it."""
        self._check_new()
        self._close()
        self._socket = bind_socket("", shared=True)
        return Address(host=own_host(), port=self._socket.getsockname()[1])

    def open_strategy(self, group: Group) -> Any:
        """Start this worker's server, and connect to the others. Raises PeerLost if the chief's does not start."""
        os.environ[_TF_CONFIG] = json.dumps(_tf_config(group))
        if group.rank:
            _await_server(group.peers[0].address, group.deadline_s)
        options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=group.deadline_s)
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        self._close()
        return strategy

    def leave(self) -> None:
        """Free the reserved port too, if it is unused."""
        self._close()
        super().leave()

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class AtGivenAddresses(MultiWorkerMirrored):
    """MultiWorkerMirrored at the addresses that TF_CONFIG in each worker's environment gives."""

    def reserve(self, role: Role) -> Address:
        """Return this worker's own address. Raises JobError if TF_CONFIG does not give it."""
        self._check_new()
        given = os.environ.get(_TF_CONFIG)
        try:
            config = json.loads(given or "")
            task = config["task"]
            host, _, port = config["cluster"][task["type"]][int(task["index"])].rpartition(":")
            return Address(host=host, port=int(port))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise JobError(
                [
                    f'tf_config="environment": TF_CONFIG of {socket.gethostname()} does not give its own address: '
                    f'{given!r}; it must hold "cluster" and "task"; leave tf_config out to have addresses chosen'
                ]
            ) from error


def _await_server(address: Address, timeout_s: float) -> None:
    """Wait until a server listens: after a refused connection gRPC waits for a second. Raises PeerLost in the end."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((address.host, address.port), max(deadline_s - time.monotonic(), _POLL_S)):
                return
        except OSError as error:
            if time.monotonic() > deadline_s:
                what = f"the chief's server at {address.host}:{address.port} did not start within {timeout_s:g} s"
                raise PeerLost(f"{what}: {error}", remedy="look at the log of rank 0") from error
        time.sleep(_POLL_S)


def _device_names(group: Group) -> list[str]:
    """Return TensorFlow's names of the group's devices. Several devices of a CPU become logical ones first."""
    if group.devices[0].startswith("cuda"):
        return [f"/gpu:{number}" for number in range(len(group.devices))]
    (host,) = tf.config.list_physical_devices("CPU")
    if len(group.devices) > 1:
        logical = [tf.config.LogicalDeviceConfiguration() for _ in group.devices]
        tf.config.set_logical_device_configuration(host, logical)
    return [f"/cpu:{number}" for number in range(len(group.devices))]


def _tf_config(group: Group) -> dict[str, Any]:
    """Return the TF_CONFIG of a member; the chief has index 0 and does a worker's work too."""
    addresses = [f"{peer.address.host}:{peer.address.port}" for peer in group.peers]
    cluster = {"chief": addresses[:1], **({"worker": addresses[1:]} if addresses[1:] else {})}
    task = {"type": "chief", "index": 0} if group.rank == 0 else {"type": "worker", "index": group.rank - 1}
    return {"cluster": cluster, "task": task}
