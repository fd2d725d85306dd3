"""How a submitted job ended, as the command that followed it ends. Pure."""

from __future__ import annotations

import signal

from trainwright.core.errors import ResourceError
from trainwright.submit.job_server import JobNews

_STOPPED = 128 + signal.SIGTERM  # what Ray sends to stop a job


def exit_code(job: JobNews, *, lacks_trainwright: bool = False) -> int:
    """The code of the job's own driver; of one that a signal ended, 128 and its number.

    Args:
        job: that is over.
        lacks_trainwright: its log says that there is no trainwright on the cluster.

    Raises:
        ResourceError: it never ran, or its driver went without a word.
    """
    if job.code is not None and job.code != 0 and lacks_trainwright:
        raise ResourceError(
            "the cluster's Python has no trainwright",
            where=f"job {job.id}",
            remedy="install it on every node: see setup_commands in cluster.yaml, then `ray up cluster.yaml`",
        )
    if job.code is not None:
        return job.code if job.code >= 0 else 128 - job.code
    if job.status == "SUCCEEDED":
        return 0
    if job.status == "STOPPED":
        return _STOPPED
    raise ResourceError(
        "the cluster ended the job without an exit code: its driver could not start, or its node went",
        where=f"job {job.id}",
        remedy="submit it again: a run goes on where it was; --verbose shows what Ray says",
        detail=job.message,
    )
