"""Mutants of the driver and of the run's storage: modules with one node of their syntax tree replaced or deleted."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

import trainwright.driver.state_machine as decide
from tests.simulation.power_cuts import Code

PRODUCT = "trainwright."


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One wrong version of a module.

    Formatting, line breaks and comments do not matter: patterns are compared as syntax trees, without positions.

    Attributes:
        name: what the wrong version does.
        module: the full name of the module that is changed.
        pattern: Python source that equals exactly one node of the module: an expression, or consecutive statements.
        replacement: an expression or statements; nothing deletes the statements of the pattern. The pattern is an
            expression if it and the replacement are single expressions, and otherwise statements.
        function: search only in functions of this name.
        also: kinds of faults that bring the mutant out.
        seed: a schedule or power cut that has caught it and is tried first; any other will do once it no longer does.
    """

    name: str
    module: str
    pattern: str
    replacement: str = ""
    function: str = ""
    also: tuple[str, ...] = ()
    seed: int = 0


def load(mutant: Mutant) -> Any:
    """Return the mutant's `decide` module; raise ValueError unless the pattern occurs exactly once."""
    return _load(mutant, [decide.__name__])[decide.__name__]


def load_storage(mutant: Mutant) -> Code:
    """Return the mutant's storage modules; raise as `load`."""
    names = {field.name: getattr(Code(), field.name).__name__ for field in fields(Code)}
    modules = _load(mutant, names.values())
    return Code(**{field: modules[name] for field, name in names.items()})


def mutate(mutant: Mutant, source: str) -> ast.Module:
    """Return the syntax tree of a module's source with the mutant's node replaced or deleted.

    Raises:
        ValueError: the pattern occurs not at all, or more than once.
    """
    tree = ast.parse(source)
    scopes = [node for node in ast.walk(tree) if _is_function(node, mutant.function)] if mutant.function else [tree]
    pattern, replacement = ast.parse(mutant.pattern).body, ast.parse(mutant.replacement).body
    expressions = _expression(pattern), _expression(replacement)
    if None in expressions:
        places = [place for scope in scopes for place in _statements(scope, pattern)]
    else:
        places = [place for scope in scopes for place in _expressions(scope, expressions[0])]
    if len(places) != 1:
        where = mutant.module + (f", function {mutant.function!r}" if mutant.function else "")
        raise ValueError(
            f"mutant {mutant.name!r}: the pattern {mutant.pattern!r} occurs {len(places)} times in {where}; "
            "it has to occur once: change the pattern, or name the function"
        )
    parent, field, index = places[0]
    if None in expressions:
        getattr(parent, field)[index : index + len(pattern)] = replacement or [ast.Pass()]
    elif index < 0:
        setattr(parent, field, expressions[1])
    else:
        getattr(parent, field)[index] = expressions[1]
    return ast.fix_missing_locations(tree)


def _is_function(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name


def _expression(body: list[ast.stmt]) -> ast.expr | None:
    """Return the expression that is the only statement of a body, if it is one."""
    return body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None


def _expressions(scope: ast.AST, pattern: ast.AST) -> Iterator[tuple[ast.AST, str, int]]:
    """Yield parent, field and index (-1: the field is no list) of each node that equals an expression."""
    wanted = ast.dump(pattern)
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            for index, child in enumerate(value) if isinstance(value, list) else [(-1, value)]:
                if isinstance(child, type(pattern)) and ast.dump(child) == wanted:
                    yield parent, field, index


def _statements(scope: ast.AST, pattern: list[ast.stmt]) -> Iterator[tuple[ast.AST, str, int]]:
    """Yield parent, field and index of the first statement wherever consecutive statements equal the pattern."""
    wanted = [ast.dump(statement) for statement in pattern]
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                found = [ast.dump(statement) for statement in value]
                for index in range(len(found) - len(wanted) + 1):
                    if found[index : index + len(wanted)] == wanted:
                        yield parent, field, index


def _load(mutant: Mutant, entries: Iterable[str]) -> dict[str, ModuleType]:
    """Import the mutant and whatever imports it once more, beside the real modules; return the modules `entries`."""
    entries = list(entries)
    reloaded = _importers(mutant.module, tuple(entries))
    if mutant.module not in reloaded:
        raise ValueError(f"mutant {mutant.name!r}: no module of {', '.join(entries)} imports {mutant.module}")
    finder = _Finder(mutant)
    with _absent(reloaded):
        sys.meta_path.insert(0, finder)
        try:
            return {name: importlib.import_module(name) for name in entries}
        finally:
            sys.meta_path.remove(finder)


@contextmanager
def _absent(names: Iterable[str]) -> Iterator[None]:
    """Take modules out of `sys.modules` and out of their packages, so that they are imported again; then restore."""
    real = {name: importlib.import_module(name) for name in names}
    try:
        for name in real:
            package, _, child = name.rpartition(".")
            del sys.modules[name]
            delattr(sys.modules[package], child)
        yield
    finally:
        for name, module in real.items():
            package, _, child = name.rpartition(".")
            sys.modules[name] = module
            setattr(sys.modules[package], child, module)


class _Finder(MetaPathFinder):
    """Find the mutated module in place of the real one."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant, self._file = mutant, _file(mutant.module)

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._mutant.module:
            return None
        loader = _Loader(name, self._file)
        loader.mutant = self._mutant
        return importlib.util.spec_from_file_location(name, loader.path, loader=loader)


class _Loader(SourceFileLoader):
    """Compile the mutated source; neither read nor write byte code."""

    mutant: Mutant

    def get_code(self, fullname: str) -> CodeType:
        return compile(mutate(self.mutant, self.get_data(self.path).decode()), self.path, "exec")


@cache
def _importers(module: str, entries: tuple[str, ...]) -> frozenset[str]:
    """Return the modules between `entries` and `module`, both included: those that import it, directly or not."""
    imports, unread = {}, list(entries)
    while unread:
        name = unread.pop()
        if name not in imports:
            imports[name] = _imports(name)
            unread.extend(imports[name])
    importers = {module} & imports.keys()
    while more := {name for name, imported in imports.items() if imported & importers} - importers:
        importers |= more
    return frozenset(importers)


@cache
def _imports(name: str) -> frozenset[str]:
    """Return the product's modules that a module imports when it is imported itself; packages are left out."""
    found: set[str] = set()
    for node in ast.parse(SourceFileLoader(name, _file(name)).get_data(_file(name))).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(
        name
        for name in found
        if name.startswith(PRODUCT) and name in sys.modules and not hasattr(sys.modules[name], "__path__")
    )


def _file(name: str) -> str:
    return str(importlib.import_module(name).__file__)
