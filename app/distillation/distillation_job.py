"""Compose the job of a distillation: teacher outputs become columns of its data, and the loss uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainwright.core.errors import JobError
from trainwright.core.job import Job
from trainwright.datasets.dataset import Dataset, first_batch
from trainwright.datasets.ray_data.actor_pools import allocate_actors
from trainwright.datasets.ray_data.ray_fetcher import make_pipeline_spec
from trainwright.distillation.distillation_spec import Distillation, Teacher
from trainwright.distillation.target_cache import stored_targets
from trainwright.distillation.teacher_model import OutputSignature, compared_shape, output_signature
from trainwright.distillation.teacher_runner import TeacherRunner, load_teacher
from trainwright.strategies.distillation.distillation_loss import DistillationLoss, student_metrics
from trainwright.strategies.distillation.layer_match import Shape, output_mismatch
from trainwright.strategies.distillation.multi_student import StudentModels
from trainwright.tuning.parallel_runs import train_in_parallel

if TYPE_CHECKING:
    from trainwright.core.cluster import Cluster
    from trainwright.core.plan import Plan
    from trainwright.core.soft_loss import SoftLoss
    from trainwright.datasets.data_source import Index


@dataclass(frozen=True, kw_only=True)
class ComposedJob:
    """The job that is trained.

    Attributes:
        job: the job, with the teachers in its data or in its loss.
        loss: of the students.
        notes: problems that were repaired while teachers ran.
    """

    job: Job
    loss: DistillationLoss
    notes: tuple[str, ...] = ()

    def with_soft_loss(self, soft: SoftLoss, student: Job) -> Job:
        """Return the job with another loss of labels and teachers; `student` is the job that was composed."""
        loss, model = replace(self.loss, soft=soft), self.job.model
        model = replace(model, loss=loss) if isinstance(model, StudentModels) else model
        return self.job.replace(loss=loss, metrics=student_metrics(student.metrics, loss), model=model)


def compose_job(distillation: Distillation, *, verbose: bool = False) -> ComposedJob:
    """Return the job of a distillation whose way is chosen (`choose_delivery`). Compute missing offline targets.

    Raises:
        JobError: students, teachers and their layers do not match.
        TrainwrightError: as `stored_targets` and `load_teacher`.
    """
    job, teachers = distillation.student, teachers_with_layers(distillation)
    runners = load_teachers(teachers)
    loss = build_loss(distillation, teachers, runners)
    check_compatibility(distillation, loss, teachers, runners)
    notes: list[str] = []

    def beside(data: Dataset) -> Dataset:
        return _with_teachers(data, distillation, teachers, runners, verbose=verbose, note=notes.append)

    train = beside(job.train)
    changes: dict[str, Any] = {
        "train": train,
        "evaluate": None if job.evaluate is None else beside(job.evaluate),
        "targets": loss.targets,
        "loss": loss,
        "metrics": student_metrics(job.metrics, loss),
    }
    model = _model(distillation, loss, runners, train)
    return ComposedJob(job=job.replace(**changes, model=model), loss=loss, notes=tuple(notes))


def composed_model(distillation: Distillation) -> Callable[[], Any]:
    """Return the model of the composed job, which is the same for each way. Raises as `compose_job`."""
    inline = distillation.replace(way="inline")  # teachers compute one row only
    teachers = teachers_with_layers(inline)
    runners = load_teachers(teachers)
    return _model(inline, build_loss(inline, teachers, runners), runners, inline.student.train)


def teachers_with_layers(distillation: Distillation) -> tuple[Teacher, ...]:
    """Return the teachers, each with the layers that the loss matches."""
    teachers = distillation.teachers
    matched = [(match.of or teachers[0].name, match.teacher) for match in distillation.loss.matches if teachers]
    found = []
    for teacher in teachers:
        layers = (*teacher.layers, *(layer for of, layer in matched if of == teacher.name))
        found.append(teacher.replace(layers=tuple(dict.fromkeys(layers))))
    return tuple(found)


def train_teachers(teachers: Iterable[Teacher], *, verbose: bool = False) -> None:
    """Train the runs of teachers with `train=True` that are not finished. Return when all are.

    Raises:
        RunConflict: a run was started with another job.
        Stopped, TrainwrightError: as `train_in_parallel`.
    """
    jobs = [teacher.job for teacher in teachers if teacher.train and teacher.job is not None]
    unique = {(job.storage, job.name): job for job in jobs}
    train_in_parallel(unique.values(), what="teachers", verbose=verbose)


def load_teachers(teachers: Sequence[Teacher]) -> dict[str, TeacherRunner]:
    """Return the runner of each teacher, by name, with its newest weights. Raises as `load_teacher`."""
    return {teacher.name: load_teacher(teacher) for teacher in teachers}


def build_loss(
    distillation: Distillation, teachers: tuple[Teacher, ...], runners: Mapping[str, TeacherRunner]
) -> DistillationLoss:
    """Return the students' loss. Raises JobError with all mismatches."""
    job, inline = distillation.student, distillation.way == "inline"
    labels, mask = job.target_names, distillation.loss.mask
    told = [name for teacher in teachers for name in (teacher.wanted if inline else teacher.columns)]
    return DistillationLoss(
        soft=distillation.loss,
        hard=job.loss if labels else None,
        targets=tuple(dict.fromkeys((*labels, *([mask] if mask else []), *told))),
        labels=labels,
        students=distillation.names,
        teachers=() if inline else tuple(runners),
        inline=runners if inline else {},
        mutual=distillation.mutual,
        joint=distillation.joint,
    )


