"""Data sets that Debian packages, taken out of the package: neither root nor an installation is needed."""

from __future__ import annotations

import subprocess
from pathlib import Path

_COMMAND_S = 180.0


def unpacked(package: str, folder: Path) -> Path:
    """The files of a package, below a folder of its own in `folder`. Package lists that are missing are fetched there.

    Raises:
        OSError, subprocess.SubprocessError: there is no apt, no network, or no such package.
    """
    try:
        _run(["apt-get", "download", package], folder)
    except subprocess.SubprocessError:
        for part in ("lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        private = ["-o", f"Dir::State::Lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]
        _run(["apt-get", *private, "update"], folder)
        _run(["apt-get", *private, "download", package], folder)
    home, file = folder / "unpacked", next(folder.glob("*.deb"), None)
    if file is None:
        raise FileNotFoundError(f"apt-get downloaded no file of {package}")
    _run(["dpkg", "-x", str(file), str(home)], folder)
    return home


def reason(error: Exception) -> str:
    """Why a source gave nothing, in one line."""
    if isinstance(error, subprocess.CalledProcessError):
        said = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else str(error.stderr or "")
        lines = [line for line in said.splitlines() if line.strip()]
        return lines[-1] if lines else f"{error.cmd[0]} exited with {error.returncode}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=_COMMAND_S)
