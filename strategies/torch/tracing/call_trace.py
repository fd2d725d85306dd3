"""Traces a model's forward for a pipeline: calls of modules, functions between them, and the values that pass.

A forward consists of calls of modules that lie in one section each, and of functions of torch between the calls. One
forward on the meta device, where tensors have shapes but no memory, shows all of them.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.core.errors import JobError
from trainwright.strategies.torch.torch_compat import (
    TorchDispatchMode,
    TreeSpec,
    pop_mode_temporarily,
    storage_key,
    tensor_leaves,
    tree_flatten,
    tree_leaves,
    tree_map,
)
from trainwright.strategies.torch.torch_errors import summarize_error

ForwardFunction = Callable[[nn.Module, Sequence[Tensor]], Any]


class ValueKey(NamedTuple):
    """The key of a value: which output tensor of the n-th call, function between calls, or input."""

    source: Literal["input", "call", "between_calls"]
    number: int
    leaf: int = 0


@dataclass(frozen=True, kw_only=True)
class _ModuleCall:
    """A call of a module that lies in one section."""

    name: str
    section: int  # in which it begins
    whole: bool  # it ends there too
    begins: bool  # it is the section's first


@dataclass(frozen=True, kw_only=True)
class ForwardRoute:
    """The route of one forward with a certain number of rows."""

    calls: tuple[_ModuleCall, ...]  # in order
    between_calls: tuple[Any, ...]  # the functions of torch that are called between them, in order
    # of each whole call, by its number: tensors by their keys, other values as they are
    results: Mapping[int, tuple[tuple[Any, ...], TreeSpec]]
    values: Mapping[ValueKey, Tensor]  # each value as it was made, on the meta device
    same: Mapping[ValueKey, ValueKey]  # what a call or function gave that was a value already
    # for each section the values that it or later ones need and earlier ones made, in the order of making
    taken: tuple[tuple[ValueKey, ...], ...]
    # the same as they are then, on the meta device: shape, type, and whether a gradient goes back
    given: tuple[tuple[Tensor, ...], ...]
    changed: tuple[frozenset[ValueKey], ...]  # of these, what it or later ones change in place
    users: Mapping[str, frozenset[int]]  # sections that use each parameter and buffer, by its first name
    counting: frozenset[str]  # buffers that the forward changes between calls


class WatchedModel:
    """A module tree whose modules of these names report their calls to a listener."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.model = model
        self.follower: CallListener | None = None
        for name in names:
            module = model.get_submodule(name)
            module.forward = partial(self._called, name, module.forward)

    def _called(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        follower = self.follower
        if follower is None or follower.inside:
            return forward(*args, **kwargs)
        return follower.call(name, forward, args, kwargs)

    @contextmanager
    def followed(self, follower: CallListener) -> Iterator[None]:
        """Report calls to the listener inside this context."""
        self.follower = follower
        try:
            with follower:
                yield
        finally:
            self.follower = None


class CallListener(TorchFunctionMode):
    """Listens to the functions that a forward calls between modules, and to calls of watched modules.

    Attributes:
        inside: such a call runs as a whole, and nothing is reported.
    """

    inside = False

    def call(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle the call of a watched module."""
        raise NotImplementedError

    def between_calls(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a torch function that is called between modules."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inside:
            return func(*args, **(kwargs or {}))
        return self.between_calls(func, args, kwargs or {})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Report nothing inside this context."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def whole(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call without reports from inside it."""
        with self.paused(), pop_mode_temporarily():
            return forward(*args, **kwargs)


# --- The route of a forward -------------------------------------------------------------------------------------------


class ForwardTracer:
    """Traces forwards of a model that is to be cut.

    Args:
        model: on the meta device.
        entries: names of the modules with whose first calls the sections from the second on begin.
    """

    def __init__(self, model: nn.Module, entries: Sequence[str], forward: ForwardFunction, where: str) -> None:
        self._model, self._entries, self._forward, self._where = model, entries, forward, where
        self._watched: WatchedModel | None = None
        self.names: frozenset[str] = frozenset()

    @torch.enable_grad()  # whoever asks: it tells what gets a gradient
    def route(self, inputs: Sequence[Tensor]) -> ForwardRoute:
        """Trace one forward on inputs on the meta device.

        Raises:
            JobError: the forward looks at values, or does not call the entries in their order.
        """
        calls = self._calls(inputs)
        if self._watched is None:
            self.names = frozenset(call.name for call in calls)
            self._watched = WatchedModel(self._model, sorted(self.names))
        calls = [call for call in calls if call.name in self.names]
        notes = _ValueRecorder(self._model, calls, inputs, self._where)
        with torch.device("meta"), self._watched.followed(notes):
            outputs = self._tried(inputs)
        return notes.route(outputs)

    def _calls(self, inputs: Sequence[Tensor]) -> list[_ModuleCall]:
        """Return the outermost calls that lie in one section, and those with which a section begins."""
        names = {module: name for name, module in self._model.named_modules()}
        heard = [name.split(".") for module, name in names.items() if module._forward_hooks]
        events = _CallSpans()
        handles = [
            handle
            for module, name in names.items()
            for handle in (
                module.register_forward_pre_hook(partial(events.begin, name)),
                module.register_forward_hook(events.end),
            )
        ]
        try:
            with torch.device("meta"):
                self._tried(inputs)
        finally:
            for handle in handles:
                handle.remove()
        begins = self._begins(events, names)
        outer = list(
            _outermost_calls(events.spans, begins, {".".join(path[:end]) for path in heard for end in range(len(path))})
        )
        kept = {name for name, _, whole in outer if whole} | {name for name, begin, _ in outer if begin in begins}
        return [
            _ModuleCall(name=name, section=sum(each <= begin for each in begins), whole=whole, begins=begin in begins)
            for name, begin, whole in outer
            if name in kept
        ]

    def _begins(self, events: _CallSpans, names: Mapping[nn.Module, str]) -> list[int]:
        """Return when the sections from the second on begin."""
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
        """Run a forward without data, in which values made of constants alone are known."""
        try:
            with MetaValueMode():
                return self._forward(self._model, inputs)
        except JobError:
            raise
        except Exception as error:
            what = summarize_error(error, limit=300)
            raise self._wrong(
                f"the model cannot be cut: traced without data, its forward raised {what}: it must not read "
                "values of its inputs (a model of Hugging Face's looks at its mask unless it is loaded with "
                'attn_implementation="eager"), or use strategy="data_parallel" or "sharded"'
            ) from error

    def _wrong(self, problem: str) -> JobError:
        return JobError([problem], where=self._where)


class _CallSpans:
    """Records when each module's calls begin and end: (name, begin, end), by begin."""

    def __init__(self) -> None:
        self._now = 0
        self._open: list[int] = []
        self.spans: list[tuple[str, int, int]] = []

    def begin(self, name: str, _module: nn.Module, _args: Any) -> None:
        self._now += 1
        self._open.append(len(self.spans))
        self.spans.append((name, self._now, self._now))

    def end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._now += 1
        number = self._open.pop()
        self.spans[number] = (*self.spans[number][:2], self._now)


class _ValueRecorder(CallListener):
    """Records where each value is made and last used."""

    def __init__(self, model: nn.Module, calls: Sequence[_ModuleCall], inputs: Sequence[Tensor], where: str) -> None:
        super().__init__()
        self._model, self._calls, self._where = model, tuple(calls), where
        self._number, self._section = 0, 0
        self._glue: list[Any] = []
        self._results: dict[int, tuple[tuple[Any, ...], TreeSpec]] = {}
        self._values: dict[ValueKey, Tensor] = {}  # kept alive, so that no other takes an id
        self._keys: dict[int, ValueKey] = {}
        self._same: dict[ValueKey, ValueKey] = {}
        self._made: dict[ValueKey, int] = {}
        self._used: dict[ValueKey, int] = {}
        self._users: defaultdict[str, set[int]] = defaultdict(set)
        self._begins: list[dict[ValueKey, tuple[int, Tensor]]] = [{}]  # all values, when each section begins
        self._held = [*model.named_parameters(), *model.named_buffers()]  # alive too, whatever the forward does
        self._names = {id(tensor): name for name, tensor in self._held}
        self._between: set[str] = set()  # what is used between calls
        self._before = [tensor._version for _, tensor in self._held]
        for number, tensor in enumerate(inputs):
            self._make(tensor, ValueKey("input", number))

    def call(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call, number = self._calls[self._number], self._number
        assert call.name == name, "two forwards in a row are the same"
        if _called_by_checkpoint():
            raise self._wrong(
                f"{name!r} is called through torch.utils.checkpoint, which would call it again without its section: "
                'leave that out, and let the plan compute again: plan="...,recompute=full"'
            )
        self._number += 1
        if call.section > self._section:
            self._section = call.section
            with self.paused():
                self._begins.append({key: (each._version, meta_tensor(each)) for key, each in self._values.items()})
        self._use((args, kwargs))
        if not call.whole:
            return forward(*args, **kwargs)
        module = self._model.get_submodule(name)
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) in self._names:
                self._users[self._names[id(tensor)]].add(self._section)
        output = self.whole(forward, args, kwargs)
        leaves, spec = tree_flatten(output)
        known = tuple(self._make(leaf, ValueKey("call", number, place)) for place, leaf in enumerate(leaves))
        self._results[number] = known, spec
        return output

    def between_calls(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = len(self._glue)
        self._glue.append(func)
        self._between |= self._use((args, kwargs))
        output = func(*args, **kwargs)
        for place, leaf in enumerate(tree_leaves(output)):
            self._make(leaf, ValueKey("between_calls", number, place))
        return output

    def route(self, outputs: Any) -> ForwardRoute:
        """Return the whole route, once the forward has ended."""
        self._use(outputs)
        taken = tuple(
            tuple(key for key in self._values if self._made[key] < section <= self._used.get(key, -1))
            for section in range(len(self._begins))
        )
        users = {name: frozenset(sections) for name, sections in self._users.items()}
        changing = self._changing()
        for name in sorted(changing):
            if len(users.get(name, ())) > 1:
                raise self._wrong(f"buffer {name!r} is changed, and used on both sides of a cut")
        return ForwardRoute(
            calls=self._calls,
            between_calls=tuple(self._glue),
            results=self._results,
            values=self._values,
            same=self._same,
            taken=taken,
            given=tuple(tuple(begin[key][1] for key in keys) for keys, begin in zip(taken, self._begins, strict=True)),
            changed=tuple(map(self._changed, taken, self._begins)),
            users=users,
            counting=frozenset(changing & self._between),
        )

    def _changing(self) -> set[str]:
        """Return the buffers that the forward changed or replaced."""
        now = {name: id(buffer) for name, buffer in self._model.named_buffers()}
        return {
            name
            for (name, tensor), version in zip(self._held, self._before, strict=True)
            if not isinstance(tensor, nn.Parameter) and (tensor._version != version or now.get(name) != id(tensor))
        }

    def _changed(self, taken: Sequence[ValueKey], begin: Mapping[ValueKey, tuple[int, Tensor]]) -> frozenset[ValueKey]:
        """Return values that later code changes in place. Raises JobError where another passed value shares memory."""
        changed = frozenset(key for key in taken if self._values[key]._version != begin[key][0])
        memories = Counter(storage_key(self._values[key]) for key in taken)
        if any(memories[storage_key(self._values[key])] > 1 for key in changed):
            raise self._wrong("it changes a value in place, and two views of that value are needed later")
        return changed

    def _make(self, leaf: Any, key: ValueKey) -> Any:
        """Register a new value; return the key of a tensor, and other values as they are."""
        if not isinstance(leaf, Tensor) or id(leaf) in self._names:
            return leaf
        known = self._keys.setdefault(id(leaf), key)
        if known == key:
            self._values[key], self._made[key] = leaf, self._section
        else:
            self._same[key] = known
        return known

    def _use(self, given: Any) -> set[str]:
        """Note the use of values; return the names of the parameters and buffers among them."""
        names = set()
        for leaf in tree_leaves(given):
            if not isinstance(leaf, Tensor):
                continue
            if (key := self._keys.get(id(leaf))) is not None:
                self._used[key] = self._section
            elif (name := self._names.get(id(leaf))) is not None:
                self._users[name].add(self._section)
                names.add(name)
            elif leaf.is_meta:
                raise self._wrong(
                    f"a value of shape {tuple(leaf.shape)} comes from where it cannot be followed: return it from the "
                    "module's forward instead of keeping it as an attribute"
                )
        return names

    def _wrong(self, problem: str) -> JobError:
        return JobError([f"the model cannot be cut there: {problem}"], where=self._where)


def _called_by_checkpoint() -> bool:
    """Return whether the current call comes through torch.utils.checkpoint."""
    frame = sys._getframe().f_back
    while frame is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
        frame = frame.f_back
    return frame is not None


def _outermost_calls(
    spans: Sequence[tuple[str, int, int]], begins: Sequence[int], opened: Set[str]
) -> Iterator[tuple[str, int, bool]]:
    """Return the outermost calls: name, begin, and whether the call lies in one section.

    Args:
        opened: modules that have others inside with hooks of the user's, which may keep what these give: they count as
            if they lay in no section, so that it can be followed.
    """
    until = 0
    for name, begin, end in spans:
        if begin > until:
            whole = name not in opened and not any(begin < each < end for each in begins)
            yield name, begin, whole
            until = end if whole else until


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a module tree on the meta device, without a copy of its data."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(each): meta_tensor(each) for each in tensors})


def meta_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor on the meta device, without a graph."""
    made = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


# --- Values of meta tensors -------------------------------------------------------------------------------------------


_log = logging.getLogger(__name__)
_INDEXED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
_LARGEST = 2**22  # elements of a tensor whose values are followed


class MetaValueMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Repeats on the CPU what a model computes from its inputs and constants alone, without its parameters.

    Masks, positions and lengths are such, and cheap; what depends on a parameter has no value, and a flow that asks for
    it stops the trace.

    Args:
        inputs: (on the meta device, with values) of each; none where a flow must be the same for all of them.

    Attributes:
        asked: the flow has asked for values.
    """

    def __init__(self, inputs: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: Any = WeakIdKeyDictionary()
        self.asked = False
        for meta, real in inputs:
            self._known[meta] = real.clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the meta device, and on the values where all of them are known."""
        kwargs = kwargs or {}
        given = tensor_leaves((args, kwargs))
        known = all(each in self._known for each in given) and torch.Tag.nondeterministic_seeded not in func.tags
        if known and torch.Tag.data_dependent_output in func.tags:
            self.asked = True
            return self._real(func, args, kwargs)
        if known and torch.Tag.dynamic_output_shape in func.tags:
            return tree_map(self._meta, self._real(func, args, kwargs))
        if func._overloadpacket in _INDEXED:
            args = (args[0], self._places(args[1]), *args[2:])
        outputs = func(*args, **kwargs)
        made = tensor_leaves(outputs)
        small = all(each.numel() <= _LARGEST for each in made)
        real = self._tried(func, args, kwargs) if known and made and small else None
        for number, each in enumerate(made):
            if real is None:
                self._known.pop(each, None)  # one that was known and was written to
            else:
                self._known[each] = real[number]
        return outputs

    def _tried(self, func: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
        """Return the values of an operation's outputs; None where the CPU cannot compute them."""
        try:
            return tensor_leaves(self._real(func, args, kwargs))
        except (RuntimeError, NotImplementedError) as error:
            _log.debug("the values that %s makes are not followed: %s", func, error)
            return None

    def _real(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*tree_map(self._value, args), **tree_map(self._value, kwargs))

    def _places(self, indices: Any) -> list[Any]:
        """Return where a mask with known values is true: the shape of the result depends on them."""
        places: list[Any] = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype == torch.bool and index in self._known:
                places += [self._meta(each) for each in self._known[index].nonzero(as_tuple=True)]
            else:
                places.append(index)
        return places

    def _meta(self, real: Any) -> Any:
        if not isinstance(real, Tensor):
            return real
        made = real.to("meta")
        self._known[made] = real
        return made

    def _value(self, each: Any) -> Any:
        if isinstance(each, Tensor):
            return self._known[each]
        return torch.device("cpu") if isinstance(each, torch.device) else each
