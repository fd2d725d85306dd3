"""Fork servers: a process of a node that has imported a framework, and forks Ray's workers.

Most of the time in which a worker starts are imports. A fork server imports what an engine needs, once; a process that
it forks imports Ray alone. Ray is not imported in the server, because it reads its settings as it is imported, and
draws the ids of its objects from a generator that all forked processes would share.

Ray starts a worker with `order_command` in place of Python. That runs this file as a script, without site packages, and
orders a process from the fork server for its node, engine and environment. Where there is none, it becomes the worker
itself. So this module imports little, and nothing of trainwright. It runs on Linux, whose sockets can be abstract.

A server ends with another process (Ray's raylet), after `IDLE_S` without a child, and at the first order after a file
that it had imported was changed. It takes orders of its own user alone.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import shlex
import socket
import struct
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

IDLE_S = 600.0
FORK_S = 60.0  # for a server to import and to fork
_RECEIVE_S = 5.0  # for who orders to send all of it
_MODULE = "trainwright.runtime.fork_server"  # name of this module where it is imported
_ANSWER_BYTES, _ORDER_BYTES, _WAITING_ORDERS = 32, 1 << 20, 1024
_STANDARD = (0, 1, 2)
_NODE_ARGUMENT = "--node-id="  # of Ray's workers
_RAYS, _SHELLS = "RAY_", ("_", "PWD", "OLDPWD", "SHLVL")  # variables that differ between workers of a node
_CREDENTIALS = struct.Struct("3i")  # process, user and group of a peer: unix(7)


def socket_name(node_id: str, kind: str, environment: Mapping[str, str]) -> str:
    """Return the name of the socket of a node's fork server for a kind of workers, this Python and an environment."""
    variables = sorted((k, v) for k, v in environment.items() if not k.startswith(_RAYS) and k not in _SHELLS)
    told = json.dumps([os.getuid(), node_id, kind, sys.executable, variables])
    return f"trainwright-{hashlib.sha256(told.encode()).hexdigest()[:32]}"


def order_command(kind: str) -> str:
    """Return what takes the place of Python in the command of a worker of this kind, for a shell."""
    return shlex.join([sys.executable, "-I", "-S", os.path.abspath(__file__), "order", kind])


_started_with: dict[str, str] = {}  # in a forked process


def initial_environment() -> dict[str, str]:
    """Return the environment with which this process was started: Ray, engines and the job have changed it since."""
    if _started_with:
        return dict(_started_with)
    with open("/proc/self/environ", "rb") as file:
        pairs = (os.fsdecode(item).partition("=") for item in file.read().split(b"\0") if item)
        return {name: value for name, _, value in pairs}


def start(name: str, modules: Sequence[str], environment: Mapping[str, str], *, until: int) -> None:
    """Start a server that is no child of this process, unless one has that name. It takes orders while it imports."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(f"\0{name}")
        except OSError:
            return
        spawn(listener, modules, environment, until=until, detached=True).wait(FORK_S)


def spawn(
    listener: socket.socket, modules: Sequence[str], environment: Mapping[str, str], *, until: int,
    detached: bool = False, idle_s: float = IDLE_S,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a server.

    Args:
        listener: a socket that is bound to a name.
        modules: to import.
        environment: of the server.
        until: id of the process with which it ends.
        detached: what is returned ends at once, and leaves the server as no child of this process.
        idle_s: seconds without a child after which it ends.
    """
    listener.listen(_WAITING_ORDERS)
    options = [str(listener.fileno()), str(until), str(idle_s), "detached" if detached else "child"]
    return subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "serve", *options, *modules], env=dict(environment),
        pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


# --- Orders -----------------------------------------------------------------------------------------------------------


def order(name: str, command: Sequence[str]) -> int:
    """Have a Python script run with this process's environment, folder and standard streams; return its id.

    Raises:
        OSError: there is no such fork server, or it ended.
    """
    with socket.socket(socket.AF_UNIX) as line:
        return send_order(line, name, command, dict(os.environ), os.getcwd(), _STANDARD)


def send_order(
    line: socket.socket, name: str, command: Sequence[str], environment: dict[str, str], folder: str,
    streams: Sequence[int],
) -> int:  # fmt: skip
    """Send an order on a socket, on which its exit status comes later; return the id of the process.

    Raises:
        OSError: there is no such fork server, it ended, or it belongs to another user.
    """
    line.settimeout(FORK_S)
    line.connect(f"\0{name}")
    if _user_of(line) != os.getuid():
        raise PermissionError(f"fork server {name} belongs to another user")
    told = {"command": [*command], "environment": environment, "folder": folder}
    socket.send_fds(line, [json.dumps(told).encode()], streams)
    line.shutdown(socket.SHUT_WR)
    answer = line.recv(_ANSWER_BYTES)
    if not answer:
        raise ConnectionError(f"fork server {name} ended before it had forked")
    return int(answer)


