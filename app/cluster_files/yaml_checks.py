"""A YAML file as a tree in which everything knows its place: file, line and the way there.

A shape in shapes/*.yaml is a mapping of keys (`!` behind one that must be there, `*` for any other), a list with the
shape of its entries, the name of a type, `one of A B`, or `@name` for another shape of the same file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml

from trainwright.core.errors import Finding, Severity
from trainwright.core.redaction import is_secret


@dataclass(frozen=True, kw_only=True)
class YamlItem:
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
    fields: dict[str, YamlItem] = field(default_factory=dict)
    entries: tuple[YamlItem, ...] = ()
    repeated: tuple[tuple[str, int], ...] = ()

    @property
    def where(self) -> str:
        """For a finding: `cluster.yaml:41, provider.region`."""
        return f"{self.file}:{self.line}" + (f", {self.path}" if self.path else "")

    @property
    def mapping(self) -> bool:
        """Whether it has keys."""
        return isinstance(self.value, dict)

    def at(self, *keys: str) -> YamlItem | None:
        """What lies there; None where nothing does."""
        found: YamlItem | None = self
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

    def each(self) -> Iterator[YamlItem]:
        """This and everything below."""
        yield self
        for below in (*self.fields.values(), *self.entries):
            yield from below.each()

    def finding(self, subject: str, verdict: Severity, what: str, remedy: str = "") -> Finding:
        """Something found here."""
        return Finding(subject=subject, verdict=verdict, what=what, where=self.where, remedy=remedy)


def read_yaml(text: str, file: str) -> list[YamlItem]:
    """The documents of a YAML text. Raises yaml.YAMLError."""
    loader = yaml.SafeLoader(text)
    try:
        found = []
        while loader.check_node():
            node = loader.get_node()
            found.append(_build_item(loader, node, file, "", node.start_mark.line + 1))
        return found
    finally:
        loader.dispose()


def _build_item(loader: yaml.SafeLoader, node: yaml.Node, file: str, path: str, line: int) -> YamlItem:
    if isinstance(node, yaml.MappingNode):
        return _build_mapping(loader, node, file, path, line)
    if isinstance(node, yaml.SequenceNode):
        entries = tuple(
            _build_item(loader, below, file, f"{path}[{number}]", below.start_mark.line + 1)
            for number, below in enumerate(node.value)
        )
        return YamlItem(value=[entry.value for entry in entries], file=file, line=line, path=path, entries=entries)
    return YamlItem(value=loader.construct_object(node, deep=True), file=file, line=line, path=path)


def _build_mapping(loader: yaml.SafeLoader, node: yaml.MappingNode, file: str, path: str, line: int) -> YamlItem:
    fields: dict[str, YamlItem] = {}
    merged: dict[str, YamlItem] = {}
    repeated = []
    for key, below in node.value:
        name, at = str(key.value), key.start_mark.line + 1
        found = _build_item(loader, below, file, f"{path}.{name}".lstrip("."), at)
        if key.tag == "tag:yaml.org,2002:merge":
            for source in (found, *found.entries):
                merged |= source.fields
            continue
        if name in fields:
            repeated.append((name, at))
        fields[name] = found
    fields = merged | fields
    value = {name: found.value for name, found in fields.items()}
    return YamlItem(value=value, file=file, line=line, path=path, fields=fields, repeated=tuple(repeated))


# --- Secrets that stand in a file, which goes into repositories, logs and onto every node -----------------------------


_PATTERNS = {
    "an AWS access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "an AWS secret key": r"(?i)aws_?secret_?access_?key['\"]?\s*[:=]\s*['\"]?[A-Za-z0-9/+=]{30,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
    "a Google API key": r"\bAIza[0-9A-Za-z_-]{35}\b",
    "a Google OAuth token": r"\bya29\.[0-9A-Za-z_-]{20,}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,})",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}\b",
    "a Weights & Biases key": r"(?i)WANDB_API_KEY['\"]?\s*[:=]\s*['\"]?[0-9a-f]{40}",
    "Ray's token": r"RAY_AUTH_TOKEN\s*[:=]\s*['\"]?(?![\s$'\"]|\$\()\S+",
    "an account key of Azure": r"(?i)AccountKey\s*=\s*[A-Za-z0-9/+=]{30,}",
    "a password": r"(?i)(?:--redis-password[= ]|REDIS_PASSWORD\s*[:=]\s*)['\"]?(?![\s$'\"]|\$\()\S+",
}
_REMEDY = (
    "take it out and make it anew where it was issued; give nodes a role, a file of mode 600 by file_mounts, "
    "or a reference to a Kubernetes secret"
)


def secrets_in_text(text: str, file: str) -> list[Finding]:
    """Those that are known by their looks, by line. The secret itself is not told."""
    return [
        Finding(subject="secrets", verdict="bad", what=f"{name} stands here", where=f"{file}:{line}", remedy=_REMEDY)
        for line, said in enumerate(text.splitlines(), 1)
        if not said.lstrip().startswith("# ") or "CHANGE" not in said
        for name, pattern in _PATTERNS.items()
        if re.search(pattern, said)
    ]


def secrets_in_environment(env: YamlItem) -> list[Finding]:
    """Of a container's environment: a value given where a reference belongs."""
    found = []
    for entry in env.entries:
        name = entry.text("name")
        value = entry.at("value")
        if value is not None and value.value and is_secret(name):
            found.append(value.finding("secrets", "bad", f"the value of {name} stands here", _REMEDY))
    return found


