"""`tw.from_lightning`: the job of a LightningModule and its data. Duck-typed: Lightning is not imported."""

from __future__ import annotations

import copy
import dis
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from trainwright.core.errors import JobError
from trainwright.core.job import Job
from trainwright.core.loss_api import log
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.user_loaders import from_torch
from trainwright.integrations.trainer_parts import (
    OPTIMIZER_ALONE,
    ModelCopy,
    OptimizerTemplate,
    SampleCollate,
    SchedulerTemplate,
    SplitCollate,
    Structure,
    epoch_steps,
    is_validation,
    job_of,
    mark_validation,
    options_by_name,
    overridden,
)

_WHERE = "from_lightning"
# Methods of Lightning's that may be overridden: they are called, or are no part of training.
_KEPT = {
    "forward", "training_step", "validation_step", "configure_optimizers", "train_dataloader", "val_dataloader",
    "test_step", "predict_step", "test_dataloader", "predict_dataloader", "prepare_data", "setup", "print", "freeze",
    "unfreeze", "to_onnx", "to_torchscript", "to_tensorrt",
}  # fmt: skip
# The same of a data module.
_KEPT_OF_DATA = _KEPT | {
    "teardown", "on_exception", "state_dict", "load_state_dict", "save_hyperparameters", "from_datasets",
    "load_from_checkpoint",
}  # fmt: skip
# Attributes of a module that a Trainer gives a meaning to.
_OF_TRAINER = {
    "trainer", "current_epoch", "global_step", "manual_backward", "optimizers", "lr_schedulers", "toggle_optimizer",
    "all_gather", "logger", "fabric",
}  # fmt: skip
_READS = {"LOAD_ATTR", "LOAD_METHOD"}
_SETS_RATES = {"OneCycleLR", "CyclicLR"}  # schedulers that replace the rates that an optimizer was made with
_DEFAULT_COLLATE = "default_collate"
_BASES = ("LightningModule", "LightningDataModule")


@dataclass(frozen=True, kw_only=True)
class _LightningStep:
    """`step=` of a job: calls `training_step`, and `validation_step` for rows of the evaluation set."""

    train: Structure  # how a batch of the training set holds its columns
    evaluate: Structure  # the same of the evaluation set
    monitor: str  # the name of the evaluation's loss that a scheduler follows; empty where none does

    def __call__(self, module: Any, columns: Mapping[str, Any]) -> Any:
        """Return the loss of a micro-batch. Raises JobError where there is none."""
        validating = is_validation(columns)
        function = module.validation_step if validating else module.training_step
        batch = (self.evaluate if validating else self.train).join(columns)
        first = {"batch_idx": 0} if "batch_idx" in inspect.signature(function).parameters else {}
        logged: dict[str, Any] = {}
        module.log = partial(_log, logged)
        module.log_dict = partial(_log_all, logged)
        try:
            result = function(batch, **first)
        finally:
            del module.log, module.log_dict
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if validating and self.monitor:
            loss = logged.get(self.monitor)
            if not hasattr(loss, "shape"):
                problem = (
                    f"the scheduler has monitor={self.monitor!r}; validation_step() logs no tensor under this name"
                )
                raise JobError([f"{problem}: log the loss so, without item(), or give schedule="])
        elif loss is None and validating:
            loss = next((value for name, value in logged.items() if name.endswith("loss")), None)
        if loss is None:
            name = "validation_step" if validating else "training_step"
            more = ", or log it under a name that ends in 'loss'" if validating else ""
            raise JobError([f"{name}() returned no loss: return a tensor, or a dict with the key 'loss'{more}"])
        return loss


