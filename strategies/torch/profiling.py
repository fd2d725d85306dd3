"""Profiles a torch model layer by layer, on the meta device, where tensors have no memory; and measures devices."""

from __future__ import annotations

import logging
import time
import timeit
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from trainwright.core.cluster import Accelerator
from trainwright.core.errors import JobError
from trainwright.core.model_profile import LayerCost, ModelProfile, append_loss, merge_plain_layers
from trainwright.strategies.cost_model.machine_model import CPU_CORE, EFFICIENCIES
from trainwright.strategies.torch.checkpoint.initial_weights import check_weights
from trainwright.strategies.torch.checkpoint.safetensors_files import take_weights
from trainwright.strategies.torch.model_files import export
from trainwright.strategies.torch.tensor_parallel.layers import TensorParallelPlan
from trainwright.strategies.torch.tensor_parallel.plan_search import divides_tokens, plan_layers
from trainwright.strategies.torch.torch_compat import storage_key
from trainwright.strategies.torch.torch_errors import summarize_error
from trainwright.strategies.torch.tracing.call_trace import ForwardTracer, meta_copy
from trainwright.strategies.torch.tracing.op_trace import (
    ForwardTrace,
    ModelCall,
    ModuleCalls,
    model_call,
    trace_model,
)
from trainwright.strategies.torch.training import batch_tensors as batches
from trainwright.strategies.torch.training.batch_norm import batch_norms
from trainwright.strategies.torch.training.model_blocks import checkpointed_buffers, checkpointed_modules
from trainwright.strategies.torch.training.new_model import ensure_training_mode, evaluating_parts, sparse_problems

__all__ = ["check_weights", "export", "probe", "profile_model", "take_weights", "weight_bytes"]

_log = logging.getLogger(__name__)
_REASON = 300  # letters of an error that is shown
_MOST_OUTSIDE = 0.1  # of the activations, that sequence parallelism would not divide
_Sample = Mapping[str, npt.NDArray[Any]]
_Sizes = Mapping[str, tuple[int, int]]  # of each parameter: how many numbers, how many bytes


def profile_model(
    model: nn.Module,
    sample: _Sample,
    inputs: tuple[str, ...],
    *,
    keywords: tuple[str, ...] = (),
    step: Any = None,
) -> ModelProfile:
    """Return the cost of each module with parameters or operations of its own, in the order in which they run.

    Where the model cannot be traced without data (its flow depends on values, or it loads weights as it is built),
    operations are estimated as two for each parameter and sample, activations are not known, and `untraced` says why.

    Args:
        model: it is moved to the meta device, and put into training mode.
        sample: columns of one or a few rows, collated.
        inputs: columns given to the model, as positional arguments where there are no keywords; none where `step` is
            given.
        keywords: the model's argument that each of `inputs` is given as.
        step: (model, batch) -> losses, traced instead of the model's call where there are no inputs.

    Raises:
        JobError: the model has sparse tensors, or `inputs` names no column.
    """
    if problems := sparse_problems(model):
        raise JobError(problems)
    ensure_training_mode(model, "model")
    columns = {name: array for name, array in sample.items() if not inputs or name in inputs}
    tensors = batches.to_tensors(columns, inputs or None, torch.device("cpu"))
    held = {name: (each.numel(), each.numel() * each.element_size()) for name, each in model.named_parameters()}
    known = _facts(model)
    call = model_call(inputs, keywords, step)
    trace, least = _first_traced(model.to("meta"), tensors, call), 1
    if isinstance(trace, str):  # a norm of batches takes no less than two rows
        least = 2
        tensors = {name: torch.cat((value, value)) for name, value in tensors.items()}
        trace = _first_traced(model, tensors, call)
    if isinstance(trace, str):
        _log.info("estimating operations from parameters, since tracing raised %s", trace)
        named = [value for value in tensors.values() if len(value) and not value.is_floating_point()]
        tokens = max((value[0].numel() for value in named), default=1)  # integers: each meets all parameters once
        return replace(known, layers=_parameter_costs(model, held, tokens), untraced=trace)
    rows = max((len(value) for value in tensors.values()), default=1)
    known, split = replace(known, heads=trace.heads, tokens=trace.tokens), TensorParallelPlan()
    if trace.division.blocks(trace.heads):
        split, indivisible = _planned_split(model, tensors, call, least)
        tokens = divides_tokens(model, tensors, call, split, least)
        known = replace(known, indivisible=indivisible, divides_tokens=tokens)
        divided = {storage_key(model.get_submodule(name).get_parameter("weight")) for name in split.roles}
        whole = trace.division.weights(trace.heads) - divided
        again = _first_traced(model, tensors, call, whole) if whole and split.roles else trace
        trace = trace if isinstance(again, str) else again
    layers = merge_plain_layers(_mark_divided_spans(_costs(model, held, trace, rows), split))
    layers = _mark_blocks(model, layers)
    known = replace(known, divides_tokens=known.divides_tokens and _mostly_between_sums(layers))
    if inputs:
        layers = append_loss(layers, trace.calls[model].output / rows)
    uncut = _pipeline_problem(model, tensors, call) if trace.asks and inputs else ""
    return replace(known, layers=layers, uncut=uncut, least_rows=least if known.inexact else 1)


