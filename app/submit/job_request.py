"""What is to be submitted: a job file read as `fit` would read it, and what the cluster has to know of it."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainwright.core.errors import JobError, StorageError
from trainwright.core.job import Job
from trainwright.core.strict_model import Fields
from trainwright.planning.job_file import load
from trainwright.storage.object_store import canonical
from trainwright.submit.attach import Mark
from trainwright.submit.credentials import schemes_of


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the command line asks for.

    Attributes:
        file: the job's.
        overrides: `field=value`, those of `--strategy` and `--workers` included.
        options: that `fit` gets too: `--resume`, `--fresh`, `--verbose`.
        env: further variables to send.
        credentials: whether any are sent.
        folder: to pack; None for the file's own.
    """

    file: str
    overrides: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    credentials: bool = True
    folder: str | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """A job, or a distillation, as the cluster gets it.

    Attributes:
        verb: `fit` or `distill`.
        run: name of the run; of a recipe's last one.
        storage: as the job says it.
        schemes: kinds of object storage that it uses.
    """

    wish: Wish
    verb: str
    run: str
    storage: str
    schemes: tuple[str, ...]

    @property
    def mark(self) -> Mark:
        """What tells it from other submissions."""
        facts = (Path(self.wish.file).read_bytes(), *(item.encode() for item in sorted(self.wish.overrides)))
        digest = hashlib.sha256(b"\0".join(facts)).hexdigest()[:16]
        return Mark(run=self.run, storage=canonical(self.storage), digest=digest, fresh="--fresh" in self.wish.options)

    def entrypoint(self, folder: Path) -> str:
        """The command that the cluster runs in the unpacked folder."""
        file = Path(self.wish.file).resolve().relative_to(folder).as_posix()
        overrides = [part for item in self.wish.overrides for part in ("--set", item)]
        return shlex.join(["python", "-m", "trainwright", self.verb, file, *overrides, *self.wish.options])

    def at(self, storage: str) -> Work:
        """The same work with its runs elsewhere."""
        overrides = (*self.wish.overrides, f"storage={storage}")
        return replace(self, wish=replace(self.wish, overrides=overrides), storage=storage)


def read(wish: Wish) -> Work:
    """Load the file, and check what can be checked without data.

    Raises:
        TrainwrightError: as `fit` would; or an address in it holds credentials.
    """
    value = load(wish.file, wish.overrides)
    job = next(_jobs(value), None)
    if job is None:
        raise JobError([f"{wish.file}: a {type(value).__name__} without a job cannot be submitted"])
    canonical(job.storage)
    return Work(
        wish=wish,
        verb="fit" if isinstance(value, Job) else "distill",
        run=job.name,
        storage=job.storage,
        schemes=schemes_of(" ".join([repr(value), *wish.overrides])),
    )


def _jobs(value: Any) -> Iterator[Job]:
    """The job itself, or those of a distillation's and a recipe's parts."""
    if isinstance(value, Job):
        yield value
    elif isinstance(value, Fields):
        for name in type(value).model_fields:
            yield from _jobs(getattr(value, name))


def settle(work: Work, hosts: Sequence[str], here: str) -> tuple[Work, str]:
    """The work with storage that means the same on the cluster, and what is to be said of it. Pure but for paths.

    Args:
        hosts: names of the cluster's nodes.
        here: name of this machine.

    Raises:
        StorageError: the runs would be in a folder that no node of the cluster has.
    """
    scheme, found, rest = work.storage.partition("://")
    if found and scheme != "file":
        return work, ""
    folder = rest if found else work.storage
    if tuple(hosts) == (here,):
        return work.at(canonical(work.storage)), ""
    if not Path(folder).is_absolute():
        raise StorageError(
            f"storage= is the folder {folder!r} of this machine, and nodes of a cluster share no disk",
            where=f"run {work.run!r}",
            remedy="--set storage=s3://BUCKET/runs (or gs://, az://), or an absolute folder that all nodes mount",
        )
    nodes = "its node, and goes with it" if len(hosts) == 1 else "a disk that all nodes of the cluster share"
    return work, f"storage={folder} has to be on {nodes}; object storage (s3://, gs://, az://) needs none"
