"""What the user wants. Strict: unknown fields are refused with the nearest valid name, all problems at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trainwright.core.collation import MASK, Collation, Pad
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError, nearest
from trainwright.core.plan import Plan

Names = tuple[str, ...]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Job(BaseModel):
    """A training job. Going from one device to a cluster changes no field of it.

    Attributes:
        name: of the run; the same name resumes it. Letters, digits, dots, dashes and underscores.
        model: () -> torch.nn.Module; called in each worker.
        optimizer: (parameters) -> torch.optim.Optimizer.
        train: data set to train on, such as `tw.datasets.parquet("data/train")`.
        loss: (outputs, targets) -> one loss per sample, or `tw.Terms(values, weights)` for tokens and masks.
        inputs: column name or names given to the model, or the model's argument -> column:
            `{"input_ids": "tokens", "attention_mask": "tokens_mask"}` calls `model(input_ids=..., attention_mask=...)`.
        targets: column name or names given to loss and metrics.
        pad: column -> `tw.Pad(value=0, multiple=8)`, for columns whose rows differ in length: each micro-batch is
            padded, and `<column>_mask` (bool, True where the data is) may be named in inputs and targets.
        collate: (columns) -> columns of as many rows, instead of pad: takes the dict of all the data set's columns as
            arrays, gives a dict of arrays or tensors, which inputs and targets name.
        step: (model, batch) -> losses or Terms, instead of loss, inputs and targets.
        evaluate: data set to evaluate on after each `evaluate_epochs` epochs.
        metrics: name -> (outputs, targets) -> one value per sample, or Terms.
        batch_size: global, in samples: it means the same on 1 and on 1,000 workers.
        epochs: passes over the data, unless `epoch_samples` is given.
        epoch_samples: samples of a virtual epoch: checkpoints, evaluations, schedules and `epochs` count these instead
            of passes, and mean the same when the data grows.
        seed: of everything random.
        storage: a folder, or `s3://`, `gs://`, `az://` with a bucket and a prefix.
        workers: number of worker actors; by default what the planner finds best.
        spares: processes that wait, warmed up, to take the rank of one that is lost; by default one where there are two
            workers or more. Each holds what a worker does before its first step: framework, model and one batch.
        strategy: name of a strategy to pin; by default what the planner finds best.
        accelerator: `auto`, `cpu`, `gpu` or `tpu`.
        precision: `fp32` leaves the model's own types, `bf16` computes under autocast.
        accumulation: micro-batches of a worker in one step.
        clip_norm: largest global gradient norm.
        schedule: (step, total_steps) -> factor on the optimizer's own learning rate; see `tw.schedules`.
        shuffle: whether the training order changes with each epoch.
        shuffle_window: rows that are permuted together, larger for a better shuffle and more memory; by default as many
            as fit a reader's memory. `trainwright data inspect` measures what that gives.
        drop_last: leave out the short last batch of an epoch.
        checkpoint_steps: a checkpoint after this many steps; by default at the end of each epoch.
        keep: checkpoints kept.
        evaluate_epochs: epochs between evaluations.
        inexact: what may differ between one device and many, such as `("batch_norm",)`.
        failures: failures in a row without a completed step in between after which the run ends.
        failures_an_hour: failures within any hour after which the run ends, even where each was recovered from; by
            default any number.
        place_deadline_s: seconds to wait for the cluster to start the workers.
        on_error: `raise`, or `skip` samples that cannot be read or transformed: they get weight 0, and a line in the
            quarantine beside the run.
        on_nonfinite: what to do where the loss or its gradient is NaN or infinite: `raise`, or `skip` the step: it
            changes nothing, its bad samples get a line in the quarantine, and the next step follows.
        skip_limit: samples that each worker may skip, and steps, before the run ends all the same.
        hang_deadline_s: seconds without a completed step, or for an evaluation, after which the workers that hang are
            replaced; by default 30 times the longest wait so far, between 2 and 15 minutes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, protected_namespaces=())

    name: str
    model: Callable[[], Any]
    optimizer: Callable[[Any], Any]
    train: Any
    loss: Callable[[Any, Any], Any] | None = None
    inputs: str | Names | Mapping[str, str] = ()
    targets: str | Names = ()
    pad: Mapping[str, Pad] = Field(default_factory=dict)
    collate: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    step: Callable[[Any, Any], Any] | None = None
    evaluate: Any = None
    metrics: Mapping[str, Callable[[Any, Any], Any]] = Field(default_factory=dict)
    batch_size: Annotated[int, Field(ge=1)]
    epochs: Annotated[int, Field(ge=1)] = 1
    epoch_samples: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    storage: str = "runs"
    workers: Annotated[int, Field(ge=1)] | None = None
    spares: Annotated[int, Field(ge=0)] | None = None
    strategy: str | None = None
    accelerator: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    accumulation: Annotated[int, Field(ge=1)] = 1
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    schedule: Callable[[int, int], float] | None = None
    shuffle: bool = True
    shuffle_window: Annotated[int, Field(ge=1)] | None = None
    drop_last: bool = False
    checkpoint_steps: Annotated[int, Field(ge=1)] | None = None
    keep: Annotated[int, Field(ge=1)] = 3
    evaluate_epochs: Annotated[int, Field(ge=1)] = 1
    inexact: Names = ()
    failures: Annotated[int, Field(ge=0)] = 3
    failures_an_hour: Annotated[int, Field(ge=0)] | None = None
    place_deadline_s: Annotated[float, Field(gt=0)] = 300.0
    on_error: Literal["raise", "skip"] = "raise"
    on_nonfinite: Literal["raise", "skip"] = "raise"
    skip_limit: Annotated[int, Field(ge=0)] = 100
    hang_deadline_s: Annotated[float, Field(gt=0)] | None = None

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise JobError(_problems(error, type(self)), where="job") from None

    @model_validator(mode="after")
    def _consistent(self) -> Job:
        problems = []
        if not _NAME.fullmatch(self.name):
            problems.append(f"name={self.name!r}: use up to 100 letters, digits, '.', '-' and '_'")
        if (self.loss is None) == (self.step is None):
            problems.append("give either loss= with inputs= and targets=, or step=")
        if self.loss is not None and not self.inputs:
            problems.append("inputs= is missing: name the columns given to the model")
        if self.metrics and not self.inputs:
            problems.append("metrics= need inputs= and targets=")
        if not hasattr(self.train, "map_batches"):
            problems.append("train= is no data set: use tw.datasets.parquet(...) or tw.datasets.table(...)")
        if self.evaluate is not None and not hasattr(self.evaluate, "map_batches"):
            problems.append("evaluate= is no data set: use tw.datasets.parquet(...) or tw.datasets.table(...)")
        problems += _padding_problems(self)
        if problems:
            raise JobError(problems)
        return self

    def replace(self, **fields: Any) -> Job:
        """A copy with some fields changed, validated like a new one."""
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, **fields})

    @property
    def collation(self) -> Collation:
        """What is done to a micro-batch before its columns become tensors."""
        return Collation(pad=self.pad, function=self.collate)

    @property
    def arguments(self) -> Names:
        """Names of the columns given to the model, in order, masks included."""
        return tuple(self.inputs.values()) if isinstance(self.inputs, Mapping) else _names(self.inputs)

    @property
    def keywords(self) -> Names:
        """The model's own name of each of `arguments`; empty where they are positional."""
        return tuple(self.inputs) if isinstance(self.inputs, Mapping) else ()

    @property
    def input_columns(self) -> Names:
        """Columns of the data set that the inputs are made of; none where `collate` makes them of what it likes."""
        return () if self.collate else self.collation.sources(self.arguments)

    @property
    def target_columns(self) -> Names:
        """Columns of the data set that the targets are made of; none where `collate` makes them of what it likes."""
        return () if self.collate else self.collation.sources(_names(self.targets))

    @property
    def columns(self) -> Names | None:
        """Columns that must be read; None for all, where `step` or `collate` takes what it likes."""
        if self.step is not None or self.collate is not None:
            return None
        return tuple(dict.fromkeys(self.input_columns + self.target_columns))

    def ordering(self, *, evaluate: bool = False) -> dict[str, Any]:
        """What the order of the samples follows from beside the data: arguments of `datasets.stream.schedule_of`."""
        if evaluate:
            return {"batch_size": self.batch_size, "seed": self.seed, "epochs": 1, "shuffle": False, "drop_last": False}
        names = ("batch_size", "seed", "epochs", "shuffle", "drop_last", "epoch_samples")
        return {**{name: getattr(self, name) for name in names}, "window": self.shuffle_window}

    def model_spec(self, total_steps: int) -> ModelSpec:
        """The part of the job that an engine needs."""
        return ModelSpec(
            model=self.model,
            optimizer=self.optimizer,
            total_steps=total_steps,
            loss=self.loss,
            step=self.step,
            inputs=self.arguments,
            keywords=self.keywords,
            targets=_names(self.targets),
            collation=self.collation,
            metrics=dict(self.metrics),
            schedule=self.schedule,
            clip_norm=self.clip_norm,
            guard=self.on_nonfinite == "skip",
            seed=self.seed,
            inexact=self.inexact,
        )

    def check_plan(self, plan: Plan) -> None:
        """Raise JobError where the plan cannot serve this job."""
        if self.batch_size < plan.mesh.data_ranks:
            raise JobError(
                [
                    f"batch_size={self.batch_size} is smaller than the {plan.mesh.data_ranks} data-parallel workers: "
                    f"set batch_size to {plan.mesh.data_ranks} or more, or workers={self.batch_size} or fewer"
                ]
            )