def from_lightning(
    module: Any, datamodule: Any = None, *, train: Any = None, evaluate: Any = None, **options: Any
) -> Job:
    """Return the job of a LightningModule and its data.

    `training_step` becomes the step, `validation_step` the evaluation, `self.log` is `tw.log`, and
    `configure_optimizers` gives optimizer and scheduler. What a job cannot do is refused by name. `docs/training.md`
    lists what is covered.

        job = tw.from_lightning(Classifier(lr=1e-3), Digits("data"), name="digits", epochs=5, clip_norm=1.0)
        tw.fit(job)

    Args:
        module: a LightningModule, whose weights each worker starts with, or a function without arguments that makes
            one, and the same in each process.
        datamodule: a LightningDataModule, by default the module's own loaders. `prepare_data()` and `setup("fit")` of
            both are called here, and not in workers.
        train, evaluate: DataLoaders in place of the datamodule's.
        options: fields and options of the job. They replace those of Lightning's Trainer: `epochs=` max_epochs,
            `clip_norm=` gradient_clip_val, `precision=`, `workers=` devices. `batch_size` is by default that of the
            loader, and is global; with accumulate_grad_batches, give the product.

    Raises:
        JobError: the module or a loader does what a job cannot; all such things are listed, with what to do.
        DataError: a data set cannot be read by row number.
    """
    given_module = hasattr(module, "training_step") and not isinstance(module, type)
    made = module if given_module else module()
    problems = [*_not_covered(made), *_hooks_not_called(datamodule)]
    if not given_module and "setup" in overridden(made, _base(made)):
        problems.append("setup() is overridden: give the module itself, or do it in the function that makes it")
    if problems:
        raise JobError(problems, where=_WHERE)
    loaders = _loaders(made, datamodule)
    training = _Split.of(loaders[0] if train is None else train, "the training loader")
    validates = "validation_step" in overridden(made, _base(made))
    validation = loaders[1] if evaluate is None else evaluate
    evaluation = _Split.of(validation, "the validation loader") if validates and validation is not None else None
    options = {"batch_size": training.batch_size, "epochs": 1, **options}
    given = {"drop_last": training.drop_last, **options_by_name(options)}
    optimization = _optimization(made, epoch_steps(training.length, given), datamodule, given)
    monitor = optimization.pop("monitor", "")
    found: dict[str, Any] = {
        "name": type(made).__name__.lower(),
        "model": ModelCopy.of(made) if given_module else module,
        **optimization,
        "train": training.rows,
        "evaluate": None if evaluation is None else mark_validation(evaluation.rows),
        "step": _LightningStep(train=training.made, evaluate=(evaluation or training).made, monitor=monitor),
        "shuffle": training.shuffle,
        "drop_last": training.drop_last,
    }
    functions = (training.collate, None if evaluation is None else evaluation.collate)
    if any(functions):
        found["collate"] = SplitCollate(train=functions[0], evaluate=functions[1])
    return job_of(found, options)


def _base(module: Any) -> type:
    """Return the class LightningModule. Raises JobError for another object."""
    for kind in type(module).__mro__:
        if kind.__name__ == "LightningModule":
            return kind
    problem = f"a {type(module).__name__} is no LightningModule: give one, or a function that makes one"
    raise JobError([problem], where=_WHERE)


def _not_covered(module: Any) -> Iterator[str]:
    """Describe what a module does and a job cannot, one line for each."""
    base = _base(module)
    plain = next((kind for kind in base.__mro__ if kind.__module__ == "torch.nn.modules.module"), object)
    for name in overridden(module, base):
        if name not in _KEPT and not hasattr(plain, name):
            yield f"{name}() is overridden, and is not called: {_remedy(name)}"
    if not getattr(module, "automatic_optimization", True):
        yield "automatic_optimization is False: give tw.Job a step= and an optimizer= of your own"
    kinds = type(module).__mro__
    for kind in kinds[: kinds.index(base)]:
        for name, function in vars(kind).items():
            used = _attributes(function) & _OF_TRAINER
            if used and name not in ("configure_optimizers", "configure_callbacks", "prepare_data", "setup"):
                yield f"{name}() uses self.{', self.'.join(sorted(used))}: there is no Trainer; pass values to __init__"


def _hooks_not_called(datamodule: Any) -> Iterator[str]:
    """Describe the hooks of a LightningDataModule that a job does not call, one line for each."""
    kinds = type(datamodule).__mro__
    base = next((kind for kind in kinds if kind.__name__ == "LightningDataModule"), None)
    for name in () if base is None else overridden(datamodule, base):
        if name not in _KEPT_OF_DATA:
            yield f"{name}() of {kinds[0].__name__} is overridden, and is not called: {_remedy(name)}"


