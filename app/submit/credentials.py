"""Which credentials go with a job: the environment's, for the kinds of storage that it uses. Pure but for files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainwright.core.errors import JobError, StorageError

NAMES: Mapping[str, tuple[str, ...]] = {
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
class Credentials:
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
    def load(cls, data: bytes) -> Credentials:
        """What `dump` gave."""
        held = json.loads(data)
        return cls(variables=held["variables"], files=held["files"])


def schemes_of(text: str) -> tuple[str, ...]:
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


def credentials_of(schemes: Iterable[str], named: Iterable[str], environment: Mapping[str, str]) -> Credentials:
    """What the environment holds for these kinds of storage, and the variables that are named besides.

    Raises:
        JobError: a named one is not set, or a file of credentials cannot be read.
    """
    wanted = dict.fromkeys(name for scheme in schemes for name in NAMES[scheme] if environment.get(name))
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
    return Credentials(variables=variables, files=files)
