"""Where a process is reached."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"


def own_host() -> str:
    """The address by which other nodes reach this one; the loopback address where there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737): picks a route, sends nothing
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])
