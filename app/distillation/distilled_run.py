"""Carry out a distillation: train its teachers, choose where they run, train the students and evaluate them."""

from __future__ import annotations

import sys
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.text import Text

from trainwright.core.errors import TrainwrightError
from trainwright.core.events import Judged, Noted
from trainwright.core.job import Job
from trainwright.distillation.distillation_job import compose_job, train_teachers
from trainwright.distillation.distillation_spec import Distillation
from trainwright.distillation.student_evaluation import evaluate_students
from trainwright.distillation.teacher_delivery import choose_delivery, record_delivery
from trainwright.distillation.trained_student import Student, students_of
from trainwright.reporting.html.run_report import write_report
from trainwright.reporting.scorecard import Scorecard
from trainwright.runtime.launch import prepare_run, refuse_running
from trainwright.runtime.run_handle import Run, RunDriver, wait_for_run
from trainwright.storage.checkpoints import find_checkpoint
from trainwright.storage.event_files import append_event


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
        """Each student alone, by name; `student` is the one of the job's own model."""
        return students_of(self.distillation, self.job)

    @property
    def verdict(self) -> Scorecard | None:
        """The newest comparison of the students with their teachers; None where there is none."""
        judged = self.read().summary.judged
        return None if judged is None else Scorecard.read(judged.verdict)

    def judge(self, *, verbose: bool = False) -> Scorecard:
        """Compare the students of the newest checkpoint with their teachers. Add it to the run's events and report.

        Raises:
            TrainwrightError: as `evaluate_students`; there is no checkpoint.
        """
        store, name = self.store, self.job.name
        _, checkpoint = find_checkpoint(self.job)
        loss: Any = self.job.loss
        verdict = evaluate_students(
            self.distillation, loss, {name: student.job for name, student in self.students.items()},
            folder=store.uri_of(f"{name}/judged"), step=checkpoint.step, verbose=verbose,
        )  # fmt: skip
        append_event(store, name, Judged(text="; ".join(verdict.sentences()), verdict=verdict.facts()))
        write_report(store, name)
        return verdict


def evaluate_finished(run: DistilledRun, *, verbose: bool = False) -> None:
    """Compare the students of a finished run with their teachers. An error is shown as a note."""
    if run.state != "done" or run.distillation.student.evaluate is None:
        return
    console = Console(file=sys.stderr)
    try:
        text, style = str(run.judge(verbose=verbose)), ""
    except TrainwrightError as error:
        text, style = f"note: the students are not judged: {error.summary}", "yellow"
        append_event(run.store, run.job.name, Noted(text=text.removeprefix("note: ")))
    console.print(Text(text, style=style), soft_wrap=True, highlight=False)


def run_distillation(
    distillation: Distillation, *, resume: bool, fresh: bool, verbose: bool, judge: bool
) -> DistilledRun:
    """See `tw.distill`."""
    refuse_running(distillation.student)  # before teachers are trained for it
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
