"""The sockets of gloo, which torch can neither find nor close: every blocked collective raises once they are shut.

`ProcessGroupGloo`'s abort and shutdown return and do nothing, and a collective that waits for a peer keeps the group,
and with it the sockets, open for others to wait on. gloo serves all its sockets by an epoll instance of its own
(gloo/transport/tcp/loop.cc), and Linux lists what an instance watches in /proc/self/fdinfo.

Its connections are shut for reading alone. gloo then ends them by itself, and tells all who wait. What it could not
write before is told to nobody (gloo/transport/tcp/pair.cc: `signalException` passes by the unbound buffers in `tx_`):
that collective would wait for the group's whole deadline, so no write must fail before gloo has seen the end. At the
peers one may, as where a process dies: `links` waits for nothing that gloo may forget, and `group` leaves it behind.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Iterable, Iterator

_FDS = "/proc/self/fd"
_WATCHED = re.compile(r"^tfd:\s*(\d+) .*\bino:([0-9a-f]+)", re.MULTILINE)


def loops() -> frozenset[int]:
    """Descriptors of the epoll instances without close-on-exec: gloo's, and nearly nobody else's. Empty off Linux."""
    return frozenset(fd for fd in _descriptors() if _is_loop(fd))


def shut(of: Iterable[int]) -> int:
    """Shut the connections that these epoll instances watch for reading; from any thread. Returns how many."""
    return sum(_shut(fd, inode) for loop in of for fd, inode in _watched(loop))


def shut_port(port: int) -> int:
    """Shut this process's TCP connections with that port at either end; from any thread. Returns how many."""
    return sum(_shut(fd, port=port) for fd in _descriptors())


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_FDS)]
    except FileNotFoundError:
        return []


def _is_loop(fd: int) -> bool:
    try:
        kept = not fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        return kept and os.readlink(f"{_FDS}/{fd}") == "anon_inode:[eventpoll]"
    except OSError:
        return False  # closed meanwhile


def _watched(loop: int) -> Iterator[tuple[int, int]]:
    """Descriptors with the inodes that they had when the epoll instance was told of them."""
    try:
        with open(f"/proc/self/fdinfo/{loop}") as info:
            text = info.read()
    except OSError:
        return
    for fd, inode in _WATCHED.findall(text):
        yield int(fd), int(inode, 16)


def _shut(fd: int, inode: int | None = None, *, port: int | None = None) -> bool:
    """Shut one connection, looked at through a descriptor of our own, since another thread may close `fd` any time."""
    try:
        own = os.dup(fd)
    except OSError:
        return False
    try:
        held = socket.socket(fileno=own)
    except OSError:  # not a socket
        os.close(own)
        return False
    with held:
        if held.type != socket.SOCK_STREAM or held.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if inode is not None and os.fstat(own).st_ino != inode:
            return False
        try:
            ends = (held.getsockname()[1], held.getpeername()[1])
            if port is not None and port not in ends:
                return False
            held.shutdown(socket.SHUT_RD if port is None else socket.SHUT_RDWR)
        except OSError:  # it listens, or its peer is gone
            return False
        return True
