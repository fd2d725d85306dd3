"""Load job files: Python files with a job or a distillation, or a function that makes one, and apply overrides."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeGuard

from pydantic import ValidationError, validate_call

from trainwright.core.errors import JobError, TrainwrightError, UserCodeError, nearest
from trainwright.core.frameworks import missing_framework
from trainwright.core.job import Job
from trainwright.core.peer_options import advice_of
from trainwright.core.strict_model import StrictModel

_TEXTS = ("name", "storage")  # a run may be called 2024
_STRINGS = ("string_type", "literal_error")  # what pydantic says where only strings will do


@dataclass(frozen=True, kw_only=True)
class _FileObject:
    """A kind of object that a file can hold: its names, the usual one first, a check, and how it is written."""

    names: tuple[str, ...]
    fits: Callable[[Any], bool]
    written: str


def _is_distillation(value: Any) -> bool:
    """Return whether `tw.distill` takes a value: a Distillation, or a recipe with its own `distill`."""
    return callable(getattr(type(value), "distill", None)) or type(value).__name__ == "Distillation"


_JOB = _FileObject(names=("job",), fits=lambda value: isinstance(value, Job), written="tw.Job(...)")
_DISTILLATION = _FileObject(
    names=("distillation", "search", "recipe"), fits=_is_distillation, written="tw.Distillation(...)"
)


def load_job(path: str, overrides: Iterable[str] = ()) -> Job:
    """Return the job of a job file, with fields overridden as by the option `--set`.

    If `job` is a function in the file, it is called. Its own arguments may be overridden too, and are checked by
    their types: `def job(size: Literal["laptop", "cluster"] = "laptop") -> tw.Job`, and `size=cluster`.

    Args:
        path: the Python file.
        overrides: texts such as `epochs=3`: a field, and a Python literal or a text.

    Raises:
        JobError: there is no such file, no job or more than one in it, or an override is wrong.
        UserCodeError: the file, or its function, raised.
    """
    job: Job = _loaded(_module(path), _JOB, path, overrides)
    return job


def load_distillation(path: str, overrides: Iterable[str] = ()) -> Any:
    """Return the `distillation`, `search` or `recipe` of a file, or the result of a function of that name.

    Overrides are of its own fields, then of those of its parts, such as the student's job and the loss:
    `temperature=4`, `epochs=3`; a part may be named: `student.targets=label`. Arguments and errors are as of
    `tw.load_job`.
    """
    return _loaded(_module(path), _DISTILLATION, path, overrides)


def load(path: str, overrides: Iterable[str] = ()) -> Any:
    """Return the distillation of a file, or else its job. Raises as `load_job`."""
    module = _module(path)
    held = vars(module)
    makers = [name for name in _DISTILLATION.names if _makes(held.get(name))]
    distilling = any(map(_is_distillation, held.values())) or (
        makers and ("distillation" in makers or "job" not in held)
    )
    return _loaded(module, _DISTILLATION if distilling else _JOB, path, overrides)


def _loaded(module: ModuleType, sought: _FileObject, path: str, overrides: Iterable[str]) -> Any:
    make = next((vars(module)[name] for name in sought.names if name in vars(module)), None)
    texts, problems = _texts(overrides)
    if not _makes(make):
        value = _value_of(module, sought, path)
        return _changed(value, texts, problems)
    arguments = tuple(inspect.signature(make).parameters)
    own = {name: texts.pop(name) for name in arguments if name in texts}
    value = _made(make, own, _values(own), path, sought)
    return _changed(value, texts, problems, arguments)


def _makes(value: Any) -> TypeGuard[FunctionType]:
    """Return whether a value is a function of the user, unlike `tw.search`."""
    return isinstance(value, FunctionType) and not value.__module__.startswith("trainwright.")


def _made(make: FunctionType, texts: dict[str, str], values: dict[str, Any], path: str, sought: _FileObject) -> Any:
    """Call a file's function with values, or with their text where it takes only strings: a tag may be 2024."""
    wrong: list[Any] = []
    made: Any = None
    try:
        made = validate_call(make)(**values)
    except ValidationError as error:
        wrong = error.errors()
        names = inspect.signature(make).parameters
        if error.title != make.__name__ or any(item["loc"][:1] not in [(name,) for name in names] for item in wrong):
            raise _raised(f"{make.__name__}()", error, path) from error
    except TrainwrightError:
        raise
    except Exception as error:
        raise _raised(f"{make.__name__}()", error, path) from error
    strings = {item["loc"][0] for item in wrong if item["type"] in _STRINGS}
    again = {name: text for name, text in texts.items() if name in strings and values[name] != text}
    if again:
        return _made(make, texts, values | again, path, sought)
    if wrong:
        raise JobError([_problem(item, make.__name__) for item in wrong], where=path)
    if not sought.fits(made):
        raise JobError([f"{path}: {make.__name__}() returned {type(made).__name__}: return {sought.written}"])
    return made


def _problem(item: Any, make: str) -> str:
    """Describe a problem that pydantic found: the argument and the remedy."""
    name = item["loc"][0]
    if item["type"] == "missing_argument":
        return f"{make}() has no value for {name}: give it one, or --set {name}=..."
    return f"--set {name}={item['input']}: {item['msg'][0].lower()}{item['msg'][1:]}"