# --- What may stand in a file, as data --------------------------------------------------------------------------------


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


@cache
def load_schema(name: str) -> dict[str, Any]:
    """The shapes of one of the files."""
    text = (resources.files("trainwright.cluster_files") / "shapes" / f"{name}.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def _allowed_keys(shape: dict[str, Any]) -> dict[str, Any]:
    """The shapes by key, without the marks of those that must be there."""
    return {key.removesuffix("!"): below for key, below in shape.items()}


def schema_findings(item: YamlItem, shape: Any, known: dict[str, Any]) -> list[Finding]:
    """What of an item does not have this shape.

    Args:
        item: what was written.
        shape: what it should be.
        known: the shapes that `@name` stands for.
    """
    if isinstance(shape, str) and shape.startswith("@"):
        named = known[shape[1:]]
        return schema_findings(item, dict.fromkeys(named, "string") if shape == "@ray_start" else named, known)
    if isinstance(shape, dict):
        return (
            _check_mapping(item, shape, known) if item.mapping else [_wrong_type(item, "a mapping of keys to values")]
        )
    if isinstance(shape, list):
        if not isinstance(item.value, list):
            return [_wrong_type(item, "a list")]
        return [found for entry in item.entries for found in schema_findings(entry, shape[0], known)]
    return _check_scalar(item, shape)


def _check_mapping(item: YamlItem, shape: dict[str, Any], known: dict[str, Any]) -> list[Finding]:
    allowed = _allowed_keys(shape)
    any_other = allowed.pop("*", None)
    found = [
        Finding(
            subject="keys", verdict="bad", what=f"{name} stands here a second time; only the last one counts",
            where=f"{item.file}:{line}, {item.path}".rstrip(", "), remedy="keep one of the two",
        )
        for name, line in item.repeated
    ]  # fmt: skip
    for name, below in item.fields.items():
        if name in allowed:
            found += schema_findings(below, allowed[name], known)
        elif any_other is None:
            found.append(below.finding("keys", "bad", f"{name} is no key that is read here", closest(name, allowed)))
        else:
            found += schema_findings(below, any_other, known)
    wanted = [key.removesuffix("!") for key in shape if key.endswith("!")]
    missing = [name for name in wanted if name not in item.fields]
    return found + [item.finding("keys", "bad", f"{name} is missing", f"add {name}:") for name in missing]


def _check_scalar(item: YamlItem, shape: str) -> list[Finding]:
    if shape.startswith("one of "):
        allowed = shape.split()[2:]
        if str(item.value) in allowed:
            return []
        return [item.finding("values", "bad", f"there is no {item.value} here", closest(item.value, allowed))]
    wanted = _TYPES.get(shape, ())
    right = not wanted or (isinstance(item.value, wanted) and (shape == "boolean" or not isinstance(item.value, bool)))
    return [] if right else [_wrong_type(item, f"a {shape}".replace("a integer", "a whole number"))]


def _wrong_type(item: YamlItem, wanted: str) -> Finding:
    said = "nothing" if item.value is None else repr(item.value)
    quotes = " in quotes" if wanted == "a string" else ""
    return item.finding("types", "bad", f"{said[:60]} is not {wanted}", f"write {wanted}{quotes}")


def closest(name: object, allowed: Any) -> str:
    """What to do about a word that is none of those allowed: the one with the fewest changes, or all of them."""
    best = near(str(name), allowed)
    return f"did you mean {best}?" if best else f"there are: {', '.join(sorted(allowed))}"


def near(name: str, allowed: Any) -> str:
    """The allowed word that is at most a third of its letters away; empty where none is."""
    ranked = sorted((changes(name.lower(), word.lower()), word) for word in allowed)
    return ranked[0][1] if ranked and ranked[0][0] <= max(1, len(ranked[0][1]) // 3) else ""


def changes(one: str, other: str) -> int:
    """Letters to insert, delete, replace or swap with their neighbour (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        older, before, row = before, row, [i]
        for j, wanted in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                cost = min(cost, older[j - 2] + 1)
            row.append(cost)
    return row[-1]
