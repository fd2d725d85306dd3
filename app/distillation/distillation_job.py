"""A distillation as a job: what teachers say becomes columns of its data, and its loss one of labels and these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainwright.core.errors import JobError
from trainwright.core.job import Job
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.first_row import first_batch
from trainwright.distillation.distillation_spec import Distillation, Teacher, TeacherRunner
from trainwright.distillation.target_cache import stored_targets
from trainwright.distillation.teacher_runner import OutputSignature, compared_shape, output_signature
from trainwright.strategies.distillation.distillation_loss import DistillationLoss, student_metrics
from trainwright.strategies.distillation.layer_match import Shape, output_mismatch
from trainwright.strategies.distillation.multi_student import StudentModels

_AddTargets = Callable[[Dataset], Dataset]


@dataclass(frozen=True, kw_only=True)
class ComposedJob:
    """What is trained.

    Attributes:
        job: with the teachers in its data or in its loss.
        loss: of the students.
        notes: what went wrong and was mended while teachers were asked.
    """

    job: Job
    loss: DistillationLoss
    notes: tuple[str, ...] = ()


def compose_job(distillation: Distillation, *, verbose: bool = False) -> ComposedJob:
    """The job that a distillation comes to, its way settled (`choosing.settled`).

    Offline, all that teachers have to say is computed where it is missing.

    Raises:
        JobError: students, teachers and their layers do not go together.
        TrainwrightError: as `stored_targets` and `Teacher.load`.
    """
    job, teachers = distillation.student, teachers_with_layers(distillation)
    lecturers = {teacher.name: teacher.load() for teacher in teachers}
    loss = build_loss(distillation, teachers, lecturers)
    check_compatibility(distillation, loss, teachers, lecturers)
    notes: list[str] = []
    beside = _beside(distillation, teachers, lecturers, verbose, notes.append)
    train = beside(job.train)
    changes: dict[str, Any] = {
        "train": train,
        "evaluate": None if job.evaluate is None else beside(job.evaluate),
        "targets": loss.targets,
        "loss": loss,
        "metrics": student_metrics(job.metrics, loss),
    }
    model = _model(distillation, loss, lecturers, train)
    return ComposedJob(job=job.replace(**changes, model=model), loss=loss, notes=tuple(notes))


def composed_model(distillation: Distillation) -> Callable[[], Any]:
    """The model of the job that it comes to, whichever way teachers are asked. Raises as `compose_job`."""
    inline = distillation.replace(way="inline")  # nothing is computed of the data but a row
    teachers = teachers_with_layers(inline)
    lecturers = {teacher.name: teacher.load() for teacher in teachers}
    return _model(inline, build_loss(inline, teachers, lecturers), lecturers, inline.student.train)


def teachers_with_layers(distillation: Distillation) -> tuple[Teacher, ...]:
    """The teachers, each with the layers of its that are matched."""
    teachers = distillation.teachers
    matched = [(match.of or teachers[0].name, match.teacher) for match in distillation.loss.matches if teachers]
    found = []
    for teacher in teachers:
        layers = (*teacher.layers, *(layer for of, layer in matched if of == teacher.name))
        found.append(teacher.replace(layers=tuple(dict.fromkeys(layers))))
    return tuple(found)


def build_loss(
    distillation: Distillation, teachers: tuple[Teacher, ...], lecturers: Mapping[str, TeacherRunner]
) -> DistillationLoss:
    """The students' loss. Raises JobError with all that does not go together."""
    job, inline = distillation.student, distillation.way == "inline"
    labels, mask = job.wanted_targets, distillation.loss.mask
    told = [name for teacher in teachers for name in (teacher.wanted if inline else teacher.columns)]
    return DistillationLoss(
        soft=distillation.loss,
        hard=job.loss if labels else None,
        targets=tuple(dict.fromkeys((*labels, *([mask] if mask else []), *told))),
        labels=labels,
        students=distillation.names,
        teachers=() if inline else tuple(lecturers),
        inline=lecturers if inline else {},
        mutual=distillation.mutual,
        joint=distillation.joint,
    )


