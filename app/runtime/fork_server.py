"""Fork servers: a process of a node that has imported a framework, and forks Ray's workers.

Most of the time in which a worker starts are imports. A fork server imports what an engine needs, once; a process that
it forks imports Ray alone. Ray is not imported in the server, because it reads its settings as it is imported, and
draws the ids of its objects from a generator that all forked processes would share.

Ray starts a worker with `worker_command` in place of Python. That runs this file as a script, without site packages.
The script requests a process from the fork server for its node, engine and environment. If there is none, or it does
not answer, the script becomes the worker itself. So this module imports little, and nothing of trainwright. It needs
Linux, for abstract sockets.

A client requests `hold`, which keeps the server from ending, or `fork`. A forked process waits until its client has
confirmed the answer: no worker starts twice. A server ends with another process (Ray's raylet), or some time after its
last connection. It stops forking once an imported file has changed. It serves its own user alone.
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

ANSWER_S = 25.0  # for a server to fork, on a busy machine; Ray waits a minute for a worker
_LISTEN_S = 20.0  # for a new server to listen
_REQUEST_S = 5.0  # between two parts of a request; other clients wait meanwhile
IDLE_S = 600.0
_LOOK_S = 1.0  # between two looks whether the process with which a server ends is there
_LENGTH = struct.Struct("Q")
_CREDENTIALS = struct.Struct("3i")  # process, user and group of a peer: unix(7)
_ANSWER_BYTES, _PART_BYTES, _WAITING_ORDERS = 4096, 1 << 20, 1024
_STANDARD = (0, 1, 2)
_READY, _GO = b"ready", b"go"
OPTIONAL = "?"  # separates required modules from those whose import may fail
_MODULE = "trainwright.runtime.fork_server"  # this module, where it does not run as a script
_NODE_ARGUMENT = "--node-id="  # in the command of a Ray worker
_RAY_PREFIX, _SHELL_VARIABLES = "RAY_", ("_", "PWD", "OLDPWD", "SHLVL")  # these differ between workers of a node

_started_with: dict[str, str] = {}  # in a forked process


def socket_name(node_id: str, kind: str, environment: Mapping[str, str]) -> str:
    """Return the name of the socket of a node's fork server for a kind of workers, this Python and an environment."""
    variables = sorted(
        (k, v) for k, v in environment.items() if not k.startswith(_RAY_PREFIX) and k not in _SHELL_VARIABLES
    )
    identity = json.dumps([os.getuid(), node_id, kind, sys.executable, variables])
    return f"trainwright-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"


