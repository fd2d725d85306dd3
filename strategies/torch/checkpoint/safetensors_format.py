"""The safetensors format: the header's length, the header as JSON, and the tensors one after the other.

https://huggingface.co/docs/safetensors describes it. The library's `save` puts the whole file together in memory before
the first byte can be written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from trainwright.core.errors import CheckpointError

_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_ALIGNED = 8  # bytes: a length that header and data are filled up to


def to_safetensors(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """Return the pieces of a safetensors file of CPU tensors, which must not change until it is written.

    Raises:
        CheckpointError: the format has no such numbers.
    """
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # each is aligned to its numbers
    header, end = {}, 0
    for name in ordered:
        value, start = tensors[name], end
        end += value.nbytes
        if value.dtype not in _DTYPE_NAMES:
            raise CheckpointError(
                f"{name} holds {str(value.dtype).removeprefix('torch.')}, which no checkpoint can",
                remedy="keep it in another type, or register the buffer with persistent=False",
            )
        header[name] = {"dtype": _DTYPE_NAMES[value.dtype], "shape": [*value.shape], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return [len(text).to_bytes(8, "little") + text, *(_tensor_bytes(tensors[name]) for name in ordered)]


def from_safetensors(data: bytes | bytearray) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, in its own memory where that is writable.

    Raises:
        ValueError, KeyError, TypeError: it is no such file.
    """
    view = memoryview(data)
    start = 8 + int.from_bytes(view[:8], "little")
    header, found = json.loads(bytes(view[8:start])), dict[str, Tensor]()
    for name, one in header.items():
        if name == "__metadata__":
            continue
        first, end = one["data_offsets"]
        if not 0 <= first <= end <= len(view) - start:
            raise ValueError(f"{name} is not inside the file")
        part = view[start + first : start + end]
        flat = torch.frombuffer(bytearray(part) if part.readonly else part, dtype=torch.uint8) if end > first else None
        dtype = DTYPES[one["dtype"]]
        empty = torch.empty(one["shape"], dtype=dtype)
        found[name] = empty if flat is None else flat.view(dtype).reshape(one["shape"])
    return found


def _tensor_bytes(value: Tensor) -> memoryview:
    """Return a tensor's bytes; a copy where they are not contiguous."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