class TeacherActor:
    """A teacher in an actor of its own: opened once, asked for one batch after the other."""

    def __init__(self, lecturer: TeacherRunner) -> None:
        self._lecturer = lecturer

    def __call__(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """The columns, and the teacher's beside them."""
        return self._lecturer(columns)


def _beside(
    distillation: Distillation,
    teachers: tuple[Teacher, ...],
    lecturers: Mapping[str, TeacherRunner],
    verbose: bool,
    note: Callable[[str], object],
) -> _AddTargets:
    """What puts the teachers' columns beside those of a data set."""
    folder, keep, hang_s = distillation.folder, distillation.keep, distillation.student.hang_deadline_s

    def offline(data: Dataset) -> Dataset:
        told = [
            stored_targets(teacher, data, folder=folder, keep=keep, verbose=verbose, note=note, hang_deadline_s=hang_s)
            for teacher in teachers
        ]
        for each in told:
            data = data.beside(each)
        return data

    ways: Mapping[str, _AddTargets] = {
        "offline": offline,
        "online": lambda data: with_teacher_actors(data, distillation, lecturers),
        "inline": lambda data: data,
    }
    return ways[distillation.way]


def with_teacher_actors(data: Dataset, distillation: Distillation, lecturers: Mapping[str, TeacherRunner]) -> Dataset:
    """A data set with what teachers in actors of their own say of its rows."""
    for lecturer in lecturers.values():
        data = data.map_batches(
            TeacherActor, cpus=distillation.cpus, gpus=distillation.gpus, fn_constructor_args=(lecturer,)
        )
    return data


def student_builder(distillation: Distillation, loss: DistillationLoss) -> Callable[[], Any]:
    """The model of the class, without bridges; of one student that gives no more than its outputs, its own."""
    job = distillation.student
    if not loss.wrapped:
        return job.model
    return StudentModels(builders=distillation.builders, loss=loss)


def _model(
    distillation: Distillation, loss: DistillationLoss, lecturers: Mapping[str, TeacherRunner], train: Dataset
) -> Callable[[], Any]:
    """The model of the class, with the bridges that its matches need."""
    job, students = distillation.student, student_builder(distillation, loss)
    if not isinstance(students, StudentModels) or not loss.soft.matches:
        return students
    row = first_batch(train, train.index())
    told = {name: each for inline in loss.inline for name, each in lecturers[inline].teach(row.columns).items()}
    return students.fitted({**job.collation(row), **told}, job.arguments, job.keywords)


# --- Compatibility ----------------------------------------------------------------------------------------------------


def check_compatibility(
    distillation: Distillation,
    loss: DistillationLoss,
    teachers: tuple[Teacher, ...],
    lecturers: Mapping[str, TeacherRunner],
) -> None:
    """Raise JobError for models that cannot teach each other. What only a step can tell, its first one does."""
    job = distillation.student
    index = job.train.index()
    students = {
        name: output_signature(job.replace(model=build), index) for name, build in distillation.builders.items()
    }
    known = {teacher.name: output_signature(teacher.asked(job.train), index) for teacher in teachers}
    outlines = {**known, **students}
    outputs = dict.fromkeys(students, loss.soft.output) | {teacher.name: teacher.output for teacher in teachers}
    given = {name: _compared(loss, each.shapes, outputs[name]) for name, each in outlines.items()}
    problems = [*_mixed(loss, outlines), *_unlike(loss, given)]
    if problems:
        raise JobError(problems)
    for name in loss.inline:
        if not known[name].looks:
            lecturers[name].teach(first_batch(job.train, index).columns)


def _compared(loss: DistillationLoss, shapes: Mapping[str, Shape], name: str) -> Shape | None:
    """Of the output that is compared; None where that is not known."""
    shape = compared_shape(shapes, name)
    if shape is None or loss.soft.kind != "language_model":
        return shape
    return (*(None for _ in shape[:-1]), shape[-1])  # how many tokens a row has follows from its batch


def _mixed(loss: DistillationLoss, outlines: Mapping[str, OutputSignature]) -> Iterator[str]:
    """Teachers in the step of a student of another framework."""
    own = outlines[loss.students[0]].framework
    for name in loss.inline:
        if outlines[name].framework != own:
            yield (
                f"teacher {name!r} is a model of {outlines[name].framework} and cannot run in the step of a student of "
                f'{own}: use way="offline" or "online"'
            )


def _unlike(loss: DistillationLoss, given: Mapping[str, Shape | None]) -> Iterator[str]:
    """Students and teachers of other classes, labels, words or shapes."""
    for student in loss.learners:
        for teacher in loss.taught_by(student):
            own, said = given[student], given[teacher]
            if (
                own is not None
                and said is not None
                and (problem := output_mismatch(loss.soft.kind, own, said, student, teacher))
            ):
                yield problem
