"""The files of a checkpoint: safetensors and JSON. Nothing is pickled, and loading executes nothing.

| file                    | holds                                                                       |
|-------------------------|-----------------------------------------------------------------------------|
| `model.safetensors`     | the model's state dict: parameters and persistent buffers by full name      |
| `optimizer.safetensors` | the optimizer's tensors, named `<parameter>/<key>`                          |
| `state.json`            | step, the optimizer's plain values and changed settings, the losses' scale  |
| `local-0-of-2.…`        | buffers that data rank 0 keeps as its own (`local_state=`), and so on       |

Tensors of more than 1 GiB are written to several files, `model.safetensors`, `model-2.safetensors` and so on, whose
number is in `state.json`: they are read, and their checksums made, at the same time.

A divided model has three such files for each part, `model.shard-0-of-4.safetensors`, `model.stage-0-of-2.safetensors`,
`model.stage-0-of-2.tensor-1-of-2.safetensors` and so on, each written by a rank that holds the part. What is not
divided is in the files of all parts that have it; of parameter servers' (`model.server-0-of-2.safetensors`), in one.
`state.json` also says of each tensor its type, its whole shape and which box of it is held. Any layout is loaded into
any other: `read` puts together what a rank needs, from the files that hold some of it, one after the other, and alone
from its own part's where that has all of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.checkpoint import Reader, Writer
from trainwright.core.errors import CheckpointError, JobError, NonFiniteLoss
from trainwright.strategies.torch.checkpoint.local_state import LocalState, Seat, file_of
from trainwright.strategies.torch.checkpoint.safetensors_stream import packed, unpacked
from trainwright.strategies.torch.checkpoint.shard_layout import WHOLE, Box, Part
from trainwright.strategies.torch.checkpoint.state import HostState, Slots

MODEL, OPTIMIZER = "model", "optimizer"
_FILE, STATE = "{}{}.safetensors", "state{}.json"
MAX_FILE_BYTES, _READERS = 1 << 30, 4
_PARTS = re.compile(r"state((?:\.(?:stage|shard|tensor|server)-\d+-of-\d+)*)\.json")
_FORMAT = 2
Facts = Mapping[str, Any]
Wanted = Mapping[str, Box | None]


def write(state: HostState, writer: Writer) -> None:
    """Write a state's files: of data ranks with local state the first one writes all, the others write theirs alone.

    Raises StorageError, and NonFiniteLoss for a state that nobody would want back.
    """
    if state.local is not None:
        writer.write(state.local.seat.file, *packed(state.local.tensors))
        if state.local.seat.rank:
            return
    for name in state.trained:
        if not _finite(state.model[name]):
            raise NonFiniteLoss(
                f"parameter {name!r} is not finite after step {state.step}: a gradient was not, though the loss was",
                remedy='set clip_norm or on_nonfinite="skip", which look at the gradient of each step; what was '
                "committed before is kept",
            )
    tensors: dict[str, Tensor] = {}
    plain: Slots = {}
    for name, entries in state.slots.items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value
            else:
                plain.setdefault(name, {})[key] = value
    facts: dict[str, Any] = {
        "format": _FORMAT,
        "step": state.step,
        "optimizer": state.optimizer,
        "options": state.options,
        "plain": plain,
    }
    if state.scale is not None:
        facts["scale"] = list(state.scale)
    boxes, suffix = state.boxes, state.part.suffix
    facts["tensors"] = {
        MODEL: {name: _described(value, boxes.get(name)) for name, value in state.model.items()},
        OPTIMIZER: {name: _described(value, boxes.get(name)) for name, value in tensors.items()},
    }
    facts["files"] = {}
    for kind, held in ((MODEL, state.model), (OPTIMIZER, tensors)):
        groups = list(_groups(held))
        facts["files"][kind] = len(groups)
        for name, group in zip(_names(kind, suffix, len(groups)), groups, strict=True):
            writer.write(name, *packed(group))
    writer.write(STATE.format(suffix), json.dumps(facts, indent=1).encode())


def _names(kind: str, suffix: str, count: int) -> list[str]:
    """Names of so many files of one kind."""
    return [_FILE.format(kind if number == 1 else f"{kind}-{number}", suffix) for number in range(1, count + 1)]


def _groups(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The same tensors, those of one file together; one group at least."""
    group, size_bytes = dict[str, Tensor](), 0
    for name, value in tensors.items():
        if group and size_bytes + value.nbytes > MAX_FILE_BYTES:
            yield group
            group, size_bytes = {}, 0
        group[name] = value
        size_bytes += value.nbytes
    yield group


