"""Fork servers: a process of a node that has imported a framework, and forks Ray's workers.

Most of the time in which a worker starts are imports. A fork server imports what an engine needs, once; a process that
it forks imports Ray alone. Ray is not imported in the server, because it reads its settings as it is imported, and
draws the ids of its objects from a generator that all forked processes would share.

Ray starts a worker with `order_command` in place of Python. That runs this file as a script, without site packages, and
orders a process from the fork server for its node, engine and environment. Where there is none, or it does not answer,
the script becomes the worker itself. So this module imports little, and nothing of trainwright. It runs on Linux, whose
sockets can be abstract.

A connection says `hold`, and keeps the server from ending, or `fork`. A forked process waits until who ordered it has
heard of it, and says so: nobody starts a worker twice. A server ends with another process (Ray's raylet), or some time
after the last connection; it forks no more once a file that it had imported has changed. It serves its own user alone.
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
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

ANSWER_S = 10.0  # for a server to fork: Ray waits for a worker for a minute in all
_LISTEN_S = 20.0  # for a new server to listen
IDLE_S = 600.0
_LOOK_S = 1.0  # between two looks whether the process with which a server ends is there
_LENGTH = struct.Struct("Q")
_CREDENTIALS = struct.Struct("3i")  # process, user and group of a peer: unix(7)
_ANSWER_BYTES, _PART_BYTES, _WAITING_ORDERS = 4096, 1 << 20, 1024
_STANDARD = (0, 1, 2)
_READY, _GO = b"ready", b"go"
OPTIONAL = "?"  # between the modules that are needed and those whose import may fail
_MODULE = "trainwright.runtime.fork_server"  # name of this module where it is imported
_NODE_ARGUMENT = "--node-id="  # of Ray's workers
_RAYS, _SHELLS = "RAY_", ("_", "PWD", "OLDPWD", "SHLVL")  # variables that differ between workers of a node

_started_with: dict[str, str] = {}  # in a forked process


def socket_name(node_id: str, kind: str, environment: Mapping[str, str]) -> str:
    """Return the name of the socket of a node's fork server for a kind of workers, this Python and an environment."""
    variables = sorted((k, v) for k, v in environment.items() if not k.startswith(_RAYS) and k not in _SHELLS)
    told = json.dumps([os.getuid(), node_id, kind, sys.executable, variables])
    return f"trainwright-{hashlib.sha256(told.encode()).hexdigest()[:32]}"


def order_command(kind: str) -> str:
    """Return what takes the place of Python in the command of a worker of this kind, for a shell."""
    return shlex.join([sys.executable, "-I", "-S", os.path.realpath(__file__), "order", kind])


def initial_environment() -> dict[str, str]:
    """Return the environment with which this process was started: Ray, engines and the job have changed it since."""
    if _started_with:
        return dict(_started_with)
    with open("/proc/self/environ", "rb") as file:
        pairs = (os.fsdecode(item).partition("=") for item in file.read().split(b"\0") if item)
        return {name: value for name, _, value in pairs}


def start(
    name: str, modules: Sequence[str], environment: Mapping[str, str], *, until: int, idle_s: float = IDLE_S
) -> socket.socket:
    """Start a server that is no child of this process, unless one has that name; return a connection that holds it.

    The server imports meanwhile: see `await_ready`.

    Args:
        name: of the socket.
        modules: to import; those after `OPTIONAL` may fail.
        environment: of the server.
        until: id of the process with which it ends.
        idle_s: seconds after the last connection and the last forked process after which it ends.

    Raises:
        OSError: it could not be started.
    """
    command = [sys.executable, os.path.realpath(__file__), "serve", name, str(until), str(idle_s), *modules]
    with subprocess.Popen(
        command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        start_new_session=True,
    ) as started:  # fmt: skip
        try:
            told = started.communicate(timeout=_LISTEN_S)[1]
        except subprocess.TimeoutExpired as error:
            started.kill()
            raise TimeoutError(f"the fork server did not listen within {_LISTEN_S:g} s") from error
    if started.returncode:
        raise OSError(f"the fork server ended: {told.decode(errors='replace').strip()[-1000:]}")
    deadline_s = time.monotonic() + _LISTEN_S
    while True:
        try:
            return _connected(name, {"wants": "hold"})
        except ConnectionRefusedError:  # it is another one that is bound, and about to listen
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)


