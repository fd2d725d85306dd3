"""Symbols of torch without a public equivalent, and differences between the torch versions that are supported.

Every private symbol of torch that the torch engines name is imported here and nowhere else, so that a new version of
torch is checked in one place (`tests/unit/test_compat.py`). Imports that cost time stay inside the functions.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._C import DisableTorchFunction
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version_counter
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import _pop_mode_temporarily as pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

__all__ = ["BatchNorm", "Dropout", "pop_mode_temporarily", "preserve_version_counter"]

assert_on_device = torch._assert_async
reduce_scatter_single = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)  # torch < 2.13
nonblocking_nccl = torch.__version__ >= "2.10"  # a TorchVersion; before, without a lock (pytorch#170424)
foreach_copy, foreach_multiply = torch._foreach_copy_, torch._foreach_mul_
COMPILER_PACKAGES = ("torch._dynamo.", "torch._inductor.")


def accumulate_gradients(roots: tuple[Tensor, ...], slopes: tuple[Tensor, ...]) -> None:
    """Run backward from roots with the given gradients, add to the gradients of all parameters, and free the graph.

    `torch.autograd.backward` calls the same once it has looked at the slopes, for which it imports sympy: half a second
    of a process; and looking takes 0.07 ms each time.
    """
    torch.autograd.Variable._execution_engine.run_backward(
        roots, slopes, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def queue_backward_callback(call: Callable[[], None]) -> None:
    """Call a function at the end of the backward that runs in this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def wrapper_subclass(kind: type[Tensor], like: Tensor, device: torch.device) -> Any:
    """Return a tensor of a subclass without memory, with the size, strides, offset and type of another one."""
    return Tensor._make_wrapper_subclass(
        kind,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=device,
    )


def tensor_leaves(given: Any) -> list[Tensor]:
    """Return the tensors of nested containers, in their order."""
    return [each for each in tree_leaves(given) if isinstance(each, Tensor)]


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors sharing memory have in common, also on the meta device."""
    with DisableTorchFunction():  # not a function that a model calls
        key: int = tensor.untyped_storage()._cdata
    return key


def version_of(tensor: Tensor) -> int:
    """Return a number that changes when an operation changes a tensor in place, or another view of its memory."""
    with DisableTorchFunction():
        return tensor._version


def multi_head_attention(**functions: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function for attention with other functions in place of those that it calls by these names."""
    own = nn.functional.multi_head_attention_forward
    return FunctionType(own.__code__, {**vars(nn.functional), **functions}, own.__name__, own.__defaults__)


def generator_of(device: torch.device) -> torch.Generator:
    """Return the global random generator of a device."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def compile_in_process() -> None:
    """Let the compiler start no worker processes: they would outlive a killed parent."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1


def process_groups() -> dict[Any, Any]:
    """Return torch's own map of the process groups of this process, which keeps them alive."""
    groups: dict[Any, Any] = distributed.distributed_c10d._world.pg_map
    return groups


def reset_group_count() -> None:
    """Set back the number that torch puts into the store's keys of the next process group."""
    distributed.distributed_c10d._world.group_count = 0


