"""`sbatch clusters/slurm.sbatch` on three hosts with Debian's Slurm: to the end, and stopped."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.hosts import lan, packages, slurm
from tests.hosts.files import changed
from tests.hosts.lan import Host
from tests.processes import ROOT
from tests.runs import told
from trainwright.core import events
from trainwright.log import RunLog
from trainwright.store import open_store

pytestmark = pytest.mark.hosts
NAMES = ("head", "one", "two")
SCRIPT = ROOT / "clusters" / "slurm.sbatch"
USER = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
LAST_S = 60.0
STOPPED = 128 + signal.SIGTERM


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the job file, which all hosts see."""
    folder = tmp_path_factory.mktemp("slurm")
    processes.write_job(folder, folder / "runs", workers=3, checkpoint_steps=1000, hang_deadline_s=90.0)
    return folder


@pytest.fixture(scope="module")
def hosts(project: Path) -> Iterator[list[Host]]:
    """Three of them, with Slurm."""
    with lan.lan(NAMES, packages.unpacked(ROOT / "data" / "debian"), [project]) as made:
        every = [made[name] for name in NAMES]
        for host in every:
            # The job file of the tests uses what lies beside it; trainwright itself is in the environment.
            host.write("/root/.trainwright/storage.env", f"PYTHONPATH={ROOT}\n", 0o600)
        slurm.start(every)
        yield every


def submitted(hosts: list[Host], project: Path, job: str, *options: str, **variables: str) -> Any:
    """A job of `sbatch --wait` from the head, as a process that ends with it. Its exit code is the job's own."""
    values = {
        "nodes": len(NAMES), "venv": sys.prefix, "job": f'"{job}"', "object_store_bytes": 200_000_000,
        "output": "said-%j",
    }  # fmt: skip
    script = project / "slurm.sbatch"
    script.write_text(changed(SCRIPT.read_text(), values))
    command = f"cd {project} && exec sbatch --wait --parsable {' '.join(options)} {script}"
    return hosts[0].machine.start("sh", "-c", command, env={**USER, **variables})


def said(project: Path) -> str:
    """What all jobs said."""
    return "\n".join(file.read_text() for file in sorted(project.glob("said-*")))


def await_nothing(hosts: list[Host]) -> None:
    """Until no process of Ray's or the run's is left anywhere, and no memory of theirs."""
    for host in hosts:
        processes.wait_for(lambda host=host: not host.processes("ray", "trainwright"), LAST_S)  # type: ignore[misc]
        assert host.machine.run("ls", "-A", "/dev/shm") == "", host.name


def test_to_the_end(hosts: list[Host], project: Path) -> None:
    process = submitted(hosts, project, "fit job.py --set name=whole")
    process.communicate(timeout=120)
    assert process.returncode == 0, said(project)
    formed: Any = told(project / "runs", "whole", events.Formed)
    assert set(formed[0].nodes) == set(NAMES)
    await_nothing(hosts)


def test_stopped_with_a_checkpoint(hosts: list[Host], project: Path) -> None:
    """On one node; the exit code is the job's own."""
    process = submitted(hosts, project, "fit job.py --set name=stopped --set workers=1", "--nodes=1", STEP_S="0.5")
    processes.wait_until(lambda: len(told(project / "runs", "stopped", events.Steps)) > 0, process)
    signal_jobs(hosts, "--batch --signal=TERM")
    process.communicate(timeout=120)
    assert process.returncode == STOPPED, said(project)
    entry = RunLog(open_store(str(project / "runs")), "stopped").head()
    assert entry is not None and entry.outcome == "stopped" and entry.checkpoints, said(project)
    await_nothing(hosts)


def signal_jobs(hosts: list[Host], options: str = "") -> None:
    """`scancel` all jobs."""
    hosts[0].machine.run("sh", "-c", f"scancel {options} $(squeue --noheader --format=%i)")
