"""A fork server: a process that has imported what workers and drivers need, and forks one for each order.

Of the processor time that starts a worker of Ray, eight tenths are spent on imports, and a run of all tests starts
hundreds; of a driver it is half. Ray itself is not among what is imported here: it draws its object ids from a
generator that all forked processes would share, and it reads its settings as it is imported.

Run as a script with the name of a socket and the modules to import; ends when its standard input says so or ends. A
process that orders imports this module, once for each worker of Ray, so it imports little itself.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

VARIABLE = "TRAINWRIGHT_TEST_FORK_SERVER"  # names the socket
ORDER_BYTES, FORK_S, END_S = 1 << 20, 60.0, 10.0
_ANSWER_BYTES = 32
_STANDARD = (0, 1, 2)


@contextmanager
def fork_server(modules: Sequence[str]) -> Iterator[str]:
    """Start a fork server; yield the name of its socket, which takes orders at once. They wait for the imports."""
    missing = [module for module in modules if find_spec(module) is None]
    assert not missing, f"the fork server is to import what does not exist: {missing}"  # Ray would wait without end
    name = f"trainwright-tests-{os.getpid()}-{os.urandom(4).hex()}"
    command, pipe = [sys.executable, __file__, name, *modules], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as it:
        assert it.stdin is not None and it.stdout is not None
        assert it.stdout.readline() == b"listening\n", "the fork server did not start; its output is above"
        try:
            yield name
        finally:
            with suppress(BrokenPipeError):  # one that could not import has ended, or is about to
                it.stdin.write(b"end")  # a fork of this process, as torch's DataLoader makes, may keep the pipe open
                it.stdin.close()
            try:
                it.wait(END_S)
            except subprocess.TimeoutExpired:
                it.kill()
                raise AssertionError(f"the fork server did not end within {END_S:g} s") from None


def order(name: str, command: Sequence[str]) -> int:
    """Have a Python script run with this process's environment, folder and standard streams.

    Returns:
        Its process id.

    Raises:
        OSError: there is no such fork server, or it ended.
    """
    with socket.socket(socket.AF_UNIX) as line:
        return _ordered(line, name, command, dict(os.environ), os.getcwd(), _STANDARD)


def _ordered(
    line: socket.socket, name: str, command: Sequence[str], environment: dict[str, str], folder: str,
    streams: Sequence[int],
) -> int:  # fmt: skip
    line.settimeout(FORK_S)
    line.connect(f"\0{name}")
    told = {"command": command, "environment": environment, "folder": folder}
    socket.send_fds(line, [json.dumps(told).encode()], streams)
    line.shutdown(socket.SHUT_WR)
    answer = line.recv(_ANSWER_BYTES)
    if not answer:
        raise ConnectionError(f"fork server {name} ended before it had forked")
    return int(answer)


class Forked:
    """A forked process with pipes, which is used as a `subprocess.Popen` of texts.

    Args:
        name: of the fork server.
        command: a script or `-m` and a module, with arguments.
        environment: all of its variables.
        folder: where it runs.
    """

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], folder: str) -> None:
        self.args, self.returncode = [*command], None
        self._said: list[str] = ["", ""]
        pipes = [os.pipe(), os.pipe()]
        self._line = socket.socket(socket.AF_UNIX)
        with open(os.devnull) as nothing:
            streams = (nothing.fileno(), pipes[0][1], pipes[1][1])
            self.pid = _ordered(self._line, name, self.args, environment, folder, streams)
        for _, written in pipes:
            os.close(written)
        self._readers = [threading.Thread(target=self._read, args=(n, pipe[0])) for n, pipe in enumerate(pipes)]
        for reader in self._readers:
            reader.start()

    def _read(self, number: int, pipe: int) -> None:
        with open(pipe, encoding="utf-8", errors="replace") as stream:
            self._said[number] = stream.read()

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._line], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            answer = self._line.recv(_ANSWER_BYTES)
            self._line.close()
            assert answer, "the fork server ended before what it had forked"
            self.returncode = os.waitstatus_to_exitcode(int(answer))
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Its standard output and errors. Raises subprocess.TimeoutExpired."""
        self.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
            if reader.is_alive():  # a child of it holds the pipe
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._said[0], self._said[1]

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _serve(listener: socket.socket) -> bool:
    """Fork for each order, until standard input ends.

    Returns:
        Whether this is a forked process, which is to run `sys.argv`.
    """
    children: dict[int, tuple[int, socket.socket]] = {}  # ids, and who ordered, by the descriptor that tells of the end
    while True:
        ready, _, _ = select.select([sys.stdin.fileno(), listener, *children], [], [])
        for ended in children.keys() & set(ready):
            child, line = children.pop(ended)
            _, status = os.waitpid(child, 0)  # Ray takes a process that nobody has waited for to be alive
            os.close(ended)
            with line, suppress(OSError):  # who ordered need not wait for it
                line.sendall(str(status).encode())
        if sys.stdin.fileno() in ready:
            return False
        if listener not in ready:
            continue
        line, _ = listener.accept()
        told, streams = _received(line)
        child = os.fork()
        if child == 0:
            for held in (listener, line, *(other for _, other in children.values())):
                held.close()
            for descriptor in children:
                os.close(descriptor)
            _become(told, streams)
            return True
        children[os.pidfd_open(child)] = child, line
        for stream in streams:
            os.close(stream)
        with suppress(BrokenPipeError):  # who ordered may be gone by now
            line.sendall(str(child).encode())


def _received(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    told, streams, _, _ = socket.recv_fds(line, ORDER_BYTES, len(_STANDARD))
    while more := line.recv(ORDER_BYTES):
        told += more
    return json.loads(told), list(streams)


def _become(told: dict[str, Any], streams: list[int]) -> None:
    """Take what the order gives: as if this process had been started there."""
    os.setsid()  # Ray ends a worker's whole process group
    for number, stream in zip(_STANDARD, streams, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["folder"])
    sys.argv = told["command"]
    sys.path[0] = told["folder"] if sys.argv[0] == "-m" else os.path.dirname(sys.argv[0])
    if "tempfile" in sys.modules:
        sys.modules["tempfile"].tempdir = None  # where the environment says
    if "numpy" in sys.modules:  # unlike the generators of `random` and `uuid`, numpy's stays what it was
        sys.modules["numpy"].random.seed()


def main(name: str, modules: Sequence[str]) -> bool:
    """Whether this is a forked process."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(socket.SOMAXCONN)
        print("listening", flush=True)
        for module in modules:
            importlib.import_module(module)
        gc.freeze()
        return _serve(listener)


if __name__ == "__main__":
    if not main(sys.argv[1], sys.argv[2:]):
        os._exit(0)  # to clear what was imported takes seconds
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
