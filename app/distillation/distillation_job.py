"""Compose the job of a distillation: teacher outputs become columns of its data, and the loss uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from trainwright.core.errors import JobError
from trainwright.core.job import Job
from trainwright.datasets.dataset import Dataset, first_batch
from trainwright.datasets.ray_data.actor_pools import allocate_actors
from trainwright.datasets.ray_data.ray_fetcher import make_pipeline_spec
from trainwright.distillation.distillation_spec import Delivery, Distillation, Teacher
from trainwright.distillation.target_cache import stored_targets
from trainwright.distillation.teacher_runner import (
    OutputSignature,
    TeacherRunner,
    compared_shape,
    load_teacher,
    output_signature,
)
from trainwright.strategies.distillation.distillation_loss import DistillationLoss, student_metrics
from trainwright.strategies.distillation.layer_match import Shape, output_mismatch
from trainwright.strategies.distillation.multi_student import StudentModels
from trainwright.tuning.parallel_runs import train_in_parallel

if TYPE_CHECKING:
    from trainwright.core.soft_loss import SoftLoss
    from trainwright.datasets.data_source import Index
    from trainwright.planning.decision import Decision


@dataclass(frozen=True, kw_only=True)
class LoadedDistillation:
    """A distillation whose way is chosen, with the newest weights of its teachers."""

    asked: Distillation
    # by name of the teacher; that of a runner has the layers that the loss matches
    runners: Mapping[str, TeacherRunner]

    @classmethod
    def of(cls, distillation: Distillation, way: Delivery | None = None) -> Self:
        """Return the distillation, under another way if one is given. Raises as `load_teacher`."""
        runners = {teacher.name: load_teacher(teacher) for teacher in teachers_with_layers(distillation)}
        return cls(asked=distillation, runners=runners).under(way or distillation.way)

    def under(self, way: str) -> Self:
        """Return it under another way."""
        return replace(self, asked=self.asked.replace(way=way))

    @property
    def teachers(self) -> tuple[Teacher, ...]:
        """The teachers."""
        return tuple(runner.teacher for runner in self.runners.values())

    @cached_property
    def loss(self) -> DistillationLoss:
        """The students' loss. Raises JobError with all mismatches."""
        distillation, job, inline = self.asked, self.asked.student, self.asked.way == "inline"
        labels, mask = job.target_names, distillation.loss.mask
        target_columns = [name for teacher in self.teachers for name in (teacher.wanted if inline else teacher.columns)]
        return DistillationLoss(
            soft=distillation.loss,
            hard=job.loss if labels else None,
            targets=tuple(dict.fromkeys((*labels, *([mask] if mask else []), *target_columns))),
            labels=labels,
            students=distillation.names,
            teachers=() if inline else tuple(self.runners),
            inline=self.runners if inline else {},
            mutual=distillation.mutual,
            joint=distillation.joint,
        )

    @property
    def model(self) -> Callable[[], Any]:
        """() -> all students in one model, without projections; or one student that needs no wrapper."""
        if not self.loss.wrapped:
            return self.asked.student.model
        return StudentModels(builders=self.asked.builders, loss=self.loss)

    def fitted_model(self, train: Dataset) -> Callable[[], Any]:
        """Return the model with the projections that matched layers need; `train` has the columns of the step."""
        job, students = self.asked.student, self.model
        if not isinstance(students, StudentModels) or not self.loss.soft.matches:
            return students
        row = first_batch(train, train.index())
        teacher_columns: dict[str, Any] = {}
        for name in self.loss.inline:
            teacher_columns |= self.runners[name].teach(row.columns)
        return students.fitted({**job.data.collation(row), **teacher_columns}, job.arguments, job.keywords)

    def with_actors(self, data: Dataset) -> Dataset:
        """Return a data set with the columns of teachers that run in actors."""
        for runner in self.runners.values():
            data = data.map_batches(
                TeacherActor, cpus=self.asked.cpus, gpus=self.asked.gpus, fn_constructor_args=(runner,)
            )
        return data

    def check(self) -> None:
        """Raise JobError for teachers and students that do not match, as far as it is known before the first step."""
        job, loss = self.asked.student, self.loss
        index = job.train.index()
        builders = self.asked.builders
        students = {name: output_signature(job.replace(model=build), index) for name, build in builders.items()}
        teachers = {each.name: output_signature(each.inference_job(job.train), index) for each in self.teachers}
        signatures = {**teachers, **students}
        outputs = dict.fromkeys(students, loss.soft.output) | {each.name: each.output for each in self.teachers}
        shapes = {name: _compared(loss, each.shapes, outputs[name]) for name, each in signatures.items()}
        problems = [*_framework_problems(loss, signatures), *_shape_problems(loss, shapes)]
        if problems:
            raise JobError(problems)
        for name in loss.inline:
            if not teachers[name].looks:
                self.runners[name].teach(first_batch(job.train, index).columns)


