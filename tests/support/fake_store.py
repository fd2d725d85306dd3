"""A store in memory that fails when it is told to."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from trainwright.core.errors import StorageError
from trainwright.storage.object_store import Store
from trainwright.storage.store_errors import MissingFile


class FakeStore(Store):
    """A store in memory that can fail, before or after the bytes arrived."""

    def __init__(self) -> None:
        super().__init__(f"memory://{uuid.uuid4().hex}")
        self.files: dict[str, bytes] = {}
        self.puts: list[str] = []
        self.fails: list[str] = []

    def put(self, path: str, *pieces: bytes | memoryview, sync: bool = True) -> None:
        data = b"".join(pieces)
        self.puts.append(path)
        how = self.fails.pop(0) if self.fails else "works"
        if how in ("works", "landed"):
            self.files[path] = data
        if how != "works":
            raise StorageError("the store does not answer")

    def create(self, path: str, data: bytes) -> bool:
        if path in self.files:
            return False
        self.put(path, data)
        return True

    def get(self, path: str) -> bytes:
        if path not in self.files:
            raise MissingFile("there is no such file")
        return self.files[path]

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[tuple[str, int]]:
        return iter([(path, len(data)) for path, data in sorted(self.files.items()) if path.startswith(prefix)])
