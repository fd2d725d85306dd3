"""`make help` and the set-up behind every target, with a pretended Python so that nothing is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Answers what .ci/setup.sh asks of a Python, and logs what pip is called with.
PRETENDED = """#!/bin/sh
case "$1 $2" in
"-c import sys; print"*) echo "$PRETENDED_VERSION" ;;
"-c import sys, ensurepip"*) case $PRETENDED_VERSION in 3.1[1-3].*) exit "${PRETENDED_NO_VENV:-0}" ;; esac; exit 1 ;;
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip") echo "$*" >>pip-calls; echo "pip's last words"; exit "${PRETENDED_PIP_EXIT:-0}" ;;
esac
"""


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """A folder with what the set-up reads, and a PATH whose only Python is the pretended one."""

    path: Path

    def set_up(self, venv: str = ".venv", **environment: str) -> subprocess.CompletedProcess[str]:
        """Run .ci/setup.sh here."""
        path = f"{self.path / 'bin'}{os.pathsep}{self.path / 'tools'}"
        return subprocess.run(
            ["/bin/sh", ".ci/setup.sh", venv],
            cwd=self.path,
            env={"PATH": path, "PRETENDED_VERSION": "3.12.1", **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def installs(self) -> int:
        """How often pip has been called."""
        calls = self.path / "pip-calls"
        return len(calls.read_text(encoding="utf-8").splitlines()) if calls.exists() else 0


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    for name in ("pyproject.toml", "constraints.txt", ".ci/setup.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    python.write_text(PRETENDED, encoding="utf-8")
    python.chmod(0o755)
    (tmp_path / "tools").mkdir()
    for tool in ("cat", "cksum", "cp", "date", "head", "mkdir", "rm", "rmdir", "tail", "touch"):
        (tmp_path / "tools" / tool).symlink_to(shutil.which(tool) or tool)
    return Checkout(path=tmp_path)


def test_help_is_the_default_and_lists_the_targets() -> None:
    text = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30).stdout
    listed = {line.split()[1] for line in text.splitlines() if line.startswith("  make ")}
    assert {"help", "demo", "test", "test-all", "check", "bench"} <= listed


def test_a_second_call_installs_nothing(checkout: Checkout) -> None:
    first, second = checkout.set_up(), checkout.set_up()
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "setting up .venv" in first.stdout
    assert second.stdout == second.stderr == ""
    assert checkout.installs() == 1
    arguments = (checkout.path / "pip-calls").read_text(encoding="utf-8")
    assert "--constraint constraints.txt --editable .[dev]" in arguments


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed_into_the_same_environment(checkout: Checkout, name: str) -> None:
    checkout.set_up()
    kept = checkout.path / ".venv" / "kept"
    kept.touch()
    with (checkout.path / name).open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert checkout.set_up().returncode == 0
    assert checkout.installs() == 2
    assert kept.exists()


def test_an_environment_half_made_is_made_anew(checkout: Checkout) -> None:
    failed = checkout.set_up(PRETENDED_PIP_EXIT="1")
    assert failed.returncode == 1
    assert "pip's last words" in failed.stderr
    assert "could not be installed" in failed.stderr
    leftover = checkout.path / ".venv" / "leftover"
    leftover.touch()
    assert checkout.set_up().returncode == 0
    assert not leftover.exists()
    assert checkout.installs() == 2


def test_an_environment_without_its_interpreter_is_made_anew(checkout: Checkout) -> None:
    checkout.set_up()
    python = checkout.path / ".venv" / "bin" / "python"
    python.unlink()
    assert checkout.set_up().returncode == 0
    assert python.exists()
    assert checkout.installs() == 2


def test_an_environment_of_a_moved_checkout_is_made_anew(checkout: Checkout, tmp_path: Path) -> None:
    checkout.set_up()
    moved = Checkout(path=tmp_path / "moved")
    shutil.copytree(checkout.path, moved.path, ignore=shutil.ignore_patterns("moved"), symlinks=True)
    assert "setting up .venv" in moved.set_up().stdout
    assert moved.installs() == 2


def test_an_environment_of_the_users_own_is_left_alone(checkout: Checkout) -> None:
    own = checkout.path / ".venv" / "own"
    own.parent.mkdir()
    own.touch()
    refused = checkout.set_up()
    assert refused.returncode == 1
    assert ".venv was not made by make: move it away" in refused.stderr
    assert own.exists()
    assert checkout.set_up(venv="other").returncode == 0


@pytest.mark.parametrize("version", ["3.9.18", "3.14.0"])
def test_a_python_that_was_not_tried_is_refused_by_name(checkout: Checkout, version: str) -> None:
    refused = checkout.set_up(PRETENDED_VERSION=version)
    assert refused.returncode == 1
    assert f"Python 3.11, 3.12 or 3.13 is needed; found: python3 is {version}" in refused.stderr
    assert not (checkout.path / ".venv").exists()


def test_a_newer_python_on_the_path_is_taken_where_python3_is_old(checkout: Checkout) -> None:
    newer = checkout.path / "bin" / "python3.12"
    newer.write_text(PRETENDED.replace("$PRETENDED_VERSION", "3.12.9"), encoding="utf-8")
    newer.chmod(0o755)
    done = checkout.set_up(PRETENDED_VERSION="3.9.18")
    assert done.returncode == 0, done.stderr
    assert f"setting up .venv with {newer} " in done.stdout


def test_a_python_without_venv_says_what_to_install(checkout: Checkout) -> None:
    refused = checkout.set_up(PRETENDED_NO_VENV="1")
    assert refused.returncode == 1
    assert "python3 is 3.12.1 but lacks venv" in refused.stderr
    assert "python3-venv" in refused.stderr
