"""Evaluation and prediction: local, without gradients, in the model's evaluation mode."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trainwright.core.data import Batch, Columns, Feed, MetricSums, Terms
from trainwright.core.engine import MetricStates, UpdatedMetric
from trainwright.core.errors import JobError, nearest
from trainwright.strategies.torch.torch_errors import TorchUserCode
from trainwright.strategies.torch.training import batch_tensors as batches
from trainwright.strategies.torch.training.batch_losses import BatchLayout
from trainwright.strategies.torch.training.objective import JobFunctions, evaluation_mode, sums_of

LOSS = "loss"


OutputsOf = Callable[[Batch], Any]  # gives a model's outputs for a batch; None where they are another rank's


def evaluate(
    model: nn.Module,
    caller: JobFunctions,
    feed: Feed,
    step: int,
    through: OutputsOf | None = None,
    states: MetricStates | None = None,
) -> MetricSums:
    """Return weighted sums and weights of the loss, of each metric and logged value over the feed, in float64.

    Args:
        step: completed steps of the model.
        through: runs a model that is on several ranks; by default it is called.
        states: metrics with state, which are updated.

    Raises:
        UserCodeError, JobError: the user's code raised or returned the wrong shape.
    """
    sums: list[tuple[str, Tensor]] = []
    logged: list[tuple[str, Terms]] = []
    caller = dataclasses.replace(caller, record=lambda name, terms: logged.append((name, terms)))
    with evaluation_mode(model), torch.no_grad():
        for part in feed.parts:
            layout = BatchLayout(ranks=feed.total, micro_batches=len(part), step=step)
            for batch in part:
                found = [*_terms(model, caller, batch.counted(), layout, through, states or {})]
                sums += [(name, sums_of(terms)) for name, terms in (*found, *logged)]
                logged.clear()
        rows = torch.stack([pair for _, pair in sums]).tolist() if sums else []
    total = MetricSums()
    for (name, _), (value, weight) in zip(sums, rows, strict=True):
        total += MetricSums(totals={name: (value, weight)})
    return total


def predict(model: nn.Module, caller: JobFunctions, feed: Feed, through: OutputsOf | None = None) -> Columns:
    """Return the model's outputs for the feed's rows: `output`, or by the model's names where it returns several.

    Names come from a mapping, a dataclass, a named tuple or an object with `items()`; several outputs without names are
    `output_0`, `output_1` and so on (with `to_tuple()` too), parts of an output `name_0` or `name_key`. None is left
    out. Where `spec.outputs` names some, only these are given and looked at.

    Raises:
        UserCodeError, JobError: the model raised, or returned something other than one output per sample.
    """
    if not caller.spec.inputs:
        problem = "inputs= is missing: name the columns given to the model to predict with it"
        raise JobError([problem], where=caller.where)
    found: dict[str, list[npt.NDArray[Any]]] = {}
    with evaluation_mode(model), torch.no_grad():
        for batch in chain.from_iterable(feed.parts):
            with caller.precision():
                outputs = through(batch) if through else caller.outputs(model, caller.inputs(batch))
            chosen = {} if outputs is None else _chosen(dict(flat_outputs(outputs)), caller)
            for name, value in _checked(chosen, batch, caller).items():
                found.setdefault(name, []).append(value)
    return {name: np.concatenate(parts) for name, parts in found.items()}


def decode(model: nn.Module, caller: JobFunctions, feed: Feed, cache: dict[int, Any]) -> Columns | None:
    """Return the model's outputs for the tokens that follow those of earlier calls with the same cache.

    The model keeps keys and values of the earlier tokens, in one of two forms of its forward:

    - `forward(..., cache=None, use_cache=None)` (Hugging Face, where `cache` was `past_key_values` before transformers
      5.24): it is given what it returned last under that name.
    - `forward(..., cache=None)`: it is given a dict, empty in the first call, and stores in it what it needs.

    The first call has any number of tokens, each later one has one token of each row.

    Args:
        feed: the same rows in each call.
        cache: empty in the first call; what the model keeps for each micro-batch, by its first sample.

    Returns:
        as `predict`; None where the model keeps nothing, so that it needs all tokens in each call.

    Raises:
        UserCodeError, JobError: as `predict`.
    """
    arguments = inspect.signature(model.forward).parameters
    name = next((name for name in ("cache", "past_key_values") if name in arguments), "")
    returned = "use_cache" in arguments
    if not name or (name == "past_key_values" and not returned):
        return None

    def through(batch: Batch) -> Any:
        place, given = int(batch.samples[0]), caller.inputs(batch)
        if not returned:
            return caller.outputs(model, given, cache=cache.setdefault(place, {}))
        outputs = caller.outputs(model, given, **{name: cache.get(place)}, use_cache=True)
        cache[place] = getattr(outputs, name, None)
        return outputs

    found = predict(model, caller, feed, through)
    return found if all(cache.values()) else None


def _terms(
    model: nn.Module,
    caller: JobFunctions,
    batch: Batch,
    layout: BatchLayout,
    through: OutputsOf | None,
    states: MetricStates,
) -> Iterator[tuple[str, Terms]]:
    """Yield loss and metrics of a micro-batch, and update those with state; outputs are computed once."""
    columns = caller.target_columns(batch) if through else caller.tensors(batch)
    if caller.spec.step:
        yield LOSS, caller.loss(model, columns, batch, layout)
        if not caller.spec.metrics:
            return
    with caller.precision():
        outputs = through(batch) if through else caller.outputs(model, columns)
        if through and outputs is None:
            return
        if not caller.spec.step:
            yield LOSS, caller.loss_of(outputs, columns, batch, layout)
        for name in caller.spec.metrics:
            if name in caller.mean_metrics:
                yield name, caller.metric(name, outputs, columns, batch, layout)
            elif name in states:
                _update(states[name], name, caller, outputs, columns, batch)


def _update(
    state: UpdatedMetric, name: str, caller: JobFunctions, outputs: Any, columns: batches.Tensors, batch: Batch
) -> None:
    """Update a metric with the rows of a micro-batch, which all count or none does."""
    if not batch.weights.any():
        return
    if isinstance(state.metric, nn.Module):
        state.metric.to(caller.device)
    with TorchUserCode(f"metric {name!r}", caller.where):
        state.update(outputs, caller.targets(columns))


def flat_outputs(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Give each output of a model by name, those inside others too.

    Outputs without names are `output_0`, `output_1` and so on, parts of an output `name_0` or `name_key`; a single one
    is `output`. None is left out.
    """
    parts = _parts(value)
    if parts is None:
        if value is not None:
            yield name or "output", value
        return
    named = isinstance(parts, Mapping)
    outer = name if named else name or "output"
    for key, part in parts.items() if isinstance(parts, Mapping) else enumerate(parts):
        yield from flat_outputs(part, f"{outer}_{key}" if outer else str(key))


