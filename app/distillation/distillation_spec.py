"""Describe a distillation: the student's job, its teachers, and where the teachers run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from trainwright.core.engine import Pad
from trainwright.core.errors import JobError
from trainwright.core.job import ColumnNames, Job
from trainwright.core.loss_api import name_problems, step_keywords, teacher_column
from trainwright.core.soft_loss import SoftLoss
from trainwright.core.strict_model import StrictModel
from trainwright.datasets.data_source import TableSource
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.file_system import absolute_path
from trainwright.distillation.target_encoding import TargetEncoding
from trainwright.inference.inference_model import frozen_optimizer, inference_job, no_loss
from trainwright.strategies.distillation.teacher_outputs import TeacherOutputs

Delivery = Literal["offline", "online", "inline"]
STUDENT = "student"  # name of the job's own model among several students
_NO_DATA = Dataset(source=TableSource(arrays={}))  # for facts of a job that do not depend on its data


class Distillation(StrictModel):
    """What `tw.distill` does: train the student's job with teacher outputs beside its data, and a loss of both.

    Attributes:
        student: the job as it would be trained without teachers. Its loss is the hard loss, of its targets. A job
            without targets has no hard loss, and `loss=SoftLoss(alpha=0)` learns from the teachers alone.
        teachers: models whose outputs the student learns; none if students teach each other.
        loss: how labels and teachers make the student's loss.
        students: name -> () -> model of further students, trained in the same run with one pass of the teachers. The
            job's own model is then the student `student`, and each student has its metrics: `small/accuracy`.
        mutual: students teach each other too (Zhang et al., 2018).
        joint: students that learn from the hard loss alone, and teach the others.
        way: where the teachers run. `offline`: outputs for all rows are computed first and stored for later runs;
            `online`: in actors of their own, some batches ahead of the steps; `inline`: in the student's own step.
            `auto` chooses by rule and says why; see `teacher_delivery` and `tw.plan`.
        keep: how outputs are stored offline: `fp16`, `fp32`, or `topk(8)`: the 8 largest logits, and the mass of the
            rest.
        targets: folder of stored outputs; by default `targets` in the job's storage.
        cpus: CPUs of each actor of a teacher, online.
        gpus: GPUs of each actor of a teacher, online.
    """

    student: Job
    teachers: tuple[Teacher, ...] = ()
    loss: SoftLoss = SoftLoss()
    students: Mapping[str, Callable[[], Any]] = Field(default_factory=dict)
    mutual: bool = False
    joint: tuple[str, ...] = ()
    way: Delivery | Literal["auto"] = "auto"
    keep: str = "fp16"
    targets: str | None = None
    cpus: Annotated[float, Field(ge=0)] = 1.0
    gpus: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> Distillation:
        problems = [*self._unsuited(), *self._doubled()]
        try:
            TargetEncoding.parse(self.keep)
        except JobError as error:
            problems += error.problems
        if problems:
            raise JobError(problems)
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the students."""
        return (STUDENT, *self.students)

    @property
    def builders(self) -> dict[str, Callable[[], Any]]:
        """() -> model of each student, by name."""
        return {STUDENT: self.student.model, **self.students}

    @property
    def wrapped(self) -> bool:
        """Whether one model holds the students, and returns more than the outputs of one."""
        return len(self.names) > 1 or bool(self.loss.matches) or self.loss.combine == "learned"

    @property
    def folder(self) -> str:
        """Folder of stored targets."""
        return self.targets or f"{self.student.storage.rstrip('/')}/targets"

    def _unsuited(self) -> list[str]:
        job, problems = self.student, []
        if job.training.step is not None:
            problems.append("student: step= makes its own loss: give the job loss=, inputs= and targets= instead")
        if names := step_keywords(job.loss):
            problems.append(f"student: loss= takes {names[0]}=, which a distillation does not give: leave it out")
        if job.tensorflow.run == "fit":
            problems.append(
                'student: run="fit" is Keras\' own step: leave it out, and give the job loss= and optimizer='
            )
        if self.way == "online" and not self.cpus and not self.gpus:
            problems.append("cpus=0 and gpus=0: give each actor of a teacher one of them")
        return problems

    def _doubled(self) -> list[str]:
        names = [teacher.name for teacher in self.teachers]
        twice = sorted({name for name in names if names.count(name) > 1})
        problems = [f"two teachers are named {name!r}: rename one" for name in twice]
        if STUDENT in self.students:
            problems.append(f"students= names one {STUDENT!r}, which is the job's own model: rename it")
        return problems


# --- Teachers ---------------------------------------------------------------------------------------------------------


JOB_FIELDS = ("inputs", "pad", "collate", "precision")  # which a teacher with job= takes from it


