"""Debian packages that tests need and this machine may lack, unpacked into a folder: nothing is installed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

HOSTS = ("openssh-server", "rsync", "munge", "slurmctld", "slurmd", "slurm-client")
BROWSER = ("chromium", "chromium-common", "fonts-dejavu-core")
COMMAND_S = 180.0
# What the packages' own scripts would choose by update-alternatives.
ALTERNATIVES = "-wlm"


def unpacked(folder: Path, packages: tuple[str, ...] = HOSTS) -> Path:
    """A folder with a `usr` that holds the packages and all they depend on; made once, by apt, in `folder`."""
    home = folder / "-".join(packages)
    if not home.is_dir():
        assert shutil.which("apt-get"), f"tests need the Debian packages {', '.join(packages)}, and apt-get"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as name:
            _unpack(_fetched(Path(name), packages), Path(name) / "whole")
            try:
                (Path(name) / "whole").rename(home)
            except OSError:
                if not home.is_dir():  # no other process of the tests was sooner
                    raise
    return home


def _fetched(folder: Path, packages: tuple[str, ...]) -> list[Path]:
    """Package files: those that are installed already are among them, so that the folder stands for itself."""
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    own = ["-o", f"Dir::State::Lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache", "-o", "Debug::NoLocking=1"]
    quiet = ["-o", "APT::Sandbox::User=", "--yes", "--no-install-recommends", "--download-only"]
    _apt("update", *own, "-o", "APT::Sandbox::User=")
    _apt("install", "--reinstall", *quiet, *own, *packages)
    return [*(folder / "cache" / "archives").glob("*.deb")]


def _apt(*arguments: str) -> None:
    done = subprocess.run(["apt-get", *arguments], capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, f"tests need Debian packages, and apt-get {' '.join(arguments)} failed: {done.stderr}"


def _unpack(files: list[Path], home: Path) -> None:
    for file in files:
        subprocess.run(["dpkg", "-x", str(file), str(home)], check=True, timeout=COMMAND_S)
    for program in (home / "usr" / "sbin").glob(f"*{ALTERNATIVES}"):
        program.with_name(program.name.removesuffix(ALTERNATIVES)).symlink_to(program.name)
    for library in (home / "usr" / "lib").glob(f"*/slurm{ALTERNATIVES}"):
        library.with_name("slurm").symlink_to(library.name)
