"""A YAML file as a tree in which everything knows its place: file, line and the way there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from trainwright.core.finding import Finding, Verdict


@dataclass(frozen=True, kw_only=True)
class Item:
    """One value of a file.

    Attributes:
        value: as plain Python.
        file: name of the file.
        line: where it stands, from 1; of a key's value the line of the key.
        path: the way there: `provider.region`, `setup_commands[0]`.
        fields: of a mapping, by key.
        entries: of a list.
        repeated: keys that a mapping has twice, with their lines.
    """

    value: Any
    file: str
    line: int
    path: str
    fields: dict[str, Item] = field(default_factory=dict)
    entries: tuple[Item, ...] = ()
    repeated: tuple[tuple[str, int], ...] = ()

    @property
    def where(self) -> str:
        """For a finding: `cluster.yaml:41, provider.region`."""
        return f"{self.file}:{self.line}" + (f", {self.path}" if self.path else "")

    @property
    def mapping(self) -> bool:
        """Whether it has keys."""
        return isinstance(self.value, dict)

    def at(self, *keys: str) -> Item | None:
        """What lies there; None where nothing does."""
        found: Item | None = self
        for key in keys:
            found = found.fields.get(key) if found else None
        return found

    def text(self, *keys: str) -> str:
        """The text there; empty where there is none."""
        found = self.at(*keys)
        return "" if found is None or found.value is None or found.fields or found.entries else str(found.value)

    def number(self, *keys: str, default: int = 0) -> int:
        """The whole number there; `default` where there is none."""
        found = self.at(*keys)
        whole = found is not None and isinstance(found.value, int) and not isinstance(found.value, bool)
        return found.value if whole and found is not None else default

    def each(self) -> Iterator[Item]:
        """This and everything below."""
        yield self
        for below in (*self.fields.values(), *self.entries):
            yield from below.each()

    def finding(self, subject: str, verdict: Verdict, what: str, remedy: str = "") -> Finding:
        """Something found here."""
        return Finding(subject=subject, verdict=verdict, what=what, where=self.where, remedy=remedy)


def read(text: str, file: str) -> list[Item]:
    """The documents of a YAML text. Raises yaml.YAMLError."""
    loader = yaml.SafeLoader(text)
    try:
        found = []
        while loader.check_node():
            node = loader.get_node()
            found.append(_item(loader, node, file, "", node.start_mark.line + 1))
        return found
    finally:
        loader.dispose()


def _item(loader: yaml.SafeLoader, node: yaml.Node, file: str, path: str, line: int) -> Item:
    if isinstance(node, yaml.MappingNode):
        return _mapping(loader, node, file, path, line)
    if isinstance(node, yaml.SequenceNode):
        entries = tuple(
            _item(loader, below, file, f"{path}[{number}]", below.start_mark.line + 1)
            for number, below in enumerate(node.value)
        )
        return Item(value=[entry.value for entry in entries], file=file, line=line, path=path, entries=entries)
    return Item(value=loader.construct_object(node, deep=True), file=file, line=line, path=path)


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode, file: str, path: str, line: int) -> Item:
    fields: dict[str, Item] = {}
    merged: dict[str, Item] = {}
    repeated = []
    for key, below in node.value:
        name, at = str(key.value), key.start_mark.line + 1
        found = _item(loader, below, file, f"{path}.{name}".lstrip("."), at)
        if key.tag == "tag:yaml.org,2002:merge":
            for source in (found, *found.entries):
                merged |= source.fields
            continue
        if name in fields:
            repeated.append((name, at))
        fields[name] = found
    fields = merged | fields
    value = {name: found.value for name, found in fields.items()}
    return Item(value=value, file=file, line=line, path=path, fields=fields, repeated=tuple(repeated))
