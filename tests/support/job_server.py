"""A Ray cluster of its own with a job server, in a process beside the tests, as a user's cluster is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.s3_server import free_ports

CLUSTER = """
import functools, json, sys
import ray
from ray._private.parameter import RayParams
from ray._private.utils import write_ray_address

# Its usual port is another cluster's, where there is one on this machine.
RayParams.__init__ = functools.partialmethod(RayParams.__init__, dashboard_agent_listen_port=int(sys.argv[2]))
held = ray.init(
    address="local", num_cpus=2, include_dashboard=True, dashboard_port=0, _temp_dir=sys.argv[1], log_to_driver=False,
    logging_level="ERROR",
)
# As `ray start` does: a job's driver would else be given any cluster that it finds on this machine.
write_ray_address(held.address_info["gcs_address"], sys.argv[1])
print(json.dumps({"address": "http://" + held.dashboard_url, "gcs": held.address_info["gcs_address"]}), flush=True)
sys.stdin.read()
ray.shutdown()
"""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A running one.

    Attributes:
        address: of its job server.
        gcs: address of its register.
        folder: of everything that it writes.
    """

    address: str
    gcs: str
    folder: Path

    def keys(self) -> list[bytes]:
        """What submitted jobs keep in its store of keys."""
        from ray import _raylet

        raylet: Any = _raylet
        found: list[bytes] = raylet.GcsClient(address=self.gcs).internal_kv_keys(b"", b"trainwright", 10)
        return found


@contextmanager
def serving() -> Iterator[Cluster]:
    """A cluster without credentials in its environment; it ends with the block."""
    folder = tempfile.mkdtemp(prefix="tw-", dir="/tmp")  # short: sockets lie in it
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "RAY_ADDRESS", "TW_"))}
    environment = {**kept, "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])}
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER, folder, str(free_ports(1)[0])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, "RAY_AUTH_MODE": "disabled"},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        yield Cluster(**told, folder=Path(folder))
    finally:
        process.communicate(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)
