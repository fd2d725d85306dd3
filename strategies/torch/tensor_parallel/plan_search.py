"""Searches the layers of a model that tensor parallelism can divide, and proves on shapes that they can be.

`op_trace` says which linear layers may be divided, by the use of their outputs. Then the forward is run without data
twice: with whole outputs, and with outputs as short as one rank's. Both runs must do the same operations, and each
tensor must be whole or one rank's part along one dimension. Operations must be elementwise along that dimension, or
only carry it. A module's attribute that counts heads is divided too where that makes the two runs agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.errors import JobError
from trainwright.strategies.torch.tensor_parallel.layers import (
    ROLES,
    TensorParallelPlan,
    disable_fast_path,
    shard_dims,
    shard_layers,
    weight_is_transposed,
)
from trainwright.strategies.torch.tensor_parallel.tensor_group import TensorParallelGroup
from trainwright.strategies.torch.torch_compat import BatchNorm, TorchDispatchMode, storage_key, tensor_leaves
from trainwright.strategies.torch.torch_errors import summarize_error
from trainwright.strategies.torch.tracing.call_trace import meta_copy
from trainwright.strategies.torch.tracing.op_trace import ForwardTrace, ModelCall, meta_runner, trace_model

_MOST = 3  # attributes of a block that are changed together
_RunOnMeta = Callable[[nn.Module], object]


def plan_layers(
    model: nn.Module,
    columns: Mapping[str, Tensor],
    call: ModelCall,
    degree: int | None,
    where: str,
    *,
    rows: int | None = None,
    named: Mapping[str, str] | None = None,
    sequence: bool = False,
) -> TensorParallelPlan:
    """Choose how tensor-parallel ranks divide the layers of a model.

    Args:
        model: whole, in host memory; it is not changed.
        columns: of a sample, in host memory: the model's inputs, or all of them for a step.
        degree: ranks that divide it; None for as few as share the heads of its attention.
        rows: the fewest that the model takes; without it those that its norms take of a sample of one row.
        named: roles of modules by name or pattern, as the job gives them.
        sequence: the ranks hold parts of the tokens between divided layers.

    Raises:
        JobError: no layer can be divided, or not as the job says, or the tokens cannot.
    """
    if rows is None:
        rows = 2 if any(isinstance(module, BatchNorm) for module in model.modules()) else 1
        columns = {name: torch.cat([column] * rows) for name, column in columns.items()}
    run = meta_runner(columns, call, rows)
    planner = _LayerPlanner(model, run, degree, where)
    plan = planner.planned(named) if named else planner.found(lambda model: trace_model(model, columns, call))
    if sequence and degree and (why := sequence_parallel_problem(model, plan, run, degree, where)):
        raise JobError(
            [f"sequence=1: the tokens cannot be divided between tensor-parallel layers: {why}; leave it out"],
            where=where,
        )
    return plan


class _LayerPlanner:
    """Finds how the layers of a model can be divided, and proves it; `run` calls a model without data."""

    def __init__(self, model: nn.Module, run: _RunOnMeta, degree: int | None, where: str) -> None:
        self._model, self._meta_model, self._run = model, meta_copy(model), run
        self._degree, self._where = degree or 2, where
        self._any = degree is None
        self._names = {module: name for name, module in self._meta_model.named_modules()}
        self._reasons: list[str] = []

    def planned(self, plan: Mapping[str, str]) -> TensorParallelPlan:
        """Return the plan that the job gives by module name or pattern."""
        roles = self._named(plan)
        for name, role in roles.items():
            problem = self._unfit(name, role)
            if problem:
                raise self._plan_error(f": module {name!r} cannot be {role!r}: {problem}")
        block = tuple(name for name, role in roles.items() if role in ("column", "row"))
        split = self._proved(roles, [block] if block else [])
        if split is None:
            raise self._plan_error(f" cannot be followed: {self._reasons[-1]}")
        return split

    def found(self, traced: Callable[[nn.Module], ForwardTrace]) -> TensorParallelPlan:
        """Search for layers that can be divided; `traced` follows one forward of a model without data."""
        trace = self._followed(traced)
        split = TensorParallelPlan()
        for roles, blocks in self._kinds(trace):
            proved = self._proved(roles, blocks)
            split = split.joined(proved) if proved else split
        others, tables = self._weights(nn.Embedding, False), self._weights(nn.Embedding, True)
        last, table = trace.division.ends_of_model()
        ends = {others[key]: "gathered" for key in last & others.keys()}
        ends |= {tables[key]: "vocabulary" for key in table & tables.keys()}
        for kinds in (("vocabulary", "gathered"), ("vocabulary",), ("gathered",)):
            good = self._ends({name: role for name, role in ends.items() if role in kinds}, split.roles)
            proved = self._proved(good, []) if good else None
            if proved is not None:
                split = split.joined(proved)
                break
        if not split.roles:
            why = self._reasons[0] if self._reasons else "none is a linear layer whose outputs go to another one alone"
            raise JobError(
                [
                    f"no layer of the model can be divided by {self._degree}: {why}; name modules by tensor_plan=, or "
                    "use another strategy"
                ],
                where=self._where,
            )
        return split

    def _followed(self, traced: Callable[[nn.Module], ForwardTrace]) -> ForwardTrace:
        """Trace one forward. Raises JobError where that fails, or the ranks cannot share the attention heads."""
        try:
            trace = traced(self._meta_model)
        except Exception as error:
            what = summarize_error(error)
            raise JobError(
                [f"the model cannot be divided by layers: traced without data, its forward raised {what}"],
                where=self._where,
            ) from error
        if self._any and trace.heads:
            self._degree = next((each for each in range(2, trace.heads + 1) if not trace.heads % each), 2)
        if trace.heads % self._degree:
            raise JobError(
                [f"{self._degree} tensor-parallel ranks cannot share {trace.heads} heads of attention: use a divisor"],
                where=self._where,
            )
        return trace

    def _kinds(self, trace: ForwardTrace) -> Iterator[tuple[dict[str, str], list[tuple[str, ...]]]]:
        """Yield groups of alike blocks that may be divided, with the roles of their modules."""
        named = self._weights(nn.Embedding, False)
        kinds: dict[tuple[str, ...], tuple[dict[str, str], list[tuple[str, ...]]]] = {}
        for columns, rows in trace.division.blocks(trace.heads or self._degree):
            block = {named[key]: "column" for key in columns & named.keys()}
            block |= {named[key]: "row" for key in rows & named.keys()}
            problems = [f"module {name!r}: {why}" for name, role in block.items() if (why := self._unfit(name, role))]
            if problems or len(block) < len(columns | rows):
                self._reasons += problems or ["a product with a parameter that is not a linear layer's"]
                continue
            parents = (self._meta_model.get_submodule(name.rpartition(".")[0]) for name in block)
            kind = tuple(sorted({type(parent).__qualname__ for parent in parents}))
            roles, blocks = kinds.setdefault(kind, ({}, []))
            roles |= block
            blocks.append(tuple(block))
        yield from kinds.values()

    def _weights(self, kind: type[nn.Module], wanted: bool) -> dict[int, str]:
        """Return modules of a kind, or of all others, by the storage of their weight."""
        return {
            storage_key(weight): name
            for module, name in self._names.items()
            if isinstance(module, kind) == wanted and (weight := module._parameters.get("weight")) is not None
        }

    def _ends(self, ends: Mapping[str, str], taken: Mapping[str, str]) -> dict[str, str]:
        """Return embeddings and last layers that can be divided; tied ones together or not at all."""
        good = {name: role for name, role in ends.items() if name not in taken and not self._unfit(name, role)}
        while bad := [name for name in good if not self._whole_use(name, good)]:
            for name in bad:
                del good[name]
        return good

    def _whole_use(self, name: str, roles: Mapping[str, str]) -> bool:
        """Return whether all modules that share a module's parameters divide them alike."""
        module = self._model.get_submodule(name)
        own = {module._parameters[key]: dimension for key, dimension in shard_dims(module, roles[name]).items()}
        return all(
            path in roles and shard_dims(other, roles[path]).get(key) == own[parameter]
            for path, other in self._model.named_modules()
            for key, parameter in other._parameters.items()
            if parameter in own
        )

    def _named(self, plan: Mapping[str, str]) -> dict[str, str]:
        """Return the role of each module that a user's plan names or matches."""
        names = [name for name in self._names.values() if name]
        roles: dict[str, str] = {}
        for pattern, role in plan.items():
            meant = [name for name in names if fnmatchcase(name, pattern)]
            if not meant:
                near = get_close_matches(pattern, names, n=1, cutoff=0.0)
                hint = f"; the nearest is {near[0]!r}" if near else ""
                raise self._plan_error(f" names {pattern!r}, which is not a module of the model{hint}")
            if role not in ROLES:
                near = get_close_matches(role, ROLES, n=1, cutoff=0.0)
                hint = f"({', '.join(ROLES)}); the nearest is {near[0]!r}"
                raise self._plan_error(f": {role!r} of {pattern!r} is not a role {hint}")
            roles |= dict.fromkeys(meant, role)
        return roles

    def _plan_error(self, what: str) -> JobError:
        return JobError([f"tensor_plan{what}"], where=self._where)

    def _unfit(self, name: str, role: str) -> str:
        """Return why a module cannot have a role; empty where it can."""
        module = self._model.get_submodule(name)
        if role == "vocabulary":
            plain = type(module) is nn.Embedding and module.max_norm is None
            plain = plain and not (module.sparse or module.scale_grad_by_freq)
            return "" if plain else "it is not a plain nn.Embedding"
        if role == "gathered":
            return "" if type(module) is nn.Linear else "it is not an nn.Linear"
        turned = weight_is_transposed(module)
        if turned is None:
            return "it is not a linear layer with only a weight and perhaps a bias"
        dimension = shard_dims(module, role)["weight"]
        weight = module._parameters["weight"]
        assert weight is not None, "a linear layer has one"
        size = weight.shape[dimension]
        return f"its {size} {'outputs' if role == 'column' else 'inputs'} are not a multiple of {self._degree}" * bool(
            size % self._degree
        )

    def _proved(self, roles: Mapping[str, str], blocks: Sequence[tuple[str, ...]]) -> TensorParallelPlan | None:
        """Return a plan for alike blocks that is proved, with as few attributes changed as possible; None for none."""
        bad = [name for name in roles if not self._whole_use(name, roles)]
        whole = f"a parameter of module {bad[0]!r} is also used elsewhere" if bad else self._events(roles, 1, {})
        if isinstance(whole, str):
            self._refuse(roles, whole)
            return None
        parents = sorted({name.rpartition(".")[0] for name, role in roles.items() if role in ("column", "row")})
        reasons = []
        for attributes in self._choices(parents):
            part = self._events(roles, self._degree, attributes)
            if isinstance(part, str):
                why = part
            else:
                found = (trace_mismatch(one, other, self._degree) for one, other in zip(whole, part, strict=True))
                why = next(filter(None, found), "")
            if not why:
                random = frozenset(name for events in whole for name in _columns_before_random_ops(events))
                return TensorParallelPlan(roles=roles, groups=tuple(blocks), attributes=attributes, random=random)
            reasons.append(why)
        self._refuse(roles, reasons[0])
        return None

    def _refuse(self, roles: Mapping[str, str], why: str) -> None:
        """Remember why a block cannot be divided."""
        self._reasons.append(f"the block of module {next(iter(roles))!r} cannot be divided: {why}")

    def _choices(self, parents: Sequence[str]) -> Iterator[dict[str, dict[str, int]]]:
        """Yield one rank's attributes of modules, such as numbers of heads: none, one that differs, and so on."""
        counts = {
            path: {
                key: value // self._degree
                for key, value in vars(self._meta_model.get_submodule(path)).items()
                if type(value) is int and value > 1 and not value % self._degree and not key.startswith("_")
            }
            for path in parents
        }
        keys = sorted({key for found in counts.values() for key in found})
        for count in range(_MOST + 1):
            for chosen in combinations(keys, count):
                yield {path: {key: found[key] for key in chosen if key in found} for path, found in counts.items()}

    def _events(
        self, roles: Mapping[str, str], degree: int, attributes: Mapping[str, Mapping[str, int]]
    ) -> list[list[TracedOp]] | str:
        """Trace a forward in training, with gradients, and in evaluation; return the traces, or what was raised."""
        found = []
        try:
            for training in (True, False):
                with self._standing_in(roles, degree, attributes) as recorder:
                    self._meta_model.train(training)
                    with torch.set_grad_enabled(training), recorder:
                        self._run(self._meta_model)
                if recorder.called != roles.keys():
                    return f"module {next(iter(roles.keys() - recorder.called))!r} is not called by the forward"
                found.append(recorder.events)
        except Exception as error:
            return summarize_error(error)
        return found

    def _widths(self, name: str, role: str, degree: int) -> tuple[int, int, torch.dtype]:
        """Return the input and output width of a module on each rank, and the type of its weight."""
        module = self._model.get_submodule(name)
        weight = module._parameters["weight"]
        assert weight is not None, "a layer that is divided has one"
        if role == "vocabulary":
            return 0, weight.shape[1], weight.dtype
        given, made = weight.shape if weight_is_transposed(module) else weight.shape[::-1]
        given, made = given // degree if role == "row" else given, made // degree if role == "column" else made
        return given, made, weight.dtype

    @contextmanager
    def _standing_in(
        self, roles: Mapping[str, str], degree: int, attributes: Mapping[str, Mapping[str, int]]
    ) -> Iterator[_OpRecorder]:
        """Replace the modules by stand-ins that return tensors of one rank's shapes; at the end all is as before."""
        modules = {name: self._meta_model.get_submodule(name) for name in roles}
        recorder = _OpRecorder(
            {storage_key(each): name for name, module in modules.items() for each in module.parameters()}
        )
        before = [(module, dict(vars(module))) for module in self._meta_model.modules()]
        for name, module in modules.items():
            module.forward = recorder.stand_in(name, roles[name], *self._widths(name, roles[name], degree))
        disable_fast_path(self._meta_model, roles)
        for path, changed in attributes.items():
            vars(self._meta_model.get_submodule(path)).update(changed)
        try:
            yield recorder
        finally:
            for module, fields in before:
                module.__dict__.clear()
                module.__dict__.update(fields)


