"""`tf.distribute.TPUStrategy`: one process drives all chips of a slice. Not verified on hardware.

The process on the slice's first host connects to the TPU and steps; the processes on other hosts only hold their
chips, which the TPU's runtime serves. Connecting can block forever if an address does not answer, so each wait has a
deadline.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, TypeVar

import tensorflow as tf

from trainwright.core.errors import ResourceError
from trainwright.core.topology import Address, Capabilities, Group
from trainwright.strategies.common.user_code_errors import first_line
from trainwright.strategies.tensorflow.coordinator_engine import TensorFlowCoordinatorEngine

_LOCAL, TPU_NAME = "local", "TPU_NAME"
_CHIPS = ("/dev/accel*", "/dev/vfio/[0-9]*")  # device files of chips
TPU_VARIABLES = (TPU_NAME, "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_CONFIG", "COLAB_TPU_ADDR")
_SCHEME = "grpc://"
_PROBE_S = 5.0
_NO_SOFTWARE = "tensorflow-tpu is not installed, and the package tensorflow does not support TPUs"
_INSTALL = "install tensorflow-tpu instead of tensorflow; its last release on PyPI is 2.20"
_Result = TypeVar("_Result")


class TPU(TensorFlowCoordinatorEngine):
    """Engine for the TPU of this host, or the one that the environment names."""

    capabilities: ClassVar[Capabilities] = replace(
        TensorFlowCoordinatorEngine.capabilities, topology="coordinator", devices_per_worker=None, static_shapes=True
    )

    def lead(self, group: Group, servers: Mapping[int, Address]) -> Any:
        """Connect to the TPU, initialize it, and open the strategy on all its cores. Raises ResourceError."""
        until = time.monotonic() + group.deadline_s
        resolver = resolve_tpu(self.name(), until, self._where)
        return tf.distribute.TPUStrategy(resolver)

    def serve(self, group: Group, address: Address) -> Any:
        """Do nothing: the TPU's runtime serves this host's chips."""
        return address

    def name(self) -> str:
        """Return `local` if this host has chips, else the name in the environment. Raises ResourceError."""
        if any(map(glob, _CHIPS)):
            return _LOCAL
        told = next((os.environ[name] for name in TPU_VARIABLES if os.environ.get(name)), None)
        if told is None:
            raise ResourceError(
                f"there is no TPU: this host has no {' or '.join(_CHIPS)}, and none of "
                f"{', '.join(TPU_VARIABLES)} is set",
                where=self._where,
                remedy="run on a host with a TPU, or name it: tpu=",
            )
        return told


class NamedTPU(TPU):
    """Engine for the TPU that the job names."""

    def name(self) -> str:
        """Return the name in the plan."""
        return os.environ[TPU_NAME]


def resolve_tpu(name: str, until: float, where: str) -> Any:
    """Return the resolver of a TPU, connected and initialized.

    Args:
        name: `local`, a name in Google Cloud, or addresses: `grpc://host:port`, several with commas between.
        until: on the clock of `time.monotonic`.
        where: the rank, for errors.

    Raises:
        ResourceError: names what is missing: software, an address that answers, the TPU, or time.
    """
    _check_software(where)
    for host, port in tpu_addresses(name):
        _probe(host, port, until, where)
    find = tf.distribute.cluster_resolver.TPUClusterResolver

    def ready() -> Any:
        resolver = find(tpu=name)
        if name != _LOCAL:
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return resolver

    try:
        return _run_until(ready, until)
    except TimeoutError:
        what, remedy = "did not answer within the deadline", "check that it runs and that its hosts can be reached"
    except Exception as error:  # of many kinds: HTTP, gRPC, the runtime's
        what, remedy = f"cannot be used: {first_line(error)}", "check its name, zone and state: gcloud compute tpus"
        raise ResourceError(f"the TPU {name!r} {what}", where=where, remedy=remedy) from error
    raise ResourceError(f"the TPU {name!r} {what}", where=where, remedy=remedy)


def tpu_addresses(name: str) -> Iterable[tuple[str, int]]:
    """Yield hosts and ports in a TPU's name; none if it is not a list of addresses."""
    for part in name.split(","):
        host, _, port = part.strip().removeprefix(_SCHEME).rpartition(":")
        if host and port.isdecimal():
            yield host.strip("[]"), int(port)


def _run_until(work: Callable[[], _Result], until: float) -> _Result:
    """Return the result of work. Raises TimeoutError at the deadline, and abandons the thread."""
    found: list[_Result] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:  # raised below
            failed.append(error)

    thread = threading.Thread(target=run, name="tpu", daemon=True)
    thread.start()
    thread.join(max(until - time.monotonic(), 0.0))
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError
    return found[0]


def _check_software(where: str) -> None:
    try:
        version("tensorflow-tpu")
    except PackageNotFoundError:
        if not os.environ.get("TPU_LIBRARY_PATH"):
            raise ResourceError(_NO_SOFTWARE, where=where, remedy=_INSTALL) from None


def _probe(host: str, port: int, until: float, where: str) -> None:
    """Raise ResourceError if no process listens: TensorFlow would wait forever."""
    try:
        socket.create_connection((host, port), min(_PROBE_S, max(until - time.monotonic(), 0.1))).close()
    except OSError as error:
        raise ResourceError(
            f"no TPU answers at {host}:{port} ({error})", where=where, remedy="check the address, and that the TPU runs"
        ) from error
