"""What may stand in a file, as data: which keys, of which type; and what does not fit.

A shape in shapes/*.yaml is a mapping of keys (`!` behind one that must be there, `*` for any other), a list with the
shape of its entries, the name of a type, `one of A B`, or `@name` for another shape of the same file.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import yaml

from trainwright.cluster_files.yaml_tree import Item
from trainwright.core.finding import Finding

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


@cache
def shapes(name: str) -> dict[str, Any]:
    """The shapes of one of the files."""
    text = (resources.files("trainwright.cluster_files") / "shapes" / f"{name}.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def keys(shape: dict[str, Any]) -> dict[str, Any]:
    """The shapes by key, without the marks of those that must be there."""
    return {key.removesuffix("!"): below for key, below in shape.items()}


def misfits(item: Item, shape: Any, known: dict[str, Any]) -> list[Finding]:
    """What of an item does not have this shape.

    Args:
        item: what was written.
        shape: what it should be.
        known: the shapes that `@name` stands for.
    """
    if isinstance(shape, str) and shape.startswith("@"):
        named = known[shape[1:]]
        return misfits(item, dict.fromkeys(named, "string") if shape == "@ray_start" else named, known)
    if isinstance(shape, dict):
        return _mapping(item, shape, known) if item.mapping else [_wrong_type(item, "a mapping of keys to values")]
    if isinstance(shape, list):
        if not isinstance(item.value, list):
            return [_wrong_type(item, "a list")]
        return [found for entry in item.entries for found in misfits(entry, shape[0], known)]
    return _scalar(item, shape)


def _mapping(item: Item, shape: dict[str, Any], known: dict[str, Any]) -> list[Finding]:
    allowed = keys(shape)
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
            found += misfits(below, allowed[name], known)
        elif any_other is None:
            found.append(below.finding("keys", "bad", f"{name} is no key that is read here", closest(name, allowed)))
        else:
            found += misfits(below, any_other, known)
    wanted = [key.removesuffix("!") for key in shape if key.endswith("!")]
    missing = [name for name in wanted if name not in item.fields]
    return found + [item.finding("keys", "bad", f"{name} is missing", f"add {name}:") for name in missing]


def _scalar(item: Item, shape: str) -> list[Finding]:
    if shape.startswith("one of "):
        allowed = shape.split()[2:]
        if str(item.value) in allowed:
            return []
        return [item.finding("values", "bad", f"there is no {item.value} here", closest(item.value, allowed))]
    wanted = _TYPES.get(shape, ())
    right = not wanted or (isinstance(item.value, wanted) and (shape == "boolean" or not isinstance(item.value, bool)))
    return [] if right else [_wrong_type(item, f"a {shape}".replace("a integer", "a whole number"))]


def _wrong_type(item: Item, wanted: str) -> Finding:
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