class TeacherActor:
    """A teacher in an actor of its own, for `map_batches`."""

    def __init__(self, runner: TeacherRunner) -> None:
        self._runner = runner

    def __call__(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the columns and the teacher's outputs."""
        return self._runner(columns)


def _compared(loss: DistillationLoss, shapes: Mapping[str, Shape], name: str) -> Shape | None:
    """Return the shape of the compared output; None if it is unknown."""
    shape = compared_shape(shapes, name)
    if shape is None or loss.soft.kind != "language_model":
        return shape
    return (*(None for _ in shape[:-1]), shape[-1])  # the batch determines the number of tokens of a row


def _framework_problems(loss: DistillationLoss, outlines: Mapping[str, OutputSignature]) -> Iterator[str]:
    """Yield the problems of inline teachers whose framework is not the student's."""
    framework = outlines[loss.students[0]].framework
    for name in loss.inline:
        if outlines[name].framework != framework:
            yield (
                f"teacher {name!r} is a model of {outlines[name].framework} and cannot run in the step of a student of "
                f'{framework}: use way="offline" or "online"'
            )


def _shape_problems(loss: DistillationLoss, shapes: Mapping[str, Shape | None]) -> Iterator[str]:
    """Yield the problems of students and teachers with different classes, labels, words or shapes."""
    for student in loss.learners:
        for teacher in loss.taught_by(student):
            student_shape, teacher_shape = shapes[student], shapes[teacher]
            if student_shape is not None and teacher_shape is not None:
                problem = output_mismatch(loss.soft.kind, student_shape, teacher_shape, student, teacher)
                yield from [problem] if problem else []


# --- The job that is trained ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ComposedJob:
    """The job that is trained."""

    job: Job  # with the teachers in its data or in its loss
    loss: DistillationLoss
    notes: tuple[str, ...] = ()  # problems that were repaired while teachers ran

    def with_soft_loss(self, soft: SoftLoss, student: Job) -> Job:
        """Return the job with another loss of labels and teachers; `student` is the job that was composed."""
        loss, model = replace(self.loss, soft=soft), self.job.model
        model = replace(model, loss=loss) if isinstance(model, StudentModels) else model
        return self.job.replace(loss=loss, metrics=student_metrics(student.metrics, loss), model=model)


def compose_job(distillation: Distillation, *, verbose: bool = False) -> ComposedJob:
    """Return the job of a distillation with a chosen way (`choose_delivery`). Compute missing offline targets.

    Raises:
        JobError: students, teachers and their layers do not match.
        TrainwrightError: as `stored_targets` and `load_teacher`.
    """
    loaded, job, notes = LoadedDistillation.of(distillation), distillation.student, list[str]()
    loaded.check()

    def with_targets(data: Dataset) -> Dataset:
        if distillation.way == "online":
            return loaded.with_actors(data)
        extended = data
        for teacher in loaded.teachers if distillation.way == "offline" else ():
            extended = extended.beside(
                stored_targets(
                    teacher, data, folder=distillation.folder, keep=distillation.keep, verbose=verbose,
                    note=notes.append, hang_deadline_s=job.recovery.hang_deadline_s,
                )
            )  # fmt: skip
        return extended

    train = with_targets(job.train)
    composed = job.replace(
        train=train,
        evaluate=None if job.evaluate is None else with_targets(job.evaluate),
        targets=loaded.loss.targets,
        loss=loaded.loss,
        metrics=student_metrics(job.metrics, loaded.loss),
        model=loaded.fitted_model(train),
    )
    return ComposedJob(job=composed, loss=loaded.loss, notes=tuple(notes))


def composed_model(distillation: Distillation) -> Callable[[], Any]:
    """Return the model of the composed job, which is the same for each way. Raises as `compose_job`."""
    # Inline, teachers compute one row only.
    return LoadedDistillation.of(distillation, "inline").fitted_model(distillation.student.train)


def teachers_with_layers(distillation: Distillation) -> tuple[Teacher, ...]:
    """Return the teachers, each with the layers that the loss matches."""
    teachers = distillation.teachers
    matched = [(match.of or teachers[0].name, match.teacher) for match in distillation.loss.matches if teachers]
    result = []
    for teacher in teachers:
        layers = (*teacher.layers, *(layer for name, layer in matched if name == teacher.name))
        result.append(teacher.replace(layers=tuple(dict.fromkeys(layers))))
    return tuple(result)


def train_teachers(teachers: Iterable[Teacher], *, verbose: bool = False) -> None:
    """Train the runs of teachers with `train=True` that are not finished. Return when all are.

    Raises:
        RunConflict: a run was started with another job.
        Stopped, TrainwrightError: as `train_in_parallel`.
    """
    jobs = [teacher.job for teacher in teachers if teacher.train and teacher.job is not None]
    unique = {(job.storage, job.name): job for job in jobs}
    train_in_parallel(unique.values(), what="teachers", verbose=verbose)


def check_actor_resources(data: Dataset, index: Index, job: Job, decision: Decision) -> None:
    """Raise ResourceError where the cluster has no CPUs or GPUs left for one actor of each teacher.

    Args:
        data: the training set with its teachers in actors, see `LoadedDistillation.with_actors`.
        index: of the training set.
        job: the students' job.
        decision: with the plan of the students, whose workers get resources first.
    """
    cluster, plan = decision.cluster, decision.chosen
    gpus = cluster.accelerators if cluster.accelerator == "GPU" else 0
    free = {"CPU": decision.data_cpus, "GPU": float(gpus - plan.workers * plan.placement.accelerators)}
    pipeline = make_pipeline_spec(data, index, columns=job.columns, **job.ordering())
    allocate_actors([pipeline], free)
