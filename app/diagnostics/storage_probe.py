"""Try a storage and the paths of data from this machine."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainwright.core.errors import StorageError, TrainwrightError
from trainwright.diagnostics.node_facts import DataPath, StorageResult
from trainwright.storage.object_store import Store, open_store

_Value = TypeVar("_Value")
_PREFIX = "doctor-"
_DATA = b"trainwright doctor was here"


def probe_storage(uri: str) -> StorageResult:
    """Create a small file twice, read it and delete it, with about ten seconds for each."""
    try:
        with _RemoveNewFolder(uri):
            return _probe_store(open_store(uri).impatient(), uri)
    except StorageError as error:
        return StorageResult(uri=uri, fault=error.what, remedy=error.remedy or "use another storage")


def _probe_store(store: Store, uri: str) -> StorageResult:
    path = f"{_PREFIX}{uuid.uuid4().hex}"
    try:
        created, write_s = _timed(lambda: store.create(path, _DATA))
        again = store.create(path, b"another")
        read, read_s = _timed(lambda: store.find(path))
    except StorageError:
        with suppress(StorageError):  # the first error is reported
            store.delete([path])
        raise
    _, delete_s = _timed(lambda: store.delete([path]))
    once = created and not again and read == _DATA
    return StorageResult(uri=uri, creates_once=once, write_s=write_s, read_s=read_s, delete_s=delete_s)


def _timed(action: Callable[[], _Value]) -> tuple[_Value, float]:
    start = time.perf_counter()
    return action(), time.perf_counter() - start


class _RemoveNewFolder:
    """Removes a folder that did not exist before, unless another process has written into it."""

    def __init__(self, uri: str) -> None:
        self._made: list[Path] = []
        folder = Path(uri)
        while "://" not in uri and not folder.exists():
            self._made.append(folder)
            folder = folder.parent

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            for folder in self._made:
                folder.rmdir()


def write_mark(uri: str, visit: str, node: str) -> None:
    """Write a test file for other nodes to find. Raises StorageError."""
    open_store(uri).impatient().put(f"{_PREFIX}{visit}/{node}", _DATA)


def read_marks(uri: str, visit: str) -> frozenset[str]:
    """Return the nodes whose test files of a visit are visible here. Raises StorageError."""
    found = open_store(uri).impatient().list(f"{_PREFIX}{visit}")
    return frozenset(path.rpartition("/")[2] for path, _ in found)


def delete_marks(uri: str, visit: str) -> None:
    """Delete the visible test files of a visit. Raises StorageError."""
    open_store(uri).impatient().delete_folder(f"{_PREFIX}{visit}")


def dataset_paths(dataset: Any) -> Iterator[str]:
    """Yield the paths and URIs that a data set and its parts read."""
    path = getattr(dataset, "path", None)
    if isinstance(path, str):
        yield path
    elif isinstance(dataset, tuple | list):
        for item in dataset:
            yield from dataset_paths(item)
    elif is_dataclass(dataset):
        for each in fields(dataset):
            yield from dataset_paths(getattr(dataset, each.name))


def probe_data_paths(uris: Iterable[str]) -> tuple[DataPath, ...]:
    """Check that each path of data exists."""
    return tuple(DataPath(uri=uri, fault=_path_error(uri)) for uri in uris)


def _path_error(uri: str) -> str:
    import pyarrow.fs as pafs

    from trainwright.datasets.formats.file_system import glob_base, resolve_file_system

    try:
        system, path = resolve_file_system(uri)
        found = system.get_file_info(glob_base(path))
    except (OSError, TrainwrightError) as error:
        return str(getattr(error, "what", error)).partition("\n")[0][:200]
    return "it does not exist" if found.type == pafs.FileType.NotFound else ""
