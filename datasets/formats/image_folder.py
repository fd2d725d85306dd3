"""Folders of images as a data source, one folder for each class, and the decoding of images as a transform."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from trainwright.core.errors import DataError, nearest
from trainwright.datasets.data_source import Arrays, Field, Index, Loader, RowGroup, Source, hash_parts, select_columns
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.file_system import (
    absolute_path,
    changed_error,
    filter_files,
    find_files,
    glob_base,
    open_file,
    resolve_file_system,
    retry_transient,
)
from trainwright.datasets.formats.scanned_files import group_boundaries
from trainwright.datasets.ops.row_transforms import RowFunction

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_SCHEMA = {
    "image": Field(np.dtype(object), ()),
    "label": Field(np.dtype(np.int64), ()),
    "file": Field(np.dtype(object), ()),
}
_READS = 16  # images of a remote store that are asked for together
_FOLDERS = 4


@dataclass(frozen=True, kw_only=True)
class ImageSource(Source):
    """Images in a folder for each class. A group is part of one folder; its `file` is that folder."""

    # a folder or glob; absolute, or a URI of pyarrow.fs. The classes are the folders in it, or in the folder before
    # the first wildcard.
    path: str
    # their names by label; None takes the names of the folders in alphabetical order
    classes: tuple[str, ...] | None = None

    def describe(self) -> str:
        """As the user wrote it, in short."""
        return f"images({self.path!r})"

    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes by label. Lists the files unless the user gave the names."""
        names: tuple[str, ...] = self.classes or self.index().classes
        return names

    def index(self) -> Index:
        """List the files, read none. Raises DataError for a file outside a class folder, or an empty class."""
        system, path = resolve_file_system(self.path)
        base = glob_base(path).rstrip("/")
        files = find_files(system, path, self.path, "image", _SUFFIXES, linked_files=True)
        files.sort(key=lambda info: (os.path.dirname(info.path).split("/"), info.path))
        folders = [(name, list(infos)) for name, infos in groupby(files, lambda info: os.path.dirname(info.path))]
        classes = self._classes([_class_of(name, base, infos[0].path) for name, infos in folders])
        if base == path.rstrip("/") and self.classes is None:
            _require_images(system, base, classes)
        groups = _groups(folders)
        size = sum(info.size for info in files)
        return Index(
            rows=len(files),
            groups=groups,
            schema=_SCHEMA,
            row_bytes=size // len(files) + sum(field.row_bytes for field in _SCHEMA.values()),
            hash=hash_parts([classes, *((info.path[len(base) :], info.size) for info in files)]),
            sizes={name: sum(info.size for info in infos) for name, infos in folders},
            classes=classes,
        )

    def open(self, index: Index) -> ImageLoader:
        """A loader for one process."""
        return ImageLoader(self.path, index)

    def _classes(self, names: list[str]) -> tuple[str, ...]:
        classes = self.classes or tuple(sorted(set(names)))
        for name in names:
            if name not in classes:
                raise DataError(f"{name!r} is not among the classes", where=self.path, remedy=nearest(name, classes))
        return classes


