"""Plans in words: `dp=8,tp=2,pp=4,micro_batch=4,schedule=1f1b,recompute=full`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainwright.core.errors import PlanError, nearest
from trainwright.core.pipeline_layout import CHUNKED, misplaced
from trainwright.core.plan import Mesh, Plan
from trainwright.core.staleness import Consistency, Outer, Wire

_NUMBERS = (
    "dp", "fsdp", "tp", "pp", "sequence", "zero", "offload", "micro_batch", "accumulation", "chunks", "servers",
    "local_steps",
)  # fmt: skip
_BOUNDS: Mapping[str, tuple[int, int | None]] = {
    "zero": (0, 3),
    "offload": (0, 1),
    "sequence": (0, 1),
    "micro_batch": (0, None),
}
_WORDS: Mapping[str, tuple[str, ...]] = {
    "schedule": ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "pipedream"),
    "recompute": ("none", "selective", "full"),
    "precision": ("fp32", "tf32", "fp16", "bf16"),
}
_FORMS: Mapping[str, Callable[[str], object]] = {
    "consistency": Consistency.parse,
    "wire": Wire.parse,
    "outer": Outer.parse,
}
_COMMA = re.compile(r",(?![^()]*\))")  # not one between parentheses


def fields_of(text: str) -> dict[str, Any]:
    """The fields of a plan that `Plan.parse` reads, with what is left out filled in."""
    given = _given(text)
    mesh, zero = _mesh_of(given)
    if mesh.pipeline > 1:
        given = {"micro_batch": 0 if "accumulation" in given else 1, "schedule": "1f1b"} | given
    if given.get("schedule") in CHUNKED:
        given = {"chunks": 2} | given
    alone = {"topology": "independent", "consistency": "sync"} if "servers" in given else {}
    strategy = strategy_of(mesh, servers=given.get("servers", 0), local_steps=given.get("local_steps", 1))
    return {"strategy": strategy, "mesh": mesh, **alone, **given, "zero": zero}


def lone(text: str) -> str:
    """What of a job's `plan=` is for one device too: how many micro-batches there are."""
    parts = [part.strip() for part in _COMMA.split(text)]
    return ",".join(part for part in parts if part.partition("=")[0].strip() in ("accumulation", "micro_batch"))


def _given(text: str) -> dict[str, Any]:
    """What the text says, by name."""
    given: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in _COMMA.split(text))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        given[name] = _value(name, value, text)
    problem = misplaced(given["schedule"], given["chunks"]) if {"schedule", "chunks"} <= given.keys() else ""
    if problem:
        raise PlanError(problem, where=text, remedy="leave chunks= out")
    return given


def _mesh_of(given: dict[str, Any]) -> tuple[Mesh, int]:
    """The degrees, which are taken out, and what is sharded."""
    numbers = {name: given.pop(name, 1) for name in ("dp", "tp", "pp")}
    most = 2 if numbers["pp"] > 1 else 3  # a pipeline gathers a stage's parameters once a step
    zero, fsdp = given.get("zero", most if "fsdp" in given else 0), given.pop("fsdp", None)
    data, shard = (numbers["dp"], fsdp) if fsdp else (1, numbers["dp"]) if zero else (numbers["dp"], 1)
    return Mesh(pipeline=numbers["pp"], data=data, shard=shard, tensor=numbers["tp"]), zero


def text_of(plan: Plan) -> str:
    """What `fields_of` reads."""
    mesh = plan.mesh
    hybrid = mesh.shard > 1 and mesh.data > 1
    parts = {
        "dp": mesh.data if hybrid else mesh.data_ranks,
        "fsdp": mesh.shard if hybrid else 1,
        "tp": mesh.tensor,
        "sequence": int(plan.sequence),
        "pp": mesh.pipeline,
        "zero": plan.zero,
        "offload": int(plan.offload),
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "schedule": plan.schedule,
        "chunks": plan.chunks,
        "recompute": plan.recompute,
        "servers": plan.servers,
        "consistency": plan.consistency,
        "wire": plan.wire,
        "local_steps": plan.local_steps,
        "outer": plan.outer,
    }
    idle = {
        "zero": 0, "offload": 0, "sequence": 0, "micro_batch": 0, "schedule": "", "recompute": "none", "servers": 0,
        "consistency": "sync" if plan.servers else "", "wire": "full", "outer": "",
    }  # fmt: skip
    kept = {name: value for name, value in parts.items() if value != idle.get(name, 1)}
    if mesh.pipeline > 1 and not plan.micro_batch:
        kept["accumulation"] = plan.accumulation
    return ",".join(f"{name}={value}" for name, value in kept.items())


