"""`tw.from_hf_trainer`: the job of a `transformers.Trainer`. Duck-typed: transformers is not imported."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

from trainwright.core.errors import JobError
from trainwright.core.job import Job
from trainwright.core.strict_model import as_dataset
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.user_loaders import from_huggingface, from_torch
from trainwright.integrations.trainer_parts import (
    OPTIMIZER_ALONE,
    ModelCopy,
    OptimizerTemplate,
    SampleCollate,
    SchedulerTemplate,
    epoch_steps,
    job_of,
    options_by_name,
    overridden,
)

_WHERE = "from_hf_trainer"
# Methods that may be overridden: what they do is kept, or is no part of a job.
_KEPT = {
    "create_optimizer", "create_scheduler", "create_optimizer_and_scheduler", "get_decay_parameter_names", "log",
    "create_model_card", "save_model", "push_to_hub", "init_hf_repo", "num_examples", "floating_point_ops",
    "get_test_dataloader", "predict", "hyperparameter_search",
}  # fmt: skip
_CALLBACKS = {"DefaultFlowCallback", "ProgressCallback", "PrinterCallback", "NotebookProgressCallback"}
_ARGUMENTS = {  # that a job cannot have, if they are set
    "deepspeed": "leave it out: the planner shards the model where it must; strategy= pins a way",
    "fsdp": 'leave it out: the planner shards the model where it must; strategy="sharded" pins it',
    "parallelism_config": "leave it out: the planner chooses the layout; plan= pins it",
    "label_smoothing_factor": "leave it out, and give a step= with a loss of your own",
    "neftune_noise_alpha": "leave it out, and add the noise in the model",
    "use_liger_kernel": "leave it out, and patch the model before the Trainer gets it",
    "gradient_checkpointing": "leave it out: the planner computes activations again where memory is short",
    "activation_checkpointing": "leave it out: the planner computes activations again where memory is short",
    "auto_find_batch_size": "leave it out: micro-batches are as large as fit the memory",
    "bf16_full_eval": "leave it out: evaluations compute as training does",
    "fp16_full_eval": "leave it out: evaluations compute as training does",
    "push_to_hub": "leave it out, and upload what tw.load_model returns",
    "eval_delay": "leave it out: the first evaluation comes after the first epoch, or after eval_steps",
    "eval_on_start": "leave it out: the first evaluation comes after the first epoch, or after eval_steps",
    "group_by_length": "leave it out, and give train=dataset.bucketed(column, batch_size)",
}  # fmt: skip
_FUNCTIONS = {
    "compute_loss_func": "leave it out, and give step= with this loss",
    "compute_metrics": "leave it out, and log values in a step= of your own (tw.log), or give metrics= with inputs=",
    "preprocess_logits_for_metrics": "leave it out; it belongs to compute_metrics",
}


def from_hf_trainer(trainer: Any, **options: Any) -> Job:
    """Return the job of a `transformers.Trainer` that was not started.

    It has the Trainer's weights, optimizer with parameter groups, scheduler with warm-up, data sets, collator, global
    batch (`per_device_train_batch_size` times `gradient_accumulation_steps` times the devices that Trainer would use
    here), clipping, seed and precision. The loss is the mean over the labels of the global batch that count, as in
    Trainer. The order of samples is trainwright's, and so is dropout. `docs/training.md` lists what is covered.

        job = tw.from_hf_trainer(trainer, name="tuned", workers=4)
        tw.fit(job)

    Args:
        trainer: it is not changed.
        options: fields and options of the job, which take the place of Trainer's: `batch_size=` and `epochs=` too.
            `epochs=` counts passes over the data, and with `epoch_samples=` epochs of these. By default `name` is the
            last part of `output_dir`.

    Raises:
        JobError: the Trainer does what a job cannot; all such things are listed, with what to do.
        DataError: a data set cannot be read by row number.
    """
    problems = list(_not_covered(trainer))
    if problems:
        raise JobError(problems, where=_WHERE)
    args, train = trainer.args, trainer.train_dataset
    devices = max(int(getattr(args, "world_size", 1)), 1)
    trained = args.train_batch_size * args.gradient_accumulation_steps * devices
    given = {"batch_size": trained, "drop_last": args.dataloader_drop_last, **options_by_name(options)}
    replaced = as_dataset("train", options.get("train"))
    length = _length(args, replaced.index().rows if isinstance(replaced, Dataset) else len(train), given)
    if options.get("epochs"):
        options["epochs"] = length["epochs"]  # more than passes where evaluations are by step
    total = length.pop("total")
    rows, collate = _data(trainer, train, "train_dataset")
    evaluated = _value(args.eval_strategy) != "no" and trainer.eval_dataset is not None
    counted = bool(trainer.model_accepts_loss_kwargs) and "labels" in collate.made.names
    found: dict[str, Any] = {
        "name": _name(args),
        "model": ModelCopy.of(trainer.model, training=True),
        **_optimization(trainer, total, given),
        "train": rows,
        "evaluate": _data(trainer, trainer.eval_dataset, "eval_dataset")[0] if evaluated else None,
        "collate": collate,
        "step": _model_loss,
        "weight": partial(_count_labels, shifted=_shifts(trainer)) if counted else None,
        "batch_size": trained,
        "shuffle": getattr(args, "train_sampling_strategy", "random") != "sequential",
        "drop_last": args.dataloader_drop_last,
        "seed": args.seed,
        "clip_norm": args.max_grad_norm or None,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        **length,
        **_checkpoints(args, total, evaluated=evaluated),
    }
    return job_of(found, options)


def _not_covered(trainer: Any) -> Iterator[str]:
    """Describe what the Trainer does and a job cannot, one line for each."""
    base = next((kind for kind in type(trainer).__mro__ if kind.__name__ == "Trainer"), None)
    if base is None or not hasattr(trainer, "args"):
        yield f"a {type(trainer).__name__} is not a transformers.Trainer: give one that was not started"
        return
    args = trainer.args
    if trainer.state.global_step or not hasattr(trainer.model, "named_parameters"):
        yield "the Trainer has trained: make a new one, or load its model into one"
    for name in overridden(trainer, base):
        if name not in _KEPT:
            yield f"{name}() is overridden, and is not called: give what it does as step=, train= or another option"
    for name, remedy in _ARGUMENTS.items():
        if getattr(args, name, None):
            yield f"{name}={getattr(args, name)!r} is not covered: {remedy}"
    optim = _value(getattr(args, "optim", ""))
    if optim.startswith("schedule_free"):
        remedy = "set another optim, and give weight_average=tw.WeightAverage(decay=0.999)"
        yield f"optim={optim!r} has other parameters in evaluations than in training, which is not covered: {remedy}"
    for name, remedy in _FUNCTIONS.items():
        if getattr(trainer, name, None) is not None:
            yield f"{name}= is not covered: {remedy}"
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback).__name__
        if kind not in _CALLBACKS:
            yield f"the callback {kind} is not called: {_callback_remedy(kind)}"
    if getattr(trainer, "is_model_parallel", False) or getattr(trainer.model, "quantization_method", None):
        yield "the model is quantized, or divided over devices: load it whole (no device_map=, quantization_config=)"
    sampling = getattr(args, "train_sampling_strategy", "random")
    if sampling not in ("random", "sequential"):
        yield f"train_sampling_strategy={sampling!r} is not covered: give train=dataset.bucketed(column, batch_size)"
    if getattr(args, "torch_compile", False):
        yield 'torch_compile=True is not covered: leave it out, and give compile="inductor"'
    if args.dataloader_drop_last and args.gradient_accumulation_steps > 1:
        yield "dataloader_drop_last=True drops micro-batches: set gradient_accumulation_steps=1 and a larger batch"
    yield from _data_problems(trainer)


def _data_problems(trainer: Any) -> Iterator[str]:
    """Describe data sets that cannot be read by row number."""
    for name in ("train_dataset", "eval_dataset"):
        dataset = getattr(trainer, name)
        if dataset is None:
            if name == "train_dataset":
                yield "the Trainer has no train_dataset: give it one"
        elif isinstance(dataset, Mapping):
            yield f"{name} holds several data sets: give one of them, and the others to tw.evaluate"
        elif not hasattr(dataset, "__len__"):
            yield f"{name} has no length: write its samples as parquet, or load it without streaming=True"


def _callback_remedy(kind: str) -> str:
    if kind == "EarlyStoppingCallback":
        return 'leave it out, and give early_stop=tw.EarlyStop("loss", patience=3)'
    return 'leave it out (report_to="none" for those of experiment trackers), and give trackers= or callbacks='


def _optimization(trainer: Any, total: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the job has of optimizer= and schedule=, and is not given. Raises JobError for what a job has not."""
    if "optimizer" in given:
        if "schedule" not in given:
            raise JobError([OPTIMIZER_ALONE], where=_WHERE)
        return {}
    twin = copy.copy(trainer)  # its attributes are set, and not the trainer's
    twin.optimizer = twin.optimizer or twin.create_optimizer()
    optimizer = {"optimizer": OptimizerTemplate.of(twin.optimizer, trainer.model)}
    if "schedule" in given:
        return optimizer
    scheduler = twin.lr_scheduler or twin.create_scheduler(num_training_steps=total, optimizer=twin.optimizer)
    kind = type(scheduler).__name__
    if kind in ("ReduceLROnPlateau", "GreedyLR"):
        remedy = 'set another lr_scheduler_type, or give schedule= and schedule_metric="loss"'
        raise JobError([f"{kind} follows a metric: {remedy}"], where=_WHERE)
    return {**optimizer, "schedule": SchedulerTemplate.of(scheduler, total)}


