"""A distillation as a job: what teachers say becomes columns of its data, and its loss one of labels and these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainwright.core.job import Job
from trainwright.datasets.dataset import Dataset
from trainwright.distillation.compatibility import check
from trainwright.distillation.spec import Distillation
from trainwright.distillation.target_cache import stored_targets
from trainwright.distillation.teachers import Lecturer, Teacher
from trainwright.strategies.distillation.losses import Distilled, judged
from trainwright.strategies.distillation.multi_student import Students

Beside = Callable[[Dataset], Dataset]


@dataclass(frozen=True, kw_only=True)
class Composed:
    """What is trained.

    Attributes:
        job: with the teachers in its data or in its loss.
        loss: of the students.
        notes: what went wrong and was mended while teachers were asked.
    """

    job: Job
    loss: Distilled
    notes: tuple[str, ...] = ()


def composed(distillation: Distillation, *, verbose: bool = False) -> Composed:
    """The job that a distillation comes to, its way settled (`choosing.settled`).

    Offline, all that teachers have to say is computed where it is missing.

    Raises:
        JobError: students, teachers and their layers do not go together.
        TrainwrightError: as `stored_targets` and `Teacher.load`.
    """
    job, teachers = distillation.student, taught_layers(distillation)
    lecturers = {teacher.name: teacher.load() for teacher in teachers}
    loss = loss_of(distillation, teachers, lecturers)
    check(distillation, loss, teachers, lecturers)
    notes: list[str] = []
    beside = _beside(distillation, teachers, lecturers, verbose, notes.append)
    train = beside(job.train)
    changes: dict[str, Any] = {
        "train": train,
        "evaluate": None if job.evaluate is None else beside(job.evaluate),
        "targets": loss.targets,
        "loss": loss,
        "metrics": judged(job.metrics, loss),
    }
    model = _model(distillation, loss, lecturers, train)
    return Composed(job=job.replace(**changes, model=model), loss=loss, notes=tuple(notes))


def model_of(distillation: Distillation) -> Callable[[], Any]:
    """The model of the job that it comes to, whichever way teachers are asked. Raises as `composed`."""
    inline = distillation.replace(way="inline")  # nothing is computed of the data but a row
    teachers = taught_layers(inline)
    lecturers = {teacher.name: teacher.load() for teacher in teachers}
    return _model(inline, loss_of(inline, teachers, lecturers), lecturers, inline.student.train)


def taught_layers(distillation: Distillation) -> tuple[Teacher, ...]:
    """The teachers, each with the layers of its that are matched."""
    teachers = distillation.teachers
    matched = [(match.of or teachers[0].name, match.teacher) for match in distillation.loss.matches if teachers]
    found = []
    for teacher in teachers:
        layers = (*teacher.layers, *(layer for of, layer in matched if of == teacher.name))
        found.append(teacher.replace(layers=tuple(dict.fromkeys(layers))))
    return tuple(found)


def loss_of(distillation: Distillation, teachers: tuple[Teacher, ...], lecturers: Mapping[str, Lecturer]) -> Distilled:
    """The students' loss. Raises JobError with all that does not go together."""
    job, inline = distillation.student, distillation.way == "inline"
    labels, mask = job.wanted_targets, distillation.loss.mask
    told = [name for teacher in teachers for name in (teacher.wanted if inline else teacher.columns)]
    return Distilled(
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


class Speaking:
    """A teacher in an actor of its own: opened once, asked for one batch after the other."""

    def __init__(self, lecturer: Lecturer) -> None:
        self._lecturer = lecturer

    def __call__(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """The columns, and the teacher's beside them."""
        return self._lecturer(columns)


def _beside(
    distillation: Distillation,
    teachers: tuple[Teacher, ...],
    lecturers: Mapping[str, Lecturer],
    verbose: bool,
    note: Callable[[str], object],
) -> Beside:
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

    ways: Mapping[str, Beside] = {
        "offline": offline,
        "online": lambda data: online(data, distillation, lecturers),
        "inline": lambda data: data,
    }
    return ways[distillation.way]


def online(data: Dataset, distillation: Distillation, lecturers: Mapping[str, Lecturer]) -> Dataset:
    """A data set with what teachers in actors of their own say of its rows."""
    for lecturer in lecturers.values():
        data = data.map_batches(
            Speaking, cpus=distillation.cpus, gpus=distillation.gpus, fn_constructor_args=(lecturer,)
        )
    return data


def builder_of(distillation: Distillation, loss: Distilled) -> Callable[[], Any]:
    """The model of the class, without bridges; of one student that gives no more than its outputs, its own."""
    job = distillation.student
    if not loss.wrapped:
        return job.model
    return Students(builders=distillation.builders, loss=loss)


def _model(
    distillation: Distillation, loss: Distilled, lecturers: Mapping[str, Lecturer], train: Dataset
) -> Callable[[], Any]:
    """The model of the class, with the bridges that its matches need."""
    job, students = distillation.student, builder_of(distillation, loss)
    if not isinstance(students, Students) or not loss.soft.matches:
        return students
    row = train.row(train.index())
    told = {name: each for inline in loss.inline for name, each in lecturers[inline].teach(row.columns).items()}
    return students.fitted({**job.collation(row), **told}, job.arguments, job.keywords)
