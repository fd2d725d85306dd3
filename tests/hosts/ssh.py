"""Secure shell between test hosts, with keys made for the test."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.hosts.lan import HOME, Host

KEY = HOME / ".ssh" / "id_ed25519"
SERVER = """
PidFile none
UsePAM no
PasswordAuthentication no
HostKey /etc/ssh/ssh_host_ed25519_key
"""
# Debian's package makes this user when it is installed.
USER = "grep -q ^sshd: /etc/passwd || echo sshd:x:101:65534::/run/sshd:/usr/sbin/nologin >>/etc/passwd"


def connect(client: Host, servers: Iterable[Host], shared: Path) -> None:
    """Let root of one host log in on the others. `shared` is a folder that they all see."""
    client.write(str(KEY.with_name("config")), "", 0o600)
    client.machine.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", KEY)
    client.machine.run("cp", f"{KEY}.pub", shared / "key.pub")
    for host in servers:
        host.write(str(KEY.with_name("authorized_keys")), (shared / "key.pub").read_text(), 0o600)
        host.write("/etc/ssh/sshd_config", SERVER)
        host.machine.run("sh", "-c", f"{USER}; mkdir -p /run/sshd")
        host.machine.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/etc/ssh/ssh_host_ed25519_key")
        host.machine.start("/usr/sbin/sshd", "-D", "-e")
        host.machine.await_port(22)
