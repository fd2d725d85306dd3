"""Signals reach the process meant and no other; stores fail for real; leftovers are seen."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainwright.chaos_testing import run_observer, store_outage
from trainwright.chaos_testing.experiment import HostSnapshot
from trainwright.chaos_testing.fault_schedule import CATALOGUE, ScheduledFault
from trainwright.chaos_testing.run_observer import ProcessSignaller, send_signal
from trainwright.chaos_testing.store_outage import FolderOutage, TcpProxy, outage_obstacle, proxy_environment
from trainwright.core.errors import StorageError
from trainwright.core.events import Placed
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import process_start_ticks


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        yield process
        process.kill()


def test_a_signal_reaches_a_process_that_was_met(sleeper: subprocess.Popen[bytes]) -> None:
    hands, process = (
        ProcessSignaller(),
        Placed(worker=0, node=socket.gethostname(), pid=sleeper.pid, spare=True),
    )
    hands.register(process)
    promoted = Placed(worker=0, node=process.node, pid=process.pid)
    assert hands.is_alive(promoted) and hands.registered() == (process,)
    assert hands.send(promoted, signal.SIGKILL)
    assert sleeper.wait(10) == -signal.SIGKILL
    assert not hands.is_alive(process) and not hands.send(process, signal.SIGKILL)


def test_no_signal_reaches_another_process_of_the_same_number(sleeper: subprocess.Popen[bytes]) -> None:
    started = process_start_ticks(sleeper.pid)
    assert started is not None and send_signal(sleeper.pid, started, 0)
    assert not send_signal(sleeper.pid, started - 1, signal.SIGKILL), "of an older process with this number"
    stranger = Placed(worker=0, node=socket.gethostname(), pid=sleeper.pid)
    assert not ProcessSignaller().send(stranger, signal.SIGKILL), "never met"
    assert sleeper.poll() is None


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A server that answers what it is told."""

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(client,), daemon=True).start()

    def answer(client: socket.socket) -> None:
        with client:
            try:
                while data := client.recv(1 << 16):
                    client.sendall(data)
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(echo: tuple[str, int]) -> Iterator[TcpProxy]:
    made = TcpProxy(echo)
    yield made
    made.close()


def connect(proxy: TcpProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=10)


def test_a_proxy_passes_on_both_ways_to_the_end(proxy: TcpProxy) -> None:
    data = os.urandom(3_000_000)
    with connect(proxy) as client:
        threading.Thread(target=lambda: (client.sendall(data), client.shutdown(socket.SHUT_WR))).start()
        received = bytearray()
        while piece := client.recv(1 << 16):
            received += piece
    assert bytes(received) == data


def test_a_proxy_that_refuses_cuts_what_is_under_way_and_what_comes(proxy: TcpProxy) -> None:
    with connect(proxy) as client:
        client.sendall(b"a")
        assert client.recv(10) == b"a"
        proxy.set_mode("refuse")
        assert not heard(client)
    with contextlib.suppress(ConnectionError), connect(proxy) as client:  # it may be reset before it is made
        assert not heard(client)
    proxy.set_mode("pass")
    with connect(proxy) as client:
        client.sendall(b"b")
        assert client.recv(10) == b"b"


def heard(client: socket.socket) -> bytes:
    """What comes before the end; nothing where the connection is reset."""
    try:
        return client.recv(10)
    except ConnectionError:
        return b""


def test_a_proxy_that_stalls_goes_on_where_it_stood(proxy: TcpProxy) -> None:
    with connect(proxy) as client:
        proxy.set_mode("stall")
        client.sendall(b"late")
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(10)
        client.settimeout(10)
        proxy.set_mode("pass")
        assert client.recv(10) == b"late"