# --- Comparison of traces ---------------------------------------------------------------------------------------------


_aten = torch.ops.aten
_Shape = tuple[int, ...]
_VIEW_OPS = (_aten.view, _aten._unsafe_view, _aten.reshape)
_DIM_OPS = {  # with the place of the dimension among their arguments
    _aten.slice: 1, _aten.select: 1, _aten.unbind: 1, _aten.split: 2, _aten.split_with_sizes: 2, _aten.narrow: 1,
    _aten.cat: 1, _aten.stack: 1, _aten._softmax: 1, _aten._safe_softmax: 1, _aten._log_softmax: 1,
}  # fmt: skip
_JOIN_OPS = (_aten.cat, _aten.stack)
_SLICE_OPS = (_aten.slice, _aten.split, _aten.split_with_sizes, _aten.narrow)  # which may take all there is
_NORM_OPS = {_aten.native_layer_norm: 1, _aten._fused_rms_norm: 1}
_ELEMENTWISE_OPS = (
    _aten.transpose, _aten.permute, _aten.t, _aten.unsqueeze, _aten.squeeze, _aten.expand, _aten.alias, _aten.detach,
    _aten.clone, _aten._to_copy, _aten.copy_, _aten.native_dropout, _aten.bernoulli_, _aten.masked_fill, _aten.where,
    _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.mean, _aten.sum, _aten.amax, _aten.linalg_vector_norm,
    _aten.lift_fresh, _aten.contiguous,
)  # fmt: skip
_BATCHED_PRODUCTS = {_aten.bmm: 0, _aten.baddbmm: 1}  # with the place of their first factor