def _finite(value: Tensor) -> bool:
    """Whether all of a tensor's numbers are; in one pass, that keeps none of them."""
    numbers = torch.view_as_real(value) if value.is_complex() else value
    return not numbers.numel() or bool(torch.isfinite(torch.stack(numbers.aminmax())).all())  # NaN is both


def _described(held: Tensor, box: Box | None) -> dict[str, Any]:
    """A tensor's type, its whole shape, and which indices are held in each dimension."""
    box = box or Box.all_of(held.shape)
    return {
        "dtype": str(held.dtype).removeprefix("torch."),
        "shape": [*box.shape],
        "held": [[start, stop] for start, stop in zip(box.start, box.stop, strict=True)],
    }


def read(reader: Reader, wanted: Wanted | None = None, part: Part = WHOLE) -> HostState:
    """Read a state's files, whatever layout wrote them.

    Args:
        reader: of the checkpoint.
        wanted: boxes of the parameters and buffers that are wanted, None for all of one; without it all of every one.
        part: the rank's own.

    Raises:
        CheckpointError: a file is missing or is not what it should be.
    """
    known = _known(reader, wanted, part)
    boxes = _boxes([*known.values()], wanted)
    slots: Slots = {
        name: dict(entries)
        for facts in known.values()
        for name, entries in facts["plain"].items()
        if wanted is None or name in wanted
    }
    optimizer = {} if reader.weights_only else _joined(reader, OPTIMIZER, known, boxes[OPTIMIZER])
    for name, value in optimizer.items():
        parameter, _, key = name.rpartition("/")
        slots.setdefault(parameter, {})[key] = value
    own = {name: box for name, box in (wanted or {}).items() if box}
    facts = next(iter(known.values()))
    return HostState(
        step=facts["step"],
        model=_joined(reader, MODEL, known, boxes[MODEL]),
        slots=slots,
        options=facts["options"],
        optimizer=facts["optimizer"],
        scale=None if "scale" not in facts else (float(facts["scale"][0]), int(facts["scale"][1])),
        part=part,
        weights_only=reader.weights_only,
        boxes={
            name: box
            for kind, named in boxes.items()
            for name, box in named.items()
            if own.get(name if kind == MODEL else name.rpartition("/")[0]) == box
        },
    )


def read_local(reader: Reader, seat: Seat) -> LocalState | None:
    """Read what a data rank keeps as its own.

    None where the model is only evaluated, by another number of data ranks. Raises CheckpointError.
    """
    name = file_of(reader, seat)
    return None if name is None else LocalState(seat=seat, tensors=_tensors(reader, [name]))


def load_weights(reader: Reader) -> dict[str, Tensor]:
    """A checkpoint's parameters and persistent buffers by full name, as tensors on the CPU.

    `model.load_state_dict(load_weights(reader))` gives the trained model. Raises CheckpointError.
    """
    known = _known(reader, None, WHOLE)
    return _joined(reader, MODEL, known, _boxes([*known.values()], None)[MODEL])


def export(model: nn.Module, path: str) -> None:
    """Write the state dict as `.safetensors` or, by `torch.save`, as `.pt`. Raises JobError for other endings."""
    if path.endswith(".safetensors"):
        import safetensors.torch  # nothing else in the engines needs it

        safetensors.torch.save_model(model, path)
    elif path.endswith(".pt"):
        torch.save(model.state_dict(), path)
    else:
        raise JobError([f"{path!r}: a torch model is exported to `.safetensors` or `.pt`"])


def _known(reader: Reader, wanted: Wanted | None, own: Part) -> Mapping[Part, Facts]:
    """What the parts that are to be read hold: the rank's own first, and alone where it has all that is wanted.

    Raises:
        CheckpointError: a part is missing, or they are of different states.
    """
    parts = _parts(reader)
    known: dict[Part, Facts] = {part: _facts(reader, part) for part in parts if part == own}
    if known and (len(parts) == 1 or (wanted is not None and _alone(known[own], wanted))):
        return known
    known |= {part: _facts(reader, part) for part in parts if part != own}
    kinds = {(part.stage, *sorted(facts["tensors"][MODEL])) for part, facts in known.items()}
    if len({facts["step"] for facts in known.values()}) > 1 or len(kinds) > parts[0].stages * parts[0].servers:
        raise _damaged(STATE.format(parts[-1].suffix), ValueError("it belongs to another state than the first"))
    return known


