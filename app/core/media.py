"""Images and texts that callbacks send to TensorBoard and the trackers."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from trainwright.core.errors import JobError
from trainwright.core.redaction import redact

_MAX_IMAGE_BYTES, _MAX_CHARACTERS = 4 << 20, 100_000
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # of Pillow, by channels


def checked_text(name: str, text: Any) -> str:
    """Return the text, without secrets and in characters that UTF-8 has. Raises JobError."""
    if not isinstance(text, str):
        raise JobError([f"log_text({name!r}): give a str, not {_kind(text)}"])
    if len(text) > _MAX_CHARACTERS:
        raise JobError([f"log_text({name!r}): {len(text):,} characters are more than {_MAX_CHARACTERS:,}: log a part"])
    return redact(text.encode(errors="replace").decode())


def encode_image(name: str, image: Any) -> dict[str, Any]:
    """Return the fields `image` (PNG), `width` and `height` of a MediaLogged. Raises JobError."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise JobError([f"log_image({name!r}) needs Pillow on the workers: pip install pillow"]) from error
    if hasattr(image, "savefig"):
        drawn = io.BytesIO()
        image.savefig(drawn, format="png")
        image = drawn.getvalue()
    if isinstance(image, bytes):
        try:
            image = Image.open(io.BytesIO(image))
        except OSError as error:
            raise JobError([f"log_image({name!r}): these bytes are no image file that Pillow can read"]) from error
    if not isinstance(image, Image.Image):
        image = _from_array(name, image, Image)
    encoded = io.BytesIO()
    image.save(encoded, format="PNG")
    data = encoded.getvalue()
    if len(data) > _MAX_IMAGE_BYTES:
        size = f"{image.width} x {image.height} pixels, {len(data) / 2**20:.1f} MiB as PNG"
        raise JobError([f"log_image({name!r}): {size}, more than {_MAX_IMAGE_BYTES >> 20} MiB: log a smaller one"])
    return {"image": data, "width": image.width, "height": image.height}


def _from_array(name: str, image: Any, pillow: Any) -> Any:
    """Return an array or tensor as an image of Pillow."""
    is_torch = hasattr(image, "detach")
    if is_torch:
        image = image.detach().cpu()
        image = image.float() if image.is_floating_point() else image  # NumPy has no bfloat16
    pixels = np.asarray(image)
    if pixels.ndim == 3 and pixels.shape[0] in _MODES and (is_torch or pixels.shape[2] not in _MODES):
        pixels = np.moveaxis(pixels, 0, 2)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.dtype == object or pixels.ndim != 3 or pixels.shape[2] not in _MODES or not pixels.size:
        shape = f" of shape {tuple(np.shape(image))}" if hasattr(image, "shape") else ""
        wanted = "(height, width), (height, width, 1, 3 or 4) or (1, 3 or 4, height, width)"
        raise JobError([f"log_image({name!r}): {_kind(image)}{shape} is no image: give an array {wanted}"])
    if np.issubdtype(pixels.dtype, np.floating):
        least, most = pixels.min(), pixels.max()
        if not (least >= -1e-6 and most <= 1 + 1e-6):
            found = f"floats from {least:.3g} to {most:.3g}"
            raise JobError([f"log_image({name!r}): {found}: give floats from 0 to 1, or uint8 from 0 to 255"])
        pixels = np.rint(pixels.clip(0.0, 1.0) * 255.0).astype(np.uint8)
    elif pixels.dtype == bool:
        pixels = pixels.astype(np.uint8) * 255
    elif pixels.dtype != np.uint8:
        raise JobError([f"log_image({name!r}): numbers are {pixels.dtype}: give uint8, or floats from 0 to 1"])
    pixels = np.ascontiguousarray(pixels)
    return pillow.frombytes(_MODES[pixels.shape[2]], (pixels.shape[1], pixels.shape[0]), pixels.tobytes())


def _kind(value: Any) -> str:
    return type(value).__name__
