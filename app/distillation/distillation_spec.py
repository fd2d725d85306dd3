"""A distillation: a student's job, its teachers, and how what they say reaches it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import Field, field_validator, model_validator

from trainwright.core.cluster import Cluster, Node
from trainwright.core.data import Batch, Columns
from trainwright.core.engine import Pad
from trainwright.core.errors import JobError
from trainwright.core.job import Job
from trainwright.core.job_options import ColumnNames
from trainwright.core.loss_api import name_problems, teacher_column
from trainwright.core.model_profile import ModelProfile
from trainwright.core.soft_loss import SoftLoss
from trainwright.core.strict_model import StrictModel
from trainwright.datasets.data_source import Arrays, TableSource
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.file_system import absolute_path
from trainwright.distillation.target_encoding import TargetEncoding
from trainwright.distillation.teacher_runner import (
    TeacherModelBuilder,
    frozen_optimizer,
    local_weights,
    preserve_rng_state,
    teacher_backend_of,
)
from trainwright.inference.inference_model import InferenceModel, inference_job, no_loss
from trainwright.inference.prediction_files import Range, concatenate_outputs
from trainwright.inference.prediction_worker import CheckpointWeights, OutputFunction, local_outputs
from trainwright.inference.trained_model import find_checkpoint
from trainwright.planning.planner import choose
from trainwright.planning.profiler import build_model, profile_job, profiler_of
from trainwright.strategies.distillation.teacher_outputs import TeacherOutputs, log_odds

Delivery = Literal["offline", "online", "inline"]
DELIVERIES: tuple[Delivery, ...] = ("offline", "inline", "online")  # of those as quick the first is taken
STUDENT = "student"  # what the job's own model is called, where it has company


class SupportsDistill(Protocol):
    """What is made of several distillations."""

    def distill(self, *, resume: bool, fresh: bool, verbose: bool) -> Any:
        """Carry it out, as `tw.distill` does."""


class Distillation(StrictModel):
    """What `tw.distill` does: the student's job, with what the teachers say beside its data, and a loss of both.

    Attributes:
        student: the job as it would be trained without teachers. Its loss is the hard one, of its targets; where it has
            no targets there is none, and `loss=SoftLoss(alpha=0)` learns from the teachers alone.
        teachers: whose outputs are learned; none where students teach each other.
        loss: how labels and teachers make the student's loss.
        students: name -> () -> model, of more students that are trained in the same run on one pass of the teachers.
            The job's own model is the student `student` then, and metrics are told of each: `small/accuracy`.
        mutual: students teach each other too (Zhang et al., 2018).
        joint: students that are trained by the hard loss alone, and teach the others.
        way: where the teachers run. `offline`: what they say of all rows is computed first and kept for later runs;
            `online`: in actors of their own, some batches ahead of the steps; `inline`: in the student's own step.
            `auto` takes the quickest for the whole run, measured where that is long; `tw.plan` shows the three.
        keep: how that is kept offline: `fp16`, `fp32`, or `topk(8)`: the 8 largest logits, and the mass of the rest.
        targets: folder where it is kept; by default `targets` in the job's storage.
        cpus: of each actor of a teacher, online.
        gpus: the same.
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
        """Of the students."""
        return (STUDENT, *self.students)

    @property
    def builders(self) -> dict[str, Callable[[], Any]]:
        """() -> model of each student, by name."""
        return {STUDENT: self.student.model, **self.students}

    @property
    def wrapped(self) -> bool:
        """Whether the model is one around the students, which gives more than the outputs of one."""
        return len(self.names) > 1 or bool(self.loss.matches) or self.loss.combine == "learned"

    @property
    def folder(self) -> str:
        """Where offline targets are kept."""
        return self.targets or f"{self.student.storage.rstrip('/')}/targets"

    def _unsuited(self) -> list[str]:
        job, problems = self.student, []
        if job.step is not None:
            problems.append("student: step= makes its own loss: give the job loss=, inputs= and targets= instead")
        if job.run == "fit":
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


