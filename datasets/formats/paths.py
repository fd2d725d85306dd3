"""Finding files: paths, folders and globs, on local disks and on every store that pyarrow.fs understands."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

import pyarrow as pa
import pyarrow.fs as pafs

from trainwright.core.errors import DataError
from trainwright.datasets.formats.retry import retrying

_WILD = re.compile(r"[*?\[]")


def absolute(path: str | os.PathLike[str]) -> str:
    """A local path made absolute, so that it means the same in a worker; a URI as it is.

    Raises DataError for an address with a password.
    """
    text = os.fspath(path)
    user, found, _ = text.partition("://")[2].partition("/")[0].rpartition("@")
    if found and ":" in user:
        raise DataError(
            "the address has a password in it, which would be shown wherever the data set is named",
            where=text.replace(f"{user}@", "***@"),
            remedy="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or what the store takes, in the environment",
        )
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def system_of(path: str) -> tuple[pafs.FileSystem, str]:
    """The file system of an absolute path or URI, and the path or glob within it. Raises DataError."""
    if "://" not in path:
        return pafs.LocalFileSystem(), path
    base = _WILD.split(path, maxsplit=1)[0]
    try:
        system, root = retrying(lambda: pafs.FileSystem.from_uri(base), path)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the address is not understood: {error}", where=path, remedy="use s3, gs or abfs") from error
    pattern = path[len(base) :]
    return system, f"{root}/{pattern}" if pattern and base.endswith("/") and not root.endswith("/") else root + pattern


def base_of(path: str) -> str:
    """The path itself; of a glob, the folder before its first wildcard."""
    base = _WILD.split(path, maxsplit=1)[0]
    return path if base == path else base.rpartition("/")[0] or "/"


def find(system: pafs.FileSystem, path: str, shown: str, kind: str, suffixes: tuple[str, ...]) -> list[pafs.FileInfo]:
    """The files at a path, sorted by path.

    Args:
        system: to look in.
        path: a file; a folder, searched recursively for the suffixes, but for names that begin with `_` or `.`; or a
            glob (`*`, `?`, `[...]`, `**`).
        shown: the path as the user wrote it.
        kind: of the files, for messages.
        suffixes: of files that are taken from a folder.

    Raises:
        DataError: nothing is there, or the store cannot be listed.
    """
    base, found, listed = _listed(system, path, shown)
    if found.type == pafs.FileType.File and base == path:
        return [found]
    files = chosen(listed, path, suffixes)
    if not files:
        raise DataError(
            f"no {kind} file is here, among {len(listed)} entries" if listed else "the folder is empty",
            where=shown,
            remedy=f"name a folder or glob with files that end in {', '.join(suffixes)}",
        )
    return files


def chosen(listed: Iterable[pafs.FileInfo], path: str, suffixes: tuple[str, ...]) -> list[pafs.FileInfo]:
    """The files among those listed that a folder or glob stands for, sorted by path."""
    base = base_of(path)
    pattern = _glob(path) if base != path else None
    files = [info for info in listed if info.type == pafs.FileType.File]
    files = [info for info in files if (pattern.fullmatch(info.path) if pattern else _wanted(info, base, suffixes))]
    return sorted(files, key=lambda info: str(info.path))


def common_folder(files: Sequence[str]) -> str:
    """The folder that holds all of the files; empty for none."""
    return os.path.commonpath([os.path.dirname(file) for file in files]) if files else ""


def _listed(system: pafs.FileSystem, path: str, shown: str) -> tuple[str, pafs.FileInfo, list[pafs.FileInfo]]:
    base = base_of(path)
    try:
        found = retrying(lambda: system.get_file_info(base), shown)
        listed = [found] if found.type == pafs.FileType.File else []
        if found.type == pafs.FileType.Directory:
            listed = retrying(lambda: system.get_file_info(pafs.FileSelector(base, recursive=True)), shown)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"the data cannot be listed: {error}", where=shown, remedy="check path and rights") from error
    if found.type == pafs.FileType.NotFound:
        raise DataError("there is nothing at this path", where=shown, remedy="check the path, or fetch the data first")
    return base, found, listed


def _wanted(info: pafs.FileInfo, base: str, suffixes: tuple[str, ...]) -> bool:
    parts = PurePosixPath(info.path[len(base) :].lstrip("/")).parts
    return info.path.lower().endswith(suffixes) and not any(part.startswith(("_", ".")) for part in parts)


def _glob(pattern: str) -> re.Pattern[str]:
    """`**/` any folders, `*` and `?` within one name, `[...]` one of some characters."""
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    return re.compile("".join(words.get(part, part if part.startswith("[") else re.escape(part)) for part in parts))
