"""A job in words that can be stored, compared and shown: what each field is, functions by their code."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

from trainwright.core.job import Job

# Fields that say where or how fast a job runs, and never what it computes.
_FREE = frozenset(
    {
        "storage", "workers", "strategy", "accelerator", "checkpoint_steps", "keep", "failures",
        "place_deadline_s", "hang_deadline_s", "evaluate_epochs", "epochs",
    }
)  # fmt: skip


def describe(job: Job) -> dict[str, str]:
    """Every field of the job as text; the same job gives the same text in another process."""
    return {name: _text(getattr(job, name)) for name in type(job).model_fields}


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Lines that say which fields that matter to the result differ."""
    names = [name for name in new if name not in _FREE and old.get(name) != new[name]]
    return [f"{name}: {old.get(name, 'absent')} -> {new[name]}" for name in names]


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(item)}" for key, item in sorted(value.items()))
    if callable(value) and not inspect.isclass(value):
        return f"{_name(value)} [{_fingerprint(value)[:8]}]"
    return str(value)


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__)).removeprefix("<locals>.")


def _fingerprint(function: Any) -> str:
    """Changes with the code, its defaults and what it closes over, not with comments or position."""
    code = getattr(function, "__code__", None)
    if code is None:
        facts = [f"{name}={_text(value)}" for name, value in sorted(getattr(function, "__dict__", {}).items())]
        facts += [_text(getattr(function, part, "")) for part in ("func", "args", "keywords")]  # of a partial
    else:
        cells = [_text(cell.cell_contents) for cell in function.__closure__ or ()]
        facts = [_source(function) or _code(code), repr(function.__defaults__), *cells]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


def _source(function: Callable[..., Any]) -> str:
    """The function's syntax tree as text; empty where there is no source or it is a part of a line (a lambda)."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return ""
    return ast.dump(tree) if isinstance(tree.body[0], ast.FunctionDef) else ""


def _code(code: CodeType) -> str:
    constants = [_code(item) if isinstance(item, CodeType) else repr(item) for item in code.co_consts]
    return "\0".join([code.co_code.hex(), *code.co_names, *constants])
