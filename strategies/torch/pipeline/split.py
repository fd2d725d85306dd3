"""Splits a model into sections that run on different ranks, without a change to the model.

Each rank runs the model's own forward. Before its section, modules return tensors without data (on the meta device),
and functions between modules work on these. Where the section starts, the values that it needs replace those without
data; where the next section starts, the forward is left. An overlooked value has no data, and torch refuses to compute
with it, so that no error stays silent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.plan import Plan, chunk_problem, section_of
from trainwright.strategies.cost_model.plan_constraints import invalid_combination, too_few_micro_batches
from trainwright.strategies.torch.shard_layout import ShardSlice
from trainwright.strategies.torch.tensor_parallel.layers import TensorParallelPlan, shard_layers
from trainwright.strategies.torch.tensor_parallel.tensor_group import TensorParallelGroup
from trainwright.strategies.torch.torch_compat import tree_leaves, tree_map, tree_map_only, tree_unflatten
from trainwright.strategies.torch.tracing.call_trace import (
    CallListener,
    ForwardFunction,
    ForwardRoute,
    ForwardTracer,
    MetaValueMode,
    ValueKey,
    WatchedModel,
    meta_copy,
    meta_tensor,
)
from trainwright.strategies.torch.training.model_blocks import compile_blocks
from trainwright.strategies.torch.training.objective import JobFunctions, evaluation_mode

_HeldNumber = tuple[nn.Module, str, int]  # a number, and where a module holds it


class SplitModel:
    """A model of which this rank runs some sections.

    Args:
        model: whole, in host memory; afterwards it holds the parameters and buffers of this rank's sections alone.
        entries: names of the modules with whose first calls the sections from the second on begin.
        own: numbers of this rank's sections.
        inputs: as the model is called with, of a few rows; their later dimensions are those of every call.
        prepare: changes what modules run and divides what is left of them, and not what the model is made of; it is
            told the sections that use each parameter. Numbers that a module holds, such as its heads, may be others
            afterwards.

    Attributes:
        sections: of the whole model.
        shared: names of the parameters that several sections use, with their numbers.

    Raises:
        JobError: the model cannot be cut there.
    """

    def __init__(
        self,
        model: nn.Module,
        entries: Sequence[str],
        own: Collection[int],
        inputs: Sequence[Tensor],
        forward: ForwardFunction,
        where: str,
        prepare: Callable[[nn.Module, Mapping[str, frozenset[int]]], None] | None = None,
    ) -> None:
        self._model, self._forward, self._where = model, forward, where
        self._inputs = [meta_tensor(each) for each in inputs]
        try:
            self._meta_model = meta_copy(model)
        except Exception as error:
            what = f"a copy of it without its tensors raised {type(error).__name__}: {error}"
            raise JobError([f"the model cannot be cut: {what}"], where=where) from error
        self._surveyor = ForwardTracer(self._meta_model, entries, forward, where)
        self._routes: dict[tuple[bool, ...], dict[int, ForwardRoute]] = {}
        self._modules = [*model.modules()]
        self.look()
        self.sections = len(entries) + 1
        rows = max(len(inputs[0]), 2)  # a norm of batches takes no less
        users = self._users(rows)
        counting = self._route(rows).counting
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.shared = {name: users[name] for name in trained if len(users.get(name, ())) > 1}
        _keep_sections(model, users, frozenset(own))
        places = [(path, module, key) for path, module in model.named_modules() for key in module._buffers]
        self._counters = [(owner, key) for path, owner, key in places if f"{path}.{key}".lstrip(".") in counting]
        before = _integer_attributes(model, entries)
        if prepare is not None:
            prepare(model, users)
        now = _integer_attributes(model, entries)
        self._shares = [(*place, each) for place, each in now.items() if 0 < each < before.get(place, 0)]
        self._wholes = [(module, key, before[module, key]) for module, key, _ in self._shares]
        self._watched = WatchedModel(model, sorted(self._surveyor.names))

    def look(self) -> None:
        """Note which modules are in training mode: forwards may differ."""
        self._modes = tuple(module.training for module in self._modules)
        self._here = self._routes.setdefault(self._modes, {})

    def taken(self, section: int, rows: int) -> list[Tensor]:
        """Return the inputs of a section on the meta device: shapes, types, and whether they need a gradient."""
        return [*self._route(rows).given[section]]

    def run(self, section: int, given: Sequence[Tensor], *, rows: int, inputs: Sequence[Tensor] | None = None) -> Any:
        """Run one section's forward.

        Args:
            given: as `taken` says; nothing for section 0.
            inputs: of section 0.

        Returns:
            What the next section takes, or the model's outputs.

        Raises:
            JobError: the inputs have other shapes than the first ones, or the forward went another way.
        """
        if inputs is not None:
            self._check(inputs)
        route = self._route(rows)
        wanted = route.taken[section + 1] if section + 1 < self.sections else ()
        counters = [(module, key, module._buffers[key]) for module, key in self._counters]
        passage = _SectionListener(route, section, given, wanted, self._where, counters, self._shares)
        entered = [route.values[ValueKey("input", number)].detach() for number in range(len(self._inputs))]
        _set_attributes(self._wholes if section else self._shares)
        passage.enter(inputs if inputs is not None else entered)
        try:
            with self._watched.followed(passage):
                outputs = self._forward(self._model, inputs if inputs is not None else entered)
        except _SectionEnd:
            return [passage.kept[key] for key in wanted]
        if section + 1 < self.sections:
            raise passage.route_error("its end")
        return tree_map_only(Tensor, passage.real, outputs)

    def _users(self, rows: int) -> dict[str, frozenset[int]]:
        """Return the sections that use each parameter and buffer, in training or in evaluation."""
        found = dict(self._route(rows).users)
        with evaluation_mode(self._model), suppress(JobError):  # whose reason is told where something is evaluated
            self.look()
            for name, sections in self._route(rows).users.items():
                found[name] = found.get(name, frozenset()) | sections
        self.look()
        return found

    def _route(self, rows: int) -> ForwardRoute:
        """Return the route of a forward with so many rows, in the modes noted last."""
        if rows not in self._here:
            for module, training in zip(self._meta_model.modules(), self._modes, strict=True):
                module.training = training
            inputs = [torch.empty((rows, *each.shape[1:]), dtype=each.dtype, device="meta") for each in self._inputs]
            self._here[rows] = self._surveyor.route(inputs)
        return self._here[rows]

    def _check(self, inputs: Sequence[Tensor]) -> None:
        for number, (first, given) in enumerate(zip(self._inputs, inputs, strict=True)):
            if (first.shape[1:], first.dtype) != (given.shape[1:], given.dtype):
                raise JobError(
                    [
                        f"input {number} is {tuple(given.shape[1:])} of {given.dtype} for each sample, but was "
                        f"{tuple(first.shape[1:])} of {first.dtype} in the first one: a model in sections needs inputs "
                        "of one shape: pad or cut them to a fixed length"
                    ],
                    where=self._where,
                )


class _SectionEnd(BaseException):
    """Raised where the next section starts, to leave the forward; user code does not catch it."""


class _SectionListener(CallListener):
    """Runs one section within the model's forward; `kept` is what the next section takes."""

    def __init__(
        self,
        route: ForwardRoute,
        section: int,
        given: Sequence[Tensor],
        wanted: Sequence[ValueKey],
        where: str,
        counters: Sequence[tuple[nn.Module, str, Tensor | None]],
        shares: Sequence[_HeldNumber],
    ) -> None:
        super().__init__()
        self._route, self._section, self._where, self._counters = route, section, where, counters
        self._shares = shares
        self._given = dict(zip(route.taken[section], given, strict=True))
        self._wanted = frozenset(wanted)
        self._number, self._glued = 0, 0
        self._constants = MetaValueMode()
        self._begun = section == 0
        self._passed: dict[ValueKey, Tensor] = {}  # without data
        self._stands_for: dict[int, Tensor] = {}  # what has data, by the id of what has none
        self.kept: dict[ValueKey, Tensor] = {}

    def enter(self, inputs: Sequence[Tensor]) -> None:
        """Note the arguments of the forward."""
        for number, tensor in enumerate(inputs):
            self._note(tensor, ValueKey("input", number))

    def call(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = self._number
        self._number += 1
        if number >= len(self._route.calls) or self._route.calls[number].name != name:
            raise self.route_error(f"module {name!r}")
        call = self._route.calls[number]
        if call.begins and call.section == self._section + 1:
            raise _SectionEnd
        if call.begins and call.section == self._section:
            with self.paused():
                self._begin()
        if not self._begun and call.whole:
            with self.paused():
                return self._stand_in(number)
        if not self._begun:
            return forward(*args, **kwargs)
        args, kwargs = self._real((args, kwargs))
        if not call.whole:
            return forward(*args, **kwargs)
        output = self.whole(forward, args, kwargs)
        self._notes(output, "call", number)
        return output

    def between_calls(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = self._glued
        self._glued += 1
        if number >= len(self._route.between_calls) or self._route.between_calls[number] != func:
            raise self.route_error(getattr(func, "__name__", str(func)))
        output = self._computed(func, args, kwargs)
        self._notes(output, "between_calls", number)
        return output

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function between modules; before the section, without data except what comes from constants."""
        if self._begun:
            args, kwargs = self._real((args, kwargs))
            return func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs))):
            on_meta = tree_map_only(Tensor, lambda leaf: leaf if leaf.is_meta else meta_tensor(leaf), (args, kwargs))
            args, kwargs = on_meta
        with self._constants:
            return func(*args, **kwargs)

    def real(self, tensor: Tensor) -> Tensor:
        """Replace tensors without data by those with data."""
        return self._stands_for.get(id(tensor), tensor)

    def route_error(self, what: str) -> JobError:
        """Return the error for a forward that took another route than when it was traced."""
        return JobError(
            [
                f"the model's forward went another way than when it was cut: it came to {what}: a model in sections "
                'must run the same modules for every batch; use strategy="data_parallel" for one that does not'
            ],
            where=self._where,
        )

    def _begin(self) -> None:
        """Start the section: values have data from here on, and buffers are restored."""
        self._begun = True
        _set_attributes(self._shares)
        for module, name, buffer in self._counters:
            module._buffers[name] = buffer
        for key, tensor in self._given.items():
            if key not in self._passed:
                raise self.route_error("the section without a value that it needs")
            own = tensor.clone() if key in self._route.changed[self._section] else tensor  # a leaf cannot be changed
            self._stands_for[id(self._passed[key])] = own
            if key in self._wanted:
                self.kept[key] = own

    def _stand_in(self, number: int) -> Any:
        """Return the outputs of a call before the section, without data."""
        leaves, spec = self._route.results[number]
        for key in leaves:
            if isinstance(key, ValueKey) and key not in self._passed:
                self._passed[key] = self._route.values[key].detach()  # anew: the forward may change it in place
        return tree_unflatten([self._passed[leaf] if isinstance(leaf, ValueKey) else leaf for leaf in leaves], spec)

    def _real(self, given: Any) -> Any:
        if not self._stands_for:
            return given
        args, kwargs = given
        if not kwargs and all(type(each) is Tensor for each in args):
            return tuple(self._stands_for.get(id(each), each) for each in args), kwargs

        def placed(leaf: Any) -> Any:
            if isinstance(leaf, torch.device) and leaf.type == "meta":
                return next(iter(self._given.values())).device
            return self._stands_for.get(id(leaf), leaf)

        return tree_map(placed, given)

    def _notes(self, output: Any, source: Any, number: int) -> None:
        if self._begun and not self._wanted:
            return
        if isinstance(output, Tensor):
            self._note(output, ValueKey(source, number))
            return
        for place, leaf in enumerate(tree_leaves(output)):
            if isinstance(leaf, Tensor):
                self._note(leaf, ValueKey(source, number, place))

    def _note(self, tensor: Tensor, key: ValueKey) -> None:
        key = self._route.same.get(key, key)
        if not self._begun:
            if key in self._route.values:
                self._passed[key] = tensor
        elif key in self._wanted:
            self.kept[key] = tensor


def _integer_attributes(model: nn.Module, entries: Sequence[str]) -> dict[tuple[nn.Module, str], int]:
    """Return integer attributes of modules that a cut lies inside of, which tensor parallelism changes."""
    inside = {".".join(path[:depth]) for path in (name.split(".") for name in entries) for depth in range(len(path))}
    return {
        (module, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if name in inside and type(value) is int
    }


def _set_attributes(numbers: Sequence[_HeldNumber]) -> None:
    for module, key, value in numbers:
        setattr(module, key, value)


def _keep_sections(model: nn.Module, users: Mapping[str, frozenset[int]], own: frozenset[int]) -> None:
    """Keep the parameters and buffers of some sections; others become plain attributes without data.

    What no section uses is the first one's.
    """
    names = {tensor: name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in [*held.items()]:
                if tensor is not None and not users.get(names[tensor], frozenset({0})) & own:
                    del held[key]
                    module.__dict__[key] = meta_tensor(tensor)


# --- The stage of a rank ----------------------------------------------------------------------------------------------


def stage_problems(spec: ModelSpec, plan: Plan) -> list[str]:
    """Return what of a job or plan a pipeline cannot do."""
    found = []
    if spec.step is not None or not spec.inputs:
        found.append(
            "a pipeline runs the model stage by stage, so that it cannot call step=: give the job inputs=, targets= "
            "and loss="
        )
    if chunk_problem(plan.schedule, plan.chunks):
        found.append(chunk_problem(plan.schedule, plan.chunks))
    if len(plan.cuts) + 1 != plan.sections:
        counts = f"{len(plan.cuts)} cuts for {plan.sections} sections"
        found.append(f"the plan has {counts}: a plan has one cut fewer than sections")
    if plan.streamed and plan.accumulation < plan.mesh.pipeline:
        found.append(": ".join(too_few_micro_batches(plan, plan.accumulation)))
    refused = invalid_combination(plan)
    return [*found, *([": ".join(refused)] if refused else []), *spec.collation.static_problems()]


def _stage_sections(plan: Plan, stage: int) -> list[int]:
    """Return the sections of a stage, by chunk."""
    stages = plan.mesh.pipeline
    return [section_of(plan.schedule, stage=stage, stages=stages, chunk=chunk) for chunk in range(plan.chunks)]


def layout_hash(plan: Plan) -> str:
    """Return a short hash of the cuts and of the stages that hold the sections between them."""
    order = [section for stage in range(plan.mesh.pipeline) for section in _stage_sections(plan, stage)]
    return hashlib.sha256("\n".join((*plan.cuts, str(order))).encode()).hexdigest()[:8]


def split_stage(
    model: nn.Module,
    stage: int,
    spec: ModelSpec,
    plan: Plan,
    layers: TensorParallelPlan,
    group: TensorParallelGroup,
    *,
    device: torch.device,
    where: str,
) -> tuple[SplitModel, dict[str, ShardSlice]]:
    """Keep one stage of a whole model, or this rank's part of it, and move that to the device.

    Args:
        model: whole, in host memory; other stages lose their parameters.
        layers: how tensor parallelism divides layers.
        group: the ranks that divide them.

    Returns:
        The model in sections, and what this rank holds of each parameter that tensor parallelism divides.

    Raises:
        JobError: the model cannot be cut there, or the stage has nothing to train.
    """
    assert spec.sample is not None, "a job has a sample"
    functions = JobFunctions.on_host(spec, plan, where)
    columns = functions.inputs(spec.sample())
    slices: dict[str, ShardSlice] = {}

    def forward(module: nn.Module, tensors: Sequence[Tensor]) -> Any:
        with replace(functions, device=device).precision():
            return functions.call_model(module, tensors)

    def prepare(module: nn.Module, users: Mapping[str, frozenset[int]]) -> None:
        if spec.compile == "inductor":
            compile_blocks(module, device=device, cuts=plan.cuts)
        _check_groups(layers, users, where)
        slices.update(shard_layers(module, layers, group, where))

    given = [columns[name] for name in spec.inputs]
    split = SplitModel(model, plan.cuts, _stage_sections(plan, stage), given, forward, where, prepare)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise JobError(
            [f"stage {stage} has no parameter to train: cut the model elsewhere, or into fewer stages"], where=where
        )
    model.to(device)
    return split, slices


def _check_groups(layers: TensorParallelPlan, users: Mapping[str, frozenset[int]], where: str) -> None:
    """Raise JobError where a cut lies between two layers that are divided together."""
    for group in layers.groups:
        used = {name: users.get(f"{name}.weight", frozenset()) for name in group}
        if len(frozenset().union(*used.values())) > 1:
            raise JobError(
                [
                    f"modules {', '.join(map(repr, group))} are divided together by tensor parallelism, and a cut "
                    "lies between them: cut the model before the first or after the last of them"
                ],
                where=where,
            )