def _length(args: Any, rows: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for the length, and the total of steps. Raises JobError where epochs cannot say it."""
    batch_size, epochs, steps = given["batch_size"], given.get("epochs"), epoch_steps(rows, given)
    if "epoch_samples" in given:
        if not epochs:
            raise JobError(["epoch_samples= is given, of which epochs= counts: give epochs= too"], where=_WHERE)
        return {"epochs": epochs, "total": epochs * steps}
    total = epochs * steps if epochs else args.max_steps if args.max_steps > 0 else 0
    total = total or math.ceil(args.num_train_epochs * steps)
    by, whole = _value(args.eval_strategy), total % steps == 0
    unit = _steps(args.eval_steps, total) if by == "steps" else steps if whole else total
    passes = f"max_steps to a multiple of {steps}" if args.max_steps > 0 else "num_train_epochs to a whole number"
    changes = [*([] if whole else [passes]), *(['eval_strategy="epoch"'] if by == "steps" else [])]
    evaluations = f" with evaluations after each {unit}" if by == "steps" else ""
    problem = ""
    if total % unit:
        problem = f"{total} steps are not a multiple of eval_steps={unit}: change it, or"
    elif total * batch_size > rows and ((unit != steps and rows % batch_size) or (by == "epoch" and not whole)):
        problem = f"{total} steps{evaluations} are not whole passes of {steps} steps:"
    if problem:
        raise JobError([f"{problem} set {' and '.join(changes)}"], where=_WHERE)
    found = {"epochs": total // unit, "total": total}
    if unit == steps:
        return found
    by_pass = {"checkpoint_steps": steps} if _value(args.save_strategy) == "epoch" else {}
    return {**found, **by_pass, "epoch_samples": unit * batch_size}


def _steps(given: float, total: int) -> int:
    """Return a number of steps that may be given as a share of all."""
    return math.ceil(total * given) if given < 1 else int(given)


def _checkpoints(args: Any, total: int, *, evaluated: bool) -> dict[str, Any]:
    """Return options for checkpoints. Raises JobError for a best model by a metric."""
    found: dict[str, Any] = {}
    if _value(args.save_strategy) == "steps":
        found["checkpoint_steps"] = _steps(args.save_steps, total)
    if args.save_total_limit:
        found["keep"] = args.save_total_limit
    if args.load_best_model_at_end or _value(args.save_strategy) == "best":
        if not evaluated or args.metric_for_best_model not in (None, "loss", "eval_loss"):
            problem = f"metric_for_best_model={args.metric_for_best_model!r} is not covered: give best= of the job"
            raise JobError([problem], where=_WHERE)
        found["best"] = "loss"
    return found


def _data(trainer: Any, dataset: Any, name: str) -> tuple[Dataset, SampleCollate]:
    """Return a data set of Trainer with its collator, both without the columns that Trainer removes."""
    collator = trainer.data_collator
    if hasattr(dataset, "features") and hasattr(dataset, "with_format"):
        dataset = trainer._remove_unused_columns(dataset, description=name)
        custom = (getattr(dataset, "format", None) or {}).get("type") == "custom"
        rows = from_torch(dataset) if custom else from_huggingface(dataset)
    else:
        collator = trainer._get_collator_with_removed_columns(collator, description=name)
        rows = from_torch(dataset)
    return rows, SampleCollate.of(collator, dataset[0], "data_collator")


def _model_loss(model: Any, batch: Mapping[str, Any]) -> Any:
    """Return the loss of the model's outputs, as Trainer takes it."""
    outputs = model(**batch)
    return outputs["loss"] if isinstance(outputs, dict) else outputs[0]


def _count_labels(batch: Mapping[str, Any], *, shifted: bool) -> Any:
    """Return how many labels of a micro-batch count, as Trainer counts them."""
    if "shift_labels" in batch:
        labels = batch["shift_labels"]
    else:
        labels = batch["labels"][..., 1:] if shifted else batch["labels"]
    return (labels != -100).sum()


def _shifts(trainer: Any) -> bool:
    """Return whether the model's loss compares a token's output with the next token."""
    causal = getattr(trainer.model, "loss_type", None) == "ForCausalLM"
    return bool(getattr(trainer, "_loss_shifts_labels", causal))


def _name(args: Any) -> str:
    """Return a run's name: the last part of `output_dir`."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", PurePath(args.output_dir or "").name)[:100].lstrip("._-") or "trainer"


def _value(given: Any) -> str:
    """Return the text of an option that may be an enum."""
    return str(getattr(given, "value", given))
