"""The files of a checkpoint: safetensors and JSON. Nothing is pickled, and loading executes nothing.

| file                    | holds                                                                       |
|-------------------------|-----------------------------------------------------------------------------|
| `model.safetensors`     | the model's state dict: parameters and persistent buffers by full name      |
| `optimizer.safetensors` | the optimizer's tensors, named `<parameter>/<key>`                          |
| `average.safetensors`   | the average of each trained parameter (`weight_average=`)                   |
| `state.json`            | step, the optimizer's plain values and changed settings, the losses' scale, |
|                         | the state of the learning-rate scheduler, whether parameters are unused in  |
|                         | some steps, whether the loss was checked for the division of a batch, and a |
|                         | digest of frozen parameters that no file holds (`save_frozen=False`)        |
| `local-0-of-2.…`        | buffers that data rank 0 keeps as its own (`local_state=`), and so on       |

Tensors of more than 1 GiB are written to several files, `model.safetensors`, `model-2.safetensors` and so on, whose
number is in `state.json`: they are read, and their checksums made, at the same time.

A divided model has three such files for each part, `model.shard-0-of-4.safetensors`, `model.stage-0-of-2.safetensors`,
`model.stage-0-of-2.tensor-1-of-2.safetensors` and so on, each written by a rank that holds the part. What is not
divided is in the files of all parts that have it; of parameter servers' (`model.server-0-of-2.safetensors`), in one.
`state.json` also says of each tensor its type, its whole shape and which box of it is held. Any layout is loaded
into any other: `read` puts together what a rank needs, tensor by tensor, from the files that hold some of it, one part
after the other, and alone from its own part's where that has all of it.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.engine import StateReader, StateWriter
from trainwright.core.errors import CheckpointError, NonFiniteLoss
from trainwright.core.initial_weights import WeightSource
from trainwright.strategies.torch.checkpoint.host_state import (
    AVERAGE,
    HostState,
    OptimizerSlots,
    base_problem,
    other_names,
)
from trainwright.strategies.torch.checkpoint.initial_weights import (
    base_digest,
    fill_empty,
    load_weight_files,
    stream_safetensors,
    to_safetensors,
)
from trainwright.strategies.torch.shard_layout import WHOLE_MODEL, ModelPart, ShardSlice
from trainwright.strategies.torch.training.new_model import frozen_parameters
from trainwright.strategies.torch.training.train_state import DataRank, LocalState

_MODEL, _OPTIMIZER, _AVERAGE = "model", "optimizer", "average"
_WEIGHTS = (_MODEL, _AVERAGE)
_FILE, _STATE = "{}{}.safetensors", "state{}.json"
MAX_FILE_BYTES, _READERS = 1 << 30, 4
_LOCAL_FILE = re.compile(r"local-(\d+)-of-(\d+)\.safetensors")
_PARTS = re.compile(r"state((?:\.(?:stage|shard|tensor|server)-\d+-of-\d+)*)\.json")
_FORMAT = 2
_Header = Mapping[str, Any]
_WantedSlices = Mapping[str, ShardSlice | None]


def write(state: HostState, writer: StateWriter) -> None:
    """Write the files of a state; data ranks after the first write only their local state.

    Raises StorageError, and NonFiniteLoss for a state that nobody would want back.
    """
    if state.local is not None:
        writer.write(state.local.data_rank.file, *to_safetensors(state.local.tensors))
        if state.local.data_rank.rank:
            return
    for name in state.trained:
        if not _is_finite(state.model[name]):
            raise NonFiniteLoss(
                f"parameter {name!r} is not finite after step {state.step}: a gradient was not, though the loss was",
                remedy='set clip_norm or on_nonfinite="skip", which check the gradient of each step; earlier '
                "checkpoints are kept",
            )
    held: dict[str, dict[str, Tensor]] = {_MODEL: state.model, _OPTIMIZER: {}, _AVERAGE: {}}
    plain: OptimizerSlots = {}
    for name, entries in state.slots.items():
        for key, value in sorted(entries.items()):  # a restored optimizer has them in another order
            if key == AVERAGE:
                held[_AVERAGE][name] = value
            elif isinstance(value, Tensor):
                held[_OPTIMIZER][f"{name}/{key}"] = value
            else:
                plain.setdefault(name, {})[key] = value
    if not held[_AVERAGE]:
        del held[_AVERAGE]
    facts: dict[str, Any] = {
        "format": _FORMAT,
        "step": state.step,
        "optimizer": state.optimizer,
        "options": state.options,
        "plain": plain,
    }
    others = {
        "scale": state.scale,
        "scheduler": state.scheduler,
        "sometimes_unused": state.sometimes_unused,
        "base": state.base,
        "checked": state.checked,
    }
    facts |= {key: value for key, value in others.items() if value}
    boxes, suffix = state.boxes, state.part.suffix
    facts["tensors"] = {
        kind: {name: _tensor_entry(value, boxes.get(name)) for name, value in tensors.items()}
        for kind, tensors in held.items()
    }
    facts["files"] = {}
    for kind, tensors in held.items():
        groups = list(_groups(tensors))
        facts["files"][kind] = len(groups)
        for name, group in zip(_names(kind, suffix, len(groups)), groups, strict=True):
            writer.write(name, *to_safetensors(group))
    writer.write(_STATE.format(suffix), json.dumps(facts, indent=1).encode())


def _names(kind: str, suffix: str, count: int) -> list[str]:
    """Return the names of so many files of one kind."""
    return [_FILE.format(kind if number == 1 else f"{kind}-{number}", suffix) for number in range(1, count + 1)]


def _groups(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Group tensors by the file that they go to; at least one group."""
    group, size_bytes = dict[str, Tensor](), 0
    for name, value in tensors.items():
        if group and size_bytes + value.nbytes > MAX_FILE_BYTES:
            yield group
            group, size_bytes = {}, 0
        group[name] = value
        size_bytes += value.nbytes
    yield group


