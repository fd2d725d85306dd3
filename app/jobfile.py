"""Job files: Python with a Job in it, and overrides from the command line."""

from __future__ import annotations

import ast
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from trainwright.core.errors import JobError, TrainwrightError, UserCodeError, nearest
from trainwright.core.job import Job

_TEXTS = ("name", "storage")  # a run may be called 2024


def load_job(path: str, overrides: Iterable[str] = ()) -> Job:
    """The job of a file, its `field=value` overrides applied.

    Raises:
        JobError: there is no such file, no job or more than one in it, or an override is wrong.
        UserCodeError: the file raised.
    """
    file = Path(path)
    if not file.is_file():
        raise JobError([f"{path}: there is no such file"])
    job = _job_of(_run(file), path)
    fields = _parse(overrides)
    return job.replace(**fields) if fields else job


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
        what = f"the job file raised {type(error).__name__}: {error}"
        raise UserCodeError(what, where=str(file), detail=_own_frames(error)) from error
    return module


def _own_frames(error: Exception) -> str:
    """The traceback from the job file on."""
    below = error.__traceback__.tb_next if error.__traceback__ else None
    while below is not None and "importlib" in below.tb_frame.f_code.co_filename:
        below = below.tb_next
    return "".join(traceback.format_exception(error.with_traceback(below)))


def _job_of(module: ModuleType, path: str) -> Job:
    jobs = {name: value for name, value in vars(module).items() if isinstance(value, Job)}
    if "job" in jobs:
        return jobs["job"]
    if len(jobs) == 1:
        return next(iter(jobs.values()))
    found = f"found {', '.join(jobs)}: name the one to run `job`" if jobs else "write `job = tw.Job(...)` in it"
    raise JobError([f"{path}: one job is needed; {found}"])


def _parse(overrides: Iterable[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    problems = []
    for item in overrides:
        name, equals, text = item.partition("=")
        if not equals:
            problems.append(f"--set {item}: write field=value")
        elif name not in Job.model_fields:
            problems.append(f"--set {item}: {name!r} is no field of Job: {nearest(name, Job.model_fields)}")
        else:
            fields[name] = text if name in _TEXTS else _value(text)
    if problems:
        raise JobError(problems)
    return fields


def _value(text: str) -> Any:
    """A Python literal where it is one, otherwise the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
