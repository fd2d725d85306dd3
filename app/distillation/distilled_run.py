"""A run of a distillation: a run, and each of its students alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from trainwright.core.errors import TrainwrightError
from trainwright.core.events import Judged, Noted
from trainwright.core.job import Job
from trainwright.distillation.distillation_job import compose_job, composed_model
from trainwright.distillation.distillation_spec import STUDENT, Distillation
from trainwright.distillation.parallel_runs import train_teachers
from trainwright.distillation.student_evaluation import evaluate_students
from trainwright.distillation.teacher_delivery import choose_delivery, record_delivery
from trainwright.inference import batch_inference as predicting
from trainwright.inference import trained_model as use
from trainwright.reporting.html import write_report
from trainwright.reporting.scorecard import Scorecard
from trainwright.runtime.launch import prepare_run, wait_for_run
from trainwright.runtime.run_handle import Run, RunDriver
from trainwright.storage.event_files import append_event
from trainwright.strategies.distillation.distillation_loss import DistillationLoss
from trainwright.strategies.distillation.multi_student import StudentModels

if TYPE_CHECKING:
    from trainwright.datasets import Dataset
    from trainwright.distillation.multi_stage import MultiStage


@dataclass(frozen=True, kw_only=True)
class Student:
    """One student of a run, alone.

    Attributes:
        name: of it.
        job: as if it had been trained without teachers and without company, with the checkpoints of the run that it
            was trained in: for `tw.generate`, `tw.Teacher(job=...)` and all else that takes a job.
    """

    name: str
    job: Job

    def load_model(self, *, step: int | None = None) -> Any:
        """See `tw.load_model`."""
        return use.load_model(self.job, step)

    def export(self, path: str, *, step: int | None = None) -> str:
        """See `tw.export`."""
        return use.export(self.job, path, step)

    def evaluate(self, *, step: int | None = None, here: bool = False, verbose: bool = False) -> dict[str, float]:
        """Its own loss and metrics, with no word of the teachers; see `tw.evaluate`."""
        return use.evaluate(self.job, step, here=here, verbose=verbose)

    def predict(
        self, data: Dataset | str | None = None, *, to: str, keep: Iterable[str] = (), **options: Any
    ) -> predicting.Prediction:
        """See `tw.predict`."""
        return predicting.predict(self.job, data, to=to, keep=keep, **options)


class DistilledRun(Run):
    """A run of `tw.distill`.

    Attributes:
        distillation: what was asked for.
    """

    def __init__(self, distillation: Distillation, job: Job, session: RunDriver, decision: Any) -> None:
        self.distillation = distillation
        super().__init__(job, session, decision)

    @cached_property
    def students(self) -> dict[str, Student]:
        """Each of them alone, by name; `student` is the one of the job's own model."""
        return _students_of(self.distillation, self.job)

    @property
    def verdict(self) -> Scorecard | None:
        """What was said last of the students beside their teachers; None where nothing was, as without evaluation."""
        judged = self._read().summary.judged
        return None if judged is None else Scorecard.read(judged.verdict)

    def judge(self, *, verbose: bool = False) -> Scorecard:
        """Judge the students that the newest checkpoint holds, and tell it in the run's events and report.

        Raises:
            TrainwrightError: as `judging.judge`; there is no checkpoint.
        """
        store, name = self._store, self.job.name
        _, checkpoint = use.find_checkpoint(self.job)
        assert isinstance(self.job.loss, DistillationLoss), "it is composed"
        verdict = evaluate_students(
            self.distillation, self.job.loss, {name: student.job for name, student in self.students.items()},
            folder=store.uri_of(f"{name}/judged"), step=checkpoint.step, verbose=verbose,
        )  # fmt: skip
        append_event(store, name, Judged(text="; ".join(verdict.sentences()), verdict=verdict.facts()))
        write_report(store, name)
        return verdict


def evaluate_finished(run: DistilledRun, *, verbose: bool = False) -> None:
    """Judge the students of a run that is done, as far as they can be: what stands in the way is told, and is no
    failure of the run."""
    if run.state != "done" or run.distillation.student.evaluate is None:
        return
    console = Console(stderr=True)
    try:
        text, style = str(run.judge(verbose=verbose)), ""
    except TrainwrightError as error:
        text, style = f"note: the students are not judged: {error.summary}", "yellow"
        append_event(run._store, run.job.name, Noted(text=text.removeprefix("note: ")))
    console.print(Text(text, style=style), soft_wrap=True, highlight=False)


def students(distillation: Distillation | MultiStage) -> dict[str, Student]:
    """The students of a distillation that was carried out before, by name. Nothing is trained.

    Of a recipe they are those of its last stage.

    Raises:
        TrainwrightError: as `composing.model_of`, where they were trained as one model.
    """
    if not isinstance(distillation, Distillation):
        distillation = distillation.last()
    job = distillation.student
    return _students_of(distillation, job.replace(model=composed_model(distillation)) if distillation.wrapped else job)


def student_loading_code(file: str, overrides: list[str]) -> str:
    """The Python that loads a student of a file's distillation."""
    given = f"{file!r}, {overrides!r}" if overrides else f"{file!r}"
    return (
        "import trainwright as tw; from trainwright.planning.job_file import load_distillation; "
        f"model = tw.students(load_distillation({given}))[{STUDENT!r}].load_model()"
    )


def _students_of(distillation: Distillation, job: Job) -> dict[str, Student]:
    """The students of a distillation, each with its own job.

    Args:
        distillation: says who they are.
        job: that it came to: see `composing.composed`.
    """
    model = job.model
    models = {name: model.alone(name) if isinstance(model, StudentModels) else model for name in distillation.names}
    return {name: Student(name=name, job=distillation.student.replace(model=each)) for name, each in models.items()}


# --- A distillation is carried out ------------------------------------------------------------------------------------


def run_distillation(
    distillation: Distillation, *, resume: bool, fresh: bool, verbose: bool, judge: bool
) -> DistilledRun:
    """See `tw.distill`."""
    train_teachers(distillation.teachers, verbose=verbose)
    chosen = choose_delivery(distillation, fresh=fresh, verbose=verbose)
    whole = compose_job(chosen, verbose=verbose)
    record_delivery(distillation, chosen, resume=resume, fresh=fresh)
    driven = prepare_run(whole.job, resume=resume, fresh=fresh, verbose=verbose, notes=whole.notes)
    run = DistilledRun(chosen, whole.job, *driven)
    wait_for_run(run)
    if judge:
        evaluate_finished(run, verbose=verbose)
    return run