def _is_finite(value: Tensor) -> bool:
    """Return whether all elements of a tensor are finite, in one pass without a copy."""
    numbers = torch.view_as_real(value) if value.is_complex() else value
    return not numbers.numel() or bool(torch.isfinite(torch.stack(numbers.aminmax())).all())  # NaN is both


def _tensor_entry(held: Tensor, box: ShardSlice | None) -> dict[str, Any]:
    """Return a tensor's type, global shape, and the held range of each dimension."""
    box = box or ShardSlice.all_of(held.shape)
    return {
        "dtype": str(held.dtype).removeprefix("torch."),
        "shape": [*box.shape],
        "held": [[start, stop] for start, stop in zip(box.start, box.stop, strict=True)],
    }


def read(reader: StateReader, wanted: _WantedSlices | None = None, part: ModelPart = WHOLE_MODEL) -> HostState:
    """Read a state from files of any layout.

    Args:
        wanted: boxes of the parameters and buffers that are wanted, None for all of one; without it all of every one.

    Raises:
        CheckpointError: a file is missing or is not what it should be.
    """
    known = _part_headers(reader, wanted, part)
    boxes = _boxes([*known.values()], wanted)
    kinds = _WEIGHTS if reader.weights_only else (_OPTIMIZER, *_WEIGHTS)  # the largest first
    slots: OptimizerSlots = {
        name: dict(entries)
        for facts in known.values()
        for name, entries in facts["plain"].items()
        if wanted is None or name in wanted
    }
    found = _assemble(reader, known, {kind: boxes[kind] for kind in kinds})
    model, average = found[_MODEL], found[_AVERAGE]
    for name, value in found.get(_OPTIMIZER, {}).items():
        parameter, _, key = name.rpartition("/")
        slots.setdefault(parameter, {})[key] = value
    if reader.weights_only:
        model |= average
    for name, value in average.items():
        slots.setdefault(name, {})[AVERAGE] = value
    own = {name: box for name, box in (wanted or {}).items() if box}
    facts = next(iter(known.values()))
    return HostState(
        step=facts["step"],
        model=model,
        slots=slots,
        options=facts["options"],
        optimizer=facts["optimizer"],
        scale=None if "scale" not in facts else (float(facts["scale"][0]), int(facts["scale"][1])),
        part=part,
        scheduler=facts.get("scheduler"),
        sometimes_unused=facts.get("sometimes_unused", False),
        base=facts.get("base", ""),
        checked=facts.get("checked", False),
        weights_only=reader.weights_only,
        boxes={
            f"{name}/{AVERAGE}" if kind == _AVERAGE else name: box
            for kind, named in boxes.items()
            for name, box in named.items()
            if own.get(_owner(kind, name)) == box
        },
    )


def read_local(reader: StateReader, data_rank: DataRank) -> LocalState | None:
    """Read the local state of a data rank, which further training needs.

    None where the model is only evaluated, by another number of ranks than trained it: all of them use that of data
    rank 0, which is in the model's state dict.

    Raises:
        CheckpointError: the checkpoint has none, or those of another number of data ranks.
    """
    if data_rank.file in reader.names():
        found: dict[str, Tensor] = {}
        _take_tensors(reader, [_FileRead(name=data_rank.file, wanted=None, take=found.__setitem__)])
        return LocalState(data_rank=data_rank, tensors=found)
    if reader.weights_only:
        return None
    counts = {int(match[2]) for match in map(_LOCAL_FILE.fullmatch, reader.names()) if match}
    if not counts:
        raise CheckpointError(
            "the checkpoint holds no local state: the job that wrote it had no local_state=",
            where=data_rank.file,
            remedy="leave local_state= out, or start a run under a new name",
        )
    wrote = max(counts)
    raise CheckpointError(
        f"the checkpoint holds the local state of {wrote} data ranks, and this run has {data_rank.ranks}: it cannot "
        "be redistributed",
        where=data_rank.file,
        remedy=f"set workers={wrote}, or start a run under a new name",
    )