class ImageLoader(Loader):
    """Reads the images of one group at a time."""

    def __init__(self, path: str, index: Index) -> None:
        self._location, self._index = path, index
        self._system, self._path = resolve_file_system(path)
        self._base = glob_base(self._path).rstrip("/")
        self._labels = {name: label for label, name in enumerate(index.classes)}
        self._firsts: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        for group in index.groups:
            self._firsts.setdefault(group.file, group.first)
            self._rows[group.file] = self._rows.get(group.file, 0) + group.rows
        self._infos: dict[str, list[pafs.FileInfo]] = {}

    def twin(self) -> ImageLoader:
        """Return a loader of the same files for another thread."""
        return ImageLoader(self._location, self._index)

    def load(self, number: int, columns: Sequence[str]) -> Arrays:
        """Return columns of group `number` of the index. Raises DataError that names the image."""
        group = self._index.groups[number]
        names = select_columns(self._index.schema, columns, f"{group.file}, row group {group.number}")
        first = group.first - self._firsts[group.file]
        infos = self._files(group.file)[first : first + group.rows]
        return {name: self._column(name, group, infos) for name in names}

    def _column(self, name: str, group: RowGroup, infos: list[pafs.FileInfo]) -> Any:
        if name == "label":
            label = self._labels[_class_of(group.file, self._base, group.file)]
            return np.full(len(infos), label, dtype=np.int64)
        if name == "file":
            return np.fromiter((info.path[len(self._base) + 1 :] for info in infos), dtype=object, count=len(infos))
        return np.fromiter(self._contents(infos), dtype=object, count=len(infos))

    def _contents(self, infos: list[pafs.FileInfo]) -> Iterable[bytes]:
        if isinstance(self._system, pafs.LocalFileSystem):
            return map(self._content, infos)
        with ThreadPoolExecutor(_READS, thread_name_prefix="trainwright-images") as pool:
            return list(pool.map(self._content, infos))

    def _content(self, info: pafs.FileInfo) -> bytes:
        with open_file(self._system, info.path, info.size) as data:
            return data.read(0, info.size)

    def _files(self, folder: str) -> list[pafs.FileInfo]:
        """Return the images of a folder. Raises DataError if their number or size has changed since the index."""
        if folder not in self._infos:
            if len(self._infos) >= _FOLDERS:
                self._infos.clear()
            self._infos[folder] = self._indexed_files(folder)
        return self._infos[folder]

    def _indexed_files(self, folder: str) -> list[pafs.FileInfo]:
        try:
            entries = retry_transient(lambda: self._system.get_file_info(pafs.FileSelector(folder)), folder)
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"the folder cannot be listed: {error}", where=folder, remedy="keep the data while a run reads it"
            ) from error
        infos = filter_files(entries, self._path, _SUFFIXES)
        current = (len(infos), sum(info.size for info in infos))
        indexed = (self._rows[folder], self._index.sizes[folder])
        if current != indexed:
            how = f"it has {current[0]} images of {current[1]} bytes and had {indexed[0]} of {indexed[1]}"
            raise changed_error(how, folder, what="folder")
        return infos


def _class_of(folder: str, base: str, file: str) -> str:
    """Return the first folder below the base."""
    name = folder[len(base) :].lstrip("/").partition("/")[0]
    if not name:
        raise DataError(
            "the image lies in no class folder", where=file, remedy="put each image into a folder named by its class"
        )
    return name


def _require_images(system: pafs.FileSystem, base: str, classes: tuple[str, ...]) -> None:
    """Raise DataError for a class without images, which would shift the labels of a train or test folder."""
    entries = retry_transient(lambda: system.get_file_info(pafs.FileSelector(base)), base)
    for info in entries:
        if info.type == pafs.FileType.Directory and info.base_name not in classes:
            if info.base_name.startswith(("_", ".")):
                continue
            raise DataError(
                "the class folder has no image of its own, so that labels might not mean the same elsewhere",
                where=info.path,
                remedy="remove the folder, or give all names: images(path, classes=[...])",
            )


def _groups(folders: list[tuple[str, list[pafs.FileInfo]]]) -> tuple[RowGroup, ...]:
    groups: list[RowGroup] = []
    first = 0
    for folder, infos in folders:
        cuts = group_boundaries(np.cumsum([info.size for info in infos], dtype=np.int64), last=True)
        for number, (low, high) in enumerate(pairwise([0, *cuts])):
            groups.append(RowGroup(file=folder, number=number, rows=high - low, first=first + low))
        first += len(infos)
    return tuple(groups)


