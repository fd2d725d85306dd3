"""Base of the models that users fill in: unknown fields are refused with the nearest name, all problems at once.

It also explains objects in the wrong place, such as a DataFrame as a data set, and finds the function that takes one.
Their types are recognized by name, so that no framework is imported.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from types import FunctionType
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, ValidationError

from trainwright.core.engine import takes_optimizer, unset_parameters
from trainwright.core.errors import DataError, JobError, nearest

_DURATION = re.compile("".join(rf"(?:([\d.]+){unit})?" for unit in "dhms"))
_UNITS_S = (86_400, 3_600, 60, 1)
_LITERAL = re.compile(r"'([^']*)'")  # a value that pydantic expects
_ALTERNATIVE = re.compile(r"literal\[|constrained-|callable$|tuple\[|dict\[")  # pydantic's names of a union's members


class StrictModel(BaseModel):
    """Base of frozen models that users fill in. Raises JobError."""

    error_name: ClassVar[str] = ""  # name in errors; by default the name of the class

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, protected_namespaces=())

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise JobError(_problems(error, type(self)), where=self.error_name or type(self).__name__) from None

    def explicit(self) -> dict[str, Any]:
        """Return the fields that were set explicitly, by name."""
        return {name: getattr(self, name) for name in self.model_fields_set}

    def replace(self, **fields: Any) -> Self:
        """Return a copy with some fields changed, validated like a new model."""
        return type(self)(**{**self.explicit(), **fields})

    @classmethod
    def advice_on(cls, name: str) -> str:
        """Suggest what to write instead of an unknown field."""
        return nearest(name, cls.model_fields)


def _problems(error: ValidationError, kind: type[StrictModel]) -> list[str]:
    """Describe each problem that pydantic found: the field and the remedy."""
    problems: list[str] = []
    wrong: dict[str, str] = {}
    explained: set[str] = set()  # fields with an object that advice was given on
    for item in error.errors():
        parts = [str(part) for part in item["loc"]]
        cause = item.get("ctx", {}).get("error")
        if item["type"] == "extra_forbidden":
            problems.append(f"{'.'.join(parts)}= is not a field of {kind.__name__}: {kind.advice_on(parts[-1])}")
        elif item["type"] == "missing":
            problems.append(f"{'.'.join(parts)}= is missing")
        elif isinstance(cause, JobError):
            problems.extend(cause.problems)
        elif item["type"] == "callable_type" and (problem := function_problem(parts[0], item["input"])):
            problems.append(problem)
            explained.add(parts[0])
        elif parts[0] not in explained:
            field = f"{'.'.join(part for part in parts if not _ALTERNATIVE.match(part))}={item['input']!r}"
            message = str(cause) if item["type"] == "value_error" else f"{item['msg'][0].lower()}{item['msg'][1:]}"
            if item["type"] == "literal_error":
                message = nearest(str(item["input"]), _LITERAL.findall(item["ctx"]["expected"]))
            wrong[field] = f"{wrong[field]}, or {message}" if field in wrong else message
    return problems + [f"{field}: {message}" for field, message in wrong.items()]


def _parse_duration(value: Any) -> Any:
    """Return the seconds of a text such as `2h30m`; other values as they are. Raises ValueError."""
    if not isinstance(value, str):
        return value
    parts = _DURATION.fullmatch(value.replace(" ", ""))
    if parts is None or not any(parts.groups()):
        raise ValueError("give seconds, or a text such as 2h30m")
    return sum(float(number) * unit for number, unit in zip(parts.groups(default="0"), _UNITS_S, strict=True))


Duration = Annotated[float, Field(gt=0), BeforeValidator(_parse_duration)]
"""Field type of seconds, which a text such as `2h30m` can give."""

_STEPS = re.compile(r"(\d+)(?::(\d+))?")
_MOST_STEPS = 100  # a recording is held in memory until its last step


def _parse_steps(value: Any) -> range:
    """Return the steps of `20:25` (20 to 24, as in a slice), of `20`, or of a range. Raises ValueError."""
    parts = _STEPS.fullmatch(str(value).replace(" ", "")) if isinstance(value, str | int) else None
    if isinstance(value, range) and value.step == 1:
        steps = value
    elif parts is not None:
        start = int(parts[1])
        steps = range(start, int(parts[2]) if parts[2] else start + 1)
    else:
        raise ValueError("give steps as START:STOP, such as 20:25 for steps 20 to 24, or one step, such as 20")
    if steps.start < 1:
        raise ValueError("steps are numbered from 1: 20:25 is steps 20 to 24")
    if not steps:
        raise ValueError("STOP must be greater than START, since it is not included: 20:25 is steps 20 to 24")
    if len(steps) > _MOST_STEPS:
        raise ValueError(f"give {_MOST_STEPS} steps at most: a trace of all their operations is held in memory")
    return steps


StepRange = Annotated[InstanceOf[range], BeforeValidator(_parse_steps)]
"""Field type of a range of steps, from 1."""


# --- Misplaced objects ------------------------------------------------------------------------------------------------


_DATA_REMEDIES: Mapping[str, str] = {
    "tensorflow.python.data.ops.dataset_ops.DatasetV2": "give tw.datasets.from_tf(...), and see there what it takes",
    "keras.src.trainers.data_adapters.py_dataset_adapter.PyDataset": (
        "it gives batches: give the rows, such as tw.datasets.table({...}), or from_torch of an object that gives one"
    ),
    "pandas.core.frame.DataFrame": "give tw.datasets.table(frame)",
    "pandas.DataFrame": "give tw.datasets.table(frame)",
    "pyarrow.lib.Table": "give tw.datasets.table(table)",
    "numpy.ndarray": 'give tw.datasets.table({"x": array, ...})',
    "builtins.dict": "give tw.datasets.table({...})",
    "builtins.str": 'give tw.datasets.parquet("path"), or csv, json_lines, images, text and others of tw.datasets',
}
_DATA_FUNCTIONS = {  # of trainwright.datasets, by the objects that they take
    "datasets.arrow_dataset.Dataset": "from_huggingface",
    "datasets.dataset_dict.DatasetDict": "from_huggingface",  # refused: it has several splits
    "datasets.dataset_dict.IterableDatasetDict": "from_huggingface",
    "datasets.iterable_dataset.IterableDataset": "from_huggingface",  # where torch is imported, also one of torch's
    "ray.data.dataset.Dataset": "from_ray",
    "ray.data.iterator.DataIterator": "from_ray",  # of ray.train.get_dataset_shard
    "torch.utils.data.dataloader.DataLoader": "from_torch",
    "torch.utils.data.dataset.Dataset": "from_torch",
}
_MAP_STYLE = "give tw.datasets.from_torch(dataset, columns=(...))"
_FUNCTION = "give tw.datasets.from_torch(function), from_huggingface(function) or from_tf(function)"
_DATA_REMEDY = "give tw.datasets.parquet(...), tw.datasets.table(...) or another of tw.datasets"

_MODULE, _LAYER = "torch.nn.modules.module.Module", "keras.src.layers.layer.Layer"
_OPTIMIZERS = ("torch.optim.optimizer.Optimizer", "keras.src.optimizers.base_optimizer.BaseOptimizer")
_SCHEDULER = "torch.optim.lr_scheduler.LRScheduler"
_KERAS_SCHEDULE = "keras.src.optimizers.schedules.learning_rate_schedule.LearningRateSchedule"


def as_dataset(field: str, value: Any) -> Any:
    """A data set or loader of torch, Hugging Face or Ray Data as a Dataset; other values as is. Raises JobError."""
    kinds = qualified_bases(type(value))
    name = next((name for kind, name in _DATA_FUNCTIONS.items() if kind in kinds), None)
    try:
        return value if name is None else getattr(importlib.import_module("trainwright.datasets"), name)(value)
    except DataError as error:
        raise JobError([f"{field}=: {error.what}: {error.remedy}"]) from error


def data_problem(field: str, value: Any) -> str:
    """What is wrong with a value as a data set; empty where it is one."""
    kinds = qualified_bases(type(value))
    advice = next((words for kind, words in _DATA_REMEDIES.items() if kind in kinds), "")
    if not advice and hasattr(value, "map_batches"):
        return ""
    if not advice and hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, list):
        advice = _MAP_STYLE
    if not advice and isinstance(value, FunctionType):
        advice = _FUNCTION
    return f"{field}= is not a data set, but a {type(value).__name__}: {advice or _DATA_REMEDY}"


def function_problem(field: str, value: Any) -> str:
    """What is wrong with a value where a job has a function; empty where nothing is known to be."""
    kinds, name = qualified_bases(type(value)), type(value).__name__
    if field == "model" and (_MODULE in kinds or _LAYER in kinds):
        return (
            f"model= is an instance of {name}: give a function that makes it, model=lambda: {name}(...), since "
            "each worker makes its own, the same by seed="
        )
    if field == "optimizer" and any(kind in kinds for kind in _OPTIMIZERS):
        return f"optimizer= is an instance of {name}: give a function, lambda parameters: {name}(parameters)"
    if field == "schedule":
        return _schedule_problem(type(value)) or _unset_problem(value)
    if field == "metrics" and hasattr(value, "update") and hasattr(value, "compute"):
        return f"metrics= has an instance of {name}: give a function that makes it, lambda: {name}(...)"
    if field == "callbacks" and isinstance(value, list | tuple):
        return (
            "callbacks= is a list: give a function that makes it, callbacks=lambda: [...], since each worker calls it"
        )
    if field == "loss" and isinstance(value, str):
        return f"loss={value!r} is a name: give a function (outputs, targets) -> one loss per sample"
    return ""


def _schedule_problem(kind: type) -> str:
    kinds = qualified_bases(kind)
    if _SCHEDULER in kinds:
        return (
            f"schedule= is an instance of {kind.__name__}: give a function that makes it, lambda optimizer: "
            f"{kind.__name__}(optimizer, ...), since each worker makes its own"
        )
    if _KERAS_SCHEDULE in kinds:
        return f"schedule= is Keras' {kind.__name__}: give it to the optimizer as its learning rate, and leave this out"
    return ""


def _unset_problem(schedule: Any) -> str:
    unset = unset_parameters(schedule) if takes_optimizer(schedule) else []
    name = getattr(schedule, "__name__", "the function")
    arguments = ", ".join(f"{each}=..." for each in unset)
    return f"schedule= is {name}, which needs {', '.join(unset)}: give partial({name}, {arguments})" if unset else ""


def qualified_bases(kind: type) -> frozenset[str]:
    """Return the full names of a class and of its base classes."""
    return frozenset(f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__)
