"""What was distilled as the beginning of something else: a student that goes on, or a teacher of the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainwright.core.job import Job
from trainwright.distillation.distilled_run import students
from trainwright.distillation.spec import STUDENT, Distillation
from trainwright.distillation.teacher_model import teaching_of
from trainwright.distillation.teachers import Teacher
from trainwright.inference.evaluate import find_checkpoint
from trainwright.inference.prediction_worker import Weights
from trainwright.planning.profile_model import profiler_of
from trainwright.strategies.distillation.multi_student import lone

_OF_JOB = ("inputs", "pad", "collate", "precision")


@dataclass(frozen=True, kw_only=True)
class Begun:
    """() -> a model with the weights of a run; of a class of students that of which one alone runs, the one.

    Attributes:
        build: () -> the run's model.
        weights: of the run.
    """

    build: Callable[[], Any]
    weights: Weights

    def __call__(self) -> Any:
        """Raises CheckpointError where the weights cannot be read, or do not fit."""
        model = self.build()
        if not teaching_of(model).outlined(model):
            profiler_of(model).take_weights(model, self.weights.reader())
        return lone(model)


def begun(stage: Distillation, student: str = STUDENT) -> Begun:
    """What builds a student of a distillation that is done, as it was at its end.

    Raises:
        CheckpointError: it was not trained.
    """
    job = students(stage)[student].job
    runs, checkpoint = find_checkpoint(job)
    return Begun(build=job.model, weights=Weights(runs=runs, run=job.name, checkpoint=checkpoint))


def teacher_of(stage: Job | Distillation, name: str) -> Teacher:
    """A run that is done, as a teacher. Raises CheckpointError where it was not trained."""
    if isinstance(stage, Job):
        return Teacher(name=name, job=stage)
    job = stage.student
    if not stage.wrapped:
        return Teacher(name=name, job=job)
    given = {field: getattr(job, field) for field in _OF_JOB}
    return Teacher(name=name, model=begun(stage), **given)
