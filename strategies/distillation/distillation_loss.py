"""Loss and metrics of students with teachers, as functions of a job, for all frameworks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainwright.core.data import Terms
from trainwright.core.errors import JobError, nearest
from trainwright.core.frameworks import load_module
from trainwright.core.loss_api import (
    TEACHER_WEIGHTS_OUTPUT,
    InlineTeacher,
    bridge_output,
    layer_output,
    name_problems,
    teacher_column,
)
from trainwright.core.metric_states import is_stateful
from trainwright.strategies.distillation.layer_match import (
    Shape,
    layer_distance,
    output_mismatch,
    shape_text,
    shapes_match,
)

if TYPE_CHECKING:
    from trainwright.core.soft_loss import Match, SoftLoss


@dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    """A job's `loss=`: the loss of one student, or the sum over several students, each as if it were alone.

    The losses of several students are independent terms of one sum. Only functions of the whole gradient, such as
    `clip_norm`, couple them, and random numbers, which they draw one after the other. Weights of the hard loss are
    those of samples or tokens, and must not depend on the outputs.

    Raises:
        JobError: with all problems.
    """

    soft: SoftLoss  # how labels and teachers make the loss
    # the job's own loss of a student's outputs and the labels; None without labels
    hard: Callable[[Any, Any], Any] | None
    targets: tuple[str, ...]  # the job's target columns, in order
    labels: tuple[str, ...] = ()  # the targets that `hard` gets, in order
    # their names. The outputs of one student without matches and learned weights are not in a dict.
    students: tuple[str, ...] = ("student",)
    teachers: tuple[str, ...] = ()  # names of the teachers whose columns are among the targets
    # teachers that run in the step, by name; they have no columns
    inline: Mapping[str, InlineTeacher] = field(default_factory=dict)
    mutual: bool = False  # each student is a teacher of the others (Zhang et al., 2018, deep mutual learning)
    joint: tuple[str, ...] = ()  # students that are teachers of the others, and learn from the hard loss alone

    def __post_init__(self) -> None:
        problems = [*self._named(), *self._untaught(), *self._mismatched()]
        if problems:
            raise JobError(problems)

    @property
    def learners(self) -> tuple[str, ...]:
        """The students that learn from teachers."""
        return tuple(name for name in self.students if name not in self.joint)

    @property
    def wrapped(self) -> bool:
        """Whether the outputs are a dict of more than one student's outputs."""
        return len(self.students) > 1 or bool(self.soft.matches) or self.soft.combine == "learned"

    @property
    def told(self) -> tuple[str, ...]:
        """Names of the teachers that are not students."""
        return (*self.teachers, *self.inline)

    def taught_by(self, student: str) -> tuple[str, ...]:
        """Return the names of a student's teachers."""
        others = tuple(name for name in self.learners if name != student) if self.mutual else ()
        return (*self.told, *self.joint, *others)

    def teacher_of(self, match: Match) -> str:
        """Return the name of the teacher whose layer a match compares."""
        return match.of or (*self.told, *self.joint)[0]

    def said(self, outputs: Any, student: str) -> Any:
        """Return a student's own outputs."""
        return outputs[student] if self.wrapped else outputs

    def label(self, targets: Any) -> Any:
        """Return the targets of the hard loss and the metrics."""
        columns = self.columns(targets)
        chosen = tuple(columns[name] for name in self.labels)
        return chosen[0] if len(chosen) == 1 else chosen

    def columns(self, targets: Any) -> dict[str, Any]:
        """Return the target columns by name."""
        return dict(zip(self.targets, (targets,) if len(self.targets) == 1 else targets, strict=True))

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Return one loss for each sample or token, or Terms if the hard loss has weights.

        Raises:
            JobError: outputs of students and teachers do not match.
        """
        return _BatchLoss(self, outputs, self.columns(targets), tensor_ops_for(outputs)).terms()

    def _named(self) -> Iterable[str]:
        for what, names in (("a student", self.students), ("a teacher", self.told)):
            for name in names:
                yield from name_problems(what, name)
        for name in sorted({*self.students} & {*self.told}):
            yield f"{name!r} is the name of a student and of a teacher: rename one"
        for name in self.joint:
            if name not in self.students:
                yield f"joint= names {name!r}, which is not a student: {nearest(name, self.students)}"

    def _untaught(self) -> Iterable[str]:
        soft = self.soft
        teachers = {name: self.taught_by(name) for name in self.learners}
        if not teachers:
            yield "there is no student with a teacher: leave one out of joint="
        for name, known in teachers.items():
            if not known:
                yield f"student {name!r} has no teacher: give teachers=, joint= or mutual=True with several students"
        for name in soft.weights:
            if not any(name in known for known in teachers.values()):
                valid = {each for known in teachers.values() for each in known}
                yield f"weights= names the teacher {name!r}, but there is none: {nearest(name, valid)}"
        if self.hard is None and (soft.alpha > 0 or self.joint):
            yield "there is no hard loss: give loss= and its labels, or alpha=0 and no joint="
        if soft.combine == "learned":
            if self.hard is None:
                yield 'combine="learned" follows the hard loss: give one, or use "fixed" or "confidence"'
            if self.mutual or len((*self.told, *self.joint)) < 2:
                yield 'combine="learned" is for two teachers or more that are no students of theirs'

    def _mismatched(self) -> Iterable[str]:
        known = (*self.told, *self.joint)
        for match in self.soft.matches:
            if match.of and match.of not in known:
                yield f"Match(of={match.of!r}): there is no such teacher: {nearest(match.of, known)}"
            elif not match.of and len(known) != 1:
                yield f"Match(student={match.student!r}): say of which teacher: of= one of {', '.join(known) or 'none'}"


@dataclass(frozen=True, kw_only=True)
class StudentMetric:
    """A metric of one student."""

    metric: Callable[[Any, Any], Any]
    loss: DistillationLoss
    student: str

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Return the values of the metric."""
        said, label = self.loss.said(outputs, self.student), self.loss.label(targets)
        return tensor_ops_for(outputs).called(self.metric, said, label, metric=True)


