"""A replica's state: copied to host memory, taken back, and sent from rank to rank. Everything goes by full names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from trainwright.core.data import fold
from trainwright.core.errors import CheckpointError
from trainwright.strategies.torch.replica import Replica, set_option, settings

Slots = dict[str, dict[str, Any]]
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True)
class HostState:
    """A copy in host memory that shares nothing with the replica.

    Attributes:
        step: completed steps; None before the first.
        model: the model's state dict: parameters and persistent buffers by full name.
        slots: the optimizer's state by parameter name and key: tensors and plain values.
        options: for each parameter group the settings that training changed; the others are the job's.
        optimizer: name of the optimizer's class.
        trained: names of the parameters that are trained, where they are known.
    """

    step: int | None
    model: dict[str, Tensor]
    slots: Slots
    options: list[dict[str, Any]]
    optimizer: str
    trained: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        slots = (value for entries in self.slots.values() for value in entries.values() if isinstance(value, Tensor))
        return sum(tensor.nbytes for tensor in (*self.model.values(), *slots))


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """A tensor's form, sent ahead of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def snapshot(replica: Replica) -> HostState:
    """Copy a replica's state to host memory.

    Raises:
        CheckpointError: the optimizer keeps something that is neither a tensor nor a plain value.
    """
    return HostState(
        step=replica.step,
        model={name: _host(value) for name, value in replica.model.state_dict().items()},
        slots={
            name: {key: _host(value) if isinstance(value, Tensor) else value for key, value in entries.items()}
            for name, entries in _slots(replica).items()
        },
        options=changed_options(replica),
        optimizer=type(replica.optimizer).__name__,
        trained=tuple(replica.names.values()),
    )


def restore(replica: Replica, state: HostState) -> None:
    """Make a replica equal to a state; everything is checked before anything is changed.

    Raises:
        CheckpointError: names, shapes or types do not fit; says which and what to do.
    """
    own = replica.model.state_dict()
    _check(own, replica, state)
    replica.sound = False
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(state.model[name])
        _make_slots(replica, state.slots)
        for name, key, value in _slot_tensors(replica):
            value.copy_(state.slots[name][key])
    _set_options(replica, state.options)
    replica.step, replica.sound = state.step, True


def broadcast(replica: Replica, source: int, rank: int, device: torch.device) -> None:
    """Make every rank of the process group equal to rank `source`, bit by bit. All ranks call it.

    Args:
        replica: this rank's.
        source: the rank that sends.
        rank: this rank.
        device: where the process group communicates.
    """
    news: list[Any] = [_description(replica) if rank == source else None]
    distributed.broadcast_object_list(news, src=source, device=device)
    step, slots, options, every_used = news[0]
    if rank != source:
        replica.sound = False
        _make_slots(replica, slots)
    tensors = [*replica.model.parameters(), *replica.buffers(), *(value for _, _, value in _slot_tensors(replica))]
    _broadcast_tensors([tensor.detach() for tensor in tensors], source, device)
    if rank != source:
        _set_options(replica, options)
        replica.step, replica.sound, replica.every_used = step, True, every_used


