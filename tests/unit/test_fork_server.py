"""The fork server of a node: who may use it, when it ends, and what a worker does without one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ray.exceptions import ActorDiedError

from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.runtime import fork_server, forked_workers
from trainwright.runtime.fork_server import await_ready, request_fork, socket_name, start, worker_command
from trainwright.runtime.forked_workers import ForkedWorkers

SCRIPT = """
import json, os, sys
print(json.dumps([sys.argv[1:], "graphlib" in sys.modules, os.environ.get("RAY_MARK")]))
"""
NODE, KIND, NOBODY = f"node-{os.getpid()}", "an.engine/1", 65534
MINE = f"--node-id={NODE}"


def environment() -> dict[str, str]:
    """Of this process, but for what pytest changes in the course of a test."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@pytest.fixture
def name() -> str:
    """The name of the socket of the server for that environment, `NODE` and `KIND`."""
    return socket_name(NODE, KIND, environment())


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


@pytest.fixture
def serve(name: str) -> Iterator[Callable[..., int]]:
    """Start that server; return its process id."""
    held: list[socket.socket] = []

    def begin(*modules: str, until: int = 0, idle_s: float = 0.1) -> int:
        held.append(start(name, ["graphlib", *modules], environment(), until=until or os.getpid(), idle_s=idle_s))
        await_ready(held[-1], 60.0)
        return server_of(name)

    yield begin
    for line in held:
        line.close()
    await_end(name)


def server_of(name: str) -> int:
    """The process id of a server."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if name in (folder / "cmdline").read_text():
                return int(folder.name)
        except OSError:  # it ended meanwhile
            continue
    raise AssertionError(f"no server {name}")


def await_end(name: str) -> None:
    """Wait until nobody listens."""
    deadline = time.monotonic() + 30.0
    with pytest.raises(ConnectionRefusedError):
        while time.monotonic() < deadline:
            with socket.socket(socket.AF_UNIX) as line:
                line.connect(f"\0{name}")
            time.sleep(0.05)


def worker(script: Path, *arguments: str, **variables: str) -> list[Any]:
    """Run what Ray runs to start a worker of `KIND`; return what it prints."""
    command = f"exec {worker_command(KIND)} {script} {' '.join(arguments)}"
    done = subprocess.run(
        ["bash", "-c", command],
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def test_a_worker_is_forked_with_its_own_variables_of_ray(serve: Callable[..., int], script: Path) -> None:
    serve()
    assert worker(script, MINE, "--more", RAY_MARK="its own") == [[MINE, "--more"], True, "its own"]


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [([MINE], {"OTHER": "1"}), (["--node-id=another"], {}), ([], {})],
    ids=["environment", "node", "no-node"],
)
def test_a_worker_of_another_environment_or_node_imports_by_itself(
    serve: Callable[..., int], script: Path, arguments: list[str], variables: dict[str, str]
) -> None:
    serve()
    assert worker(script, *arguments, **variables) == [arguments, False, None]


def test_a_worker_without_a_server_imports_by_itself(name: str, script: Path) -> None:
    assert worker(script, MINE) == [[MINE], False, None]


def test_large_environments_fit(serve: Callable[..., int], script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket takes some 200 KB at once; Kubernetes' variables of services are more."""
    serve()
    large = {f"RAY_SERVICE_{number}": "x" * 100_000 for number in range(5)}
    assert worker(script, MINE, **large) == [[MINE], True, None]


