"""Students beside their teachers: what each says of the evaluation set, and what that is worth."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.core import formatting
from trainwright.core.data import Batch, MetricSums, Terms
from trainwright.core.errors import JobError, UserCodeError
from trainwright.core.frameworks import load_module
from trainwright.core.job import Job
from trainwright.core.model_profile import ModelProfile
from trainwright.datasets.data_source import Rows
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.ops.row_transforms import Counters
from trainwright.distillation.distillation_job import teachers_with_layers
from trainwright.distillation.distillation_spec import STUDENT, Distillation, LoadedTeacher, Teacher, TeacherRunner
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
from trainwright.distillation.search_result import ModelCost
from trainwright.distillation.target_cache import stored_targets
from trainwright.planning.profiler import profile_job
from trainwright.reporting.scorecard import MAIN_SCORE, ModelScore, Scorecard, StudentTeacherScore, retained_share
from trainwright.strategies.distillation.distillation_loss import DistillationLoss
from trainwright.strategies.distillation.teacher_outputs import LOGITS

_Array = npt.NDArray[Any]

ALL_TEACHERS, _LOSS = "all teachers", "loss"
LOCAL_FLOPS = 4e11  # that this process computes in less time than a pool takes to start
_NUMBERS = 2e9  # of each model's outputs that are looked at; of more, rows are left out
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
    """Ask students and teachers about the evaluation set, and time them.

    Teachers are asked as `way="offline"` has them, where their answers are kept. Small models answer in this process,
    others through a pool, as `tw.predict`.

    Args:
        distillation: what was asked for.
        loss: of the students: who teaches whom.
        students: the job of each alone, with its checkpoints.
        folder: where what students say is kept, should a pool have to compute it.
        step: that the students are at.
        verbose: show Ray's own output.

    Raises:
        TrainwrightError: there is no evaluation set with rows by number; as `stored_targets` and `Teacher.load`.
    """
    began_s, job = time.monotonic(), distillation.student
    if job.evaluate is None:
        raise JobError(["evaluate= is missing: students are judged on an evaluation set"])
    job.evaluate.need_rows_by_number("judging students")
    builders = distillation.builders
    teachers = teachers_with_layers(distillation) if distillation.way == "offline" else distillation.teachers
    speakers = [
        EvaluatedModel.of(Teacher(name=name, job=each, output=loss.soft.output), job.evaluate, build=builders[name])
        for name, each in students.items()
    ]
    speakers += [EvaluatedModel.of(each, job.evaluate) for each in teachers]
    rows, of_rows = _looked_at(speakers, job.evaluate.index().rows)
    asked, notes = [], []
    for each in speakers:
        if (ready := _ready(each, distillation, len(rows), of_rows, folder, verbose)) is None:
            size = formatting.size(each.profile.parameter_bytes)
            notes.append(f"{each.name} is not judged: its {size} of parameters are too large for this process")
        else:
            asked.append(ready)
    hearing = StudentEvaluation(job, loss, asked, rows)
    hearing.listen()
    return replace(
        hearing.verdict(), step=step, of_rows=of_rows, notes=[*notes, *hearing.notes],
        seconds=time.monotonic() - began_s,
    )  # fmt: skip


def _looked_at(speakers: list[EvaluatedModel], rows: int) -> tuple[_Array, int]:
    """Row numbers, all or evenly spaced where the outputs would be too many, and how many rows there are."""
    most = max(1, int(_NUMBERS // max(each.numbers for each in speakers)))
    every = np.arange(rows) if rows <= most else np.unique(np.linspace(0, rows - 1, most).astype(np.int64))
    return every, rows


def _ready(
    speaker: EvaluatedModel, wish: Distillation, rows: int, of_rows: int, folder: str, verbose: bool
) -> EvaluatedModel | None:
    """With its answers, where they are kept or a pool has to give them; None where nobody can ask it."""
    kept = not speaker.student and wish.way == "offline"
    small = speaker.fits_here and speaker.profile.flops * rows <= LOCAL_FLOPS
    if kept or (rows == of_rows and not small):
        to, keep = (folder, "fp32") if speaker.student else (wish.folder, wish.keep)
        told = stored_targets(speaker.teacher, wish.student.evaluate, folder=to, keep=keep, verbose=verbose)
        return replace(speaker, stored=told)
    return speaker if speaker.fits_here else None


class StudentEvaluation:
    """One look at the rows.

    Args:
        job: of the students, as it would be trained without teachers.
        loss: who teaches whom.
        speakers: students and teachers.
        rows: numbers of those that are looked at.

    Attributes:
        notes: what could not be said, and why.
    """

    def __init__(self, job: Job, loss: DistillationLoss, speakers: list[EvaluatedModel], rows: _Array) -> None:
        self._job, self._loss, self._speakers, self._rows = job, loss, speakers, rows
        wanted = [job.columns, *(each.teacher.input_columns or None for each in speakers)]
        names = None if None in wanted else tuple(dict.fromkeys(name for some in wanted for name in some or ()))
        self._data, self._names = job.evaluate, names
        self._reader = self._data.reader(self._data.index(), names)
        self._kind, self._spec = loss.soft.kind, job.model_spec(1)
        self._framework = next(each.profile.framework for each in speakers if each.student)
        self._teachers = [each.name for each in speakers if not each.student]
        self._tallies: dict[str, ClassificationMetrics | RegressionMetrics] = {}
        self._accords: dict[tuple[str, str], AgreementMetrics] = {}
        self._pictures: dict[str, SoftTargetMatrix] = {}
        self._sums: dict[str, MetricSums] = {}
        self._forms: dict[
            str, str | None
        ] = {}  # a speaker's output as the job's functions take it; None for not at all
        self._dropped: set[tuple[str, str]] = set()
        self._latency: dict[str, dict[str, float]] = {}
        self._tokens = 1
        self.notes: list[str] = []

    def listen(self) -> None:
        """Go through the rows once. Raises TrainwrightError."""
        voices: dict[str, _OutputSource] = {}
        for batch in self._batches():
            voices = voices or self._voices(batch)
            said = {name: voice(batch) for name, voice in voices.items()}
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

    def verdict(self) -> Scorecard:
        """What was counted."""
        pictures = {name: picture.means() for name, picture in self._pictures.items()}
        first = next(iter(self._pictures.values()), None)
        marks = [
            ModelScore(
                name=name, student=name not in (*self._teachers, ALL_TEACHERS), scores=tally.scores(),
                metrics=self._sums.get(name, MetricSums()).means(), reliability=tally.reliability(),
                latency_s=self._latency.get(name, {}), soft=pictures.get(name, []), **self._sizes(name),
            )
            for name, tally in self._tallies.items()
        ]  # fmt: skip
        return Scorecard(
            kind=self._kind, rows=len(self._rows), of_rows=len(self._rows), tokens=self._tokens, marks=marks,
            device=latency_device(),
            units=next(iter(self._tallies.values())).weight, classes=first.shown() if first else [],
            commonest=[float(each) for each in first.commonest()] if first else None, pairs=self._paired(marks),
        )  # fmt: skip

    def _voices(self, batch: Batch) -> dict[str, _OutputSource]:
        """Of all speakers; those that this process can hold are timed with as many rows as a batch has, or a step."""
        voices, timed = {}, self._timed_batch()
        for each in self._speakers:
            standing = each.opened(batch) if each.fits_here else None
            if standing is not None:
                self._latency[each.name] = _latencies(standing, timed)
            voices[each.name] = each.voice(standing)
        return voices

    def _timed_batch(self) -> Batch:
        """As many rows as a step takes, where there are as many."""
        return self._read(self._rows[: self._job.batch_size])

    def _batches(self) -> Iterator[Batch]:
        widest = max(each.numbers for each in self._speakers)
        size = int(max(1, min(_ROWS, _CHUNK // widest)))
        for start in range(0, len(self._rows), size):
            yield self._read(self._rows[start : start + size])

    def _read(self, samples: _Array) -> Batch:
        """Rows with all columns that somebody wants, transformed as `tw.predict` does."""
        counters = Counters(seed=self._job.seed, epoch=0)
        columns = self._data.transform(self._reader.gather(samples), samples, counters, self._names)
        return Batch(columns=columns, weights=np.ones(len(samples)), samples=samples)

    def _targets(self, batch: Batch) -> list[_Array]:
        wanted = self._job.wanted_targets
        columns = self._job.collation(batch) if wanted else {}
        return [np.asarray(columns[name]) for name in wanted]

    def _metrics(self, name: str, batch: Batch, said: _Array) -> Terms | None:
        """Count the job's loss and metrics of what somebody says; the loss, where it has one."""
        if not self._job.wanted_targets or self._forms.get(name, "") is None:
            return None
        if name not in self._forms:
            self._forms[name] = self._form(name, batch, said)
            return self._metrics(name, batch, said)
        form = self._forms[name]
        outputs = {form: said} if form else said
        loss = self._marked(batch, outputs, "")
        found = {_LOSS: loss}
        for metric in self._spec.metrics:
            if (name, metric) not in self._dropped:
                try:
                    found[metric] = self._marked(batch, outputs, metric)
                except (JobError, UserCodeError) as error:
                    self._dropped.add((name, metric))
                    self.notes.append(f"{metric} is not told of {name}: {error.what}")
        totals = {key: (float((terms.values * terms.weights).sum()), float(terms.weights.sum()))
                  for key, terms in found.items()}  # fmt: skip
        self._sums[name] = self._sums.get(name, MetricSums()) + MetricSums(totals=totals)
        return loss

    def _form(self, name: str, batch: Batch, said: _Array) -> str | None:
        """How the job's functions take what somebody says: bare, or by the output's name."""
        problem = ""
        for form in ("", self._loss.soft.output or LOGITS):
            try:
                self._marked(batch, {form: said} if form else said, "")
            except (JobError, UserCodeError) as error:
                problem = problem or error.what
            else:
                return form
        self.notes.append(f"loss and metrics are not told of {name}, whose output alone does not give them: {problem}")
        return None

    def _marked(self, batch: Batch, outputs: Any, only: str) -> Terms:
        marking = load_module(f"trainwright.strategies.{self._framework}.distillation.student_models")
        terms: Terms = marking.marked(self._spec, batch, outputs, only)
        return terms

    def _count(self, units: Mapping[str, LabelledOutputs]) -> None:
        values = self._kind == "regression"
        for name, each in units.items():
            self._tallies.setdefault(name, RegressionMetrics() if values else ClassificationMetrics()).add(each)
            if not values and each.labels is not None:
                self._draw(name, each)
        for student in (each.name for each in self._speakers if each.student):
            for teacher in self._teachers_of(student, units):
                accord = self._accords.setdefault((student, teacher), AgreementMetrics(values=values))
                accord.add(units[student], units[teacher])

    def _draw(self, name: str, units: LabelledOutputs) -> None:
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
        self._pictures.setdefault(name, SoftTargetMatrix(logs.shape[-1], labels)).add(logs, labels, weights)

    def _teachers_of(self, student: str, units: Mapping[str, LabelledOutputs]) -> list[str]:
        taught = self._loss.taught_by(student) if student in self._loss.learners else ()
        everyone = [ALL_TEACHERS] if ALL_TEACHERS in units and taught else []
        return [name for name in (*taught, *everyone) if name in units]

    def _shares(self) -> dict[str, float]:
        soft, names = self._loss.soft, tuple(self._teachers)
        shares = soft.share(names) if soft.combine == "fixed" else [1 / len(names)] * len(names)
        return dict(zip(names, shares, strict=True))

    def _sizes(self, name: str) -> dict[str, Any]:
        found = [each.profile for each in self._speakers if each.name == name]
        return {"parameters": found[0].parameters, "size_bytes": found[0].parameter_bytes} if found else {}

    def _paired(self, marks: list[ModelScore]) -> list[StudentTeacherScore]:
        main = {mark.name: mark.scores.get(MAIN_SCORE.get(self._kind, "top-1"), float("nan")) for mark in marks}
        return [
            StudentTeacherScore(
                student=one, teacher=other, scores=accord.scores(), kept=retained_share(main[one], main[other])
            )
            for (one, other), accord in self._accords.items()
        ]


