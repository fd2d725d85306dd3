"""Parts that the adapters of other trainers share: copies of their model, optimizer and scheduler, and their batches.

A job's functions make a model, an optimizer and a scheduler in each worker. Other trainers are given these as objects.
The classes here hold such an object and make equal ones. No framework is imported.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from trainwright.core.errors import JobError
from trainwright.core.job import GROUPS, Job
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.sample_order import steps_per_epoch

_VALIDATION = "__validation__"  # a column of each row of an evaluation set

OPTIMIZER_ALONE = (
    "optimizer= is given, and the schedule that was found is that of another optimizer: give schedule= too, such as "
    "partial(tw.schedules.cosine, warmup=0.1), or schedule=None for a constant rate"
)


def overridden(instance: Any, base: type) -> Iterator[str]:
    """Yield the attributes of a base class that a derived class, or the instance itself, overrides, each once."""
    kinds = type(instance).__mro__
    spaces = [vars(instance), *(vars(kind) for kind in kinds[: kinds.index(base)])]
    known = {name for name in dir(base) if callable(getattr(base, name)) and not name.startswith("__")}
    yield from dict.fromkeys(name for space in spaces for name in space if name in known)


def options_by_name(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's fields and options, those in groups (`data=tw.Data(drop_last=True)`) by their own names."""
    found = dict(options)
    for group in GROUPS.keys() & options.keys():
        given = options[group]
        held = given.explicit() if isinstance(given, GROUPS[group]) else given
        found.update(held if isinstance(held, Mapping) else {})
    return found


def job_of(found: Mapping[str, Any], options: Mapping[str, Any]) -> Job:
    """Return the job of what was found and of the options, which replace it."""
    given = options_by_name(options)
    return Job(**{name: value for name, value in found.items() if name not in given}, **options)


def epoch_steps(rows: int, given: Mapping[str, Any]) -> int:
    """Return the steps of an epoch of a job with these options and a training set of so many rows, at least one."""
    return max(steps_per_epoch(rows, given["batch_size"], given["drop_last"], given.get("epoch_samples")), 1)


# --- Model, optimizer, scheduler --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelCopy:
    """`model=` of a job that starts with the weights of a model.

    The weights are no part of the job's identity: a command that draws other ones resumes the same run.
    """

    model: Any = field(compare=False, repr=False)  # in host memory; it travels with the job
    kind: type  # its class
    structure: str  # its modules, as text

    @classmethod
    def of(cls, model: Any, *, training: bool = False) -> ModelCopy:
        """Copy a torch model into host memory; with `training`, all of it is put into training mode."""
        copied = copy.deepcopy(model).cpu()
        return cls(model=copied.train() if training else copied, kind=type(model), structure=repr(model))

    def __call__(self) -> Any:
        """Return a model with the same weights."""
        return copy.deepcopy(self.model)


@dataclass(frozen=True, kw_only=True)
class OptimizerTemplate:
    """`optimizer=` of a job that makes an optimizer like another one, for parameters of the same names."""

    kind: type  # its class
    defaults: Mapping[str, Any]  # arguments of the class
    # settings of each parameter group, with the names of its parameters
    groups: tuple[tuple[Mapping[str, Any], tuple[str, ...]], ...]

    @classmethod
    def of(cls, optimizer: Any, model: Any) -> OptimizerTemplate:
        """Describe an optimizer of a model.

        Raises:
            JobError: a parameter of the optimizer is none of the model, or one that is trained is in no group.
        """
        kind, names = type(optimizer), {id(each): name for name, each in model.named_parameters()}
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        left = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in held]
        problems = []
        if held - names.keys():
            problems.append(
                f"the optimizer holds {len(held - names.keys())} tensors that are not parameters of the model"
            )
        if left:
            problems.append(
                f"the optimizer holds no {', '.join(left[:3])}{' and others' if len(left) > 3 else ''}: give it all "
                "parameters, or freeze those that are not trained with requires_grad_(False)"
            )
        if problems:
            raise JobError(problems)
        known = inspect.signature(kind).parameters
        return cls(
            kind=kind,
            defaults={key: value for key, value in optimizer.defaults.items() if key in known},
            groups=tuple(
                (_before_scheduler(group), tuple(names[id(each)] for each in group["params"] if each.requires_grad))
                for group in optimizer.param_groups
            ),
        )

    def __call__(self, named_parameters: Iterable[tuple[str, Any]]) -> Any:
        """Make the optimizer of (name, parameter) pairs. Raises JobError for a parameter of an unknown name."""
        place = {name: number for number, (_, names) in enumerate(self.groups) for name in names}
        groups: list[dict[str, Any]] = [{**copy.deepcopy(settings), "params": []} for settings, _ in self.groups]
        for name, parameter in named_parameters:
            if name not in place:
                raise JobError([f"the model has a parameter {name!r} that the optimizer did not have: give optimizer="])
            groups[place[name]]["params"].append(parameter)
        return self.kind(groups, **copy.deepcopy(dict(self.defaults)))


class _OptimizerSlot:
    """Stands for the optimizer in a scheduler that has none."""


