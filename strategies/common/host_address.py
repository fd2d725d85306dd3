"""Where a process is reached."""

from __future__ import annotations

import errno
import socket

LOOPBACK = "127.0.0.1"
_PORTS = 16  # that are tried
_told: list[str] = []


def set_own_host(host: str) -> None:
    """This process is reached at an address that who placed it there knows, whatever route leads out."""
    _told[:] = [host]


def own_host() -> str:
    """The address by which other nodes reach this one: as told, else the one that its default route leaves by.

    The loopback address where there is no network.
    """
    if _told:
        return _told[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737): picks a route, sends nothing
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])


def bind_socket(host: str, port: int = 0) -> socket.socket:
    """A TCP socket at an address of this machine, at a port that the system chooses by default. Raises OSError.

    At every interface where the address is another's: that of a router which forwards to this machine.
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
    """Sockets at one port of an address and of loopback, for who does not know yet from where it will be reached.

    Twice the same socket where the first covers both. Raises OSError where no port is free at both.
    """
    for attempt in reversed(range(_PORTS)):
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
