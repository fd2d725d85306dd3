"""Evaluate students beside their teachers: metrics, agreement, calibration, sizes and latencies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainwright.core import formatting
from trainwright.core.data import Batch, MetricSums, Terms
from trainwright.core.errors import JobError, UserCodeError
from trainwright.core.frameworks import load_module
from trainwright.datasets.ops.row_transforms import Counters
from trainwright.distillation.distillation_job import teachers_with_layers
from trainwright.distillation.distillation_spec import Distillation, Teacher
from trainwright.distillation.output_metrics import (
    AgreementMetrics,
    ClassificationMetrics,
    LabelledOutputs,
    RegressionMetrics,
    SoftTargetMatrix,
    ensemble_outputs,
    labelled_outputs,
    labels_of,
)
from trainwright.distillation.target_cache import stored_targets
from trainwright.distillation.teacher_runner import LoadedTeacher, TeacherRunner, load_teacher, teacher_inference_model
from trainwright.planning.profiler import profile_job
from trainwright.reporting.scorecard import MAIN_SCORE, ModelScore, Scorecard, StudentTeacherScore, retained_share
from trainwright.strategies.distillation.distillation_loss import DistillationLoss
from trainwright.strategies.distillation.teacher_outputs import LOGITS

if TYPE_CHECKING:
    from trainwright.core.job import Job
    from trainwright.core.model_profile import ModelProfile
    from trainwright.datasets.dataset import Dataset

_Array = npt.NDArray[Any]

ALL_TEACHERS, _LOSS = "all teachers", "loss"
LOCAL_FLOPS = 4e11  # this process computes so many faster than a pool starts
_NUMBERS = 2e9  # most outputs of a model; of more, rows are left out
_ROWS, _CHUNK = 256, 1 << 22  # rows and numbers at once


def evaluate_students(
    distillation: Distillation,
    loss: DistillationLoss,
    students: Mapping[str, Job],
    *,
    folder: str,
    step: int = 0,
    verbose: bool = False,
) -> Scorecard:
    """Compute the outputs of students and teachers for the evaluation set, compare them, and time the models.

    Stored targets of `way="offline"` are used. Small models run in this process, others on a pool, as in `tw.predict`.

    Args:
        distillation: that was trained.
        loss: of the students; it knows the teachers of each.
        students: the job of each alone, with its checkpoints.
        folder: for outputs of students, where a pool computes them.
        step: of the students' checkpoint.
        verbose: show Ray's own output.

    Raises:
        TrainwrightError: there is no evaluation set with rows by number; as `stored_targets` and `load_teacher`.
    """
    began_s, job = time.monotonic(), distillation.student
    if job.evaluate is None:
        raise JobError(["evaluate= is missing: students are compared on an evaluation set"])
    job.evaluate.need_rows_by_number("comparing students with teachers")
    builders = distillation.builders
    teachers = teachers_with_layers(distillation) if distillation.way == "offline" else distillation.teachers
    models = [
        EvaluatedModel.of(Teacher(name=name, job=each, output=loss.soft.output), job.evaluate, build=builders[name])
        for name, each in students.items()
    ]
    models += [EvaluatedModel.of(each, job.evaluate) for each in teachers]
    rows, of_rows = _looked_at(models, job.evaluate.index().rows)
    asked, notes = [], []
    for each in models:
        if (ready := _ready(each, distillation, len(rows), of_rows, folder, verbose)) is None:
            size = formatting.size(each.profile.parameter_bytes)
            notes.append(f"{each.name} is not evaluated: its {size} of parameters are too large for this process")
        else:
            asked.append(ready)
    evaluation = StudentEvaluation(job, loss, asked, rows)
    evaluation.run()
    return replace(
        evaluation.scorecard(), step=step, of_rows=of_rows, notes=[*notes, *evaluation.notes],
        seconds=time.monotonic() - began_s,
    )  # fmt: skip


def _looked_at(models: list[EvaluatedModel], rows: int) -> tuple[_Array, int]:
    """Return row numbers, all or evenly spaced where the outputs would be too many, and the number of rows."""
    most = max(1, int(_NUMBERS // max(each.outputs_per_row for each in models)))
    every = np.arange(rows) if rows <= most else np.unique(np.linspace(0, rows - 1, most).astype(np.int64))
    return every, rows


def _ready(
    model: EvaluatedModel, distillation: Distillation, rows: int, of_rows: int, folder: str, verbose: bool
) -> EvaluatedModel | None:
    """Return the model with stored outputs, if any are needed; None where nothing can run it."""
    kept = not model.student and distillation.way == "offline"
    small = model.fits_locally and model.profile.flops * rows <= LOCAL_FLOPS
    if kept or (rows == of_rows and not small):
        to, keep = (folder, "fp32") if model.student else (distillation.folder, distillation.keep)
        told = stored_targets(model.teacher, distillation.student.evaluate, folder=to, keep=keep, verbose=verbose)
        return replace(model, stored=told)
    return model if model.fits_locally else None


class StudentEvaluation:
    """One pass over the evaluation set.

    Args:
        job: of the students, as it would be trained without teachers.
        loss: of the students; it knows the teachers of each.
        models: students and teachers.
        rows: row numbers to evaluate.

    Attributes:
        notes: metrics that could not be computed, and why.
    """

    def __init__(self, job: Job, loss: DistillationLoss, models: list[EvaluatedModel], rows: _Array) -> None:
        self._job, self._loss, self._models, self._rows = job, loss, models, rows
        wanted = [job.columns, *(each.teacher.input_columns or None for each in models)]
        names = None if None in wanted else tuple(dict.fromkeys(name for some in wanted for name in some or ()))
        self._data, self._names = job.evaluate, names
        self._reader = self._data.reader(self._data.index(), names)
        self._kind, self._spec = loss.soft.kind, job.model_spec(1)
        self._framework = next(each.profile.framework for each in models if each.student)
        self._teachers = [each.name for each in models if not each.student]
        self._own_scores: dict[str, ClassificationMetrics | RegressionMetrics] = {}
        self._agreement: dict[tuple[str, str], AgreementMetrics] = {}
        self._soft_targets: dict[str, SoftTargetMatrix] = {}
        self._sums: dict[str, MetricSums] = {}
        self._output_names: dict[
            str, str | None
        ] = {}  # a model's output as the job's functions take it; None for not at all
        self._dropped: set[tuple[str, str]] = set()
        self._latency: dict[str, dict[str, float]] = {}
        self._tokens = 1
        self.notes: list[str] = []

    def run(self) -> None:
        """Compute all outputs and count them. Raises TrainwrightError."""
        sources: dict[str, _OutputSource] = {}
        for batch in self._batches():
            sources = sources or self._sources(batch)
            said = {name: source(batch) for name, source in sources.items()}
            told = [self._metrics(name, batch, each) for name, each in said.items()]
            loss = next((terms for terms in told if terms is not None), None)
            first = next(iter(said.values()))
            self._tokens = first.shape[1] if self._kind == "language_model" else 1
            labels, weights, tokens = labels_of(self._kind, first, self._targets(batch), loss)
            units = {
                name: labelled_outputs(self._kind, each[:, :tokens], labels, weights) for name, each in said.items()
            }
            if len(self._teachers) > 1:
                units[ALL_TEACHERS] = ensemble_outputs({name: units[name] for name in self._teachers}, self._shares())
            self._count(units)

    def scorecard(self) -> Scorecard:
        """Return the scorecard of what was counted."""
        pictures = {name: picture.means() for name, picture in self._soft_targets.items()}
        first = next(iter(self._soft_targets.values()), None)
        marks = [
            ModelScore(
                name=name, student=name not in (*self._teachers, ALL_TEACHERS), scores=scores.scores(),
                metrics=self._sums.get(name, MetricSums()).means(), reliability=scores.reliability(),
                latency_s=self._latency.get(name, {}), soft=pictures.get(name, []), **self._sizes(name),
            )
            for name, scores in self._own_scores.items()
        ]  # fmt: skip
        return Scorecard(
            kind=self._kind, rows=len(self._rows), of_rows=len(self._rows), tokens=self._tokens, marks=marks,
            device=_latency_device(),
            units=next(iter(self._own_scores.values())).weight, classes=first.shown() if first else [],
            commonest=[float(each) for each in first.commonest()] if first else None, pairs=self._paired(marks),
        )  # fmt: skip

    def _sources(self, batch: Batch) -> dict[str, _OutputSource]:
        """Return the source of each model's outputs; time the models that this process can hold."""
        sources, timed = {}, self._timed_batch()
        for each in self._models:
            loaded = each.opened(batch) if each.fits_locally else None
            if loaded is not None:
                self._latency[each.name] = _latencies(loaded, timed)
            sources[each.name] = each.source(loaded)
        return sources

    def _timed_batch(self) -> Batch:
        """Return as many rows as a step has, or all."""
        return self._read(self._rows[: self._job.batch_size])

    def _batches(self) -> Iterator[Batch]:
        widest = max(each.outputs_per_row for each in self._models)
        size = int(max(1, min(_ROWS, _CHUNK // widest)))
        for start in range(0, len(self._rows), size):
            yield self._read(self._rows[start : start + size])

    def _read(self, samples: _Array) -> Batch:
        """Return rows with the columns that any model needs, transformed as in `tw.predict`."""
        counters = Counters(seed=self._job.training.seed, epoch=0)
        columns = self._data.transform(self._reader.gather(samples), samples, counters, self._names)
        return Batch(columns=columns, weights=np.ones(len(samples)), samples=samples)

    def _targets(self, batch: Batch) -> list[_Array]:
        wanted = self._job.target_names
        columns = self._job.data.collation(batch) if wanted else {}
        return [np.asarray(columns[name]) for name in wanted]

    def _metrics(self, name: str, batch: Batch, said: _Array) -> Terms | None:
        """Count the job's loss and metrics of a model's outputs. Return the loss, if there is one."""
        if not self._job.target_names or self._output_names.get(name, "") is None:
            return None
        if name not in self._output_names:
            self._output_names[name] = self._output_name(name, batch, said)
            return self._metrics(name, batch, said)
        form = self._output_names[name]
        outputs = {form: said} if form else said
        loss = self._terms_of(batch, outputs, "")
        found = {_LOSS: loss}
        for metric in self._spec.metrics:
            if (name, metric) not in self._dropped:
                try:
                    found[metric] = self._terms_of(batch, outputs, metric)
                except (JobError, UserCodeError) as error:
                    self._dropped.add((name, metric))
                    self.notes.append(f"{metric} of {name} cannot be computed: {error.what}")
        totals = {key: (float((terms.values * terms.weights).sum()), float(terms.weights.sum()))
                  for key, terms in found.items()}  # fmt: skip
        self._sums[name] = self._sums.get(name, MetricSums()) + MetricSums(totals=totals)
        return loss

    def _output_name(self, name: str, batch: Batch, said: _Array) -> str | None:
        """Return the name under which the job's functions take a model's output; empty for the output itself."""
        problem = ""
        for form in ("", self._loss.soft.output or LOGITS):
            try:
                self._terms_of(batch, {form: said} if form else said, "")
            except (JobError, UserCodeError) as error:
                problem = problem or error.what
            else:
                return form
        self.notes.append(f"loss and metrics of {name} cannot be computed from its output alone: {problem}")
        return None

    def _terms_of(self, batch: Batch, outputs: Any, only: str) -> Terms:
        marking = load_module(f"trainwright.strategies.{self._framework}.distillation.student_models")
        terms: Terms = marking.marked(self._spec, batch, outputs, only)
        return terms

    def _count(self, units: Mapping[str, LabelledOutputs]) -> None:
        values = self._kind == "regression"
        for name, each in units.items():
            self._own_scores.setdefault(name, RegressionMetrics() if values else ClassificationMetrics()).add(each)
            if not values and each.labels is not None:
                self._add_soft_targets(name, each)
        for student in (each.name for each in self._models if each.student):
            for teacher in self._teachers_of(student, units):
                agreement = self._agreement.setdefault((student, teacher), AgreementMetrics(values=values))
                agreement.add(units[student], units[teacher])

    def _add_soft_targets(self, name: str, units: LabelledOutputs) -> None:
        assert units.labels is not None, "asked before"
        logs, labels, weights = units.chances, units.labels, units.weights
        if self._kind == "multi_label":  # of each label that a sample has, all labels of this sample
            count = units.columns
            own, present = np.nonzero(labels.reshape(-1, count))
            logs, labels, weights = (
                logs[:, 1].reshape(-1, count)[own],
                present,
                weights.reshape(-1, count)[own, present],
            )
        self._soft_targets.setdefault(name, SoftTargetMatrix(logs.shape[-1], labels)).add(logs, labels, weights)

    def _teachers_of(self, student: str, units: Mapping[str, LabelledOutputs]) -> list[str]:
        taught = self._loss.taught_by(student) if student in self._loss.learners else ()
        everyone = [ALL_TEACHERS] if ALL_TEACHERS in units and taught else []
        return [name for name in (*taught, *everyone) if name in units]

    def _shares(self) -> dict[str, float]:
        soft, names = self._loss.soft, tuple(self._teachers)
        shares = soft.share(names) if soft.combine == "fixed" else [1 / len(names)] * len(names)
        return dict(zip(names, shares, strict=True))

    def _sizes(self, name: str) -> dict[str, Any]:
        found = [each.profile for each in self._models if each.name == name]
        return {"parameters": found[0].parameters, "size_bytes": found[0].parameter_bytes} if found else {}

    def _paired(self, marks: list[ModelScore]) -> list[StudentTeacherScore]:
        main = {mark.name: mark.scores.get(MAIN_SCORE.get(self._kind, "top-1"), float("nan")) for mark in marks}
        return [
            StudentTeacherScore(
                student=one, teacher=other, scores=agreement.scores(), kept=retained_share(main[one], main[other])
            )
            for (one, other), agreement in self._agreement.items()
        ]


_OutputSource = Callable[[Batch], _Array]
"""source(batch) -> (rows, ...) a model's outputs for the batch's rows."""

_LOCAL_BYTES = 2 << 30  # of parameters, most in a process that does other work too
_WARM, _CALLS, _TIMED_S = 2, 30, 0.3


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel:
    """A student or teacher; both run as teachers.

    Attributes:
        teacher: the model, as a teacher.
        runner: the teacher with its weights.
        profile: cost of its model.
        student: whether it is a student.
        stored: its outputs for all rows, if they are stored.
    """

    teacher: Teacher
    runner: TeacherRunner
    profile: ModelProfile
    student: bool
    stored: Dataset | None = None

    @classmethod
    def of(cls, teacher: Teacher, data: Dataset, *, build: Callable[[], Any] | None = None) -> EvaluatedModel:
        """Return a teacher, or a student whose own model `build` makes. Raises as `load_teacher` and `profile_job`."""
        runner = load_teacher(teacher)
        subject = teacher_inference_model(runner, data)
        job = subject.job.on_one_device(model=build or subject.architecture)
        profile = profile_job(job, data, data.index())
        return cls(teacher=teacher, runner=runner, profile=profile, student=build is not None)

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.teacher.name

    @property
    def fits_locally(self) -> bool:
        """Whether this process may hold the model."""
        return self.profile.parameter_bytes <= _LOCAL_BYTES

    @property
    def outputs_per_row(self) -> float:
        """Numbers of a row of its outputs; 1 where that is not known."""
        return max((layer.output_numbers for layer in self.profile.layers[-1:]), default=1.0) or 1.0

    def source(self, loaded: LoadedTeacher | None) -> _OutputSource:
        """Return the source of its outputs: the stored ones, or its model in this process."""
        column = self.teacher.columns[0]
        if self.stored is not None:
            data = self.stored
            reader, counters = data.reader(data.index(), None), Counters(seed=0, epoch=0)
            return lambda batch: np.asarray(
                data.transform(reader.gather(batch.samples), batch.samples, counters, None)[column]
            )
        assert loaded is not None, "nothing is stored"
        lesson = self.teacher.lesson
        return lambda batch: np.concatenate([part[column] for part in loaded.told(batch, lesson)])

    def opened(self, batch: Batch) -> LoadedTeacher:
        """Return its model in this process. Raises as `TeacherRunner.teach`."""
        return self.runner.opened({name: column[:1] for name, column in batch.columns.items()})


def _latencies(loaded: LoadedTeacher, batch: Batch) -> dict[str, float]:
    """Return median seconds of a call with one row of a batch, and with all rows, from arrays to arrays."""
    found = {}
    for rows in dict.fromkeys((1, batch.rows)):
        columns = {name: column[:rows] for name, column in batch.columns.items()}
        part = Batch(columns=columns, weights=batch.weights[:rows], samples=batch.samples[:rows])
        found[str(rows)] = _seconds(lambda part=part: loaded.outputs(part))  # type: ignore[misc]
    return found


def _latency_device() -> str:
    """Return the device on which latencies are measured."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    cores = os.cpu_count() or 1
    return f"the CPU of this machine, {formatting.count(int(threads) if threads.isdecimal() else cores, 'core')}"


def _seconds(call: Callable[[], object]) -> float:
    took: list[float] = []
    while len(took) < _WARM + 3 or (len(took) < _WARM + _CALLS and sum(took[_WARM:]) < _TIMED_S):
        began_s = time.perf_counter()
        call()
        took.append(time.perf_counter() - began_s)
    return median(took[_WARM:])