def _user_of(line: socket.socket) -> int:
    user: int = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return user


def _order_worker(kind: str, command: Sequence[str]) -> None:
    """Have a worker of Ray forked; where that is not possible, become it."""
    nodes = [argument.removeprefix(_NODE_ARGUMENT) for argument in command if argument.startswith(_NODE_ARGUMENT)]
    try:
        order(socket_name(nodes[0], kind, os.environ), command)
    except TimeoutError:
        sys.exit(f"the fork server for {kind} did not answer within {FORK_S:g} s")  # it may fork yet
    except (OSError, IndexError):
        os.execv(sys.executable, [sys.executable, *command])


# --- The server -------------------------------------------------------------------------------------------------------


class _Children:
    """The forked processes: by a descriptor that tells of the end, their id and who ordered them."""

    def __init__(self) -> None:
        self._lines: dict[int, tuple[int, socket.socket]] = {}

    def __iter__(self) -> Any:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, child: int, line: socket.socket) -> None:
        """Add a process, and tell who ordered it."""
        self._lines[os.pidfd_open(child)] = child, line
        with suppress(OSError):  # who ordered may be gone by now
            line.sendall(str(child).encode())

    def reap(self, ended: int) -> None:
        """Wait for a process that ended: Ray takes one that nobody has waited for to be alive."""
        child, line = self._lines.pop(ended)
        _, status = os.waitpid(child, 0)
        os.close(ended)
        with line, suppress(OSError):  # who ordered need not wait for it
            line.sendall(str(status).encode())

    def forget(self) -> None:
        """In a forked process: close what is the server's."""
        for descriptor, (_, line) in self._lines.items():
            os.close(descriptor)
            line.close()


def _serve(listener: socket.socket, until: int, idle_s: float) -> bool:
    """Fork for each order, until the server is to end.

    Returns:
        Whether this is a forked process, which is to run `sys.argv`.
    """
    children, imported = _Children(), _changes()
    while True:
        ready, _, _ = select.select([until, listener, *children], [], [], None if len(children) else idle_s)
        for ended in set(children) & set(ready):
            children.reap(ended)
        if until in ready or not ready:
            return False
        if listener not in ready:
            continue
        if _changes() != imported:
            return False  # who orders starts a process that imports what is there now
        line, _ = listener.accept()
        try:
            told, streams = _received(line)
        except (OSError, ValueError):  # who ordered ended meanwhile
            line.close()
            continue
        child = os.fork()
        if child == 0:
            children.forget()
            for held in (listener.fileno(), line.fileno(), until):
                os.close(held)
            listener.detach(), line.detach()
            _become(told, streams)
            return True
        children.add(child, line)
        for stream in streams:
            os.close(stream)


def _changes() -> dict[str, int]:
    """Return when the file of each imported module was changed."""
    found = {}
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if file:
            try:
                found[file] = os.stat(file).st_mtime_ns
            except OSError:
                found[file] = 0
    return found


def _received(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return an order and its standard streams. Raises OSError or ValueError where it is none of this user."""
    if _user_of(line) != os.getuid():
        raise PermissionError
    line.settimeout(_RECEIVE_S)
    told, streams, _, _ = socket.recv_fds(line, _ORDER_BYTES, len(_STANDARD))
    while more := line.recv(_ORDER_BYTES):
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
    importlib.import_module(_MODULE)._started_with.update(told["environment"])  # which is not this one, `__main__`
    os.chdir(told["folder"])
    sys.argv = told["command"]
    sys.path.insert(0, told["folder"] if sys.argv[0] == "-m" else os.path.dirname(sys.argv[0]))
    if "tempfile" in sys.modules:
        vars(sys.modules["tempfile"])["tempdir"] = None  # where the environment says
    if "numpy" in sys.modules:  # unlike the generators of `random` and `uuid`, numpy's stays what it was
        importlib.import_module("numpy").random.seed()


def _main(listener: str, until: str, idle_s: str, kind: str, *modules: str) -> bool:
    """Serve, as `spawn` orders; return whether this is a forked process."""
    if kind == "detached" and os.fork():
        os._exit(0)
    try:
        end = os.pidfd_open(int(until))
    except ProcessLookupError:
        return False
    sys.path.pop(0)  # the folder of this file, whose modules have other names
    for module in (_MODULE, *modules):
        importlib.import_module(module)
    gc.freeze()
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # threads of OpenBLAS
    with socket.socket(fileno=int(listener)) as taken:
        return _serve(taken, end, float(idle_s))


if __name__ == "__main__":
    if sys.argv[1] == "order":
        _order_worker(sys.argv[2], sys.argv[3:])
        os._exit(0)
    if not _main(*sys.argv[2:]):
        os._exit(0)  # to clear what was imported takes seconds
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
