"""What a worker process gets, with the job's functions pickled by value, and modules that they import when called.

A worker that starts later, on whatever machine, runs the code that the run began with, though files were changed since.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from trainwright.core.data import Batch
from trainwright.core.errors import JobError
from trainwright.core.initial_weights import WeightSource
from trainwright.core.job import Job
from trainwright.core.pickling import dumps, loads
from trainwright.core.plan import Plan
from trainwright.datasets.data_source import Index, RowAccess
from trainwright.datasets.dataset import first_batch
from trainwright.datasets.loading.batch_loader import Fetcher
from trainwright.planning.job_description import imported_sources

_PROCESS_KEY = uuid.uuid4().hex  # a forked process has the same, and another process id


def pickle_job(job: Job) -> bytes:
    """Pickle a job, with every module of the user's own by value and the settings of the frameworks in this process.

    Raises:
        JobError: something in the job cannot travel, such as an open file or a lock.
    """
    try:
        return dumps((_ModuleSources(_origin(), _sources(job)), job))
    except JobError:
        raise
    except Exception as error:
        problem = f"the job cannot be sent to the workers: {error}; make such objects inside model= or step="
        raise JobError([problem]) from error


def unpickle_job(data: bytes) -> Job:
    """Return the job in a worker, after restoring the settings of the frameworks."""
    _, job = loads(data)
    assert isinstance(job, Job)
    return job


class _ModuleSources(importlib.abc.MetaPathFinder, importlib.abc.ExecutionLoader):
    """Sources of modules, by name: a process that unpickles them imports these modules from here, not from disk.

    Args:
        origin: the process that read the sources; it still imports them from disk.
        sources: file and source of each module.
    """

    def __init__(self, origin: str, sources: Mapping[str, tuple[str, bytes]]) -> None:
        self._origin, self._sources = origin, dict(sources)

    def __reduce__(self) -> tuple[object, ...]:
        return _install_sources, (self._origin, self._sources)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module whose source was pickled."""
        if fullname not in self._sources:
            return None
        file = self._sources[fullname][0]
        inside = [os.path.dirname(file)] if os.path.basename(file) == "__init__.py" else None
        return importlib.util.spec_from_file_location(fullname, file, loader=self, submodule_search_locations=inside)

    def get_filename(self, fullname: str) -> str:
        """Return the original path of the source, which need not exist on this machine."""
        return self._sources[fullname][0]

    def get_source(self, fullname: str) -> str:
        """Return the pickled source."""
        return importlib.util.decode_source(self._sources[fullname][1])


def _install_sources(origin: str, sources: Mapping[str, tuple[str, bytes]]) -> _ModuleSources:
    finder = _ModuleSources(origin, sources)
    if sources and origin != _origin():
        sys.meta_path.insert(0, finder)
    return finder


def _origin() -> str:
    return f"{_PROCESS_KEY}-{os.getpid()}"


def _sources(job: Job) -> dict[str, tuple[str, bytes]]:
    """Modules of the user's own, written in Python, that the job's functions import when they are called."""
    return {
        name: (os.path.abspath(file), Path(file).read_bytes())
        for name, file in imported_sources(job).items()
        if file.endswith(".py")
    }


# --- The configuration of a worker ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """All that a fresh process needs to take part."""

    job: bytes  # the pickled job
    plan: Plan
    storage: str
    run: str  # name of the run in the store at `storage`
    train: Index  # index of the training set, made once by the driver
    evaluate: Index | None = None  # index of the evaluation set
    outputs: tuple[str, ...] = ()  # names of the model's outputs that `predict` gives; empty gives all
    identity: str = ""  # of job, data and plan: a driver takes over only processes of the same identity
    preemption_s: float = 25.0  # life of a process after a preemption notice
    profile: range = range(0)  # steps (from 1) that are traced
    # delivers heavy transforms through Ray Data; None when the workers read for themselves
    fetcher: Fetcher | None = None
    evaluate_fetcher: Fetcher | None = None
    # by data set, `train` or `evaluate`: delivers the rows of a source that Ray Data executes
    rows: Mapping[str, RowAccess] = field(default_factory=dict)
    row: Batch | None = None  # a row of the training set, where a worker should not open the data set for it
    weights: WeightSource | None = None  # opened files of `initial_weights`; None where a checkpoint brings all weights

    total_steps: int | None = None  # of the run; None for those of the training set

    def first_row(self, job: Job) -> Batch:
        """Return a row of the training set."""
        return self.row or first_batch(job.train, self.train, job.columns)