@dataclass(frozen=True, kw_only=True)
class _DecodeImage:
    """Transform of a row: bytes of an image to an array. `decode_image` explains the fields."""

    column: str
    size: tuple[int, int] | None
    mode: str
    resample: ClassVar[str] = "BILINEAR"  # no field: stored runs have fingerprints of the fields

    def __call__(self, row: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
        """Return the row with its image as (height, width, channels) uint8; (height, width) in one-channel modes."""
        (name,) = select_columns(row, [self.column], "decode_image")
        return {**row, name: self._decoded(row[name], str(row.get("file", row.get("__key__", ""))))}

    def _decoded(self, content: Any, where: str) -> Any:
        from PIL import Image

        if isinstance(content, Mapping):  # as Hugging Face has images: with their bytes, or the path of a file
            where, source = where or str(content.get("path") or ""), content.get("bytes") or content.get("path")
            content = Path(source) if isinstance(source, str) else source
        if not isinstance(content, bytes | Path):
            raise DataError(
                f"column {self.column!r} holds {type(content).__name__} and not the bytes of an image",
                where=where,
                remedy="name the column of bytes: decode_image(column=...)",
            )
        try:
            with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
                pixels = self._eight_bits(image, where).convert(self.mode)
        except DataError:
            raise
        except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
            raise DataError(
                f"the image cannot be decoded: {error}",
                where=where,
                remedy="write it again, leave it out, or skip what is damaged with on_error='skip'",
            ) from error
        if self.size is not None:
            pixels = pixels.resize((self.size[1], self.size[0]), Image.Resampling[self.resample])
        return np.asarray(pixels).copy()

    def _eight_bits(self, image: Any, where: str) -> Any:
        """Convert 16-bit grey to 8 bits unless the mode has more: Pillow would make all values above 255 white.

        Raises DataError if the values are not 16-bit shades.
        """
        if not image.mode.startswith(("I", "F")) or self.mode.startswith(("I", "F")):
            return image
        from PIL import Image

        values = np.asarray(image)
        least, most = values.min(), values.max()
        if image.mode == "F" or least < 0 or 0 < most < 256 or most > 65535:
            mode = "F" if image.mode == "F" else "I"
            raise DataError(
                f"the image has {values.dtype} values from {least} to {most}, which mode={self.mode!r} would lose: it "
                "divides shades of 16 bits by 257",
                where=where,
                remedy=f"keep the values: decode_image(mode={mode!r})",
            )
        return Image.fromarray(np.rint(values / 257).astype(np.uint8))


class _DecodeMask(_DecodeImage):
    """The same for class numbers, which must not be interpolated."""

    resample = "NEAREST"


def decode_image(
    column: str = "image",
    size: int | tuple[int, int] | None = None,
    mode: str = "RGB",
    resample: Literal["bilinear", "nearest"] = "bilinear",
) -> RowFunction:
    """A transform for `.map` that turns the bytes of an image into an array, with Pillow.

    Grey images of 16 bits are divided by 257 for modes of 8 bits. A mask whose values are class numbers keeps them with
    `mode="P"` (8 bits, also with a palette) or `mode="I"` (more bits), and `resample="nearest"`.

    Args:
        column: of the bytes, or of mappings with `bytes` or a file's `path`, as Hugging Face has them. It becomes
            (height, width, channels) uint8; in modes of one channel (height, width), int32 for `I` and float32 for `F`.
        size: to resize to, (height, width) or one number for both; None keeps each image's own, so that all must have
            one size already.
        mode: of Pillow: `RGB`, `L` for grey, `RGBA`, `P` for the numbers of a palette, `I`, `F`.
        resample: how to resize; `nearest` makes no new values.

    Raises:
        DataError: `resample` is neither. When called: an image is damaged, or the mode has 8 bits and the values are
            floats, negative, above 65535, or all below 256 in 16 bits or more.
    """
    if resample not in ("bilinear", "nearest"):
        raise DataError(f"resample={resample!r} is unknown", where="decode_image", remedy="give bilinear or nearest")
    target = (size, size) if isinstance(size, int) else size
    kind = _DecodeMask if resample == "nearest" else _DecodeImage
    return kind(column=column, size=target, mode=mode)


def images(path: str | os.PathLike[str], classes: Iterable[str] | None = None) -> Dataset:
    """Images in a folder for each class: columns `image` (bytes), `label` (int64) and `file` (path within `path`).

    Decode them with `.map(decode_image(size=224))`. The names of the classes are `dataset.source.class_names()`, and
    `index.classes`. Training and evaluation
    data have the same classes in the same order, or the job is refused.

    Args:
        path: a folder of class folders, in which images may lie at any depth, or a glob, whose part before the first
            wildcard is that folder; local or a URI that pyarrow.fs understands (`s3://`, `gs://`, `az://`).
        classes: names by label, such as those of the training data; by default the folders in alphabetical order.
    """
    return Dataset(source=ImageSource(path=absolute_path(path), classes=None if classes is None else tuple(classes)))
