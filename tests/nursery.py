"""A process that has imported what workers need, and forks one whenever it is asked to.

Of the processor time that starts a worker of Ray, eight tenths are spent on imports, and a run of all tests starts
hundreds. Ray itself is not among what is imported here: it draws its object ids from a generator that all forked
processes would share, and it reads its settings as it is imported.

Run as a script with the name of a socket and the modules to import; ends with its standard input.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy

VARIABLE = "TRAINWRIGHT_TEST_NURSERY"  # names the socket
ORDER_BYTES, FORK_S, END_S = 1 << 20, 60.0, 10.0
_STANDARD = (0, 1, 2)
_NUMBERS = itertools.count()


@contextmanager
def nursery(modules: Sequence[str]) -> Iterator[str]:
    """The name of a nursery's socket, which takes orders from the start; they wait for the imports."""
    name = f"trainwright-tests-{os.getpid()}-{next(_NUMBERS)}"
    command, pipe = [sys.executable, __file__, name, *modules], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as it:
        assert it.stdin is not None and it.stdout is not None
        assert it.stdout.readline() == b"listening\n", "the nursery did not start; its words are above"
        try:
            yield name
        finally:
            it.stdin.close()
            it.wait(END_S)


def order(name: str, command: Sequence[str]) -> int:
    """Have a Python script run with this process's environment, folder and standard streams.

    Returns:
        Its process id.

    Raises:
        OSError: there is no such nursery, or it ended.
    """
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(FORK_S)
        line.connect(f"\0{name}")
        told = {"command": command, "environment": dict(os.environ), "folder": os.getcwd()}
        socket.send_fds(line, [json.dumps(told).encode()], _STANDARD)
        line.shutdown(socket.SHUT_WR)
        answer = line.recv(32)
    if not answer:
        raise ConnectionError(f"nursery {name} ended before it had forked")
    return int(answer)


def _serve(listener: socket.socket) -> bool:
    """Fork for each order, until standard input ends.

    Returns:
        Whether this is a forked process, which is to run `sys.argv`.
    """
    children: dict[int, int] = {}  # process ids by the descriptor that tells of their end
    while True:
        ready, _, _ = select.select([sys.stdin.fileno(), listener, *children], [], [])
        for ended in children.keys() & set(ready):
            os.waitpid(children.pop(ended), 0)  # Ray takes a process that nobody has waited for to be alive
            os.close(ended)
        if sys.stdin.fileno() in ready:
            return False
        if listener not in ready:
            continue
        line, _ = listener.accept()
        with line:
            told, streams = _received(line)
            child = os.fork()
            if child == 0:
                listener.close()
                for descriptor in children:
                    os.close(descriptor)
                _become(told, streams)
                return True
            children[os.pidfd_open(child)] = child
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
    sys.path[0] = os.path.dirname(sys.argv[0])
    tempfile.tempdir = None  # where the environment says
    numpy.random.seed()  # unlike the generators of `random` and `uuid` it stays what it was


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


if __name__ == "__main__" and main(sys.argv[1], sys.argv[2:]):
    runpy.run_path(sys.argv[0], run_name="__main__")
