"""Which calls and values a model's forward is made of, seen from outside its modules: what cutting it follows.

One forward on the meta device, where tensors have shapes and no memory, tells all of it. A forward consists of calls of
modules that lie in one section each, and of what it does between them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from trainwright.core.errors import JobError

Forward = Callable[[nn.Module, Sequence[Tensor]], Any]


class Key(NamedTuple):
    """A value: which tensor of what the n-th call, function between calls, or input gave."""

    source: Literal["input", "call", "glue"]
    number: int
    leaf: int = 0


@dataclass(frozen=True, kw_only=True)
class Call:
    """A module's call that a forward makes from between modules.

    Attributes:
        name: of the module.
        section: in which it begins.
        whole: it ends there too.
        begins: it is the section's first.
    """

    name: str
    section: int
    whole: bool
    begins: bool


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a call gave: tensors by their keys, all else as it was."""

    spec: TreeSpec
    leaves: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Route:
    """One forward on so many rows.

    Attributes:
        calls: in order.
        results: of each whole call, by its number.
        values: each value as it was made, on the meta device.
        taken: for each section the values that it or later ones need and earlier ones made, in the order of making.
        users: sections that use each parameter and buffer, by its first name.
    """

    calls: tuple[Call, ...]
    results: Mapping[int, Result]
    values: Mapping[Key, Tensor]
    taken: tuple[tuple[Key, ...], ...]
    users: Mapping[str, frozenset[int]]


