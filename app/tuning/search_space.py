"""The search space: which options are varied over which values, the settings drawn from it, and their jobs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from ray import tune
from ray.tune.search.sample import Domain
from ray.tune.search.variant_generator import generate_variants

from trainwright.core.errors import JobError, nearest
from trainwright.core.job import GROUP_OF, GROUPS, Job
from trainwright.planning.code_fingerprint import CodeFingerprints

Params = dict[str, Any]
"""A value for each name of a search space."""

_OWN = ("name", "storage")  # of the search, which names the runs of its trials


def draw_settings(space: Mapping[str, Any], trials: int, seed: int) -> list[Params]:
    """Return the settings of a search, without repetitions. More trials add settings after the same first ones.

    Args:
        space: name -> search-space object of Ray Tune, or values.
        trials: times that settings are drawn; each time, all combinations of `grid_search` values are.
        seed: of the draws.
    """
    values = {name: tune.choice(value) if isinstance(value, list | tuple) else value for name, value in space.items()}
    random = np.random.default_rng(seed)
    found: dict[str, Params] = {}
    for _ in range(trials):
        for _, spec in generate_variants({"config": values}, random_state=random):
            setting = {name: spec["config"][name] for name in space}
            found.setdefault(CodeFingerprints().digest(setting), setting)
    return list(found.values())


def setting_text(setting: Params) -> str:
    """Return the setting for people: `optimizer.lr = 0.01, batch_size = 32`."""
    return ", ".join(f"{name} = {value_text(value)}" for name, value in setting.items())


def value_text(value: Any) -> str:
    """Return a value of a setting for people; functions and classes by their names."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(getattr(value, "__name__", value))


def space_problems(target: Job | Callable[..., Job], space: Mapping[str, Any]) -> list[str]:
    """Describe what is wrong with a search space.

    Args:
        target: a job, whose options are varied, or a function, whose parameters are.
        space: as of `draw_settings`.
    """
    if not space:
        return ['space= is empty: name what is varied, such as {"optimizer.lr": ray.tune.loguniform(1e-4, 1e-1)}']
    names = _option_problems(target, space) if isinstance(target, Job) else _parameter_problems(target, space)
    return [*names, *_value_problems(space)]


def job_of(target: Job | Callable[..., Job], setting: Params) -> Job:
    """Return the job of a setting. Raises JobError where it is wrong."""
    try:
        job = _changed(target, setting) if isinstance(target, Job) else target(**setting)
    except JobError as error:
        raise JobError([f"{problem} (with {setting_text(setting)})" for problem in error.problems]) from None
    if not isinstance(job, Job):
        raise JobError([f"the function of tw.tune returned {type(job).__name__}: return a tw.Job"])
    return job


def _changed(job: Job, setting: Params) -> Job:
    """Return the job with changed options, and with functions that have changed parameters."""
    changes: dict[str, Any] = {}
    parameters: dict[str, dict[str, Any]] = {}
    for name, value in setting.items():
        first, _, rest = name.partition(".")
        if rest and first not in GROUPS:
            parameters.setdefault(first, {})[rest] = value
        else:
            changes[rest or first] = value
    for name, given in parameters.items():
        changes[name] = functools.partial(changes.get(name, job.get(name)), **given)
    return job.replace(**changes)


def _option_problems(job: Job, space: Mapping[str, Any]) -> Iterator[str]:
    """Describe names that are neither options of the job nor parameters of its functions."""
    for name in space:
        first, _, rest = name.partition(".")
        if first in _OWN:
            yield f"space={name!r} cannot be varied: the search names the runs of its trials"
        elif first not in GROUP_OF and first not in Job.model_fields:
            yield f"space={name!r} is no option of a job: {Job.advice_on(first)}"
        elif rest and first in GROUPS:
            if rest not in GROUPS[first].model_fields:
                yield f"space={name!r} is no option of {first}=: {GROUPS[first].advice_on(rest)}"
        elif rest and first not in space:
            yield from _unknown_parameter(name, job.get(first), rest)


def _unknown_parameter(name: str, function: Any, parameter: str) -> Iterator[str]:
    """Describe a parameter that a function of the job does not have."""
    first = name.partition(".")[0]
    if not callable(function):
        yield f"space={name!r} is a parameter of {first}=, which is no function: name the option alone"
        return
    known = _parameters(function)
    if known is not None and parameter not in known:
        yield f"space={name!r} is no parameter of {first}=: {nearest(parameter, known)}"


def _parameter_problems(function: Callable[..., Job], space: Mapping[str, Any]) -> Iterator[str]:
    """Describe names that are no parameters of a function, and parameters without values."""
    known = _parameters(function)
    if known is None:
        return
    for name in space:
        if name not in known:
            yield f"space={name!r} is no parameter of the function: {nearest(name, known)}"
    for name, required in known.items():
        if required and name not in space:
            yield f"space= has no values for the parameter {name!r} of the function: add them, or give it a default"


def _parameters(function: Callable[..., Any]) -> dict[str, bool] | None:
    """Return the names that a function takes as keywords, and whether each is required; None where any name works."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a function that is not Python's
        return None
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return {each.name: each.default is each.empty for each in named}


def _value_problems(space: Mapping[str, Any]) -> Iterator[str]:
    """Describe values that are no search space."""
    for name, value in space.items():
        grid = value.get("grid_search") if isinstance(value, Mapping) else None
        if isinstance(value, list | tuple) or grid is not None:
            if not (value if grid is None else grid):
                yield f"space={name!r} has no values: list at least one"
        elif not isinstance(value, Domain):
            yield (
                f"space={name!r} has the value {value!r}: give a list of values, or a search space of Ray Tune such as "
                "ray.tune.loguniform(1e-4, 1e-1)"
            )
