"""A job in words that can be stored, compared and shown: what each field is, functions by their code."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping
from types import CodeType
from typing import Any

from trainwright.core.job import Job
from trainwright.core.secrets import without_secrets
from trainwright.datasets.sources import Index

# Fields that say where or how fast a job runs, and never what it computes.
_FREE = frozenset(
    {
        "storage", "workers", "min_workers", "max_workers", "shrink_s", "spares", "strategy", "plan", "probe",
        "accelerator",        "checkpoint_steps", "keeper_s", "keep", "failures", "on_crash_loop",
        "failures_an_hour", "place_deadline_s", "hang_deadline_s", "evaluate_epochs", "skip_limit", "preemption_s",
        "replace_stragglers", "devices", "tf_config",
        "tpu", "trackers",
    }
)  # fmt: skip
_DATA = ", data "  # what follows says what a data set holds, whatever it is called and wherever it lies
_PLACE = re.compile(r" at 0x[0-9a-f]+")  # where an object without a repr of its own lies in memory


def describe(job: Job, *, train: Index | None = None, evaluate: Index | None = None) -> dict[str, str]:
    """Every field of the job as text, without secrets; the same job gives the same text in another process.

    Args:
        train: index of the training set.
        evaluate: index of the evaluation set.
    """
    words = {name: _text(getattr(job, name)) for name in type(job).model_fields}
    words["trackers"] = ", ".join(type(each).__name__ for each in job.trackers)  # no more: they may hold a secret
    for name, index in (("train", train), ("evaluate", evaluate)):
        dataset = getattr(job, name)
        if dataset is not None:
            words[name] = f"{dataset!r}, {_rows(index)}{_DATA}{_contents(dataset.functions, index)}"
    return {name: without_secrets(text) for name, text in words.items()}


def _rows(index: Index | None) -> str:
    return f"{index.rows:,} rows in {len(index.groups):,} row groups" if index else "not looked at"


def _contents(functions: Iterable[Any], index: Index | None) -> str:
    codes = [_fingerprint(function) for function in functions]
    return (index.hash[:8] if index else "") + (f", functions {_digest(codes)[:8]}" if codes else "")


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Lines that say which fields that matter to the result differ.

    A data set is the same wherever it lies; more epochs are another result only where a schedule looks at the end. What
    has become a secret since the old one was written is none in the new one, and no difference.
    """
    old = {name: without_secrets(words) for name, words in old.items()}
    free = _FREE if new["schedule"] != "None" else _FREE | {"epochs", "epoch_samples"}
    names = [
        name for name in new if name not in free and _essence(name, old.get(name, "")) != _essence(name, new[name])
    ]
    return [f"{name}: {old.get(name, 'absent')} -> {new[name]}" for name in names]


def essence(description: Mapping[str, str]) -> dict[str, str]:
    """What of a description a process's state depends on; see `changes`."""
    return {name: _essence(name, words) for name, words in description.items() if name not in _FREE}


def _essence(name: str, words: str) -> str:
    return words.rpartition(_DATA)[2] if name in ("train", "evaluate") else words


def _text(value: Any, above: tuple[int, ...] = ()) -> str:
    if id(value) in above:
        return "..."  # a function that closes over itself
    above = (*above, id(value))
    if isinstance(value, Mapping):
        return ", ".join(f"{_text(key, above)}={_text(item, above)}" for key, item in sorted(value.items(), key=str))
    if isinstance(value, tuple | list):
        return f"({', '.join(_text(item, above) for item in value)})" if value else "()"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_text(item, above) for item in value))}}}"
    if callable(value) and not inspect.isclass(value):
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{str(name).replace('<locals>.', '')} [{_fingerprint(value, above)[:8]}]"
    return _PLACE.sub("", str(value))


def _fingerprint(function: Any, above: tuple[int, ...] = ()) -> str:
    """Changes with the code, its defaults and what it closes over, not with comments or position."""
    code = getattr(function, "__code__", None)
    if code is None:
        facts = [_text(getattr(function, "__dict__", {}), above)]
        facts += [_text(getattr(function, part, ""), above) for part in ("func", "args", "keywords")]  # of a partial
        facts += _methods(getattr(function, "func", None))
    else:
        cells = [_text(value, above) for value in _closed_over(function)]
        facts = [_source(function) or _code(code), _text(function.__defaults__, above), *cells]
    return _digest(facts)


def _methods(kind: Any) -> list[str]:
    """The code of a class in the place of a function."""
    if not inspect.isclass(kind):
        return []
    own = {name: value for each in kind.__mro__ for name, value in vars(each).items() if inspect.isfunction(value)}
    return [_source(method) or _code(method.__code__) for _, method in sorted(own.items())]


def _digest(facts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


def _closed_over(function: Any) -> list[Any]:
    values = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            values.append(None)
    return values


def _source(function: Any) -> str:
    """The function's syntax tree as text; empty where there is no source or it is a part of a line (a lambda)."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return ""
    return ast.dump(tree) if isinstance(tree.body[0], ast.FunctionDef) else ""


def _code(code: CodeType) -> str:
    constants = [_code(item) if isinstance(item, CodeType) else _text(item) for item in code.co_consts]
    return "\0".join([code.co_code.hex(), *code.co_names, *constants])