_OF_JOB = ("inputs", "pad", "collate", "precision")


class Teacher(StrictModel):
    """A model that teaches.

    Attributes:
        name: letters, digits, dashes and underscores; its columns are `teacher.NAME` and `teacher.NAME/LAYER`.
        job: of the run that trained it.
        train: the run is trained first where it is not finished, side by side with those of other teachers.
        step: its checkpoint at this step; by default the newest.
        model: () -> torch.nn.Module or keras.Model, for one that no run of ours trained.
        weights: what `tw.export` wrote of it: `.safetensors`, `.pt`, `.keras` or `.weights.h5`, where all nodes see it;
            by default model() brings them, the same each time.
        inputs: as a job's, and so the next three; a run's are its own.
        pad: as a job's.
        collate: as a job's.
        precision: as a job's.
        output: which of its outputs teaches; by default the only one, or `logits`.
        layers: whose hidden states are told too, named as in `Match`; of a tuple it is the first item.
        probabilities: its output ends in a softmax, or in `sigmoid` of each label, whose logits are taken.
        batch_size: rows that it is given at once.
        plan: how workers hold a model together that no run trained, as a job's, such as `pp=2`; by default each holds
            all of it where it fits, and what does not is divided as the planner finds best. A run's layout is its own.
    """

    name: str
    job: Job | None = None
    train: bool = False
    step: Annotated[int, Field(ge=0)] | None = None
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
        of_run = [name for name in _OF_JOB if name in self.model_fields_set] if self.job is not None else []
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
        return f"{self!r}, {self.lesson}"  # by which data sets that it has told something are compared

    @property
    def columns(self) -> ColumnNames:
        """The columns that it adds: of its output, then of each layer."""
        return (teacher_column(self.name), *(teacher_column(self.name, layer) for layer in self.layers))

    @property
    def wanted(self) -> ColumnNames:
        """The columns that its model is given, after collation: masks are among them."""
        return self._bound(_nothing()).arguments

    @property
    def input_columns(self) -> ColumnNames:
        """The columns of the data set that those are made of; none where `collate` makes them of what it likes."""
        return self._bound(_nothing()).input_columns

    @property
    def lesson(self) -> TeacherOutputs:
        """What it is given, and what its columns are made of."""
        job = self._bound(_nothing())
        ending = {False: "", True: "softmax", "sigmoid": "sigmoid"}[self.probabilities]
        return TeacherOutputs(
            inputs=job.arguments, keywords=job.keywords, output=self.output, layers=self.layers, columns=self.columns,
            probabilities=ending, precision=job.precision,
        )  # fmt: skip

    def identity(self) -> str:
        """SHA-256 of the checkpoint's manifest, or of the weights. Raises as `load`."""
        return self.load().sha256

    def load(self) -> TeacherRunner:
        """What speaks for it in any process, with the weights that are the newest now.

        Raises:
            CheckpointError: the run has no such checkpoint, or the file of weights cannot be read.
            JobError: model() has other weights each time, or is no model.
        """
        if self.job is not None:
            runs, checkpoint = find_checkpoint(self.job, self.step)
            weights = CheckpointWeights(runs=runs, run=self.job.name, checkpoint=checkpoint)
            return TeacherRunner(teacher=self, sha256=checkpoint.manifest_sha256, weights=weights)
        if self.weights is not None:
            with local_weights(self.weights) as (_, sha256):
                return TeacherRunner(teacher=self, sha256=sha256)
        assert self.model is not None, "it has a job or a model"
        once, twice = (teacher_backend_of(model).digest(model) for model in (self.model(), self.model()))
        if once != twice:
            problem = "model() has other weights each time: give it those that it is to have, or weights="
            raise JobError([problem], where=repr(self))
        return TeacherRunner(teacher=self, sha256=once)

    def module(self) -> Any:
        """See `Lecturer.module`; with the weights that are the newest now. Raises as that and `load`."""
        return self.load().module()

    def subject(self, data: Dataset) -> InferenceModel:
        """It, bound to a data set whose rows it is to be asked about. Raises as `load`."""
        return self.bound(data, self.load())

    def asked(self, data: Dataset) -> Job:
        """The job that has its model read a data set, with whatever weights."""
        return self._bound(data)

    def bound(self, data: Dataset, lecturer: TeacherRunner) -> InferenceModel:
        """The same with the weights of a lecturer of its."""
        job, layers, weights = self._bound(data), self.lesson.tapped, lecturer.weights
        identity, taught = lecturer.sha256, self.taught(lecturer, layers)
        quiet = {"optimizer": frozen_optimizer, "loss": no_loss, "run": "step", "callbacks": None}
        if self.job is None:
            return InferenceModel(job=job.replace(model=taught), weights=None, sha256=identity, outline=taught.build)
        subject = InferenceModel(job=job, weights=weights, sha256=identity, outline=self.job.model)
        if not layers:
            return subject
        return replace(
            subject,
            job=job.replace(model=replace(taught, weights=None, run=True)),
            lone=job.replace(model=taught, **quiet),
            undivided=f"hidden states of {self!r} are asked for",
        )

    def _bound(self, data: Dataset) -> Job:
        """The job that reads a data set."""
        if self.job is not None:
            return inference_job(self.job, data)
        assert self.model is not None, "it has a job or a model"
        return Job(
            name=f"teacher-{self.name}", model=self.model, train=data, loss=no_loss, optimizer=frozen_optimizer,
            inputs=self.inputs, pad=self.pad, collate=self.collate, precision=self.precision,
            batch_size=self.batch_size, inexact=("batch_norm",), plan=self.plan,
        )  # fmt: skip

    def taught(self, lecturer: TeacherRunner, layers: Mapping[str, str]) -> TeacherModelBuilder:
        """What builds its model, with the weights of a lecturer of its."""
        build = self.model if self.job is None else self.job.model
        assert build is not None, "it has a job or a model"
        file, sha256 = self.weights or "", lecturer.sha256
        return TeacherModelBuilder(build=build, weights=lecturer.weights, file=file, sha256=sha256, layers=layers)


