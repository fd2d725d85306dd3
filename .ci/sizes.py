"""Check the size rules of the product's code, and of functions and files elsewhere.

`python .ci/sizes.py` prints each offence that `.ci/size_exceptions.toml` does not list, and each exception that is no
longer needed. `--all` prints the listed ones too.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from structure import FOLDERS, Module, edges, modules

WARN_LINES, MOST_LINES, FUNCTION_LINES = 600, 900, 60
SMALL_LINES = 60  # a module below this needs two importers
PACKAGE_MODULES, IMPORTS, METHODS, FIELDS = 15, 15, 20, 20
OTHERS = ("docs", "examples", "benchmarks", "tests", ".ci")
EXCEPTIONS = Path(__file__).with_name("size_exceptions.toml")
Offence = tuple[str, str, str]
"""The rule, what breaks it, and the figure."""


def long_code(name: str, text: str, nodes: Iterable[ast.AST]) -> Iterator[Offence]:
    """A file over 900 lines, and its functions over 60."""
    lines = len(text.splitlines())
    if lines > MOST_LINES:
        yield "lines of a file", name, f"{lines}, at most {MOST_LINES}"
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield "lines of a function", f"{name}:{node.name}", f"{length}, at most {FUNCTION_LINES}"


def shape(found: dict[str, Module]) -> Iterator[Offence]:
    """Modules, packages and classes of the product that are too small or too large."""
    graph = edges(found)
    importers = Counter(target for targets in graph.values() for target in targets)
    packages = {name.rpartition(".")[0] for name in found if "." in name}
    for name, module in found.items():
        if name not in packages and module.lines < SMALL_LINES and importers[name] == 1:
            yield "small module with one importer", name, f"{module.lines} lines, at least {SMALL_LINES}"
        if len(graph[name]) > IMPORTS:
            yield "imports of a module", name, f"{len(graph[name])}, at most {IMPORTS}"
        for cls, (fields, methods) in module.classes.items():
            if fields > FIELDS:
                yield "fields of a class", f"{name}.{cls}", f"{fields}, at most {FIELDS}"
            if methods > METHODS:
                yield "methods of a class", f"{name}.{cls}", f"{methods}, at most {METHODS}"
    for package, count in Counter(name.rpartition(".")[0] for name in found if name not in packages).items():
        if count > PACKAGE_MODULES:
            yield "modules of a package", package, f"{count}, at most {PACKAGE_MODULES}"
    homes = defaultdict(list)
    for name, module in found.items():
        for cls in module.classes:
            homes[cls].append(name)
    for cls, where in homes.items():
        if len(where) > 1:
            yield "class name defined twice", cls, ", ".join(where)


def unused(root: Path, found: dict[str, Module], words: dict[str, set[str]]) -> Iterator[Offence]:
    """Public names of modules that no other file uses, but for the types in their public signatures.

    Args:
        words: the names that each file uses, by file.
    """
    users: dict[str, set[str]] = defaultdict(set)
    for file, used in words.items():
        for word in used:
            users[word].add(file)
    for name, module in found.items():
        own = module.path.as_posix()
        alone = {public for public in module.public if not users[public] - {own} and not public.startswith("__")}
        if alone:
            alone -= set(signature_names(ast.parse((root / own).read_text(encoding="utf-8"))))
        for public in sorted(alone):
            yield "public name that nothing else uses", f"{name}.{public}", "an underscore, or no such name"


def used_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names that a file imports, reads as attributes, or has in strings."""
    for node in nodes:
        match node:
            case ast.ImportFrom(names=names):
                yield from (alias.name for alias in names)
            case ast.Attribute(attr=attr):
                yield attr
            case ast.keyword(arg=str(arg)):
                yield arg
            case ast.Constant(value=str(text)):
                yield from re.findall(r"\w+", text)


def signature_names(tree: ast.Module) -> Iterator[str]:
    """Names in the annotations of a module's public functions, methods and fields, and bases of its public classes."""
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop()
        parts: list[ast.AST | None] = []
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not node.name.startswith("_"):
                parts = [node.returns, node.args]
            case ast.ClassDef() if not node.name.startswith("_"):
                todo += node.body
                parts = [*node.bases]
            case ast.AnnAssign():
                parts = [node.annotation]
        for part in parts:
            yield from (item.id for item in ast.walk(part) if isinstance(item, ast.Name)) if part is not None else ()


def python_files(root: Path, folders: Iterable[str]) -> Iterator[Path]:
    """All Python files below these folders."""
    for folder in folders:
        yield from sorted((root / folder).rglob("*.py"))


def documents(root: Path) -> Iterator[Path]:
    """Return the files that people read, and those that configure tools."""
    for pattern in ("*.md", "docs/**/*.md", "*.toml", "Makefile", "examples/*.ipynb", "clusters/*", "*.yaml"):
        yield from (path for path in root.glob(pattern) if path.is_file())


def main(arguments: list[str]) -> int:
    """Print every offence; 0 when all are listed, with a reason, and no more are listed."""
    root = Path(__file__).resolve().parents[1]
    found = modules(root)
    offences, words = [*shape(found)], {}
    for path in python_files(root, (*FOLDERS, *OTHERS)):
        name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        nodes = [*ast.walk(ast.parse(text, filename=name))]
        offences += long_code(name, text, nodes)
        words[name] = set(used_names(nodes))
    for path in documents(root):
        words[path.relative_to(root).as_posix()] = {*re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    offences += unused(root, found, words)
    listed: dict[str, dict[str, str]] = tomllib.loads(EXCEPTIONS.read_text(encoding="utf-8"))
    keys = {(rule, what) for rule, what, _ in offences}
    new = [offence for offence in offences if "--all" in arguments or offence[1] not in listed.get(offence[0], {})]
    for rule, what, figure in new:
        print(f"{rule}: {what}: {figure}")
    stale = [(rule, what) for rule, whats in listed.items() for what in whats if (rule, what) not in keys]
    for rule, what in stale:
        print(f"{EXCEPTIONS.name}: no longer needed: {rule}: {what}")
    long = [name for name, module in found.items() if module.lines > WARN_LINES]
    print(f"sizes: {len(found)} modules, {len(offences)} exceptions, {len(long)} modules over {WARN_LINES} lines")
    return 1 if stale or (new and "--all" not in arguments) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