def load_weights(reader: StateReader) -> dict[str, Tensor]:
    """Return a checkpoint's parameters, averaged where it has averages, and persistent buffers by full name.

    They are tensors on the CPU. An average has the first name of its parameter alone. Raises CheckpointError.
    """
    known = _part_headers(reader, None, WHOLE_MODEL)
    boxes = _boxes([*known.values()], None)
    found = _assemble(reader, known, {kind: boxes[kind] for kind in _WEIGHTS})
    return found[_MODEL] | found[_AVERAGE]


def _part_headers(reader: StateReader, wanted: _WantedSlices | None, own: ModelPart) -> Mapping[ModelPart, _Header]:
    """Return headers of the parts to read: the rank's own first, and alone where that suffices."""
    parts = _parts(reader)
    known: dict[ModelPart, _Header] = {part: _read_header(reader, part) for part in parts if part == own}
    if known and (len(parts) == 1 or (wanted is not None and _part_suffices(known[own], wanted))):
        return known
    known |= {part: _read_header(reader, part) for part in parts if part != own}
    kinds = {(part.stage, *sorted(facts["tensors"][_MODEL])) for part, facts in known.items()}
    if len({facts["step"] for facts in known.values()}) > 1 or len(kinds) > parts[0].stages * parts[0].servers:
        raise _damaged(_STATE.format(parts[-1].suffix), ValueError("it belongs to another state than the first part"))
    return known


def _part_suffices(facts: _Header, wanted: _WantedSlices) -> bool:
    """Return whether a part has all that is wanted; a part of another layout may not."""
    boxes = _boxes([facts], wanted)
    return wanted.keys() <= facts["tensors"][_MODEL].keys() and all(
        _held_slice(facts["tensors"][kind][name]) == box for kind, named in boxes.items() for name, box in named.items()
    )


def _boxes(known: Sequence[_Header], wanted: _WantedSlices | None) -> dict[str, dict[str, ShardSlice]]:
    """Return the wanted slices of the tensors of each kind; the optimizer's are those of their parameters."""
    boxes: dict[str, dict[str, ShardSlice]] = {_MODEL: {}, _OPTIMIZER: {}, _AVERAGE: {}}
    for facts in known:
        for kind, described in facts["tensors"].items():
            for name, one in described.items():
                owner = _owner(kind, name)
                if wanted is None or owner in wanted:
                    box, whole = (wanted or {}).get(owner), ShardSlice.all_of(one["shape"])
                    boxes[kind][name] = box if box and box.shape == whole.shape else whole
    return boxes


def _owner(kind: str, name: str) -> str:
    """Return the parameter or buffer that a tensor of a file belongs to."""
    return name.rpartition("/")[0] if kind == _OPTIMIZER else name


def _assemble(
    reader: StateReader, known: Mapping[ModelPart, _Header], boxes: Mapping[str, Mapping[str, ShardSlice]]
) -> dict[str, dict[str, Tensor]]:
    """Assemble the wanted slices of each kind from its files. Raises CheckpointError where something is missing."""
    found: dict[str, dict[str, Tensor]] = {kind: {} for kind in boxes}
    taken: dict[str, dict[str, set[ShardSlice]]] = {}
    reads: list[_FileRead] = []
    for kind, wanted in boxes.items():
        taken[kind] = {name: set() for name in wanted}
        reads += _planned_reads(kind, known, wanted, found[kind], taken[kind])
    _take_tensors(reader, reads)
    for kind, named in taken.items():
        for name, parts in named.items():
            if sum(box.count for box in parts) != boxes[kind][name].count:
                raise _damaged(_STATE.format(next(iter(known)).suffix), ValueError(f"{name} is not whole in all parts"))
    return found