def _names(given: str | Names) -> Names:
    """One name or several as several."""
    return (given,) if isinstance(given, str) else given


def _padding_problems(job: Job) -> list[str]:
    """What is wrong with inputs, pad and collate together."""
    problems = [f"inputs={name!r} is no name of an argument" for name in job.keywords if not name.isidentifier()]
    if job.pad and job.collate:
        problems.append("collate= takes the place of pad=: give one of them")
    used = set(job.collation.sources((*job.arguments, *_names(job.targets))))
    for name in job.pad if job.step is None and used else ():
        if name not in used:
            problems.append(f"pad={name!r} is neither an input nor a target: {nearest(name, used)}")
        elif name + MASK in job.pad:
            problems.append(f"pad={name + MASK!r} is the name of the mask of {name!r}: rename the column")
    return problems


def _problems(error: ValidationError, kind: type[Job]) -> list[str]:
    """Every problem pydantic found, in words that name the field and the remedy."""
    problems: list[str] = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"])
        cause = item.get("ctx", {}).get("error")
        if item["type"] == "extra_forbidden":
            problems.append(f"{field}= is no field of Job: {nearest(field, kind.model_fields)}")
        elif item["type"] == "missing":
            problems.append(f"{field}= is missing")
        elif isinstance(cause, JobError):
            problems.extend(cause.problems)
        else:
            problems.append(f"{field}={item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}")
    return problems