def checksum(model: nn.Module) -> int:
    """A 62-bit number that depends on every bit of the parameters that are trained."""
    sums = [
        int(_bits(parameter.detach().reshape(-1)).sum(dtype=torch.int64))
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    return fold(*sums) >> 1


def changed_options(replica: Replica) -> list[dict[str, Any]]:
    """Settings of each group that training changed, the learning rate that a schedule sets left out."""
    scheduled = {"lr"} if replica.spec.schedule is not None else set()
    return [
        {key: value for key, value in settings(group).items() if key not in scheduled and value != initial.get(key)}
        for group, initial in zip(replica.optimizer.param_groups, replica.initial, strict=True)
    ]


def _set_options(replica: Replica, options: list[dict[str, Any]]) -> None:
    for group, initial, changed in zip(replica.optimizer.param_groups, replica.initial, options, strict=True):
        for key, value in {**initial, **changed}.items():
            set_option(group, key, value)


def _slots(replica: Replica) -> Slots:
    """The optimizer's state by parameter name."""
    found: Slots = {}
    for parameter, entries in replica.optimizer.state.items():
        for key, value in entries.items():
            if not isinstance(value, (Tensor, *_PLAIN)):
                raise CheckpointError(
                    f"the optimizer keeps a {type(value).__name__} as {key!r} in its state, which cannot be saved",
                    remedy="use an optimizer whose state is tensors and numbers",
                )
        found[replica.names[parameter]] = dict(entries)
    return found


def _slot_tensors(replica: Replica) -> Iterator[tuple[str, str, Tensor]]:
    """The optimizer's tensors, in the order of the parameters and sorted by key."""
    for name, entries in sorted(_slots(replica).items()):
        for key in sorted(entries):
            if isinstance(entries[key], Tensor):
                yield name, key, entries[key]


def _make_slots(replica: Replica, slots: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the optimizer's state by plain values and tensors of the described form, which are still to be filled."""
    groups = {parameter: group for group in replica.optimizer.param_groups for parameter in group["params"]}
    replica.optimizer.state.clear()
    for parameter, name in replica.names.items():
        for key, value in slots.get(name, {}).items():
            empty = isinstance(value, Tensor | _Shape)
            made = _empty_slot(parameter, key, value, groups[parameter]) if empty else value
            replica.optimizer.state[parameter][key] = made


def _empty_slot(parameter: Tensor, key: str, form: Tensor | _Shape, group: Mapping[str, Any]) -> Tensor:
    """A tensor where torch's optimizers keep it: a count beside the host's numbers, all else beside the parameter."""
    counts = key == "step" and not (group.get("capturable") or group.get("fused"))
    device = torch.device("cpu") if counts else parameter.device
    if tuple(form.shape) == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=form.dtype, device=device, requires_grad=False)
    return torch.empty(form.shape, dtype=form.dtype, device=device)


def _description(replica: Replica) -> tuple[int | None, Slots, list[dict[str, Any]], bool | None]:
    """What a newcomer must know before tensors can be sent."""
    slots = {
        name: {
            key: _Shape(shape=tuple(value.shape), dtype=value.dtype) if isinstance(value, Tensor) else value
            for key, value in entries.items()
        }
        for name, entries in _slots(replica).items()
    }
    return replica.step, slots, changed_options(replica), replica.every_used


def _broadcast_tensors(tensors: list[Tensor], source: int, device: torch.device) -> None:
    """Broadcast in place; tensors elsewhere or not in one piece go through a copy."""
    staged = [tensor if _sendable(tensor, device) else tensor.to(device).contiguous() for tensor in tensors]
    handles = [
        distributed.broadcast(_bits(tensor.reshape(-1)), src=source, async_op=True)
        for tensor in staged
        if tensor.numel()
    ]
    for handle in handles:
        assert handle is not None, "an asynchronous collective has a handle"
        handle.wait()
    with torch.no_grad():
        for tensor, copy in zip(tensors, staged, strict=True):
            if tensor is not copy:
                tensor.copy_(copy)


def _sendable(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device == device and tensor.is_contiguous()


def _bits(flat: Tensor) -> Tensor:
    """A flat tensor's memory as integers, so that every type can be sent and summed."""
    return flat.view(_INTEGERS.get(flat.element_size(), torch.int64))


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _check(own: Mapping[str, Tensor], replica: Replica, state: HostState) -> None:
    """Raise CheckpointError unless a state fits."""
    problems = [*_misfits(own, state.model)]
    strangers = sorted(set(state.slots) - set(replica.names.values()))
    if strangers:
        problems.append(f"optimizer state of {strangers[0]!r}, which the model does not train")
    optimizer = type(replica.optimizer).__name__
    if state.optimizer != optimizer:
        problems.append(f"optimizer: {state.optimizer} in the checkpoint, {optimizer} in the job")
    if len(state.options) != len(replica.initial):
        found, expected = len(state.options), len(replica.initial)
        problems.append(f"optimizer: {found} parameter groups in the checkpoint, {expected} in the job")
    if problems:
        raise CheckpointError(
            f"the checkpoint holds another model or optimizer: {problems[0]}",
            detail="\n".join(problems),
            remedy="use the model and optimizer that wrote it, or start a run under a new name",
        )


def _misfits(own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Iterator[str]:
    """Parameters and buffers that do not fit, in words."""
    for name, value in own.items():
        if name not in found:
            yield f"{name}: missing in the checkpoint, {_form(value)} in the job"
        elif _form(found[name]) != _form(value):
            yield f"{name}: {_form(found[name])} in the checkpoint, {_form(value)} in the job"
    for name in sorted(set(found) - set(own)):
        yield f"{name}: {_form(found[name])} in the checkpoint, none in the job"


def _form(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
