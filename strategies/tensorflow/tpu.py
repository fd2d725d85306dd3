"""`tf.distribute.TPUStrategy`: one process drives all chips of a slice. Not verified on hardware.

The process on the slice's first host finds the TPU and steps; those on its other hosts hold their chips, which the
TPU's own runtime serves. To find a TPU can take for ever where its address does not answer: each wait has a deadline.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, TypeVar

import tensorflow as tf

from trainwright.core.errors import ResourceError
from trainwright.core.topology import Address, Capabilities, Group
from trainwright.strategies.common.user_code_errors import first_line
from trainwright.strategies.tensorflow.coordinator_engine import TensorFlowCoordinatorEngine

LOCAL, TPU_NAME = "local", "TPU_NAME"
_CHIPS = ("/dev/accel*", "/dev/vfio/[0-9]*")  # as the kernel shows them
TPU_VARIABLES = (TPU_NAME, "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_CONFIG", "COLAB_TPU_ADDR")
_SCHEME = "grpc://"
_PROBE_S = 5.0
_NO_SOFTWARE = "tensorflow-tpu is not installed, and TensorFlow's own package knows no TPU"
_INSTALL = "install tensorflow-tpu in the place of tensorflow: its last release on PyPI is 2.20"
_Result = TypeVar("_Result")


class TPU(TensorFlowCoordinatorEngine):
    """The TPU of this host, or the one that the environment tells of."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        reform="new_process", topology="coordinator", devices_per_worker=None, static_shapes=True, xla=True
    )

    def lead(self, group: Group, servers: Mapping[int, Address]) -> Any:
        """Find the TPU, ready it, and open the strategy on all its cores. Raises ResourceError."""
        until = time.monotonic() + group.deadline_s
        resolver = resolve_tpu(self.name(), until, self._where)
        return tf.distribute.TPUStrategy(resolver)

    def serve(self, group: Group, address: Address) -> Any:
        """The chips of this host are served by the TPU's own runtime."""
        return address

    def name(self) -> str:
        """`local` where there are chips on this host, else what the environment names. Raises ResourceError."""
        if any(map(glob, _CHIPS)):
            return LOCAL
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
    """The TPU that the job names."""

    def name(self) -> str:
        """As the plan says."""
        return os.environ[TPU_NAME]


def resolve_tpu(name: str, until: float, where: str) -> Any:
    """The resolver of a TPU that is connected and ready.

    Args:
        name: `local`, a name that Google Cloud knows, or addresses: `grpc://host:port`, several with commas between.
        until: on the clock of `time.monotonic`.
        where: the rank, for errors.

    Raises:
        ResourceError: says what is missing: software, an address that answers, the TPU, or time.
    """
    _check_software(where)
    for host, port in tpu_addresses(name):
        _probe(host, port, until, where)
    find = tf.distribute.cluster_resolver.TPUClusterResolver

    def ready() -> Any:
        resolver = find(tpu=name)
        if name != LOCAL:
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return resolver

    try:
        return _run_until(ready, until)
    except TimeoutError:
        what, remedy = "did not answer within the deadline", "look whether it runs, and whether its hosts are reached"
    except Exception as error:  # of many kinds: HTTP, gRPC, the runtime's
        what, remedy = f"cannot be used: {first_line(error)}", "look at its name, zone and state: gcloud compute tpus"
        raise ResourceError(f"the TPU {name!r} {what}", where=where, remedy=remedy) from error
    raise ResourceError(f"the TPU {name!r} {what}", where=where, remedy=remedy)


def tpu_addresses(name: str) -> Iterable[tuple[str, int]]:
    """Hosts and ports in a TPU's name; none where it is no list of addresses."""
    for part in name.split(","):
        host, _, port = part.strip().removeprefix(_SCHEME).rpartition(":")
        if host and port.isdecimal():
            yield host.strip("[]"), int(port)


def _run_until(work: Callable[[], _Result], until: float) -> _Result:
    """What work gives. Raises TimeoutError when it is late; its thread is left behind, for nothing can end it."""
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
    """Raise ResourceError where nobody listens: TensorFlow would wait for ever."""
    try:
        socket.create_connection((host, port), min(_PROBE_S, max(until - time.monotonic(), 0.1))).close()
    except OSError as error:
        raise ResourceError(
            f"no TPU answers at {host}:{port} ({error})", where=where, remedy="look at the address, and whether it runs"
        ) from error