def test_a_server_forks_no_more_once_a_file_that_it_imported_has_changed(
    name: str, serve: Callable[..., int], script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, long = tmp_path / "a_library.py", tmp_path / "long.py"
    library.write_text("version = 1\n")
    long.write_text("print(0, flush=True); input()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    name = socket_name(NODE, KIND, environment())
    with start(name, ["graphlib", "a_library"], environment(), until=os.getpid(), idle_s=0.1) as line:
        await_ready(line, 60.0)
        server, (read, write) = server_of(name), os.pipe()
        child, status = request_fork(name, [str(long)], streams=(read, 1, 2))
        assert worker(script, MINE)[1]
        os.utime(library, (1, 1))
        assert not worker(script, MINE)[1]
        assert os.path.exists(f"/proc/{server}"), "it waits for what it has forked"
        os.write(write, b"\n")
        assert status.recv(32) == b"0" and not os.path.exists(f"/proc/{child}"), "nothing is left of a child"
    await_gone(server)
    for each in (read, write):
        os.close(each)
    status.close()


def await_gone(process: int) -> None:
    """Wait for the end of a process that is no child of this one."""
    deadline = time.monotonic() + 30.0
    while os.path.exists(f"/proc/{process}"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_ends_with_the_process_that_it_serves(serve: Callable[..., int]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as raylet:
        server = serve(until=raylet.pid, idle_s=1000.0)
        raylet.communicate(b"\n", timeout=30)
        await_gone(server)


def test_a_server_stays_while_somebody_holds_it_or_it_has_a_child(
    name: str, serve: Callable[..., int], tmp_path: Path
) -> None:
    (tmp_path / "long.py").write_text("import time; time.sleep(2); print('done')")
    server = serve(idle_s=0.1)
    held = start(name, [], environment(), until=os.getpid())  # finds that one
    with request_fork(name, [str(tmp_path / "long.py")], streams=(0, 1, 2))[1] as status:
        held.close()
        assert status.recv(32) == b"0"
    assert server_of(name) == server, "the fixture holds it"


def test_a_server_that_is_held_does_not_end_however_seldom_it_runs(name: str) -> None:
    """On a busy machine any time may pass between two of its steps."""
    ends = f"""
import itertools, os, socket, sys, threading, time
sys.path.insert(0, {str(Path(fork_server.__file__).parent)!r})
import fork_server
times = itertools.count(0, 1000)
time.monotonic = lambda: next(times)
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind("\\0{name}")
    listener.listen()
    held = fork_server._send_request({name!r}, {{"action": "hold"}})
    threading.Timer(0.5, held.close).start()
    fork_server._Server(listener, os.getpid(), idle_s=0.1).serve()
    print(held.fileno())
"""
    ran = subprocess.run([sys.executable, "-c", ends], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "-1\n", "it ended only once nobody held it"


def test_a_fault_of_a_server_is_written_where_its_client_writes_errors(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with start(name, [], environment(), until=os.getpid(), idle_s=0.1) as line:
        await_ready(line, 60.0)
        server = server_of(name)
        os.kill(server, signal.SIGINT)
        await_gone(server)
    assert "KeyboardInterrupt" in capfd.readouterr().err


def test_a_server_ends_when_nobody_holds_it(name: str) -> None:
    start(name, ["graphlib"], environment(), until=os.getpid(), idle_s=0.1).close()
    await_end(name)


def test_a_server_is_no_child_of_who_started_it(serve: Callable[..., int]) -> None:
    """Ray ends a worker's children with it."""
    parent = Path(f"/proc/{serve()}/stat").read_text().rpartition(")")[2].split()[1]
    assert int(parent) != os.getpid()


def test_a_server_that_cannot_import_says_why(name: str) -> None:
    with (
        start(name, ["there_is_no_such_module"], environment(), until=os.getpid()) as line,
        pytest.raises(OSError, match="No module named 'there_is_no_such_module'"),
    ):
        await_ready(line, 60.0)
    optional = [fork_server.OPTIONAL, "there_is_no_such_module"]
    with start(name, ["graphlib", *optional], environment(), until=os.getpid(), idle_s=0.1) as line:
        await_ready(line, 60.0)
    await_end(name)


def test_a_server_that_cannot_start_says_why(name: str) -> None:
    with pytest.raises(OSError, match="invalid literal for int"):
        start(name, [], environment(), until="no number")  # type: ignore[arg-type]


def test_torn_requests_neither_end_the_server_nor_leave_descriptors(
    name: str, serve: Callable[..., int], script: Path
) -> None:
    server = serve()
    before = len(os.listdir(f"/proc/{server}/fd"))
    for data in (b"", b"12345678", b"\x05" + bytes(7) + b"{"):
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as line:
                line.connect(f"\0{name}")
                if data:
                    socket.send_fds(line, [data], (0, 1, 2))
    assert worker(script, MINE)[1]
    deadline = time.monotonic() + 30.0
    while len(os.listdir(f"/proc/{server}/fd")) != before:
        assert time.monotonic() < deadline, os.listdir(f"/proc/{server}/fd")
        time.sleep(0.02)


def test_nothing_runs_that_nobody_waits_for(
    name: str, serve: Callable[..., int], script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client of a frozen server starts the worker itself; the worker must not start twice."""
    server, proof = serve(), tmp_path / "forked"
    (tmp_path / "proof.py").write_text(f"open({str(proof)!r}, 'w')")
    os.kill(server, signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch, pytest.raises(TimeoutError):
            patch.setattr(fork_server, "ANSWER_S", 0.3)
            request_fork(name, [str(tmp_path / "proof.py")])
    finally:
        os.kill(server, signal.SIGCONT)
    assert worker(script, MINE)[1], "it serves again"
    assert not proof.exists()
    with request_fork(name, [str(tmp_path / "proof.py")])[1] as status:
        assert status.recv(32) == b"0" and proof.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_can_neither_use_a_server_nor_pose_as_one(
    name: str, serve: Callable[..., int], script: Path
) -> None:
    serve()
    asks = f"""
import os, sys, socket
sys.path.insert(0, {str(Path(fork_server.__file__).parent)!r})
import fork_server
os.setuid({NOBODY})
try:
    fork_server.request_fork({name!r}, ["script"])
except PermissionError as error:
    print(error)
fork_server._user_of = lambda line: os.getuid()
try:
    fork_server.request_fork({name!r}, ["script"])
except ConnectionError:
    print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", asks], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == [f"fork server {name} belongs to another user", "refused"], done.stderr
    assert worker(script, MINE)[1], "the server goes on"


# --- The driver -------------------------------------------------------------------------------------------------------

COMMAND = worker_command("trainwright.strategies.torch.engines.data_parallel/1")
FORKED = {"runtime_env": {"py_executable": COMMAND}}


class Driver:
    """What a driver asks of Ray and is told, without Ray.

    Attributes:
        kept: in the key-value store: nodes with a fork server.
        told: notes for the user.
        answers: who waits for the answer of an actor.
        due: what is to be called after some seconds.
        actor: that is asked.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *nodes: str, **runtime_env: Any) -> None:
        self.kept, self.told, self.actor = set[str](), list[str](), mock.Mock()
        self.answers: list[Callable[[Future[Any]], None]] = []
        self.due: list[tuple[float, Callable[[], None]]] = []
        listed = [{"NodeID": node, "Alive": True, "Resources": {"CPU": 2.0}} for node in nodes]
        listed.append({"NodeID": "head", "Alive": True, "Resources": {}})
        monkeypatch.setenv("TRAINWRIGHT_FORK_SERVER", "")
        monkeypatch.setattr(forked_workers.ray, "nodes", lambda: listed)
        monkeypatch.setattr(forked_workers.ray, "get_runtime_context", lambda: SimpleNamespace(runtime_env=runtime_env))
        store = forked_workers.ray_compat
        monkeypatch.setattr(store, "published", lambda topic: {*self.kept} if topic == COMMAND else set())
        monkeypatch.setattr(store, "retract", lambda topic, node: self.kept.discard(node))

    def workers(self, *, usable: bool = True, **changes: Any) -> ForkedWorkers:
        """Those of a run with a plan."""
        engine = changes.pop("engine", "torch.engines.data_parallel:DataParallel")
        plan = Plan(
            strategy="data_parallel", engine=f"trainwright.strategies.{engine}", mesh=Mesh(data=2), batch_size=2,
            keras_backend=changes.pop("keras_backend", ""), placement=WorkerResources(cpus=1.0, **changes),
        )  # fmt: skip
        lease: Any = SimpleNamespace(token=7)
        return ForkedWorkers(
            plan, lambda _, then: self.answers.append(then), lambda after_s, call: self.due.append((after_s, call)),
            lease, self.told.append, usable=usable,
        )  # fmt: skip

    def answer(self, value: str | Exception) -> None:
        """Of the actor, to who waits for it longest."""
        answer: Future[Any] = Future()
        if isinstance(value, Exception):
            answer.set_exception(value)
        else:
            answer.set_result(value)
        self.answers.pop(0)(answer)


def test_a_server_that_ends_as_it_is_asked_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends so where it notices only then that a file was changed."""
    told, ends = list[str](), [socket.socketpair() for _ in range(2)]
    ends[0][1].close()
    ends[1][1].sendall(b"ready")
    context = SimpleNamespace(get_node_id=lambda: "a", runtime_env={})
    monkeypatch.setattr(forked_workers.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(forked_workers.ray_compat, "publish", lambda command, node: told.append(node))
    monkeypatch.setattr(fork_server, "initial_environment", lambda: {"RAY_RAYLET_PID": str(os.getpid())})
    answers: list[Any] = [BrokenPipeError(), ends[1][0]]
    start = mock.Mock(side_effect=answers)
    monkeypatch.setattr(fork_server, "start", start)
    assert forked_workers.start_fork_server("an.engine", 1) and told == ["a"]
    start.side_effect = [ends[0][0], BrokenPipeError()]
    with pytest.raises(BrokenPipeError):
        forked_workers.start_fork_server("an.engine", 1)
    assert start.call_count == 4, "twice each time"
    for near, far in ends:
        near.close()
        far.close()


def test_the_error_of_a_server_is_no_process(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(f"\0{name}")
        listener.listen()
        asked = pool.submit(request_fork, name, ["script"])
        connection, _ = listener.accept()
        connection.sendall(b"ImportError: no such module")
        with pytest.raises(ConnectionError, match="no such module"):
            asked.result(30.0)
        connection.close()


def test_workers_are_forked_where_a_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, "a", "b")
    first = driver.workers()
    assert first.options(None) == {} == first.options("a")
    first.started("a", COMMAND)
    assert (first.options("a"), first.options("b"), first.options(None)) == (FORKED, {}, {})
    first.started("b", "elsewhere/python worker")
    assert first.options("b") == {}, "its Python is in another place than the driver's"
    first.started("b", COMMAND)
    assert first.options("b") == first.options(None) == FORKED
    driver.kept = {"a", "b"}
    assert driver.workers().options(None) == FORKED, "the next run finds them"
    assert not driver.told


def test_one_that_fails_is_told_once_and_none_is_forked_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, "a")
    workers, done = driver.workers(), list[int]()
    driver.kept.add("a")
    workers.started("a", COMMAND)
    for _ in range(2):
        workers.failed("it was killed")
    workers.start_server("a", driver.actor, then=lambda: done.append(1))
    assert workers.options("a") == {} and done == [1] and not driver.actor.mock_calls
    assert driver.told == ["workers are no longer forked; each one imports its modules itself: it was killed"]
    assert driver.kept == set(), "later runs start their servers anew"


def test_without_a_standby_a_server_is_started_later_and_once_for_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, "a", "b")
    workers = driver.workers()
    for node, found in (("a", driver.actor), ("a", driver.actor), ("b", None)):
        workers.start_server_later(node, lambda found=found: found)  # type: ignore[misc]
    due, driver.due = driver.due, []
    assert [after_s for after_s, _ in due] == [5.0, 5.0] and not driver.actor.mock_calls
    for _, call in due:
        call()
    module = "trainwright.strategies.torch.engines.data_parallel"
    asked = [mock.call.start_fork_server.remote(module, 1, 7)]
    assert driver.actor.mock_calls == asked, "the worker of `b` has ended"


@pytest.mark.parametrize("end", ["up", "died", "killed", "silent"])
def test_a_forked_worker_that_does_not_start_is_started_as_any_other(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    driver, killed, again, wanted, group = Driver(monkeypatch, "a"), list[Any](), list[int](), [True], mock.Mock()
    states = iter(("PENDING", "CREATED"))
    told = {id(group): states}
    monkeypatch.setattr(forked_workers, "placement_group_table", lambda asked: {"state": next(told[id(asked)])})
    monkeypatch.setattr(forked_workers.ray, "kill", lambda actor, *, no_restart: killed.append(actor))
    workers = driver.workers()
    workers.started("a", COMMAND)
    workers.watch(driver.actor, group, lambda: wanted[0], lambda: again.append(1))
    ((after_s, look),) = driver.due
    wanted[0] = end != "killed"  # by the driver
    if end != "silent":
        driver.answer("" if end == "up" else ActorDiedError())
    look()
    if end == "silent":
        assert not driver.told, "the resources are not there yet"
        driver.due[1][1]()
    assert after_s == 30.0 and (killed, again) == (([driver.actor], [1]) if end == "silent" else ([], []))
    assert workers.options("a") == ({} if end in ("died", "silent") else FORKED)
    assert len(driver.told) == (end in ("died", "silent"))


@pytest.mark.parametrize("end", ["died", "frozen", "failed", "answered"])
def test_a_standby_does_not_wait_for_a_server_without_end(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    driver = Driver(monkeypatch, "a")
    workers, done = driver.workers(), list[int]()
    workers.start_server("a", driver.actor, then=lambda: done.append(1))
    assert not done
    ((after_s, late),) = driver.due
    if end == "frozen":
        late()
        assert after_s == 30.0 and workers.options("a") == {}
    driver.answer({"died": ActorDiedError(), "failed": OSError("no module")}.get(end, COMMAND))
    late()
    assert done == [1], "once"
    assert workers.options("a") == (FORKED if end in ("answered", "frozen") else {})
    assert driver.told == (
        ["workers are no longer forked; each one imports its modules itself: no fork server was started: no module"]
        if end == "failed"
        else []
    )


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
        ("", {}, {"worker_process_setup_hook": "a.hook"}, False),  # which runs before a framework is imported
    ],
)
def test_which_workers_are_forked(
    monkeypatch: pytest.MonkeyPatch, switch: str, changes: dict[str, Any], runtime_env: dict[str, Any], forks: bool
) -> None:
    driver = Driver(monkeypatch, "a", **runtime_env)
    monkeypatch.setenv("TRAINWRIGHT_FORK_SERVER", switch)
    module = f"trainwright.strategies.{changes.get('engine', 'torch.engines.data_parallel:')}".partition(":")[0]
    for usable in (True, False):  # not usable: others place the workers
        workers = driver.workers(usable=usable, **changes)
        workers.started("a", worker_command(f"{module}/1"))
        assert bool(workers.options("a")) is (forks and usable)