def await_ready(line: socket.socket, timeout_s: float) -> None:
    """Wait until the server that a connection holds has imported all.

    Raises:
        OSError: it could not import, ended, or took too long.
    """
    line.settimeout(timeout_s)
    answer = line.recv(_ANSWER_BYTES)
    if answer != _READY:
        raise OSError(f"the fork server ended: {answer.decode(errors='replace') or 'without a word'}")


# --- Orders -----------------------------------------------------------------------------------------------------------


def order(
    name: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    folder: str = "",
    streams: Sequence[int] = _STANDARD,
) -> tuple[int, socket.socket]:
    """Have a Python script run, by default with the environment, folder and standard streams of this process.

    Returns:
        Its process id, and a connection on which its wait status will come.

    Raises:
        OSError: there is no such fork server, it ended or did not answer, or it belongs to another user. Nothing runs.
    """
    environment = dict(os.environ) if environment is None else dict(environment)
    wanted = {"wants": "fork", "command": [*command], "environment": environment, "folder": folder or os.getcwd()}
    line = _connected(name, wanted, streams)
    try:
        answer = line.recv(_ANSWER_BYTES)
        if not answer:
            raise ConnectionError(f"fork server {name} ended before it had forked")
        line.sendall(_GO)
        line.settimeout(None)
        return int(answer), line
    except BaseException:
        line.close()
        raise


def _connected(name: str, wanted: dict[str, Any], streams: Sequence[int] = ()) -> socket.socket:
    line, data = socket.socket(socket.AF_UNIX), json.dumps(wanted).encode()
    try:
        line.settimeout(ANSWER_S)
        line.connect(f"\0{name}")
        if _user_of(line) != os.getuid():
            raise PermissionError(f"fork server {name} belongs to another user")
        socket.send_fds(line, [_LENGTH.pack(len(data))], streams)
        line.sendall(data)
    except BaseException:
        line.close()
        raise
    return line


def _user_of(line: socket.socket) -> int:
    user: int = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return user


def _order_worker(kind: str, command: Sequence[str]) -> NoReturn:
    """Have a worker of Ray forked; where that is not possible, become it."""
    nodes = [argument.removeprefix(_NODE_ARGUMENT) for argument in command if argument.startswith(_NODE_ARGUMENT)]
    try:
        order(socket_name(nodes[0], kind, os.environ), command)
    except (OSError, IndexError):
        os.execv(sys.executable, [sys.executable, *command])
    os._exit(0)


# --- The server -------------------------------------------------------------------------------------------------------


class _Server:
    """Forks for each order.

    Args:
        listener: a socket that listens.
        until: id of the process with which it ends.
        idle_s: seconds without a connection that holds it, or a forked process, after which it ends.
    """

    def __init__(self, listener: socket.socket, until: int, idle_s: float) -> None:
        self._listener, self._until, self._idle_s = listener, until, idle_s
        self._children: dict[int, socket.socket] = {}  # who ordered, by process id
        self._holders: dict[int, socket.socket] = {}  # by descriptor
        self._imported = _changes()
        self._ear, self._mouth = socket.socketpair()  # hears of children that have ended
        self._mouth.setblocking(False)
        self._poll = select.poll()

    def serve(self) -> tuple[socket.socket, dict[str, Any], list[int]] | None:
        """Serve until it is to end. In a forked process, return who ordered it, what, and with which streams."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        for watched in (self._ear, self._listener):
            self._poll.register(watched, select.POLLIN)
        used_s = time.monotonic()
        while os.path.exists(f"/proc/{self._until}") and time.monotonic() - used_s <= self._idle_s:
            ready = {descriptor for descriptor, _ in self._poll.poll(min(_LOOK_S, self._idle_s) * 1000)}
            if self._ear.fileno() in ready:
                self._ear.recv(_PART_BYTES)
            self._reap()
            for gone in self._holders.keys() & ready:
                self._poll.unregister(gone)
                self._holders.pop(gone).close()
            if self._listener.fileno() in ready:
                ordered = self._answer()
                if ordered is not None:
                    return ordered
            if self._children or (self._holders and self._listens):
                used_s = time.monotonic()
        return None

    @property
    def _listens(self) -> bool:
        return self._listener.fileno() >= 0

    def _reap(self) -> None:
        """Wait for children that have ended: Ray takes one that nobody has waited for to be alive."""
        while self._children:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                return
            line = self._children.pop(child, None)  # none for one that an imported module has started
            if line is not None:
                with line, suppress(OSError):  # who ordered need not wait for it
                    line.sendall(str(status).encode())

    def _answer(self) -> tuple[socket.socket, dict[str, Any], list[int]] | None:
        """Answer a connection; see `serve`."""
        if _changes() != self._imported:  # who orders starts a process that imports what is there now
            self._poll.unregister(self._listener)
            self._listener.close()
            return None
        try:
            line, _ = self._listener.accept()
        except OSError:  # too many open files, or who connected has ended
            time.sleep(_LOOK_S)
            return None
        streams: list[int] = []
        try:
            told = _received(line, streams)
            if told["wants"] == "hold":
                line.sendall(_READY)
                self._holders[line.fileno()] = line
                self._poll.register(line, select.POLLIN)
                return None
            child = os.fork()
            if not child:
                return line, told, streams
            self._children[child] = line
            line.sendall(str(child).encode())
        except (OSError, ValueError):  # no memory for a process, or who ordered has ended; it is not run then
            if line not in self._children.values():
                line.close()
        for stream in streams:
            os.close(stream)
        return None

    def leave(self, line: socket.socket) -> None:
        """In a forked process: close all that is the server's but one connection."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for held in (self._listener, self._ear, self._mouth, *self._children.values(), *self._holders.values()):
            if held is not line:
                held.close()


