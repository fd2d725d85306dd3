"""Functions of a job file, a script or a notebook travel by value, and with them modules that they import when called.

A worker that starts later, on whatever machine, runs the code that the run began with, though files were changed since.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from trainwright.core.errors import JobError
from trainwright.core.job import Job
from trainwright.core.pickling import dumps, loads
from trainwright.planning.job_description import imported

_HERE = uuid.uuid4().hex  # a forked process has the same, and another process id


def pack(job: Job) -> bytes:
    """Pickle a job, with every module of the user's own by value and the settings of the frameworks in this process.

    Raises:
        JobError: something in the job cannot travel, such as an open file or a lock.
    """
    try:
        return dumps((Modules(_origin(), _sources(job)), job))
    except Exception as error:
        problem = f"the job cannot be sent to the workers: {error}; make such objects inside model= or step="
        raise JobError([problem]) from error


def unpack(data: bytes) -> Job:
    """The job again, in a worker, which takes the settings first."""
    _, job = loads(data)
    assert isinstance(job, Job)
    return job


class Modules(importlib.abc.MetaPathFinder, importlib.abc.ExecutionLoader):
    """Sources of modules, by name: a process that unpickles them imports these modules from there, and not from disk.

    Args:
        origin: the process that read the sources; it goes on importing from disk.
        sources: file and source of each module.
    """

    def __init__(self, origin: str, sources: Mapping[str, tuple[str, bytes]]) -> None:
        self._origin, self._sources = origin, dict(sources)

    def __reduce__(self) -> tuple[object, ...]:
        return _arrived, (self._origin, self._sources)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module whose source came along."""
        if fullname not in self._sources:
            return None
        file = self._sources[fullname][0]
        inside = [os.path.dirname(file)] if os.path.basename(file) == "__init__.py" else None
        return importlib.util.spec_from_file_location(fullname, file, loader=self, submodule_search_locations=inside)

    def get_filename(self, fullname: str) -> str:
        """Where the source was, which need not be a file of this machine."""
        return self._sources[fullname][0]

    def get_source(self, fullname: str) -> str:
        """The source that came along."""
        return importlib.util.decode_source(self._sources[fullname][1])


def _arrived(origin: str, sources: Mapping[str, tuple[str, bytes]]) -> Modules:
    made = Modules(origin, sources)
    if sources and origin != _origin():
        sys.meta_path.insert(0, made)
    return made


def _origin() -> str:
    return f"{_HERE}-{os.getpid()}"


def _sources(job: Job) -> dict[str, tuple[str, bytes]]:
    """Modules of the user's own, written in Python, that the job's functions import when they are called."""
    return {
        name: (os.path.abspath(file), Path(file).read_bytes())
        for name, file in imported(job).items()
        if file.endswith(".py")
    }
