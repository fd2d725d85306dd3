"""Evaluate students beside their teachers: metrics, agreement, calibration, sizes and latencies."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from trainwright.distillation.target_cache import stored_targets
from trainwright.distillation.target_encoding import log_sum
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
LOCAL_FLOPS = 4e11  # up to here, this process is faster than the start of a pool
_NUMBERS = 2e9  # most output numbers of a model; rows beyond are left out
_ROWS, _CHUNK = 256, 1 << 22  # rows and numbers at once
_LOCAL_BYTES = 2 << 30  # of parameters, most in a process that does other work too
_WARM, _CALLS, _TIMED_S = 2, 30, 0.3  # calls before timing, timed calls, and their seconds, at most
_BINS = 15  # of confidence, as in Guo et al. (2017)
_SHOWN = 20  # classes in a picture
_WHOLE = 256  # most classes for which all pairs of classes are counted


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
    of_rows = job.evaluate.index().rows
    rows = _evaluated_rows(models, of_rows)
    asked, notes = [], []
    for each in models:
        if _store_outputs(each, distillation, len(rows), of_rows, folder, verbose):
            asked.append(each)
        else:
            size = formatting.size(each.profile.parameter_bytes)
            notes.append(f"{each.name} is not evaluated: its {size} of parameters are too large for this process")
    evaluation = StudentEvaluation(job, loss, asked, rows)
    evaluation.run()
    return replace(
        evaluation.scorecard(), step=step, of_rows=of_rows, notes=[*notes, *evaluation.notes],
        seconds=time.monotonic() - began_s,
    )  # fmt: skip


def _evaluated_rows(models: Sequence[EvaluatedModel], rows: int) -> _Array:
    """Return the numbers of all rows; of evenly spaced ones if all rows have too many outputs."""
    most = max(1, int(_NUMBERS // max(each.outputs_per_row for each in models)))
    return np.arange(rows) if rows <= most else np.unique(np.linspace(0, rows - 1, most).astype(np.int64))


def _store_outputs(
    model: EvaluatedModel, distillation: Distillation, rows: int, of_rows: int, folder: str, verbose: bool
) -> bool:
    """Give the model stored outputs if it needs them. Return False if it is too large for this process."""
    kept = not model.student and distillation.way == "offline"
    small = model.fits_locally and model.profile.flops * rows <= LOCAL_FLOPS
    if kept or (rows == of_rows and not small):
        to, keep = (folder, "fp32") if model.student else (distillation.folder, distillation.keep)
        data = distillation.student.evaluate
        model.stored = stored_targets(model.runner.teacher, data, folder=to, keep=keep, verbose=verbose)
        return True
    return model.fits_locally


@dataclass(kw_only=True, eq=False)
class EvaluatedModel:
    """A student or a teacher, and what is counted of it. Students run as teachers do."""

    runner: TeacherRunner  # the model, as a teacher, with its weights
    profile: ModelProfile  # cost of the model
    student: bool  # whether it is a student
    stored: Dataset | None = None  # its outputs for all rows, if they are stored
    # (batch) -> its outputs for the batch's rows, (rows, ...); set by `open`
    source: Callable[[Batch], _Array] = field(init=False)
    # median seconds of a call, by number of rows; empty if it does not fit this process
    latency_s: Mapping[str, float] = field(default_factory=dict)
    output: str | None = None  # name of its output for the job's functions: empty for a bare output, None if none fits
    sums: MetricSums = field(default_factory=MetricSums)  # of the job's loss and metrics
    dropped: set[str] = field(default_factory=set)  # metrics that cannot be computed

    @classmethod
    def of(cls, teacher: Teacher, data: Dataset, *, build: Callable[[], Any] | None = None) -> EvaluatedModel:
        """Return a teacher; or a student, if `build` makes its model. Raises as `load_teacher` and `profile_job`."""
        runner = load_teacher(teacher)
        subject = teacher_inference_model(runner, data)
        job = subject.job.on_one_device(model=build or subject.architecture)
        return cls(runner=runner, profile=profile_job(job, data, data.index()), student=build is not None)

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.runner.name

    @property
    def fits_locally(self) -> bool:
        """Whether this process may hold the model."""
        return self.profile.parameter_bytes <= _LOCAL_BYTES

    @property
    def outputs_per_row(self) -> float:
        """The numbers in a row of its outputs; 1 if unknown."""
        return max((layer.output_numbers for layer in self.profile.layers[-1:]), default=1.0) or 1.0

    def open(self, timed: Batch) -> None:
        """Load the model if this process can hold it, time it on a batch, and set its source.

        Raises as `TeacherRunner.teach`.
        """
        (column, *_), lesson, data = self.runner.columns, self.runner.teacher.lesson, self.stored
        loaded = None
        if self.fits_locally:
            loaded = self.runner.opened({name: column[:1] for name, column in timed.columns.items()})
            self.latency_s = _latencies(loaded, timed)
        if data is not None:
            reader, counters = data.reader(data.index(), None), Counters(seed=0, epoch=0)
            self.source = lambda batch: np.asarray(
                data.transform(reader.gather(batch.samples), batch.samples, counters, None)[column]
            )
        elif loaded is not None:
            self.source = lambda batch: np.concatenate([part[column] for part in loaded.told(batch, lesson)])


class StudentEvaluation:
    """One pass over the evaluation set.

    Attributes:
        notes: metrics that could not be computed, and why.
    """

    def __init__(self, job: Job, loss: DistillationLoss, models: list[EvaluatedModel], rows: _Array) -> None:
        self._job, self._loss, self._models, self._rows = job, loss, models, rows
        wanted = [job.columns, *(each.runner.teacher.input_columns or None for each in models)]
        names = None if None in wanted else tuple(dict.fromkeys(name for some in wanted for name in some or ()))
        self._data, self._names = job.evaluate, names
        self._reader = self._data.reader(self._data.index(), names)
        self._kind, self._spec = loss.soft.kind, job.model_spec(1)
        self._framework = next(each.profile.framework for each in models if each.student)
        self._teachers = [each.name for each in models if not each.student]
        self._own_scores: dict[str, ClassificationMetrics | RegressionMetrics] = {}
        self._agreement: dict[tuple[str, str], AgreementMetrics] = {}
        self._soft_targets: dict[str, SoftTargetMatrix] = {}
        self._tokens = 1
        self.notes: list[str] = []

    def run(self) -> None:
        """Compute all outputs and count them. Raises TrainwrightError."""
        timed = self._read(self._rows[: self._job.batch_size])  # as many rows as a step has, or all
        for each in self._models:
            each.open(timed)
        widest = max(each.outputs_per_row for each in self._models)
        size = int(max(1, min(_ROWS, _CHUNK // widest)))
        for start in range(0, len(self._rows), size):
            batch = self._read(self._rows[start : start + size])
            all_outputs = {}
            for each in self._models:
                all_outputs[each.name] = outputs = each.source(batch)
                each.output = each.output if start else self._output_name(each, batch, outputs)
            loss_terms = [self._count_metrics(each, batch, all_outputs[each.name]) for each in self._models]
            loss = next((terms for terms in loss_terms if terms is not None), None)
            example = next(iter(all_outputs.values()))
            self._tokens = example.shape[1] if self._kind == "language_model" else 1
            labels, weights, tokens = labels_of(self._kind, example, self._targets(batch), loss)
            units = {
                name: labelled_outputs(self._kind, each[:, :tokens], labels, weights)
                for name, each in all_outputs.items()
            }
            if len(self._teachers) > 1:
                teachers = {name: units[name] for name in self._teachers}
                units[ALL_TEACHERS] = ensemble_outputs(self._kind, teachers, self._shares())
            self._count(units)

    def scorecard(self) -> Scorecard:
        """Return the scorecard of the counted outputs."""
        first = next(iter(self._soft_targets.values()), None)
        marks = [self._score(name, scores) for name, scores in self._own_scores.items()]
        main = {mark.name: mark.scores.get(MAIN_SCORE.get(self._kind, "top-1"), math.nan) for mark in marks}
        return Scorecard(
            kind=self._kind, rows=len(self._rows), of_rows=len(self._rows), tokens=self._tokens, marks=marks,
            device=_latency_device(),
            units=next(iter(self._own_scores.values())).weight, classes=first.shown() if first else [],
            commonest=[float(each) for each in first.commonest()] if first else None,
            pairs=[
                StudentTeacherScore(
                    student=student, teacher=teacher, scores=agreement.scores(),
                    kept=retained_share(main[student], main[teacher]),
                )
                for (student, teacher), agreement in self._agreement.items()
            ],
        )  # fmt: skip

    def _score(self, name: str, scores: ClassificationMetrics | RegressionMetrics) -> ModelScore:
        """Return the scores of a model, or of all teachers together, which have no model of their own."""
        details: dict[str, Any] = {}
        if (model := next((each for each in self._models if each.name == name), None)) is not None:
            details = {
                "metrics": model.sums.means(), "latency_s": model.latency_s, "parameters": model.profile.parameters,
                "size_bytes": model.profile.parameter_bytes,
            }  # fmt: skip
        return ModelScore(
            name=name, student=name not in (*self._teachers, ALL_TEACHERS), scores=scores.scores(),
            reliability=scores.reliability(),
            soft=self._soft_targets[name].means() if name in self._soft_targets else [], **details,
        )  # fmt: skip

    def _read(self, samples: _Array) -> Batch:
        """Return rows with the columns that any model needs, transformed as in `tw.predict`."""
        counters = Counters(seed=self._job.training.seed, epoch=0)
        columns = self._data.transform(self._reader.gather(samples), samples, counters, self._names)
        return Batch(columns=columns, weights=np.ones(len(samples)), samples=samples)

    def _targets(self, batch: Batch) -> list[_Array]:
        names = self._job.target_names
        columns = self._job.data.collation(batch) if names else {}
        return [np.asarray(columns[name]) for name in names]

    def _output_name(self, model: EvaluatedModel, batch: Batch, output: _Array) -> str | None:
        """Return the name under which the job's functions take a model's output: empty for bare, None if none fits."""
        problem = ""
        for name in ("", self._loss.soft.output or LOGITS) if self._job.target_names else ():
            try:
                self._terms_of(batch, {name: output} if name else output, "")
            except (JobError, UserCodeError) as error:
                problem = problem or error.what
            else:
                return name
        if problem:
            self.notes.append(f"loss and metrics of {model.name} cannot be computed from its output alone: {problem}")
        return None

    def _count_metrics(self, model: EvaluatedModel, batch: Batch, output: _Array) -> Terms | None:
        """Count the job's loss and metrics of a model's outputs. Return the loss, if there is one."""
        if model.output is None:
            return None
        outputs = {model.output: output} if model.output else output
        terms_by_name = {_LOSS: self._terms_of(batch, outputs, "")}
        for metric in self._spec.metrics:
            if metric not in model.dropped:
                try:
                    terms_by_name[metric] = self._terms_of(batch, outputs, metric)
                except (JobError, UserCodeError) as error:
                    model.dropped.add(metric)
                    self.notes.append(f"{metric} of {model.name} cannot be computed: {error.what}")
        totals = {key: (float((terms.values * terms.weights).sum()), float(terms.weights.sum()))
                  for key, terms in terms_by_name.items()}  # fmt: skip
        model.sums += MetricSums(totals=totals)
        return terms_by_name[_LOSS]

    def _terms_of(self, batch: Batch, outputs: Any, only: str) -> Terms:
        backend = load_module(f"trainwright.strategies.{self._framework}.distillation.model_backend")
        terms: Terms = backend.marked(self._spec, batch, outputs, only)
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
        if self._kind == "multi_label":  # a row for each label of a sample, with all labels of this sample
            count = units.columns
            rows, present = np.nonzero(labels.reshape(-1, count))
            weights = weights.reshape(-1, count)[rows, present]
            logs, labels = logs[:, 1].reshape(-1, count)[rows], present
        self._soft_targets.setdefault(name, SoftTargetMatrix(logs.shape[-1], labels)).add(logs, labels, weights)

    def _teachers_of(self, student: str, units: Mapping[str, LabelledOutputs]) -> list[str]:
        taught = self._loss.taught_by(student) if student in self._loss.learners else ()
        everyone = [ALL_TEACHERS] if ALL_TEACHERS in units and taught else []
        return [name for name in (*taught, *everyone) if name in units]

    def _shares(self) -> dict[str, float]:
        soft, names = self._loss.soft, tuple(self._teachers)
        shares = soft.share(names) if soft.combine == "fixed" else [1 / len(names)] * len(names)
        return dict(zip(names, shares, strict=True))


def _latencies(loaded: LoadedTeacher, batch: Batch) -> dict[str, float]:
    """Return median seconds of a call with one row of a batch, and with all rows, from arrays to arrays."""
    medians = {}
    for rows in dict.fromkeys((1, batch.rows)):
        columns = {name: column[:rows] for name, column in batch.columns.items()}
        part = Batch(columns=columns, weights=batch.weights[:rows], samples=batch.samples[:rows])
        medians[str(rows)] = _seconds(lambda part=part: loaded.outputs(part))  # type: ignore[misc]
    return medians


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


# --- Accuracy, calibration and agreement of outputs, from sums over rows ----------------------------------------------

# A unit is what is right or wrong by itself: a sample, in language models a token, in multi-label a label of a sample.


@dataclass(frozen=True, kw_only=True)
class LabelledOutputs:
    """Outputs of one model for some units, with their labels."""

    chances: _Array  # (units, classes) log probabilities; in regression (units, numbers) values
    labels: _Array | None  # (units,) classes, in regression (units, numbers); None without labels
    weights: _Array  # (units,)
    columns: int = 1  # units of a row: labels in multi-label, tokens in language models


def labelled_outputs(kind: str, outputs: _Array, labels: _Array | None, weights: _Array) -> LabelledOutputs:
    """Return outputs as units.

    Args:
        kind: of `SoftLoss`.
        outputs: (rows, ...) logits or values.
        labels: of the shape of `outputs` without the axis of classes; None without labels.
        weights: (rows, ...), of rows or of units.
    """
    outputs = np.asarray(outputs, dtype=np.float64)
    if kind == "regression":
        flat = outputs.reshape(len(outputs), -1)
        values = None if labels is None else labels.reshape(flat.shape).astype(np.float64)
        return LabelledOutputs(chances=flat, labels=values, weights=_spread(weights, (len(outputs),)))
    per_label = kind == "multi_label"
    logits = np.stack((np.zeros_like(outputs), outputs), axis=-1) if per_label else outputs
    class_ids = None if labels is None else labels.astype(np.int64).reshape(-1)
    unit_weights = _spread(weights, logits.shape[:-1]).reshape(-1)
    chances = log_softmax(logits).reshape(-1, logits.shape[-1])
    columns = len(chances) // max(len(outputs), 1)
    return LabelledOutputs(chances=chances, labels=class_ids, weights=unit_weights, columns=columns)


def labels_of(
    kind: str, outputs: _Array, targets: Sequence[_Array], loss: Terms | None
) -> tuple[_Array | None, _Array, int | None]:
    """Return labels, weights and tokens of some rows.

    Args:
        kind: of `SoftLoss`.
        outputs: (rows, ...) outputs of a model.
        targets: the job's target columns, after collation.
        loss: the job's loss of the outputs. Its weights count, such as a mask of tokens. A loss with one token less
            than the outputs is a loss of next tokens.

    Returns:
        Labels as `labelled_outputs` takes them, or None if no target is one; weights; how many tokens have a label,
        None for all.
    """
    weights = np.ones(len(outputs)) if loss is None else loss.weights
    if kind in ("regression", "multi_label"):
        fitting = (each for each in targets if each.size == outputs.size and each.dtype.kind in "fiub")
        target = next(fitting, None)
        labels = None if target is None else target.reshape(outputs.shape)
        return (labels > 0.5 if labels is not None and kind == "multi_label" else labels), weights, None
    *leading, classes = outputs.shape
    names = (each.reshape(leading) for each in targets if each.dtype.kind in "iub" and each.size == math.prod(leading))
    shares = (each.argmax(axis=-1) for each in targets if each.shape == outputs.shape)
    labels = next(iter((*names, *shares)), None)
    if labels is None:
        return None, np.ones(len(outputs)), None
    next_tokens = loss is not None and len(leading) == 2 and loss.values.shape == (leading[0], leading[1] - 1)
    if next_tokens:
        labels = labels[:, 1:]
    label_weights = _spread(weights, labels.shape) * ((labels >= 0) & (labels < classes))  # not an index to ignore
    return np.where(label_weights > 0, labels, 0), label_weights, labels.shape[1] if next_tokens else None


def log_softmax(logits: _Array) -> _Array:
    """Log-softmax along the last axis; minus infinity stays."""
    return np.asarray(logits - log_sum(logits)[..., None])


def ensemble_outputs(kind: str, outputs: Mapping[str, LabelledOutputs], shares: Mapping[str, float]) -> LabelledOutputs:
    """Return the outputs of several models as one: the mean of probabilities, or of values in regression.

    Args:
        kind: of `SoftLoss`.
        outputs: outputs of each model, by name.
        shares: of each model, by name; their sum is 1.
    """
    first, values = next(iter(outputs.values())), kind == "regression"
    parts = [(each.chances if values else np.exp(each.chances)) * shares[name] for name, each in outputs.items()]
    total: _Array = sum(parts[1:], parts[0])
    with np.errstate(divide="ignore"):
        return replace(first, chances=total if values else np.log(total))


class ClassificationMetrics:
    """Scores of one classifier."""

    def __init__(self) -> None:
        self.weight = self.correct = self.surprise = 0.0
        self._bins = np.zeros((3, _BINS))  # weight, confidence, right

    def add(self, units: LabelledOutputs) -> None:
        """Add some units."""
        labels, weights = units.labels, units.weights
        self.weight += float(weights.sum())
        if labels is None:
            return
        top = units.chances.argmax(axis=-1)
        sure = np.exp(np.take_along_axis(units.chances, top[:, None], -1)[:, 0])
        right = (top == labels) * weights
        self.correct += float(right.sum())
        self.surprise -= _dot(np.take_along_axis(units.chances, labels[:, None], -1)[:, 0], weights)
        places = np.minimum((sure * _BINS).astype(np.int64), _BINS - 1)
        for row, counted in enumerate((weights, sure * weights, right)):
            self._bins[row] += np.bincount(places, counted, _BINS)

    def scores(self) -> dict[str, float]:
        """Return top-1 accuracy, negative log-likelihood in nats, expected calibration error (Guo et al., 2017)."""
        error = np.abs(self._bins[1] - self._bins[2]).sum()
        sums = {"top-1": self.correct, "NLL": self.surprise, "ECE": float(error)}
        return {name: value / self.weight if self.weight else math.nan for name, value in sums.items()}

    def reliability(self) -> list[list[float]]:
        """Return mean confidence, accuracy and share of units of each bin that is not empty."""
        weight, sure, right = self._bins
        some = weight > 0
        rows = np.stack((sure[some] / weight[some], right[some] / weight[some], weight[some] / max(self.weight, 1e-12)))
        return [[float(number) for number in row] for row in rows.T]


class RegressionMetrics:
    """Scores of one regression model."""

    def __init__(self) -> None:
        self.weight = self.squares = 0.0
        self._sum: Any = 0.0
        self._square: Any = 0.0

    def add(self, units: LabelledOutputs) -> None:
        """Add some units."""
        if units.labels is None:
            return
        counted = units.weights[:, None]
        self.weight += float(units.weights.sum())
        self.squares += float((counted * (units.chances - units.labels) ** 2).sum())
        self._sum = self._sum + (counted * units.labels).sum(axis=0)
        self._square = self._square + (counted * units.labels**2).sum(axis=0)

    def scores(self) -> dict[str, float]:
        """Return the root mean squared error, and the share of the labels' variance that is explained."""
        if not self.weight:
            return {}
        numbers = np.size(self._sum)
        spread = float(np.sum(self._square - self._sum**2 / self.weight))
        explained = 1 - self.squares / spread if spread > 0 else math.nan
        return {"RMSE": math.sqrt(self.squares / self.weight / numbers), "R2": explained}

    def reliability(self) -> list[list[float]]:
        """Return nothing: values have no confidence."""
        return []


