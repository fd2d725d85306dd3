"""The files of a checkpoint: safetensors and JSON. Nothing is pickled, and loading executes nothing.

| file                    | holds                                                                       |
|-------------------------|-----------------------------------------------------------------------------|
| `model.safetensors`     | the model's state dict: parameters and persistent buffers by full name      |
| `optimizer.safetensors` | the optimizer's tensors, named `<parameter>/<key>`                          |
| `state.json`            | the step, the optimizer's plain values by parameter, settings that it changed |
"""

from __future__ import annotations

import json
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from trainwright.core.checkpoint import Reader, Writer
from trainwright.core.errors import CheckpointError, JobError, NonFiniteLoss
from trainwright.strategies.torch.state import HostState, Slots

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
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
    facts = {
        "format": _FORMAT,
        "step": state.step,
        "optimizer": state.optimizer,
        "options": state.options,
        "plain": plain,
    }
    writer.write(MODEL, safetensors.torch.save(state.model))
    writer.write(OPTIMIZER, safetensors.torch.save(tensors))
    writer.write(STATE, json.dumps(facts, indent=1).encode())


def read(reader: Reader) -> HostState:
    """Read a state's files. Raises CheckpointError where one is missing or is not what it should be."""
    facts = _facts(reader)
    slots: Slots = {name: dict(entries) for name, entries in facts["plain"].items()}
    for name, value in _tensors(reader, OPTIMIZER).items():
        parameter, _, key = name.rpartition("/")
        slots.setdefault(parameter, {})[key] = value
    return HostState(
        step=facts["step"],
        model=load_weights(reader),
        slots=slots,
        options=facts["options"],
        optimizer=facts["optimizer"],
    )


def load_weights(reader: Reader) -> dict[str, Tensor]:
    """A checkpoint's parameters and persistent buffers by full name, as tensors on the CPU.

    `model.load_state_dict(load_weights(reader))` gives the trained model. Raises CheckpointError.
    """
    return _tensors(reader, MODEL)


def export(model: nn.Module, path: str) -> None:
    """Write the state dict as `.safetensors` or, by `torch.save`, as `.pt`. Raises JobError for other endings."""
    if path.endswith(".safetensors"):
        safetensors.torch.save_model(model, path)
    elif path.endswith(".pt"):
        torch.save(model.state_dict(), path)
    else:
        raise JobError([f"{path!r}: a torch model is exported to `.safetensors` or `.pt`"])


def _tensors(reader: Reader, name: str) -> dict[str, Tensor]:
    data = _bytes(reader, name)
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise _damaged(name, error) from error


def _facts(reader: Reader) -> dict[str, Any]:
    try:
        facts = json.loads(_bytes(reader, STATE))
        version, missing = facts["format"], {"step", "optimizer", "options", "plain"} - set(facts)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(STATE, error) from error
    if version != _FORMAT or missing:
        raise CheckpointError(
            f"{STATE} has format {version}, this version reads format {_FORMAT}",
            where=STATE,
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