def student_metrics(
    metrics: Mapping[str, Callable[[Any, Any], Any]], loss: DistillationLoss
) -> dict[str, StudentMetric]:
    """Return a job's `metrics=` for each student, named `small/accuracy`; under their own names for one student."""
    several = len(loss.students) > 1
    if found := [name for name, metric in metrics.items() if is_stateful(metric)]:
        raise JobError([f"metric {found[0]!r} has state: students are compared by functions of one value per sample"])
    return {
        f"{student}/{name}" if several else name: StudentMetric(metric=metric, loss=loss, student=student)
        for student in loss.students
        for name, metric in metrics.items()
    }


# --- The tensor functions of a framework; `model_backend` of its `distillation` package has them ----------------------


_FRAMEWORKS = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow"}
_Op = Callable[..., Any]
"""A function of tensors that returns a tensor."""


@dataclass(frozen=True, kw_only=True)
class TensorOps:
    """The tensor functions of a framework that the losses use. Axes count from 0, which are the rows."""

    channels: int  # the usual axis of a feature map's channels
    is_tensor: Callable[[Any], bool]
    first: _Op  # the first tensor of a model's outputs
    shape: Callable[[Any], tuple[int | None, ...]]  # sizes; None if unknown
    wide: _Op  # as float64 if it is that, else as float32: half precision is too coarse for a divergence
    typed: _Op  # (value, like): in the type of another tensor
    near: _Op  # (value, like): in the type and on the device of another tensor, without a gradient
    held: _Op  # without a gradient
    precisely: Callable[[Any], AbstractContextManager[Any]]  # (like): computes nothing in half precision
    called: _Op  # (function, outputs, targets, *, metric=False): calls a loss or metric of the user as the engines do
    answers: Callable[[InlineTeacher, Mapping[str, Any], Any], Mapping[str, Any]]
    """(teacher, columns, like): the columns of an inline teacher, on the device of a tensor."""
    log_softmax: _Op  # along the last axis
    log_sigmoid: _Op
    exp: _Op
    log: _Op
    log_add: _Op  # (one, other): log(exp(one) + exp(other))
    log_total: _Op  # log of the sum of exp over the first axis
    softmax: _Op  # along the first axis
    counted: _Op  # (probability, value): their product; 0 where the probability is 0, whatever the value
    total: _Op  # (value, axes): the sum
    mean: _Op  # (value, axes)
    unit: _Op  # normalized to length 1 along the last axis
    stacked: _Op  # (values): along a new first axis
    unstacked: Callable[[Any], Sequence[Any]]  # the parts along the first axis
    paired: _Op  # (one, other): along a new last axis
    transposed: _Op  # (value, axes): with its axes in this order
    flat: _Op  # (rows, ...) as (rows, numbers)
    shortened: _Op  # (value, like): the first tokens of (rows, tokens), as many as another tensor has
    widened: _Op  # (value, dimensions): with axes of size 1 behind its own


