"""Models sharded by torch's FSDP2: which modules are gathered together.

FSDP2 works in hooks around calls of modules. A pipeline stage starts and ends within a forward, so that it does not
make all of these calls. So `StageShards` gathers its parameters before a step, sums the gradients of all micro-batches
in them, and shards the sum at the end (ZeRO-1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from trainwright.core.errors import JobError
from trainwright.strategies.torch.shard_layout import hook_problem, is_dtensor
from trainwright.strategies.torch.torch_compat import FsdpState, forget_gradient, reduce_unused_parameters
from trainwright.strategies.torch.training.deferred_init import keep_new_tensors
from trainwright.strategies.torch.training.model_blocks import repeated_blocks
from trainwright.strategies.torch.training.train_state import TorchReplica


def fully_shard_model(model: nn.Module, mesh: DeviceMesh, *, zero: int, offload: bool, where: str) -> None:
    """Shard a model's parameters over a mesh: each block by itself, then the rest.

    Args:
        model: on the CPU, the same on every rank; afterwards where the mesh is.
        mesh: of one dimension, or of replicas and shards.
        zero: 3 gathers a block's parameters for forward and again for backward, 1 and 2 keep them in between.
        offload: parts, gradients and the optimizer's state stay in the memory of the host.
        where: the rank, for errors.

    Raises:
        JobError: the model cannot be divided.
    """
    chosen = repeated_blocks(model)
    problems = [*_sharding_problems(model, chosen)]
    if problems:
        raise JobError(problems, where=where)
    fields = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
    keep_new_tensors()
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    try:
        for module in (*chosen, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=zero == 3, offload_policy=policy)
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise JobError([f'the model cannot be divided: {error}: use strategy="data_parallel"'], where=where) from error
    for name, parameter in model.named_parameters():
        vars(parameter).update(fields[name])  # what an optimizer may ask for
    for each in fsdp_modules(model):
        reduce_unused_parameters(each)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the FSDP2 modules, the model itself first; each gathers its parameters together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard_model(model: nn.Module) -> None:
    """Drop gathered parameters, which a forward without backward leaves behind."""
    for module in fsdp_modules(model):
        module.reshard()


def _sharding_problems(model: nn.Module, chosen: list[nn.Module]) -> Iterator[str]:
    """Yield what FSDP2 cannot shard."""
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            yield f"parameter {name!r} is divided already: return a model of plain parameters"
        elif parameter.dim() == 0:
            yield f"parameter {name!r} is a single number, which cannot be divided: give it the shape (1,)"
        elif not parameter.is_contiguous():
            yield f"parameter {name!r} is not contiguous: call contiguous() on it in model()"
        elif problem := hook_problem(name, parameter):
            yield problem
    inside: set[nn.Parameter] = set()
    for module in (*chosen, model):
        trained = {each for each in module.parameters() if each.requires_grad} - inside
        inside |= trained
        kinds = sorted({str(each.dtype).removeprefix("torch.") for each in trained})
        if len(kinds) > 1:
            what = f"the parameters of {type(module).__name__} are gathered together, but of the types"
            yield f"{what} {' and '.join(kinds)}: use one type, or freeze those of the other"


# --- FSDP2 of a pipeline stage, without its hooks ---------------------------------------------------------------------


class StageShards:
    """The parameters of a pipeline stage, sharded between steps and gathered during a step (ZeRO-1).

    Args:
        stage: the modules; they are divided.
        mesh: of one dimension, or of replicas and shards.
        where: the rank, for errors.

    Raises:
        JobError: the modules cannot be divided.
    """

    def __init__(self, stage: nn.Module, mesh: DeviceMesh, where: str) -> None:
        fully_shard_model(stage, mesh, zero=1, offload=False, where=where)
        self._stage = stage
        states = [FsdpState(module) for module in fsdp_modules(stage)]
        for state in states:
            state.remove_forward_hooks()
        self._root = states[0]
        self._root.initialize_root()
        self._groups: list[Any] = [group for state in states for group in state.groups]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the parameters and drop earlier gradients; after an error the parameters are sharded again."""
        for module in fsdp_modules(self._stage):
            module.unshard()
        for one in self._each():
            forget_gradient(one)
        try:
            yield
        except BaseException:
            self.reshard()
            raise

    def reshard(self) -> None:
        """Keep only this rank's parts."""
        reshard_model(self._stage)

    def reduce(self, replica: TorchReplica, groups: Sequence[ProcessGroup]) -> None:
        """Give each parameter this rank's part of the mean gradient over some groups; none where no rank has one."""
        named = [(one, one.sharded_param) for one in self._each() if one.sharded_param in replica.names]
        flags = [one.unsharded_param.grad is not None for one, _ in named]
        used = torch.tensor(flags, dtype=torch.float32, device=replica.device)
        for each in groups:
            distributed.all_reduce(used, group=each)
        for group in self._groups:
            group.post_backward()
        self._root.finish_backward()
        for (_, parameter), count in zip(named, used.tolist(), strict=True):
            if not count:
                parameter.grad = None

    def _each(self) -> Iterator[Any]:
        """Yield FSDP2's own record of each parameter."""
        for group in self._groups:
            yield from group.fsdp_params
