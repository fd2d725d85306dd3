"""What the tests' clusters start in place of Ray's `setup_worker.py`, and the process that forks their workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray._private.runtime_env.context import RuntimeEnvContext

from tests.support import ray_worker_start
from tests.support.fork_server import Forked, fork_server
from tests.support.ray_worker_start import CONTEXT, bare, rays_own
from trainwright.runtime.fork_server import request_fork

SCRIPT = """
import json, os, sys
found = {"argv": sys.argv, "path": sys.path[0], "mark": os.environ.get("MARK"), "home": os.environ.get("HOME")}
found |= {"folder": os.getcwd(), "name": __name__, "group": os.getpgid(0) == os.getpid()}
found |= {"pid": os.getpid(), "had": "graphlib" in sys.modules}
found["random"] = __import__("numpy").random.random()
os.write(1, (json.dumps(found) + chr(10)).encode())  # in one go: two of them share the stream
os.write(2, ("done" + chr(10)).encode())
"""


def test_a_worker_without_an_environment_is_forked() -> None:
    for context in ([], [f"{CONTEXT}{{}}"]):
        arguments = ["default_worker.py", *context, "--language=PYTHON", "--node-id=1"]
        assert bare(arguments) == (["default_worker.py", "--node-id=1"], {})


def test_one_with_variables_alone_too() -> None:
    context = RuntimeEnvContext(env_vars={"A": "1"}).serialize()
    assert bare(["default_worker.py", CONTEXT + context, "--language=PYTHON"]) == (["default_worker.py"], {"A": "1"})


@pytest.mark.parametrize(
    "context",
    [
        RuntimeEnvContext(env_vars={"A": "${B}"}),
        RuntimeEnvContext(py_executable="nice python"),
        RuntimeEnvContext(command_prefix=["cd", "there", "&&"]),
        RuntimeEnvContext(override_worker_entrypoint="other.py"),
    ],
    ids=["expanded", "executable", "prefix", "entry"],
)
def test_any_other_environment_is_left_to_ray(context: RuntimeEnvContext) -> None:
    assert bare(["default_worker.py", CONTEXT + context.serialize(), "--language=PYTHON"]) is None


def test_rays_own_is_found() -> None:
    assert Path(rays_own()).is_relative_to(Path(ray.__file__).parent) and Path(rays_own()).exists()


def test_a_script_finds_ray_beside_the_tests_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rays_own()
    monkeypatch.syspath_prepend(str(Path(ray_worker_start.__file__).parent))
    assert rays_own() == expected


@pytest.fixture
def named() -> Iterator[str]:
    with fork_server(["graphlib"]) as name:
        yield name


def test_a_forked_process_is_as_if_it_had_been_started(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "code" / "script.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")
    monkeypatch.setenv("MARK", "of this test")
    children, lines = zip(*(request_fork(named, [str(script), f"--{number}"]) for number in range(2)), strict=True)
    deadline = time.monotonic() + 30.0
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "it did not end, or nobody waited for it"
        time.sleep(0.01)
    for line in lines:
        line.close()
    out, err = capfd.readouterr()
    found = sorted((json.loads(line) for line in out.splitlines()), key=lambda one: one["argv"])
    draws = {one.pop("random") for one in found}
    same = {"path": str(script.parent), "mark": "of this test", "home": None, "folder": str(tmp_path)}
    same |= {"name": "__main__", "group": True, "had": True}
    assert found == [same | {"argv": [str(script), f"--{n}"], "pid": child} for n, child in enumerate(children)]
    assert len(draws) == 2 and err == "done\ndone\n"


def test_a_forked_driver_is_used_as_any_process(named: str, tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text("import sys; print(sys.argv, __name__); sys.stderr.write('no'); sys.exit(3)\n")
    (tmp_path / "still.py").write_text("import signal; print('begun', flush=True); signal.pause()\n")
    environment = dict(os.environ)
    told = Forked(named, ["-m", "told", "--more"], environment, str(tmp_path))
    assert told.communicate(timeout=30) == (f"['{tmp_path / 'told.py'}', '--more'] __main__\n", "no")
    assert told.returncode == told.poll() == told.wait() == 3
    still = Forked(named, ["-m", "still"], environment, str(tmp_path))
    with pytest.raises(subprocess.TimeoutExpired):
        still.communicate(timeout=0.2)
    assert still.poll() is None and os.getpgid(still.pid) == still.pid
    still.kill()
    assert still.wait(timeout=30) == -signal.SIGKILL
    still.kill()


def test_it_ends_with_who_made_it() -> None:
    with fork_server([]) as name:
        pass
    deadline = time.monotonic() + 30.0
    with pytest.raises(ConnectionRefusedError):
        while time.monotonic() < deadline:
            with socket.socket(socket.AF_UNIX) as line:
                line.connect(f"\0{name}")
            time.sleep(0.05)


def test_one_that_cannot_import_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("import there_is_no_such_module\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(OSError, match="No module named 'there_is_no_such_module'"), fork_server(["broken_module"]):
        pass