def test_a_folder_that_fails_can_neither_be_read_nor_written_and_comes_back_whole(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("net/log/1", b"one")
    failing = FolderOutage(tmp_path)
    failing.begin("net", 0.5)
    with pytest.raises(StorageError):
        store.put("net/log/2", b"two")
    with pytest.raises(StorageError):
        store.create("net/log/3", b"three")
    with pytest.raises(StorageError):
        store.get("net/log/1")
    failing.end()
    failing.close()
    assert [path for path, _ in store.list()] == ["net/log/1"] and store.get("net/log/1") == b"one"
    store.put("net/log/2", b"two")


def test_which_stores_can_be_made_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    assert not outage_obstacle("runs") and not outage_obstacle("file:///runs")
    assert "gs://" in outage_obstacle("gs://bucket") and "AWS_ENDPOINT_URL" in outage_obstacle("s3://bucket")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://s3.example")
    assert outage_obstacle("s3://bucket")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert not outage_obstacle("s3://bucket")


def test_variables_go_to_the_workers_beside_what_the_job_has(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "RAY_JOB_CONFIG_JSON_ENV_VAR"
    monkeypatch.setenv(name, json.dumps({"metadata": {"m": "1"}, "runtime_env": {"env_vars": {"A": "a"}, "pip": []}}))
    found = proxy_environment({"B": "b"})
    assert found["B"] == "b"
    assert json.loads(found[name]) == {
        "metadata": {"m": "1"},
        "runtime_env": {"env_vars": {"A": "a", "B": "b"}, "pip": []},
    }
    assert name == store_outage.RAY_JOB_CONFIG_VARIABLE


def test_shared_memory_that_nobody_uses_is_left_over(tmp_path: Path) -> None:
    mine = f"trainwright-test-{os.getpid()}"
    before = HostSnapshot(shared=frozenset(), actors=frozenset({"old-net"}))
    now = HostSnapshot(shared=frozenset({mine}), actors=frozenset({"old-net", "keeper-net-1", "other"}))
    path = Path("/dev/shm") / mine
    try:
        with path.open("w"):
            assert now.new(before, "net", mine) == ("actor keeper-net-1",)
        assert now.new(before, "net", mine) == (f"shared memory {path}", "actor keeper-net-1")
        assert now.new(before, "net", "trainwright-other") == ("actor keeper-net-1",), (
            "copies of another run are its own"
        )
    finally:
        path.unlink()
    assert now.new(before, "net", mine) == ("actor keeper-net-1",), "it went away in the meantime"


def test_a_semaphore_is_in_use_while_its_process_lives() -> None:
    lock = multiprocessing.get_context("spawn").Lock()  # which keeps its name, unlike one that is to be inherited
    name = "sem." + lock._semlock.name.lstrip("/")
    now = HostSnapshot(shared=frozenset({name}), actors=frozenset())
    assert (Path("/dev/shm") / name).exists()
    assert now.new(HostSnapshot(shared=frozenset(), actors=frozenset()), "net", "") == ()


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("ends", ""),
        ("acts", r"continued the run that another had taken over: Formed\("),
        ("succeeds", "ended as if the run were its own"),
        ("hangs", "did not end within 1 s"),
    ],
)
def test_a_driver_that_stood_still_may_do_nothing_but_end(
    how: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on once another one trains."""
    monkeypatch.setattr(run_observer, "_DRIVER_MODULE", "tests.support.stopped_driver")
    monkeypatch.setattr(run_observer, "_DRIVER_EXIT_TIMEOUT_S", 1.0 if how == "hangs" else 30.0)
    order = tmp_path / "order.job"
    order.write_text(how)
    (stall,) = (fault for fault in CATALOGUE if fault.name == "stall")
    said = list[str]()
    runner = run_observer.RunObserver(
        "run",
        order,
        environment={},
        event_timeout_s=60,
        schedule=[ScheduledFault(fault=stall)],
        outages={},
        say=said.append,
    )
    found = runner.run()
    assert re.search(error, found.error) if error else not found.error
    pid = (tmp_path / "order.first").read_text()
    assert [(given.fault, given.step, given.targets) for given in found.injected] == [
        ("stall", 5, (f"driver (pid {pid}) SIGSTOP",))
    ]
    assert not found.missed and not found.remaining and "another driver is started" in said
