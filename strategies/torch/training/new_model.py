"""A new model of a job: made by the user's function, filled from files of initial weights, and checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.plan import Plan
from trainwright.strategies.cost_model.plan_constraints import invalid_compile
from trainwright.strategies.torch.checkpoint.initial_weights import (
    StoredByName,
    fill_empty,
    match_names,
    materialize,
    provide_memory,
)
from trainwright.strategies.torch.torch_compat import BatchNorm, Dropout
from trainwright.strategies.torch.torch_errors import TorchUserCode
from trainwright.strategies.torch.training.batch_losses import untrained_problems
from trainwright.strategies.torch.training.batch_norm import batch_norms
from trainwright.strategies.torch.training.model_blocks import checkpointed_buffers

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by precision


def frozen_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are not trained, by each of their full names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter.detach() for name, parameter in named if not parameter.requires_grad}


def sparse_problems(model: nn.Module) -> list[str]:
    """Return problems of parameters and buffers that are not strided: they cannot be saved or sent."""
    return [
        f"{name!r} of the model is {str(tensor.layout).removeprefix('torch.')}, which cannot be saved or sent to other "
        "ranks: keep its indices and values as dense buffers and make it of these in forward(), or hold it as a plain "
        "attribute that is moved there with .to(input.device)"
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.layout != torch.strided
    ]


def ensure_training_mode(model: nn.Module, where: str) -> None:
    """Put a model in evaluation mode, such as one of `from_pretrained`, into training mode, as a plain loop does.

    Parts in evaluation mode of a model in training mode stay so: batch norms are frozen that way.
    """
    if not model.training:
        with TorchUserCode("train() of the model", where):
            model.train()


def evaluating_parts(model: nn.Module) -> tuple[str, ...]:
    """Return the names of dropouts and batch norms that are in evaluation mode."""
    return tuple(
        name or type(module).__name__
        for name, module in model.named_modules()
        if not module.training and (isinstance(module, BatchNorm) or (isinstance(module, Dropout) and module.p > 0))
    )


def new_model(spec: ModelSpec, plan: Plan, where: str) -> tuple[Any, StoredByName]:
    """Return a new model, and what the files of initial weights give it."""
    with TorchUserCode("model()", where):
        model = spec.model()
    if isinstance(model, nn.Module):
        ensure_training_mode(model, where)
    stored = _stored_weights(model, spec, where)
    _check_model(model, spec, plan, where)
    for parameter in model.parameters() if plan.precision in AUTOCAST_DTYPES else ():
        if parameter.requires_grad and parameter.dtype in AUTOCAST_DTYPES.values():
            parameter.data = parameter.data.float()  # of 16 bits, in which small updates would be lost
    return model, stored


def _stored_weights(model: Any, spec: ModelSpec, where: str) -> StoredByName:
    """Return what the files of initial weights give a new model, by full name; its empty tensors get memory."""
    if not isinstance(model, nn.Module):
        return {}
    if spec.initial_weights is None:
        _reset_empty(model, where)
        return {}
    if spec.weights is None:  # a checkpoint follows, or a trial of the functions
        fill_empty(model)
        return {}
    found = match_names(model, spec.weights, where)
    provide_memory(model, found, where)
    return found


def _reset_empty(model: nn.Module, where: str) -> None:
    """Give the tensors on the meta device the values that their modules' own `reset_parameters` draws.

    As torch's examples of FSDP2 do by `to_empty`, which would untie tied parameters. Modules without that method are
    left to `_check_model`.

    Raises:
        JobError: the method of a module does not write all of its tensors.
        UserCodeError: it raised.
    """
    owners = [module for module in model.modules() if any(value.is_meta for value in _own_tensors(module).values())]
    resets = [getattr(module, "reset_parameters", None) for module in owners]
    if not all(map(callable, resets)):
        return
    before = {value: value._version for value in materialize(model)}
    for module, reset in zip(owners, resets, strict=True):
        with TorchUserCode(f"reset_parameters() of {type(module).__name__}", where):
            reset()  # type: ignore[misc]
    for module in owners:
        left = [name for name, value in _own_tensors(module).items() if before.get(value) == value._version]
        if left:
            kind = type(module).__name__
            what = f"{left[0]!r} of {kind} was made on the meta device, and its reset_parameters() does not write it"
            remedy = "have it write all of them in place, with torch.nn.init; what is written through .data is not seen"
            raise JobError([f"{what}: {remedy}"], where=where)


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that a module holds itself."""
    held = {**module._parameters, **module._buffers}
    return {name: value for name, value in held.items() if value is not None}


def _check_model(model: Any, spec: ModelSpec, plan: Plan, where: str) -> None:
    if not isinstance(model, nn.Module):
        raise JobError([f"model() returned {type(model).__name__}: return a torch.nn.Module"], where=where)
    problems = []
    lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        problems.append(f"parameter {lazy[0]!r} has no shape yet: run one batch through lazy modules inside model()")
    empty = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta]
    if empty:
        problems.append(
            f"{empty[0]!r} of the model is on the meta device and holds no values: give its module a "
            "reset_parameters() that draws them; or build the model on the CPU, without torch.device('meta'), and "
            "plans shard it after that; or let initial_weights= name files of its values"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        problems.append("the model has no parameter that requires a gradient: there is nothing to train")
    state = model.state_dict()
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    if renamed := [name for name in trained if name not in state]:
        problems.append(
            f"parameter {renamed[0]!r} of the model is not in its state_dict(), by whose names it is saved: return the "
            "model without the wrapper that renames it; for torch's checkpoint_wrapper, use plan recompute=full"
        )
    extra = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if extra:
        problems.append(f"{extra[0]!r} of the model's state is not a tensor: keep state in parameters and buffers")
    problems += sparse_problems(model)
    problems += untrained_problems(spec.loss, model)
    half = [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float16]
    if half and plan.precision == "fp16":
        problems.append(
            f"parameter {half[0]!r} is of float16, in which small updates are lost: return the model in float32; "
            'precision="fp16" computes in half precision where that is safe'
        )
    if spec.compile == "inductor":
        again = checkpointed_buffers(model, plan.cuts) if plan.recompute == "full" else []
        refused = invalid_compile(plan.recompute, again[0] if again else "")
        problems += [": ".join(refused)] if refused else []
    problems += _batch_norm_problems(model, spec, plan)
    if problems:
        raise JobError(problems, where=where)


def _batch_norm_problems(model: nn.Module, spec: ModelSpec, plan: Plan) -> list[str]:
    """Return why batch norms would differ from one device with a plan, unless the job accepts that."""
    norms, ranks, together = batch_norms(model), plan.mesh.data_ranks, spec.batch_norm == "sync"
    if not norms:
        return []
    problems = []
    if ((ranks > 1 and not together) or plan.accumulation > 1) and "batch_norm" not in spec.inexact:
        ways = 'use GroupNorm or LayerNorm, or accept the difference with inexact=("batch_norm",)'
        problems.append(
            f"module {norms[0]!r} is a batch norm: {ranks} data ranks and accumulation={plan.accumulation} normalize "
            f"smaller batches than one device would: "
            + ("set accumulation=1, or " if together else 'set batch_norm="sync" and accumulation=1, or ')
            + ways
        )
    if together and ranks > 1 and spec.compile == "inductor":
        problems.append('batch_norm="sync" was not tested with compile="inductor": leave one of them out')
    if ranks > 1 and plan.streamed:
        problems.append(
            f"module {norms[0]!r} is a batch norm: schedule={plan.schedule} begins the next step before its statistics "
            "are averaged over the replicas: use schedule=1f1b"
        )
    return problems
