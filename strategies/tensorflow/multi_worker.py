"""`tf.distribute.MultiWorkerMirroredStrategy`: a replica in each worker, gradients summed by collectives."""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta
from typing import Any

import tensorflow as tf

from trainwright.core.errors import JobError
from trainwright.core.topology import Address, Generation, Group, Role
from trainwright.strategies.common.host_address import own_host
from trainwright.strategies.tensorflow.tensorflow_engine import TensorFlowEngine

_TF_CONFIG = "TF_CONFIG"


class MultiWorkerMirrored(TensorFlowEngine):
    """The cluster spec comes from the group: rank 0 is the chief, the others are workers."""

    def __init__(self) -> None:
        super().__init__()
        self._socket: socket.socket | None = None

    def reserve(self, generation: Generation, role: Role) -> Address:
        """Bind a port that the system chooses and keep it until `form`, where TensorFlow's server takes it."""
        self._check_new()
        self._close()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("", 0))
        return Address(host=own_host(), port=self._socket.getsockname()[1])

    def open_strategy(self, group: Group) -> Any:
        """Start this worker's server and meet the others."""
        self._close()
        os.environ[_TF_CONFIG] = json.dumps(_tf_config(group))
        options = tf.distribute.experimental.CommunicationOptions(
            timeout_seconds=timedelta(seconds=group.deadline_s).total_seconds()
        )
        return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)

    def leave(self) -> None:
        """Give an unused port back too."""
        self._close()
        super().leave()

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class AtGivenAddresses(MultiWorkerMirrored):
    """The same at the addresses that the TF_CONFIG of each worker's environment gives it."""

    def reserve(self, generation: Generation, role: Role) -> Address:
        """This worker's own address. Raises JobError where TF_CONFIG does not tell it."""
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
                    f'tf_config="environment": TF_CONFIG of {socket.gethostname()} tells no address of its own: '
                    f'{given!r}; it must hold "cluster" and "task", or leave tf_config out to have addresses chosen'
                ]
            ) from error


def _tf_config(group: Group) -> dict[str, Any]:
    """TF_CONFIG of a member: the chief is index 0 and does a worker's work too."""
    addresses = [f"{peer.address.host}:{peer.address.port}" for peer in group.peers]
    cluster = {"chief": addresses[:1], **({"worker": addresses[1:]} if addresses[1:] else {})}
    task = {"type": "chief", "index": 0} if group.rank == 0 else {"type": "worker", "index": group.rank - 1}
    return {"cluster": cluster, "task": task}