def _mostly_between_sums(layers: tuple[LayerCost, ...]) -> bool:
    """Return whether most activations lie where sequence parallelism divides them: after the first sum over ranks."""
    places = [place for place, layer in enumerate(layers) if layer.reductions]
    if not places:
        return False
    outside = [*layers[: places[0]], *layers[places[-1] + 1 :]]
    kept = sum(layer.kept_numbers for layer in layers)
    return sum(layer.kept_numbers for layer in outside) <= _MOST_OUTSIDE * kept


def _pipeline_problem(model: nn.Module, tensors: batches.Tensors, call: ModelCall) -> str:
    """Return why a forward that reads values of its inputs cannot be cut into stages; empty where it can."""

    def forward(meta_model: nn.Module, given: Sequence[Tensor]) -> Any:
        return call(meta_model, dict(zip(tensors, given, strict=True)))

    try:
        ForwardTracer(meta_copy(model), (), forward, "").route([each.to("meta") for each in tensors.values()])
    except JobError as error:
        return error.problems[0]
    return ""


def weight_bytes(model: nn.Module) -> int:
    """Return the size of a model's parameters and buffers in bytes."""
    held = (*model.parameters(), *model.buffers())
    return sum(each.numel() * each.element_size() for each in held if not nn.parameter.is_lazy(each))


def _facts(model: nn.Module) -> ModelProfile:
    """Return the profile of a model without its layers."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}  # also those derived from Keras'
    return ModelProfile(
        framework="torch",
        layers=(),
        inexact=("batch_norm",) if batch_norms(model) else (),
        keras_backend="torch" if any(kind.__module__.startswith("keras.") for kind in kinds) else "",
        evaluating=evaluating_parts(model),
        trained=tuple((len(one) if one.dim() else 1, one.numel() * one.element_size()) for one in trained.values()),
        narrow=next((name for name, one in trained.items() if one.element_size() == 2), ""),
        recounted=next(iter(checkpointed_buffers(model)), ""),
    )


def _first_traced(
    model: nn.Module, tensors: batches.Tensors, call: ModelCall, whole: frozenset[int] = frozenset()
) -> ForwardTrace | str:
    """Return a trace in the model's own types, or in bfloat16 where a kernel needs it; or the first error."""
    stopped = []
    for dtype in (None, torch.bfloat16):
        given = {name: each.to(dtype) if dtype and each.is_floating_point() else each for name, each in tensors.items()}
        try:
            return trace_model(model.to(dtype), given, call, whole)
        except Exception as error:
            stopped.append(summarize_error(error, limit=_REASON))
    return stopped[0]


def _planned_split(
    model: nn.Module, tensors: batches.Tensors, call: ModelCall, least: int
) -> tuple[TensorParallelPlan, str]:
    """Return what tensor parallelism can divide of a model, or why it can divide nothing."""
    try:
        return plan_layers(model, tensors, call, None, "profile", rows=least), ""
    except JobError as error:
        return TensorParallelPlan(), error.problems[0]


def _mark_divided_spans(layers: Sequence[LayerCost], split: TensorParallelPlan) -> list[LayerCost]:
    """Mark the layers between layers that are divided together."""
    places = {layer.name: number for number, layer in enumerate(layers)}
    leading: set[int] = set()
    for group in split.groups:
        found = sorted(places[name] for name in group if name in places)
        leading |= {*range(found[0], found[-1])}
    return [replace(layer, leads=number in leading) for number, layer in enumerate(layers)]


