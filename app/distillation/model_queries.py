"""Students and teachers alike, asked about rows of data: here or by a pool; what they cost, and how long they take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.core.data import Batch
from trainwright.core.model_profile import ModelProfile
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.ops.transforms import Counters
from trainwright.distillation.teachers import Lecturer, Standing, Teacher
from trainwright.planning.profile_model import profile_job
from trainwright.reporting import formatting

Array = npt.NDArray[Any]
Voice = Callable[[Batch], Array]
"""voice(batch) -> (rows, ...) what somebody says of the batch's rows."""

_HERE_BYTES = 2 << 30  # of parameters that a process takes which has other things to do
_WARM, _CALLS, _TIMED_S = 2, 30, 0.3


@dataclass(frozen=True, kw_only=True)
class Speaker:
    """A student or teacher, asked as a teacher is.

    Attributes:
        teacher: it.
        lecturer: it with its weights.
        profile: what its model costs, alone.
        student: whether it is one.
        stored: what it says of all rows, where that is computed.
    """

    teacher: Teacher
    lecturer: Lecturer
    profile: ModelProfile
    student: bool
    stored: Dataset | None = None

    @classmethod
    def of(cls, teacher: Teacher, data: Dataset, *, build: Callable[[], Any] | None = None) -> Speaker:
        """A teacher, or a student whose own model `build` makes. Raises as `Teacher.load` and `profile_job`."""
        lecturer = teacher.load()
        subject = teacher.bound(data, lecturer)
        job = subject.job.alone(model=build or subject.outline)
        profile = profile_job(job, data, data.index())
        return cls(teacher=teacher, lecturer=lecturer, profile=profile, student=build is not None)

    @property
    def name(self) -> str:
        """Of it."""
        return self.teacher.name

    @property
    def fits_here(self) -> bool:
        """Whether this process may hold it."""
        return self.profile.parameter_bytes <= _HERE_BYTES

    @property
    def numbers(self) -> float:
        """Of a row of its outputs; 1 where that is not known."""
        return max((layer.output_numbers for layer in self.profile.layers[-1:]), default=1.0) or 1.0

    def voice(self, standing: Standing | None) -> Voice:
        """What it says: what is stored, or what its model gives that is open here."""
        column = self.teacher.columns[0]
        if self.stored is not None:
            data = self.stored
            reader, counters = data.reader(data.index(), None), Counters(seed=0, epoch=0)
            return lambda batch: np.asarray(
                data.transform(reader.gather(batch.samples), batch.samples, counters, None)[column]
            )
        assert standing is not None, "nothing is stored"
        lesson = self.teacher.lesson
        return lambda batch: np.concatenate([part[column] for part in standing.told(batch, lesson)])

    def opened(self, batch: Batch) -> Standing:
        """Its model in this process. Raises as `Lecturer.teach`."""
        return self.lecturer.opened({name: column[:1] for name, column in batch.columns.items()})


def latencies(standing: Standing, batch: Batch) -> dict[str, float]:
    """Median seconds of a call with one row of a batch, and with all, from arrays to arrays."""
    found = {}
    for rows in dict.fromkeys((1, batch.rows)):
        columns = {name: column[:rows] for name, column in batch.columns.items()}
        part = Batch(columns=columns, weights=batch.weights[:rows], samples=batch.samples[:rows])
        found[str(rows)] = _seconds(lambda part=part: standing.outputs(part))  # type: ignore[misc]
    return found


def here() -> str:
    """What latencies are measured on: `CPU, 2 of 2 cores`."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    cores = os.cpu_count() or 1
    return f"the CPU of this machine, {formatting.count(int(threads) if threads.isdecimal() else cores, 'core')}"


def _seconds(call: Callable[[], object]) -> float:
    took: list[float] = []
    while len(took) < _WARM + 3 or (len(took) < _WARM + _CALLS and sum(took[_WARM:]) < _TIMED_S):
        began_s = time.perf_counter()
        call()
        took.append(time.perf_counter() - began_s)
    return median(took[_WARM:])
