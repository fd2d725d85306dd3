"""The images of the data benchmarks: JPEG files in parquet, and the heavy transform that decodes them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

SIDE, SMALL, QUALITY = 192, 96, 85
_DISTINCT = 400
_DETAIL = ((4, 60.0), (24, 25.0), (SIDE, 5.0))  # side of a noise, and its deviation: shapes, texture, grain


def write_images(folder: Path, count: int, files: int) -> None:
    """Write `count` images of 192 x 192 pixels: columns `image` (JPEG) and `label`. Each comes several times."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    encoded = [_encoded(rng) for _ in range(min(_DISTINCT, count))]
    labels = np.arange(count)
    for number, part in enumerate(np.array_split(labels, files)):
        held = pa.array([encoded[row % len(encoded)] for row in part.tolist()], pa.binary())
        pq.write_table(pa.table({"image": held, "label": part}), folder / f"part-{number:02}.parquet")


def thumbnail(encoded: bytes) -> npt.NDArray[np.uint8]:
    """Decode a JPEG and halve it: (96, 96, 3) uint8."""
    with Image.open(io.BytesIO(encoded)) as image:
        return np.asarray(image.convert("RGB").resize((SMALL, SMALL), Image.Resampling.BICUBIC))


def shrink(columns: dict[str, Any]) -> dict[str, Any]:
    """The heavy transform: a thumbnail of each image."""
    return {"image": np.stack([thumbnail(image) for image in columns["image"]]), "label": columns["label"]}


def _encoded(rng: np.random.Generator) -> bytes:
    """Smooth shapes with texture and grain, about as large as a photograph of this size."""
    pixels = np.full((SIDE, SIDE, 3), 128.0)
    for side, deviation in _DETAIL:
        noise = (rng.standard_normal((side, side, 3)) * 40 + 128).clip(0, 255).astype(np.uint8)
        scaled = Image.fromarray(noise).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        pixels += (np.asarray(scaled, dtype=float) - 128) * deviation / 40
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()
