"""A submitted job arrives on the cluster: it takes the credentials that came with it, and so do all its processes.

They came as a package that Ray's store of keys and values (GCS) holds for ten minutes, under a name that nobody can
guess; the job knows that name alone. The driver moves them to a key of our own, which it deletes when it ends. Every
process that Ray starts for the job reads them there before it runs anything of the user's, by Ray's setup hook. So they
are in the memory of the GCS and in the environment of the job's processes, and in nothing that is shown or logged.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainwright.core.errors import ResourceError
from trainwright.reporting.versions import versions
from trainwright.runtime.ray_compat import store_at, worker_store
from trainwright.submit.credentials import Credentials

CREDENTIALS, SENDER = "TRAINWRIGHT_CREDENTIALS", "TRAINWRIGHT_SENDER"
HOOK = f"{__name__}.join"
_SPACE, _JOBS = b"trainwright", b"job"  # namespaces of keys
_JOB_KEY = "_ray_internal_job_info_{}"
_PATIENCE_S = 30.0
_OVER = ("STOPPED", "SUCCEEDED", "FAILED")


def package_of(name: str) -> str:
    """The URI under which credentials travel."""
    return f"gcs://{name}.zip"


@contextmanager
def arrived() -> Iterator[None]:
    """Within it a submitted job's driver has what came with it; afterwards the cluster has it no more.

    Where no job was submitted, this does nothing.

    Raises:
        ResourceError: the credentials are not on the cluster any more.
    """
    name, sender = os.environ.pop(CREDENTIALS, ""), os.environ.pop(SENDER, "")  # children are no drivers of the job
    own = versions()["trainwright"]
    if sender not in ("", own):
        print(f"note: trainwright {sender} submitted this job, and this cluster has {own}", file=sys.stderr)
    if not name:
        yield
        return
    client = store_at(os.environ["RAY_ADDRESS"])
    _sweep(client)
    data = _find(client, name)
    if data is None:
        raise ResourceError(
            "the credentials that came with this job are not on the cluster any more",
            remedy="submit it again: the cluster took longer than ten minutes to start it",
        )
    client.internal_kv_put(name.encode(), data, True, _SPACE, _PATIENCE_S)
    client.internal_kv_del(package_of(name).encode(), False, None, _PATIENCE_S)
    _assume(Credentials.load(data))
    try:
        yield
    finally:
        client.internal_kv_del(name.encode(), False, _SPACE, _PATIENCE_S)


def join() -> None:
    """Give this process of a job what its driver has. Called by Ray before anything of the user's runs in it.

    It raises nothing: Ray would start such processes again and again. What storage needs will be said by the storage.
    """
    name = os.environ.pop(CREDENTIALS, "")
    if not name:
        return
    try:
        data = _find(worker_store(), name)
    except Exception as error:
        print(f"the job's credentials could not be read: {type(error).__name__}", file=sys.stderr)
        return
    if data is None:
        print("the job's credentials are not on the cluster any more: its driver has ended", file=sys.stderr)
    else:
        _assume(Credentials.load(data))


def _find(client: Any, name: str) -> bytes | None:
    """Where the driver keeps them, or as they came."""
    kept: bytes | None = client.internal_kv_get(name.encode(), _SPACE, _PATIENCE_S)
    if kept is not None:
        return kept
    came: bytes | None = client.internal_kv_get(package_of(name).encode(), None, _PATIENCE_S)
    return came


def _assume(credentials: Credentials) -> None:
    """Into this process's environment; files lie in memory, and end with the process."""
    os.environ.update(credentials.variables)
    for variable, content in credentials.files.items():
        held = os.memfd_create("trainwright-credentials")
        os.write(held, content.encode())
        os.environ[variable] = f"/proc/{os.getpid()}/fd/{held}"


def _sweep(client: Any) -> None:
    """Delete what drivers left that were killed: credentials of jobs that are over."""
    for key in client.internal_kv_keys(b"", _SPACE, _PATIENCE_S):
        submission = key.decode().rpartition(".")[0]
        told = client.internal_kv_get(_JOB_KEY.format(submission).encode(), _JOBS, _PATIENCE_S)
        if told is None or json.loads(told)["status"] in _OVER:
            client.internal_kv_del(key, False, _SPACE, _PATIENCE_S)
