"""Teachers: a trained run, a checkpoint, or any model with weights, and what each says of rows of data."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from trainwright.core.cluster import Cluster, Node
from trainwright.core.collation import Pad
from trainwright.core.data import Batch, Columns
from trainwright.core.errors import JobError
from trainwright.core.job import Job, Names
from trainwright.core.model_profile import ModelProfile
from trainwright.core.strict_model import Fields
from trainwright.core.teacher_columns import named, teacher_column
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.arrow_columns import Arrays
from trainwright.datasets.formats.in_memory import TableSource
from trainwright.datasets.formats.paths import absolute
from trainwright.distillation.teacher_model import Taught, local, random_kept, still, teaching_of
from trainwright.inference.evaluate import find_checkpoint
from trainwright.inference.inference_model import Subject, no_loss, serving
from trainwright.inference.prediction_files import Range, joined
from trainwright.inference.prediction_worker import Outputs, Weights, standing
from trainwright.planning.planner import choose
from trainwright.planning.profile_model import built, profile_job, profiler_of
from trainwright.strategies.distillation.teacher_outputs import Lesson, log_odds

_OF_JOB = ("inputs", "pad", "collate", "precision")


class Teacher(Fields):
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
    inputs: str | Names | Mapping[str, str] = ()
    pad: Mapping[str, Pad] = Field(default_factory=dict)
    collate: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    output: str = ""
    layers: Names = ()
    probabilities: Literal[False, True, "sigmoid"] = False
    batch_size: Annotated[int, Field(ge=1)] = 256
    plan: str | None = None

    @field_validator("weights")
    @classmethod
    def _anywhere(cls, weights: str | None) -> str | None:
        return weights if weights is None else absolute(weights)

    @model_validator(mode="after")
    def _consistent(self) -> Teacher:
        problems = named("the teacher", self.name)
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
    def columns(self) -> Names:
        """The columns that it adds: of its output, then of each layer."""
        return (teacher_column(self.name), *(teacher_column(self.name, layer) for layer in self.layers))

    @property
    def wanted(self) -> Names:
        """The columns that its model is given, after collation: masks are among them."""
        return self._bound(_nothing()).arguments

    @property
    def input_columns(self) -> Names:
        """The columns of the data set that those are made of; none where `collate` makes them of what it likes."""
        return self._bound(_nothing()).input_columns

    @property
    def lesson(self) -> Lesson:
        """What it is given, and what its columns are made of."""
        job = self._bound(_nothing())
        ending = {False: "", True: "softmax", "sigmoid": "sigmoid"}[self.probabilities]
        return Lesson(
            inputs=job.arguments, keywords=job.keywords, output=self.output, layers=self.layers, columns=self.columns,
            probabilities=ending, precision=job.precision,
        )  # fmt: skip

    def identity(self) -> str:
        """SHA-256 of the checkpoint's manifest, or of the weights. Raises as `load`."""
        return self.load().sha256

    def load(self) -> Lecturer:
        """What speaks for it in any process, with the weights that are the newest now.

        Raises:
            CheckpointError: the run has no such checkpoint, or the file of weights cannot be read.
            JobError: model() has other weights each time, or is no model.
        """
        if self.job is not None:
            runs, checkpoint = find_checkpoint(self.job, self.step)
            weights = Weights(runs=runs, run=self.job.name, checkpoint=checkpoint)
            return Lecturer(teacher=self, sha256=checkpoint.manifest_sha256, weights=weights)
        if self.weights is not None:
            with local(self.weights) as (_, sha256):
                return Lecturer(teacher=self, sha256=sha256)
        assert self.model is not None, "it has a job or a model"
        once, twice = (teaching_of(model).digest(model) for model in (self.model(), self.model()))
        if once != twice:
            problem = "model() has other weights each time: give it those that it is to have, or weights="
            raise JobError([problem], where=repr(self))
        return Lecturer(teacher=self, sha256=once)

    def module(self) -> Any:
        """See `Lecturer.module`; with the weights that are the newest now. Raises as that and `load`."""
        return self.load().module()

    def subject(self, data: Dataset) -> Subject:
        """It, bound to a data set whose rows it is to be asked about. Raises as `load`."""
        return self.bound(data, self.load())

    def asked(self, data: Dataset) -> Job:
        """The job that has its model read a data set, with whatever weights."""
        return self._bound(data)

    def bound(self, data: Dataset, lecturer: Lecturer) -> Subject:
        """The same with the weights of a lecturer of its."""
        job, layers, weights = self._bound(data), self.lesson.tapped, lecturer.weights
        identity, taught = lecturer.sha256, self.taught(lecturer, layers)
        quiet = {"optimizer": still, "loss": no_loss, "run": "step", "callbacks": None}
        if self.job is None:
            return Subject(job=job.replace(model=taught), weights=None, sha256=identity, outline=taught.build)
        subject = Subject(job=job, weights=weights, sha256=identity, outline=self.job.model)
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
            return serving(self.job, data)
        assert self.model is not None, "it has a job or a model"
        return Job(
            name=f"teacher-{self.name}", model=self.model, train=data, loss=no_loss, optimizer=still,
            inputs=self.inputs, pad=self.pad, collate=self.collate, precision=self.precision,
            batch_size=self.batch_size, inexact=("batch_norm",), plan=self.plan,
        )  # fmt: skip

    def taught(self, lecturer: Lecturer, layers: Mapping[str, str]) -> Taught:
        """What builds its model, with the weights of a lecturer of its."""
        build = self.model if self.job is None else self.job.model
        assert build is not None, "it has a job or a model"
        file, sha256 = self.weights or "", lecturer.sha256
        return Taught(build=build, weights=lecturer.weights, file=file, sha256=sha256, layers=layers)