def _changes() -> dict[str, int]:
    """Return when the file of each imported module was changed."""
    found = {}
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if file:
            with suppress(OSError):
                found[file] = os.stat(file).st_mtime_ns
    return found


def _received(line: socket.socket, streams: list[int]) -> dict[str, Any]:
    """Return an order, and add its standard streams. Raises OSError or ValueError where it is none of this user."""
    if _user_of(line) != os.getuid():
        raise PermissionError
    line.settimeout(ANSWER_S)
    head, descriptors, _, _ = socket.recv_fds(line, _LENGTH.size, len(_STANDARD))
    streams += descriptors
    if len(head) != _LENGTH.size:
        raise ConnectionResetError
    data, size = b"", _LENGTH.unpack(head)[0]
    while len(data) < size:
        part = line.recv(min(_PART_BYTES, size - len(data)))
        if not part:
            raise ConnectionResetError
        data += part
    told: dict[str, Any] = json.loads(data)
    return told


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
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    if "tempfile" in sys.modules:
        vars(sys.modules["tempfile"])["tempdir"] = None  # where the environment says
    if "numpy" in sys.modules:  # unlike the generators of `random` and `uuid`, numpy's stays what it was
        importlib.import_module("numpy").random.seed()


def _import(modules: Sequence[str]) -> str:
    """Import what is needed, then what may fail; return why what is needed cannot be imported."""
    needed = modules.index(OPTIONAL) if OPTIONAL in modules else len(modules)
    try:
        for module in (_MODULE, *modules[:needed]):
            importlib.import_module(module)
    except Exception as error:  # of any kind: they are others' modules
        return f"{type(error).__name__}: {error}"
    for module in modules[needed + 1 :]:
        with suppress(Exception):
            importlib.import_module(module)
    return ""


def _main(name: str, until: str, idle_s: str, *modules: str) -> None:
    """Serve. Returns in a forked process alone, which is to run `sys.argv`."""
    if sys.path[0] == os.path.dirname(os.path.realpath(__file__)):  # its modules have other names
        sys.path.pop(0)
    served, unused_s, listener = int(until), float(idle_s), socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
    except OSError:
        os._exit(0)  # there is one
    listener.listen(_WAITING_ORDERS)
    if os.fork():
        os._exit(0)
    os.dup2(0, 2)  # who started it waits for the end of this
    error = _import(modules)
    if error:
        listener.settimeout(_LISTEN_S)
        with suppress(OSError):
            line, _ = listener.accept()
            line.sendall(error.encode())
        os._exit(1)
    gc.freeze()
    server = _Server(listener, served, unused_s)
    ordered = server.serve()
    if ordered is None:
        os._exit(0)  # to clear what was imported takes seconds
    line, told, streams = ordered
    server.leave(line)
    answer = b""
    with line, suppress(OSError):
        answer = line.recv(_ANSWER_BYTES)
    if answer != _GO:
        os._exit(0)  # who ordered has become the worker itself, or has ended
    _become(told, streams)


if __name__ == "__main__":
    if sys.argv[1] == "order":
        _order_worker(sys.argv[2], sys.argv[3:])
    _main(*sys.argv[2:])
    runpy.run_path(sys.argv[0], run_name="__main__")