def worker_command(kind: str) -> str:
    """Return the command that replaces Python in the command line of a worker of this kind, for a shell."""
    return shlex.join([sys.executable, "-I", "-S", os.path.realpath(__file__), "worker", kind])


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
    """Start a server, unless one has that name, and return a connection that holds it.

    The server is no child of this process. It imports in the background: see `await_ready`. It writes errors where this
    process does.

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
        command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output = process.communicate(timeout=_LISTEN_S)[1]
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise TimeoutError(f"the fork server did not listen within {_LISTEN_S:g} s") from error
    if process.returncode:
        raise OSError(f"the fork server ended: {output.decode(errors='replace').strip()[-1000:]}")
    deadline_s = time.monotonic() + _LISTEN_S
    while True:
        try:
            return _send_request(name, {"action": "hold"})
        except ConnectionRefusedError:  # another server has bound the socket and will listen soon
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)


def await_ready(connection: socket.socket, timeout_s: float) -> None:
    """Wait until a held server has imported all modules.

    Raises:
        OSError: it could not import, ended, or took too long.
    """
    connection.settimeout(timeout_s)
    answer = connection.recv(_ANSWER_BYTES)
    if not answer:
        raise ConnectionResetError("the fork server ended")
    if answer != _READY:
        raise OSError(f"the fork server ended: {answer.decode(errors='replace')}")


# --- Clients ----------------------------------------------------------------------------------------------------------


def request_fork(
    name: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    folder: str = "",
    streams: Sequence[int] = _STANDARD,
) -> tuple[int, socket.socket]:
    """Run a Python script in a forked process.

    Args:
        name: of the server's socket.
        command: the script and its arguments.
        environment: of the process; by default that of this process, as for the two below.
        folder: in which it runs.
        streams: descriptors of its standard streams.

    Returns:
        Its process id, and a connection that receives its wait status.

    Raises:
        OSError: there is no such fork server, it ended or did not answer, or it belongs to another user. Nothing runs.
    """
    environment = dict(os.environ) if environment is None else dict(environment)
    request = {"action": "fork", "command": [*command], "environment": environment, "folder": folder or os.getcwd()}
    connection = _send_request(name, request, streams)
    try:
        answer = connection.recv(_ANSWER_BYTES)
        if not answer.isdigit():
            raise ConnectionError(f"fork server {name} ended before it forked: {answer.decode(errors='replace')}")
        connection.sendall(_GO)
        connection.settimeout(None)
        return int(answer), connection
    except BaseException:
        connection.close()
        raise


def _send_request(name: str, request: dict[str, Any], streams: Sequence[int] = ()) -> socket.socket:
    connection, data = socket.socket(socket.AF_UNIX), json.dumps(request).encode()
    try:
        connection.settimeout(ANSWER_S)
        connection.connect(f"\0{name}")
        if _user_of(connection) != os.getuid():
            raise PermissionError(f"fork server {name} belongs to another user")
        socket.send_fds(connection, [_LENGTH.pack(len(data))], streams)
        connection.sendall(data)
    except BaseException:
        connection.close()
        raise
    return connection


def _user_of(connection: socket.socket) -> int:
    user: int = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return user


def _start_worker(kind: str, command: Sequence[str]) -> NoReturn:
    """Request a forked Ray worker. Where that is not possible, become the worker."""
    nodes = [argument.removeprefix(_NODE_ARGUMENT) for argument in command if argument.startswith(_NODE_ARGUMENT)]
    try:
        request_fork(socket_name(nodes[0], kind, os.environ), command)
    except (OSError, IndexError):
        os.execv(sys.executable, [sys.executable, *command])
    os._exit(0)


# --- The server -------------------------------------------------------------------------------------------------------


class _Server:
    """Forks a process for each request.

    Args:
        owner_pid: id of the process with which the server ends.
        idle_s: seconds without a holding connection or a forked process, after which the server ends.
    """

    def __init__(self, listener: socket.socket, owner_pid: int, idle_s: float) -> None:
        self._listener, self._owner_pid, self._idle_s = listener, owner_pid, idle_s
        self._children: dict[int, socket.socket] = {}  # connection of the client, by process id
        self._holders: dict[int, socket.socket] = {}  # by descriptor
        self._imported = _change_times()
        self._wake_reader, self._wake_writer = socket.socketpair()  # woken by SIGCHLD
        self._wake_writer.setblocking(False)
        self._poll = select.poll()

    def serve(self) -> tuple[socket.socket, dict[str, Any], list[int]] | None:
        """Serve until the end. In a forked process, return the client's connection, request and standard streams."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        for watched in (self._wake_reader, self._listener):
            self._poll.register(watched, select.POLLIN)
        used_s = time.monotonic()
        while os.path.exists(f"/proc/{self._owner_pid}"):
            ready = {descriptor for descriptor, _ in self._poll.poll(min(_LOOK_S, self._idle_s) * 1000)}
            if self._wake_reader.fileno() in ready:
                self._wake_reader.recv(_PART_BYTES)
            self._reap()
            for holder in self._holders.keys() & ready:
                self._poll.unregister(holder)
                self._holders.pop(holder).close()
            if self._listener.fileno() in ready:
                forked = self._answer()
                if forked is not None:
                    return forked
            if self._children or (self._holders and self._listens):
                used_s = time.monotonic()
            elif time.monotonic() - used_s > self._idle_s:
                break
        return None

    @property
    def _listens(self) -> bool:
        return self._listener.fileno() >= 0

    def _reap(self) -> None:
        """Wait for children that have ended: Ray considers a zombie process alive."""
        while self._children:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                return
            connection = self._children.pop(child, None)  # None: an imported module started it
            if connection is not None:
                with connection, suppress(OSError):  # the client need not wait for it
                    connection.sendall(str(status).encode())

    def _answer(self) -> tuple[socket.socket, dict[str, Any], list[int]] | None:
        """Answer a connection; see `serve`."""
        if _change_times() != self._imported:  # the client starts a process that imports the new files
            self._poll.unregister(self._listener)
            self._listener.close()
            return None
        try:
            connection, _ = self._listener.accept()
        except OSError:  # too many open files, or the client has ended
            time.sleep(_LOOK_S)
            return None
        streams: list[int] = []
        try:
            request = _receive_request(connection, streams)
            if request["action"] == "hold":
                connection.sendall(_READY)
                self._holders[connection.fileno()] = connection
                self._poll.register(connection, select.POLLIN)
                return None
            child = os.fork()
            if not child:
                return connection, request, streams
            self._children[child] = connection
            connection.sendall(str(child).encode())
        except (OSError, ValueError):  # no memory for a process, or the client has ended; nothing is forked then
            if connection not in self._children.values():
                connection.close()
        for stream in streams:
            os.close(stream)
        return None

    def leave(self, connection: socket.socket) -> None:
        """In a forked process: close what the server has open, except one connection."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for item in (
            self._listener,
            self._wake_reader,
            self._wake_writer,
            *self._children.values(),
            *self._holders.values(),
        ):
            if item is not connection:
                item.close()


def _change_times() -> dict[str, int]:
    """Return when the file of each imported module was changed."""
    times = {}
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if file:
            with suppress(OSError):
                times[file] = os.stat(file).st_mtime_ns
    return times


def _receive_request(connection: socket.socket, streams: list[int]) -> dict[str, Any]:
    """Return a request and add its standard streams. Raises OSError or ValueError if invalid or another user's."""
    if _user_of(connection) != os.getuid():
        raise PermissionError
    connection.settimeout(_REQUEST_S)
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, len(_STANDARD))
    streams += descriptors
    if len(head) != _LENGTH.size:
        raise ConnectionResetError
    data, size = b"", _LENGTH.unpack(head)[0]
    while len(data) < size:
        part = connection.recv(min(_PART_BYTES, size - len(data)))
        if not part:
            raise ConnectionResetError
        data += part
    request: dict[str, Any] = json.loads(data)
    return request


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Apply the request, as if its client had started this process."""
    os.setsid()  # Ray ends a worker's whole process group
    for number, stream in zip(_STANDARD, streams, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    importlib.import_module(_MODULE)._started_with.update(request["environment"])  # this one is `__main__`
    os.chdir(request["folder"])
    sys.argv = request["command"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    if "tempfile" in sys.modules:
        vars(sys.modules["tempfile"])["tempdir"] = None  # look at the new environment
    if "numpy" in sys.modules:  # `random` and `uuid` do this after a fork, numpy does not
        importlib.import_module("numpy").random.seed()


def _import(modules: Sequence[str]) -> str:
    """Import required and optional modules; return why a required one cannot be imported."""
    needed = modules.index(OPTIONAL) if OPTIONAL in modules else len(modules)
    try:
        for module in (_MODULE, *modules[:needed]):
            importlib.import_module(module)
    except Exception as error:  # any kind: the modules are not ours
        return f"{type(error).__name__}: {error}"
    for module in modules[needed + 1 :]:
        with suppress(Exception):
            importlib.import_module(module)
    return ""


def _main(name: str, until: str, idle_s: str, *modules: str) -> None:
    """Serve. Returns only in a forked process, which then runs `sys.argv`."""
    if sys.path[0] == os.path.dirname(os.path.realpath(__file__)):  # modules must not be imported by their short names
        sys.path.pop(0)
    served, unused_s, listener = int(until), float(idle_s), socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
    except OSError:
        os._exit(0)  # there is one
    listener.listen(_WAITING_ORDERS)
    if os.fork():
        os._exit(0)
    os.dup2(1, 2)  # the starting process reads this stream to its end; the other one is its own stream of errors
    error = _import(modules)
    if error:
        listener.settimeout(_LISTEN_S)
        with suppress(OSError):
            connection, _ = listener.accept()
            connection.sendall(error.encode())
        os._exit(1)
    gc.freeze()
    server = _Server(listener, served, unused_s)
    forked = server.serve()
    if forked is None:
        os._exit(0)  # finalizing all imported modules takes seconds
    connection, request, streams = forked
    server.leave(connection)
    answer = b""
    with connection, suppress(OSError):
        answer = connection.recv(_ANSWER_BYTES)
    if answer != _GO:
        os._exit(0)  # the client has become the worker itself, or has ended
    _become(request, streams)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        _start_worker(sys.argv[2], sys.argv[3:])
    _main(*sys.argv[2:])
    runpy.run_path(sys.argv[0], run_name="__main__")
