"""The files of a checkpoint: safetensors and JSON. Nothing is pickled, and loading executes nothing.

| file                    | holds                                                                       |
|-------------------------|-----------------------------------------------------------------------------|
| `model.safetensors`     | the model's state dict: parameters and persistent buffers by full name      |
| `optimizer.safetensors` | the optimizer's tensors, named `<parameter>/<key>`                          |
| `state.json`            | step, the optimizer's plain values and changed settings, the losses' scale  |

A divided model has three such files for each part, `model.shard-0-of-4.safetensors` or `model.stage-0-of-2.safetensors`
and so on, each written by a rank that holds the part. They are read alone where a rank wants that part. What is not
divided by rows is in the files of all shards, or of each stage that has it. `state.shard-0-of-4.json` also says of each
tensor its whole shape, its type and which rows are held. Any layout is loaded into any other: `read` puts together what
a rank needs, from the files that hold some of it, one after the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from trainwright.core.checkpoint import Reader, Writer
from trainwright.core.errors import CheckpointError, JobError, NonFiniteLoss
from trainwright.strategies.torch.parts import WHOLE, Part
from trainwright.strategies.torch.state import HostState, Slots

MODEL, OPTIMIZER, STATE = "model{}.safetensors", "optimizer{}.safetensors", "state{}.json"
_PARTS = re.compile(r"state\.(shard|stage)-(\d+)-of-(\d+)\.json")
_FORMAT = 1


def write(state: HostState, writer: Writer) -> None:
    """Write a state's files. Raises StorageError, and NonFiniteLoss for a state that nobody would want back."""
    for name in state.trained:
        if not torch.isfinite(state.model[name]).all():
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
    part = state.part
    if part != WHOLE:
        facts["tensors"] = {name: _described(name, value, state) for name, value in (state.model | tensors).items()}
    writer.write(MODEL.format(part.suffix), safetensors.torch.save(state.model))
    writer.write(OPTIMIZER.format(part.suffix), safetensors.torch.save(tensors))
    writer.write(STATE.format(part.suffix), json.dumps(facts, indent=1).encode())


def _described(name: str, held: Tensor, state: HostState) -> dict[str, Any]:
    """A tensor's whole shape and type, and the rows of it that are held; None where it is not divided."""
    size = state.rows.get(name)
    rows = None if size is None else state.part.rows(size)
    return {
        "shape": list(held.shape) if size is None else [size, *held.shape[1:]],
        "dtype": str(held.dtype).removeprefix("torch."),
        "rows": None if rows is None else [rows.start, rows.stop],
    }


def read(
    reader: Reader, part: Part = WHOLE, parameters: Collection[str] = (), names: Collection[str] | None = None
) -> HostState:
    """Read a state's files, whatever layout wrote them.

    Args:
        reader: of the checkpoint.
        part: wanted of what is divided.
        parameters: names of the parameters that are to be divided.
        names: of the parameters and buffers that are wanted; all by default.

    Raises:
        CheckpointError: a file is missing or is not what it should be.
    """
    source = _Source.of(reader, part, None if names is None else frozenset(names))
    facts = source.facts[source.parts[0]]
    model, rows = source.tensors(MODEL, part, lambda name, tensor: name in parameters)
    shapes = {name: (rows.get(name, -1), *value.shape[1:]) for name, value in model.items()}
    tensors, slot_rows = source.tensors(
        OPTIMIZER, part, lambda name, tensor: tuple(tensor.shape) == shapes.get(name.rpartition("/")[0])
    )
    slots: Slots = {
        name: dict(entries)
        for known in source.facts.values()
        for name, entries in known["plain"].items()
        if names is None or name in names
    }
    for name, value in tensors.items():
        parameter, _, key = name.rpartition("/")
        slots.setdefault(parameter, {})[key] = value
    return HostState(
        step=facts["step"],
        model=model,
        slots=slots,
        options=facts["options"],
        optimizer=facts["optimizer"],
        scale=None if "scale" not in facts else (float(facts["scale"][0]), int(facts["scale"][1])),
        part=part,
        rows=rows | slot_rows,
    )


def load_weights(reader: Reader) -> dict[str, Tensor]:
    """A checkpoint's parameters and persistent buffers by full name, as tensors on the CPU.

    `model.load_state_dict(load_weights(reader))` gives the trained model. Raises CheckpointError.
    """
    return _Source.of(reader, WHOLE, None).tensors(MODEL, WHOLE, lambda name, tensor: False)[0]