def tensor_ops_for(outputs: Any) -> TensorOps:
    """Return the functions for the framework of some outputs. Raises JobError if they are no tensors."""
    value = outputs
    while isinstance(value, Mapping | tuple | list) and len(value):
        value = next(iter(value.values())) if isinstance(value, Mapping) else value[0]
    for kind in type(value).__mro__:
        framework = _FRAMEWORKS.get(kind.__module__.partition(".")[0])
        if framework:
            tensors: TensorOps = load_module(f"trainwright.strategies.{framework}.distillation.model_backend").TENSORS
            return tensors
    raise JobError([f"the model returned {type(value).__name__}: return tensors of torch or TensorFlow"])


# --- One batch of students and their teachers -------------------------------------------------------------------------


class _BatchLoss:
    """The loss of one batch, from the outputs of the model and the target columns."""

    def __init__(self, loss: DistillationLoss, outputs: Any, columns: Mapping[str, Any], ops: TensorOps) -> None:
        self._loss, self._soft, self._outputs, self._ops = loss, loss.soft, outputs, ops
        like = ops.first(outputs)
        self._like = ops.wide(like)
        self._columns = dict(columns)
        for teacher in loss.inline.values():
            self._columns |= ops.answers(teacher, {name: columns[name] for name in teacher.wanted}, like)

    def terms(self) -> Any:
        """Return the sum over the students."""
        results = [self._hard_of(self._loss.said(self._outputs, name)) for name in self._loss.joint]
        results += [self._student(name) for name in self._loss.learners]
        if self._soft.combine == "learned":
            results.append(self._mixture())
        total = results[0].values
        for result in results[1:]:
            total = total + result.values
        weights = results[-1].weights
        return total if weights is None else Terms(total, weights)

    def _hard_of(self, outputs: Any) -> Terms:
        """Return the hard loss of some outputs, and its weights or None."""
        assert self._loss.hard is not None, "callers check this"
        labels = tuple(self._columns[name] for name in self._loss.labels)
        given = labels[0] if len(labels) == 1 else labels
        result = self._ops.called(self._loss.hard, outputs, given)
        if not isinstance(result, Terms):
            result = Terms(result, None)
        return Terms(self._typed(result.values), result.weights)

    def _student(self, name: str) -> Terms:
        """Return the loss of a student."""
        outputs, loss, ops = self._loss.said(self._outputs, name), self._loss, self._ops
        hard = self._hard_of(outputs) if loss.hard is not None else None
        own = self._typed(self._chosen(outputs, f"student {name!r}"))
        teachers = loss.taught_by(name)
        with ops.precisely(own):
            terms = [self._divergence(own, name, teacher, hard) for teacher in teachers]
            soft = self._combined(terms, teachers, hard, own) * self._soft.factor
            total = soft if hard is None or not self._soft.alpha else soft + hard.values * self._soft.alpha
            for number, match in enumerate(self._soft.matches):
                total = total + self._distance(name, number, match, total) * match.weight
        if hard is not None:
            return Terms(total, hard.weights)
        return Terms(total, self._columns[self._soft.mask] if self._soft.mask else None)

    def _divergence(self, own: Any, student: str, teacher: str, hard: Terms | None) -> Any:
        """Return the divergence of a student from a teacher, in the shape of the hard loss."""
        said = self._ops.near(self._said(teacher), own)
        problem = output_mismatch(self._soft.kind, self._ops.shape(own), self._ops.shape(said), student, teacher)
        if problem:
            raise JobError([problem])
        apart = _divergence_of(self._soft, own, said, self._ops)
        return self._fitted(apart, hard, own)

    def _fitted(self, values: Any, hard: Terms | None, own: Any) -> Any:
        """Return values of samples, tokens or their labels in the shape of the hard loss."""
        ops, kind = self._ops, self._soft.kind
        shape, whole = ops.shape(values), ops.shape(own)
        unlabelled = 1 if kind == "regression" else len(whole) - 1
        wanted = unlabelled if hard is None else len(ops.shape(hard.values))
        if len(shape) > wanted and kind == "regression":
            values = ops.mean(values, tuple(range(wanted, len(shape))))
        elif len(shape) == wanted + 1 and kind == "multi_label":
            values = ops.total(values, (wanted,))
        elif hard is not None and kind == "language_model" and _of_next(ops.shape(hard.values), shape):
            values = ops.shortened(values, hard.values)
        if hard is not None and not shapes_match(ops.shape(hard.values), ops.shape(values)):
            raise JobError(
                [
                    f"the hard loss has shape {shape_text(ops.shape(hard.values))} and the divergence from a teacher "
                    f"{shape_text(ops.shape(values))}, of outputs {shape_text(whole)} and kind={kind!r}: return one "
                    "loss for each sample, in language models for each token, (rows, tokens), with "
                    "Terms(values, weights) for a mask"
                ]
            )
        return values

    def _combined(self, terms: Sequence[Any], teachers: tuple[str, ...], hard: Terms | None, own: Any) -> Any:
        """Return the weighted sum over the teachers."""
        if self._soft.combine == "fixed" or len(terms) == 1:
            shares: Sequence[Any] = self._soft.share(teachers)
        elif self._soft.combine == "learned":
            learned = self._ops.unstacked(self._ops.held(self._weighing()))
            shares = [self._spread(share, terms[0]) for share in learned]
        else:
            shares = self._confidence(teachers, hard, own)
        total = terms[0] * shares[0]
        for term, share in zip(terms[1:], shares[1:], strict=True):
            total = total + term * share
        return total

    def _confidence(self, teachers: tuple[str, ...], hard: Terms | None, own: Any) -> Sequence[Any]:
        """Return each teacher's weight, for each sample or token."""
        ops, sure = self._ops, []
        for teacher in teachers:
            said = ops.near(self._said(teacher), own)
            if hard is not None:
                sure.append(-ops.near(self._hard_of(self._as_said(said)).values, own))
            else:
                sure.append(-self._fitted(_teacher_entropy(self._soft, said, ops), hard, own))
        return ops.unstacked(ops.held(ops.softmax(ops.stacked(sure))))

    def _weighing(self) -> Any:
        """Return each teacher's learned weight with its gradient, (teachers, rows)."""
        logits = self._typed(self._outputs[TEACHER_WEIGHTS_OUTPUT])
        return self._ops.softmax(self._ops.transposed(logits, (1, 0)))

    def _mixture(self) -> Terms:
        """Return the hard loss of the combined teachers, from which their weights learn."""
        ops, teachers = self._ops, (*self._loss.told, *self._loss.joint)
        with ops.precisely(self._like):
            said = ops.stacked([ops.near(self._said(teacher), self._like) for teacher in teachers])
            shares = ops.stacked([self._spread(share, said[0]) for share in ops.unstacked(self._weighing())])
            mixed = _combined_teacher(self._soft, said, shares, ops)
        return self._hard_of(self._as_said(mixed))

    def _spread(self, share: Any, like: Any) -> Any:
        """Return (rows,) as (rows, 1, ...), for products with a tensor of more dimensions."""
        return self._ops.widened(share, len(self._ops.shape(like)))

    def _typed(self, value: Any) -> Any:
        """Return a value in the type of the sum."""
        return self._ops.typed(value, self._like)

    def _said(self, teacher: str) -> Any:
        """Return a teacher's outputs, without a gradient."""
        if teacher in self._loss.students:
            return self._ops.held(self._chosen(self._loss.said(self._outputs, teacher), f"student {teacher!r}"))
        return self._columns[teacher_column(teacher)]

    def _as_said(self, logits: Any) -> Any:
        """Return a teacher's outputs in the structure of the students' outputs, for the hard loss."""
        outputs = self._loss.said(self._outputs, self._loss.learners[0])
        name = self._name(outputs, "the student")
        return logits if name is None else {name: logits}

    def _chosen(self, outputs: Any, whose: str) -> Any:
        """Return the compared output of a model."""
        name = self._name(outputs, whose)
        return outputs if name is None else outputs[name]

    def _name(self, outputs: Any, whose: str) -> str | None:
        """Return the name of the compared output; None if the only output has no name."""
        if self._ops.is_tensor(outputs):
            return None
        names = [str(name) for name in outputs] if isinstance(outputs, Mapping) else []
        wanted = self._soft.output or ("logits" if "logits" in names else names[0] if len(names) == 1 else "")
        if wanted in names:
            return wanted
        what = f"outputs {', '.join(names)}" if names else f"a {type(outputs).__name__}"
        raise JobError([f"{whose} gives {what}: name the output to compare with the teachers: SoftLoss(output=...)"])

    def _distance(self, student: str, number: int, match: Match, like: Any) -> Any:
        """Return the distance of a student's layer from a teacher's, in the shape of the loss."""
        ops, teacher = self._ops, self._loss.teacher_of(match)
        own = self._typed(self._outputs[bridge_output(student, number)])
        if teacher in self._loss.students:
            theirs = ops.held(self._outputs[layer_output(teacher, match.teacher)])
        else:
            theirs = self._columns[teacher_column(teacher, match.teacher)]
        where = f"student {student!r}, {match.student!r} to {match.teacher!r} of {teacher!r}"
        tokens = self._soft.kind == "language_model"
        return layer_distance(match, own, ops.near(theirs, own), like, ops, tokens=tokens, where=where)


