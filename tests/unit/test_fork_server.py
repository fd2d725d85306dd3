"""The fork server of a node: who may order, when it ends, and what a worker does where there is none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ray.exceptions import ActorDiedError

from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.runtime import fork_server, forked_workers
from trainwright.runtime.fork_server import order, order_command, send_order, socket_name, spawn
from trainwright.runtime.forked_workers import ForkedWorkers

SCRIPT = """
import json, os, sys
print(json.dumps([sys.argv[1:], "graphlib" in sys.modules, os.environ.get("RAY_MARK")]))
"""
NODE, KIND = "node-of-a-test", "an.engine/1"
NOBODY = 65534


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


Serve = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server of this process's environment, for `NODE` and `KIND`."""
    started = []

    def start(*modules: str, until: int = 0, **options: Any) -> subprocess.Popen[bytes]:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + socket_name(NODE, KIND, os.environ))
            started.append(spawn(listener, modules, os.environ, until=until or os.getpid(), **options))
        return started[-1]

    yield start
    for server in started:
        server.kill()
        server.wait()


def worker(script: Path, *arguments: str, **variables: str) -> tuple[list[Any], str]:
    """Run what Ray runs to start a worker of `KIND`; return what it prints."""
    command = f"exec {order_command(KIND)} {script} {' '.join(arguments)}"
    done = subprocess.run(
        ["bash", "-c", command], env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout), done.stderr


def test_a_worker_is_forked_with_its_own_variables_of_ray(serve: Serve, script: Path) -> None:
    serve("graphlib")
    expected = [[f"--node-id={NODE}", "--more"], True, "its own"]
    assert worker(script, *expected[0], RAY_MARK="its own") == (expected, "")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [([f"--node-id={NODE}"], {"OTHER": "1"}), (["--node-id=another"], {}), ([], {})],
    ids=["environment", "node", "no-node"],
)
def test_a_worker_of_another_environment_or_node_imports_by_itself(
    serve: Serve, script: Path, arguments: list[str], variables: dict[str, str]
) -> None:
    serve("graphlib")
    assert worker(script, *arguments, **variables) == ([arguments, False, None], "")


def test_a_worker_without_a_server_imports_by_itself(script: Path) -> None:
    assert worker(script, f"--node-id={NODE}") == ([[f"--node-id={NODE}"], False, None], "")