@dataclass(frozen=True, kw_only=True)
class SchedulerTemplate:
    """`schedule=` of a job that makes a scheduler like another one."""

    scheduler: Any  # whose optimizer is `slot`, also inside schedulers that it holds
    slot: _OptimizerSlot
    settings: tuple[Mapping[str, Any], ...]  # of each parameter group, as the scheduler set them for the first step
    total_steps: int = field(compare=False)  # of the run that it was made for

    @classmethod
    def of(cls, scheduler: Any, total_steps: int) -> SchedulerTemplate:
        """Copy a scheduler of torch that has not counted yet, and was made for a run of so many steps."""
        slot, settings = _OptimizerSlot(), tuple(map(_settings, scheduler.optimizer.param_groups))
        copied = copy.deepcopy(scheduler, {id(scheduler.optimizer): slot})
        return cls(scheduler=copied, slot=slot, settings=settings, total_steps=total_steps)

    def __call__(self, optimizer: Any) -> Any:
        """Make the scheduler of an optimizer that `OptimizerTemplate` made."""
        base = next(kind for kind in type(self.scheduler).__mro__ if kind.__name__ == "LRScheduler")
        sys.modules[base.__module__].LambdaLR(optimizer, _constant)  # any scheduler of torch's lets the optimizer count
        for group, settings in zip(optimizer.param_groups, self.settings, strict=True):
            group.update(copy.deepcopy(settings))
        return copy.deepcopy(self.scheduler, {id(self.slot): optimizer})


def _constant(_: int) -> float:
    return 1.0


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _before_scheduler(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group without what a scheduler changed: the rate is the first one."""
    settings = _settings(group)
    initial = settings.pop("initial_lr", None)
    return settings if initial is None else {**settings, "lr": initial}


# --- Samples and batches ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Structure:
    """How a sample or a batch holds its columns."""

    kind: Literal["mapping", "list", "tuple", "single"]  # what holds them; `single` for a value alone
    names: tuple[str, ...]  # of the columns; the places in a list or tuple

    @classmethod
    def of(cls, value: Any, what: str) -> Structure:
        """Return the structure of a sample or a batch, which `what` names. Raises JobError where it is nested."""
        if isinstance(value, Mapping):
            found = cls(kind="mapping", names=tuple(map(str, value)))
        elif isinstance(value, list | tuple):
            found = cls(kind="tuple" if isinstance(value, tuple) else "list", names=tuple(map(str, range(len(value)))))
        else:
            found = cls(kind="single", names=("0",))
        nested = [name for name, each in found.columns(value).items() if isinstance(each, Mapping | tuple)]
        if nested:
            problem = f"{what} holds a dict or tuple in {', '.join(nested)}: return one dict, tuple or list of tensors"
            raise JobError([problem])
        return found

    def columns(self, value: Any) -> dict[str, Any]:
        """Return what a sample or a batch holds, by name."""
        if self.kind == "mapping":
            return {str(key): each for key, each in value.items()}
        return dict(zip(self.names, (value,) if self.kind == "single" else value, strict=True))

    def join(self, columns: Mapping[str, Any]) -> Any:
        """Return columns as a sample or a batch."""
        values = [columns[name] for name in self.names]
        match self.kind:
            case "mapping":
                return dict(zip(self.names, values, strict=True))
            case "single":
                return values[0]
        return tuple(values) if self.kind == "tuple" else values


@dataclass(frozen=True, kw_only=True)
class SampleCollate:
    """Calls a function that makes a batch of a list of samples with the columns of a micro-batch."""

    function: Callable[[list[Any]], Any]  # [sample, ...] -> batch
    sample: Mapping[str, Any] = field(compare=False, repr=False)  # the first sample, whose types the others get
    structure: Structure  # of a sample
    made: Structure  # of a batch

    @classmethod
    def of(cls, function: Callable[[list[Any]], Any], sample: Any, what: str) -> SampleCollate:
        """Try the function, which `what` names, on a sample. Raises JobError where it raises or returns no batch."""
        structure = Structure.of(sample, "a sample of the data set")
        try:
            batch = function([copy.deepcopy(sample)])
        except Exception as error:
            raise JobError([f"{what} raised {type(error).__name__} for one sample: {error}"]) from error
        made = Structure.of(batch, f"a batch of {what}")
        return cls(function=function, sample=structure.columns(sample), structure=structure, made=made)

    def __call__(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of the batch."""
        rows = len(next(iter(columns.values())))
        samples = [
            self.structure.join({name: _like(each, columns[name][row]) for name, each in self.sample.items()})
            for row in range(rows)
        ]
        return self.made.columns(self.function(samples))


@dataclass(frozen=True, kw_only=True)
class SplitCollate:
    """`collate=` of a job whose two data sets have functions of their own; None stacks the rows."""

    train: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None
    evaluate: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None

    def __call__(self, columns: dict[str, Any]) -> Mapping[str, Any]:
        """Collate a micro-batch by the data set that it comes from."""
        mark = columns.pop(_VALIDATION, None)
        function = self.train if mark is None else self.evaluate
        made = columns if function is None else function(columns)
        return made if mark is None else {**made, _VALIDATION: mark}


def mark_validation(dataset: Dataset) -> Dataset:
    """Mark the rows of an evaluation set for `is_validation`."""
    return dataset.map_batches(_marked)


def is_validation(columns: Collection[str]) -> bool:
    """Return whether a micro-batch comes from a marked data set."""
    return _VALIDATION in columns


def _marked(columns: Mapping[str, Any]) -> dict[str, Any]:
    rows = len(next(iter(columns.values())))
    return {**columns, _VALIDATION: np.ones(rows, dtype=bool)}


def _like(sample: Any, value: Any) -> Any:
    """Return a value of a column with the type that the first sample has there."""
    if callable(getattr(sample, "new_tensor", None)):
        return sample.new_tensor(np.array(value))
    return value if isinstance(sample, np.ndarray | np.generic) else _plain(value)


def _plain(value: Any) -> Any:
    """Return numbers and lists of Python for NumPy's."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        return [_plain(each) for each in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
