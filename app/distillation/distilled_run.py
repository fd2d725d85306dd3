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
from trainwright.distillation.compose_job import model_of
from trainwright.distillation.evaluate_students import judge
from trainwright.distillation.scorecard import Verdict
from trainwright.distillation.spec import STUDENT, Distillation
from trainwright.inference import evaluate as use
from trainwright.inference import predict as predicting
from trainwright.reporting.html import write_report
from trainwright.runtime.run_handle import Drives, Run
from trainwright.storage.event_files import append
from trainwright.strategies.distillation.losses import Distilled
from trainwright.strategies.distillation.multi_student import Students

if TYPE_CHECKING:
    from trainwright.datasets import Dataset
    from trainwright.distillation.recipes import Recipe


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

    def __init__(self, distillation: Distillation, job: Job, session: Drives, decision: Any) -> None:
        self.distillation = distillation
        super().__init__(job, session, decision)

    @cached_property
    def students(self) -> dict[str, Student]:
        """Each of them alone, by name; `student` is the one of the job's own model."""
        return students_of(self.distillation, self.job)

    @property
    def verdict(self) -> Verdict | None:
        """What was said last of the students beside their teachers; None where nothing was, as without evaluation."""
        judged = self._read().judged
        return None if judged is None else Verdict.read(judged.verdict)

    def judge(self, *, verbose: bool = False) -> Verdict:
        """Judge the students that the newest checkpoint holds, and tell it in the run's events and report.

        Raises:
            TrainwrightError: as `judging.judge`; there is no checkpoint.
        """
        store, name = self._store, self.job.name
        _, checkpoint = use.find_checkpoint(self.job)
        assert isinstance(self.job.loss, Distilled), "it is composed"
        verdict = judge(
            self.distillation, self.job.loss, {name: student.job for name, student in self.students.items()},
            folder=store.uri_of(f"{name}/judged"), step=checkpoint.step, verbose=verbose,
        )  # fmt: skip
        append(store, name, Judged(text="; ".join(verdict.sentences()), verdict=verdict.facts()))
        write_report(store, name)
        return verdict


def judged(run: DistilledRun, *, verbose: bool = False) -> None:
    """Judge the students of a run that is done, as far as they can be: what stands in the way is told, and is no
    failure of the run."""
    if run.state != "done" or run.distillation.student.evaluate is None:
        return
    console = Console(stderr=True)
    try:
        text, style = str(run.judge(verbose=verbose)), ""
    except TrainwrightError as error:
        text, style = f"note: the students are not judged: {error.summary}", "yellow"
        append(run._store, run.job.name, Noted(text=text.removeprefix("note: ")))
    console.print(Text(text, style=style), soft_wrap=True, highlight=False)


def students(distillation: Distillation | Recipe) -> dict[str, Student]:
    """The students of a distillation that was carried out before, by name. Nothing is trained.

    Of a recipe they are those of its last stage.

    Raises:
        TrainwrightError: as `composing.model_of`, where they were trained as one model.
    """
    if not isinstance(distillation, Distillation):
        distillation = distillation.last()
    job = distillation.student
    return students_of(distillation, job.replace(model=model_of(distillation)) if distillation.wrapped else job)


def how_to_load(file: str, overrides: list[str]) -> str:
    """The Python that loads a student of a file's distillation."""
    given = f"{file!r}, {overrides!r}" if overrides else f"{file!r}"
    return (
        "import trainwright as tw; from trainwright.planning.job_file import load_distillation; "
        f"model = tw.students(load_distillation({given}))[{STUDENT!r}].load_model()"
    )


def students_of(distillation: Distillation, job: Job) -> dict[str, Student]:
    """The students of a distillation, each with its own job.

    Args:
        distillation: says who they are.
        job: that it came to: see `composing.composed`.
    """
    model = job.model
    models = {name: model.alone(name) if isinstance(model, Students) else model for name in distillation.names}
    return {name: Student(name=name, job=distillation.student.replace(model=each)) for name, each in models.items()}