def export(model: nn.Module, path: str) -> None:
    """Write the state dict as `.safetensors` or, by `torch.save`, as `.pt`. Raises JobError for other endings."""
    if path.endswith(".safetensors"):
        safetensors.torch.save_model(model, path)
    elif path.endswith(".pt"):
        torch.save(model.state_dict(), path)
    else:
        raise JobError([f"{path!r}: a torch model is exported to `.safetensors` or `.pt`"])


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A checkpoint's parts, first of all the one that is wanted where it is there: it is all that has to be read.

    Attributes:
        reader: of its files.
        names: of the parameters and buffers that are wanted; None for all.
        parts: that are read.
        facts: of each part.
    """

    reader: Reader
    names: frozenset[str] | None
    parts: tuple[Part, ...]
    facts: Mapping[Part, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, reader: Reader, wanted: Part, names: frozenset[str] | None) -> _Source:
        """Find the parts. Raises CheckpointError where one is missing, or they are of different steps."""
        parts = _parts(reader)
        if wanted in parts:
            alone = cls(reader=reader, names=names, parts=(wanted,), facts={wanted: _facts(reader, wanted)})
            if names is None or names <= set(alone.facts[wanted].get("tensors", names)):
                return alone  # a stage of other cuts has not all of it
        facts = {part: _facts(reader, part) for part in parts}
        held = [(part.stage, *sorted(known.get("tensors", ()))) for part, known in facts.items()]
        mixed = len({known["step"] for known in facts.values()}) > 1 or len(set(held)) > parts[0].stages
        if mixed:
            raise _damaged(STATE.format(parts[-1].suffix), ValueError("it belongs to another state than the first"))
        return cls(reader=reader, names=names, parts=parts, facts=facts)

    def tensors(
        self, file: str, wanted: Part, divide: Callable[[str, Tensor], bool]
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What a rank wants of one kind of file, and all ranks' rows of what is divided for it.

        Args:
            file: `MODEL` or `OPTIMIZER`.
            wanted: part of what is divided.
            divide: whether a tensor that is whole in the checkpoint is divided for the rank.
        """
        found: dict[str, Tensor] = {}
        rows: dict[str, int] = {}
        for part in self.parts:
            if self._wanted(part, wanted):
                for name, held in _tensors(self.reader, file.format(part.suffix)).items():
                    if not self._named(name):
                        continue
                    size = self._size(part, name, held, divide)
                    if size is None:
                        found.setdefault(name, held)
                    else:
                        rows[name] = size
                        _take(found, name, held, part.rows(size), wanted.rows(size))
        return found, {} if wanted == WHOLE else rows

    def _wanted(self, part: Part, wanted: Part) -> bool:
        """Whether a part's files hold anything that is wanted and not in the first ones."""
        if part == self.parts[0]:
            return True
        tensors = {name: one for name, one in self.facts[part]["tensors"].items() if self._named(name)}
        sizes = [one["shape"][0] for one in tensors.values() if one["rows"] is not None]
        return bool(part.stages > 1 and tensors) or any(_overlap(part.rows(size), wanted.rows(size)) for size in sizes)

    def _named(self, name: str) -> bool:
        """Whether a tensor, or the parameter whose slot it is, is wanted."""
        return self.names is None or name in self.names or name.rpartition("/")[0] in self.names

    def _size(self, part: Part, name: str, held: Tensor, divide: Callable[[str, Tensor], bool]) -> int | None:
        """All ranks' rows of a tensor; None where a rank wants all of it and has it here."""
        if part.of == 1:
            return held.shape[0] if divide(name, held) else None
        described = self.facts[part]["tensors"][name]
        return None if described["rows"] is None else int(described["shape"][0])


def _take(found: dict[str, Tensor], name: str, held: Tensor, have: range, want: range) -> None:
    """Copy the rows that are held and wanted to their place."""
    if have == want:
        found[name] = held
        return
    if name not in found:
        found[name] = held.new_empty((len(want), *held.shape[1:]))
    both = _overlap(have, want)
    into = found[name][both.start - want.start : both.stop - want.start] if both else found[name][:0]
    into.copy_(held[both.start - have.start : both.stop - have.start] if both else held[:0])


def _overlap(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _parts(reader: Reader) -> tuple[Part, ...]:
    """The parts that a checkpoint is of, in order."""
    names = reader.names()
    matches = [match for match in map(_PARTS.fullmatch, names) if match]
    if STATE.format("") in names or not matches:
        return (WHOLE,)
    kind, place, count = matches[0].groups()
    return Part.read(kind, int(place), int(count)).every


def _tensors(reader: Reader, name: str) -> dict[str, Tensor]:
    data = _bytes(reader, name)
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise _damaged(name, error) from error


def _facts(reader: Reader, part: Part) -> dict[str, Any]:
    name = STATE.format(part.suffix)
    expected = {"step", "optimizer", "options", "plain"} | ({"tensors"} if part != WHOLE else set())
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


def _bytes(reader: Reader, name: str) -> bytes:
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
