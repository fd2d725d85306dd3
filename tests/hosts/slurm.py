"""Slurm on test hosts: munge and a slurmd on each, the controller on the first. Debian's packages, no cgroups."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from tests.hosts.lan import Host

CPUS = 2
CONFIG = """
ClusterName=test
SlurmctldHost={head}({address})
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/tmp/slurmd
StateSaveLocation=/tmp/slurmctld
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
CGROUPS = "CgroupPlugin=cgroup/v1\n"
# slurmd looks for a place of its own among systemd's.
MOUNT = "mount -n -t tmpfs cgroup /sys/fs/cgroup && mkdir /sys/fs/cgroup/systemd"
MUNGE = """
mkdir -p -m 700 /tmp/munge && mkdir -p -m 755 /run/munge && chown 0:0 /etc/munge /etc/munge/munge.key
exec munged --force --foreground --socket=/run/munge/munge.socket.2 --log-file=/tmp/munge/log \
    --seed-file=/tmp/munge/seed --pid-file=/tmp/munge/pid
"""


def start(hosts: Sequence[Host]) -> None:
    """Start Slurm on the hosts, and wait until all are idle."""
    head, key = hosts[0], secrets.token_hex(64)
    nodes = "\n".join(f"NodeName={host.name} NodeAddr={host.address} CPUs={CPUS} State=UNKNOWN" for host in hosts)
    config = CONFIG.format(head=head.name, address=head.address, nodes=nodes)
    for host in hosts:
        host.write("/etc/munge/munge.key", key, 0o400)
        host.write("/etc/slurm/slurm.conf", config)
        host.write("/etc/slurm/cgroup.conf", CGROUPS)
        host.machine.run("sh", "-c", MOUNT)
        host.machine.start("sh", "-c", MUNGE)
        host.machine.run("sh", "-c", "until munge -n >/dev/null 2>&1; do sleep 0.1; done")
    head.machine.run("mkdir", "-p", "/tmp/slurmctld")
    head.machine.start("slurmctld", "-D")
    for host in hosts:
        host.machine.start("slurmd", "-D")
    idle = f'until [ "$(sinfo --noheader --format=%D --states=idle)" = {len(hosts)} ]; do sleep 0.2; done'
    head.machine.run("sh", "-c", idle)
