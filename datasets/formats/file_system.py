"""Find files, and read byte ranges of them: with retries, a check of the file's size, and decompression."""

from __future__ import annotations

import errno
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import PurePosixPath
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

from trainwright.core.errors import DataError
from trainwright.core.retry import Backoff, unseeded_random

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
UNPACKED_BYTES = 256 << 20


class RandomAccessFile:
    """A file whose bytes can be read from anywhere. Raises DataError where it cannot be opened.

    Args:
        file: its path.
        opener: opens it as a pyarrow.NativeFile.

    Attributes:
        size_bytes: of its content.
    """

    def __init__(self, file: str, opener: Callable[[], Any]) -> None:
        self.file, self._opener = file, opener
        self._handle: Any = None
        self.size_bytes: int = self._retried(lambda: self._opened().size())

    def read(self, start: int, stop: int) -> bytes:
        """Bytes start..stop, all of them. Raises DataError."""
        if stop > self.size_bytes:
            raise changed_error(f"it has {self.size_bytes} bytes and had {stop} or more", self.file)
        content: bytes = self._retried(lambda: self._opened().read_at(stop - start, start)) if stop > start else b""
        if len(content) != stop - start:
            how = f"it ends at byte {start + len(content)} and had {self.size_bytes} bytes before"
            raise changed_error(how, self.file)
        return content

    def close(self) -> None:
        """Close the file."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def _opened(self) -> Any:
        if self._handle is None:
            self._handle = self._opener()
        return self._handle

    def _retried(self, read: Callable[[], Any]) -> Any:
        def attempt() -> Any:
            try:
                return read()
            except OSError:
                self._handle = None  # another attempt opens it anew
                raise

        try:
            return retry_transient(attempt, self.file)
        except FileNotFoundError as error:
            raise changed_error("it is gone", self.file) from error
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"the file cannot be read: {error}", where=self.file, remedy="check rights and disk, or leave it out"
            ) from error


def compression_codec(file: str) -> str | None:
    """Return the codec that a file's suffix stands for; None for none."""
    return next((codec for suffix, codec in COMPRESSIONS.items() if file.lower().endswith(suffix)), None)


@contextmanager
def open_file(system: pafs.FileSystem, file: str, size_bytes: int | None = None) -> Iterator[RandomAccessFile]:
    """Open a file; a compressed one is unpacked in memory, up to UNPACKED_BYTES. DataError if its size has changed."""
    stored, codec = RandomAccessFile(file, lambda: system.open_input_file(file)), compression_codec(file)
    try:
        if size_bytes not in (None, stored.size_bytes):
            raise changed_error(f"it has {stored.size_bytes} bytes and had {size_bytes} when it was indexed", file)
        yield stored if codec is None else RandomAccessFile(file, partial(pa.BufferReader, _unpacked(stored, codec)))
    finally:
        stored.close()


def _unpacked(stored: RandomAccessFile, codec: str) -> bytes:
    packed = stored.read(0, stored.size_bytes)
    if not packed:
        return b""
    try:
        with pa.CompressedInputStream(pa.BufferReader(packed), codec) as stream:
            content: bytes = stream.read(UNPACKED_BYTES + 1)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"the compressed file is damaged: {error}", where=stored.file, remedy="compress it again, or leave it out"
        ) from error
    if len(content) > UNPACKED_BYTES:
        raise DataError(
            f"unpacked, the file is larger than {UNPACKED_BYTES >> 20} MiB, and rows in it cannot be reached by number",
            where=stored.file,
            remedy="unpack it, then for speed convert it: trainwright data convert",
        )
    return content


def changed_error(how: str, where: str, what: str = "file") -> DataError:
    """Return the error for data that was changed since it was indexed."""
    return DataError(f"the {what} changed: {how}", where=where, remedy="keep the data as it is while a run reads it")


# --- Reading again when a store is slow or throttles ------------------------------------------------------------------


_Value = TypeVar("_Value")

_DEADLINE_S = 60.0
_TRANSIENT_ERRORS = (TimeoutError, ConnectionError, InterruptedError, BlockingIOError)
# Errors without a class of their own; ESTALE is of NFS: the handle is old, the file may be opened anew.
_TRANSIENT_ERRNOS = {errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ESTALE}
# pyarrow's file systems put the store's answer into the text of an OSError without an errno.
_TRANSIENT_MESSAGES = re.compile(
    r"slow.?down|throttl|too.many.requests|request.?timeout|timed.out|timeout was reached|time-?out error"
    r"|service.?unavailable|server.?busy|internal.?(server.?)?error|bad gateway|gateway time-?out"
    r"|network_connection|connection (was )?(reset|refused|closed|aborted)|temporarily unavailable"
    r"|http (response |status )?(code )?:? ?(408|429|500|502|503|504)\b|curlcode: (6|7|18|28|35|52|55|56)\b",
    re.IGNORECASE,
)


