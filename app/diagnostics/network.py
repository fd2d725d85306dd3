"""How this machine is reached: name, address, interfaces, ports."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from trainwright.diagnostics.facts import Interface, Network
from trainwright.strategies.common.host_address import LOOPBACK, own_host

KNOWN_PORTS = (6379, 8265)  # of `ray start --head`: the cluster's own, and the dashboard's
_SIOCGIFADDR, _SIOCGIFFLAGS, _SIOCGIFMTU, _UP = 0x8915, 0x8913, 0x8921, 0x1  # <linux/sockios.h>, <net/if.h>
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def network(ray_address: str = "") -> Network:
    """How this machine is reached. `ray_address` is what Ray says of that."""
    host, address = socket.gethostname(), own_host()
    return Network(
        host=host,
        address=address,
        ray_address=ray_address,
        resolves=resolved(host),
        interfaces=interfaces(),
        refused=refusals({LOOPBACK, address}),
        ports=port_range(_RANGE),
        busy=tuple(port for port in KNOWN_PORTS if listens(port)),
    )


def resolved(host: str) -> tuple[str, ...]:
    """IPv4 addresses that a name stands for, in order; none where it stands for nothing."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def interfaces() -> tuple[Interface, ...]:
    """Those that are up and have an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return tuple(filter(None, (_interface(probe.fileno(), name) for _, name in socket.if_nameindex())))


def _interface(probe: int, name: str) -> Interface | None:
    def ask(what: int) -> bytes:
        return fcntl.ioctl(probe, what, struct.pack("256s", name.encode()[:15]))

    try:
        if not struct.unpack_from("H", ask(_SIOCGIFFLAGS), 16)[0] & _UP:
            return None
        address = socket.inet_ntoa(ask(_SIOCGIFADDR)[20:24])
        return Interface(name=name, address=address, mtu=struct.unpack_from("i", ask(_SIOCGIFMTU), 16)[0])
    except OSError:
        return None  # without an IPv4 address


def refusals(addresses: Iterable[str]) -> dict[str, str]:
    """Why no port can be had, by address; those where one can are left out."""
    refused = {}
    for address in sorted(addresses):
        try:
            with socket.socket() as trial:
                trial.bind((address, 0))
        except OSError as error:
            refused[address] = error.strerror or str(error)
    return refused


def port_range(file: Path) -> tuple[int, int] | None:
    """First and last port that the system gives out; None where it does not say."""
    with suppress(OSError, ValueError):
        first, last = map(int, file.read_text().split())
        return first, last
    return None


def listens(port: int) -> bool:
    """Whether somebody listens at a port of this machine."""
    with socket.socket() as trial:
        trial.settimeout(1.0)
        return trial.connect_ex((LOOPBACK, port)) == 0
