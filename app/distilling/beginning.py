"""What was distilled as the beginning of something else: a student that goes on, or a teacher of the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainwright.core.job import Job
from trainwright.distilling.runs import students
from trainwright.distilling.spec import STUDENT, Distillation
from trainwright.distilling.taught import teaching_of
from trainwright.distilling.teachers import Teacher
from trainwright.predictor import Weights
from trainwright.profiling import profiler_of
from trainwright.strategies.students import lone
from trainwright.use import find_checkpoint

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