def is_transient(error: OSError) -> bool:
    """Whether an attempt may succeed later: after timeouts, lost connections, or throttling by a store."""
    if isinstance(error, _TRANSIENT_ERRORS) or error.errno in _TRANSIENT_ERRNOS:
        return True
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError):
        return False
    return _TRANSIENT_MESSAGES.search(str(error)) is not None


def retry_transient(
    read: Callable[[], _Value],
    where: str,
    *,
    deadline_s: float = _DEADLINE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    jitter: Callable[[], float] = unseeded_random,
) -> _Value:
    """Return `read()`, which is repeated after growing pauses while it raises transient errors.

    Args:
        read: may be called many times.
        where: what is read, for the message.
        deadline_s: no attempt starts later than this after the first.
        clock: returns seconds, from any origin.
        sleep: waits for some seconds.
        jitter: returns numbers in [0, 1); see `core.retry`.

    Raises:
        DataError: the deadline passed. The message has the time, the number of attempts and the last error.
    """
    pauses = Backoff(deadline_s, clock=clock, sleep=sleep, jitter=jitter)
    while True:
        try:
            return read()
        except OSError as error:
            if not is_transient(error):
                raise
            tried_s = pauses.elapsed_s
            if not pauses.wait():
                raise DataError(
                    f"the store gave no answer in {tried_s:.1f} s and {pauses.attempts} attempts; the last: {error}",
                    where=where,
                    remedy="check whether the store is up and throttles; the same command continues from a checkpoint",
                ) from error


# --- Finding files ----------------------------------------------------------------------------------------------------


_WILD = re.compile(r"[*?\[]")
_OPTION = r"\w+=[^&*?\[/]*(?:://[^&*?\[/]*)?"
_OPTIONS = re.compile(rf"\?{_OPTION}(?:&{_OPTION})*$")  # of a store, at the end of its address; no wildcard `?`


