"""What a student and its teachers cost beside each other: parameters, their size, and seconds of a batch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from trainwright.core.data import Batch
from trainwright.core.job import Job
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.sampling.sampler import Rows
from trainwright.distillation.model_queries import Speaker, latencies
from trainwright.distillation.search_result import Model
from trainwright.distillation.spec import STUDENT
from trainwright.distillation.teachers import Teacher


def footprints(student: Job, teachers: Iterable[Teacher]) -> tuple[Model, tuple[Model, ...]]:
    """Of a student that a run trained, and of its teachers, asked for rows of the student's evaluation set."""
    data = student.evaluate
    samples = np.arange(min(student.batch_size, data.index().rows))
    own = Teacher(name=STUDENT, job=student)
    return _footprint(own, data, samples), tuple(_footprint(teacher, data, samples) for teacher in teachers)


def _footprint(teacher: Teacher, data: Dataset, samples: Rows) -> Model:
    """Without latencies where this process cannot hold it."""
    speaker = Speaker.of(teacher, data)
    timed: dict[int, float] = {}
    if speaker.fits_here:
        columns = data.read(data.index(), samples, teacher.input_columns or None)
        batch = Batch(columns=columns, weights=np.ones(len(samples)), samples=samples)
        timed = {int(rows): seconds for rows, seconds in latencies(speaker.opened(batch), batch).items()}
    profile = speaker.profile
    return Model(
        name=teacher.name, parameters=profile.parameters, size_bytes=profile.parameter_bytes, latency_s=timed
    )  # fmt: skip
