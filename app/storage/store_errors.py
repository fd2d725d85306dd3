"""Errors of obstore and of the operating system as StorageErrors: what, where, remedy, and never a secret."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from obstore.exceptions import AlreadyExistsError, PermissionDeniedError, UnauthenticatedError

from trainwright.core.errors import StorageError, StoreDown
from trainwright.core.redaction import redact


class MissingFile(StorageError):
    """There is no file at this path, although the store answers."""


@dataclass(frozen=True)
class _ErrorCause:
    """The cause of a store error."""

    what: str
    remedy: str
    certain: bool = False  # a write with this error certainly did nothing, and a retry would fail too
    passing: bool = False  # the error may pass by itself, so a retry may succeed


_FULL = _ErrorCause("no space left on the device or in its quota", "free space or give another storage=", certain=True)
_WRITE = _ErrorCause("permission denied", "check the owner and permissions of the folder", certain=True)
_BLOCKED = _ErrorCause(
    "a part of the path is a file, not a folder", "give the path of a folder as storage=", certain=True
)
_NOT_RESPONDING = _ErrorCause(
    "the disk or network folder does not answer", "check that it is mounted, and the state of its server", passing=True
)
_BY_NUMBER: Mapping[int, _ErrorCause] = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _WRITE,
    errno.EPERM: _WRITE,
    errno.EROFS: _ErrorCause("the file system is read-only", "give another storage=", certain=True),
    errno.ENOTDIR: _BLOCKED,
    errno.EEXIST: _BLOCKED,
    errno.ENAMETOOLONG: _ErrorCause("the name is too long", "give a shorter name= or storage=", certain=True),
    errno.ENOENT: _ErrorCause("the folder cannot be created", "give another storage=", certain=True),
    errno.EISDIR: _ErrorCause("a folder has the name of the file", "move or rename that folder", certain=True),
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN, errno.EAGAIN),
        _NOT_RESPONDING,
    ),
}

_NO_CREDENTIALS = _ErrorCause(
    "no credentials were found",
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (Google: GOOGLE_APPLICATION_CREDENTIALS; "
    "Azure: AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY) here and on every node",
    certain=True,
)
_REFUSED = _ErrorCause(
    "the store refuses the credentials, or they do not allow this",
    "check the access key, its secret, its rights to read, write, list and delete, and this machine's clock",
    certain=True,
)
_NO_BUCKET = _ErrorCause("the bucket does not exist", "create it, or correct its name in storage=", certain=True)
_REGION = _ErrorCause("the bucket is in another region", "set AWS_REGION to the region of the bucket", certain=True)
_CLOCK_SKEW = _ErrorCause(
    "the clock of this machine is wrong: the store refuses requests signed with a wrong time",
    "set the clock, with chrony or systemd-timesyncd for instance, here and on every node",
    certain=True,
)
_EXPIRED = _ErrorCause("the credentials have expired", "renew them here and on every node", certain=True)
_TIMEOUT = _ErrorCause("the store did not answer in time", "check the network and the store's own state", passing=True)
_UNREACHABLE = _ErrorCause(
    "the store cannot be reached", "check the network and the address of the endpoint (AWS_ENDPOINT_URL)", passing=True
)
_THROTTLED = _ErrorCause(
    "the store throttles requests or is overloaded (HTTP status {})",
    "let fewer runs share the bucket or prefix, checkpoint less often, or raise the limit of the store",
    passing=True,
)
_SERVER_ERROR = _ErrorCause(
    "the store has an internal error (HTTP status {})", "see the store's own log or state", passing=True
)
_CONNECTION_BROKEN = _ErrorCause(
    "the connection to the store was lost", "check the network and the store's own state", passing=True
)
_CONFLICT = _ErrorCause(
    "the store reports a conflict with another write",
    "check whether another process writes the same files",
    passing=True,
)
_BY_TEXT: tuple[tuple[re.Pattern[str], _ErrorCause], ...] = (
    (re.compile(r"RequestTimeTooSkewed|RequestInTheFuture|Signature (expired|not yet current)"), _CLOCK_SKEW),
    (re.compile(r"ExpiredToken|TokenRefreshRequired|RequestExpired|Request has expired"), _EXPIRED),
    (re.compile(r"169\.254\.169\.254|metadata\.google\.internal|Account must be specified"), _NO_CREDENTIALS),
    (re.compile(r"InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|status: 40[13]\b"), _REFUSED),
    (re.compile(r"NoSuchUpload"), _CONNECTION_BROKEN),  # the parts of the upload were joined or deleted
    (re.compile(r"NoSuchBucket|ContainerNotFound|status: 404\b"), _NO_BUCKET),
    (re.compile(r"PermanentRedirect|redirect without LOCATION|AuthorizationHeaderMalformed"), _REGION),
    (re.compile(r"status: 507\b|InsufficientStorage|StorageFull|QuotaExceeded"), _FULL),
    (re.compile(r"status: (429|503)\b|SlowDown|ServerBusy"), _THROTTLED),
    (re.compile(r"status: (408|50[0-9])\b|InternalError"), _SERVER_ERROR),
    (re.compile(r"kind: Timeout|timed out"), _TIMEOUT),
    (re.compile(r"kind: Connect|dns error"), _UNREACHABLE),
    (re.compile(r"kind: (Request|Interrupted|Decode|Unknown|Body)|request or response body error"), _CONNECTION_BROKEN),
)
_LONGEST = 200


def classify_error(error: Exception) -> _ErrorCause:
    """Return the cause of an obstore or operating system error."""
    text, number = str(error), _os_error_number(error)
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) and number:
        return _WRITE
    if number in _BY_NUMBER:
        return _BY_NUMBER[number]
    for pattern, fault in _BY_TEXT:
        if pattern.search(text):
            return replace(fault, what=fault.what.format(_status(text)))
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
        return _REFUSED
    if isinstance(error, AlreadyExistsError):
        return _CONFLICT
    if isinstance(error, FileNotFoundError) and number == 0:
        return _NO_BUCKET
    return _ErrorCause(
        _first_line_without_secrets(text), "see the store's own log or state, then run the same command again"
    )


def is_missing_file(error: Exception) -> bool:
    """Return whether the store answered that this one file does not exist."""
    return isinstance(error, FileNotFoundError) and not re.search(r"NoSuchBucket|ContainerNotFound", str(error))


def storage_error_for(error: Exception, *, doing: str, where: str) -> StorageError:
    """Return the StorageError for an obstore or operating system error; a StoreDown where it may pass by itself.

    Args:
        doing: what failed, such as `cannot write`.
        where: the URI, without secrets.
    """
    fault = classify_error(error)
    kind = StoreDown if fault.passing else StorageError
    return kind(f"{doing}: {fault.what}", where=where, remedy=fault.remedy)


def _status(text: str) -> str:
    """Return the HTTP status in the error's text."""
    match = re.search(r"status: (\d{3})\b", text)
    return match.group(1) if match else "unknown"


def _os_error_number(error: Exception) -> int:
    """Return the operating system's error number; 0 when there is none."""
    match = re.search(r"\(os error (\d+)\)", str(error))
    if match:
        return int(match.group(1))
    return error.errno or 0 if isinstance(error, OSError) else 0


def _first_line_without_secrets(text: str) -> str:
    """Return the first line, shortened, without secrets of the environment and without the body of a response."""
    line = text.partition("\n")[0].partition("<")[0].strip(" :.")
    line = re.sub(r"//[^/@\s]*@", "//", redact(line))
    return line[:_LONGEST] or "the store failed and gave no reason"
