"""Functions of a job file, a script or a notebook travel by value."""

from __future__ import annotations

from trainwright.core.byvalue import dumps, loads
from trainwright.core.errors import JobError
from trainwright.core.job import Job


def pack(job: Job) -> bytes:
    """Pickle a job, with every module of the user's own by value and the settings of the frameworks in this process.

    Raises:
        JobError: something in the job cannot travel, such as an open file or a lock.
    """
    try:
        return dumps(job)
    except Exception as error:
        problem = f"the job cannot be sent to the workers: {error}; make such objects inside model= or step="
        raise JobError([problem]) from error


def unpack(data: bytes) -> Job:
    """The job again, in a worker, which takes the settings first."""
    job = loads(data)
    assert isinstance(job, Job)
    return job
