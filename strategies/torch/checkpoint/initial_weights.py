"""Files of safetensors: the format, and the weights that a model starts from.

A rank of a divided model reads what it holds alone. A model on the meta device gets memory first: of the host, which an
operating system provides as it is written to. So a rank that keeps a part of the model, and loads that part, never has
all of it in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainwright.core.errors import CheckpointError, JobError, nearest
from trainwright.core.frameworks import return_freed_memory
from trainwright.core.initial_weights import StoredTensor, WeightSource, matches
from trainwright.strategies.torch.checkpoint.tensor_digests import named_digest, text_hash
from trainwright.strategies.torch.shard_layout import ShardSlice, to_local
from trainwright.strategies.torch.torch_errors import TorchUserCode

_CHUNK_BYTES = 4 << 20  # that are read at once: threads of the store keep so much each
_LISTED = 6  # problems of one kind
_PLACEHOLDER = 0.05  # largest value

StoredByName = Mapping[str, StoredTensor]


def check_weights(model: nn.Module, weights: WeightSource) -> None:
    """Check that files have what a model needs; nothing but their headers is read. Raises JobError, UserCodeError."""
    match_names(model, weights, "")


def match_names(model: nn.Module, weights: WeightSource, where: str) -> dict[str, StoredTensor]:
    """Return the stored tensor of each tensor of a whole model that the files give, by each of its full names.

    Raises:
        JobError: names or shapes do not fit; names each tensor and file.
        UserCodeError: `rename` raised.
    """
    options, saved = weights.options, model.state_dict().keys()
    held = {name: value for name, value in _all_tensors(model) if name in saved}
    tied: dict[int, list[str]] = {}
    for name, value in held.items():
        tied.setdefault(id(value), []).append(name)
    found: dict[str, StoredTensor] = {}
    problems: list[str] = []
    missing: list[str] = []
    used: set[str] = set()
    for names in tied.values():
        with TorchUserCode("rename() of initial_weights=", where):
            stored = {options.stored_name(name): name for name in names}
        present = [name for name in stored if name in weights.tensors]
        used.update(present)
        if any(matches(name, options.new) for name in names):
            continue
        if not present:
            missing.append(f"{next(iter(stored.values()))!r} (in the files {next(iter(stored))!r})")
            continue
        one = weights.tensors[present[0]]
        found |= dict.fromkeys(names, one)
        problems += _form_problems(stored[present[0]], held[names[0]], present[0], one, weights)
    unused = [name for name in weights.tensors if name not in used and not matches(name, options.unused)]
    problems += [
        *_name_problems(missing, unused, weights),
        *_pattern_problems("new", options.new, held),
        *_pattern_problems("unused", options.unused, weights.tensors),
    ]
    if problems:
        raise JobError(problems, where=where or "job")
    return found


def load_weight_files(model: nn.Module, weights: WeightSource) -> dict[str, StoredTensor]:
    """Load a whole model, and return what `match_names` returns. Raises JobError, StorageError, UserCodeError."""
    found = match_names(model, weights, "")
    provide_memory(model, found, "")
    load_slices(model, weights, found, {})
    return found


@return_freed_memory()
def load_slices(model: nn.Module, weights: WeightSource, found: StoredByName, boxes: Mapping[str, ShardSlice]) -> None:
    """Load what this rank holds of a model.

    Args:
        found: stored tensors by full name.
        boxes: the slice that the rank holds of each divided tensor.

    Raises:
        JobError: the files are not those that the run was started with.
        StorageError: they cannot be read.
    """
    weights.check()
    done: set[tuple[int, int]] = set()  # tied tensors are read once
    with torch.no_grad():
        for name, value in model.state_dict().items():
            held = to_local(value)
            place = (held.data_ptr(), held.numel())
            if name in found and held.numel() and place not in done:
                done.add(place)
                _load(held, weights, found[name], boxes.get(name) or ShardSlice.all_of(found[name].shape))


def provide_memory(model: nn.Module, given: Mapping[str, object], where: str) -> None:
    """Give the tensors on the meta device memory of the host, without values.

    Raises JobError where values of one are not among those that are loaded, which are `given`.
    """
    empty = [name for name, value in _all_tensors(model) if value.is_meta and name not in given]
    if empty:
        raise JobError(
            [
                f"{empty[0]!r} of the model is on the meta device, and no file gives its values: make it on the CPU in "
                "model(), after the rest"
            ],
            where=where or "job",
        )
    materialize(model)


def fill_empty(model: nn.Module) -> None:
    """Give the tensors on the meta device memory and small values, which a checkpoint replaces."""
    for value in materialize(model):
        with torch.no_grad():
            if value.requires_grad or value.is_floating_point():
                value.uniform_(0.0, _PLACEHOLDER)
            else:
                value.zero_()


def base_digest(frozen: Mapping[str, Tensor], given: Mapping[str, object], weights: WeightSource | None) -> str:
    """Return a digest of frozen parameters: of the files for those that they give, of the values for all others."""
    made = {name: value for name, value in frozen.items() if name not in given}
    if weights is None or len(made) == len(frozen):
        return named_digest(frozen) if frozen else ""
    loaded = sorted(f"{name} {frozen[name].dtype} {tuple(frozen[name].shape)}" for name in frozen if name in given)
    parts = f"{weights.digest} {loaded} {named_digest(made) if made else ''}"
    return f"{text_hash(parts):016x}"


# --- Names and shapes -------------------------------------------------------------------------------------------------


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers, by each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _form_problems(name: str, value: Tensor, stored: str, one: StoredTensor, weights: WeightSource) -> Iterator[str]:
    """Yield what is wrong with the shape or the type of a stored tensor."""
    where = f"{stored!r} of {weights.uri_of(one.file)}"
    if tuple(value.shape) != one.shape:
        yield (
            f"{name!r} of the model has shape {tuple(value.shape)}, and {where} has {one.shape}: build the model for "
            "these weights, or let it keep its own with InitialWeights(new=...)"
        )
    elif one.dtype not in _DTYPES:
        yield f"{where} has numbers of type {one.dtype}, which torch does not have: convert the file"
    elif one.size_bytes != math.prod(one.shape) * _DTYPES[one.dtype].itemsize:
        yield f"{where} has {one.size_bytes:,} bytes for shape {one.shape} of {one.dtype}: download the file again"


def _name_problems(missing: list[str], unused: list[str], weights: WeightSource) -> Iterator[str]:
    """Yield problems of names that only the model has, or only the files."""
    path = weights.options.path
    if missing:
        yield (
            f"initial_weights={path!r} has no {_listed(missing)}: correct the names with InitialWeights(rename=...), "
            "or let the model keep its own values with InitialWeights(new=...)"
        )
    if unused:
        named = [f"{name!r} of {weights.uri_of(weights.tensors[name].file)}" for name in unused]
        yield (
            f"the model has no {_listed(named)}: build the model that the files belong to, or leave them out with "
            "InitialWeights(unused=...)"
        )


def _listed(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _pattern_problems(option: str, patterns: tuple[str, ...], names: Iterable[str]) -> Iterator[str]:
    """Yield the patterns that fit no name."""
    known = [*names]
    for pattern in patterns:
        if not any(matches(name, (pattern,)) for name in known):
            yield f"InitialWeights({option}=) names {pattern!r}, which fits no tensor: {nearest(pattern, known)}"


# --- Memory and values ------------------------------------------------------------------------------------------------


def materialize(model: nn.Module) -> list[Tensor]:
    """Replace tensors on the meta device by ones of the host's memory; tied ones stay tied. Returns the new ones."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for key, value in held.items():
                if value is None or not value.is_meta:
                    continue
                if value not in made:
                    made[value] = _with_memory(value)
                held[key] = made[value]  # type: ignore[assignment]
    return [*made.values()]


