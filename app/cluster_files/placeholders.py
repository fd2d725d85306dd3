"""Fill in the values of a cluster file template; each is on the line below `# CHANGE name: what it is`.

Values are replaced line by line, so that comments stay. The result is read again, to check that each value arrived.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from trainwright.core.errors import TrainwrightError, nearest

_MARK = re.compile(r"^\s*# CHANGE (?P<name>[a-z][a-z0-9_]*): (?P<what>.+?)\s*$")
_SHELL = re.compile(
    r"""^(?P<lead>\s*(?:\#SBATCH\s+--[a-z-]+|(?:export\s+)?[A-Za-z_]\w*)=)
        (?P<value>(?:"[^"]*"|'[^']*'|[^\s"'\#])*)(?P<tail>\s.*|)$""",
    re.VERBOSE,
)
_ANCHOR = re.compile(r"&\w+\s+")
_EXPANDED = re.compile(
    r"""(?:[^$`"\\]|\$\w+|\$\{\w+\})*"""
)  # text in double quotes in which only variables are expanded
_PLAIN = re.compile(r"[A-Za-z0-9~/.][A-Za-z0-9_./@~+-]*(:[A-Za-z0-9_./@~+-]+)*")


class ClusterFileError(TrainwrightError, ValueError):
    """A cluster file, or a value for one, is wrong."""


@dataclass(frozen=True, kw_only=True)
class Placeholder:
    """A value that the user changes."""

    name: str
    what: str  # description, from the comment
    line: int  # line number of the value, from 1
    value: str

    @property
    def yours(self) -> bool:
        """Return whether only the user can know the value: its description starts with `your`."""
        return self.what.startswith("your ")


@dataclass(frozen=True, kw_only=True)
class _ValueLine:
    """A line with a value, split into the text before it, the value as written, and the text after it."""

    before: str
    written: str
    behind: str
    shell: bool

    @property
    def value(self) -> str:
        """Return the value without quotes."""
        if self.shell:
            return "".join(shlex.split(self.written))
        said = yaml.safe_load(self.written)
        return said if isinstance(said, str) else self.written

    def holding(self, value: str) -> str:
        """Return the line with another value."""
        return f"{self.before}{self._write(value)}{self.behind}"

    def _write(self, value: str) -> str:
        if self.shell:
            return _quote_for_shell(value)
        said = yaml.safe_load(self.written)
        if isinstance(said, list) and not value.startswith("["):
            return f"[{value}]"
        if not isinstance(said, str):
            return value  # a number or a list: as written; _verify checks it
        plain = _PLAIN.fullmatch(value) and yaml.safe_load(value) == value
        return value if plain else "'" + value.replace("'", "''") + "'"


def _quote_for_shell(value: str) -> str:
    """Quote a value so that the shell expands a leading `~/` and variables in it, and nothing else."""
    home = "~/" if value.startswith("~/") else ""
    rest = value.removeprefix(home)
    return home + (f'"{rest}"' if "$" in rest and _EXPANDED.fullmatch(rest) else shlex.quote(rest))


def find_placeholders(text: str) -> list[Placeholder]:
    """Return the placeholders of a file in order.

    Raises:
        ClusterFileError: a name is used twice, or no value follows a comment.
    """
    lines = text.splitlines()
    found: dict[str, Placeholder] = {}
    for number, line in enumerate(lines, 1):
        mark = _MARK.match(line)
        if mark is None:
            continue
        below = _parse_line(lines[number]) if number < len(lines) else None
        if below is None or mark["name"] in found:
            said = "is used twice" if below else "has no value on the next line"
            raise ClusterFileError(f"CHANGE {mark['name']} {said}", where=f"line {number}", remedy="correct the file")
        found[mark["name"]] = Placeholder(name=mark["name"], what=mark["what"], line=number + 1, value=below.value)
    return list(found.values())


def fill_placeholders(text: str, values: Mapping[str, str]) -> str:
    """Return the text with these values by name.

    Raises:
        ClusterFileError: a name is unknown, or a value does not fit its place.
    """
    known = {marker.name: marker for marker in find_placeholders(text)}
    lines = text.splitlines(keepends=True)
    for name, value in values.items():
        if name not in known:
            raise ClusterFileError(f"the file has no value {name}", where=f"--set {name}", remedy=nearest(name, known))
        if value != known[name].value:
            lines[known[name].line - 1] = _replace_value(lines[known[name].line - 1], name, value)
    changed = "".join(lines)
    _verify(text, changed, values)
    return changed


def _replace_value(line: str, name: str, value: str) -> str:
    parts = _parse_line(line.rstrip("\n"))
    assert parts is not None, "find_placeholders() has read it"
    sbatch = line.lstrip().startswith("#SBATCH")
    if not value or not value.isprintable() or (sbatch and not re.fullmatch(r"(?!~)[^\s#'\"\\$]+", value)):
        raise ClusterFileError(
            f"{value!r} is not a valid value here", where=f"--set {name}",
            remedy="leave out spaces, quotes, #, \\, $ and a leading ~, which sbatch does not expand" if sbatch
            else "give one line of text that is not empty",
        )  # fmt: skip
    return parts.holding(value) + ("\n" if line.endswith("\n") else "")


def _parse_line(text: str) -> _ValueLine | None:
    """Split a line with a value; None if it has none."""
    shell = _SHELL.match(text)
    if shell is not None:
        return _ValueLine(before=shell["lead"], written=shell["value"], behind=shell["tail"], shell=True)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None
    whole = node
    while isinstance(node, yaml.CollectionNode) and not node.flow_style:
        entry = node.value[0]
        node = entry[1] if isinstance(entry, tuple) else entry
    if node is whole or node is None or node.tag == "tag:yaml.org,2002:null":
        return None
    start, end = node.start_mark.column, node.end_mark.column
    anchor = _ANCHOR.match(text, start)
    start = anchor.end() if anchor else start
    return _ValueLine(before=text[:start], written=text[start:end], behind=text[end:], shell=False)


def _verify(before: str, after: str, values: Mapping[str, str]) -> None:
    """Check that every value arrived and no other changed. Raises ClusterFileError."""
    try:
        now = {marker.name: marker.value for marker in find_placeholders(after)}
        whole = before.startswith("#!") or _types(before) == _types(after)
    except (yaml.YAMLError, ValueError) as error:
        raise ClusterFileError(
            f"a value does not fit the file: {error}",
            where="--set",
            remedy="write the value in the form of the template",
        ) from error
    wanted = {marker.name: marker.value for marker in find_placeholders(before)} | dict(values)
    wrong = sorted(name for name in wanted if now.get(name) not in (wanted[name], f"[{wanted[name]}]"))
    if wrong or not whole:
        names = ", ".join(f"--set {name}" for name in wrong or sorted(values))
        raise ClusterFileError(
            "a value does not fit the file: it is read back as another value", where=names,
            remedy="give a value of the type of the template: a number for a number, a list for a list",
        )  # fmt: skip


def _types(text: str) -> list[tuple[str, str]]:
    """Return the path and the type of each value."""
    return [found for document in yaml.safe_load_all(text) for found in _leaf_types(document, "")]


def _leaf_types(value: object, path: str) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [found for key, below in value.items() for found in _leaf_types(below, f"{path}.{key}")]
    if isinstance(value, list) and any(isinstance(entry, dict | list) for entry in value):
        return [found for number, below in enumerate(value) for found in _leaf_types(below, f"{path}[{number}]")]
    return [(path, type(value).__name__)]