class Watched:
    """A module tree whose chosen modules tell a follower of their calls before they run.

    Args:
        model: the tree.
        names: of the modules chosen.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.model = model
        self.follower: Follower | None = None
        for name in names:
            module = model.get_submodule(name)
            module.forward = partial(self._called, name, module.forward)

    def _called(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        follower = self.follower
        if follower is None or follower.inside:
            return forward(*args, **kwargs)
        return follower.call(name, forward, args, kwargs)

    @contextmanager
    def followed(self, follower: Follower) -> Iterator[None]:
        """Within, the follower hears of everything."""
        self.follower = follower
        try:
            with follower:
                yield
        finally:
            self.follower = None


class Follower(TorchFunctionMode):
    """Hears of what a forward does between modules, and of calls of the modules watched.

    Attributes:
        inside: such a call runs as a whole: nothing is to be heard of.
    """

    inside = False

    def call(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A watched module is called."""
        raise NotImplementedError

    def glue(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function of torch is called between modules."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inside:
            return func(*args, **(kwargs or {}))
        return self.glue(func, args, kwargs or {})

    def whole(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call without hearing of what happens in it."""
        self.inside = True
        try:
            with _pop_mode_temporarily():
                return forward(*args, **kwargs)
        finally:
            self.inside = False


class Surveyor:
    """Follows forwards of a model that is to be cut.

    Args:
        model: on the meta device.
        entries: names of the modules with whose first calls the sections from the second on begin.
        forward: calls a model with its inputs.
        where: the rank, for errors.
    """

    def __init__(self, model: nn.Module, entries: Sequence[str], forward: Forward, where: str) -> None:
        self._model, self._entries, self._forward, self._where = model, entries, forward, where
        self._watched: Watched | None = None
        self.names: frozenset[str] = frozenset()

    @torch.enable_grad()  # whoever asks: it tells what gets a gradient
    def route(self, inputs: Sequence[Tensor]) -> Route:
        """Follow one forward on inputs on the meta device.

        Raises:
            JobError: the forward looks at values, or does not call the entries in their order.
        """
        calls = self._calls(inputs)
        if self._watched is None:
            self.names = frozenset(call.name for call in calls)
            self._watched = Watched(self._model, sorted(self.names))
        calls = [call for call in calls if call.name in self.names]
        follower = _Notes(self._model, calls, inputs)
        with self._watched.followed(follower):
            outputs = self._tried(inputs)
        return follower.route(outputs)

    def _calls(self, inputs: Sequence[Tensor]) -> list[Call]:
        """Outermost calls that lie in one section, and those with which one begins."""
        names = {module: name for name, module in self._model.named_modules()}
        events = _Events()
        handles = [
            handle
            for module, name in names.items()
            for handle in (
                module.register_forward_pre_hook(partial(events.begin, name)),
                module.register_forward_hook(events.end),
            )
        ]
        try:
            self._tried(inputs)
        finally:
            for handle in handles:
                handle.remove()
        begins = self._begins(events, names)
        outer = list(_outer(events.spans, begins))
        kept = {name for name, _, whole in outer if whole} | {name for name, begin, _ in outer if begin in begins}
        return [
            Call(name=name, section=sum(each <= begin for each in begins), whole=whole, begins=begin in begins)
            for name, begin, whole in outer
            if name in kept
        ]

    def _begins(self, events: _Events, names: Mapping[nn.Module, str]) -> list[int]:
        """When the sections from the second on begin."""
        found: list[int] = []
        for entry in self._entries:
            try:
                name = names[self._model.get_submodule(entry)]
            except AttributeError:
                raise self._wrong(f"the model has no module {entry!r} to be cut at") from None
            first = next((begin for called, begin, _ in events.spans if called == name), None)
            if first is None:
                raise self._wrong(f"the model cannot be cut at {entry!r}: its forward does not call that module")
            if found and first <= found[-1]:
                raise self._wrong(f"the model cannot be cut at {entry!r}: it is called before the cut ahead of it")
            found.append(first)
        return found

    def _tried(self, inputs: Sequence[Tensor]) -> Any:
        """A forward without data."""
        try:
            return self._forward(self._model, inputs)
        except Exception as error:
            what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise self._wrong(
                f"the model cannot be cut: followed without data, its forward raised {what}: let it not look at the "
                'values of tensors, or use strategy="data_parallel" or "sharded"'
            ) from error

    def _wrong(self, problem: str) -> JobError:
        return JobError([problem], where=self._where)


class _Events:
    """When each module's calls begin and end: (name, begin, end), by begin."""

    def __init__(self) -> None:
        self._now = 0
        self._open: list[int] = []
        self._found: list[tuple[str, int, int]] = []

    @property
    def spans(self) -> list[tuple[str, int, int]]:
        return self._found

    def begin(self, name: str, _module: nn.Module, _args: Any) -> None:
        self._now += 1
        self._open.append(len(self._found))
        self._found.append((name, self._now, self._now))

    def end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._now += 1
        number = self._open.pop()
        self._found[number] = (*self._found[number][:2], self._now)


class _Notes(Follower):
    """Writes down where each value is made and last used."""

    def __init__(self, model: nn.Module, calls: Sequence[Call], inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._model, self._calls = model, tuple(calls)
        self._number, self._glued, self._section = 0, 0, 0
        self._results: dict[int, Result] = {}
        self._values: dict[Key, Tensor] = {}  # kept alive, so that no other takes an id
        self._keys: dict[int, Key] = {}
        self._made: dict[Key, int] = {}
        self._used: dict[Key, int] = {}
        self._users: defaultdict[str, set[int]] = defaultdict(set)
        named = (*model.named_parameters(), *model.named_buffers())
        self._names = {id(tensor): name for name, tensor in named}
        for number, tensor in enumerate(inputs):
            self._make(tensor, Key("input", number))

    def call(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call, number = self._calls[self._number], self._number
        assert call.name == name, "two forwards in a row are the same"
        self._number += 1
        self._section = max(self._section, call.section)
        self._use((args, kwargs))
        if not call.whole:
            return forward(*args, **kwargs)
        module = self._model.get_submodule(name)
        for tensor in (*module.parameters(), *module.buffers()):
            self._users[self._names[id(tensor)]].add(self._section)
        output = self.whole(forward, args, kwargs)
        leaves, spec = tree_flatten(output)
        known = tuple(self._make(leaf, Key("call", number, place)) for place, leaf in enumerate(leaves))
        self._results[number] = Result(spec=spec, leaves=known)
        return output

    def glue(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = self._glued
        self._glued += 1
        self._use((args, kwargs))
        output = func(*args, **kwargs)
        for place, leaf in enumerate(tree_leaves(output)):
            self._make(leaf, Key("glue", number, place))
        return output

    def route(self, outputs: Any) -> Route:
        """All of it, once the forward is over."""
        self._use(outputs)
        sections = 1 + max((call.section for call in self._calls), default=0)
        return Route(
            calls=self._calls,
            results=self._results,
            values=self._values,
            taken=tuple(
                tuple(key for key in self._values if self._made[key] < section <= self._used.get(key, -1))
                for section in range(sections)
            ),
            users={name: frozenset(sections) for name, sections in self._users.items()},
        )

    def _make(self, leaf: Any, key: Key) -> Any:
        """Know a value that is new; gives the key of a tensor, and all else as it is."""
        if not isinstance(leaf, Tensor) or id(leaf) in self._names:
            return leaf
        if id(leaf) not in self._keys:
            self._keys[id(leaf)], self._values[key], self._made[key] = key, leaf, self._section
        return self._keys[id(leaf)]

    def _use(self, given: Any) -> None:
        for leaf in tree_leaves(given):
            if isinstance(leaf, Tensor):
                if (key := self._keys.get(id(leaf))) is not None:
                    self._used[key] = self._section
                if (name := self._names.get(id(leaf))) is not None:
                    self._users[name].add(self._section)


def _outer(spans: Sequence[tuple[str, int, int]], begins: Sequence[int]) -> Iterator[tuple[str, int, bool]]:
    """Calls that are not inside one which lies in a section: name, begin, and whether it lies in one itself."""
    until = 0
    for name, begin, end in spans:
        if begin > until:
            whole = not any(begin < each < end for each in begins)
            yield name, begin, whole
            until = end if whole else until


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of a module tree on the meta device; nothing is copied that has memory."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(each): bare(each) for each in tensors})


def bare(tensor: Tensor) -> Tensor:
    """The same on the meta device."""
    made = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