@dataclass(frozen=True, kw_only=True)
class TracedOp:
    """An operation, or the call of a layer that is divided."""

    func: Any = None  # of the operation; None for a call
    call: tuple[str, str] = ("", "")  # the layer's name and role
    given: tuple[Any, ...] = ()  # arguments; shapes in the place of tensors
    made: tuple[_Shape, ...] = ()  # shapes of the outputs


@dataclass(frozen=True)
class TracedTensor:
    """The shape of a tensor argument; `learns` where it requires a gradient."""

    shape: _Shape
    learns: bool


class _OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations of a forward in which some layers are replaced by stand-ins.

    `names` are those of these layers, by the storage of each of their parameters.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[TracedOp] = []
        self.called: set[str] = set()
        self._names = names
        self._paused = False

    def stand_in(self, name: str, role: str, takes: int, gives: int, kind: torch.dtype) -> Callable[[Tensor], Tensor]:
        """Return a stand-in for a layer's forward, with input and output widths; `kind` is its weight's type."""

        def forward(given: Tensor) -> Tensor:
            self._paused = True
            try:
                if takes and given.shape[-1] != takes:
                    raise ValueError(f"module {name!r} is given {given.shape[-1]} numbers where it takes {takes}")
                shape = (*given.shape[:-1], gives) if takes else (*given.shape, gives)
                made = given.new_empty(shape, dtype=given.dtype if given.is_floating_point() else kind)
                made = made.requires_grad_().clone()  # no leaf: a forward may write to it
            finally:
                self._paused = False
            self.called.add(name)
            self.events.append(TracedOp(call=(name, role)))
            return made

        return forward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if not self._paused:
            for each in tensor_leaves((args, kwargs)):
                if (name := self._names.get(storage_key(each))) is not None:
                    raise ValueError(f"a parameter of module {name!r} is used without calling it")
            given = tuple(
                TracedTensor(tuple(each.shape), each.requires_grad) if isinstance(each, Tensor) else each
                for each in _flat_arguments(args, kwargs)
            )
            made = tuple(tuple(each.shape) for each in tensor_leaves(outputs))
            self.events.append(TracedOp(func=func, given=given, made=made))
        return outputs


