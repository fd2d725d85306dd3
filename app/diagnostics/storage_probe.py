"""A storage and the places of data, tried from this machine."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainwright.core.errors import StorageError, TrainwrightError
from trainwright.diagnostics.facts import Place, Stored
from trainwright.storage.store import Store, open_store

Value = TypeVar("Value")
PREFIX = "doctor-"
_DATA = b"trainwright doctor was here"


def tried(uri: str) -> Stored:
    """Write, write again, read and delete one small file, within about ten seconds each."""
    try:
        with _Traceless(uri):
            return _tried(open_store(uri).impatient(), uri)
    except StorageError as error:
        return Stored(uri=uri, fault=error.what, remedy=error.remedy or "give another storage")


def _tried(store: Store, uri: str) -> Stored:
    path = f"{PREFIX}{uuid.uuid4().hex}"
    try:
        created, write_s = _timed(lambda: store.create(path, _DATA))
        again = store.create(path, b"another")
        read, read_s = _timed(lambda: store.find(path))
    except StorageError:
        with suppress(StorageError):  # what went wrong before is told
            store.delete([path])
        raise
    _, delete_s = _timed(lambda: store.delete([path]))
    once = created and not again and read == _DATA
    return Stored(uri=uri, once=once, write_s=write_s, read_s=read_s, delete_s=delete_s)


def _timed(action: Callable[[], Value]) -> tuple[Value, float]:
    start = time.perf_counter()
    return action(), time.perf_counter() - start


class _Traceless:
    """A folder that was not there before is removed again, unless something else came into it."""

    def __init__(self, uri: str) -> None:
        self._made: list[Path] = []
        folder = Path(uri)
        while "://" not in uri and not folder.exists():
            self._made.append(folder)
            folder = folder.parent

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            for folder in self._made:
                folder.rmdir()


def leave_mark(uri: str, visit: str, node: str) -> None:
    """Write a file that other nodes can look for. Raises StorageError."""
    open_store(uri).impatient().put(f"{PREFIX}{visit}/{node}", _DATA)


def marks(uri: str, visit: str) -> frozenset[str]:
    """Whose marks of a visit can be seen from here. Raises StorageError."""
    found = open_store(uri).impatient().list(f"{PREFIX}{visit}")
    return frozenset(path.rpartition("/")[2] for path, _ in found)


def wipe_marks(uri: str, visit: str) -> None:
    """Delete the marks of a visit that can be seen from here. Raises StorageError."""
    open_store(uri).impatient().delete_folder(f"{PREFIX}{visit}")


def paths_of(dataset: Any) -> Iterator[str]:
    """Paths and URIs of the files that a data set reads, through whatever it is made of."""
    path = getattr(dataset, "path", None)
    if isinstance(path, str):
        yield path
    elif isinstance(dataset, tuple | list):
        for item in dataset:
            yield from paths_of(item)
    elif is_dataclass(dataset):
        for each in fields(dataset):
            yield from paths_of(getattr(dataset, each.name))


def looked_for(uris: Iterable[str]) -> tuple[Place, ...]:
    """Whether each place of data is there."""
    return tuple(Place(uri=uri, fault=_missing(uri)) for uri in uris)


def _missing(uri: str) -> str:
    import pyarrow.fs as pafs

    from trainwright.datasets.formats.paths import base_of, system_of

    try:
        system, path = system_of(uri)
        found = system.get_file_info(base_of(path))
    except (OSError, TrainwrightError) as error:
        return str(getattr(error, "what", error)).partition("\n")[0][:200]
    return "it is not there" if found.type == pafs.FileType.NotFound else ""
