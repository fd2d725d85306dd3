"""What a run leaves behind on this machine: shared memory that nobody uses, named actors."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from trainwright.storage.memory_checkpoints import PREFIX

_SHARED = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What is there at one moment.

    Attributes:
        shared: files in shared memory.
        actors: names of Ray's named actors, in all namespaces.
    """

    shared: frozenset[str]
    actors: frozenset[str]

    @classmethod
    def now(cls) -> Surroundings:
        """Look around; needs a connection to Ray."""
        from ray.util import list_named_actors

        named = list_named_actors(all_namespaces=True)
        return cls(shared=_files(), actors=frozenset(str(actor["name"]) for actor in named))

    def new(self, before: Surroundings, run: str, copies: str) -> tuple[str, ...]:
        """Return what came since and nobody uses: shared memory without a process, actors with the run's name.

        Args:
            before: the surroundings at the start of the run.
            run: name of the run.
            copies: name of the run's own folder of state copies; those of other runs are theirs to remove.
        """
        used = _used()
        new = {name for name in self.shared - before.shared if name == copies or not name.startswith(PREFIX)}
        orphans = {name for name in new if _inode(name) not in used}
        actors = {name for name in self.actors - before.actors if run in name}
        return (
            *(f"shared memory {_SHARED / name}" for name in sorted(orphans & _files())),
            *(f"actor {name}" for name in sorted(actors)),
        )


def _files() -> frozenset[str]:
    return frozenset(path.name for path in _SHARED.iterdir()) if _SHARED.is_dir() else frozenset()


def _inode(name: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (_SHARED / name).stat().st_ino
    return 0


def _used() -> set[int]:
    """Inodes of shared memory that a living process has mapped or open, whatever name it had then.

    A semaphore is mapped under another name than the one that it is given afterwards (glibc, sem_open).
    """
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours to look at
            for line in (process / "maps").read_text().splitlines():
                found |= {int(line.split()[4])} if f"{_SHARED}/" in line else set()
            for handle in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found |= {handle.stat().st_ino} if str(handle.readlink()).startswith(f"{_SHARED}/") else set()
    return found
