"""Digests of a rank's state, by which replicas are compared."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from trainwright.core.data import fold_seed
from trainwright.core.errors import JobError
from trainwright.strategies.torch.checkpoint import host_state
from trainwright.strategies.torch.checkpoint.tensor_digests import digests, text_hash
from trainwright.strategies.torch.distributed.process_group import all_gather_ints, all_gather_json
from trainwright.strategies.torch.shard_layout import to_local
from trainwright.strategies.torch.training.train_state import TorchReplica

_UNCHECKED = "replicas"  # in a job's `inexact=`: replicas may drift apart
_SHOWN = 8  # ranks in an error
_GROUP, _BUFFER, _SLOT, _PARAMETER = "parameter group", "buffer", "optimizer state", "parameter"
_Key = tuple[str, str]  # a kind, and a name of that kind
_Entries = dict[_Key, Tensor | str]


def check_same_start(checksum: int, device: torch.device, where: str) -> None:
    """Compare the checksums of the ranks' initial parameters; every rank calls it.

    Raises:
        JobError: on every rank, where some differ.
    """
    checksums = [each for (each,) in all_gather_ints([checksum], device)]
    differing = [rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]]
    if differing:
        raise JobError([_start_problem(f"ranks 0 and {differing[0]} hold different parameters")], where=where)


def check_replicas(
    replica: TorchReplica, keys: Sequence[tuple[Hashable, Hashable]], device: torch.device, where: str
) -> None:
    """Check that ranks hold the same state. Every rank calls it; it takes one small all-gather where they do.

    Args:
        keys: by rank, two keys: ranks of equal first keys must agree in what no rank divides (buffers, settings), those
            of equal second keys in what is divided too.

    Raises:
        JobError: on every rank, where some differ; names the first thing that differs, and the ranks.
    """
    if _UNCHECKED in replica.spec.inexact:
        return
    compared = _compared_entries(replica)
    sums = all_gather_ints([fold_seed(*chain.from_iterable(_folded(each).values())) for each in compared], device)
    alike: list[list[list[int]]] = []  # for each kind of entries, the ranks that must agree
    for which in range(len(compared)):
        ranks_of: dict[Hashable, list[int]] = {}
        for rank, own_keys in enumerate(keys):
            ranks_of.setdefault(own_keys[which], []).append(rank)
        alike.append([*ranks_of.values()])
    if all(len({sums[rank][which] for rank in ranks}) == 1 for which, sets in enumerate(alike) for ranks in sets):
        return
    for entries, sets in zip(compared, alike, strict=True):
        everyone = _all_gather_digests(entries, device)
        for ranks in sets:
            problem = _difference({rank: everyone[rank] for rank in ranks}, replica.step)
            if problem:
                raise JobError([problem], where=where)


# --- Compared entries -------------------------------------------------------------------------------------------------


def _compared_entries(replica: TorchReplica) -> tuple[_Entries, _Entries]:
    """Return all that replicas must agree in: what is not divided, and what is. Raises CheckpointError."""
    held = host_state.state_of(replica)
    whole: _Entries = {}
    divided: _Entries = {}
    # Not a rate that a schedule sets: before the next step a joining worker has another one.
    for number, settings in enumerate(host_state.kept_settings(replica)):
        for key, value in settings.items():
            if _is_plain(value):
                whole[_GROUP, f"{number}: {key}"] = repr(value)
    whole["scale", "of the losses"] = repr(held.scale)
    whole["state", "of the learning-rate scheduler"] = repr(held.scheduler)
    for name, buffer in replica.named_buffers():
        if name not in replica.local:
            whole[_BUFFER, name] = to_local(buffer)
    for name, entries in held.slots.items():
        for key, value in entries.items():
            kind = divided if f"{name}/{key}" in held.boxes else whole
            kind[_SLOT, f"{key} of {name}"] = value if isinstance(value, Tensor) else repr(value)
    for name, parameter in replica.model.named_parameters():
        (divided if name in held.boxes else whole)[_PARAMETER, name] = to_local(parameter)
    return whole, divided


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, bool | int | float | str | None)


def _folded(entries: _Entries) -> dict[_Key, tuple[int, int]]:
    """Return digests of names, shapes and plain values, and of tensors."""
    tensors = {key: value for key, value in entries.items() if isinstance(value, Tensor)}
    numbers = dict(zip(tensors, digests(tensors.values()), strict=True))
    forms = {key: str((value.dtype, tuple(value.shape))) for key, value in tensors.items()}
    return {key: (text_hash(f"{key}{forms.get(key, value)}"), numbers.get(key, 0)) for key, value in entries.items()}


# --- Differences ------------------------------------------------------------------------------------------------------


def _all_gather_digests(entries: _Entries, device: torch.device) -> list[Mapping[_Key, tuple[int, int, str]]]:
    """Return every rank's digests, with plain values as text. All ranks call it."""
    shown = {key: value if isinstance(value, str) else "" for key, value in entries.items()}
    own = [[*key, *numbers, shown[key]] for key, numbers in _folded(entries).items()]
    told = all_gather_json(own, device)
    return [{(kind, name): (form, number, text) for kind, name, form, number, text in rows} for rows in told]


def _difference(held: Mapping[int, Mapping[_Key, tuple[int, int, str]]], step: int | None) -> str:
    """Describe the first difference between ranks and what to do; empty where there is none."""
    first = min(held)
    for key in dict.fromkeys(chain.from_iterable(held.values())):
        others = [rank for rank in held if held[rank].get(key) != held[first].get(key)]
        if others:
            return _mismatch_message(key, first, others, [held[rank].get(key) for rank in (first, others[0])], step)
    return ""


def _mismatch_message(
    key: _Key, first: int, others: list[int], values: Sequence[tuple[int, int, str] | None], step: int | None
) -> str:
    kind, name = key
    who = f"ranks {first} and {', '.join(map(str, others[:_SHOWN]))}"
    if not step and kind == _PARAMETER:
        return _start_problem(f"{who} hold different parameters, {name!r} for one")
    texts = [value[2] if value else "missing" for value in values]
    shown = f" ({texts[0]} and {texts[1]})" if any(texts) else ""
    what = f"after step {step or 0} {who} differ in {kind} {name!r}{shown}, which replicas must have alike"
    return f"{what}: {_mismatch_remedy(kind, name)}"


def _start_problem(what: str) -> str:
    return (
        f"{what}: model() must give the same on every rank; draw its initial values from torch's own generator, which "
        "the job's seed sets"
    )


def _mismatch_remedy(kind: str, name: str) -> str:
    if kind == _BUFFER:
        return (
            "a checkpoint holds that of rank 0 alone, and a worker that is replaced gets another rank's. Where each "
            f"rank is to keep its own, declare local_state=({name!r},); else make it the same on all ranks, such as by "
            "torch.distributed.all_reduce inside the model"
        )
    if kind == _GROUP:
        return (
            "what sets it is not part of optimizer.state_dict(), so that a worker which joins later has it from "
            "elsewhere. Give the job schedule=, which follows the step"
        )
    return (
        "what training changes must follow from model.state_dict(), optimizer.state_dict() and the step; other "
        "attributes of model and optimizer are neither saved nor sent to a worker that is replaced. Where ranks run on "
        f'unlike hardware and may drift apart, accept that with inexact=("{_UNCHECKED}",)'
    )