def _planned_reads(
    kind: str,
    known: Mapping[ModelPart, _Header],
    boxes: Mapping[str, ShardSlice],
    found: dict[str, Tensor],
    taken: Mapping[str, set[ShardSlice]],
) -> Iterator[_FileRead]:
    """Yield the files of one kind to read; what they bring goes to `found` and is noted in `taken`.

    Of a slice that several parts hold, the first part's is read.
    """
    planned: dict[str, set[ShardSlice]] = {name: set() for name in boxes}
    for part, facts in known.items():
        described = {name: one for name, one in facts["tensors"].get(kind, {}).items() if name in boxes}
        held = {name: _held_slice(one) for name, one in described.items()}
        for name in [name for name in held if name not in found]:
            found[name] = torch.empty(boxes[name].size, dtype=getattr(torch, described[name]["dtype"]))
        news = {name: box.both(boxes[name]) for name, box in held.items()}
        news = {name: box for name, box in news.items() if box.count and box not in planned[name]}
        for name, box in news.items():
            planned[name].add(box)

        def take(name: str, value: Tensor, news: Mapping[str, ShardSlice] = news, held: Any = held) -> None:
            box = news[name]
            taken[name].add(box)
            if held[name] == boxes[name]:
                found[name] = value
            else:
                found[name][box.inside(boxes[name])] = value[box.inside(held[name])]

        if news or (len(known) == 1 and kind in facts["tensors"]):
            for name in _names(kind, part.suffix, facts.get("files", {}).get(kind, 1)):
                yield _FileRead(name=name, wanted=news.keys(), take=take)


def _held_slice(described: Mapping[str, Any]) -> ShardSlice:
    """Return the slice of a tensor that a file holds."""
    start, stop = zip(*described["held"], strict=True) if described["held"] else ((), ())
    return ShardSlice(shape=tuple(described["shape"]), start=tuple(start), stop=tuple(stop))


def _parts(reader: StateReader) -> tuple[ModelPart, ...]:
    """Return the parts that make up a checkpoint, in order."""
    matches = [match for match in map(_PARTS.fullmatch, reader.names()) if match]
    return ModelPart.read(matches[0][1]).every if matches else (WHOLE_MODEL,)


@dataclass(frozen=True, kw_only=True)
class _FileRead:
    """A file to read: names of the wanted tensors, None for all, and what is called with each of them."""

    name: str
    wanted: Collection[str] | None
    take: Callable[[str, Tensor], None]


def _take_tensors(reader: StateReader, reads: Sequence[_FileRead]) -> None:
    """Read some files in several threads. Of each, one tensor is in memory beside what `take` keeps."""

    def read(file: _FileRead) -> None:
        _check_name(reader, file.name)
        try:
            for found, value in stream_safetensors(reader.stream(file.name), file.wanted):
                file.take(found, value)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise _damaged(file.name, error) from error

    with ThreadPoolExecutor(_READERS) as pool:
        deque(pool.map(read, reads), maxlen=0)


def _read_header(reader: StateReader, part: ModelPart) -> dict[str, Any]:
    name = _STATE.format(part.suffix)
    expected = {"step", "optimizer", "options", "plain", "tensors"}
    _check_name(reader, name)
    try:
        facts = json.loads(reader.read(name))
        version, missing = facts["format"], expected - set(facts)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(name, error) from error
    if version != _FORMAT or missing:
        raise CheckpointError(
            f"{name} has format {version}, this version reads format {_FORMAT}",
            where=name,
            remedy="use the version of trainwright that wrote the checkpoint",
        )
    return dict(facts)


def _check_name(reader: StateReader, name: str) -> None:
    if name not in reader.names():
        raise CheckpointError(
            f"the checkpoint has no {name}; it holds {', '.join(sorted(reader.names())) or 'nothing'}",
            where=name,
            remedy="give a checkpoint that a torch strategy wrote",
        )


def _damaged(name: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{name} cannot be read: {error}",
        where=name,
        remedy="use an older checkpoint of the run",
    )


def take_weights(model: nn.Module, reader: StateReader, weights: WeightSource | None = None) -> None:
    """Load the weights of a checkpoint into a model.

    Args:
        weights: files that hold the frozen parameters which the checkpoint does not (`initial_weights=`).

    Raises:
        CheckpointError: they do not fit.
        JobError, StorageError: the files do not fit, or cannot be read.
    """
    given = {} if weights is None else load_weight_files(model, weights)
    fill_empty(model)
    base = _read_header(reader, _parts(reader)[0]).get("base", "")
    frozen = frozen_parameters(model) if base else {}
    own = base_digest(frozen, given, weights)
    if base and own != base:
        raise CheckpointError(
            f"the checkpoint does not fit the model: {base_problem(base, own)}",
            remedy="let model() make the parameters that it made when the run was trained",
        )
    found = load_weights(reader)
    found |= {name: found[first] for name, first in other_names(model).items() if first in found}
    try:
        model.load_state_dict({**frozen, **found})
    except RuntimeError as error:
        raise CheckpointError(
            f"the checkpoint does not fit the model: {error}", remedy="load it with the model= that it was trained with"
        ) from error
