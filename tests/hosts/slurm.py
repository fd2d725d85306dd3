"""Slurm on test hosts: munge and a slurmd on each, the controller on the first. Debian's packages, no cgroups."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.hosts.lan import Host
from tests.support import processes
from trainwright.cluster_files.placeholders import fill_placeholders

SCRIPT = processes.ROOT / "clusters" / "slurm.sbatch"
USER = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
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
SlurmdTimeout=10
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


@dataclass(frozen=True, kw_only=True)
class Job:
    """One that was submitted, by its number; `folder` is where it was and what it says lies."""

    head: Host
    number: str
    folder: Path

    def ended(self, patience_s: float = 150.0) -> str:
        """Wait for its end: its state and exit code, as `COMPLETED 0:0`."""
        processes.wait_for(lambda: self._facts()["JobState"] in ENDED, patience_s)
        facts = self._facts()
        return f"{facts['JobState']} {facts['ExitCode']}"

    def cancel(self, *options: str) -> None:
        """By `scancel`."""
        self.head.machine.run("scancel", *options, self.number, env=USER)

    def nodes(self) -> list[str]:
        """Names of those that Slurm gave it."""
        return self.head.machine.run("scontrol", "show", "hostnames", self._facts()["NodeList"], env=USER).split()

    def said(self) -> str:
        """All that it said."""
        files = sorted(self.folder.glob(f"*-{self.number}*"))
        return "\n".join(f"{file.name}: {file.read_text(errors='replace')}" for file in files)

    def _facts(self) -> dict[str, str]:
        words = self.head.machine.run("scontrol", "--oneliner", "show", "job", self.number, env=USER).split()
        return dict(word.partition("=")[::2] for word in words)


def submit(head: Host, script: Path, values: Mapping[str, str]) -> Job:
    """`sbatch` the script of `clusters/`, changed by a user's values, from the folder where it lies."""
    own = {"venv": sys.prefix, "output": "said-%j", "object_store_bytes": "200000000"}
    script.write_text(fill_placeholders(SCRIPT.read_text(), {**own, **values}))
    at = ("sh", "-c", f"cd {script.parent} && sbatch --parsable {script.name}")
    return Job(head=head, number=head.machine.run(*at, env=USER).strip(), folder=script.parent)


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