def _of_next(hard: Shape, soft: Shape) -> bool:
    """Return whether a hard loss of tokens is, or may be, that of the next tokens: the last token has none."""
    if len(hard) != 2 or len(soft) != 2:
        return False
    return hard[1] is None or soft[1] is None or hard[1] == soft[1] - 1


# --- Divergences of a student's outputs from a teacher's --------------------------------------------------------------


def _divergence_of(soft: SoftLoss, student: Any, teacher: Any, ops: TensorOps) -> Any:
    """Return D(teacher, student) at temperature T, without the factor T^2.

    Args:
        student, teacher: logits or values of one shape, wide.

    Returns:
        One value for each sample or token; in multi-label one for each label, in regression one for each number.
    """
    if soft.kind == "regression":
        return soft.divergence(student, teacher) if callable(soft.divergence) else _squared(student - teacher)
    student, teacher = student / soft.temperature, teacher / soft.temperature
    if callable(soft.divergence):
        return soft.divergence(student, teacher)
    if soft.divergence == "mse":
        squared = _squared(student - teacher)
        return squared if soft.kind == "multi_label" else ops.mean(squared, (len(ops.shape(squared)) - 1,))
    theirs, own = _outcomes(soft, teacher, ops), _outcomes(soft, student, ops)
    if soft.divergence == "kl":
        return _kl(theirs, own, ops)
    if soft.divergence == "reverse_kl":
        return _kl(own, theirs, ops)
    middle = ops.log_add(own, theirs) - math.log(2.0)
    return _kl(theirs, middle, ops) * 0.5 + _kl(own, middle, ops) * 0.5