def _mark_blocks(model: nn.Module, layers: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
    """Number the layers of each block that `recompute=full` recomputes, from 1."""
    names = {module: name for name, module in model.named_modules()}
    blocks = {names[module]: block for block in checkpointed_modules(model) for module in block.modules()}
    seen = Counter[nn.Module]()
    marked = []
    for layer in layers:
        block = blocks.get(layer.name)
        if block is not None:
            seen[block] += 1
        marked.append(replace(layer, block_place=0 if block is None else seen[block]))
    return tuple(marked)


def _costs(model: nn.Module, held: _Sizes, trace: ForwardTrace, rows: int) -> list[LayerCost]:
    """Return the cost of each module, in the order in which they ran; those that did not run come last."""
    names = {module: name for name, module in model.named_modules()}
    modules = [*trace.calls, *(module for module in model.modules() if module not in trace.calls)]
    costs = []
    for module in modules:
        call, (count, size) = trace.calls.get(module, ModuleCalls()), _own_parameters(module, names[module], held)
        costs.append(
            LayerCost(
                name=names[module] or type(model).__name__,
                parameters=count,
                parameter_bytes=size,
                flops=call.flops / rows,
                fused_flops=call.fused_flops / rows,
                output_numbers=call.output / rows,
                cut_numbers=call.cut / rows,
                kept_numbers=call.kept / rows,
                traffic_numbers=call.traffic / rows,
                scores_numbers=call.scores / rows,
                matmuls=call.matmuls,
                launches=call.launches,
                splits=call.splits,
                shared_kept=1.0 - call.split_kept / call.kept if call.splits and call.kept else 0.0,
                shared_traffic=1.0 - call.split_traffic / call.traffic if call.splits and call.traffic else 0.0,
                reductions=call.reductions,
                trained=any(each.requires_grad for each in module.parameters(recurse=False)),
            )
        )
    return costs


def _parameter_costs(model: nn.Module, held: _Sizes, tokens: int) -> tuple[LayerCost, ...]:
    """Estimate costs from parameters alone: two operations a parameter and token, none for embeddings."""
    layers = []
    for name, module in model.named_modules():
        count, size = _own_parameters(module, name, held)
        flops = 0.0 if isinstance(module, nn.Embedding) else 2.0 * count * tokens
        if count:
            layers.append(
                LayerCost(name=name or type(model).__name__, parameters=count, parameter_bytes=size, flops=flops)
            )
    return tuple(layers)


def _own_parameters(module: nn.Module, name: str, held: _Sizes) -> tuple[int, int]:
    """Return number and bytes of a module's own parameters; a shared one belongs to its first module.

    Args:
        held: by full name: on the meta device those that were shared are no longer the same.
    """
    path = f"{name}." if name else ""
    own = [held[path + key] for key, _ in module.named_parameters(recurse=False) if path + key in held]
    return sum(count for count, _ in own), sum(size for _, size in own)


# --- Figures of a device ----------------------------------------------------------------------------------------------


_SIDES = {"cpu": 1024, "cuda": 8192}  # of the matrices
_NUMBERS = {"cpu": 2**24, "cuda": 2**28}  # of a copy
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CPU_TYPES = ("fp32", "bf16")


def probe(kind: str, device: str = "cuda") -> Accelerator:
    """Measure a device and return its figures as a data sheet would give them.

    What is measured is divided by the share of a data sheet's figure that devices usually reach, since the estimator
    multiplies by it. Links and network are not measured: they are those of `CPU_CORE`, or of PCIe.

    Args:
        kind: what Ray calls it; `CPU_CORE` for one core.
        device: `cuda` or `cpu`.

    Raises:
        RuntimeError: torch cannot use the device.
    """
    on_cpu, threads = device == "cpu", torch.get_num_threads()
    torch.set_num_threads(1)  # of a core
    try:
        rates = {name: _products(_SIDES[device], _TYPES[name], device) for name in (_CPU_TYPES if on_cpu else _TYPES)}
        source, target = (torch.ones(_NUMBERS[device], device=device) for _ in range(2))
        copied = 2 * source.nbytes / _call_s(lambda: target.copy_(source), device)
    finally:
        torch.set_num_threads(threads)
    return Accelerator(
        name=kind,
        memory_bytes=0 if on_cpu else int(torch.cuda.get_device_properties(0).total_memory),
        flops_per_s={name: rate / EFFICIENCIES["matmul"].default for name, rate in rates.items()},
        memory_bytes_per_s=copied / EFFICIENCIES["traffic"].default,
        link_bytes_per_s=CPU_CORE.link_bytes_per_s if on_cpu else 12e9,
        network_bytes_per_s=CPU_CORE.network_bytes_per_s,
        host=CPU_CORE.host if on_cpu else 1.0,
        source=f"measured by a probe with torch {torch.__version__}; links and network are assumed",
        resource="CPU" if on_cpu else "GPU",
    )


def _products(side: int, kind: torch.dtype, device: str) -> float:
    """Return operations a second of square matrix products, of random numbers: a GPU is faster at equal ones."""
    left, right = (torch.randn(side, side, dtype=kind, device=device) for _ in range(2))
    return 2.0 * side**3 / _call_s(lambda: torch.mm(left, right), device)


def _call_s(work: Callable[[], object], device: str) -> float:
    """Return the seconds of a call: the mean of the fastest of three blocks of 0.2 s at least, after shorter ones.

    Other work on the machine, or on the host of a virtual one, only slows a block. The host waits for a GPU at the ends
    of a block alone: to wait for each call would count as work. Of a CPU core, the time in which another process had it
    does not count.
    """

    def gpu_clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    work()
    timer = timeit.Timer(work, timer=time.thread_time if device == "cpu" else gpu_clock)
    calls, spent_s = timer.autorange()
    return min(spent_s, *timer.repeat(2, calls)) / calls
