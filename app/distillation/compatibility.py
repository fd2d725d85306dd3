"""Whether students and teachers go together, as far as a row of the data tells, before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainwright.core.errors import JobError
from trainwright.distillation.output_signature import Outline, compared, outline
from trainwright.distillation.spec import Distillation
from trainwright.distillation.teachers import Lecturer, Teacher
from trainwright.strategies.distillation.layer_projection import Shape, unlike
from trainwright.strategies.distillation.losses import Distilled


def check(
    distillation: Distillation, loss: Distilled, teachers: tuple[Teacher, ...], lecturers: Mapping[str, Lecturer]
) -> None:
    """Raise JobError for models that cannot teach each other. What only a step can tell, its first one does."""
    job = distillation.student
    index = job.train.index()
    students = {name: outline(job.replace(model=build), index) for name, build in distillation.builders.items()}
    known = {teacher.name: outline(teacher.asked(job.train), index) for teacher in teachers}
    outlines = {**known, **students}
    outputs = dict.fromkeys(students, loss.soft.output) | {teacher.name: teacher.output for teacher in teachers}
    given = {name: _compared(loss, each.shapes, outputs[name]) for name, each in outlines.items()}
    problems = [*_mixed(loss, outlines), *_unlike(loss, given)]
    if problems:
        raise JobError(problems)
    for name in loss.inline:
        if not known[name].looks:
            lecturers[name].teach(job.train.row(index).columns)


def _compared(loss: Distilled, shapes: Mapping[str, Shape], name: str) -> Shape | None:
    """Of the output that is compared; None where that is not known."""
    shape = compared(shapes, name)
    if shape is None or loss.soft.kind != "language_model":
        return shape
    return (*(None for _ in shape[:-1]), shape[-1])  # how many tokens a row has follows from its batch


def _mixed(loss: Distilled, outlines: Mapping[str, Outline]) -> Iterator[str]:
    """Teachers in the step of a student of another framework."""
    own = outlines[loss.students[0]].framework
    for name in loss.inline:
        if outlines[name].framework != own:
            yield (
                f"teacher {name!r} is a model of {outlines[name].framework} and cannot run in the step of a student of "
                f'{own}: use way="offline" or "online"'
            )


def _unlike(loss: Distilled, given: Mapping[str, Shape | None]) -> Iterator[str]:
    """Students and teachers of other classes, labels, words or shapes."""
    for student in loss.learners:
        for teacher in loss.taught_by(student):
            own, said = given[student], given[teacher]
            if (
                own is not None
                and said is not None
                and (problem := unlike(loss.soft.kind, own, said, student, teacher))
            ):
                yield problem