def test_a_server_ends_once_a_file_that_it_imported_has_changed(
    serve: Serve, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "a_library.py"
    library.write_text("version = 1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = serve("a_library", "graphlib")
    assert worker(script, f"--node-id={NODE}")[0][1]
    os.utime(library, (1, 1))
    assert not worker(script, f"--node-id={NODE}")[0][1]
    assert server.wait(30) == 0


def test_a_server_ends_with_the_process_that_it_serves(serve: Serve) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as raylet:
        server = serve(until=raylet.pid)
        assert server.poll() is None
        raylet.communicate(b"\n", timeout=30)
        assert server.wait(30) == 0


def test_a_server_that_nobody_uses_ends(serve: Serve, script: Path, tmp_path: Path) -> None:
    server = serve(idle_s=1.0)
    (tmp_path / "long.py").write_text("import time; print('begun', flush=True); time.sleep(3); print('done')")
    done = subprocess.run(
        ["bash", "-c", f"exec {order_command(KIND)} {tmp_path / 'long.py'} --node-id={NODE}"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "begun\ndone\n", "a server that has a child is used"
    assert server.wait(30) == 0


def test_a_server_outlives_who_started_it(tmp_path: Path, script: Path) -> None:
    """Ray ends a worker's children with it."""
    name = socket_name(NODE, KIND, os.environ)
    starts = (
        f"from trainwright.runtime.fork_server import start; start({name!r}, ['graphlib'], __import__('os').environ,"
    )
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as raylet:
        command = [sys.executable, "-c", f"{starts} until={raylet.pid})"]
        for _ in range(2):  # the second one finds it
            subprocess.run(command, check=True, timeout=60)
        assert worker(script, f"--node-id={NODE}")[0][1]
        raylet.communicate(b"\n", timeout=30)
    deadline = time.monotonic() + 30.0
    with pytest.raises((ConnectionRefusedError, ConnectionResetError)):
        while time.monotonic() < deadline:
            order(name, [str(script)])


def test_a_torn_order_does_not_end_the_server(serve: Serve, script: Path) -> None:
    serve("graphlib")
    for data in (b"", b'{"command": ['):
        with socket.socket(socket.AF_UNIX) as line:
            line.connect("\0" + socket_name(NODE, KIND, os.environ))
            line.sendall(data)
    assert worker(script, f"--node-id={NODE}")[0][1]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_can_neither_order_nor_pretend(serve: Serve, script: Path) -> None:
    serve("graphlib")
    name, folder = socket_name(NODE, KIND, os.environ), str(Path(fork_server.__file__).parent)
    asks = f"""
import os, sys, socket
sys.path.insert(0, {folder!r})
import fork_server
os.setuid({NOBODY})
with socket.socket(socket.AF_UNIX) as line:
    try:
        fork_server.send_order(line, {name!r}, ["script"], {{}}, "/", (0, 1, 2))
    except PermissionError as error:
        print(error)
fork_server._user_of = lambda line: os.getuid()
try:
    fork_server.order({name!r}, ["script"])
except ConnectionError:
    print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", asks], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == [f"fork server {name} belongs to another user", "refused"], done.stderr
    assert worker(script, f"--node-id={NODE}")[0][1], "the server goes on"


def test_one_that_does_not_answer_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "FORK_S", 0.2)
    name = socket_name(NODE, "silent", os.environ)
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as line:
        silent.bind(f"\0{name}")
        silent.listen()
        with pytest.raises(TimeoutError):
            send_order(line, name, ["script"], {}, "/", (0, 1, 2))


# --- The driver -------------------------------------------------------------------------------------------------------


class Cluster:
    """What a driver asks of Ray, without Ray."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *nodes: str, **runtime_env: Any) -> None:
        self.kept: dict[str, str] = {}
        listed = [{"NodeID": node, "Alive": True, "Resources": {"CPU": 2.0}} for node in nodes]
        listed.append({"NodeID": "head", "Alive": True, "Resources": {}})
        monkeypatch.setenv("TRAINWRIGHT_FORK_SERVER", "")
        monkeypatch.setattr(forked_workers.ray, "nodes", lambda: listed)
        context = type("Context", (), {"runtime_env": runtime_env})
        monkeypatch.setattr(forked_workers.ray, "get_runtime_context", context)
        monkeypatch.setattr(forked_workers.ray_compat, "published", lambda topic: dict(self.kept))
        monkeypatch.setattr(
            forked_workers.ray_compat, "publish", lambda topic, name, value: self.kept.update({name: value})
        )


def plan(engine: str = "torch.engines.data_parallel:DataParallel", **changes: Any) -> Plan:
    backend, resources = changes.pop("keras_backend", ""), WorkerResources(cpus=1.0, **changes)
    return Plan(
        strategy="data_parallel", engine=f"trainwright.strategies.{engine}", mesh=Mesh(data=2), batch_size=2,
        placement=resources, keras_backend=backend,
    )  # fmt: skip


def forked(plan: Plan, note: Callable[[str], None], *, usable: bool = True) -> ForkedWorkers:
    """Those of a driver that asks no worker."""
    return ForkedWorkers(plan, pytest.fail, pytest.fail, None, note, usable=usable)  # type: ignore[arg-type]


def test_workers_are_forked_where_a_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, "a", "b")
    first = forked(plan(), pytest.fail)
    assert first.options(None) == {} == first.options("a")
    first.started("a", "python order")
    expected = {"runtime_env": {"py_executable": "python order"}}
    assert (first.options("a"), first.options("b"), first.options(None)) == (expected, {}, {})
    first.started("b", "python order")
    assert first.options("b") == first.options(None) == expected
    assert forked(plan(), pytest.fail).options(None) == expected, "the next run finds them"
    first.started("b", "elsewhere/python order")
    assert first.options("a") == first.options("b") == {}, "Ray may move a worker to a node without that Python"
    assert cluster.kept == {"a": "python order", "b": "elsewhere/python order"}


def test_one_that_fails_is_told_once_and_none_is_forked_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster(monkeypatch, "a")
    told: list[str] = []
    workers = forked(plan(), told.append)
    workers.started("a", "python order")
    for _ in range(2):
        workers.failed("it was killed")
    asked: list[int] = []
    workers.start_server("a", object(), then=lambda: asked.append(1))
    assert workers.options("a") == {} and asked == [1]
    assert told == ["workers are no longer forked, each imports by itself: it was killed"]


def test_without_a_standby_a_server_is_started_later_and_once_for_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster(monkeypatch, "a", "b")
    due: list[Callable[[], None]] = []
    actor, lease = mock.Mock(), SimpleNamespace(token=7)
    workers = ForkedWorkers(plan(), lambda *_: None, lambda _, call: due.append(call), lease, pytest.fail, usable=True)  # type: ignore[arg-type]
    for node, found in (("a", actor), ("a", actor), ("b", None)):
        workers.start_server_later(node, lambda found=found: found)  # type: ignore[misc]
    assert len(due) == 2 and not actor.mock_calls
    for call in due:
        call()
    module = "trainwright.strategies.torch.engines.data_parallel"
    assert actor.mock_calls == [mock.call.start_fork_server.remote(module, 1, 7)], "the worker of `b` has ended"


def test_a_worker_that_dies_meanwhile_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster(monkeypatch, "a")
    answers: list[Callable[[Future[Any]], None]] = []
    lease, actor, done = SimpleNamespace(token=1), mock.Mock(), list[int]()
    workers = ForkedWorkers(plan(), lambda _, then: answers.append(then), pytest.fail, lease, pytest.fail, usable=True)  # type: ignore[arg-type]
    workers.start_server("a", actor, then=lambda: done.append(1))
    assert not done
    answer: Future[Any] = Future()
    answer.set_exception(ActorDiedError())
    answers[0](answer)
    assert done == [1] and workers.options("a") == {}


@pytest.mark.parametrize(
    ("switch", "changes", "runtime_env", "forks"),
    [
        ("", {}, {"env_vars": {"A": "1"}, "working_dir": "gcs://package.zip"}, True),
        ("off", {}, {}, False),
        ("", {"accelerators": 1, "accelerator": "GPU"}, {}, False),
        ("on", {"accelerators": 1, "accelerator": "GPU"}, {}, True),
        ("", {"engine": "tensorflow.strategy_engines:MultiWorker", "keras_backend": "tensorflow"}, {}, True),
        ("", {"engine": "tensorflow.strategy_engines:MultiWorker", "keras_backend": "jax"}, {}, False),
        ("", {}, {"pip": ["a"]}, False),
        ("", {}, {"py_executable": "nice python"}, False),
        ("", {}, {"image_uri": "an image"}, False),
    ],
)  # fmt: skip
def test_which_workers_are_forked(
    monkeypatch: pytest.MonkeyPatch, switch: str, changes: dict[str, Any], runtime_env: dict[str, Any], forks: bool
) -> None:
    Cluster(monkeypatch, "a", **runtime_env)
    monkeypatch.setenv("TRAINWRIGHT_FORK_SERVER", switch)
    workers = forked(plan(**changes), pytest.fail)
    workers.started("a", "python order")
    assert bool(workers.options("a")) is forks
    placed_by_others = forked(plan(**changes), pytest.fail, usable=False)
    placed_by_others.started("a", "python order")
    assert placed_by_others.options("a") == {}