@dataclass(frozen=True, kw_only=True)
class TeacherRunner:
    """Speaks for a teacher: arrays in, arrays out, whatever its framework. Pickles as a recipe.

    The model is built when it is asked first, once in a process, on the GPU that the process may use, or on the CPU.
    `name`, `columns` and `wanted` are the teacher's.

    Attributes:
        teacher: whose it is.
        sha256: of its weights, or of the manifest of its run's checkpoint.
        weights: of its run; None where it has none.
    """

    teacher: Teacher
    sha256: str
    weights: CheckpointWeights | None = None

    @property
    def name(self) -> str:
        """Of the teacher."""
        return self.teacher.name

    @property
    def columns(self) -> ColumnNames:
        """The columns that it adds."""
        return self.teacher.columns

    @property
    def wanted(self) -> ColumnNames:
        """The columns that `module` is given."""
        return self.teacher.wanted

    def identity(self) -> str:
        """Of its weights, and of what is made of what they give: whether another says the same."""
        return repr((self.sha256, self.teacher.lesson))

    def module(self) -> Any:
        """For a loss that runs it inside the step: its model in this process, without gradients, in evaluation mode.

        Call it with a dict of the framework's tensors that has `wanted`; it gives a dict of `columns`. In torch it is
        an nn.Module, to be moved to a device, in TensorFlow a callable object. Nothing random is drawn by it that a
        step would have drawn.

        Raises:
            JobError, CheckpointError: there is no such model or layer, or the weights do not fit.
        """
        with preserve_rng_state():
            model = self.teacher.taught(self, {})()
            return teacher_backend_of(model).inside(model, self.teacher.lesson)

    def profile(self, sample: Columns) -> ModelProfile:
        """What its model costs, given columns of a row that have `wanted`. Raises UserCodeError, JobError."""
        missing = [name for name in self.wanted if name not in sample]
        if missing:
            problem = f"{self.teacher!r} is given {', '.join(missing)}, which the student's step has not"
            raise JobError([f'{problem}: add it to what the job\'s collate= gives, or use way="offline" or "online"'])
        build = self.teacher.model if self.teacher.job is None else self.teacher.job.model
        assert build is not None, "it has a job or a model"
        with preserve_rng_state():
            model = build_model(build)
        keywords = self.teacher.lesson.keywords
        profile: ModelProfile = profiler_of(model).profile_model(model, sample, self.wanted, keywords=keywords)
        return profile

    def __call__(self, columns: Columns) -> Arrays:
        """The columns and the teacher's beside them, as `map_batches` wants them. Raises as `teach`."""
        return {**columns, **self.teach(columns)}

    def teach(self, columns: Columns) -> Arrays:
        """The teacher's columns for some rows: (rows, ...) floats by name.

        Raises:
            JobError, UserCodeError, CheckpointError: the model cannot be built or does not give what it is to give.
        """
        lesson = self.teacher.lesson
        rows = len(next(iter(columns.values())))
        told: list[Columns] = []
        for start in range(0, rows, self.teacher.batch_size):
            part = slice(start, min(start + self.teacher.batch_size, rows))
            samples = np.arange(part.start, part.stop)
            given = {name: column[part] for name, column in columns.items()}
            batch = Batch(columns=given, weights=np.ones(len(samples)), samples=samples)
            told.extend(self._standing(columns).told(batch, lesson))
        return {
            name: _at_least_float32(array)
            for name, array in concatenate_outputs(told, Range(start=0, stop=rows)).items()
        }

    def _standing(self, columns: Columns) -> LoadedTeacher:
        key = self.identity()
        with _lock:
            if key not in _open:
                _open[key] = self.opened({name: column[:1] for name, column in columns.items()})
            return _open[key]

    def opened(self, row: Columns) -> LoadedTeacher:
        """Its model, built on what this process has, which lives as long as what is returned. Raises as `teach`."""
        data = Dataset(source=TableSource(arrays=dict(row)))
        subject, index = self.teacher.bound(data, self), data.index()
        job = (subject.lone or subject.job).alone(accelerator="auto")
        plan = choose(profile_job(job.replace(model=subject.outline), data, index), _here(), job).chosen
        spec = job.model_spec(1, partial(data.row, index, job.columns))
        with preserve_rng_state():
            return LoadedTeacher(local_outputs(spec, plan, None if subject.lone else subject.weights, guest=True))