@dataclass(frozen=True, kw_only=True)
class Lecturer:
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
    weights: Weights | None = None

    @property
    def name(self) -> str:
        """Of the teacher."""
        return self.teacher.name

    @property
    def columns(self) -> Names:
        """The columns that it adds."""
        return self.teacher.columns

    @property
    def wanted(self) -> Names:
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
        with random_kept():
            model = self.teacher.taught(self, {})()
            return teaching_of(model).inside(model, self.teacher.lesson)

    def profile(self, sample: Columns) -> ModelProfile:
        """What its model costs, given columns of a row that have `wanted`. Raises UserCodeError, JobError."""
        missing = [name for name in self.wanted if name not in sample]
        if missing:
            problem = f"{self.teacher!r} is given {', '.join(missing)}, which the student's step has not"
            raise JobError([f'{problem}: add it to what the job\'s collate= gives, or use way="offline" or "online"'])
        build = self.teacher.model if self.teacher.job is None else self.teacher.job.model
        assert build is not None, "it has a job or a model"
        with random_kept():
            model = built(build)
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
        return {name: wide(array) for name, array in joined(told, Range(start=0, stop=rows)).items()}

    def _standing(self, columns: Columns) -> Standing:
        key = self.identity()
        with _lock:
            if key not in _open:
                _open[key] = self.opened({name: column[:1] for name, column in columns.items()})
            return _open[key]

    def opened(self, row: Columns) -> Standing:
        """Its model, built on what this process has, which lives as long as what is returned. Raises as `teach`."""
        data = Dataset(source=TableSource(arrays=dict(row)))
        subject, index = self.teacher.bound(data, self), data.index()
        job = (subject.lone or subject.job).alone(accelerator="auto")
        plan = choose(profile_job(job.replace(model=subject.outline), data, index), _here(), job).chosen
        spec = job.model_spec(1, partial(data.row, index, job.columns))
        with random_kept():
            return Standing(standing(spec, plan, None if subject.lone else subject.weights, guest=True))


class Standing:
    """A model in this process, asked by one thread at a time; its first outputs are looked at.

    Attributes:
        outputs: of the model itself.
    """

    def __init__(self, outputs: Outputs) -> None:
        self.outputs, self._asked = outputs, threading.Lock()
        self._look: Callable[[Any], Any] | None = np.asarray

    def told(self, batch: Batch, lesson: Lesson) -> list[Columns]:
        """The teacher's columns for a batch, in pieces."""
        with self._asked:
            told: list[Columns] = [lesson.told(outputs, log_odds, self._look) for outputs in self.outputs(batch)]
            self._look = None
        return told


_open: dict[str, Standing] = {}
_lock = threading.Lock()


def wide(values: Any) -> Any:
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