# --- Students and teachers alike, asked about rows of data ------------------------------------------------------------


_QueryArray = npt.NDArray[Any]
_OutputSource = Callable[[Batch], _QueryArray]
"""voice(batch) -> (rows, ...) what somebody says of the batch's rows."""

_HERE_BYTES = 2 << 30  # of parameters that a process takes which has other things to do
_WARM, _CALLS, _TIMED_S = 2, 30, 0.3


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel:
    """A student or teacher, asked as a teacher is.

    Attributes:
        teacher: it.
        lecturer: it with its weights.
        profile: what its model costs, alone.
        student: whether it is one.
        stored: what it says of all rows, where that is computed.
    """

    teacher: Teacher
    lecturer: TeacherRunner
    profile: ModelProfile
    student: bool
    stored: Dataset | None = None

    @classmethod
    def of(cls, teacher: Teacher, data: Dataset, *, build: Callable[[], Any] | None = None) -> EvaluatedModel:
        """A teacher, or a student whose own model `build` makes. Raises as `Teacher.load` and `profile_job`."""
        lecturer = teacher.load()
        subject = teacher.bound(data, lecturer)
        job = subject.job.alone(model=build or subject.outline)
        profile = profile_job(job, data, data.index())
        return cls(teacher=teacher, lecturer=lecturer, profile=profile, student=build is not None)

    @property
    def name(self) -> str:
        """Of it."""
        return self.teacher.name

    @property
    def fits_here(self) -> bool:
        """Whether this process may hold it."""
        return self.profile.parameter_bytes <= _HERE_BYTES

    @property
    def numbers(self) -> float:
        """Of a row of its outputs; 1 where that is not known."""
        return max((layer.output_numbers for layer in self.profile.layers[-1:]), default=1.0) or 1.0

    def voice(self, standing: LoadedTeacher | None) -> _OutputSource:
        """What it says: what is stored, or what its model gives that is open here."""
        column = self.teacher.columns[0]
        if self.stored is not None:
            data = self.stored
            reader, counters = data.reader(data.index(), None), Counters(seed=0, epoch=0)
            return lambda batch: np.asarray(
                data.transform(reader.gather(batch.samples), batch.samples, counters, None)[column]
            )
        assert standing is not None, "nothing is stored"
        lesson = self.teacher.lesson
        return lambda batch: np.concatenate([part[column] for part in standing.told(batch, lesson)])

    def opened(self, batch: Batch) -> LoadedTeacher:
        """Its model in this process. Raises as `Lecturer.teach`."""
        return self.lecturer.opened({name: column[:1] for name, column in batch.columns.items()})


