"""Machines of their own for a test: namespaces for processes, mounts, names and the network, in which loopback is up
and shared memory is empty.

Nothing that runs there sees or reaches a process outside, ports are free, and all of it ends with the block. `cable`
connects two of them, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.processes import ROOT

# Reaps what its parents left behind, as an init does. 0x8914 is SIOCSIFFLAGS, 0x41 up and running.
INIT = """
import fcntl, signal, socket, struct, sys
if sys.argv[1]:
    socket.sethostname(sys.argv[1])
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
with socket.socket() as link:
    fcntl.ioctl(link, 0x8914, struct.pack("16sH", b"lo", 0x41))
print("up", flush=True)
signal.pause()
"""
SHARED_MEMORY = "mount -t tmpfs -o mode=1777 shm /dev/shm\n"
# A machine knows its own name, and asks nobody for others: who is asked is out of reach, and that takes 10 s each time.
NAMES = """
printf "127.0.0.1 localhost\n127.0.1.1 ${5:-$(uname -n)}\n" >/dev/shm/hosts
printf "passwd: files\ngroup: files\nhosts: files\n" >/dev/shm/nsswitch
mount -n --bind /dev/shm/hosts /etc/hosts
mount -n --bind /dev/shm/nsswitch /etc/nsswitch.conf
rm /dev/shm/hosts /dev/shm/nsswitch
"""
CONNECT = """
import socket, sys, time
until_s = time.monotonic() + float(sys.argv[2])
while True:
    try:
        socket.create_connection(("127.0.0.1", int(sys.argv[1])), 1).close()
        break
    except OSError:
        if time.monotonic() > until_s:
            raise
        time.sleep(0.05)
"""


NICENESS = "RAY_worker_niceness"  # set for all tests in conftest.py
PROGRAMS = ("ip", "nsenter", "unshare", "setpriv", "mount")
ADMIN = "CAP_SYS_ADMIN (docker run --privileged)"
TRIES = {
    ADMIN: ("unshare", "--pid", "--fork", "--mount-proc", "--net", "true"),
    "CAP_NET_ADMIN (docker run --privileged) and the kernel's veth": (
        "unshare", "--net", "ip", "link", "add", "one", "type", "veth", "peer", "name", "other",
    ),
}  # fmt: skip
USERS = "namespaces for users who are not root (sysctl -w kernel.unprivileged_userns_clone=1), or root"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine that is up. `holder` is the process outside that holds its namespaces, `started` what runs there."""

    holder: int
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *command: object, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """A process there, with pipes. It ends with the machine, whatever becomes of the process that is returned."""
        process = subprocess.Popen(
            [*self._enter(), *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**_environment(), **(env or {})},
        )
        self.started.append(process)
        return process

    def run(self, *command: object, env: Mapping[str, str] | None = None, deadline_s: float = 60.0) -> str:
        """What a command there says; it must succeed."""
        process = self.start(*command, env=env)
        said, _ = process.communicate(timeout=deadline_s)
        assert process.returncode == 0, f"{command}: {said}"
        return said

    def signal(self, pid: int, name: str) -> None:
        """Send a signal to a process by its number there."""
        self.run("sh", "-c", f"kill -{name} {pid}")

    def end(self) -> None:
        """Kill all that runs there at once."""
        os.kill(self.holder, signal.SIGKILL)

    def await_port(self, port: int, deadline_s: float = 30.0) -> None:
        """Wait until somebody listens there."""
        self.run(sys.executable, "-S", "-c", CONNECT, port, deadline_s, deadline_s=2 * deadline_s)

    def _enter(self) -> list[str]:
        # The holder itself stays outside of the namespace that its children's process ids are from.
        own = ["--user", "--preserve-credentials"] if os.geteuid() else []
        pids = f"--pid=/proc/{self.holder}/ns/pid_for_children"
        spaces = ["--mount", "--uts", "--ipc", "--net", pids]
        return ["nsenter", f"--target={self.holder}", *own, *spaces, "--", "env", f"--chdir={ROOT}"]


