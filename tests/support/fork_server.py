"""A fork server for tests: as that of a node, for Ray's workers in all clusters of a test process, and for drivers.

Of the processor time that starts a worker of Ray, eight tenths are spent on imports, and a run of all tests starts
hundreds; of a driver it is half.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from tests.support import run_module
from trainwright.runtime.fork_server import await_ready, request_fork, start

IMPORT_S = 120.0  # on a busy machine
_ANSWER_BYTES = 32


@contextmanager
def fork_server(modules: Sequence[str]) -> Iterator[str]:
    """Start a fork server; yield the name of its socket."""
    name = f"trainwright-tests-{os.getpid()}-{os.urandom(4).hex()}"
    with start(name, modules, os.environ, until=os.getpid(), idle_s=0.1) as line:
        await_ready(line, IMPORT_S)
        yield name


def _await_own_group(process: int) -> None:
    """Wait until a forked process leads a group, so that it can be used as one that was started alone."""
    until = time.monotonic() + IMPORT_S
    with suppress(ProcessLookupError):  # it has ended
        while os.getpgid(process) != process:
            assert time.monotonic() < until
            time.sleep(0.001)


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
        script = [run_module.__file__, *command[1:]] if command[0] == "-m" else command
        self._said: list[str] = ["", ""]
        pipes = [os.pipe(), os.pipe()]
        with open(os.devnull) as nothing:
            streams = (nothing.fileno(), pipes[0][1], pipes[1][1])
            self.pid, self._line = request_fork(name, script, environment=environment, folder=folder, streams=streams)
        _await_own_group(self.pid)
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