class LoadedTeacher:
    """A model in this process, asked by one thread at a time; its first outputs are looked at.

    Attributes:
        outputs: of the model itself.
    """

    def __init__(self, outputs: OutputFunction) -> None:
        self.outputs, self._asked = outputs, threading.Lock()
        self._look: Callable[[Any], Any] | None = np.asarray

    def told(self, batch: Batch, lesson: TeacherOutputs) -> list[Columns]:
        """The teacher's columns for a batch, in pieces."""
        with self._asked:
            told: list[Columns] = [lesson.told(outputs, log_odds, self._look) for outputs in self.outputs(batch)]
            self._look = None
        return told


_open: dict[str, LoadedTeacher] = {}
_lock = threading.Lock()


def _at_least_float32(values: Any) -> Any:
    """Floats of four bytes or more."""
    return values.astype(np.float32) if values.dtype.itemsize < np.dtype(np.float32).itemsize else values


def _nothing() -> Dataset:
    """For what does not depend on the data."""
    return Dataset(source=TableSource(arrays={}))


def _here() -> Cluster:
    """This process: the GPU that it was given, and as many threads as it is to use."""
    gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu not in ("", "-1")]
    threads = os.environ.get("OMP_NUM_THREADS", "")
    cpus = int(threads) if threads.isdecimal() else os.cpu_count() or 1
    node = Node(name="here", cpus=cpus, memory_bytes=0)
    return Cluster(nodes=(replace(node, accelerators=1, accelerator="GPU") if gpus else node,))