def _teacher_entropy(soft: SoftLoss, teacher: Any, ops: TensorOps) -> Any:
    """Return the entropy of a teacher's outputs, for each sample, token or label."""
    chances = _outcomes(soft, teacher, ops)
    return -_last_total(ops.counted(ops.exp(chances), chances), ops)


def _combined_teacher(soft: SoftLoss, said: Any, shares: Any, ops: TensorOps) -> Any:
    """Return the outputs of several teachers as one: the logits of their mean probabilities, or the mean of values.

    Args:
        said: (teachers, rows, ...) logits or values.
        shares: (teachers, rows, 1, ...) whose sum over the teachers is 1.
    """
    if soft.kind == "regression":
        return ops.total(said * shares, (0,))
    logs = ops.log(shares)
    if soft.kind == "multi_label":
        return ops.log_total(ops.log_sigmoid(said) + logs) - ops.log_total(ops.log_sigmoid(-said) + logs)
    return ops.log_total(ops.log_softmax(said) + logs)


def _outcomes(soft: SoftLoss, logits: Any, ops: TensorOps) -> Any:
    """Return log probabilities along the last axis: of the classes, or of yes and no for each label."""
    if soft.kind == "multi_label":
        return ops.paired(ops.log_sigmoid(logits), ops.log_sigmoid(-logits))
    return ops.log_softmax(logits)


def _kl(one: Any, other: Any, ops: TensorOps) -> Any:
    """Return KL(one || other) of log probabilities along the last axis."""
    return _last_total(ops.counted(ops.exp(one), one - other), ops)


def _last_total(value: Any, ops: TensorOps) -> Any:
    return ops.total(value, (len(ops.shape(value)) - 1,))


def _squared(value: Any) -> Any:
    return value * value