@dataclass(frozen=True, kw_only=True)
class Pins:
    """What a job says of its plan.

    Attributes:
        text: of its `plan=`.
        fields: of its other fields, by their names.
        mesh: degrees; where one is given, those that are left out are 1. None where none is given.
        choices: all else, by the names of `Plan.parse`.
    """

    text: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mesh | None = None
    choices: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Pins:
        """Raises PlanError where a name or a value is not known."""
        given = _given(text)
        if "precision" in given:
            raise PlanError("precision is a field of the job", where=text, remedy="write precision= beside plan=")
        if not {"dp", "fsdp", "tp", "pp"} & given.keys():
            return cls(text=text, choices=given)
        mesh, zero = _mesh_of(given)
        return cls(text=text, mesh=mesh, choices=given | {"zero": zero})

    def beside(self, choices: Mapping[str, Any]) -> Pins:
        """These, and others that a job gives as fields of its own.

        Raises:
            PlanError: one of them is given twice, and differs.
        """
        for name, value in choices.items():
            if self.choices.get(name, value) != value:
                said = f"{name}={value!r} is not the {name}={self.choices[name]} of plan={self.text!r}"
                raise PlanError(said, where="plan", remedy="leave one of them out")
        return replace(self, fields=choices, choices={**self.choices, **choices})

    def __str__(self) -> str:
        """As the job has it: `plan='dp=2', consistency='async'`."""
        given = {"plan": self.text} if self.text else {}
        return ", ".join(f"{name}={value!r}" for name, value in {**given, **self.fields}.items())

    def allow(self, plan: Plan) -> bool:
        """Whether a plan is as it is said."""
        if self.mesh is not None and self.mesh != plan.mesh:
            return False
        found = {name: getattr(plan, name) for name in self.choices}
        if "consistency" in found:  # ranks that step together need no word for it
            found["consistency"] = plan.consistency or "sync"
        if "micro_batch" in found:
            found["micro_batch"] = plan.micro_batches(plan.batch_size)[1]
        return found == dict(self.choices)


def strategy_of(mesh: Mesh, *, servers: int = 0, local_steps: int = 1) -> str:
    """The strategy that offers such a mesh, with so many servers."""
    if servers:
        return "local_sgd" if local_steps > 1 else "parameter_server"
    degrees = {
        "pipeline": mesh.pipeline, "tensor_parallel": mesh.tensor, "sharded": mesh.shard, "data_parallel": mesh.data,
    }  # fmt: skip
    return next((name for name, degree in degrees.items() if degree > 1), "one_device")


def _value(name: str, value: str, text: str) -> Any:
    if name in _WORDS:
        if value not in _WORDS[name]:
            raise PlanError(f"{name}={value!r} is not known", where=text, remedy=nearest(value, _WORDS[name]))
        return value
    if name in _FORMS:
        return str(_FORMS[name](value))
    if name not in _NUMBERS:
        known = (*_NUMBERS, *_WORDS, *_FORMS)
        raise PlanError(f"{name!r} is no part of a plan", where=text, remedy=nearest(name, known))
    least, most = _BOUNDS.get(name, (1, None))
    if not value.isdigit() or int(value) < least or (most is not None and int(value) > most):
        wanted = {1: "0 or 1", 3: "0, 1, 2 or 3"}.get(most or 0, f"a whole number from {least}")
        raise PlanError(f"{name}={value!r} must be {wanted}", where=text, remedy=f"write {name}={most or 2}, for one")
    return bool(int(value)) if name in ("offload", "sequence") else int(value)
