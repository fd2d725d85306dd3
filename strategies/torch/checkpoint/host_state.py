"""A replica's state: copied to host memory, restored, and broadcast to other ranks. Tensors go by full names."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.serialization import safe_globals

from trainwright.core.errors import CheckpointError
from trainwright.strategies.torch.shard_layout import WHOLE_MODEL, ModelPart, ShardSlice, is_dtensor, to_local
from trainwright.strategies.torch.training.learning_rates import SchedulerState, group_settings
from trainwright.strategies.torch.training.train_state import LocalState, LossScale, TorchReplica

OptimizerSlots = dict[str, dict[str, Any]]
_PREVIOUS_WEIGHTS = "weights_before"  # among the optimizer's state of a parameter: the version before the last step
AVERAGE = "average"  # among the same: the average of the parameter
OUTER_MOMENTUM = "outer_momentum"  # among the same: that of servers, for what several local steps came to
_Memory = dict[tuple[str, ...], Tensor]
_PLAIN = (bool, int, float, str, type(None))
_TENSOR, _STRIDES = "tensor", "strides"  # in place of a tensor within a list or dict: the key of its own entry
_BLOCK_BYTES = 256 << 20  # that are sent at a time: a GPU may have no room for all of a state that is kept on the host
_LOCAL = ("local", "state")  # after a buffer's name in a state's memory


@dataclass(frozen=True, kw_only=True)
class HostState:
    """A replica's state, as a rule in memory of its own; of what this rank holds, where the model is divided."""

    step: int | None  # completed steps; None before the first
    model: dict[str, Tensor]  # the model's state dict: parameters and persistent buffers by full name
    slots: OptimizerSlots  # the optimizer's state by parameter name and key: tensors and plain values
    # for each parameter group the settings that training changed; the others are the job's
    options: list[dict[str, Any]]
    optimizer: str  # name of the optimizer's class
    # of the losses: its factor, and steps since it changed; None where they are not scaled
    scale: tuple[float, int] | None = None
    trained: tuple[str, ...] = ()  # names of the parameters that are trained, where they are known
    part: ModelPart = WHOLE_MODEL  # of the model, that is held
    # what is held of each tensor that is divided, by name, or `<parameter>/<key>` in the optimizer
    boxes: Mapping[str, ShardSlice] = field(default_factory=dict)
    weights_only: bool = False  # without the optimizer's state, for a model that is not trained further
    local: LocalState | None = None  # what this data rank keeps as its own; None where a job has no such state
    scheduler: SchedulerState | None = None  # state of the learning-rate scheduler; None where a job has none
    sometimes_unused: bool = False  # a trained parameter had a gradient in some steps only: DDP looks for such
    checked: bool = False  # its run compared the loss of a divided batch with those of its parts
    base: str = ""  # digest of the frozen parameters that it does not hold; empty where it holds all

    @property
    def size_bytes(self) -> int:
        """Size of all tensors, in bytes."""
        return sum(tensor.nbytes for tensor in self.memory.values())

    @property
    def memory(self) -> _Memory:
        """All tensors, by name, and by parameter name and key."""
        slots = ((name, key, value) for name, entries in self.slots.items() for key, value in entries.items())
        own: _Memory = {(name,): value for name, value in self.model.items()}
        if self.local is not None:
            own |= {(name, *_LOCAL): value for name, value in self.local.tensors.items()}
        return own | {(name, key): value for name, key, value in slots if isinstance(value, Tensor)}

    def mapped(self, change: Callable[[tuple[str, ...], Tensor], Tensor]) -> HostState:
        """Return the state with other tensors in place of its own; they are named as in `memory`."""
        local = self.local
        if local is not None:
            own = {name: change((name, *_LOCAL), value) for name, value in local.tensors.items()}
            local = replace(local, tensors=own)
        return replace(
            self,
            model={name: change((name,), value) for name, value in self.model.items()},
            slots=_map_tensors(self.slots, lambda name, key, value: change((name, key), value)),
            local=local,
        )


