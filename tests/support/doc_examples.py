"""The code blocks of README and docs: where they are, and what can be checked of them without running a cluster."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer

import trainwright as tw
from trainwright.chaos_testing.fault_schedule import CATALOGUE
from trainwright.cli.cluster_commands import TEMPLATES
from trainwright.cli.main import app
from trainwright.core.errors import TrainwrightError
from trainwright.core.job import GROUP_OF, GROUPS
from trainwright.core.plan import single_device_spec
from trainwright.strategies import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_PLACEHOLDERS = ("FIELD",)  # of `--set FIELD=VALUE`


@dataclass(frozen=True, kw_only=True)
class Example:
    """A code block."""

    page: str
    line: int
    code: str

    @property
    def where(self) -> str:
        """Page and line, for errors."""
        return f"{self.page}:{self.line}"


def examples(page: str, *languages: str) -> list[Example]:
    """Return the blocks of a page in these languages."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Example(page=page, line=text.count("\n", 0, found.start()) + 2, code=textwrap.dedent(found[3]))
        for found in _BLOCK.finditer(text)
        if found[2] in languages
    ]


# --- Python -----------------------------------------------------------------------------------------------------------


def check_names(example: Example) -> None:
    """Check without running it that a block compiles, that its names of `tw` exist and that their arguments fit.

    Raises:
        AssertionError, SyntaxError: something does not.
    """
    for node in ast.walk(ast.parse(example.code, filename=example.where)):
        if isinstance(node, ast.Attribute) and (name := _name(node)):
            assert _found(name) is not None, f"{example.where}: trainwright has no {name}"
        elif isinstance(node, ast.Call) and _found(name := _name(node.func)):
            _check_call(example, name, node)


def _name(node: ast.expr) -> str:
    """Return `datasets.parquet` for the expression `tw.datasets.parquet`; empty for others."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed(parts)) if isinstance(node, ast.Name) and node.id == "tw" else ""


def _found(name: str) -> Any:
    found: Any = tw if name else None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _check_call(example: Example, name: str, call: ast.Call) -> None:
    known = _arguments(_found(name))
    for keyword in call.keywords:
        assert not known or keyword.arg in {None, *known}, f"{example.where}: tw.{name}() has no {keyword.arg}="


def _arguments(called: Any) -> set[str]:
    """Return the names of all arguments; none where any name is taken."""
    if called is tw.Job:
        return {*called.model_fields, *GROUP_OF}
    if fields := getattr(called, "model_fields", None):
        return set(fields)
    parameters = inspect.signature(called).parameters.values()
    names = {each.name for each in parameters}
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return {*names, *_arguments(tw.Job)} if called in (tw.from_hf_trainer, tw.from_lightning) else set()
    return names


class _Completed(ast.NodeTransformer):
    """Gives `tw.Job(..., epochs=5)` the fields that the page leaves out."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if _name(node.func) == "Job" and any(isinstance(each, ast.Constant) for each in node.args):
            node.func, node.args = ast.Name("completed", ast.Load()), []
        return node


def completed_code(example: Example) -> Any:
    """Return the compiled block; `completed` in its names makes jobs of those that are shown in part."""
    tree = _Completed().visit(ast.parse(example.code, filename=example.where))
    return compile(ast.fix_missing_locations(tree), example.where, "exec")


# --- Commands ---------------------------------------------------------------------------------------------------------


def commands(example: Example) -> Iterator[list[str]]:
    """Yield the arguments of each `trainwright` command of a block of a shell."""
    prompt = "$ " if "$ " in example.code else ""
    for line in example.code.replace("\\\n", " ").splitlines():
        if line.startswith(prompt) and "trainwright " in line:
            yield from _trainwright_commands(shlex.split(line.removeprefix(prompt), comments=True))


def _trainwright_commands(words: list[str]) -> Iterator[list[str]]:
    text = "\0".join(words)
    for command in re.split(r"\0(?:&&|\|\||\||;|--)\0", text):
        given = command.split("\0")
        if given[:3] == ["python", "-m", "trainwright"]:
            yield given[3:]
        elif given[0] == "trainwright":
            yield given[1:]


def named_commands(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield place and arguments of the commands that sentences and tables of a page name."""
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
        for named in re.findall(r"`trainwright ([^`]+)`", line):
            if not named.startswith("COMMAND"):
                yield f"{page}:{number}", shlex.split(named)


@cache
def command_line() -> Any:
    """Return the command `trainwright` with all of its own."""
    return typer.main.get_command(app)


def check_command(where: str, arguments: list[str], *, whole: bool = True) -> None:
    """Let the command line parse a command, without carrying it out, and check the values that it takes as text.

    Args:
        where: the command is, for errors.
        arguments: of `trainwright`.
        whole: whether arguments that are missing are errors; a sentence names a command by its first words.

    Raises:
        AssertionError: there is no such command, option or value.
    """
    command = command_line()
    words, shown = list(arguments), f"{where}: trainwright {shlex.join(arguments)}"
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    try:
        values = command.make_context("trainwright", words).params
    except typer.Exit:
        return  # --help
    except Exception as error:  # click's own, which typer has in a private copy
        if not whole and re.search("Missing (parameter|command)|requires an argument", str(error)):
            return
        raise AssertionError(f"{shown}: {error}") from error
    assert not hasattr(command, "commands"), f"{shown}: no such command"
    _check_values(shown, values)


def _check_values(shown: str, values: dict[str, Any]) -> None:
    """Check strategies, fields, clusters and plans, which are text for the command line."""
    strategy = values.get("strategy")
    assert strategy is None or strategy in STRATEGIES, f"{shown}: no strategy {strategy}"
    file, cluster = str(values.get("file", "")), values.get("cluster")
    for override in values.get("overrides") or ():
        name, _, value = override.partition("=")
        fields = {*tw.Job.model_fields, *GROUPS, *GROUP_OF, *_PLACEHOLDERS}
        known = name.partition(".")[0] in fields or f"{name}:" in _source(file)
        assert known, f"{shown}: no field {name}"
        try:
            if name == "plan" and not value.endswith(".json"):
                single_device_spec(value)
                tw.Plan.parse(value)
        except TrainwrightError as error:
            raise AssertionError(f"{shown}: {error}") from error
    if isinstance(cluster, str) and cluster not in TEMPLATES:
        try:
            tw.Cluster.parse(cluster)
        except TrainwrightError as error:
            raise AssertionError(f"{shown}: {error}") from error
    faults = set(filter(None, str(values.get("faults") or "").split(",")))
    unknown = faults - {fault.name for fault in CATALOGUE}
    assert not unknown, f"{shown}: no fault {', '.join(unknown)}"


def _source(file: str) -> str:
    """Return the text of an example, whose function `job` may have arguments."""
    path = ROOT / file
    return path.read_text(encoding="utf-8") if file and path.is_file() else ""
