"""What a model's forward is made of, seen from outside its modules, and how it is listened to.

A forward consists of calls of modules that lie in one section each, and of what it does between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright.strategies.torch.torch_compat import TreeSpec, pop_mode_temporarily

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
        glue: the functions of torch that are called between them, in order.
        results: of each whole call, by its number.
        values: each value as it was made, on the meta device.
        same: what a call or function gave that was a value already.
        taken: for each section the values that it or later ones need and earlier ones made, in the order of making.
        given: the same as they are then, on the meta device: shape, type, and whether a gradient goes back.
        changed: of these, what it or later ones change in place.
        users: sections that use each parameter and buffer, by its first name.
        counting: buffers that the forward changes between calls.
    """

    calls: tuple[Call, ...]
    glue: tuple[Any, ...]
    results: Mapping[int, Result]
    values: Mapping[Key, Tensor]
    same: Mapping[Key, Key]
    taken: tuple[tuple[Key, ...], ...]
    given: tuple[tuple[Tensor, ...], ...]
    changed: tuple[frozenset[Key], ...]
    users: Mapping[str, frozenset[int]]
    counting: frozenset[str]


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

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """Within, nothing is to be heard of."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def whole(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call without hearing of what happens in it."""
        with self.deaf(), pop_mode_temporarily():
            return forward(*args, **kwargs)