@dataclass(frozen=True, kw_only=True)
class _TensorForm:
    """A tensor's shape and type, sent ahead of it; `like` says that it is divided as its parameter is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    like: bool

    @classmethod
    def of(cls, tensor: Tensor, like: bool) -> _TensorForm:
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype, like=like)


class HostStateCopier:
    """Copies states to host memory, and reuses the memory of the last copy once nothing holds it.

    Fresh memory costs several times the copy: the system clears each page as it is first touched. So from the first
    copy on the memory of one is held.
    """

    def __init__(self) -> None:
        self._spare: _Memory = {}

    def of(self, state: HostState) -> HostState:
        """Copy a state to host memory; the memory belongs to the copy as long as it lives."""
        spare, self._spare = self._spare, {}
        copy = state.mapped(lambda name, value: _host(value, spare.get(name)))
        weakref.finalize(copy, self._take_back, copy.memory).atexit = False
        return copy

    def _take_back(self, memory: _Memory) -> None:
        self._spare = memory


def state_of(replica: TorchReplica) -> HostState:
    """Return a replica's state in the replica's own tensors.

    Raises:
        CheckpointError: the optimizer keeps something that cannot be saved.
    """
    replica.end_evaluation()
    model, slots, local = replica.model.state_dict(), _slots(replica), None
    if replica.local:
        own = {name: buffer for name, buffer in replica.named_buffers() if name in replica.local}
        local = LocalState(data_rank=replica.data_rank, tensors=own)
    return HostState(
        step=replica.step,
        model={name: to_local(value) for name, value in model.items() if name not in replica.rebuilt},
        slots=_map_tensors(slots, lambda _name, _key, value: to_local(value)),
        options=_changed_options(replica),
        optimizer=type(replica.optimizer).__name__,
        scale=None if replica.scale is None else (replica.scale.factor, replica.scale.since),
        trained=tuple(replica.names.values()),
        part=replica.part,
        boxes=replica.boxes | _slot_boxes(replica, slots),
        local=local,
        scheduler=replica.rates.state,
        sometimes_unused=replica.sometimes_unused,
        base=replica.base,
        checked=replica.checked and bool(replica.step),  # a warm-up alone changes no state
    )


def other_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter with several, by its other names; averages have the first alone."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in named if name != first[parameter]}


def _map_tensors(slots: OptimizerSlots, change: Callable[[str, str, Tensor], Any]) -> OptimizerSlots:
    """Return the optimizer's state with other values in place of its tensors."""
    return {
        name: {key: change(name, key, value) if isinstance(value, Tensor) else value for key, value in entries.items()}
        for name, entries in slots.items()
    }


def restore(replica: TorchReplica, state: HostState) -> None:
    """Restore a state into a replica; everything is checked before anything is changed.

    Buffers that are not saved are as in a new process afterwards. A state without local state gives its data rank the
    model's own buffers, which are those of data rank 0.

    Raises:
        CheckpointError: names, shapes or types do not fit; says which and what to do.
    """
    replica.end_evaluation()
    own, others = replica.model.state_dict(), other_names(replica.model)
    _check(replica, state)
    replica.sound = False
    with torch.no_grad():
        for name, value in own.items():
            if name not in replica.local and name not in replica.rebuilt and name not in others:
                to_local(value).copy_(state.model[name])
        replica.forget_unsaved()
        replica.take_buffers(
            state.local.tensors
            if state.local
            else {name: value for name, value in state.model.items() if name in replica.local}
        )
        if state.weights_only:
            replica.average = None  # the parameters are the averages already
            replica.step, replica.sound = state.step, True
            return
        replica.step = state.step
        _make_slots(
            replica,
            _map_tensors(state.slots, lambda name, key, value: _TensorForm.of(value, f"{name}/{key}" in state.boxes)),
        )
        for name, key, value in _slot_tensors(replica):
            if key in (_PREVIOUS_WEIGHTS, AVERAGE):  # without them it is as a state whose last step changed nothing
                saved = state.slots.get(name, {}).get(key, state.model[name])
            else:
                saved = state.slots[name][key]
            to_local(value).copy_(saved)
    replica.rates.restore(state.step or 0, state.options, state.scheduler)
    replica.checked = replica.checked or state.checked
    if replica.scale is not None:
        replica.scale = LossScale() if state.scale is None else LossScale(factor=state.scale[0], since=state.scale[1])
    replica.sometimes_unused = state.sometimes_unused  # the order of sums depends on it
    replica.step, replica.sound = state.step, True


