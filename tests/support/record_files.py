"""TFRecord and WebDataset files, written byte by byte."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path


def field(number: int, wire: int, content: bytes) -> bytes:
    return bytes([number << 3 | wire]) + (bytes([len(content)]) if wire == 2 else b"") + content


def message(name: str, kind: int, values: bytes) -> bytes:
    """An Example of one feature, by hand."""
    return field(1, 2, field(1, 2, field(1, 2, name.encode()) + field(2, 2, field(kind, 2, values))))


Members = list[tuple[str, bytes]]


def write(path: Path, members: Members, form: int = tarfile.USTAR_FORMAT) -> None:
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))


def sample(number: int, folder: str = "") -> Members:
    key = f"{folder}{number:06}"
    return [
        (f"{key}.jpg", bytes([number % 256]) * (number % 700)),
        (f"{key}.cls", f"{number % 10}\n".encode()),
        (f"{key}.txt", f"caption é {number}".encode()),
        (f"{key}.json", json.dumps({"id": number}).encode()),
    ]
