"""What a run leaves behind on this machine: shared memory that nobody uses, named actors."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

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

    def new(self, before: Surroundings, run: str) -> tuple[str, ...]:
        """What came since and is of no use to anybody: shared memory without a process, actors with the run's name."""
        orphans = self.shared - before.shared - _mapped()
        actors = {name for name in self.actors - before.actors if run in name}
        return (
            *(f"shared memory {_SHARED / name}" for name in sorted(orphans & _files())),
            *(f"actor {name}" for name in sorted(actors)),
        )


def _files() -> frozenset[str]:
    return frozenset(path.name for path in _SHARED.iterdir()) if _SHARED.is_dir() else frozenset()


def _mapped() -> set[str]:
    """Files of shared memory that a living process has mapped or open."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours to look at
            for line in (process / "maps").read_text().splitlines():
                _, inside, name = line.partition(f"{_SHARED}/")
                found |= {name.removesuffix(" (deleted)")} if inside else set()
            for handle in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = str(handle.readlink())
                    found |= {target.removeprefix(f"{_SHARED}/")} if target.startswith(f"{_SHARED}/") else set()
    return found