def demand_rights(programs: Sequence[str] = PROGRAMS, tries: Mapping[str, Sequence[str]] = TRIES) -> None:
    """Fail where this machine lacks a right or a program for machines that are connected, and say which.

    Args:
        programs: that there must be.
        tries: commands that must succeed, by what they need.
    """
    need = "tests of several hosts need"
    assert not os.geteuid(), f"{need} the rights of root: run `make hosts` as root"
    lacking = [name for name in programs if not shutil.which(name)]
    packages = "iproute2 util-linux openssh-client procps"
    assert not lacking, f"{need} {', '.join(lacking)}: apt-get install {packages}"
    for right, command in tries.items():
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, f"{need} {right}: {done.stderr.strip()}"


def _environment() -> dict[str, str]:
    """This process's, without what a Ray that runs in it has set; workers are not to starve there either."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_") or name == NICENESS}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}


@contextlib.contextmanager
def machine(name: str = "", prepare: str = "") -> Iterator[Machine]:
    """A machine of its own, until the block is left.

    Args:
        name: of the host; by default that of this one.
        prepare: shell commands that are run in its namespaces before it is up, in place of those for names of hosts.
    """
    own = ["--user", "--map-root-user"] if os.geteuid() else []
    dying = ["setpriv", "--pdeathsig", "KILL", "--"]  # with this process, however that ends
    command = ["unshare", *own, "--pid", "--fork", "--mount-proc", "--uts", "--ipc", "--net", "--kill-child", "--"]
    script = f'{prepare}{SHARED_MEMORY}{"" if prepare else NAMES}exec "$@"'
    init = ["sh", "-ec", script, "-", sys.executable, "-S", "-c", INIT, name]
    holder = subprocess.Popen([*dying, *command, *init], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    made = Machine(holder=holder.pid)
    try:
        assert holder.stdout is not None and holder.stderr is not None
        up = holder.stdout.readline()
        needed = USERS if own else ADMIN
        assert up == "up\n", f"a machine of its own needs {needed}: {holder.stderr.read()}"
        yield made
    finally:
        holder.kill()
        holder.communicate(timeout=30)
        for process in made.started:
            process.kill()  # its child has ended with the machine
            process.communicate(timeout=30)


@dataclass(frozen=True, kw_only=True)
class Cable:
    """What connects two machines: `addresses` of both."""

    one: Machine
    addresses: tuple[str, str]

    def cut(self) -> None:
        """Nothing gets through any more, and nobody is told."""
        ip(self.one, "link", "set", "cable", "down")

    def mend(self) -> None:
        """As before."""
        ip(self.one, "link", "set", "cable", "up")
        ip(self.one, "route", "replace", "default", "via", self.addresses[1])


ENDS = ("10.77.0.1", "10.77.0.2")
# Of Ray's processes on two machines. As in cluster.yaml, a node that is silent for so long is lost.
NODES = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


class OwnEnd:
    """The cable as the machine that runs this has it, if it is the first of the two: an outage of trainwright's."""

    environment: Mapping[str, str] = {}

    def begin(self, run: str, draw: float) -> str:
        """Cut it."""
        _within("link", "set", "cable", "down")
        return "nothing comes through"

    def end(self) -> None:
        """Mend it."""
        _within("link", "set", "cable", "up")
        _within("route", "replace", "default", "via", ENDS[1])

    def close(self) -> None:
        """Leave it whole."""
        self.end()


def cable(one: Machine, other: Machine) -> Cable:
    """Connect two machines of which neither has a cable yet; needs the rights of root."""
    demand_rights()
    addresses = ENDS
    ip(one, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(other.holder))
    for end, address, far in ((one, *addresses), (other, *reversed(addresses))):
        ip(end, "address", "add", f"{address}/24", "dev", "cable")
        ip(end, "link", "set", "cable", "up")
        ip(end, "route", "add", "default", "via", far)  # hosts look for their address there; nobody forwards
    return Cable(one=one, addresses=addresses)


def ip(at: Machine, *arguments: str) -> None:
    """`ip` in the network of a machine, with the rights of this process."""
    # Only in its network: names of other processes' namespaces are looked up outside.
    _run("nsenter", f"--net=/proc/{at.holder}/ns/net", "--", "ip", *arguments)


def _within(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{command}: {done.stderr}"