def trace_mismatch(whole: Sequence[TracedOp], part: Sequence[TracedOp], degree: int) -> str:
    """Return why the trace of one rank is not its part of the whole trace; empty where it is."""
    if [(event.func, event.call) for event in whole] != [(event.func, event.call) for event in part]:
        return "its forward does something else with a part of the outputs"
    inside = False
    for one, other in zip(whole, part, strict=True):
        if one.func is None:
            inside = one.call[1] == "column" or (inside and one.call[1] != "row")
            continue
        why = _op_mismatch(one, other, degree, inside)
        if why:
            return f"{one.func._overloadpacket} {why}"
    return ""


def _columns_before_random_ops(events: Sequence[TracedOp]) -> Iterator[str]:
    """Yield the column layers after which random numbers are drawn before the next row layer."""
    column = ""
    for event in events:
        if event.call[1] == "column":
            column = column or event.call[0]
        elif event.call[1] == "row":
            column = ""
        elif column and event.func is not None and torch.Tag.nondeterministic_seeded in event.func.tags:
            yield column


def _op_mismatch(whole: TracedOp, part: TracedOp, degree: int, inside: bool) -> str:
    """Return how an operation differs between the two traces; empty where it does not."""
    try:
        given = [_sharded_dim(one, other, degree) for one, other in _tensor_shapes(whole, part)]
        made = [_sharded_dim(one, other, degree) for one, other in zip(whole.made, part.made, strict=True)]
    except ValueError as error:
        return str(error)
    packet, random = whole.func._overloadpacket, torch.Tag.nondeterministic_seeded in whole.func.tags
    if all(each is None for each in given):
        if any(each is not None for each in made) or _plain_arguments(whole) != _plain_arguments(part):
            return "makes something that depends on the size of a part"
        return "draws random numbers for all ranks beside those of each one" if random and inside else ""
    learned = [one.learns for one in whole.given if isinstance(one, TracedTensor)]
    if any(learns and each is None for learns, each in zip(learned, given, strict=True)):
        return "is combined with a whole parameter, of whose gradient each rank would have a part"
    made = [each for one, each in zip(whole.made, made, strict=True) if not _is_fused_attention(packet) or any(one)]
    if any(each is None for each in made):  # of a fused kernel's outputs some are states of its random numbers
        return "needs the whole"
    return _sharding_mismatch(
        packet, whole, part, degree, [*zip((one for one, _ in _tensor_shapes(whole, part)), given, strict=True)]
    )


