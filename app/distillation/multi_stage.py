"""Recipes: distillations in several stages. Each stage is a run with its own name, report and resumption."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from trainwright.core.errors import JobError, PlanError, RunFinished
from trainwright.core.job import Job
from trainwright.core.soft_loss import SoftLoss
from trainwright.core.strict_model import StrictModel
from trainwright.distillation.distillation_spec import JOB_FIELDS, STUDENT, Distillation, Teacher
from trainwright.distillation.distilled_run import run_distillation
from trainwright.distillation.trained_student import trained_student
from trainwright.reporting.progress_bar import print_status
from trainwright.runtime.launch import prepare_run
from trainwright.runtime.run_handle import Run, wait_for_run
from trainwright.storage.object_store import open_store
from trainwright.storage.run_control import check_ended, delete_run, is_run
from trainwright.storage.run_log import RunLog

Stage = Job | Distillation


class MultiStage(StrictModel, ABC):
    """Stages that `tw.distill` trains one after the other."""

    distillation: Distillation  # of the last stage, or of all stages with teachers

    @property
    @abstractmethod
    def runs(self) -> tuple[str, ...]:
        """Names of the stages' runs, in order; the last is that of the student's job."""

    @abstractmethod
    def stages(self) -> Iterator[Stage]:
        """Yield the stages, in order; each must be trained before the next is yielded."""

    def last(self) -> Distillation:
        """Return the last stage. Raises CheckpointError if earlier stages are not finished."""
        *_, stage = self.stages()
        assert isinstance(stage, Distillation), "a job comes before what it teaches"
        return stage

    def upcoming(self) -> Stage:
        """Return the current stage: the first that is not finished; else the last."""
        for stage in self.stages():
            job = _job_of(stage)
            if job.name == self.runs[-1] or not _done(job):
                return stage
        raise AssertionError("the loop returns at the last stage")

    def distill(self, *, resume: bool = False, fresh: bool = False, verbose: bool = False) -> Run:
        """Train the stages that are not finished. A stage that was started continues.

        Args:
            resume: continue a stage that was started although its job was changed.
            fresh: delete the runs of all stages, but not those of teachers, and start again.
            verbose: show Ray's own output.

        Returns:
            The run of the last stage, or of the one that was stopped.

        Raises:
            RunFinished: all stages are finished.
            RunConflict: with `fresh`, a run of a stage has a driver that is alive; nothing is deleted.
            TrainwrightError: as `tw.distill`.
        """
        run: Run | None = None
        if fresh:
            store = open_store(self.distillation.student.storage)
            former = [name for name in reversed(self.runs) if is_run(store, name)]  # no stage outlives its first ones
            check_ended(store, former)
            for name in former:
                delete_run(store, name)
        for number, (name, stage) in enumerate(zip(self.runs, self.stages(), strict=True), 1):
            print_status(f"stage {number} of {len(self.runs)}: {name}", "good")
            run = self._train(stage, resume=resume, verbose=verbose)
            if run is None:
                print_status(f"{name} is finished")
            elif run.state == "stopped":
                break
        assert run is not None, "the last stage has a run, or raises"
        return run

    def _train(self, stage: Stage, *, resume: bool, verbose: bool) -> Run | None:
        """Return the run of a stage; None if it is finished and another stage follows."""
        job = _job_of(stage)
        last = job.name == self.runs[-1]
        if resume and not last and _done(job):
            return None
        try:
            if isinstance(stage, Distillation):
                return run_distillation(stage, resume=resume, fresh=False, verbose=verbose, judge=last)
            return _train_job(stage, resume=resume, verbose=verbose)
        except RunFinished:
            if last:
                raise
            return None


class TwoStage(MultiStage):
    """Two-stage multi-teacher distillation (TMKD; Yang et al., 2019, arXiv:1910.08381).

    First the students learn from all teachers on many rows without labels. Then, from these weights, they learn from
    teachers and labels. TMKD's student has an output for each teacher and takes their mean; here it has one output,
    which learns the mean of the teachers' outputs.

    Attributes:
        distillation: the second stage: the student's job with its labelled data, and usually two teachers or more.
        unlabelled: data set of the first stage; it needs only the models' inputs.
        first: loss of the first stage, with `alpha=0`; by default the second stage's loss with `alpha=0`.
        fields: fields of the first stage's job that differ from the second's: `{"epochs": 5}`.
    """

    unlabelled: Any
    first: SoftLoss | None = None
    fields: Mapping[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> TwoStage:
        problems = []
        if not hasattr(self.unlabelled, "map_batches"):
            problems.append("unlabelled= is not a data set: use tw.datasets.parquet(...) or tw.datasets.table(...)")
        if not self.distillation.teachers:
            problems.append("distillation= has no teachers=: the first stage learns from them alone")
        if self.first is not None and self.first.alpha:
            problems.append(f"first= has alpha={self.first.alpha:g}: the first stage has no labels; use alpha=0")
        if self.distillation.joint:
            problems.append("distillation= has joint=, which learn from labels: the first stage has none; leave it out")
        own = sorted({"name", "model", "train", "targets", "metrics"} & self.fields.keys())
        problems += [f"fields= sets {name}, which the first stage sets itself: leave it out" for name in own]
        if problems:
            raise JobError(problems)
        self._alone()  # raises its problems at once, too
        return self

    @property
    def runs(self) -> tuple[str, ...]:
        """`NAME-unlabelled`, and the student's own."""
        name = self.distillation.student.name
        return (f"{name}-unlabelled", name)

    def stages(self) -> Iterator[Stage]:
        """Yield the stage without labels, then the stage with labels."""
        first, second = self._alone(), self.distillation
        yield first
        models = {name: trained_student(first, name) for name in second.names}
        yield second.replace(
            student=second.student.replace(model=models.pop(STUDENT)),
            students=models,
        )

    def _alone(self) -> Distillation:
        """Return the first stage."""
        second = self.distillation
        job = second.student.replace(
            name=self.runs[0], train=self.unlabelled, targets=(), metrics={}, **self.fields
        )  # fmt: skip
        combine = "fixed" if second.loss.combine == "learned" else second.loss.combine  # learned weights need labels
        return second.replace(student=job, loss=self.first or second.loss.replace(alpha=0.0, combine=combine))


