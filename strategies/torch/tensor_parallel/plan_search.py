"""Which layers tensor parallelism divides, and how: found in what a forward does, and proved on shapes.

`division` says which linear layers may be divided, by what becomes of their outputs. What a forward makes of their
sizes is then tried without data: with the layers' outputs as short as one rank's, it must do the same as with all of
them, on as short a part of each tensor. A forward that splits outputs by a number of heads, an attribute of its
module, is given a share of that number, where this makes it come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

import torch
from torch import nn

from trainwright.core.errors import JobError
from trainwright.strategies.torch.pipeline.call_survey import skeleton
from trainwright.strategies.torch.profiling.op_trace import Trace, storage
from trainwright.strategies.torch.tensor_parallel.layers import ROLES, Split, dimensions, flipped
from trainwright.strategies.torch.tensor_parallel.trace_equivalence import Event, Recorder, opening, parted

_MOST = 3  # attributes of a block that are changed together
Run = Callable[[nn.Module], object]


class Splitter:
    """Finds how a model is divided.

    Args:
        model: whole, in host memory; it is not changed.
        run: calls a model without data, as for a sample of one row.
        degree: ranks that divide it; None for as few as share the heads of its attention.
        where: the rank, for errors.
    """

    def __init__(self, model: nn.Module, run: Run, degree: int | None, where: str) -> None:
        self._model, self._bones, self._run = model, skeleton(model), run
        self._degree, self._where = degree or 2, where
        self._any = degree is None
        self._names = {module: name for name, module in self._bones.named_modules()}
        self._reasons: list[str] = []

    def planned(self, plan: Mapping[str, str]) -> Split:
        """As the job says, by module name or pattern. Raises JobError where that is not possible."""
        roles = self._named(plan)
        for name, role in roles.items():
            problem = self._unfit(name, role)
            if problem:
                raise JobError([f"tensor_plan: module {name!r} cannot be {role!r}: {problem}"], where=self._where)
        block = tuple(name for name, role in roles.items() if role in ("column", "row"))
        split = self._proved(roles, [block] if block else [])
        if split is None:
            raise JobError([f"tensor_plan cannot be followed: {self._reasons[-1]}"], where=self._where)
        return split

    def found(self, traced: Callable[[nn.Module], Trace]) -> Split:
        """What may be divided and comes out. Raises JobError where nothing does.

        Args:
            traced: follows one forward of a model without data.
        """
        trace = self._followed(traced)
        split = Split()
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
                    f"no layer of the model can be divided by {self._degree}: {why}; say by tensor_plan= which modules "
                    "are, or use another strategy"
                ],
                where=self._where,
            )
        return split

    def _followed(self, traced: Callable[[nn.Module], Trace]) -> Trace:
        """One forward. Raises JobError where it cannot be followed, or the ranks cannot share its heads."""
        try:
            trace = traced(self._bones)
        except Exception as error:
            what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise JobError(
                [f"the model cannot be divided by layers: followed without data, its forward raised {what}"],
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

    def _kinds(self, trace: Trace) -> Iterator[tuple[dict[str, str], list[tuple[str, ...]]]]:
        """Blocks that may be divided, with their modules' roles; those in modules of the same classes together."""
        named = self._weights(nn.Embedding, False)
        kinds: dict[tuple[str, ...], tuple[dict[str, str], list[tuple[str, ...]]]] = {}
        for columns, rows in trace.division.blocks(trace.heads or self._degree):
            block = {named[key]: "column" for key in columns & named.keys()}
            block |= {named[key]: "row" for key in rows & named.keys()}
            problems = [f"module {name!r}: {why}" for name, role in block.items() if (why := self._unfit(name, role))]
            if problems or len(block) < len(columns | rows):
                self._reasons += problems or ["a product with a parameter that is no linear layer's"]
                continue
            kind = tuple(sorted({type(self._parent(name)).__qualname__ for name in block}))
            roles, blocks = kinds.setdefault(kind, ({}, []))
            roles |= block
            blocks.append(tuple(block))
        yield from kinds.values()

    def _weights(self, kind: type[nn.Module], wanted: bool) -> dict[int, str]:
        """Modules of a kind, or of all others, by the storage of their weight."""
        return {
            storage(weight): name
            for module, name in self._names.items()
            if isinstance(module, kind) == wanted and (weight := module._parameters.get("weight")) is not None
        }

    def _ends(self, ends: Mapping[str, str], taken: Mapping[str, str]) -> dict[str, str]:
        """Tables and last layers that can be divided; tied ones together or not at all."""
        good = {name: role for name, role in ends.items() if name not in taken and not self._unfit(name, role)}
        while bad := [name for name in good if not self._whole_use(name, good)]:
            for name in bad:
                del good[name]
        return good

    def _whole_use(self, name: str, roles: Mapping[str, str]) -> bool:
        """Whether all that use a module's parameters divide them alike."""
        module = self._model.get_submodule(name)
        own = {module._parameters[key]: dimension for key, dimension in dimensions(module, roles[name]).items()}
        return all(
            path in roles and dimensions(other, roles[path]).get(key) == own[parameter]
            for path, other in self._model.named_modules()
            for key, parameter in other._parameters.items()
            if parameter in own
        )

    def _named(self, plan: Mapping[str, str]) -> dict[str, str]:
        """The modules that a plan means."""
        names = [name for name in self._names.values() if name]
        roles: dict[str, str] = {}
        for pattern, role in plan.items():
            meant = [name for name in names if fnmatchcase(name, pattern)]
            if not meant:
                near = get_close_matches(pattern, names, n=1, cutoff=0.0)
                hint = f"; the nearest is {near[0]!r}" if near else ""
                raise JobError([f"tensor_plan names {pattern!r}, which the model has not{hint}"], where=self._where)
            if role not in ROLES:
                near = get_close_matches(role, ROLES, n=1, cutoff=0.0)
                raise JobError(
                    [f"tensor_plan: {role!r} of {pattern!r} is none of {', '.join(ROLES)}; the nearest is {near[0]!r}"],
                    where=self._where,
                )
            roles |= dict.fromkeys(meant, role)
        return roles

    def _unfit(self, name: str, role: str) -> str:
        """Why a module cannot be divided so; empty where it can."""
        module = self._model.get_submodule(name)
        if role == "vocabulary":
            plain = type(module) is nn.Embedding and module.max_norm is None
            plain = plain and not (module.sparse or module.scale_grad_by_freq)
            return "" if plain else "it is no plain nn.Embedding"
        if role == "gathered":
            return "" if type(module) is nn.Linear else "it is no nn.Linear"
        turned = flipped(module)
        if turned is None:
            return "it is no linear layer with a weight and perhaps a bias alone"
        dimension = dimensions(module, role)["weight"]
        weight = module._parameters["weight"]
        assert weight is not None, "a linear layer has one"
        size = weight.shape[dimension]
        return f"its {size} {'outputs' if role == 'column' else 'inputs'} are no multiple of {self._degree}" * bool(
            size % self._degree
        )

    def _parent(self, name: str) -> nn.Module:
        return self._bones.get_submodule(name.rpartition(".")[0])

    def _proved(self, roles: Mapping[str, str], blocks: Sequence[tuple[str, ...]]) -> Split | None:
        """A division of blocks of one kind that comes out, with as few attributes changed as can be."""
        bad = [name for name in roles if not self._whole_use(name, roles)]
        if bad:
            self._fails(roles, f"a parameter of module {bad[0]!r} is also used elsewhere")
            return None
        parents = sorted({name.rpartition(".")[0] for name, role in roles.items() if role in ("column", "row")})
        whole = self._events(roles, 1, {})
        if isinstance(whole, str):
            self._fails(roles, whole)
            return None
        reasons = []
        for chosen in self._choices(parents):
            attributes = {path: self._shares(self._bones.get_submodule(path), chosen) for path in parents}
            why = self._differing(whole, roles, attributes)
            if not why:
                random = frozenset(name for events in whole for name in opening(events))
                return Split(roles=roles, groups=tuple(blocks), attributes=attributes, random=random)
            reasons.append(why)
        self._fails(roles, reasons[0])
        return None

    def _fails(self, roles: Mapping[str, str], why: str) -> None:
        self._reasons.append(f"the block of module {next(iter(roles))!r} does not come out: {why}")

    def _shares(self, module: nn.Module, chosen: Sequence[str]) -> dict[str, int]:
        """One rank's share of some of a module's attributes."""
        return {key: vars(module)[key] // self._degree for key in chosen if _counts(module, key, self._degree)}

    def _differing(
        self, whole: Sequence[list[Event]], roles: Mapping[str, str], attributes: Mapping[str, Mapping[str, int]]
    ) -> str:
        part = self._events(roles, self._degree, attributes)
        if isinstance(part, str):
            return part
        found = (parted(one, other, self._degree) for one, other in zip(whole, part, strict=True))
        return next(filter(None, found), "")

    def _choices(self, parents: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Attributes to change: none, one, and so on."""
        modules = [self._bones.get_submodule(path) for path in parents]
        keys = sorted({key for module in modules for key in vars(module) if _counts(module, key, self._degree)})
        for count in range(_MOST + 1):
            yield from combinations(keys, count)

    def _events(
        self, roles: Mapping[str, str], degree: int, attributes: Mapping[str, Mapping[str, int]]
    ) -> list[list[Event]] | str:
        """What a forward does in training, with gradients, and in evaluation; or what it raised."""
        modes = [(module, module.training) for module in self._bones.modules()]
        found = []
        try:
            for training in (True, False):
                self._bones.train(training)
                standing_in = self._standing_in(roles, degree, attributes)
                with standing_in as recorder, torch.set_grad_enabled(training), recorder:
                    self._run(self._bones)
                if recorder.called != roles.keys():
                    return f"module {next(iter(roles.keys() - recorder.called))!r} is not called by the forward"
                found.append(recorder.events)
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        finally:
            for module, training in modes:
                module.training = training
        return found

    def _widths(self, name: str, role: str, degree: int) -> tuple[int, int, torch.dtype]:
        """What a module is given on each of so many ranks, what it gives, and the type of its weight."""
        module = self._model.get_submodule(name)
        weight = module._parameters["weight"]
        assert weight is not None, "a layer that is divided has one"
        if role == "vocabulary":
            return 0, weight.shape[1], weight.dtype
        given, made = weight.shape if flipped(module) else weight.shape[::-1]
        given, made = given // degree if role == "row" else given, made // degree if role == "column" else made
        return given, made, weight.dtype

    @contextmanager
    def _standing_in(
        self, roles: Mapping[str, str], degree: int, attributes: Mapping[str, Mapping[str, int]]
    ) -> Iterator[Recorder]:
        """Within, the modules give what they would on one of so many ranks."""
        modules = {name: self._bones.get_submodule(name) for name in roles}
        recorder = Recorder({storage(each): name for name, module in modules.items() for each in module.parameters()})
        before = [(module, dict(vars(module))) for module in self._bones.modules()]
        for name, module in modules.items():
            module.forward = recorder.stand_in(name, roles[name], *self._widths(name, roles[name], degree))
            parent = self._parent(name)
            if isinstance(parent, nn.TransformerEncoderLayer):
                parent.activation_relu_or_gelu = 0
        for path, changed in attributes.items():
            vars(self._bones.get_submodule(path)).update(changed)
        try:
            yield recorder
        finally:
            for module, fields in before:
                module.__dict__.clear()
                module.__dict__.update(fields)


def _counts(module: Any, key: str, degree: int) -> bool:
    """Whether an attribute is a number that may count what is divided."""
    value = vars(module).get(key)
    return type(value) is int and value > 1 and not value % degree and not key.startswith("_")
