"""A distillation: a student's job, its teachers, and how what they say reaches it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, model_validator

from trainwright.core.errors import JobError
from trainwright.core.job import Job
from trainwright.core.soft_loss import SoftLoss
from trainwright.core.strict_model import Fields
from trainwright.distillation.target_encoding import Form
from trainwright.distillation.teachers import Teacher

Way = Literal["offline", "online", "inline"]
WAYS: tuple[Way, ...] = ("offline", "inline", "online")  # of those as quick the first is taken
STUDENT = "student"  # what the job's own model is called, where it has company


class Recipe(Protocol):
    """What is made of several distillations."""

    def distill(self, *, resume: bool, fresh: bool, verbose: bool) -> Any:
        """Carry it out, as `tw.distill` does."""


class Distillation(Fields):
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
    way: Way | Literal["auto"] = "auto"
    keep: str = "fp16"
    targets: str | None = None
    cpus: Annotated[float, Field(ge=0)] = 1.0
    gpus: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> Distillation:
        problems = [*self._unsuited(), *self._doubled()]
        try:
            Form.parse(self.keep)
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