class SelfDistillation(MultiStage):
    """Generations of one model, each taught by the one before (born-again networks; Furlanello et al., 2018).

    The first generation learns from labels alone. Each generation has the next seed.

    Attributes:
        distillation: of each generation from the one before, without teachers.
        generations: number of generations that have a teacher; the first generation of all has none.
    """

    generations: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _consistent(self) -> SelfDistillation:
        given = [name for name in ("teachers", "students", "joint") if getattr(self.distillation, name)]
        given += ["mutual"] if self.distillation.mutual else []
        if given:
            raise JobError(
                [f"distillation= has {name}=: the only teacher is the model itself; leave it out" for name in given]
            )
        return self

    @property
    def runs(self) -> tuple[str, ...]:
        """`NAME-generation-0` and so on; the last is the student's own name."""
        name = self.distillation.student.name
        return (*(f"{name}-generation-{number}" for number in range(self.generations)), name)

    def stages(self) -> Iterator[Stage]:
        """Yield the generations."""
        job = self.distillation.student
        stage: Stage = job.replace(name=self.runs[0])
        yield stage
        for number, name in enumerate(self.runs[1:], 1):
            teacher = _teacher_of(stage, f"generation-{number - 1}")
            stage = self.distillation.replace(
                student=job.replace(name=name, seed=job.training.seed + number), teachers=(teacher,)
            )  # fmt: skip
            yield stage


def next_stage(asked: Any) -> Any:
    """Return the current stage of a recipe and print its name; return anything else as it is.

    Raises:
        PlanError: it is a search, which has no plan of its own.
        CheckpointError: an earlier stage has no checkpoint.
    """
    if isinstance(asked, MultiStage):
        stage = asked.upcoming()
        print_status(f"the plan of {_job_of(stage).name}, of the stages {', '.join(asked.runs)}")
        return stage
    if hasattr(asked, "distill"):
        what = f"a {type(asked).__name__} is many runs"
        raise PlanError(what, remedy="plan one of them: tw.plan(search.distillation), or of its student's job")
    return asked


def _train_job(job: Job, *, resume: bool, verbose: bool) -> Run:
    """Train a stage without teachers, as `tw.fit`."""
    run = Run(job, *prepare_run(job, resume=resume, fresh=False, verbose=verbose))
    wait_for_run(run)
    return run


def _job_of(stage: Stage) -> Job:
    """Return the job of a stage."""
    return stage if isinstance(stage, Job) else stage.student


def _done(job: Job) -> bool:
    """Return whether the run is finished."""
    head = RunLog(open_store(job.storage), job.name).head()
    return head is not None and head.outcome == "done"


def _teacher_of(stage: Job | Distillation, name: str) -> Teacher:
    """Return a finished run as a teacher. Raises CheckpointError if it was not trained."""
    if isinstance(stage, Job):
        return Teacher(name=name, job=stage)
    job = stage.student
    if not stage.wrapped:
        return Teacher(name=name, job=job)
    given = {field: job.get(field) for field in JOB_FIELDS}
    return Teacher(name=name, model=trained_student(stage), **given)
