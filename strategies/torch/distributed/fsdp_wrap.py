"""Models sharded by torch's FSDP2: which modules are gathered together.

FSDP2 works in hooks around calls of modules. A pipeline stage starts and ends within a forward, so that it does not
make all of these calls. So `StageShards` gathers its parameters before a step, sums the gradients of all micro-batches
in them, and shards the sum at the end (ZeRO-1).

In half precision, autocast casts the parameters of products, and reads others, such as those of norms and embeddings,
in their own type. `GatherTypes` sees in a forward which ones are only cast. They are gathered in the type of the cast:
half the bytes, the same numbers, and no copy that backward would keep. What is sharded, the gradients' sums and the
optimizer stay in single precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from trainwright.core.errors import JobError
from trainwright.strategies.torch.distributed.process_group import is_gloo, reduce_scatter
from trainwright.strategies.torch.shard_layout import hook_problem, is_dtensor
from trainwright.strategies.torch.torch_compat import (
    FsdpState,
    TorchDispatchMode,
    accumulate_wide,
    forget_gradient,
    gather_as,
    gather_beside_computing,
    has_gradient,
    reduce_alike,
    storage_key,
    tensor_leaves,
)
from trainwright.strategies.torch.training.deferred_init import keep_new_tensors
from trainwright.strategies.torch.training.model_blocks import repeated_blocks
from trainwright.strategies.torch.training.train_state import TorchReplica

_SENT = {"full": None, "bf16": torch.bfloat16}  # the type in which gradients are reduced, by a plan's `wire`


def fully_shard_model(
    model: nn.Module, mesh: DeviceMesh, *, zero: int, where: str, wire: str = "full", offload: bool = False
) -> None:
    """Shard a model's parameters over a mesh: each block by itself, then the rest.

    Args:
        model: on the CPU, the same on every rank; afterwards where the mesh is.
        mesh: of one dimension, or of replicas and shards.
        zero: 3 gathers a block's parameters for forward and again for backward, 1 and 2 keep them in between.
        wire: `bf16` sends gradients in half precision.
        offload: parts, gradients and the optimizer's state stay in the memory of the host.

    Raises:
        JobError: the model cannot be divided.
    """
    chosen = repeated_blocks(model)
    problems = [*_sharding_problems(model, chosen, wire)]
    if problems:
        raise JobError(problems, where=where)
    fields = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
    keep_new_tensors()
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    try:
        for module, kinds in _trained_types(model, chosen):
            # Also of those that are gathered in half precision. Other types are reduced as they are.
            summed = torch.float32 if kinds == {torch.float32} else None
            fully_shard(
                module, mesh=mesh, reshard_after_forward=zero == 3, offload_policy=policy,
                mp_policy=MixedPrecisionPolicy(reduce_dtype=summed, cast_forward_inputs=False),
            )  # fmt: skip
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise JobError([f'the model cannot be divided: {error}: use strategy="data_parallel"'], where=where) from error
    except RuntimeError as error:
        names = [name for name, each in model.named_parameters() if not each.dtype.is_floating_point]
        if not names or "floating point" not in str(error):
            raise
        what = f"parameter {names[0]!r} has no floating-point numbers, and torch {torch.__version__} cannot divide such"
        raise JobError([f"{what}: use torch 2.12 or newer, or make it a buffer"], where=where) from error
    for name, parameter in model.named_parameters():
        vars(parameter).update(fields[name])  # what an optimizer may ask for
    for each in fsdp_modules(model):
        reduce_alike(each, _SENT[wire])
        if is_gloo():
            each.set_custom_reduce_scatter(_ExchangeReduceScatter())  # type: ignore[arg-type]
            gather_beside_computing(each)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the FSDP2 modules, the model itself first; each gathers its parameters together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard_model(model: nn.Module) -> None:
    """Drop gathered parameters, which a forward without backward leaves behind."""
    for module in fsdp_modules(model):
        module.reshard()


class _ExchangeReduceScatter:
    """FSDP2's reduce-scatter over gloo: see `process_group.reduce_scatter`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an empty tensor for a collective, as FSDP2 allocates one."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write this rank's part of the sum or the mean over the ranks; all parts are of one length."""
        reduce_scatter(output_tensor, input_tensor, group, mean=op == distributed.ReduceOp.AVG)


def _sharding_problems(model: nn.Module, chosen: list[nn.Module], wire: str) -> Iterator[str]:
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
    for module, trained in _trained_types(model, chosen):
        kinds = sorted(str(each).removeprefix("torch.") for each in trained)
        if len(kinds) > 1:
            what = f"the parameters of {type(module).__name__} are gathered together, but of the types"
            yield f"{what} {' and '.join(kinds)}: use one type, or freeze those of the other"
        elif kinds == ["float64"] and wire != "full":
            yield f"wire={wire!r} would round gradients of float64 parameters: leave it out, or use float32"


def _trained_types(model: nn.Module, chosen: list[nn.Module]) -> list[tuple[nn.Module, set[torch.dtype]]]:
    """Return the modules that are divided, inner ones first, with the types of what is trained of their own."""
    found, inside = [], set[nn.Parameter]()
    for module in (*chosen, model):
        own = {each for each in module.parameters() if each.requires_grad} - inside
        inside |= own
        found.append((module, {each.dtype for each in own}))
    return found


# --- The types in which parameters are gathered -----------------------------------------------------------------------


class GatherTypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees in a forward which parameters autocast only casts, and lets FSDP2 gather these in the type of the cast.

    The others stay as they are: a norm, an embedding, a product in a part of the forward without autocast, or float64.

    Args:
        kind: the type that autocast casts to.
    """

    def __init__(self, model: nn.Module, kind: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._kind = model, kind
        self._each = [one for module in fsdp_modules(model) for one in _parameters_of(module)]
        self._cast: set[Any] = set()
        self._read: set[Any] = set()
        self._by_storage: dict[int, Any] = {}

    @contextmanager
    def chosen(self, device: torch.device, groups: Sequence[ProcessGroup]) -> Iterator[None]:
        """Watch a forward, or several; shard the parameters again, and choose their types from it.

        They are alike on all ranks of the groups; every rank calls it. No copies that autocast makes are kept.
        """
        with ExitStack() as stack:
            for module in fsdp_modules(self._model):
                self._entered(module)  # a pipeline stage is gathered already
                assert isinstance(module, nn.Module)
                stack.callback(module.register_forward_pre_hook(lambda given, _: self._entered(given)).remove)
            stack.enter_context(torch.autocast(device.type, self._kind, cache_enabled=False))
            stack.enter_context(self)
            yield
        reshard_model(self._model)
        seen = torch.tensor([[one in self._cast, one in self._read] for one in self._each], dtype=torch.int32)
        seen = seen.to(device)
        for group in groups:
            distributed.all_reduce(seen, distributed.ReduceOp.MAX, group=group)
        for one, (cast, read) in zip(self._each, seen.tolist(), strict=True):
            if cast and not read:
                gather_as(one, self._kind)

    def _entered(self, module: Any) -> None:
        """Note where the parameters are that FSDP2 has gathered before a module's forward."""
        whole = [one for one in _parameters_of(module) if one.sharded_state.name == "UNSHARDED"]
        self._by_storage |= {storage_key(one.unsharded_param): one for one in whole}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation below autocast, and note which parameters it reads."""
        outputs = func(*args, **(kwargs or {}))
        if func.namespace not in ("fsdp", "c10d"):
            given = set(map(storage_key, tensor_leaves((args, kwargs))))
            found = [self._by_storage[key] for key in given & self._by_storage.keys()]
            if func is torch.ops.aten._to_copy.default and outputs.dtype == self._kind:
                self._cast.update(found)
            elif not func.is_view:
                self._read.update(found)
        return outputs


def _parameters_of(module: Any) -> list[Any]:
    """Return FSDP2's own records of the parameters that it gathers with a module."""
    return [one for group in FsdpState(module).groups for one in group.fsdp_params]


# --- FSDP2 of a pipeline stage, without its hooks ---------------------------------------------------------------------


class StageShards:
    """The parameters of a pipeline stage, sharded between steps and gathered during a step (ZeRO-1).

    Its arguments are those of `fully_shard_model`, and so are its errors.
    """

    def __init__(self, stage: nn.Module, mesh: DeviceMesh, where: str, wire: str) -> None:
        fully_shard_model(stage, mesh, zero=1, where=where, wire=wire)
        self._stage = stage
        states = [FsdpState(module) for module in fsdp_modules(stage)]
        for state in states:
            state.remove_forward_hooks()
        self._root = states[0]
        self._root.initialize_root()
        self._groups: list[Any] = [group for state in states for group in state.groups]
        self._each = [one for group in self._groups for one in group.fsdp_params]  # FSDP2's own records of parameters

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the parameters and drop earlier gradients; after an error the parameters are sharded again."""
        for module in fsdp_modules(self._stage):
            module.unshard()
        for one in self._each:
            forget_gradient(one)
        try:
            yield
        except BaseException:
            self.reshard()
            raise

    @contextmanager
    def choosing_types(self, replica: TorchReplica, groups: Sequence[ProcessGroup]) -> Iterator[None]:
        """Watch a forward under autocast; choose from it the types in which parameters are gathered from then on."""
        assert replica.autocast is not None, "the plan is in half precision"
        with self.gathered(), GatherTypes(self._stage, replica.autocast).chosen(replica.device, groups):
            yield

    def reshard(self) -> None:
        """Keep only this rank's parts."""
        reshard_model(self._stage)

    def accumulate(self) -> None:
        """Add the gradients of a backward to those before it, in the type in which they are reduced."""
        for one in self._each:
            accumulate_wide(one)

    def reduce(self, replica: TorchReplica, groups: Sequence[ProcessGroup]) -> None:
        """Give each parameter this rank's part of the mean gradient over some groups; none where no rank has one."""
        named = [(one, one.sharded_param) for one in self._each if one.sharded_param in replica.names]
        flags = [has_gradient(one) for one, _ in named]
        used = torch.tensor(flags, dtype=torch.float32, device=replica.device)
        for each in groups:
            distributed.all_reduce(used, group=each)
        for group in self._groups:
            group.post_backward()
        self._root.finish_backward()
        for (_, parameter), count in zip(named, used.tolist(), strict=True):
            if not count:
                parameter.grad = None