_AZURE_SETTINGS = (  # after AZURE_STORAGE_, as obstore reads them
    "ACCOUNT_NAME", "ACCOUNT_KEY", "ACCESS_KEY", "SAS_TOKEN", "SAS_KEY", "CLIENT_ID", "CLIENT_SECRET", "TENANT_ID",
)  # fmt: skip


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Make a local path absolute, so that it means the same in a worker; a URI stays as it is.

    Raises DataError for an address with a password.
    """
    text = os.fspath(path)
    user, separator, _ = text.partition("://")[2].partition("/")[0].rpartition("@")
    if separator and ":" in user:
        raise DataError(
            "the address has a password in it, which would be shown wherever the data set is named",
            where=text.replace(f"{user}@", "***@"),
            remedy="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or what the store takes, in the environment",
        )
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def resolve_file_system(path: str) -> tuple[pafs.FileSystem, str]:
    """Return the file system of an absolute path or URI, and the path or glob within it. Raises DataError."""
    if "://" not in path:
        return pafs.LocalFileSystem(), path
    address = _OPTIONS.sub("", path)
    base, options = _WILD.split(address, maxsplit=1)[0], path[len(address) :]
    try:
        system, root = retry_transient(lambda: _open_address(base + options), path)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"the address is not understood: {error}", where=path, remedy="use s3, gs, az or abfs"
        ) from error
    pattern = address[len(base) :]
    return system, f"{root}/{pattern}" if pattern and base.endswith("/") and not root.endswith("/") else root + pattern


def _open_address(address: str) -> tuple[pafs.FileSystem, str]:
    """Return the file system of a URI, and the path within it. Raises as pyarrow, or DataError."""
    if not address.startswith("az://"):  # which is an address of obstore, and not of pyarrow
        system, root = pafs.FileSystem.from_uri(address)
        return system, root
    root = address.removeprefix("az://").rstrip("/")
    if not root or set(root) & set("@?#"):
        raise ValueError("write az://CONTAINER/PATH; the account comes from AZURE_STORAGE_ACCOUNT_NAME")
    return _azure_file_system(address), root


def _azure_file_system(where: str) -> pafs.FileSystem:
    """Return the Azure file system of the account in the environment. Raises DataError."""
    account, *credentials = (os.environ.get(f"AZURE_STORAGE_{name}", "") for name in _AZURE_SETTINGS)
    if not account:
        raise DataError(
            "no account is set for az://",
            where=where,
            remedy="set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, here and on every node",
        )
    key, access_key, sas_token, sas_key, *client = credentials
    settings = dict[str, str]()
    if key or access_key:
        settings["account_key"] = key or access_key
    elif all(client):
        settings.update(zip(("client_id", "client_secret", "tenant_id"), client, strict=True))
    elif sas_token or sas_key:
        settings["sas_token"] = sas_token or sas_key
    endpoint = urllib.parse.urlsplit(os.environ.get("AZURE_STORAGE_ENDPOINT") or os.environ.get("AZURE_ENDPOINT", ""))
    if endpoint.netloc:
        host = endpoint.netloc  # pyarrow puts the account before one that begins with a dot
        authority = host.removeprefix(account) if host.startswith(f"{account}.") else host
        settings |= {"blob_storage_authority": authority, "blob_storage_scheme": endpoint.scheme}
        settings |= {
            "dfs_storage_authority": authority.replace(".blob.", ".dfs."),
            "dfs_storage_scheme": endpoint.scheme,
        }
    try:
        return pafs.AzureFileSystem(account, **settings)
    except (ImportError, TypeError) as error:
        raise DataError(
            f"this pyarrow cannot open az:// with {', '.join(settings) or 'default credentials'}: {error}",
            where=where,
            remedy="pip install -U pyarrow, or set AZURE_STORAGE_ACCOUNT_KEY",
        ) from error


def glob_base(path: str) -> str:
    """Return the path, or the folder before the first wildcard of a glob."""
    base = _WILD.split(path, maxsplit=1)[0]
    return path if base == path else base.rpartition("/")[0] or "/"


def find_files(
    system: pafs.FileSystem, path: str, shown: str, kind: str, suffixes: tuple[str, ...], *, linked_files: bool = False
) -> list[pafs.FileInfo]:
    """Return the files at a path, sorted by path, without repeats by symbolic links on a local disk.

    Args:
        system: to look in.
        path: a file; a folder, searched recursively for the suffixes, but for names that begin with `_` or `.`; or a
            glob (`*`, `?`, `[...]`, `**`).
        shown: the path as the user wrote it.
        kind: of the files, for messages.
        suffixes: of the files of a folder.
        linked_files: whether a link to another file of the path counts as a file; links to folders never count.

    Raises:
        DataError: there is no file, or the store cannot be listed.
    """
    base, target, entries = list_files(system, path, shown)
    if target.type == pafs.FileType.File and base == path:
        return [target]
    files = filter_files(entries, path, suffixes)
    if not files:
        raise DataError(
            f"no {kind} file is here, among {len(entries)} entries" if entries else "the folder is empty",
            where=shown,
            remedy=f"name a folder or glob with files that end in {', '.join(suffixes)}",
        )
    return _distinct(files, base, linked_files) if isinstance(system, pafs.LocalFileSystem) else files


def _distinct(files: list[pafs.FileInfo], base: str, linked_files: bool) -> list[pafs.FileInfo]:
    """Keep one path of each local file, if possible one without a link below the base."""
    root, real_folder = os.path.realpath(base), lru_cache(maxsize=None)(os.path.realpath)
    best_path: dict[str, tuple[bool, int, str]] = {}
    for info in files:
        folder, name = os.path.split(info.path)
        real = os.path.join(real_folder(folder), name)
        if not linked_files and os.path.islink(real):
            real = os.path.realpath(real)
        direct = os.path.normpath(root + info.path[len(base) :])
        rank = real != direct, len(info.path), info.path
        best_path[real] = min(best_path.get(real, rank), rank)
    paths = {path for _, _, path in best_path.values()}
    return [info for info in files if info.path in paths]


def filter_files(entries: Iterable[pafs.FileInfo], path: str, suffixes: tuple[str, ...]) -> list[pafs.FileInfo]:
    """Return the files among `entries` that belong to a folder or match a glob, sorted by path."""
    base = glob_base(path)
    pattern = _glob(path) if base != path else None
    files = [info for info in entries if info.type == pafs.FileType.File]
    files = [info for info in files if (pattern.fullmatch(info.path) if pattern else _has_suffix(info, base, suffixes))]
    return sorted(files, key=lambda info: str(info.path))


def list_files(system: pafs.FileSystem, path: str, shown: str) -> tuple[str, pafs.FileInfo, list[pafs.FileInfo]]:
    """Return a path up to its first wildcard, its file info, and its entries. Raises DataError if it is missing."""
    base = glob_base(path)
    try:
        info = retry_transient(lambda: system.get_file_info(base), shown)
        entries = [info] if info.type == pafs.FileType.File else []
        if info.type == pafs.FileType.Directory:
            entries = retry_transient(lambda: system.get_file_info(pafs.FileSelector(base, recursive=True)), shown)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"the data cannot be listed: {error}", where=shown, remedy="check path and rights") from error
    if info.type == pafs.FileType.NotFound:
        raise DataError("there is nothing at this path", where=shown, remedy="check the path, or fetch the data first")
    return base, info, entries


def _has_suffix(info: pafs.FileInfo, base: str, suffixes: tuple[str, ...]) -> bool:
    parts = PurePosixPath(info.path[len(base) :].lstrip("/")).parts
    return info.path.lower().endswith(suffixes) and not any(part.startswith(("_", ".")) for part in parts)


def _glob(pattern: str) -> re.Pattern[str]:
    """`**/` any folders, `*` and `?` within one name, `[...]` one of some characters, `[!...]` any other."""
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[!?[^\]]+\])", pattern)
    return re.compile("".join(words.get(part) or _characters(part) or re.escape(part) for part in parts))


def _characters(part: str) -> str:
    """The regular expression of one `[...]` of a glob; empty for other text."""
    if not part.startswith("["):
        return ""
    return f"(?!/)[^{part[2:]}" if part[1] in "!^" and len(part) > 3 else part