def broadcast(
    replica: TorchReplica,
    source: int,
    rank: int,
    device: torch.device,
    group: distributed.ProcessGroup | None = None,
) -> None:
    """Copy the state of rank `source`, except local state, to all ranks of a process group. All of them call it.

    `source` and `rank`, this one's number, are as the default group counts; it is `group` where that is None.
    """
    own = _description(replica) if rank == source else None
    step, slots, forms, options, every_used, logged, checked, scale, scheduler = _broadcast_description(
        own, source, device, group
    )
    replica.end_evaluation()
    if rank != source:
        replica.sound, replica.step = False, step
        _make_slots(replica, slots)
        _make_buffers(replica, forms)
    held = dict(replica.named_buffers())
    buffers = [held[name] for name in forms]
    tensors = [*replica.model.parameters(), *buffers, *(value for _, _, value in _slot_tensors(replica))]
    _broadcast_tensors([to_local(tensor.detach()) for tensor in tensors], source, device, group)
    if rank != source:
        replica.rates.restore(step or 0, options, scheduler)
        replica.confirm()
        replica.sound, replica.scale = True, scale
        replica.every_used, replica.logged, replica.checked = every_used, logged, checked


def kept_settings(replica: TorchReplica) -> list[dict[str, Any]]:
    """Return the settings of each parameter group, without a learning rate that a schedule sets."""
    scheduled = {"lr"} if replica.rates.computed else set()
    return [
        {key: value for key, value in group_settings(group).items() if key not in scheduled}
        for group in replica.optimizer.param_groups
    ]


def _changed_options(replica: TorchReplica) -> list[dict[str, Any]]:
    """Return the settings of each group that training changed."""
    return [
        {key: value for key, value in settings.items() if value != initial.get(key)}
        for settings, initial in zip(kept_settings(replica), replica.rates.initial, strict=True)
    ]


def _slots(replica: TorchReplica) -> OptimizerSlots:
    """Return the optimizer's state by parameter name."""
    found: OptimizerSlots = {}
    boxes = replica.boxes
    common = [key for key in replica.optimizer.state if not isinstance(key, Tensor)]
    if common:
        raise CheckpointError(
            f"the optimizer keeps {common[0]!r} in its state for all parameters together, which cannot be saved",
            remedy="keep it in the state of each parameter, or in a setting of the parameter groups",
        )
    for parameter, name in replica.names.items():
        if parameter not in replica.optimizer.state:
            continue
        entries = _flattened(replica.optimizer.state[parameter])
        for key, value in entries.items():
            if isinstance(value, Tensor) and not _same_layout(value, parameter, name in boxes):
                raise CheckpointError(
                    f"the optimizer shards {key!r} differently from its parameter, which cannot be saved",
                    remedy='use an elementwise optimizer, such as AdamW, or strategy="data_parallel"',
                )
        found[name] = entries
    for parameter, before in replica.versions.before.items() if replica.versions else ():
        found.setdefault(replica.names[parameter], {})[_PREVIOUS_WEIGHTS] = before
    for parameter, mean in replica.average.held(replica.step).items() if replica.average else ():
        found.setdefault(replica.names[parameter], {})[AVERAGE] = mean
    return found


