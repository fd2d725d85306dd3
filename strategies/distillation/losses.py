"""The loss and the metrics of students that have teachers, as functions of a job: whatever their framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trainwright.core.errors import JobError, nearest
from trainwright.core.teacher_columns import Inline, named, teacher_column
from trainwright.strategies.distillation.divergences import tensors_of
from trainwright.strategies.distillation.loss_terms import Learning

if TYPE_CHECKING:
    from trainwright.core.soft_loss import Match, SoftLoss


@dataclass(frozen=True, kw_only=True)
class Distilled:
    """A job's `loss=`: of one student, or the sum of those of a class, each as if it were alone.

    Several students have several losses in one number: nothing couples them but what looks at the whole gradient, such
    as `clip_norm`, and random numbers, which they draw one after the other. Weights of the hard loss are those of the
    samples or tokens, and must not depend on the outputs.

    Attributes:
        soft: what the loss is made of.
        hard: the job's own loss of a student's outputs and the labels; None where there are no labels.
        targets: the job's target columns, in order.
        labels: of these, what `hard` is given, in order.
        students: their names; of one that has neither matches nor learned weights, the outputs come bare.
        teachers: names of the teachers whose columns are among the targets.
        inline: of teachers that run in the step, by name, instead of columns.
        mutual: each student is a teacher of the others (Zhang et al., 2018, deep mutual learning).
        joint: students that are teachers of the others, and learn from the hard loss alone.

    Raises:
        JobError: with all problems.
    """

    soft: SoftLoss
    hard: Callable[[Any, Any], Any] | None
    targets: tuple[str, ...]
    labels: tuple[str, ...] = ()
    students: tuple[str, ...] = ("student",)
    teachers: tuple[str, ...] = ()
    inline: Mapping[str, Inline] = field(default_factory=dict)
    mutual: bool = False
    joint: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = [*self._named(), *self._untaught(), *self._mismatched()]
        if problems:
            raise JobError(problems)

    @property
    def learners(self) -> tuple[str, ...]:
        """The students that have teachers."""
        return tuple(name for name in self.students if name not in self.joint)

    @property
    def wrapped(self) -> bool:
        """Whether the outputs are a dict of more than one student's own."""
        return len(self.students) > 1 or bool(self.soft.matches) or self.soft.combine == "learned"

    @property
    def told(self) -> tuple[str, ...]:
        """The teachers that are no students."""
        return (*self.teachers, *self.inline)

    def taught_by(self, student: str) -> tuple[str, ...]:
        """The names of a student's teachers."""
        others = tuple(name for name in self.learners if name != student) if self.mutual else ()
        return (*self.told, *self.joint, *others)

    def teacher_of(self, match: Match) -> str:
        """Whose layer a student's is compared with."""
        return match.of or (*self.told, *self.joint)[0]

    def alone(self, student: str) -> Distilled:
        """The same of one student, whose teachers are those that are no students. Raises JobError."""
        if student not in self.students:
            raise JobError([f"there is no student {student!r}: {nearest(student, self.students)}"])
        return replace(self, students=(student,), mutual=False, joint=())

    def said(self, outputs: Any, student: str) -> Any:
        """A student's own outputs."""
        return outputs[student] if self.wrapped else outputs

    def label(self, targets: Any) -> Any:
        """What the hard loss and metrics are given of the targets."""
        columns = self.columns(targets)
        chosen = tuple(columns[name] for name in self.labels)
        return chosen[0] if len(chosen) == 1 else chosen

    def columns(self, targets: Any) -> dict[str, Any]:
        """The target columns by name."""
        return dict(zip(self.targets, (targets,) if len(self.targets) == 1 else targets, strict=True))

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """One loss for each sample or token, or Terms where the hard loss has weights.

        Raises:
            JobError: outputs of students and teachers do not fit each other.
        """
        return Learning(self, outputs, self.columns(targets), tensors_of(outputs)).terms()

    def _named(self) -> Iterable[str]:
        for what, names in (("a student", self.students), ("a teacher", self.told)):
            for name in names:
                yield from named(what, name)
        for name in sorted({*self.students} & {*self.told}):
            yield f"{name!r} is the name of a student and of a teacher: rename one"
        missing = [*self.labels, *map(teacher_column, self.teachers), *([self.soft.mask] if self.soft.mask else [])]
        missing += [name for teacher in self.inline.values() for name in teacher.wanted]
        for name in dict.fromkeys(missing):
            if name not in self.targets:
                yield f"targets= has no column {name!r}: {nearest(name, self.targets)}"
        for name in self.joint:
            if name not in self.students:
                yield f"joint= names {name!r}, which is no student: {nearest(name, self.students)}"

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
            elif (teacher := self.teacher_of(match)) in self.told:
                column = teacher_column(teacher, match.teacher)
                for_whom = f"which Match(student={match.student!r}) needs"
                if teacher in self.teachers and column not in self.targets:
                    yield f"targets= has no column {column!r}, {for_whom}"
                if teacher in self.inline and column not in self.inline[teacher].columns:
                    yield f"{teacher!r} does not tell its layer {match.teacher!r}, {for_whom}: give its Teacher layers="


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A metric of one student."""

    metric: Callable[[Any, Any], Any]
    loss: Distilled
    student: str

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """As the metric gives it."""
        said, label = self.loss.said(outputs, self.student), self.loss.label(targets)
        return tensors_of(outputs).called(self.metric, said, label, metric=True)


def judged(metrics: Mapping[str, Callable[[Any, Any], Any]], loss: Distilled) -> dict[str, Judged]:
    """A job's `metrics=`: of each student, `small/accuracy`, or by their own names where there is one."""
    several = len(loss.students) > 1
    return {
        f"{student}/{name}" if several else name: Judged(metric=metric, loss=loss, student=student)
        for student in loss.students
        for name, metric in metrics.items()
    }


@dataclass(frozen=True, kw_only=True)
class Heard:
    """A metric of a teacher that is no student, or of all of them together."""

    metric: Callable[[Any, Any], Any]
    loss: Distilled
    teacher: str

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """As the metric gives it."""
        ops = tensors_of(outputs)
        said = Learning(self.loss, outputs, self.loss.columns(targets), ops).heard(self.teacher)
        return ops.called(self.metric, said, self.loss.label(targets), metric=True)


def heard(metrics: Mapping[str, Callable[[Any, Any], Any]], loss: Distilled) -> dict[str, Heard]:
    """A job's `metrics=` of its teachers: `teacher.NAME/accuracy`, and of several together `teacher./accuracy`."""
    names = (*loss.told, "") if len(loss.told) > 1 else loss.told
    return {
        f"{teacher_column(teacher)}/{name}": Heard(metric=metric, loss=loss, teacher=teacher)
        for teacher in names
        for name, metric in metrics.items()
    }
