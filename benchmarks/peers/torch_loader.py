"""torch's DataLoader over map-style data sets: floats fetched by the batch, and images decoded one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


class Floats:
    """Tensors in memory. `__getitems__` lets a worker take a whole batch at once."""

    def __init__(self, x: Any, y: Any) -> None:
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        return self._x[row], self._y[row]

    def __getitems__(self, rows: list[int]) -> tuple[Any, Any]:
        return self._x[rows], self._y[rows]


class Images:
    """Encoded images in memory."""

    def __init__(self, images: Sequence[bytes], labels: Any) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        from images import thumbnail

        return thumbnail(self._images[row]), self._labels[row]


@dataclass(frozen=True, kw_only=True)
class FloatLoader:
    """Reads the table with all threads of pyarrow first, then shuffles single rows."""

    path: str
    batch_size: int
    workers: int

    def epochs(self, count: int) -> Iterator[Iterator[int]]:
        """The workers live as long as the loader."""
        import pyarrow.parquet as pq
        import torch
        from float_table import arrays, files_of

        system, files = files_of(self.path)
        x, y = arrays(pq.read_table(files, filesystem=system))
        data = Floats(torch.from_numpy(x), torch.from_numpy(y))
        yield from _epochs(data, count, self.batch_size, self.workers, collate_fn=_as_it_is)


@dataclass(frozen=True, kw_only=True)
class ImageLoader:
    """Reads the encoded images first, then decodes them in the workers."""

    path: str
    batch_size: int
    workers: int

    def epochs(self, count: int) -> Iterator[Iterator[int]]:
        """The workers live as long as the loader."""
        import pyarrow.parquet as pq

        table = pq.read_table(self.path)
        data = Images(table.column("image").to_pylist(), table.column("label").to_numpy())
        yield from _epochs(data, count, self.batch_size, self.workers)


def _epochs(data: Any, count: int, batch_size: int, workers: int, **options: Any) -> Iterator[Iterator[int]]:
    from torch.utils.data import DataLoader

    loader = DataLoader(data, batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0, **options)
    for _ in range(count):
        yield (len(labels) for _, labels in loader)


def _as_it_is(batch: Any) -> Any:
    return batch