def _latencies(standing: LoadedTeacher, batch: Batch) -> dict[str, float]:
    """Median seconds of a call with one row of a batch, and with all, from arrays to arrays."""
    found = {}
    for rows in dict.fromkeys((1, batch.rows)):
        columns = {name: column[:rows] for name, column in batch.columns.items()}
        part = Batch(columns=columns, weights=batch.weights[:rows], samples=batch.samples[:rows])
        found[str(rows)] = _seconds(lambda part=part: standing.outputs(part))  # type: ignore[misc]
    return found


def latency_device() -> str:
    """What latencies are measured on: `CPU, 2 of 2 cores`."""
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


# --- What a student and its teachers cost beside each other -----------------------------------------------------------


def model_costs(student: Job, teachers: Iterable[Teacher]) -> tuple[ModelCost, tuple[ModelCost, ...]]:
    """Of a student that a run trained, and of its teachers, asked for rows of the student's evaluation set."""
    data = student.evaluate
    samples = np.arange(min(student.batch_size, data.index().rows))
    own = Teacher(name=STUDENT, job=student)
    return _footprint(own, data, samples), tuple(_footprint(teacher, data, samples) for teacher in teachers)


def _footprint(teacher: Teacher, data: Dataset, samples: Rows) -> ModelCost:
    """Without latencies where this process cannot hold it."""
    speaker = EvaluatedModel.of(teacher, data)
    timed: dict[int, float] = {}
    if speaker.fits_here:
        columns = data.read(data.index(), samples, teacher.input_columns or None)
        batch = Batch(columns=columns, weights=np.ones(len(samples)), samples=samples)
        timed = {int(rows): seconds for rows, seconds in _latencies(speaker.opened(batch), batch).items()}
    profile = speaker.profile
    return ModelCost(
        name=teacher.name, parameters=profile.parameters, size_bytes=profile.parameter_bytes, latency_s=timed
    )  # fmt: skip