def _flattened(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one parameter with the tensors of lists and dicts as entries of their own.

    In their places is the key of the entry: `{"tensor": "GG.0"}`; also the strides, where they are not those of a new
    tensor, since products of matrices depend on them: `{"tensor": "Q.0", "strides": [1, 8]}`.
    """
    found: dict[str, Any] = {}

    def flatten(key: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            found[key] = value
            return {_TENSOR: key, _STRIDES: [*value.stride()]} if _is_permuted(value) else {_TENSOR: key}
        if isinstance(value, list):
            return [flatten(f"{key}.{number}", item) for number, item in enumerate(value)]
        if isinstance(value, dict) and all(isinstance(each, str) for each in value):
            return {each: flatten(f"{key}.{each}", item) for each, item in value.items()}
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, _PLAIN):
            return value
        raise CheckpointError(
            f"the optimizer keeps a {type(value).__name__} as {key!r} in its state, which cannot be saved",
            remedy="use an optimizer whose state is tensors, numbers, and lists and dicts of them",
        )

    for key, value in entries.items():
        made = flatten(key, value)
        if not isinstance(value, Tensor):
            found[key] = made
    return found


def _nested(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one parameter from `_flattened` entries."""
    used: set[str] = set()

    def nest(value: Any) -> Any:
        if isinstance(value, dict) and {_TENSOR} <= value.keys() <= {_TENSOR, _STRIDES}:
            used.add(value[_TENSOR])
            made = entries[value[_TENSOR]]
            if _STRIDES not in value:
                return made
            return torch.empty_strided(made.shape, value[_STRIDES], dtype=made.dtype, device=made.device)
        if isinstance(value, list):
            return [nest(item) for item in value]
        return {key: nest(item) for key, item in value.items()} if isinstance(value, dict) else value

    made = {key: nest(value) for key, value in entries.items()}
    return {key: value for key, value in made.items() if key not in used}


def _is_permuted(tensor: Tensor) -> bool:
    """Return whether a tensor fills its memory in another order than a new one of its shape would."""
    if is_dtensor(tensor) or tensor.is_contiguous():
        return False
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()  # torch keeps those without gaps


def _same_layout(slot: Any, parameter: Any, cut: bool) -> bool:
    """Return whether a slot is divided like its parameter, or neither is divided."""
    if is_dtensor(slot):
        return tuple(slot.shape) == tuple(parameter.shape) and slot.placements == parameter.placements
    return not cut or slot.numel() == 1 or slot.shape == to_local(parameter).shape


def _slot_boxes(replica: TorchReplica, slots: OptimizerSlots) -> dict[str, ShardSlice]:
    """Return the slices of the optimizer's tensors: those of their parameters where the shape is the same."""
    boxes, held = replica.boxes, {name: to_local(parameter).shape for parameter, name in replica.names.items()}
    return {
        f"{name}/{key}": boxes[name]
        for name, entries in slots.items()
        for key, value in entries.items()
        if name in boxes and isinstance(value, Tensor) and to_local(value).shape == held[name] and value.dim()
    }


def _slot_tensors(replica: TorchReplica) -> Iterator[tuple[str, str, Tensor]]:
    """Return the optimizer's tensors, in the order of the parameters and sorted by key."""
    for name, entries in sorted(_slots(replica).items()):
        for key in sorted(entries):
            if isinstance(entries[key], Tensor):
                yield name, key, entries[key]


def _make_slots(replica: TorchReplica, slots: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the optimizer's state by plain values and empty tensors of the described shapes."""
    groups = {parameter: group for group in replica.optimizer.param_groups for parameter in group["params"]}
    replica.optimizer.state.clear()
    for parameter, name in replica.names.items():
        made = {
            key: _empty_slot(parameter, key, value, groups[parameter]) if isinstance(value, _TensorForm) else value
            for key, value in slots.get(name, {}).items()
            if key not in (_PREVIOUS_WEIGHTS, AVERAGE)  # the replica has places of its own for these
            and (key != OUTER_MOMENTUM or replica.outer)
        }
        if made:
            replica.optimizer.state[parameter] = _nested(made)


def _empty_slot(parameter: Tensor, key: str, form: _TensorForm, group: Mapping[str, Any]) -> Tensor:
    """Return an empty tensor on the device where torch's optimizers keep it: step counts may be on the host."""
    counts = key == "step" and not (group.get("capturable") or group.get("fused"))
    device = torch.device("cpu") if counts else parameter.device
    if form.like or form.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=form.dtype, device=device, requires_grad=False)
    return torch.empty(form.shape, dtype=form.dtype, device=device)


def _make_buffers(replica: TorchReplica, forms: Mapping[str, _TensorForm]) -> None:
    """Give buffers that a forward makes, or whose shape it changes, the described shapes."""
    held = {name: _TensorForm.of(to_local(buffer), False) for name, buffer in replica.named_buffers()}
    replica.take_buffers({
        name: torch.empty(form.shape, dtype=form.dtype, device=replica.device)
        for name, form in forms.items() if held.get(name) != form
    })  # fmt: skip


def _description(replica: TorchReplica) -> tuple[Any, ...]:
    """Return what a new rank must know before tensors are sent, in the order of `broadcast`."""
    slots = _map_tensors(_slots(replica), lambda _name, _key, value: _TensorForm.of(value, is_dtensor(value)))
    buffers = [(name, buffer) for name, buffer in replica.named_buffers() if name not in replica.local]
    forms = {name: _TensorForm.of(to_local(buffer), False) for name, buffer in buffers}
    options = _changed_options(replica)
    tried = replica.every_used, replica.logged, replica.checked
    return replica.step, slots, forms, options, *tried, replica.scale, replica.rates.state


def _broadcast_description(
    own: tuple[Any, ...] | None, source: int, device: torch.device, group: distributed.ProcessGroup | None
) -> tuple[Any, ...]:
    """Broadcast the source's description as `torch.save` writes it, and load it by an allowlist of classes."""
    file = io.BytesIO()
    torch.save(own, file)
    size = torch.tensor([file.tell()], device=device)
    distributed.broadcast(size, src=source, group=group)
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    if own is not None:
        data.copy_(torch.frombuffer(file.getbuffer(), dtype=torch.uint8))
    distributed.broadcast(data, src=source, group=group)
    with safe_globals([_TensorForm, LossScale]):
        said: tuple[Any, ...] = torch.load(io.BytesIO(data.cpu().numpy().tobytes()), weights_only=True)
    return said


def _broadcast_tensors(
    tensors: list[Tensor], source: int, device: torch.device, group: distributed.ProcessGroup | None
) -> None:
    """Broadcast tensors in place; those elsewhere or not contiguous go through copies, of one block at a time."""
    for block in _blocks(tensors):
        staged = [tensor.to(device).contiguous() for tensor in block]
        handles = []
        for tensor in staged:
            bits = tensor.reshape(-1).view(torch.uint8)  # every type can be sent as bytes
            handles.append(distributed.broadcast(bits, src=source, group=group, async_op=True))
        for handle in handles:
            assert handle is not None, "an asynchronous collective has a handle"
            handle.wait()
        with torch.no_grad():
            for tensor, copy in zip(block, staged, strict=True):
                if tensor is not copy:
                    tensor.copy_(copy)


def _blocks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Return the tensors that are not empty in blocks of limited size, or of one tensor; the same on all ranks."""
    block, size_bytes = list[Tensor](), 0
    for tensor in tensors:
        if block and size_bytes + tensor.nbytes > _BLOCK_BYTES:
            yield block
            block, size_bytes = [], 0
        if tensor.numel():
            block.append(tensor)
            size_bytes += tensor.nbytes
    if block:
        yield block


def _host(tensor: Tensor, spare: Tensor | None) -> Tensor:
    """Copy a tensor to host memory, into a spare tensor of the same shape and type where there is one."""
    if spare is None or (spare.shape, spare.dtype) != (tensor.shape, tensor.dtype):
        return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return spare.copy_(tensor.detach())


def _check(replica: TorchReplica, state: HostState) -> None:
    """Raise CheckpointError unless a state fits the replica."""
    problems = [*_model_problems(replica, state)]
    if not state.weights_only:
        problems += _optimizer_problems(replica, state)
    if problems:
        raise CheckpointError(
            f"the checkpoint holds another model or optimizer: {problems[0]}",
            detail="\n".join(problems),
            remedy="use the model and optimizer that wrote it, or start a run under a new name",
        )


def _optimizer_problems(replica: TorchReplica, state: HostState) -> Iterator[str]:
    """Return what of the optimizer's state does not fit."""
    strangers = sorted(set(state.slots) - set(replica.names.values()))
    if strangers:
        yield f"optimizer state of {strangers[0]!r}, which the model does not train"
    optimizer = type(replica.optimizer).__name__
    if state.optimizer != optimizer:
        yield f"optimizer: {state.optimizer} in the checkpoint, {optimizer} in the job"
    found, expected = len(state.options), len(replica.rates.initial)
    if found != expected:
        yield f"optimizer: {found} parameter groups in the checkpoint, {expected} in the job"


def _model_problems(replica: TorchReplica, state: HostState) -> Iterator[str]:
    """Return which parameters and buffers do not fit; training may change the shape of local state."""
    if state.base != replica.base:
        yield base_problem(state.base, replica.base)
        return
    boxes, apart = replica.boxes, replica.local | replica.rebuilt
    own = {name: value for name, value in replica.model.state_dict().items() if name not in apart}
    found = {name: _form(value, state.boxes.get(name)) for name, value in state.model.items()}
    for name, value in own.items():
        form = _form(value, boxes.get(name))
        if name not in found:
            yield f"{name}: missing in the checkpoint, {form} in the job"
        elif found[name] != form:
            yield f"{name}: {found[name]} in the checkpoint, {form} in the job"
        elif state.boxes.get(name) != boxes.get(name):
            yield f"{name}: another part of it than this rank holds"
    for name in sorted(set(found) - set(own) - apart):
        yield f"{name}: {found[name]} in the checkpoint, none in the job"


def base_problem(saved: str, own: str) -> str:
    """Describe frozen parameters that differ between a state and a job, by their digests."""
    if saved and own:
        return f"the frozen parameters: {saved} when it was trained, {own} as model() makes them now"
    held = "does not hold" if saved else "holds"
    return f"the state {held} the frozen parameters: set save_frozen={not saved}, as when it was written"


def _form(tensor: Tensor, box: ShardSlice | None) -> str:
    shape = tuple(tensor.shape) if box is None else box.shape
    return f"shape {shape} of {str(tensor.dtype).removeprefix('torch.')}"
