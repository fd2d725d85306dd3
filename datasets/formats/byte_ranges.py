"""Byte ranges of files: read with patience, checked against the size that the file had, unpacked where compressed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.fs as pafs

from trainwright.core.errors import DataError
from trainwright.datasets.formats.retry import retrying

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
UNPACKED_BYTES = 256 << 20


class Ranges(Protocol):
    """A file whose bytes can be read from anywhere.

    Attributes:
        file: its path.
        size_bytes: of its content, unpacked.
    """

    file: str
    size_bytes: int

    def read(self, start: int, stop: int) -> bytes:
        """Bytes start..stop, all of them. Raises DataError."""


class StoredFile:
    """A file as it lies in its file system.

    Args:
        system: of the file.
        file: its path.
        size_bytes: that it had when it was indexed; None takes what it has now.
    """

    def __init__(self, system: pafs.FileSystem, file: str, size_bytes: int | None = None) -> None:
        self.file, self._system, self._expected = file, system, size_bytes
        self._handle: Any = None
        self.size_bytes: int = self._patiently(lambda: self._opened().size())
        if size_bytes not in (None, self.size_bytes):
            raise _changed(file, f"it has {self.size_bytes} bytes and had {size_bytes} when it was indexed")

    def read(self, start: int, stop: int) -> bytes:
        """Bytes start..stop, all of them. Raises DataError."""
        content: bytes = self._patiently(lambda: self._opened().read_at(stop - start, start)) if stop > start else b""
        if len(content) != stop - start:
            raise _changed(self.file, f"it ends at byte {start + len(content)} and had {self.size_bytes} bytes before")
        return content

    def close(self) -> None:
        """Let the file go."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def _opened(self) -> Any:
        if self._handle is None:
            self._handle = self._system.open_input_file(self.file)
        return self._handle

    def _patiently(self, read: Any) -> Any:
        def attempt() -> Any:
            try:
                return read()
            except OSError:
                self._handle = None  # another attempt opens it anew
                raise

        try:
            return retrying(attempt, self.file)
        except FileNotFoundError as error:
            raise _changed(self.file, "it is gone") from error
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"the file cannot be read: {error}", where=self.file, remedy="check rights and disk, or leave it out"
            ) from error


class MemoryFile:
    """Content in memory under the name of its file."""

    def __init__(self, file: str, content: bytes) -> None:
        self.file, self.size_bytes, self._content = file, len(content), content

    def read(self, start: int, stop: int) -> bytes:
        """Bytes start..stop, all of them. Raises DataError."""
        if stop > self.size_bytes:
            raise _changed(self.file, f"unpacked, it has {self.size_bytes} bytes and had {stop} or more")
        return self._content[start:stop]


def compression(file: str) -> str | None:
    """Name of the codec that a file's suffix stands for; None for none."""
    return next((codec for suffix, codec in COMPRESSIONS.items() if file.lower().endswith(suffix)), None)


@contextmanager
def opened(system: pafs.FileSystem, file: str, size_bytes: int | None = None) -> Iterator[Ranges]:
    """The content of a file; of a compressed one, all of it unpacked in memory, up to UNPACKED_BYTES.

    Args:
        system: of the file.
        file: its path.
        size_bytes: that it had when it was indexed; DataError where it has another now.
    """
    stored = StoredFile(system, file, size_bytes)
    codec = compression(file)
    try:
        yield stored if codec is None else MemoryFile(file, _unpacked(stored, codec))
    finally:
        stored.close()


def _unpacked(stored: StoredFile, codec: str) -> bytes:
    packed = stored.read(0, stored.size_bytes)
    if not packed:
        return b""
    try:
        with pa.CompressedInputStream(pa.BufferReader(packed), codec) as stream:
            content: bytes = stream.read(UNPACKED_BYTES + 1)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"the compressed file is damaged: {error}", where=stored.file, remedy="compress it anew, or leave it out"
        ) from error
    if len(content) > UNPACKED_BYTES:
        raise DataError(
            f"unpacked, the file is larger than {UNPACKED_BYTES >> 20} MiB, and rows in it cannot be reached by number",
            where=stored.file,
            remedy="unpack it, then for speed convert it: trainwright data convert",
        )
    return content


def _changed(file: str, how: str) -> DataError:
    return DataError(f"the file changed: {how}", where=file, remedy="keep the data as it is while a run reads it")