def ddp_without_buffer_sync(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wrap a module in DDP that broadcasts neither parameters nor buffers; torch < 2.13 calls the option otherwise."""
    known = inspect.signature(DistributedDataParallel).parameters
    options["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = False
    return DistributedDataParallel(module, init_sync=False, **options)


def reduce_alike(module: Any, sent: torch.dtype | None) -> None:
    """Let an FSDP2 module reduce all gradients of a group in one type, with zeros for those that are missing.

    FSDP2 refuses gradients of several types, which parameters gathered in several types have. It leaves out parameters
    without a gradient, which other ranks may have used.

    Args:
        sent: the type in which gradients are sent; None for the one in which they are added up.
    """
    for group in FsdpState(module).groups:
        group.post_backward = partial(_reduce_alike, group, sent, group.post_backward)


def gather_beside_computing(module: Any) -> None:
    """Let an FSDP2 module on CPUs gather parameters ahead in a backward, as on GPUs: else it waits for each gather."""
    for group in FsdpState(module).groups:
        group.unshard_async_op = True


def keep_requires_grad(module: Any) -> None:
    """Let the sharded parameters of an FSDP2 module follow what was frozen or thawed of them while they were whole.

    FSDP2 makes a gathered parameter require what its shard does, and not the other way around.
    """
    for group in FsdpState(module).groups:
        for each in group.fsdp_params:
            if each.sharded_state.name == "UNSHARDED":
                each.sharded_param.requires_grad_(each.unsharded_param.requires_grad)


def _reduce_alike(group: Any, sent: torch.dtype | None, post_backward: Callable[..., None], *unused: Any) -> None:
    group._reduce_dtype = sent or group._reduce_dtype
    for each in group.fsdp_params if group.reduce_grads else ():
        if not hasattr(each, "_unsharded_param"):
            continue
        accumulate_wide(each)
        whole = each.unsharded_param
        if whole.requires_grad and not has_gradient(each):
            whole.grad = torch.zeros(whole.shape, dtype=whole.dtype, device=whole.device)  # not read from it
            accumulate_wide(each)
    post_backward(*unused)


def accumulate_wide(parameter: Any) -> None:
    """Add the gradient of one of FSDP2's gathered parameters to what it has in the type of the reduction."""
    parameter.accumulate_unsharded_grad_if_needed()
    parameter.to_accumulated_grad_if_needed()


def has_gradient(parameter: Any) -> bool:
    """Return whether one of FSDP2's gathered parameters has a gradient."""
    return parameter.unsharded_accumulated_grad is not None or parameter.unsharded_param.grad is not None


def gather_as(parameter: Any, kind: torch.dtype) -> None:
    """Let FSDP2 gather one of its parameters, which is sharded now, in another type than it is kept in."""
    parameter.param_dtype, parameter.all_gather_outputs = kind, []
    parameter.init_dtype_attrs = lambda _policy: None  # FSDP2 would set it back wherever `unshard` is called
    if hasattr(parameter, "_unsharded_param"):
        del parameter._unsharded_param  # of the type before


def forget_gradient(parameter: Any) -> None:
    """Forget the gradient of one of FSDP2's parameters; before torch 2.15 the accumulated one is kept beside it."""
    parameter.unsharded_param.grad = None
    if not isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property):
        parameter.unsharded_accumulated_grad = None


class FsdpState:
    """The private state that FSDP2 keeps with a module."""

    def __init__(self, module: Any) -> None:
        self._state = module._get_fsdp_state()

    def remove_forward_hooks(self) -> None:
        """Let calls of the module neither gather nor release its parameters."""
        self._state._pre_forward_hook_handle.remove()
        self._state._post_forward_hook_handle.remove()

    def initialize_root(self) -> None:
        """Make this module's state the root, as the first call of the module does."""
        self._state._lazy_init()

    def finish_backward(self) -> None:
        """Wait for the reductions of a backward, as the root does at its end."""
        self._state._root_post_backward_final_callback()

    @property
    def groups(self) -> list[Any]:
        """The groups of parameters that are gathered and reduced together; torch < 2.12 has at most one."""
        if hasattr(self._state, "_fsdp_param_groups"):
            return [*self._state._fsdp_param_groups]
        group = self._state._fsdp_param_group
        return [] if group is None else [group]


# --- A backward in two halves, by functions of torch's pipelining -----------------------------------------------------

# They lose gradients silently unless each parameter's path in the graph meets the path of the inputs at one node, as in
# rows of layers with residuals.


_COMPILED = "CompiledFunctionBackward"


