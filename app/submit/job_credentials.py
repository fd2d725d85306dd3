"""Which credentials go with a job: the environment's, for the kinds of storage that it uses. Pure but for files.

They came as a package that Ray's store of keys and values (GCS) holds for ten minutes, under a name that nobody can
guess; the job knows that name alone. The driver moves them to a key of our own, which it deletes when it ends. Every
process that Ray starts for the job reads them there before it runs anything of the user's, by Ray's setup hook. So they
are in the memory of the GCS and in the environment of the job's processes, and in nothing that is shown or logged.
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
    """What a job's processes get into their environment. Its repr holds names alone.

    Attributes:
        variables: values by name.
        files: contents by the variable that is to name a file with them.
    """

    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    files: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the variables, in order."""
        return tuple(sorted({*self.variables, *self.files}))

    def __repr__(self) -> str:
        return f"Credentials({', '.join(self.names)})"

    def dump(self) -> bytes:
        """As they travel."""
        return json.dumps({"variables": dict(self.variables), "files": dict(self.files)}).encode()

    @classmethod
    def load(cls, data: bytes) -> JobCredentials:
        """What `dump` gave."""
        held = json.loads(data)
        return cls(variables=held["variables"], files=held["files"])


def storage_schemes(text: str) -> tuple[str, ...]:
    """The kinds of object storage that a text names.

    Raises:
        StorageError: an address in it holds credentials, which would be shown wherever the job is.
    """
    found = _WITH_USER.search(text)
    if found is not None:
        raise StorageError(
            f"an address of the job holds credentials: {found[1]}://...@...",
            remedy=f"write {found[1]}://BUCKET/PREFIX; credentials belong into environment variables",
        )
    return tuple(sorted({_KINDS[scheme] for scheme in _SCHEME.findall(text)}))


def collect_credentials(schemes: Iterable[str], named: Iterable[str], environment: Mapping[str, str]) -> JobCredentials:
    """What the environment holds for these kinds of storage, and the variables that are named besides.

    Raises:
        JobError: a named one is not set, or a file of credentials cannot be read.
    """
    wanted = dict.fromkeys(name for scheme in schemes for name in _VARIABLES_BY_SCHEME[scheme] if environment.get(name))
    problems = [f"--env {name}: it is not set here" for name in named if name not in environment]
    wanted.update(dict.fromkeys(name for name in named if name in environment))
    variables, files = {}, {}
    for name in wanted:
        if name not in _FILES:
            variables[name] = environment[name]
            continue
        try:
            files[name] = Path(environment[name]).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeError):
            problems.append(f"{name} names no file that can be read: unset it, or give --no-credentials")
    if problems:
        raise JobError(problems)
    return JobCredentials(variables=variables, files=files)


# --- A submitted job arrives on the cluster ---------------------------------------------------------------------------


CREDENTIALS_VARIABLE, SENDER_VARIABLE = "TRAINWRIGHT_CREDENTIALS", "TRAINWRIGHT_SENDER"
WORKER_SETUP_HOOK = f"{__name__}.join"
_SPACE, _JOBS = b"trainwright", b"job"  # namespaces of keys
_JOB_KEY = "_ray_internal_job_info_{}"
_TIMEOUT_S = 30.0
_FINAL_STATES = ("STOPPED", "SUCCEEDED", "FAILED")


def credential_package_uri(name: str) -> str:
    """The URI under which credentials travel."""
    return f"gcs://{name}.zip"


@contextmanager
def received_credentials() -> Iterator[None]:
    """Within it a submitted job's driver has what came with it; afterwards the cluster has it no more.

    Where no job was submitted, this does nothing.

    Raises:
        ResourceError: the credentials are not on the cluster any more.
    """
    name, sender = (
        os.environ.pop(CREDENTIALS_VARIABLE, ""),
        os.environ.pop(SENDER_VARIABLE, ""),
    )  # children are no drivers of the job
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
            "the credentials that came with this job are not on the cluster any more",
            remedy="submit it again: the cluster took longer than ten minutes to start it",
        )
    client.internal_kv_put(name.encode(), data, True, _SPACE, _TIMEOUT_S)
    client.internal_kv_del(credential_package_uri(name).encode(), False, None, _TIMEOUT_S)
    _apply(JobCredentials.load(data))
    try:
        yield
    finally:
        client.internal_kv_del(name.encode(), False, _SPACE, _TIMEOUT_S)


def join() -> None:
    """Give this process of a job what its driver has. Called by Ray before anything of the user's runs in it.

    It raises nothing: Ray would start such processes again and again. What storage needs will be said by the storage.
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
        print("the job's credentials are not on the cluster any more: its driver has ended", file=sys.stderr)
    else:
        _apply(JobCredentials.load(data))


def _find(client: Any, name: str) -> bytes | None:
    """Where the driver keeps them, or as they came."""
    kept: bytes | None = client.internal_kv_get(name.encode(), _SPACE, _TIMEOUT_S)
    if kept is not None:
        return kept
    came: bytes | None = client.internal_kv_get(credential_package_uri(name).encode(), None, _TIMEOUT_S)
    return came


def _apply(credentials: JobCredentials) -> None:
    """Into this process's environment; files lie in memory, and end with the process."""
    os.environ.update(credentials.variables)
    for variable, content in credentials.files.items():
        held = os.memfd_create("trainwright-credentials")
        os.write(held, content.encode())
        os.environ[variable] = f"/proc/{os.getpid()}/fd/{held}"


def _delete_stale(client: Any) -> None:
    """Delete what drivers left that were killed: credentials of jobs that are over."""
    for key in client.internal_kv_keys(b"", _SPACE, _TIMEOUT_S):
        submission = key.decode().rpartition(".")[0]
        told = client.internal_kv_get(_JOB_KEY.format(submission).encode(), _JOBS, _TIMEOUT_S)
        if told is None or json.loads(told)["status"] in _FINAL_STATES:
            client.internal_kv_del(key, False, _SPACE, _TIMEOUT_S)