def _module(path: str) -> ModuleType:
    """Run a job file."""
    file = Path(path)
    if not file.is_file():
        hint = "" if file.suffix else "; give the path of a job file, such as job.py: the name of a run is not enough"
        raise JobError([f"{path}: there is no such file{hint}"])
    name = f"trainwright_job_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise JobError([f"{file}: a job file is Python and ends in .py"])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except TrainwrightError:
        raise
    except Exception as error:
        raise _raised("the job file", error, path) from error
    return module


def _raised(what: str, error: Exception, path: str) -> UserCodeError:
    """Return an error of user code with the traceback from the job file on."""
    absent = missing_framework(error, path)
    if absent is not None:
        return absent
    file = Path(path).resolve()
    below = error.__traceback__
    while below is not None and Path(below.tb_frame.f_code.co_filename) != file:
        below = below.tb_next
    detail = "".join(traceback.format_exception(error.with_traceback(below)))
    return UserCodeError(f"{what} raised {type(error).__name__}: {error}", where=path, detail=detail)


def _value_of(module: ModuleType, sought: _FileObject, path: str) -> Any:
    found = {name: value for name, value in vars(module).items() if sought.fits(value)}
    named = [name for name in sought.names if name in found]
    if named or len(found) == 1:
        return found[named[0] if named else next(iter(found))]
    name = sought.names[0]
    listed = f"found {', '.join(found)}: name the one to run `{name}`"
    told = listed if found else f"write `{name} = {sought.written}` in it"
    raise JobError([f"{path}: one {name} is needed; {told}"])


def _texts(overrides: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return the overrides' texts by name, and the problems of the others."""
    texts: dict[str, str] = {}
    problems = []
    for item in overrides:
        name, equals, text = item.partition("=")
        if equals:
            texts[name] = text
        else:
            problems.append(f"--set {item}: write field=value")
    return texts, problems


def _changed(value: Any, texts: Mapping[str, str], problems: list[str], arguments: tuple[str, ...] = ()) -> Any:
    """Return a job or a distillation with overridden fields. Raises JobError with all problems."""
    changes: dict[tuple[str, ...], dict[str, Any]] = {}
    for name, new in _values(texts).items():
        owner = _owner(value, name)
        if owner is None:
            known = _dotted_names(value) if "." in name else (*arguments, *_names(value))
            kind = type(value).__name__
            told = advice_of(name) or nearest(name, known)
            problems.append(f"--set {name}={texts[name]}: {name!r} is not a field of {kind}: {told}")
        else:
            changes.setdefault(owner, {})[name.rpartition(".")[2]] = new
    if problems:
        raise JobError(problems)
    return _rebuilt(value, changes) if changes else value


def _owner(value: Any, name: str) -> tuple[str, ...] | None:
    """Return the path from a value to the part that has a field, () for the value itself; None where no part has it."""
    first, dot, rest = name.partition(".")
    parts = _parts(value)
    if dot:
        found = _owner(parts[first], rest) if first in parts else None
        return None if found is None else (first, *found)
    if isinstance(value, StrictModel) and name in type(value).model_fields:
        return ()
    below = ((part, _owner(inner, name)) for part, inner in parts.items())
    return next(((part, *way) for part, way in below if way is not None), None)


def _parts(value: Any) -> dict[str, StrictModel]:
    """Return the parts of a value that have fields, by name."""
    if not isinstance(value, StrictModel):
        return {}
    held = ((name, getattr(value, name)) for name in type(value).model_fields)
    return {name: part for name, part in held if isinstance(part, StrictModel)}


def _names(value: Any) -> tuple[str, ...]:
    """Return the names of all fields of a value and of its parts."""
    own = tuple(type(value).model_fields) if isinstance(value, StrictModel) else ()
    return (*own, *(name for part in _parts(value).values() for name in _names(part)))


def _dotted_names(value: Any) -> tuple[str, ...]:
    """Return the names of all fields with the parts that lead to them, such as `recovery.spares`.

    Any number of these parts may be left out from the front or from within: all such names are included.
    """
    found = []
    for part, inner in _parts(value).items():
        below = _dotted_names(inner)
        found += [f"{part}.{name}" for name in (*_names(inner), *below)]
        found += below
    return tuple(dict.fromkeys(found))


def _rebuilt(value: Any, changes: Mapping[tuple[str, ...], Mapping[str, Any]]) -> Any:
    """Return a value with fields of itself and of its parts changed, given by path; validated like a new value."""
    own = dict(changes.get((), {}))
    for part in {way[0] for way in changes if way}:
        inner = {way[1:]: fields for way, fields in changes.items() if way[:1] == (part,)}
        own[part] = _rebuilt(own.get(part, getattr(value, part)), inner)
    return value.replace(**own)


def _values(texts: Mapping[str, str]) -> dict[str, Any]:
    return {name: text if name.rpartition(".")[2] in _TEXTS else _value(text) for name, text in texts.items()}


def _value(text: str) -> Any:
    """Return the value of a Python literal, or else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