def _sharding_mismatch(
    packet: Any, whole: TracedOp, part: TracedOp, degree: int, given: list[tuple[_Shape, int | None]]
) -> str:
    """Return why ranks cannot run an operation on their parts; empty where they can."""
    shape, dimension = next((shape, each) for shape, each in given if each is not None)
    pointwise, attention = torch.Tag.pointwise in whole.func.tags, _is_fused_attention(packet)
    if (packet in _BATCHED_PRODUCTS or attention or pointwise) and _plain_arguments(whole) != _plain_arguments(part):
        return "computes with the size of a part"
    if packet in _VIEW_OPS:
        after = _sharded_dim(whole.made[0], part.made[0], degree)
        slowest = math.prod(shape[:dimension]) == math.prod(whole.made[0][:after])  # of the numbers that it is seen in
        return "" if slowest else "mixes what is divided with what is not"
    if packet in _DIM_OPS:
        along = whole.given[_DIM_OPS[packet]] if len(whole.given) > _DIM_OPS[packet] else 0
        along = next((each for each in reversed(whole.given) if type(each) is int), 0) if packet in _JOIN_OPS else along
        if along % max(len(shape), 1) != dimension:
            return ""
        return "" if packet in _SLICE_OPS and whole.made == (shape,) else "picks from what is divided"
    if packet in _BATCHED_PRODUCTS:
        factors = given[_BATCHED_PRODUCTS[packet] :][:2]
        return "" if [each for _, each in factors] == [0, 0] else "adds up over what is divided"
    if attention:
        return "" if {each for _, each in given[:3]} == {1} else "attends over what is divided"
    if packet in _NORM_OPS:
        over = len(whole.given[_NORM_OPS[packet]])
        return "" if dimension is not None and dimension < len(shape) - over else "is over all that is divided"
    if pointwise:
        places = {len(one) - each for one, each in given if each is not None}
        return "" if len(places) == 1 else "brings different dimensions together"
    return "" if packet in _ELEMENTWISE_OPS else "is not known to work on a part"


