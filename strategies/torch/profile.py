"""What a torch model costs, layer by layer: traced on the meta device, where tensors have shapes but no memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from trainwright.core.errors import JobError
from trainwright.core.profile import LayerCost, ModelProfile
from trainwright.strategies.torch import batches, dynamo
from trainwright.strategies.torch.failures import user_code
from trainwright.strategies.torch.files import export, take_weights
from trainwright.strategies.torch.replica import batch_norms

__all__ = ["export", "profile_model", "take_weights"]

_log = logging.getLogger(__name__)
dynamo.postpone()
Sample = Mapping[str, npt.NDArray[Any]]


@dataclass(kw_only=True)
class _Call:
    """What the calls of one module came to, those of the modules it calls left out."""

    flops: float = 0.0
    matmuls: int = 0
    launches: int = 0
    traffic: int = 0
    kept: int = 0
    output: int = 0


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up each module's own operations, and what autograd saves for backward.

    Args:
        held: storages that are there anyway, such as parameters'.
    """

    def __init__(self, held: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[nn.Module, _Call] = {}
        self._open: list[nn.Module] = []
        self._saved: dict[int, Tensor] = {}  # by storage; kept alive, so that no other takes its place
        self._held = held

    def enter(self, module: nn.Module, _inputs: Any) -> None:
        self.calls.setdefault(module, _Call())
        self._open.append(module)

    def leave(self, module: nn.Module, _inputs: Any, outputs: Any) -> None:
        self._open.pop()
        self.calls[module].output = _numbers(outputs)

    def save(self, tensor: Tensor) -> Tensor:
        """Called by autograd for what it saves; each storage counts once, where it was saved first."""
        storage = _storage(tensor)
        if self._open and storage not in self._held and storage not in self._saved:
            self._saved[storage] = tensor
            self.calls[self._open[-1]].kept += tensor.numel()
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if self._open and not func.is_view:
            call = self.calls[self._open[-1]]
            call.launches += 1
            count = flop_registry.get(func._overloadpacket)
            if count is None:
                call.traffic += _numbers(outputs) + _numbers(args)
            else:
                call.matmuls += 1
                call.flops += count(*args, **(kwargs or {}), out_val=outputs)
        return outputs


def profile_model(
    model: nn.Module | Callable[[], Any],
    sample: Sample,
    inputs: tuple[str, ...],
    *,
    keywords: tuple[str, ...] = (),
    step: Any = None,
) -> ModelProfile:
    """Cost of each module with parameters or operations of its own, in the order in which they run.

    Where the model cannot be traced without data (its flow depends on values, or it loads weights as it is built),
    a log line says so and operations are estimated as two for each parameter and sample.

    Args:
        model: () -> torch.nn.Module, called once or twice; or a module, which is moved to the meta device.
        sample: columns of one or a few rows, collated.
        inputs: columns given to the model, as positional arguments where there are no keywords; none where `step` is
            given.
        keywords: the model's argument that each of `inputs` is given as.
        step: (model, batch) -> losses, traced instead of the model's call where there are no inputs.

    Raises:
        UserCodeError: `model()` raised.
        JobError: it returned no module, or `inputs` names no column.
    """
    built = model if isinstance(model, nn.Module) else _built(model)
    norms = ("batch_norm",) if batch_norms(built) else ()
    columns = {name: array for name, array in sample.items() if not inputs or name in inputs}
    tensors = batches.tensors(columns, inputs or tuple(columns), torch.device("cpu"))
    held = frozenset(name for name, _ in built.named_parameters())
    try:
        layers = _traced(built.to("meta"), held, tensors, (inputs, keywords), step)
    except Exception as error:
        _log.info("operations are estimated from parameters: tracing raised %s: %s", type(error).__name__, error)
        layers = _counted(built, held)
    backend = "torch" if any(kind.__module__.startswith("keras.") for kind in type(built).__mro__) else ""
    return ModelProfile(framework="torch", layers=layers, inexact=norms, keras_backend=backend)


def _built(build: Callable[[], Any]) -> nn.Module:
    """The module, without memory where the user's code can do that."""
    try:
        with torch.device("meta"):
            model = build()
    except Exception as error:
        _log.info("model() is built with memory: without, it raised %s: %s", type(error).__name__, error)
        with user_code("model()", "profile"):
            model = build()
    if not isinstance(model, nn.Module):
        raise JobError([f"model() returned {type(model).__name__}: return a torch.nn.Module"])
    return model


def _traced(
    model: nn.Module,
    held: frozenset[str],
    tensors: batches.Tensors,
    call: tuple[tuple[str, ...], tuple[str, ...]],
    step: Any,
) -> tuple[LayerCost, ...]:
    """One forward pass on the meta device; `call` is (inputs, keywords)."""
    inputs, keywords = call
    on = {name: value.to("meta") for name, value in tensors.items()}
    rows = max((len(value) for value in tensors.values()), default=1)
    tracer = _Tracer({_storage(tensor) for tensor in (*model.parameters(), *model.buffers(), *on.values())})
    hooks = [module.register_forward_pre_hook(tracer.enter) for module in model.modules()]
    hooks += [module.register_forward_hook(tracer.leave) for module in model.modules()]
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(tracer.save, lambda saved: saved), tracer:
            if keywords:
                model(**{keyword: on[name] for keyword, name in zip(keywords, inputs, strict=True)})
            elif inputs or step is None:
                model(*[on[name] for name in inputs])
            else:
                step(model, on)
    finally:
        for hook in hooks:
            hook.remove()
    names = {module: name for name, module in model.named_modules()}
    modules = [*tracer.calls, *(module for module in model.modules() if module not in tracer.calls)]
    costs = _costs(model, held, [(names[module], module, tracer.calls.get(module, _Call())) for module in modules])
    return tuple(
        replace(
            cost,
            flops=cost.flops / rows,
            output_numbers=cost.output_numbers / rows,
            kept_numbers=cost.kept_numbers / rows,
            traffic_numbers=cost.traffic_numbers / rows,
        )
        for cost in _folded(costs)
    )


def _folded(costs: list[LayerCost]) -> list[LayerCost]:
    """Modules without parameters and products, such as activations, as part of the layer before them."""
    layers: list[LayerCost] = []
    for cost in costs:
        if cost.parameters or cost.flops:
            layers.append(cost)
        elif layers and cost.launches:
            before = layers[-1]
            layers[-1] = replace(
                before,
                output_numbers=cost.output_numbers,
                kept_numbers=before.kept_numbers + cost.kept_numbers,
                traffic_numbers=before.traffic_numbers + cost.traffic_numbers,
                launches=before.launches + cost.launches,
            )
    return layers


def _counted(model: nn.Module, held: frozenset[str]) -> tuple[LayerCost, ...]:
    """Costs from parameters alone: a multiplication and an addition each."""
    costs = _costs(model, held, [(name, module, _Call()) for name, module in model.named_modules()])
    return tuple(
        LayerCost(
            name=cost.name,
            parameters=cost.parameters,
            parameter_bytes=cost.parameter_bytes,
            flops=2.0 * cost.parameters,
        )
        for cost in costs
        if cost.parameters
    )


def _costs(model: nn.Module, held: frozenset[str], calls: list[tuple[str, nn.Module, _Call]]) -> list[LayerCost]:
    """Costs with each module's own parameters; one that several modules share is counted once.

    Args:
        held: full names of the parameters, each once: on the meta device those that were shared are no longer the same.
    """
    costs = []
    for name, module, call in calls:
        path = f"{name}." if name else ""
        own = [parameter for key, parameter in module.named_parameters(recurse=False) if path + key in held]
        costs.append(
            LayerCost(
                name=name or type(model).__name__,
                parameters=sum(parameter.numel() for parameter in own),
                parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in own),
                flops=call.flops,
                output_numbers=call.output,
                kept_numbers=call.kept,
                traffic_numbers=call.traffic,
                matmuls=call.matmuls,
                launches=call.launches,
            )
        )
    return costs


def _storage(tensor: Tensor) -> int:
    """What tensors that share memory have in common, on the meta device too."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _numbers(outputs: Any) -> int:
    """Elements of tensors, however they are nested."""
    if isinstance(outputs, Tensor):
        return outputs.numel()
    if isinstance(outputs, Mapping):
        return sum(_numbers(value) for value in outputs.values())
    if isinstance(outputs, tuple | list):
        return sum(_numbers(value) for value in outputs)
    return 0
