"""Heads of calls: JSON objects of workers and other servers, whose fields are checked before anything acts on them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from trainwright.core.staleness import Unit

Head = dict[str, Any]
_MOST = 2**53  # what JSON numbers hold exactly
_LONGEST_NAME = 128
_Check = Callable[[Any], bool]


class MalformedCall(Exception):
    """A call that no worker or server of ours makes: the line that it came over is ended, and nothing else."""


def _whole(value: Any) -> bool:
    return type(value) is int and -1 <= value <= _MOST


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _norm(value: Any) -> bool:
    return _number(value) and not value < 0  # what is not a number or infinite is a finding of training's


def _weight(value: Any) -> bool:
    return _number(value) and math.isfinite(value) and value >= 0


def _list(each: _Check, length: int | None = None) -> _Check:
    return lambda value: type(value) is list and length in (None, len(value)) and all(map(each, value))


def _name(value: Any) -> bool:
    return type(value) is str and len(value) <= _LONGEST_NAME


_UNIT: Mapping[str, _Check] = {"worker": _name, "unit": _list(_whole, 3), "at": _whole}
_FIELDS: Mapping[str, Mapping[str, _Check]] = {
    "pull": {"worker": _name, "needs": _whole, "have": _list(_whole, 2)},
    "push": {**_UNIT, "seen": _whole, "weight": _weight, "keep": lambda value: type(value) is bool},
    "lease": {"worker": _name, "prefer": _whole, "first": _whole},
    "done": _UNIT,
    "hear": {"heard": _whole},
    "say": {},
}
_OPTIONAL: Mapping[str, _Check] = {
    "sums": _list(_list(_number, 2)),  # of a push to the first server
    "norm": _norm,
    "opens": _whole,
    "stands": _whole,
    "part": lambda value: _list(_number, 2)(value) and _whole(value[0]) and _norm(value[1]),
}


def parse(said: bytes) -> Head:
    """The head of a call: `do` names it, and its fields are of the right types. Raises MalformedCall."""
    try:
        head: Any = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"no JSON: {error}") from error
    if not isinstance(head, dict) or not _name(head.get("do")) or head["do"] not in _FIELDS:
        raise MalformedCall("it names no known call in 'do'")
    fields = _FIELDS[head["do"]]
    wrong = [name for name, check in fields.items() if name not in head or not check(head[name])]
    wrong += [name for name, check in _OPTIONAL.items() if name in head and not check(head[name])]
    if wrong:
        raise MalformedCall(f"{head['do']!r} with a missing or wrong field {wrong[0]!r}")
    return head


def unit_of(head: Head) -> Unit:
    """The unit that a call is about."""
    step, share, steps = head["unit"]
    return Unit(step=step, share=share, steps=steps)


def require(condition: bool, what: str) -> None:
    """Raise MalformedCall where what a call says cannot be."""
    if not condition:
        raise MalformedCall(what)