def _is_fused_attention(packet: Any) -> bool:
    """Return whether an operation is fused attention."""
    return "scaled_dot_product" in str(packet)


def _sharded_dim(whole: _Shape, part: _Shape, degree: int) -> int | None:
    """Return the divided dimension of a tensor; None for none. Raises ValueError where shapes differ otherwise."""
    if whole == part:
        return None
    differing = [each for each in range(len(whole)) if len(whole) == len(part) and whole[each] != part[each]]
    if len(differing) != 1 or whole[differing[0]] != degree * part[differing[0]]:
        raise ValueError(f"makes {part} of a part, and {whole} of the whole")
    return differing[0]


def _tensor_shapes(whole: TracedOp, part: TracedOp) -> list[tuple[_Shape, _Shape]]:
    """Return pairs of shapes of the tensor arguments."""
    pairs = zip(whole.given, part.given, strict=True)
    return [
        (one.shape, other.shape)
        for one, other in pairs
        if isinstance(one, TracedTensor) and isinstance(other, TracedTensor)
    ]


def _plain_arguments(event: TracedOp) -> list[Any]:
    """Return the arguments that are not tensors."""
    return [each for each in event.given if not isinstance(each, TracedTensor)]


def _flat_arguments(args: Any, kwargs: Any) -> Iterator[Any]:
    """Yield the arguments, with lists of tensors flattened."""
    for each in (*args, *(kwargs or {}).values()):
        if isinstance(each, list | tuple) and any(isinstance(one, Tensor) for one in each):
            yield from each
        else:
            yield tuple(each) if isinstance(each, list) else each


# --- Sequence parallelism ---------------------------------------------------------------------------------------------


def sequence_parallel_problem(
    model: nn.Module, split: TensorParallelPlan, run: Callable[..., object], degree: int, where: str
) -> str:
    """Return why tokens cannot be divided between the divided layers; empty where they can.

    `run` calls a model without data, with `rows` of them.
    """
    for rows in (1, 2):  # one row hides views
        meta_model, group = meta_copy(model).train(), _MetaGroup(index=0, size=degree, sequence=True)
        shard_layers(meta_model, split, group, where)
        try:
            with torch.enable_grad():
                run(meta_model, rows=rows)
        except Exception as error:
            return f"without data it raised {summarize_error(error)}"
        if group.shortest < degree:
            return f"there are {group.shortest} tokens, and {degree} ranks to divide them"
        if not group.scatters:
            return "no divided layer ends with a sum over the ranks"
        for what, before in group.asks:
            if 0 < before < group.scatters:
                return f"it needs all for {what}"
    return ""


def divides_tokens(
    model: nn.Module, columns: Mapping[str, Tensor], call: ModelCall, split: TensorParallelPlan, rows: int
) -> bool:
    """Return whether two ranks can divide the tokens between the divided layers of a model; see `plan_layers`."""
    run = meta_runner(columns, call, rows)
    try:
        return bool(split.roles) and not sequence_parallel_problem(model, split, run, 2, "profile")
    except JobError:
        return False


@dataclass(kw_only=True)
class _MetaGroup(TensorParallelGroup):
    """One rank of a group without the others, on the meta device, where nothing is sent and no numbers are drawn."""

    asks: list[tuple[str, int]] = field(default_factory=list)  # what gathered tokens, with the reduce-scatters before
    scatters: int = 0  # number of reduce-scatters so far
    shortest: int = 2**62  # smallest number of tokens that was divided

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    all_reduce_max = all_reduce

    def all_gather(self, tensor: Tensor, width: int, dim: int = -1) -> Tensor:
        shape = [*tensor.shape]
        shape[dim] = width
        return tensor.new_empty(shape)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        self.scatters, self.shortest = self.scatters + 1, min(self.shortest, tensor.shape[dim])
        return tensor.narrow(dim, 0, self.own_range(tensor.shape[dim])[1]).clone()

    def fork_rng(self, device: torch.device) -> None:
        pass

    def restore_rng(self) -> None:
        pass

    def before_gather(self, func: Any) -> None:
        self.asks.append((str(func._overloadpacket), self.scatters))