def _with_memory(value: Tensor) -> Tensor:
    empty = torch.empty_like(value, device="cpu", requires_grad=False)
    if not isinstance(value, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, requires_grad=value.requires_grad)
    vars(parameter).update(vars(value))  # what an optimizer may ask for
    return parameter


def _load(held: Tensor, weights: WeightSource, one: StoredTensor, box: ShardSlice) -> None:
    """Load a slice of a stored tensor: some rows at a time, so that little more than the slice is in memory."""
    dtype = _DTYPES[one.dtype]
    if not one.shape:
        held.copy_(_tensor(weights, one, 0, one.size_bytes, dtype).view(()))
        return
    row_bytes = one.size_bytes // one.shape[0]
    rows = max(1, _CHUNK_BYTES // max(row_bytes, 1))
    inner = tuple(slice(start, stop) for start, stop in zip(box.start[1:], box.stop[1:], strict=True))
    for first in range(box.start[0], box.stop[0], rows):
        last = min(first + rows, box.stop[0])
        found = _tensor(weights, one, first * row_bytes, last * row_bytes, dtype).view(last - first, *one.shape[1:])
        held[first - box.start[0] : last - box.start[0]].copy_(found[(slice(None), *inner)])


def _tensor(weights: WeightSource, one: StoredTensor, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """Return some of a tensor's numbers, in one dimension."""
    data = weights.read(one.file, one.start + start, one.start + end)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)


# --- The format: the header's length, the header as JSON, and the tensors one after the other -------------------------

# https://huggingface.co/docs/safetensors describes it. The library's `save` puts the whole file together in memory
# before the first byte can be written.


_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
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


def stream_safetensors(
    portions: Iterable[memoryview], wanted: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of a safetensors file, of which no more than one is in memory at a time, with their names.

    Args:
        portions: of the file, in order. All of them are taken, also where an error follows.
        wanted: names of the tensors; None for all.

    Raises:
        ValueError, KeyError, TypeError: it is no such file.
    """
    source = iter(portions)
    try:
        yield from _streamed(_Bytes(source), wanted)
    finally:
        for _ in source:
            pass


def _streamed(source: _Bytes, wanted: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
    header: dict[str, Any] = json.loads(source.take(int.from_bytes(source.take(8), "little")))
    described = {name: one for name, one in header.items() if name != "__metadata__"}
    end = 0
    for name, one in sorted(described.items(), key=lambda item: item[1]["data_offsets"]):
        (start, last), dtype = one["data_offsets"], _DTYPES[one["dtype"]]
        if not end <= start <= last:
            raise ValueError(f"{name} is not inside the file")
        source.skip(start - end)
        end = last
        if wanted is not None and name not in wanted:
            source.skip(last - start)
        elif last == start:
            yield name, torch.empty(one["shape"], dtype=dtype)
        else:
            yield name, torch.from_numpy(source.array(last - start)).view(dtype).reshape(one["shape"])


class _Bytes:
    """Bytes that come in portions."""

    def __init__(self, portions: Iterator[memoryview]) -> None:
        self._portions, self._rest = portions, memoryview(b"")

    def take(self, count: int) -> bytearray:
        """Return the next bytes. Raises ValueError where there are fewer."""
        found = bytearray()
        for piece in self._next(count):
            found += piece
        return found

    def array(self, count: int) -> NDArray[np.uint8]:
        """Return the next bytes as an array of their own. Raises ValueError where there are fewer."""
        try:
            found = np.empty(count, np.uint8)  # of huge pages, which torch.empty does not ask for
        except MemoryError as error:
            raise ValueError(str(error)) from error
        start = 0
        for piece in self._next(count):
            found[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
            start += len(piece)
        return found

    def skip(self, count: int) -> None:
        """Pass by the next bytes. Raises ValueError where there are fewer."""
        for _ in self._next(count):
            pass

    def _next(self, count: int) -> Iterator[memoryview]:
        while count:
            if not self._rest:
                self._rest = next(self._portions, memoryview(b""))
                if not self._rest:
                    raise ValueError(f"it ends {count:,} bytes early")
            piece, self._rest = self._rest[:count], self._rest[count:]
            count -= len(piece)
            yield piece


def _tensor_bytes(value: Tensor) -> memoryview:
    """Return a tensor's bytes; a copy where they are not contiguous."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
