"""A fork server for tests: as that of a node, for Ray's workers in all clusters of a test process, and for drivers.

Of the processor time that starts a worker of Ray, eight tenths are spent on imports, and a run of all tests starts
hundreds; of a driver it is half.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec

from trainwright.runtime.fork_server import send_order, spawn

END_S = 10.0
_ANSWER_BYTES = 32


@contextmanager
def fork_server(modules: Sequence[str]) -> Iterator[str]:
    """Start a fork server; yield the name of its socket, which takes orders at once. They wait for the imports."""
    missing = [module for module in modules if find_spec(module) is None]
    assert not missing, f"the fork server is to import what does not exist: {missing}"  # Ray would wait without end
    name = f"trainwright-tests-{os.getpid()}-{os.urandom(4).hex()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        server = spawn(listener, modules, os.environ, until=os.getpid())
    with server:
        try:
            yield name
        finally:
            server.terminate()
            try:
                server.wait(END_S)
            except subprocess.TimeoutExpired:
                server.kill()
                raise AssertionError(f"the fork server did not end within {END_S:g} s") from None


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
            self.pid = send_order(self._line, name, self.args, environment, folder, streams)
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
