"""`clusters/slurm.sbatch` on one node, with commands of Slurm's and Ray's that only say how they were called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "clusters" / "slurm.sbatch"
COMMANDS = {
    "scontrol": 'case "$2" in hostnames) echo here ;; node) echo "NodeAddr=here" ;; esac',
    "ray": '[ "$1" != stop ] || exit 0; while [ "$1" != -- ]; do echo "$1"; shift; done; shift; exec "$@"',
    "python": 'case "$1" in -c) echo 0123abcd ;; *) ls -ld "$RAY_TMPDIR"; ls -A "$RAY_TMPDIR" ;; esac',
}


def run(folder: Path, **commands_of: str) -> subprocess.CompletedProcess[str]:
    commands = folder / ".trainwright" / "venv" / "bin"
    commands.mkdir(parents=True)
    (folder / ".trainwright" / "storage.env").touch()
    (folder / "scratch").mkdir(exist_ok=True)
    for name, code in (COMMANDS | commands_of).items():
        (commands / name).write_text(f"#!/bin/bash\n{code}\n")
        (commands / name).chmod(0o755)
    script = SCRIPT.read_text().replace("SCRATCH=/tmp\n", f"SCRATCH={folder}/scratch\n")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here", "SLURM_JOB_NUM_NODES": "1"}
    environment = {**slurm, "HOME": str(folder), "PATH": os.environ["PATH"]}
    return subprocess.run(
        ["bash", "-c", f"umask 0; {script}"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_scratch_folder_is_this_users_alone_and_gone_at_the_end(tmp_path: Path) -> None:
    ran = run(tmp_path)
    assert ran.returncode == 0, ran.stderr
    own = f"{tmp_path}/scratch/ray-7-0123abcd"
    assert f"--object-spilling-directory={own}/spill" in ran.stdout.splitlines()
    assert [line[:10] for line in ran.stdout.splitlines() if line.endswith(own)] == ["drwx------"]
    assert ran.stdout.splitlines()[-1] == "driver.pid" and not list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize("planted", ["a folder", "a link"])
def test_a_scratch_folder_that_is_there_already_is_not_used(planted: str, tmp_path: Path) -> None:
    place, elsewhere = tmp_path / "scratch" / "ray-7-0123abcd", tmp_path / "elsewhere"
    elsewhere.mkdir()
    place.parent.mkdir()
    if planted == "a folder":
        place.mkdir(mode=0o777)
    else:
        place.symlink_to(elsewhere)
    ran = run(tmp_path)
    assert ran.returncode != 0 and "File exists" in ran.stderr and "--object" not in ran.stdout
    assert place.exists() and not list(elsewhere.iterdir())


def test_where_ray_does_not_start_the_job_fails(tmp_path: Path) -> None:
    ran = run(tmp_path, ray="exit 0")  # as `ray symmetric-run` ends after a `ray start` that failed
    assert ran.returncode == 1 and "Ray did not start" in ran.stderr
