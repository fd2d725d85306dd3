"""Imports torch's compiler only when something is compiled.

The first optimizer, the first DistributedDataParallel and FSDP2's hooks import `torch._dynamo`, which takes over a
second of a core and tens of megabytes in each process, only to ask the compiler to keep out of the way. Here a module
stands in for it that answers these few questions; at any other one, and at the import of anything inside it, the
compiler itself is imported and takes its place, with nothing left behind.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from trainwright.strategies.torch.torch_compat import COMPILER

_NAME = COMPILER
_SETTINGS = f"{_NAME}.config"  # stands by itself, and is all that tensors without data ask for; the compiler keeps it
_DISABLED = "__dynamo_disable"  # where `torch._compile._disable_dynamo` keeps what `disable` gave it


class _DynamoStandIn(ModuleType):
    """Stands in for `torch._dynamo` and answers what eager training asks it."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(_NAME)
        self.__spec__, self.__path__ = spec, spec.submodule_search_locations or []
        self._passed: list[tuple[Any, Any, bool]] = []
        self.utils = _DynamoSubmodule(
            self, "utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"
        )  # the compiler's default
        self.trace_rules = _DynamoSubmodule(self, "trace_rules", clear_lru_cache=lambda: None)

    def __getattr__(self, name: str) -> Any:
        """Import the real compiler for any other attribute."""
        if name.startswith("__"):
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        return getattr(self._real(), name)

    def disable(
        self, fn: Callable[..., Any] | None = None, recursive: bool = True, *, reason: Any = None, wrapping: bool = True
    ) -> Any:
        """Return a function that the compiler must not trace; unchanged as long as there is no compiler."""
        postponed = sys.modules.get(_NAME) is self
        if postponed and wrapping and recursive and isinstance(fn, FunctionType):
            return self._kept_out(fn, reason)
        if fn is None or wrapping or not postponed:
            return self._real().disable(fn, recursive, reason=reason, wrapping=wrapping)

        def passed(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        self._passed.append((fn, passed, recursive))
        return passed

    def _kept_out(self, fn: FunctionType, reason: Any) -> Any:
        """Mark a function so that a later compiler does not trace it."""

        @functools.wraps(fn)
        def alone(*args: Any, **kwargs: Any) -> Any:
            if sys.modules.get(_NAME) is self:
                return fn(*args, **kwargs)
            return self._real().disable(fn, reason=reason)(*args, **kwargs)

        vars(alone).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason, _torchdynamo_orig_callable=fn)
        return alone

    def graph_break(self, msg: str = "") -> None:
        """Do nothing: nothing is traced."""

    def _real(self) -> ModuleType:
        """Import and return the real compiler."""
        first = sys.modules.get(_NAME) is self
        if first:
            sys.modules.pop(_NAME, None)
        real = importlib.import_module(_NAME)
        for fn, passed, recursive in self._passed if first else ():
            if getattr(fn, _DISABLED, None) is passed:
                setattr(fn, _DISABLED, real.disable(fn, recursive, wrapping=False))
        return real


class _DynamoSubmodule(SimpleNamespace):
    """Stands in for a submodule of `torch._dynamo`."""

    def __init__(self, module: _DynamoStandIn, name: str, **answers: Any) -> None:
        super().__init__(**answers)
        self._whole: Callable[[], ModuleType] = lambda: getattr(module._real(), name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole(), name)


class _DynamoFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the real compiler before any of its submodules."""

    def __init__(self, module: _DynamoStandIn) -> None:
        self._module = module
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(f"{_NAME}.") or name == _SETTINGS or sys.modules.get(_NAME) is not self._module:
            return None
        self._module._real()
        if name not in sys.modules:
            return None
        self._specs[name] = sys.modules[name].__spec__
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import replaced."""
        module.__spec__ = self._specs.pop(module.__name__)


def postpone() -> None:
    """Import `torch._dynamo` only when it is needed. Does nothing where it has been imported."""
    spec = None if _NAME in sys.modules else importlib.util.find_spec(_NAME)
    if spec is not None:
        module = _DynamoStandIn(spec)
        sys.modules[_NAME] = module
        sys.meta_path.insert(0, _DynamoFinder(module))
