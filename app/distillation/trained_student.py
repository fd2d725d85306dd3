"""The students of a distillation after training: each as a job of its own, or as the start of another run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainwright.core.engine import CheckpointChoice
from trainwright.core.job import Job
from trainwright.distillation.distillation_job import composed_model
from trainwright.distillation.distillation_spec import STUDENT, Distillation
from trainwright.inference import batch_inference, run_inference
from trainwright.inference.prediction_worker import CheckpointWeights
from trainwright.planning.profiler import profiler_of
from trainwright.runtime import run_handle
from trainwright.storage.checkpoints import find_checkpoint
from trainwright.strategies.distillation.multi_student import StudentModels, model_backend, unwrap_student

if TYPE_CHECKING:
    from trainwright.datasets import Dataset
    from trainwright.distillation.multi_stage import MultiStage


@dataclass(frozen=True, kw_only=True)
class Student:
    """One student of a run, alone."""

    name: str  # of the student
    # the job as if the student had been trained without teachers and other students, with the checkpoints of the run
    # that trained it: for `tw.generate`, `tw.Teacher(job=...)` and other calls that take a job
    job: Job

    def load_model(self, *, step: CheckpointChoice = None) -> Any:
        """See `tw.load_model`."""
        return run_handle.load_model(self.job, step)

    def export(self, path: str, *, step: CheckpointChoice = None) -> str:
        """See `tw.export`."""
        return run_handle.export(self.job, path, step)

    def evaluate(self, *, step: CheckpointChoice = None, here: bool = False, verbose: bool = False) -> dict[str, float]:
        """Return the student's own loss and metrics, without those of the teachers; see `tw.evaluate`."""
        return run_inference.evaluate(self.job, step=step, here=here, verbose=verbose)

    def predict(
        self, data: Dataset | str | None = None, *, to: str, keep: Iterable[str] = (), **options: Any
    ) -> batch_inference.Prediction:
        """See `tw.predict`."""
        return batch_inference.predict(self.job, data, to=to, keep=keep, **options)


def students(distillation: Distillation | MultiStage) -> dict[str, Student]:
    """Return the students of a distillation that was trained before, by name. Nothing is trained.

    The students of a recipe are those of its last stage.

    Raises:
        TrainwrightError: as `composed_model`, where they were trained as one model.
    """
    if not isinstance(distillation, Distillation):
        distillation = distillation.last()
    job = distillation.student
    return students_of(distillation, job.replace(model=composed_model(distillation)) if distillation.wrapped else job)


def students_of(distillation: Distillation, job: Job) -> dict[str, Student]:
    """Return the students of a distillation, each with its own job; `job` is the one that was trained."""
    model = job.model
    models = {name: model.alone(name) if isinstance(model, StudentModels) else model for name in distillation.names}
    return {name: Student(name=name, job=distillation.student.replace(model=each)) for name, each in models.items()}


def student_loading_code(file: str, overrides: list[str]) -> str:
    """Return the Python code that loads a student of a file's distillation."""
    given = f"{file!r}, {overrides!r}" if overrides else f"{file!r}"
    return f"import trainwright as tw; model = tw.students(tw.load_distillation({given}))[{STUDENT!r}].load_model()"


@dataclass(frozen=True, kw_only=True)
class _TrainedStudentBuilder:
    """() -> the run's model from `build` with the weights of the run; the wanted student, if it has several."""

    build: Callable[[], Any]
    weights: CheckpointWeights

    def __call__(self) -> Any:
        """Raises CheckpointError if the weights cannot be read, or do not fit."""
        model = self.build()
        if not model_backend(model).outlined(model):
            profiler_of(model).take_weights(model, self.weights.reader())
        return unwrap_student(model)


def trained_student(stage: Distillation, student: str = STUDENT) -> Callable[[], Any]:
    """Return the builder of a trained student, with its weights. Raises CheckpointError if it was not trained."""
    job = students(stage)[student].job
    runs, checkpoint = find_checkpoint(job)
    return _TrainedStudentBuilder(
        build=job.model, weights=CheckpointWeights(runs=runs, run=job.name, checkpoint=checkpoint)
    )
