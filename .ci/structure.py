"""Print figures of the code's structure: how much there is, and how it hangs together.

`python .ci/structure.py [ROOT]` reads the product's packages below ROOT. Imports within functions count; those for type
checkers alone do not.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

FOLDERS = {
    "app": "trainwright",
    "clusters": "trainwright.clusters",
    "strategies": "trainwright.strategies",
    "datasets": "trainwright.datasets",
}


@dataclass
class Module:
    """One source file.

    Attributes:
        path: of the file, below the root.
        lines: of the file.
        public: names that it defines and that do not begin with an underscore.
        classes: names of its classes, and how many annotated fields and methods each has.
        uses: (module or package, name) of each import; an empty name for the module itself.
    """

    path: Path
    lines: int
    public: set[str] = field(default_factory=set)
    classes: dict[str, tuple[int, int]] = field(default_factory=dict)
    uses: set[tuple[str, str]] = field(default_factory=set)


def modules(root: Path) -> dict[str, Module]:
    """Read every module of the product, by its dotted name."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            name = ".".join([package, *(part for part in parts if part != "__init__")])
            found[name] = read(path.relative_to(root), path.read_text(encoding="utf-8"))
    return found


def read(path: Path, text: str) -> Module:
    """Read one module."""
    module, tree = Module(path=path, lines=len(text.splitlines())), ast.parse(text)
    for node in tree.body:
        module.public |= {name for name in defined(node) if not name.startswith("_")}
    for node in walk(tree):
        match node:
            case ast.ClassDef():
                fields = sum(isinstance(item, ast.AnnAssign) for item in node.body)
                methods = sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)
                module.classes[node.name] = (fields, methods)
            case ast.ImportFrom(module=str(source)) if source.partition(".")[0] == "trainwright":
                module.uses |= {(source, alias.name) for alias in node.names}
            case ast.Import():
                module.uses |= {(alias.name, "") for alias in node.names if alias.name.startswith("trainwright.")}
    return module


def defined(node: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=targets):
            yield from (item.id for target in targets for item in ast.walk(target) if isinstance(item, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree, but for what only type checkers see."""
    todo = [node]
    while todo:
        yield (here := todo.pop())
        for child in ast.iter_child_nodes(here):
            if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
                todo.append(child)


def edges(found: dict[str, Module]) -> dict[str, set[str]]:
    """Modules that each module imports."""
    graph: dict[str, set[str]] = {}
    for name, module in found.items():
        targets = {f"{source}.{item}" if f"{source}.{item}" in found else source for source, item in module.uses}
        graph[name] = {target for target in targets if target in found and target != name}
    return graph


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of an import cycle; none where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def importers(found: dict[str, Module]) -> Counter[tuple[str, str]]:
    """How many modules import each public name, those that nobody imports left out."""
    users: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name, module in found.items():
        for source, item in module.uses:
            if source in found and item in found[source].public:
                users[source, item].add(name)
    return Counter({use: len(names) for use, names in users.items()})


def figures(found: dict[str, Module], folders: int) -> Iterator[tuple[str, object]]:
    """Rows of the table."""
    graph, lines = edges(found), sum(module.lines for module in found.values())
    count = sum(map(len, graph.values()))
    classes = Counter(name for module in found.values() for name in module.classes)
    sized = [(fields, name) for module in found.values() for name, (fields, _) in module.classes.items()]
    yield "modules", len(found)
    yield "packages", folders
    yield "lines", lines
    yield "import edges", count
    yield "import edges for each 1,000 lines", round(1000 * count / lines, 1)
    yield "import cycle, lazy imports included", " -> ".join(cycle(graph)) or "none"
    yield "public names with one importer", sum(number == 1 for number in importers(found).values())
    yield "class names defined twice", sum(number > 1 for number in classes.values())
    yield "most fields of a class", "{} ({})".format(*max(sized))


def main(root: Path) -> int:
    """Print the table."""
    folders = sum(1 for folder in FOLDERS for _ in (root / folder).rglob("__init__.py"))
    for name, value in figures(modules(root), folders):
        print(f"{name:55} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
