"""What a torch model costs, layer by layer: traced on the meta device, where tensors have shapes but no memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from trainwright.core.errors import JobError
from trainwright.core.profile import LayerCost, ModelProfile
from trainwright.strategies.torch import batches, owns
from trainwright.strategies.torch.failures import user_code
from trainwright.strategies.torch.files import take_weights
from trainwright.strategies.torch.replica import batch_norms

__all__ = ["owns", "profile_model", "take_weights"]

_log = logging.getLogger(__name__)
Sample = Mapping[str, npt.NDArray[Any]]


@dataclass(kw_only=True)
class _Call:
    """What the calls of one module came to."""

    flops: float = 0.0
    output_bytes: int = 0


@dataclass(kw_only=True)
class _Tracer:
    """Adds up what each module's own operations cost, those of the modules it calls left out."""

    counter: FlopCounterMode
    calls: dict[nn.Module, _Call] = field(default_factory=dict)
    open: list[tuple[float, float]] = field(default_factory=list)  # flops at entry, flops of modules called within

    def enter(self, module: nn.Module, _inputs: Any) -> None:
        self.calls.setdefault(module, _Call())
        self.open.append((float(self.counter.get_total_flops()), 0.0))

    def leave(self, module: nn.Module, _inputs: Any, outputs: Any) -> None:
        begun, within = self.open.pop()
        spent = self.counter.get_total_flops() - begun
        if self.open:
            outer, other = self.open[-1]
            self.open[-1] = outer, other + spent
        call = self.calls[module]
        call.flops += spent - within
        call.output_bytes = _bytes(outputs)


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
    try:
        layers = _traced(built.to("meta"), tensors, (inputs, keywords), step)
    except Exception as error:
        _log.info("operations are estimated from parameters: tracing raised %s: %s", type(error).__name__, error)
        layers = _counted(built)
    return ModelProfile(framework="torch", layers=layers, inexact=norms)


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
    model: nn.Module, tensors: batches.Tensors, call: tuple[tuple[str, ...], tuple[str, ...]], step: Any
) -> tuple[LayerCost, ...]:
    """One forward pass on the meta device; `call` is (inputs, keywords)."""
    inputs, keywords = call
    on = {name: value.to("meta") for name, value in tensors.items()}
    rows = max((len(value) for value in tensors.values()), default=1)
    counter = FlopCounterMode(display=False)
    tracer = _Tracer(counter=counter)
    hooks = [module.register_forward_pre_hook(tracer.enter) for module in model.modules()]
    hooks += [module.register_forward_hook(tracer.leave) for module in model.modules()]
    try:
        with torch.no_grad(), counter:
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
    costs = _costs(model, [(names[module], module, tracer.calls.get(module, _Call())) for module in modules])
    return tuple(
        LayerCost(
            name=cost.name,
            parameters=cost.parameters,
            parameter_bytes=cost.parameter_bytes,
            flops=cost.flops / rows,
            output_bytes=cost.output_bytes // rows,
        )
        for cost in costs
        if cost.parameters or cost.flops
    )


def _counted(model: nn.Module) -> tuple[LayerCost, ...]:
    """Costs from parameters alone: a multiplication and an addition each."""
    costs = _costs(model, [(name, module, _Call()) for name, module in model.named_modules()])
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


def _costs(model: nn.Module, calls: list[tuple[str, nn.Module, _Call]]) -> list[LayerCost]:
    """Costs with each module's own parameters; one that several modules share is counted once."""
    seen: set[int] = set()
    costs = []
    for name, module, call in calls:
        own = [parameter for parameter in module.parameters(recurse=False) if id(parameter) not in seen]
        seen.update(id(parameter) for parameter in own)
        costs.append(
            LayerCost(
                name=name or type(model).__name__,
                parameters=sum(parameter.numel() for parameter in own),
                parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in own),
                flops=call.flops,
                output_bytes=call.output_bytes,
            )
        )
    return costs


def _bytes(outputs: Any) -> int:
    """Size of the tensors in a module's output."""
    if isinstance(outputs, Tensor):
        return outputs.numel() * outputs.element_size()
    if isinstance(outputs, Mapping):
        return sum(_bytes(value) for value in outputs.values())
    if isinstance(outputs, tuple | list):
        return sum(_bytes(value) for value in outputs)
    return 0
