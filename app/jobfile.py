"""Job files: Python with a Job in it, or a function that makes one, and overrides from the command line."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from pydantic import ValidationError, validate_call

from trainwright.core.errors import JobError, TrainwrightError, UserCodeError, nearest
from trainwright.core.job import Job

_TEXTS = ("name", "storage")  # a run may be called 2024
_STRINGS = ("string_type", "literal_error")  # what pydantic says where only strings will do


def load_job(path: str, overrides: Iterable[str] = ()) -> Job:
    """The job of a file, its `field=value` overrides applied.

    Where the file's `job` is a function, it is called. Its own arguments may be overridden too, and are checked by
    their types: `def job(size: Literal["laptop", "cluster"] = "laptop") -> tw.Job`, and `size=cluster`.

    Raises:
        JobError: there is no such file, no job or more than one in it, or an override is wrong.
        UserCodeError: the file, or its function, raised.
    """
    file = Path(path)
    if not file.is_file():
        raise JobError([f"{path}: there is no such file"])
    module = _run(file)
    make = vars(module).get("job")
    if isinstance(make, FunctionType):
        arguments = tuple(inspect.signature(make).parameters)
        texts = _parse(overrides, arguments)
        own = {name: texts.pop(name) for name in arguments if name in texts}
        job = _made(make, own, _values(own), path)
    else:
        job, texts = _job_of(module, path), _parse(overrides)
    return job.replace(**_values(texts)) if texts else job


def _made(make: FunctionType, texts: dict[str, str], values: dict[str, Any], path: str) -> Job:
    """What a file's function makes of values; where it takes a string alone, of the text: a tag may be 2024."""
    wrong: list[Any] = []
    job: Any = None
    try:
        job = validate_call(make)(**values)
    except ValidationError as error:
        wrong = error.errors()
        names = inspect.signature(make).parameters
        if error.title != make.__name__ or any(item["loc"][:1] not in [(name,) for name in names] for item in wrong):
            raise _raised("job()", error, path) from error
    except TrainwrightError:
        raise
    except Exception as error:
        raise _raised("job()", error, path) from error
    strings = {item["loc"][0] for item in wrong if item["type"] in _STRINGS}
    again = {name: text for name, text in texts.items() if name in strings and values[name] != text}
    if again:
        return _made(make, texts, values | again, path)
    if wrong:
        raise JobError([_problem(item) for item in wrong], where=path)
    if not isinstance(job, Job):
        raise JobError([f"{path}: job() returned {type(job).__name__}: return tw.Job(...)"])
    return job


def _problem(item: Any) -> str:
    """What pydantic found, in words that name the argument."""
    name = item["loc"][0]
    if item["type"] == "missing_argument":
        return f"job() has no value for {name}: give it one, or --set {name}=..."
    return f"--set {name}={item['input']}: {item['msg'][0].lower()}{item['msg'][1:]}"


def _run(file: Path) -> ModuleType:
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
        raise _raised("the job file", error, str(file)) from error
    return module


def _raised(what: str, error: Exception, path: str) -> UserCodeError:
    """An error of the user's with the traceback from the job file on."""
    file = Path(path).resolve()
    below = error.__traceback__
    while below is not None and Path(below.tb_frame.f_code.co_filename) != file:
        below = below.tb_next
    detail = "".join(traceback.format_exception(error.with_traceback(below)))
    return UserCodeError(f"{what} raised {type(error).__name__}: {error}", where=path, detail=detail)


def _job_of(module: ModuleType, path: str) -> Job:
    jobs = {name: value for name, value in vars(module).items() if isinstance(value, Job)}
    if "job" in jobs:
        return jobs["job"]
    if len(jobs) == 1:
        return next(iter(jobs.values()))
    found = f"found {', '.join(jobs)}: name the one to run `job`" if jobs else "write `job = tw.Job(...)` in it"
    raise JobError([f"{path}: one job is needed; {found}"])


def _parse(overrides: Iterable[str], arguments: tuple[str, ...] = ()) -> dict[str, str]:
    """Texts by name, of fields of the job and of `arguments`."""
    known = (*arguments, *Job.model_fields)
    fields: dict[str, str] = {}
    problems = []
    for item in overrides:
        name, equals, text = item.partition("=")
        if not equals:
            problems.append(f"--set {item}: write field=value")
        elif name not in known:
            problems.append(f"--set {item}: {name!r} is no field of Job: {nearest(name, known)}")
        else:
            fields[name] = text
    if problems:
        raise JobError(problems)
    return fields


def _values(texts: dict[str, str]) -> dict[str, Any]:
    return {name: text if name in _TEXTS else _value(text) for name, text in texts.items()}


def _value(text: str) -> Any:
    """A Python literal where it is one, otherwise the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
