"""Restart the GCS of a head node when it is lost.

Run `python -m trainwright.runtime.gcs_restarter` beside `ray start --head`. With its tables in Redis
(RAY_REDIS_ADDRESS), Ray's GCS comes back with its state, and raylets, drivers and actors wait a minute for it
(RAY_gcs_rpc_server_reconnect_timeout_s), but Ray itself does not restart it. This process waits for the end of the GCS
and runs the same command again, until the head's raylet has ended too, as after `ray stop`.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainwright.core.errors import ResourceError, TrainwrightError

_SHORT_LIFE_S = 10.0
_MAX_SHORT_LIVES = 3  # one after the other, and it is given up
_REMEDY = "set RAY_REDIS_ADDRESS=HOST:PORT before `ray start --head`"


@dataclass(frozen=True, kw_only=True)
class Command:
    """How a process was started: arguments, environment and folder."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str

    def option(self, name: str) -> str:
        """Return the value of `--name=value`; empty without it."""
        prefix = f"--{name}="
        return next((text.removeprefix(prefix) for text in self.arguments if text.startswith(prefix)), "")

    @property
    def durable(self) -> bool:
        """Whether this GCS keeps its tables outside its own memory."""
        return bool(self.option("redis_address")) or self.environment.get("RAY_gcs_storage") == "rocksdb"


def main() -> int:
    """Restart this machine's GCS when it dies; return 0 when the head was stopped.

    Raises:
        ResourceError: no GCS to restart was found, or it does not start again.
    """
    pid = _find_only("gcs_server")
    command = command_of(pid)
    if not command.durable:
        raise ResourceError("Ray's GCS keeps its tables in memory, so it cannot come back", remedy=_REMEDY)
    with open_process(_raylet(command)) as raylet, open_process(pid) as watched:
        print(f"GCS restarter (pid {os.getpid()}): gcs_server (pid {pid}) is watched", flush=True)
        has_ended(watched, wait_s=None)
        return revive(command, raylet)


def revive(command: Command, raylet: int) -> int:
    """Start a GCS that has ended, again whenever it ends, while the raylet lives; 0 when the head was stopped.

    Args:
        raylet: from `open_process`.

    Raises:
        ResourceError: it ends again and again right after its start.
    """
    short_lives = 0
    while not has_ended(raylet):
        begun_s = time.monotonic()
        child = subprocess.Popen(
            command.arguments,
            env=command.environment,
            cwd=command.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # it writes log files of its own
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        print(f"gcs_server is gone; started again (pid {child.pid})", flush=True)
        code = child.wait()
        short_lives = short_lives + 1 if time.monotonic() - begun_s < _SHORT_LIFE_S else 0
        if short_lives == _MAX_SHORT_LIVES and not has_ended(raylet):
            raise ResourceError(
                f"gcs_server ended {_MAX_SHORT_LIVES} times within {_SHORT_LIFE_S:g} s of its start, "
                f"at last with {code}",
                where=f"{command.option('log_dir')}/gcs_server.out",
                remedy="see whether Redis answers",
            )
    print("the head was stopped", flush=True)
    return 0


@contextmanager
def open_process(pid: int) -> Iterator[int]:
    """Open a descriptor of a living process: its id may be given to another one. Raises ResourceError if it ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        raise ResourceError(f"process {pid} has just ended", remedy="start the head, then this") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def has_ended(descriptor: int, wait_s: float | None = 0.0) -> bool:
    """Whether the process of a descriptor has ended, or does so within `wait_s`; None waits for that."""
    return bool(select.select([descriptor], [], [], wait_s)[0])


def command_of(pid: int) -> Command:
    """How a process was started, as the kernel tells it."""
    folder = Path(f"/proc/{pid}")
    environment = (os.fsdecode(item).partition("=") for item in _read_entries(folder / "environ"))
    return Command(
        arguments=tuple(map(os.fsdecode, _read_entries(folder / "cmdline"))),
        environment={name: value for name, _, value in environment},
        folder=os.readlink(folder / "cwd"),
    )


def _read_entries(file: Path) -> list[bytes]:
    return file.read_bytes().removesuffix(b"\0").split(b"\0")


def _raylet(gcs: Command) -> int:
    """Return the pid of the raylet of the same session."""
    session = gcs.option("session-name")
    return _find_only("raylet", lambda pid: any(session in argument for argument in command_of(pid).arguments))


def _find_only(name: str, matches: Callable[[int], bool] = lambda _: True) -> int:
    """Return the pid of the only living process of this name that this user may inspect."""
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    matching = [pid for pid in pids if _name(pid) == name and matches(pid)]
    if len(matching) != 1:
        raise ResourceError(
            f"{'no' if not matching else 'more than one'} {name} runs here", remedy="call this where one Ray head runs"
        )
    return matching[0]


def _name(pid: int) -> str:
    """Return the name of a process's program; empty if it has ended or belongs to another user."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return ""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TrainwrightError as trouble:
        sys.exit(f"error: {trouble}")