def _alone(facts: Facts, wanted: Wanted) -> bool:
    """Whether a part has all that is wanted; a stage of other cuts, or a shard of other layers, has not."""
    boxes = _boxes([facts], wanted)
    return wanted.keys() <= facts["tensors"][MODEL].keys() and all(
        _held(facts["tensors"][kind][name]) == box for kind, named in boxes.items() for name, box in named.items()
    )


def _boxes(known: Sequence[Facts], wanted: Wanted | None) -> dict[str, dict[str, Box]]:
    """Boxes that are wanted of the tensors of each kind: of the optimizer's as of their parameters."""
    boxes: dict[str, dict[str, Box]] = {MODEL: {}, OPTIMIZER: {}}
    for facts in known:
        for kind, described in facts["tensors"].items():
            for name, one in described.items():
                owner = name if kind == MODEL else name.rpartition("/")[0]
                if wanted is None or owner in wanted:
                    box, whole = (wanted or {}).get(owner), Box.all_of(one["shape"])
                    boxes[kind][name] = box if box and box.shape == whole.shape else whole
    return boxes


def _joined(reader: Reader, kind: str, known: Mapping[Part, Facts], boxes: Mapping[str, Box]) -> dict[str, Tensor]:
    """What is wanted of one kind of file. Raises CheckpointError where the files have not all of it."""
    found: dict[str, Tensor] = {}
    taken: dict[str, set[Box]] = {name: set() for name in boxes}
    for part, facts in known.items():
        described = {name: one for name, one in facts["tensors"][kind].items() if name in boxes}
        held = {name: _held(one) for name, one in described.items()}
        for name in [name for name in held if name not in found]:
            found[name] = torch.empty(boxes[name].size, dtype=getattr(torch, described[name]["dtype"]))
        news = {name: box.both(boxes[name]) for name, box in held.items()}
        news = {name: box for name, box in news.items() if box.count and box not in taken[name]}
        names = _names(kind, part.suffix, facts.get("files", {}).get(kind, 1))
        tensors = _tensors(reader, names) if news or len(known) == 1 else {}
        for name, box in news.items():
            taken[name].add(box)
            if held[name] == boxes[name]:
                found[name] = tensors[name]
            else:
                found[name][box.inside(boxes[name])] = tensors[name][box.inside(held[name])]
    for name, parts in taken.items():
        if sum(box.count for box in parts) != boxes[name].count:
            raise _damaged(STATE.format(next(iter(known)).suffix), ValueError(f"{name} is not whole in all parts"))
    return found


def _held(described: Mapping[str, Any]) -> Box:
    """Which box of a tensor a file holds."""
    start, stop = zip(*described["held"], strict=True) if described["held"] else ((), ())
    return Box(shape=tuple(described["shape"]), start=tuple(start), stop=tuple(stop))


def _parts(reader: Reader) -> tuple[Part, ...]:
    """The parts that a checkpoint is of, in order."""
    matches = [match for match in map(_PARTS.fullmatch, reader.names()) if match]
    return Part.read(matches[0][1]).every if matches else (WHOLE,)


def _tensors(reader: Reader, names: Sequence[str]) -> dict[str, Tensor]:
    """All tensors of some files."""
    with ThreadPoolExecutor(min(_READERS, len(names))) as pool:
        return {name: value for found in pool.map(partial(_of_file, reader), names) for name, value in found.items()}


def _of_file(reader: Reader, name: str) -> dict[str, Tensor]:
    data = _bytes(reader, name)
    try:
        return unpacked(data)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise _damaged(name, error) from error


def _facts(reader: Reader, part: Part) -> dict[str, Any]:
    name = STATE.format(part.suffix)
    expected = {"step", "optimizer", "options", "plain", "tensors"}
    try:
        facts = json.loads(_bytes(reader, name))
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


def _bytes(reader: Reader, name: str) -> bytes | bytearray:
    if name not in reader.names():
        raise CheckpointError(
            f"the checkpoint has no {name}; it holds {', '.join(sorted(reader.names())) or 'nothing'}",
            where=name,
            remedy="give a checkpoint that a torch strategy wrote",
        )
    return reader.read(name)


def _damaged(name: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{name} cannot be read: {error}",
        where=name,
        remedy="use an older checkpoint of the run",
    )


def take_weights(model: nn.Module, reader: Reader) -> None:
    """Give a model the weights of a checkpoint. Raises CheckpointError where they do not fit."""
    try:
        model.load_state_dict(load_weights(reader))
    except RuntimeError as error:
        raise CheckpointError(
            f"the checkpoint does not fit the model: {error}", remedy="load it with the model= that it was trained with"
        ) from error
