"""Where a process is reached."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"
_told: list[str] = []


def be_at(host: str) -> None:
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
