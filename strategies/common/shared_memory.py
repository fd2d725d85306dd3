"""Memory that processes of one machine share: an anonymous file (`memfd`), mapped by each process that receives it.

Nothing has to be cleaned up: the kernel frees it when the last process that maps it ends. Until then the contents of a
dead process's memory can be read.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
from contextlib import suppress

from trainwright.core.errors import ResourceError

HAS_SHARED_MEMORY = sys.platform == "linux"
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # advice numbers of madvise without names in Python
_MIN_BYTES = 64  # of a region of size 0, which cannot be mapped


class SharedRegion:
    """Zeroed memory that other processes can map; no process can shrink it under a reader.

    On systems without `memfd` it is private to this process.

    Attributes:
        view: all of the memory, writable.
        file: its descriptor, to send; None if it cannot be shared.

    Raises:
        ResourceError: the machine does not have that much memory.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.file: int | None = None
        try:
            self.view = self._made()[:size_bytes]
        except OSError as error:
            self.close()
            raise ResourceError(
                f"cannot allocate {size_bytes / 2**20:.0f} MiB of shared memory ({error})",
                remedy="use more servers or workers on other nodes, a smaller model, or nodes with more memory",
            ) from error

    def _made(self) -> memoryview:
        size = max(self.size_bytes, _MIN_BYTES)
        if not HAS_SHARED_MEMORY:
            return allocate_private(size)
        self.file = os.memfd_create("trainwright", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.file, size)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return _map_populated(self.file, size, mmap.PROT_READ | mmap.PROT_WRITE)

    def close(self) -> None:
        """Free the descriptor. The memory stays while a process maps it or holds a view."""
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def __del__(self) -> None:
        self.close()


def map_descriptor(file: int, size_bytes: int | None = None, *, writable: bool) -> memoryview:
    """Map the memory behind a descriptor that another process sent, by default all of it.

    Raises ConnectionError if it is smaller than expected, or could be shrunk.
    """
    try:
        sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        there = os.fstat(file).st_size
        size = there if size_bytes is None else size_bytes
        if not sealed or there < size:
            raise ConnectionError("the shared memory is smaller than expected, or not sealed")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return _map_populated(file, there, access)[:size]
    except (OSError, ValueError) as error:
        raise ConnectionError(f"the shared memory cannot be mapped ({error})") from error


def allocate_private(size_bytes: int) -> memoryview:
    """Return zeroed memory of this process; its pages are allocated on first access."""
    found = mmap.mmap(-1, max(size_bytes, _MIN_BYTES))
    _use_huge_pages(found)
    return memoryview(found)[:size_bytes]


def _map_populated(file: int, size: int, access: int) -> memoryview:
    """Map with all pages allocated: page faults would slow the first steps, and kill the process without memory."""
    found = mmap.mmap(file, size, flags=mmap.MAP_SHARED, prot=access)
    _use_huge_pages(found)
    try:
        found.madvise(_POPULATE_WRITE if access & mmap.PROT_WRITE else _POPULATE_READ)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        os.posix_fallocate(file, 0, size)  # Linux before 5.14
    return memoryview(found)


def _use_huge_pages(memory: mmap.mmap) -> None:
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