class AgreementMetrics:
    """Agreement of a student with a teacher."""

    def __init__(self, *, values: bool) -> None:
        self._values = values
        self.weight = self.agreed = self.apart = 0.0

    def add(self, student: LabelledOutputs, teacher: LabelledOutputs) -> None:
        """Add some units."""
        own, theirs, weights = student.chances, teacher.chances, student.weights
        self.weight += float(weights.sum())
        if self._values:
            self.apart += _dot(((own - theirs) ** 2).mean(axis=-1), weights)
            return
        self.agreed += float(weights[own.argmax(axis=-1) == theirs.argmax(axis=-1)].sum())
        chances = np.exp(theirs)
        with np.errstate(invalid="ignore"):
            self.apart += _dot(np.where(chances > 0, chances * (theirs - own), 0.0).sum(axis=-1), weights)

    def scores(self) -> dict[str, float]:
        """Return the share of equal predictions and KL(teacher || student) in nats; in regression the RMSE between."""
        weight = self.weight or math.nan
        if self._values:
            return {"RMSE between": math.sqrt(self.apart / weight)}
        return {"agreement": self.agreed / weight, "KL": self.apart / weight}


class SoftTargetMatrix:
    """Mean probabilities of a model for the units of each class.

    Args:
        classes: number of classes.
        labels: of the first units. Of very many classes, the most frequent ones among these labels are shown.
    """

    def __init__(self, classes: int, labels: _Array) -> None:
        common = np.bincount(labels.reshape(-1), minlength=classes).argsort(kind="stable")[::-1][:_SHOWN]
        self._kept = np.arange(classes) if classes <= _WHOLE else np.sort(common)
        self._place = np.full(classes, -1)
        self._place[self._kept] = np.arange(len(self._kept))
        self._sums = np.zeros((len(self._kept), len(self._kept)))
        self._counts = np.zeros(classes)

    def add(self, chances: _Array, labels: _Array, weights: _Array) -> None:
        """Count some units: (units, classes) log probabilities, (units,) labels and weights."""
        self._counts += np.bincount(labels, weights, len(self._counts))
        places = self._place[labels]
        some = (places >= 0) & (weights > 0)
        np.add.at(self._sums, places[some], np.exp(chances[some][:, self._kept]) * weights[some][:, None])

    def shown(self) -> list[int]:
        """Return the classes in the picture: the most frequent, at most `_SHOWN`."""
        counts = self._counts[self._kept]
        most = np.sort(counts.argsort(kind="stable")[::-1][:_SHOWN])
        return [int(number) for number in self._kept[most[counts[most] > 0]]]

    def means(self) -> list[list[float]]:
        """Return the mean probabilities of the shown classes, for each of them as the true class."""
        shown = self.shown()
        places = self._place[shown]
        rows = self._sums[np.ix_(places, places)] / self._counts[shown][:, None]
        return [[float(value) for value in row] for row in rows]

    def commonest(self) -> tuple[int, float]:
        """Return the most frequent class and its share of units."""
        most = int(self._counts.argmax())
        return most, float(self._counts[most] / max(self._counts.sum(), 1e-12))


def _dot(values: _Array, weights: _Array) -> float:
    """Return the weighted sum; values of weight 0 do not count, even NaN."""
    return float(np.where(weights > 0, values * weights, 0.0).sum())


def _spread(weights: _Array, shape: tuple[int, ...]) -> _Array:
    """Return weights broadcast to a shape from their first axes."""
    weights = np.asarray(weights, dtype=np.float64)
    if weights.ndim > len(shape):
        weights = weights.mean(axis=tuple(range(len(shape), weights.ndim)))
    return np.broadcast_to(weights.reshape(*weights.shape, *(1 for _ in shape[weights.ndim :])), shape)
