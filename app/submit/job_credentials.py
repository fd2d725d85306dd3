"""Send credentials of storage with a submitted job, and receive them on the cluster.

They come from the environment of `submit`, for the kinds of storage that the job uses. They travel as a package with a
random name, which Ray's key-value store (GCS) keeps for ten minutes; the job gets only the name. The driver moves them
to a key of its own and deletes it at the end. Each process of the job reads them in Ray's setup hook, before user code
runs. So they are in the memory of the GCS and in the environment of the job's processes, and in no output or log.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwright.core.errors import JobError, ResourceError, StorageError
from trainwright.core.frameworks import package_versions
from trainwright.ray_cluster.ray_compat import store_at, worker_store

_VARIABLES_BY_SCHEME: Mapping[str, tuple[str, ...]] = {
    "s3": (
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
    ),
    "gs": (
        "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
    ),
    "az": (
        "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY",
        "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_TOKEN", "AZURE_STORAGE_CLIENT_ID",
        "AZURE_STORAGE_CLIENT_SECRET", "AZURE_STORAGE_TENANT_ID", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT",
    ),
}  # fmt: skip
"""Environment variables by scheme."""

_FILES = frozenset({"GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"})
_KINDS = {"s3": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}  # pyarrow.fs's ways to spell
_SCHEME = re.compile(rf"\b({'|'.join(_KINDS)})://")
_WITH_USER = re.compile(r"\b([a-z][a-z0-9+]*)://[^/\s'\"@]*:[^/\s'\"]*@")  # abfs://CONTAINER@ACCOUNT holds none


@dataclass(frozen=True, kw_only=True)
class JobCredentials:
    """Credentials for the environment of a job's processes. Its repr shows names only."""

    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    # contents of files by the variable that holds their path
    files: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the variables in order."""
        return tuple(sorted({*self.variables, *self.files}))

    def __repr__(self) -> str:
        return f"Credentials({', '.join(self.names)})"

    def dump(self) -> bytes:
        """Serialize the credentials."""
        return json.dumps({"variables": dict(self.variables), "files": dict(self.files)}).encode()

    @classmethod
    def load(cls, data: bytes) -> JobCredentials:
        """Read what `dump` wrote."""
        held = json.loads(data)
        return cls(variables=held["variables"], files=held["files"])


def storage_schemes(text: str) -> tuple[str, ...]:
    """Return the kinds of object storage that a text names.

    Raises:
        StorageError: an address in it contains credentials, which would be visible wherever the job is shown.
    """
    found = _WITH_USER.search(text)
    if found is not None:
        raise StorageError(
            f"an address of the job contains credentials: {found[1]}://...@...",
            remedy=f"write {found[1]}://BUCKET/PREFIX; put credentials into environment variables",
        )
    return tuple(sorted({_KINDS[scheme] for scheme in _SCHEME.findall(text)}))


def collect_credentials(schemes: Iterable[str], named: Iterable[str], environment: Mapping[str, str]) -> JobCredentials:
    """Return the credentials of the environment for these kinds of storage, and the additional named variables.

    Raises:
        JobError: a named variable is not set, or a file of credentials cannot be read.
    """
    wanted = dict.fromkeys(name for scheme in schemes for name in _VARIABLES_BY_SCHEME[scheme] if environment.get(name))
    problems = [f"--env {name}: the variable is not set" for name in named if name not in environment]
    wanted.update(dict.fromkeys(name for name in named if name in environment))
    variables, files = {}, {}
    for name in wanted:
        if name not in _FILES:
            variables[name] = environment[name]
            continue
        try:
            files[name] = Path(environment[name]).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeError):
            problems.append(f"{name} names a file that cannot be read: unset it, or use --no-credentials")
    if problems:
        raise JobError(problems)
    return JobCredentials(variables=variables, files=files)


# --- On the cluster ---------------------------------------------------------------------------------------------------


CREDENTIALS_VARIABLE, SENDER_VARIABLE = "TRAINWRIGHT_CREDENTIALS", "TRAINWRIGHT_SENDER"
WORKER_SETUP_HOOK = f"{__name__}.set_up_worker"
_SPACE, _JOBS = b"trainwright", b"job"  # namespaces of keys
_JOB_KEY = "_ray_internal_job_info_{}"
_TIMEOUT_S = 30.0
_FINAL_STATES = ("STOPPED", "SUCCEEDED", "FAILED")


def credential_package_uri(name: str) -> str:
    """Return the URI of the package with the credentials."""
    return f"gcs://{name}.zip"


@contextmanager
def received_credentials() -> Iterator[None]:
    """Apply the credentials of a submitted job in its driver, and delete them from the cluster at the end.

    Where no job was submitted, this does nothing.

    Raises:
        ResourceError: the credentials are no longer on the cluster.
    """
    name, sender = (
        os.environ.pop(CREDENTIALS_VARIABLE, ""),
        os.environ.pop(SENDER_VARIABLE, ""),
    )  # child processes must not act as drivers of the job
    own = package_versions()["trainwright"]
    if sender not in ("", own):
        print(f"note: trainwright {sender} submitted this job, and this cluster has {own}", file=sys.stderr)
    if not name:
        yield
        return
    client = store_at(os.environ["RAY_ADDRESS"])
    _delete_stale(client)
    data = _find(client, name)
    if data is None:
        raise ResourceError(
            "the credentials of this job are no longer on the cluster",
            remedy="submit it again; the cluster took longer than ten minutes to start it",
        )
    client.internal_kv_put(name.encode(), data, True, _SPACE, _TIMEOUT_S)
    client.internal_kv_del(credential_package_uri(name).encode(), False, None, _TIMEOUT_S)
    _apply(JobCredentials.load(data))
    try:
        yield
    finally:
        client.internal_kv_del(name.encode(), False, _SPACE, _TIMEOUT_S)


def set_up_worker() -> None:
    """Apply the job's credentials in a worker process; Ray calls this hook before user code runs.

    It raises nothing, since Ray would restart the process again and again. Storage reports missing credentials itself.
    """
    name = os.environ.pop(CREDENTIALS_VARIABLE, "")
    if not name:
        return
    try:
        data = _find(worker_store(), name)
    except Exception as error:
        print(f"the job's credentials could not be read: {type(error).__name__}", file=sys.stderr)
        return
    if data is None:
        print("the job's credentials are no longer on the cluster: its driver has ended", file=sys.stderr)
    else:
        _apply(JobCredentials.load(data))


def _find(client: Any, name: str) -> bytes | None:
    """Return the credentials from the driver's key, or from the package if the driver has not moved them yet."""
    kept: bytes | None = client.internal_kv_get(name.encode(), _SPACE, _TIMEOUT_S)
    if kept is not None:
        return kept
    came: bytes | None = client.internal_kv_get(credential_package_uri(name).encode(), None, _TIMEOUT_S)
    return came


def _apply(credentials: JobCredentials) -> None:
    """Set the variables of this process; files are in memory and end with the process."""
    os.environ.update(credentials.variables)
    for variable, content in credentials.files.items():
        held = os.memfd_create("trainwright-credentials")
        os.write(held, content.encode())
        os.environ[variable] = f"/proc/{os.getpid()}/fd/{held}"


def _delete_stale(client: Any) -> None:
    """Delete credentials of jobs that have ended, which killed drivers left."""
    for key in client.internal_kv_keys(b"", _SPACE, _TIMEOUT_S):
        submission = key.decode().rpartition(".")[0]
        told = client.internal_kv_get(_JOB_KEY.format(submission).encode(), _JOBS, _TIMEOUT_S)
        if told is None or json.loads(told)["status"] in _FINAL_STATES:
            client.internal_kv_del(key, False, _SPACE, _TIMEOUT_S)