def can_split_backward(roots: Sequence[Tensor], given: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether a split backward gives all gradients of a graph."""
    from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc as node_of
    from torch.distributed.pipelining._backward import construct_reverse_graph, reverse_closure

    ends = [each.grad_fn for each in roots if each.grad_fn is not None]
    consumers = construct_reverse_graph(ends)
    if any(node.name() == _COMPILED for node in consumers):
        return False  # one node gives the gradients of inputs and of parameters
    starts = [node_of(each) for each in given]
    if any(node not in consumers for node in starts):
        return False  # torch 2.9 has no gradient then of an input that is not used
    on_the_way, _ = reverse_closure([node for node in starts if node], set(), consumers)
    for parameter in parameters:
        node = node_of(parameter)
        if node is None or node not in consumers:
            continue  # not of this graph
        beside, met = reverse_closure([node], on_the_way, consumers)
        if len(met) != 1 or any(end in beside for end in ends):
            return False
    return True


def backward_of_inputs(
    roots: Sequence[Tensor], slopes: Sequence[Tensor], given: Sequence[Tensor], parameters: Sequence[nn.Parameter]
) -> list[dict[str, Any]]:
    """Run the first half of a split backward: gradients of inputs. Return what the second half starts from."""
    from torch.distributed.pipelining._backward import stage_backward_input

    copies = [each.clone() for each in roots]  # torch detaches them in place, and what is kept for backward with them
    try:
        _, groups = stage_backward_input(copies, list(slopes), list(given), iter(parameters))
    except RuntimeError as error:
        raise (error.__cause__ or error) from None  # torch hides what the user's own code raised behind one of its own
    return groups


def backward_of_parameters(parameters: Sequence[nn.Parameter], groups: list[dict[str, Any]]) -> None:
    """Run the second half of a split backward."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(parameters), groups)


# --- Process-wide settings --------------------------------------------------------------------------------------------


def captured() -> dict[str, Any]:
    """Return the process-wide torch settings; empty where they are torch's defaults."""
    kind = torch.get_default_dtype()
    return {} if kind is torch.float32 else {"dtype": kind}


def apply(settings: dict[str, Any]) -> None:
    """Apply the settings of another process."""
    torch.set_default_dtype(settings["dtype"])


# --- The compiler, imported only when something is compiled -----------------------------------------------------------


# The first optimizer, the first DistributedDataParallel and FSDP2's hooks import `torch._dynamo`, which takes over a
# second of a core and 146 MB in each process (torch 2.13), only to ask the compiler to keep out of the way. Here a
# module stands in for it that answers these few questions; at any other one, and at the import of anything inside it,
# the compiler itself is imported and takes its place, with nothing left behind.

_NAME = "torch._dynamo"
_SETTINGS = f"{_NAME}.config"  # stands by itself, and is all that tensors without data ask for; the compiler keeps it
_DISABLED = "__dynamo_disable"  # where `torch._compile._disable_dynamo` keeps what `disable` gave it


class _DynamoStandIn(ModuleType):
    """Stands in for `torch._dynamo` and answers what eager training asks it."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(_NAME)
        self.__spec__, self.__path__ = spec, spec.submodule_search_locations or []
        self._passed: list[tuple[Any, Any, bool]] = []
        # The compiler's default.
        self.utils = _DynamoSubmodule(self, "utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
        self.trace_rules = _DynamoSubmodule(self, "trace_rules", clear_lru_cache=lambda: None)

    def __getattr__(self, name: str) -> Any:
        """Import the real compiler for any other attribute."""
        if name.startswith("__"):
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        return getattr(self._real(), name)

    def disable(
        self, fn: Callable[..., Any] | None = None, recursive: bool = True, *, reason: Any = None, wrapping: bool = True
    ) -> Any:
        """Return a function that the compiler must not trace; unchanged as long as there is no compiler."""
        postponed = sys.modules.get(_NAME) is self
        if postponed and wrapping and recursive and isinstance(fn, FunctionType):
            return self._kept_out(fn, reason)
        if fn is None or wrapping or not postponed:
            return self._real().disable(fn, recursive, reason=reason, wrapping=wrapping)

        def passed(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        self._passed.append((fn, passed, recursive))
        return passed

    def _kept_out(self, fn: FunctionType, reason: Any) -> Any:
        """Mark a function so that a later compiler does not trace it."""

        @functools.wraps(fn)
        def alone(*args: Any, **kwargs: Any) -> Any:
            if sys.modules.get(_NAME) is self:
                return fn(*args, **kwargs)
            return self._real().disable(fn, reason=reason)(*args, **kwargs)

        vars(alone).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason, _torchdynamo_orig_callable=fn)
        return alone

    def graph_break(self, msg: str = "") -> None:
        """Do nothing: nothing is traced."""

    def _real(self) -> ModuleType:
        """Import and return the real compiler."""
        first = sys.modules.get(_NAME) is self
        if first:
            sys.modules.pop(_NAME, None)
        real = importlib.import_module(_NAME)
        for fn, passed, recursive in self._passed if first else ():
            if getattr(fn, _DISABLED, None) is passed:
                setattr(fn, _DISABLED, real.disable(fn, recursive, wrapping=False))
        return real


class _DynamoSubmodule(SimpleNamespace):
    """Stands in for a submodule of `torch._dynamo`."""

    def __init__(self, module: _DynamoStandIn, name: str, **answers: Any) -> None:
        super().__init__(**answers)
        self._whole: Callable[[], ModuleType] = lambda: getattr(module._real(), name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole(), name)


class _DynamoFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the real compiler before any of its submodules."""

    def __init__(self, module: _DynamoStandIn) -> None:
        self._module = module
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(f"{_NAME}.") or name == _SETTINGS or sys.modules.get(_NAME) is not self._module:
            return None
        self._module._real()
        if name not in sys.modules:
            return None
        self._specs[name] = sys.modules[name].__spec__
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import replaced."""
        module.__spec__ = self._specs.pop(module.__name__)


def _postpone_compiler() -> None:
    """Import `torch._dynamo` only when it is needed. Does nothing where it has been imported."""
    spec = None if _NAME in sys.modules else importlib.util.find_spec(_NAME)
    if spec is not None:
        module = _DynamoStandIn(spec)
        sys.modules[_NAME] = torch._dynamo = module  # torch would look for an attribute that is missing at each use
        sys.meta_path.insert(0, _DynamoFinder(module))


_postpone_compiler()
