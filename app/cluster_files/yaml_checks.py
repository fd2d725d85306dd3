"""A YAML file as a tree of values that know their file, line and path, and the checks that need no more than that.

The checks look for repeated keys, for secrets, and for keys and types that Ray's own JSON schema refuses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from trainwright.core.errors import Finding, Severity, nearest
from trainwright.core.redaction import is_secret
from trainwright.ray_cluster.ray_compat import cluster_file_schema


@dataclass(frozen=True, kw_only=True)
class YamlItem:
    """One value of a YAML file."""

    value: Any
    file: str
    line: int  # number of its line, from 1; for the value of a key the line of the key
    path: str  # such as `provider.region` or `setup_commands[0]`
    fields: dict[str, YamlItem] = field(default_factory=dict)
    entries: tuple[YamlItem, ...] = ()
    repeated: tuple[tuple[str, int], ...] = ()  # keys that a mapping has twice, with their lines

    @property
    def where(self) -> str:
        """Return the place for a finding, such as `cluster.yaml:41, provider.region`."""
        return f"{self.file}:{self.line}" + (f", {self.path}" if self.path else "")

    @property
    def mapping(self) -> bool:
        """Return whether the value is a mapping."""
        return isinstance(self.value, dict)

    def at(self, *keys: str) -> YamlItem | None:
        """Return the item at a path of keys, or None."""
        found: YamlItem | None = self
        for key in keys:
            found = found.fields.get(key) if found else None
        return found

    def list(self, *keys: str) -> tuple[YamlItem, ...]:
        """Return the items of the list at a path of keys; none if there is no list."""
        found = self.at(*keys)
        return () if found is None else found.entries

    def text(self, *keys: str) -> str:
        """Return the text at a path of keys; empty if there is none."""
        found = self.at(*keys)
        return "" if found is None or found.value is None or found.fields or found.entries else str(found.value)

    def number(self, *keys: str, default: int = 0) -> int:
        """Return the integer at a path of keys; `default` if there is none."""
        found = self.at(*keys)
        return found.value if found is not None and type(found.value) is int else default

    def each(self) -> Iterator[YamlItem]:
        """Yield this item and all items in it."""
        yield self
        for below in (*self.fields.values(), *self.entries):
            yield from below.each()

    def finding(self, subject: str, verdict: Severity, what: str, remedy: str = "") -> Finding:
        """Return a finding about this item."""
        return Finding(subject=subject, verdict=verdict, what=what, where=self.where, remedy=remedy)


def read_yaml(text: str, file: str) -> list[YamlItem]:
    """Return the documents of a YAML text. Raises yaml.YAMLError."""
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


# --- Secrets in a file, which reaches repositories, logs and every node -----------------------------------------------


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
    "remove it and revoke it where it was issued; give nodes a role, a file of mode 600 by file_mounts, "
    "or a reference to a Kubernetes secret"
)


def secrets_in_text(text: str, file: str) -> Iterator[Finding]:
    """Find secrets by their form, with their lines. Findings do not contain the secret."""
    for line, said in enumerate(text.splitlines(), 1):
        if said.lstrip().startswith("# ") and "CHANGE" in said:
            continue
        for name, pattern in _PATTERNS.items():
            if re.search(pattern, said):
                what, where = f"the file contains {name}", f"{file}:{line}"
                yield Finding(subject="secrets", verdict="bad", what=what, where=where, remedy=_REMEDY)


def secrets_in_environment(variables: Iterable[YamlItem]) -> Iterator[Finding]:
    """Find secrets of a container's environment that are written as values instead of references."""
    for entry in variables:
        name, value = entry.text("name"), entry.at("value")
        if value is not None and value.value and is_secret(name):
            yield value.finding("secrets", "bad", f"the file contains the value of {name}", _REMEDY)


# --- Keys and types ---------------------------------------------------------------------------------------------------


_WANTED = {"type": "of type", "minimum": "of at least", "enum": "out of"}  # by the keyword of the schema


def check_schema(document: YamlItem) -> Iterator[Finding]:
    """Find what Ray's own JSON schema for `ray up` refuses in a file: unknown and missing keys, wrong types."""
    from jsonschema import Draft7Validator  # a dependency of Ray's

    for error in Draft7Validator(cluster_file_schema()).iter_errors(document.value):
        item = document
        for step in error.absolute_path:
            item = item.entries[step] if isinstance(step, int) else item.fields[step]
        if error.validator == "additionalProperties":
            allowed = list(error.schema["properties"])
            for name in (name for name in item.fields if name not in allowed):
                what = f"Ray does not know the key {name}"
                yield item.fields[name].finding("keys", "bad", what, nearest(name, allowed))
        elif error.validator == "required":
            yield item.finding("keys", "bad", error.message, f"add it; there are: {', '.join(item.fields)}")
        else:
            subject = "types" if error.validator == "type" else "values"
            remedy = f"write a value {_WANTED.get(error.validator, error.validator)} {error.validator_value}"
            yield item.finding(subject, "bad", error.message, remedy)


def repeated_keys(document: YamlItem) -> Iterator[Finding]:
    """Find keys that a mapping has twice: YAML readers use the last one without a warning."""
    for item in document.each():
        for name, line in item.repeated:
            what = f"the key {name} is repeated; only the last one counts"
            yield replace(item, line=line).finding("keys", "bad", what, "keep one of the two")