def _parts(value: Any) -> Mapping[Any, Any] | tuple[Any, ...] | None:
    """Return the parts of an output; None for one that has no parts."""
    if isinstance(value, (Tensor, type)):
        return None
    if isinstance(value, Mapping):
        return value
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    if isinstance(value, tuple | list):
        return tuple(value)
    if dataclasses.is_dataclass(value):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if callable(getattr(value, "items", None)):
        return dict(value.items())
    return tuple(value.to_tuple()) if callable(getattr(value, "to_tuple", None)) else None


def _chosen(outputs: Mapping[str, Any], caller: JobFunctions) -> Mapping[str, Any]:
    """Return the outputs that the job asks for."""
    for name in caller.spec.outputs:
        if name not in outputs:
            raise JobError([f"the model has no output {name!r}: {nearest(name, outputs)}"], where=caller.where)
    return {name: outputs[name] for name in caller.spec.outputs} if caller.spec.outputs else outputs


def _checked(outputs: Mapping[str, Any], batch: Batch, caller: JobFunctions) -> dict[str, npt.NDArray[Any]]:
    """Return all outputs as arrays. Raises JobError, with the usable ones, where one has no row for each sample."""
    problems = {}
    for name, value in outputs.items():
        if not isinstance(value, Tensor):
            problems[name] = f"the model's {name} is {type(value).__name__}"
        elif value.dim() == 0 or value.shape[0] != batch.rows:
            problems[name] = f"the model's {name} has shape {tuple(value.shape)} for a batch of {batch.rows}"
    if problems:
        good = tuple(name for name in outputs if name not in problems)
        others = f", or ask for others alone: columns={good}" if good else ""
        why = f"{next(iter(problems.values()))}: return tensors with a row for each sample{others}"
        raise JobError([why], where=caller.where)
    return {name: batches.to_numpy(value) for name, value in outputs.items()}