class TeacherActor:
    """A teacher in an actor of its own, for `map_batches`."""

    def __init__(self, runner: TeacherRunner) -> None:
        self._runner = runner

    def __call__(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the given columns and the teacher's."""
        return self._runner(columns)


def _with_teachers(
    data: Dataset,
    distillation: Distillation,
    teachers: tuple[Teacher, ...],
    runners: Mapping[str, TeacherRunner],
    *,
    verbose: bool,
    note: Callable[[str], object],
) -> Dataset:
    """Return a data set with the teachers' columns; inline teachers have none."""
    if distillation.way == "inline":
        return data
    if distillation.way == "online":
        return with_teacher_actors(data, distillation, runners)
    targets = [
        stored_targets(
            teacher, data, folder=distillation.folder, keep=distillation.keep, verbose=verbose, note=note,
            hang_deadline_s=distillation.student.recovery.hang_deadline_s,
        )
        for teacher in teachers
    ]  # fmt: skip
    for each in targets:
        data = data.beside(each)
    return data


def with_teacher_actors(data: Dataset, distillation: Distillation, runners: Mapping[str, TeacherRunner]) -> Dataset:
    """Return a data set with the columns of teachers that run in actors."""
    for runner in runners.values():
        data = data.map_batches(
            TeacherActor, cpus=distillation.cpus, gpus=distillation.gpus, fn_constructor_args=(runner,)
        )
    return data


def check_actor_resources(data: Dataset, index: Index, job: Job, plan: Plan, cluster: Cluster) -> None:
    """Raise ResourceError where the cluster has no CPUs or GPUs left for one actor of each teacher.

    Args:
        data: the training set with its teachers in actors, see `with_teacher_actors`.
        index: of the training set.
        job: the students' job.
        plan: of the students, whose workers get resources first.
        cluster: the resources.
    """
    gpus = cluster.accelerators if cluster.accelerator == "GPU" else 0
    free = {"CPU": plan.placement.data_cpus, "GPU": float(gpus - plan.workers * plan.placement.accelerators)}
    pipeline = make_pipeline_spec(data, index, columns=job.columns, **job.ordering())
    allocate_actors([pipeline], free)


def student_builder(distillation: Distillation, loss: DistillationLoss) -> Callable[[], Any]:
    """Return the model of all students without projections; the own model of one student without further outputs."""
    job = distillation.student
    if not loss.wrapped:
        return job.model
    return StudentModels(builders=distillation.builders, loss=loss)


def _model(
    distillation: Distillation, loss: DistillationLoss, runners: Mapping[str, TeacherRunner], train: Dataset
) -> Callable[[], Any]:
    """Return the model of all students, with the projections that matched layers need."""
    job, students = distillation.student, student_builder(distillation, loss)
    if not isinstance(students, StudentModels) or not loss.soft.matches:
        return students
    row = first_batch(train, train.index())
    told = {name: each for inline in loss.inline for name, each in runners[inline].teach(row.columns).items()}
    return students.fitted({**job.data.collation(row), **told}, job.arguments, job.keywords)


# --- Compatibility ----------------------------------------------------------------------------------------------------


def check_compatibility(
    distillation: Distillation,
    loss: DistillationLoss,
    teachers: tuple[Teacher, ...],
    runners: Mapping[str, TeacherRunner],
) -> None:
    """Raise JobError for teachers and students that do not match, as far as it is known before the first step."""
    job = distillation.student
    index = job.train.index()
    students = {
        name: output_signature(job.replace(model=build), index) for name, build in distillation.builders.items()
    }
    known = {teacher.name: output_signature(teacher.inference_job(job.train), index) for teacher in teachers}
    outlines = {**known, **students}
    outputs = dict.fromkeys(students, loss.soft.output) | {teacher.name: teacher.output for teacher in teachers}
    given = {name: _compared(loss, each.shapes, outputs[name]) for name, each in outlines.items()}
    problems = [*_mixed(loss, outlines), *_unlike(loss, given)]
    if problems:
        raise JobError(problems)
    for name in loss.inline:
        if not known[name].looks:
            runners[name].teach(first_batch(job.train, index).columns)


def _compared(loss: DistillationLoss, shapes: Mapping[str, Shape], name: str) -> Shape | None:
    """Return the shape of the compared output; None where unknown."""
    shape = compared_shape(shapes, name)
    if shape is None or loss.soft.kind != "language_model":
        return shape
    return (*(None for _ in shape[:-1]), shape[-1])  # how many tokens a row has follows from its batch


def _mixed(loss: DistillationLoss, outlines: Mapping[str, OutputSignature]) -> Iterator[str]:
    """Yield the problems of inline teachers whose framework is not the student's."""
    own = outlines[loss.students[0]].framework
    for name in loss.inline:
        if outlines[name].framework != own:
            yield (
                f"teacher {name!r} is a model of {outlines[name].framework} and cannot run in the step of a student of "
                f'{own}: use way="offline" or "online"'
            )


def _unlike(loss: DistillationLoss, given: Mapping[str, Shape | None]) -> Iterator[str]:
    """Yield the problems of students and teachers with different classes, labels, words or shapes."""
    for student in loss.learners:
        for teacher in loss.taught_by(student):
            own, said = given[student], given[teacher]
            if own is not None and said is not None:
                problem = output_mismatch(loss.soft.kind, own, said, student, teacher)
                yield from [problem] if problem else []
