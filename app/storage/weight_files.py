"""Files of weights that a model starts from: `model.safetensors`, or an index and its shards, in a folder or a bucket.

Headers alone are read when they are opened: the length of the header, and the header. Their digest takes samples of the
values, so that a start does not read gigabytes: the first, the middle and the last 4 KiB of each tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from trainwright.core.errors import JobError
from trainwright.core.initial_weights import InitialWeights, StoredTensor
from trainwright.core.job import Job
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.store_errors import MissingFile

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FILE_ENDING, _INDEX_ENDING = ".safetensors", ".safetensors.index.json"
_MOST_HEADER_BYTES = 100_000_000  # as of the safetensors library
_SAMPLE_BYTES = 4096
_READERS = 8


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """Opened files; see `core.initial_weights.WeightSource`. They pickle as their URI and headers."""

    options: InitialWeights
    store: Store
    tensors: Mapping[str, StoredTensor]
    digest: str

    def uri_of(self, file: str) -> str:
        """Return where a file is, for errors."""
        return self.store.uri_of(file)

    def check(self) -> None:
        """Check that this process sees the files that the run was started with. Raises JobError, StorageError."""
        if _digest(self.store, self.tensors) != self.digest:
            raise JobError(
                [
                    f"initial_weights={self.options.path!r}: the files have other values here than where the run was "
                    "started: give all nodes the same files, or a path that all of them read from one place"
                ]
            )

    def read(self, file: str, start: int, end: int) -> memoryview:
        """Return bytes `start` to `end` of a file, `end` excluded. Raises StorageError."""
        return self.store.read_range(file, start, end)


def initial_weights(job: Job) -> WeightFiles | None:
    """Open the files that a job's model starts from; None where it names none. Raises as `open_weights`."""
    options = InitialWeights.of(job.training.initial_weights)
    return None if options is None else open_weights(options)


def base_weights(job: Job) -> WeightFiles | None:
    """Open the files whose weights no checkpoint of a job holds (`save_frozen=False`). Raises as `open_weights`."""
    return None if job.checkpointing.save_frozen else initial_weights(job)


def open_weights(options: InitialWeights) -> WeightFiles:
    """Read the headers of all files, and samples of the values.

    Raises:
        JobError: the path holds no such files, or one of them is damaged.
        StorageError: it cannot be read.
    """
    path = options.path.rstrip("/")
    if path.endswith((_FILE_ENDING, _INDEX_ENDING)):
        folder, _, name = path.rpartition("/")
        store = open_store(folder or ("/" if path.startswith("/") else "."))
    else:
        store, name = open_store(path), ""
    name = name or _find_file(store, path)
    try:
        tensors = _read_index(store, name) if name.endswith(_INDEX_ENDING) else _header(store, name)
    except MissingFile as error:
        raise JobError([f"initial_weights={path!r}: there is no file {error.where}: check the path"]) from None
    return WeightFiles(options=options, store=store, tensors=tensors, digest=_digest(store, tensors))


def _find_file(store: Store, path: str) -> str:
    """Return the name of a folder's file or index. Raises JobError if it has neither."""
    for name in (_INDEX, _FILE):
        if store.exists(name):
            return name
    names = [name for name, _ in store.list() if "/" not in name]
    others = [name for name in names if name.endswith(_FILE_ENDING)]
    if others:
        advice = f"name one of its files, such as {others[0]!r}"
    elif any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        advice = "its weights are pickled: load them once, and write them with safetensors.torch.save_model()"
    else:
        advice = "give the folder or the file that holds the weights"
    raise JobError([f"initial_weights={path!r} has no {_FILE} and no {_INDEX}: {advice}"])


def _read_index(store: Store, name: str) -> dict[str, StoredTensor]:
    """Return the tensors that an index names, from the headers of its shards. Raises JobError."""
    try:
        files = {str(key): str(file) for key, file in json.loads(store.get(name))["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(store, name, f"it is not an index with a weight_map ({error!r})") from None
    headers = {file: _header(store, file) for file in sorted({*files.values()})}
    missing = [f"{key!r} is not in {file}" for key, file in files.items() if key not in headers[file]]
    if missing:
        raise _damaged(store, name, f"{missing[0]}, where the index says it is")
    return {key: headers[file][key] for key, file in files.items()}


def _header(store: Store, file: str) -> dict[str, StoredTensor]:
    """Return the tensors of a file. Raises JobError, StorageError."""
    size = store.size(file)
    length = int.from_bytes(store.read_range(file, 0, 8), "little") if size >= 8 else 0
    if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
        raise _damaged(store, file, f"{size:,} bytes do not begin with the header of a safetensors file")
    start = 8 + length
    try:
        header: dict[str, Any] = json.loads(bytes(store.read_range(file, 8, start)))
        tensors = {name: _tensor(file, entry, start) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(store, file, f"its header cannot be read ({error!r})") from None
    outside = [key for key, item in tensors.items() if not start <= item.start <= item.start + item.size_bytes <= size]
    if outside:
        raise _damaged(store, file, f"{outside[0]!r} is not inside its {size:,} bytes: it is incomplete")
    return tensors


def _tensor(file: str, described: Mapping[str, Any], start: int) -> StoredTensor:
    begin, end = described["data_offsets"]
    shape = tuple(int(size) for size in described["shape"])
    count = math.prod(shape)
    if end < begin or (end - begin) % max(count, 1) or (end > begin) != (count > 0):
        raise ValueError(f"{end - begin} bytes for shape {shape}")
    return StoredTensor(
        file=file, dtype=str(described["dtype"]), shape=shape, start=start + begin, size_bytes=end - begin
    )


def _damaged(store: Store, file: str, what: str) -> JobError:
    return JobError([f"initial_weights=: {store.uri_of(file)}: {what}: copy or download it again"])


# --- The digest -------------------------------------------------------------------------------------------------------


def _digest(store: Store, tensors: Mapping[str, StoredTensor]) -> str:
    """Return a digest of tensors, however they are divided into files. Raises StorageError."""
    digest = hashlib.blake2b(digest_size=8)
    names = sorted(tensors)
    with ThreadPoolExecutor(_READERS) as pool:
        samples = pool.map(lambda name: _sample(store, tensors[name]), names)
        for name, sampled in zip(names, samples, strict=True):
            tensor = tensors[name]
            digest.update(json.dumps([name, tensor.dtype, tensor.shape, len(sampled)]).encode() + sampled)
    return digest.hexdigest()


def _sample(store: Store, tensor: StoredTensor) -> bytes:
    """Return the first, the middle and the last bytes of a tensor: all of a small one."""
    start, end, each = tensor.start, tensor.start + tensor.size_bytes, _SAMPLE_BYTES
    if tensor.size_bytes <= 3 * each:
        return bytes(store.read_range(tensor.file, start, end)) if end > start else b""
    middle = start + (tensor.size_bytes - each) // 2
    return b"".join(store.read_range(tensor.file, first, first + each) for first in (start, middle, end - each))
