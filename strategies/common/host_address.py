"""The address at which other nodes reach this process, and sockets bound to it."""

from __future__ import annotations

import errno
import socket

LOOPBACK = "127.0.0.1"
_ATTEMPTS = 16  # ports that are tried
_told: list[str] = []


def set_own_host(host: str) -> None:
    """Set the address of this process, for hosts whose default route leads out by another one."""
    _told[:] = [host]


def own_host() -> str:
    """Return the address that was set, else the one of the default route; loopback without a network."""
    if _told:
        return _told[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737): picks a route, sends nothing
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])


def bind_socket(host: str, port: int = 0) -> socket.socket:
    """Return a bound TCP socket; by default the system chooses the port. Raises OSError.

    It is bound to all interfaces if the address is not this machine's, but that of a router which forwards to it.
    """
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        try:
            made.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            made.bind(("", port))
    except OSError:
        made.close()
        raise
    return made


def bind_with_loopback(host: str) -> tuple[socket.socket, socket.socket]:
    """Return sockets at one port of an address and of loopback, for servers that both can reach.

    Both are one socket if the first covers loopback. Raises OSError if no port is free at both.
    """
    for attempt in reversed(range(_ATTEMPTS)):
        outer = bind_socket(host)
        address, port = outer.getsockname()
        if address in (LOOPBACK, "0.0.0.0"):
            return outer, outer
        try:
            return outer, bind_socket(LOOPBACK, port)
        except OSError:
            outer.close()
            if not attempt:
                raise
    raise AssertionError("the last attempt returns or raises")