class Teacher(StrictModel):
    """A model that teaches.

    Attributes:
        name: letters, digits, dashes and underscores; its columns are `teacher.NAME` and `teacher.NAME/LAYER`.
        job: the job of the run that trained it.
        train: train this run first if it is not finished, side by side with those of other teachers.
        step: use the checkpoint of this step, or `best` for that of the best evaluation, by the job's `best=`; by
            default the newest.
        model: () -> torch.nn.Module or keras.Model, for a model that no run of trainwright trained.
        weights: file that `tw.export` wrote: `.safetensors`, `.pt`, `.keras` or `.weights.h5`, where all nodes see it.
            By default model() returns the weights, the same each time.
        inputs: as a job's, for `model`.
        pad: as a job's, for `model`.
        collate: as a job's, for `model`.
        precision: as a job's, for `model`.
        output: which of its outputs teaches; by default the only one, or `logits`.
        layers: layers whose outputs become columns too, named as in `Match`; of a tuple it is the first item.
        probabilities: the output is probabilities of a softmax (True) or of each label (`sigmoid`), not logits.
        batch_size: rows that the model gets at once.
        plan: layout of `model` over workers, as a job's, such as `pp=2`. By default each worker holds the whole model
            if it fits; otherwise the planner divides it. A run keeps the layout that it was trained in.
    """

    name: str
    job: Job | None = None
    train: bool = False
    step: Annotated[int, Field(ge=0)] | Literal["best"] | None = None
    model: Callable[[], Any] | None = None
    weights: str | None = None
    inputs: str | ColumnNames | Mapping[str, str] = ()
    pad: Mapping[str, Pad] = Field(default_factory=dict)
    collate: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    output: str = ""
    layers: ColumnNames = ()
    probabilities: Literal[False, True, "sigmoid"] = False
    batch_size: Annotated[int, Field(ge=1)] = 256
    plan: str | None = None

    @field_validator("weights")
    @classmethod
    def _anywhere(cls, weights: str | None) -> str | None:
        return weights if weights is None else absolute_path(weights)

    @model_validator(mode="after")
    def _consistent(self) -> Teacher:
        problems = name_problems("the teacher", self.name)
        if (self.job is None) == (self.model is None):
            problems.append("give job= (of a trained run), or model= with inputs=, and not both")
        of_run = [name for name in JOB_FIELDS if name in self.model_fields_set] if self.job is not None else []
        problems += [f"{name}= is the job's: leave it out" for name in of_run]
        if self.job is not None and self.plan is not None:
            problems.append("plan= is for model=: a run is asked in the layout that it was trained in")
        if self.job is not None and not self.job.inputs:
            problems.append("job= has no inputs=: name the columns given to the model")
        if self.job is not None and self.weights is not None:
            problems.append("weights= are for model=: a run has checkpoints; choose one with step=")
        if self.model is not None and not self.inputs:
            problems.append("inputs= is missing: name the columns given to the model")
        if self.model is not None and self.step is not None:
            problems.append("step= is for job=: a model has no checkpoints")
        if self.step == "best" and self.job is not None and self.job.checkpointing.best is None:
            problems.append('step="best" needs best= in job=: name the metric that was evaluated, such as best="-loss"')
        if self.train and (self.job is None or self.step is not None):
            problems.append("train=True is for job=, to its end: give that, and leave step= out")
        if len(set(self.layers)) < len(self.layers):
            problems.append("layers= names one twice")
        if problems:
            raise JobError(problems)
        return self

    def __repr__(self) -> str:
        return f"Teacher({self.name!r})"

    def __str__(self) -> str:
        return f"{self!r}, {self.lesson}"  # data sets with its outputs are compared by this

    @property
    def builder(self) -> Callable[[], Any]:
        """() -> its model."""
        build = self.model if self.job is None else self.job.model
        assert build is not None, "it has a job or a model"
        return build

    @property
    def columns(self) -> ColumnNames:
        """The columns that the teacher adds: its output, then each layer."""
        return (teacher_column(self.name), *(teacher_column(self.name, layer) for layer in self.layers))

    @property
    def wanted(self) -> ColumnNames:
        """The columns that the model gets, after collation, with masks."""
        return self.inference_job(_NO_DATA).arguments

    @property
    def input_columns(self) -> ColumnNames:
        """The columns of the data set that make the inputs; none if `collate` chooses them."""
        return self.inference_job(_NO_DATA).input_columns

    @property
    def lesson(self) -> TeacherOutputs:
        """The inputs of its model, and how outputs become columns."""
        job = self.inference_job(_NO_DATA)
        ending = {False: "", True: "softmax", "sigmoid": "sigmoid"}[self.probabilities]
        return TeacherOutputs(
            inputs=job.arguments, keywords=job.keywords, output=self.output, layers=self.layers, columns=self.columns,
            probabilities=ending, precision=job.training.precision,
        )  # fmt: skip

    def inference_job(self, data: Dataset) -> Job:
        """Return a job whose model reads a data set, without weights."""
        if self.job is not None:
            return inference_job(self.job, data)
        return Job(
            name=f"teacher-{self.name}", model=self.builder, train=data, loss=no_loss, optimizer=frozen_optimizer,
            inputs=self.inputs, pad=self.pad, collate=self.collate, precision=self.precision,
            batch_size=self.batch_size, inexact=("batch_norm",), plan=self.plan,
        )  # fmt: skip
