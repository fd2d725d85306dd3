"""Strict fields: unknown ones are refused with the nearest valid name, and all problems are told at once."""

from __future__ import annotations

import re
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from trainwright.core.errors import JobError, nearest
from trainwright.core.misplaced_objects import function_problem

_ALTERNATIVE = re.compile(r"literal\[|constrained-|callable$")  # how pydantic names the members of a union


class Fields(BaseModel):
    """What a user fills in. Frozen; raises JobError."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, protected_namespaces=())

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise JobError(_problems(error, type(self)), where=_named(type(self))) from None

    def replace(self, **fields: Any) -> Self:
        """A copy with some fields changed, validated like a new one."""
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, **fields})


def _named(kind: type[Fields]) -> str:
    return "job" if kind.__name__ == "Job" else kind.__name__


def _problems(error: ValidationError, kind: type[Fields]) -> list[str]:
    """Every problem pydantic found, in words that name the field and the remedy."""
    problems: list[str] = []
    wrong: dict[str, str] = {}
    for item in error.errors():
        parts = [str(part) for part in item["loc"]]
        cause = item.get("ctx", {}).get("error")
        if item["type"] == "extra_forbidden":
            near = nearest(parts[-1], kind.model_fields)
            problems.append(f"{'.'.join(parts)}= is no field of {kind.__name__}: {near}")
        elif item["type"] == "missing":
            problems.append(f"{'.'.join(parts)}= is missing")
        elif isinstance(cause, JobError):
            problems.extend(cause.problems)
        elif item["type"] == "callable_type" and (known := function_problem(parts[0], item["input"])):
            problems.append(known)
        else:
            field = f"{'.'.join(part for part in parts if not _ALTERNATIVE.match(part))}={item['input']!r}"
            said = f"{item['msg'][0].lower()}{item['msg'][1:]}"
            wrong[field] = f"{wrong[field]}, or {said}" if field in wrong else said
    return problems + [f"{field}: {said}" for field, said in wrong.items()]
