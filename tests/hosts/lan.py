"""Hosts on one switch, as odd as real ones are, and nothing beyond it.

Each has its own processes, network, names, `/etc`, home, temporary and run folders, and the Debian packages of
`packages`. Its own name means 127.0.1.1, as Debian writes it; Docker's bridge has the same address everywhere; the way
out, where its default route goes, leads nowhere and is not the network that the hosts share.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.namespaces import PROGRAMS, TRIES, Machine, demand_rights, ip, machine
from tests.support.processes import ROOT

NETWORK = "10.78.0"
PRIVATE = ("/tmp", "/run", "/root", "/var/tmp")
HOME = Path("/root")
# Ports that the system hands out; fewer than usual, so that a test can say which a firewall has to open.
PORTS = (40000, 43999)
HOSTS_FILE = """127.0.0.1 localhost
127.0.1.1 {name}
"""
NAMES = "passwd: files\ngroup: files\nhosts: files\n"  # nobody answers for other names: not asked, not waited for
LAN_PROGRAMS = (*PROGRAMS, "ssh", "ps")
LAN_TRIES = {
    **TRIES,
    "the kernel's bridge": ("unshare", "--net", "ip", "link", "add", "switch", "type", "bridge"),
    "the kernel's overlay file system": (
        "unshare", "--mount", "mount", "-t", "overlay", "-o", "lowerdir=/usr:/etc", "overlay", "/mnt",
    ),
}  # fmt: skip
# Mounts over what is there already: the stage is moved into place once all that must stay visible is bound into it.
HIDE = """
mount -n -t tmpfs -o mode={mode} private /mnt
{keep}
mount -n --move /mnt {folder}
"""
ETC = """
mount -n -t tmpfs etc /mnt
cp -a /etc/. /mnt/
mount -n --move /mnt /etc
mount -n -t overlay -o lowerdir={packages}/usr:/usr overlay /usr
"""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One that is up; `index` is its port at the switch."""

    name: str
    address: str
    machine: Machine
    switch: Machine
    index: int

    def cut(self) -> None:
        """Take its plug out of the switch: nothing gets through any more, and nobody is told."""
        ip(self.switch, "link", "set", f"lan{self.index}", "nomaster")

    def mend(self) -> None:
        """Put it back."""
        ip(self.switch, "link", "set", f"lan{self.index}", "master", "switch")

    def kill(self) -> None:
        """All its processes end at once, as when its power fails; it is gone for good."""
        self.machine.end()

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Put a file there."""
        script = 'mkdir -p "$(dirname "$1")" && umask 077 && printf %s "$2" >"$1" && chmod "$3" "$1"'
        self.machine.run("sh", "-c", script, "-", path, text, f"{mode:o}")

    def processes(self, *words: str) -> list[str]:
        """Command lines there that hold one of the words, beside the path of this checkout, which may hold one too."""
        lines = self.machine.run("ps", "-ww", "-eo", "args").replace(str(ROOT), "").splitlines()
        return [line for line in lines if any(word in line for word in words)]


@contextlib.contextmanager
def lan(names: Sequence[str], packages: Path, shared: Sequence[Path] = ()) -> Iterator[dict[str, Host]]:
    """Hosts by name, until the block is left. They see this checkout, its Python and `shared`; all else is their own.

    Fails where a right or a program lacks, and says which.
    """
    demand_rights(LAN_PROGRAMS, LAN_TRIES)
    prepare = _prepare(packages, shared)
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(machine("switch"))
        ip(switch, "link", "add", "switch", "type", "bridge")
        ip(switch, "link", "set", "switch", "up")
        hosts = {}
        for index, name in enumerate(names, 1):
            made = stack.enter_context(machine(name, prepare))
            hosts[name] = Host(name=name, address=f"{NETWORK}.{index}", machine=made, switch=switch, index=index)
            _wire(hosts[name])
        yield hosts


def _prepare(packages: Path, shared: Sequence[Path]) -> str:
    """Shell commands that hide what is this machine's own."""
    kept = {ROOT, Path(sys.prefix), Path(sys.base_prefix), *(path.resolve() for path in shared), packages.resolve()}
    hide = ""
    for folder in PRIVATE:
        within = sorted(str(path.relative_to(folder)) for path in kept if path.is_relative_to(folder))
        outer = [path for path in within if not any(path.startswith(f"{other}/") for other in within)]
        bind = "mkdir -p /mnt/{0}; mount -n --rbind {1}/{0} /mnt/{0}"
        keep = "\n".join(bind.format(shlex.quote(path), folder) for path in outer)
        hide += HIDE.format(mode="1777" if folder.endswith("tmp") else "755", keep=keep, folder=folder)
    return ETC.format(packages=shlex.quote(str(packages))) + hide


def _wire(host: Host) -> None:
    """Connect it; its own interfaces come in an order that misleads whoever takes the first."""
    at, name = host.machine, host.name
    ip(at, "link", "add", "docker0", "type", "bridge")
    ip(at, "address", "add", "172.17.0.1/16", "dev", "docker0")
    ip(at, "link", "set", "docker0", "up")
    _plug(host, "out", f"198.51.100.{host.index}/24")
    ip(at, "route", "add", "default", "via", "198.51.100.254")
    _plug(host, "lan", f"{host.address}/24")
    host.mend()
    host.machine.run("sh", "-c", 'echo "$@" >/proc/sys/net/ipv4/ip_local_port_range', "-", *PORTS)
    host.write("/etc/hosts", HOSTS_FILE.format(name=name))
    host.write("/etc/nsswitch.conf", NAMES)
    host.write("/etc/hostname", name + "\n")
    host.write("/root/.bashrc", "")


def _plug(host: Host, name: str, address: str) -> None:
    """An interface of the host whose other end is at the switch, not yet connected to anything."""
    far = f"{name}{host.index}"
    ip(host.switch, "link", "add", far, "type", "veth", "peer", "name", f"{name}0", "netns", str(host.machine.holder))
    ip(host.switch, "link", "set", far, "up")
    ip(host.machine, "address", "add", address, "dev", f"{name}0")
    ip(host.machine, "link", "set", f"{name}0", "up")