def _attributes(function: Any) -> set[str]:
    """Return the names of the attributes that a function reads."""
    code = getattr(function, "__code__", None)
    return set() if code is None else {each.argval for each in dis.get_instructions(code) if each.opname in _READS}


def _remedy(name: str) -> str:
    if name in ("configure_gradient_clipping", "clip_gradients"):
        return "leave it out, and give clip_norm="
    if name in ("optimizer_step", "lr_scheduler_step", "optimizer_zero_grad", "backward"):
        return "leave it out; optimizer= and schedule= of the job may replace configure_optimizers"
    if "batch_transfer" in name or name == "transfer_batch_to_device":
        return "do it in training_step, or in the data set"
    return "do it in training_step or in the data set, or give callbacks="


# --- Optimizer and scheduler ------------------------------------------------------------------------------------------


def _optimization(module: Any, steps: int, datamodule: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the job has of optimizer= and schedule= with its options, and is not given, and `monitor`.

    Raises JobError for what a job has not.
    """
    if {"optimizer", "schedule"} <= given.keys():
        return {}
    twin, problems = copy.deepcopy(module), []
    twin.trainer = SimpleNamespace(
        estimated_stepping_batches=steps * given["epochs"],
        max_epochs=given["epochs"],
        max_steps=-1,
        num_training_batches=steps,
        datamodule=datamodule,
    )
    optimizers, schedulers = _configured(twin.configure_optimizers())
    if "optimizer" in given:
        if schedulers:
            raise JobError([OPTIMIZER_ALONE], where=_WHERE)
        return {}
    if "schedule" in given:
        kinds = _SETS_RATES & {type(each["scheduler"]).__name__ for each in schedulers}
        problems += [f"{kind} has set the rates of the optimizer: give optimizer= too" for kind in kinds]
        schedulers = []
    if len(optimizers) != 1:
        problems.append(
            f"configure_optimizers() returned {len(optimizers)} optimizers: one is covered; give tw.Job "
            "optimizer={...}"
        )
    if len(schedulers) > 1:
        problems.append(
            f"configure_optimizers() returned {len(schedulers)} schedulers: combine them by ChainedScheduler"
        )
    if problems:
        raise JobError(problems, where=_WHERE)
    found: dict[str, Any] = {"optimizer": OptimizerTemplate.of(optimizers[0], twin)}
    for entry in schedulers:
        if entry.get("frequency", 1) != 1:
            problems.append(f"the scheduler has frequency={entry['frequency']}: let its own function count so")
        found["schedule"] = SchedulerTemplate.of(entry["scheduler"], steps * given["epochs"])
        if type(entry["scheduler"]).__name__ == "ReduceLROnPlateau":
            monitor = str(entry.get("monitor"))
            if monitor.startswith("train") or not monitor.endswith("loss"):
                problems.append(f"the scheduler has monitor={monitor!r}: only a loss of the evaluation is covered")
            found |= {"schedule_metric": "loss", "monitor": monitor}
        else:
            found["schedule_by"] = entry.get("interval", "epoch")
    if problems:
        raise JobError(problems, where=_WHERE)
    return found


def _configured(given: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return the optimizers, and the schedulers with their options, of what `configure_optimizers` returned."""
    if given is None:
        return [], []
    if isinstance(given, Mapping):
        entries = [given["lr_scheduler"]] if "lr_scheduler" in given else []
        monitor = {"monitor": given["monitor"]} if given.get("monitor") else {}
        return [given["optimizer"]], [{**monitor, **_entry(each)} for each in entries]
    if not isinstance(given, list | tuple):
        return [given], []
    if len(given) == 2 and isinstance(given[0], list):
        schedulers = given[1] if isinstance(given[1], list) else [given[1]]
        return given[0], [_entry(each) for each in schedulers]
    parts = [_configured(each) for each in given]
    return [one for part in parts for one in part[0]], [one for part in parts for one in part[1]]


def _entry(scheduler: Any) -> dict[str, Any]:
    return dict(scheduler) if isinstance(scheduler, Mapping) else {"scheduler": scheduler}


# --- Data -------------------------------------------------------------------------------------------------------------


def _loaders(module: Any, datamodule: Any) -> tuple[Any, Any]:
    """Return the loaders for training and validation; None for one that does not exist."""
    source, found = module if datamodule is None else datamodule, []
    for each in (module, datamodule):
        if callable(getattr(each, "prepare_data", None)):
            each.prepare_data()
        if callable(getattr(each, "setup", None)):
            each.setup("fit")
    for name in ("train_dataloader", "val_dataloader"):
        base = next((kind for kind in type(source).__mro__ if kind.__name__ in _BASES), object)
        own = getattr(type(source), name, None)
        found.append(None if own is None or own is getattr(base, name, None) else getattr(source, name)())
    return found[0], found[1]


@dataclass(frozen=True, kw_only=True)
class _Split:
    """A data set of the job, with what its loader says."""

    rows: Dataset
    made: Structure  # how a batch holds its columns
    collate: Callable[[Mapping[str, Any]], dict[str, Any]] | None  # None where rows are stacked
    batch_size: int | None
    shuffle: bool
    drop_last: bool
    length: int  # of the data set

    @classmethod
    def of(cls, loader: Any, what: str) -> _Split:
        """Take a DataLoader, which `what` names, apart. Raises JobError for what a job cannot have."""
        if problems := list(_loader_problems(loader, what)):
            raise JobError(problems, where=_WHERE)
        dataset, function = loader.dataset, loader.collate_fn
        collate = SampleCollate.of(function, dataset[0], f"the collate_fn of {what}")
        return cls(
            rows=from_torch(dataset),
            made=collate.made,
            collate=None if getattr(function, "__name__", "") == _DEFAULT_COLLATE else collate,
            batch_size=loader.batch_size,
            shuffle=type(loader.sampler).__name__ == "RandomSampler",
            drop_last=bool(loader.drop_last),
            length=len(dataset),
        )


def _loader_problems(loader: Any, what: str) -> Iterator[str]:
    """Describe why a job cannot read what a loader reads."""
    if not all(hasattr(loader, name) for name in ("dataset", "collate_fn", "sampler", "batch_size")):
        given = "is missing" if loader is None else f"is a {type(loader).__name__}"
        yield f"{what} {given}: give one torch DataLoader, as train= or evaluate= or from a datamodule"
        return
    kind = type(loader.dataset)
    if not hasattr(kind, "__len__") or "IterableDataset" in (each.__name__ for each in kind.__mro__):
        remedy = "write its samples as parquet, or give a map-style data set"
        yield f"{what} reads a {kind.__name__}, which has no rows by number: {remedy}"
        return
    sampler = type(loader.sampler).__name__
    if sampler not in ("RandomSampler", "SequentialSampler") or getattr(loader.sampler, "replacement", False):
        yield f"{what} has the sampler {sampler}: leave it out; data sets have weighted(...) and bucketed(...) instead"
    elif len(loader.sampler) != len(loader.dataset):
        drawn, rows = len(loader.sampler), len(loader.dataset)
        remedy = f"leave it out, and give epoch_samples={drawn} for shorter epochs, or a Subset as data set"
        yield f"{what} has a sampler that draws {drawn} of {rows} rows: {remedy}"
    if loader.batch_size is None:
        yield f"{what} has a batch_sampler, or no batches: give it batch_size="


# --- What a step logs -------------------------------------------------------------------------------------------------


def _log(logged: dict[str, Any], name: str, value: Any, *_: Any, reduce_fx: Any = "mean", **__: Any) -> None:
    """Do what `self.log` does: record the mean over the global batch. `loss` is recorded anyway."""
    problem = ""
    if hasattr(value, "compute"):
        problem = f"self.log({name!r}) was given a metric object: log its value for the batch, or give metrics="
    elif reduce_fx != "mean":
        problem = f"self.log({name!r}) has reduce_fx={reduce_fx!r}: values are averaged; leave it out"
    if problem:
        raise JobError([problem])
    logged[name] = value
    if name != "loss":
        log(name, value)


def _log_all(logged: dict[str, Any], values: Mapping[str, Any], *_: Any, **options: Any) -> None:
    for name, value in values.items():
        _log(logged, name, value, **options)
