"""The start command of cluster.yaml on a machine of its own: its ports answer only who has the token."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from tests.support.namespaces import machine

ROOT = Path(__file__).resolve().parents[2]
# Answers to a request without, with a wrong, and with the right token; and Ray's own client without one.
ASK = """
import os, pathlib, sys, urllib.error, urllib.request
def status(token):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        url = "http://127.0.0.1:8265/api/jobs/"
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20).status
    except urllib.error.HTTPError as error:
        return error.code
token = pathlib.Path(sys.argv[1]).read_text().strip()
print(status(""), status("wrong"), status(token))
"""


@pytest.fixture
def start() -> str:
    """What the file starts the head with; autoscaling asks a cloud."""
    commands = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))["head_start_ray_commands"]
    (command,) = [command for command in commands if "ray start" in command]
    return re.sub(r"--autoscaling-config=\S+", "--num-cpus=1", command)


def test_the_head_of_the_file_refuses_who_has_no_token(start: str, tmp_path: Path) -> None:
    token = tmp_path / "home" / ".ray" / "auth_token"
    spill = tmp_path / "spill"
    token.parent.mkdir(parents=True)
    token.write_text("4f2a7c1d9b8e4e0fa1b2c3d4e5f60718", encoding="utf-8")
    token.chmod(0o600)
    small = re.sub(r"--object-store-memory=\$\(.*?\)(?= --)", "--object-store-memory=100000000", start)
    assert small != start
    short = tempfile.mkdtemp(prefix="r", dir="/tmp")  # paths of sockets are short
    command = small.replace("/tmp/ray/spill", str(spill)) + f" --temp-dir={short}/r --disable-usage-stats"
    home = {"HOME": str(tmp_path / "home")}
    python = str(ROOT / ".venv" / "bin") if (ROOT / ".venv").is_dir() else ""
    with machine() as host:
        host.run("sh", "-c", f"PATH={python}:$PATH; {command}", env=home, deadline_s=90)
        host.await_port(8265)
        assert host.run(sys.executable, "-c", ASK, token).split() == ["401", "403", "200"]
        listening = host.run("sh", "-c", "cat /proc/net/tcp")
        assert "0100007F:2049" in listening and "00000000:2049" not in listening, "8265 on loopback alone"
    shutil.rmtree(short)
    assert spill.is_dir()


def test_a_quarter_of_the_memory_is_what_the_file_computes(start: str) -> None:
    found = re.search(r"--object-store-memory=\$\((.*?)\)(?= --)", start)
    assert found
    with machine() as host:
        said = int(host.run("sh", "-c", found[1]))
    (total,) = re.findall(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
    assert said == int(total) * 256
