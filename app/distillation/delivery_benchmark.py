"""A way to ask the teachers, tried out: a short run on some rows, in storage of its own, of which nothing stays."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self
from uuid import uuid4

import numpy as np

from trainwright.core.errors import HangError
from trainwright.core.events import Event, Steps
from trainwright.core.job import Job
from trainwright.datasets.data_source import Index, TableSource
from trainwright.datasets.dataset import Dataset
from trainwright.distillation.distillation_job import compose_job, teachers_with_layers
from trainwright.distillation.distillation_spec import Delivery, Distillation
from trainwright.distillation.target_cache import stored_targets
from trainwright.planning.job_preparation import decide_plan, prepare
from trainwright.runtime.controller import RunController
from trainwright.runtime.run_handle import Run
from trainwright.storage.object_store import open_store

SECONDS, STEPS = 6.0, 20  # of steps that are timed, at least
_ROWS, _ROWS_BYTES = 8192, 64 * 2**20  # of the data, at most
_STALL_S = 300.0  # for the first step, and for those that are timed
_WARM_STEPS = 10
_AHEAD_CHUNKS, _CHUNK_ROWS = 12, 1024  # taken while actors get ahead, which slows the steps: the rest shows their pace
AHEAD_S = 15.0  # of steps, in which they are ahead as far as they can be
_MOST_ROWS = 2**21  # of all epochs


@dataclass(frozen=True, kw_only=True)
class DeliveryTiming:
    """What was seen.

    Attributes:
        step_s: of a step, all of its waiting included.
        wait_s: of it, waiting for data.
        start_s: from the call to the first step, without the computing of targets.
        pool_s: until the first rows of targets were there; 0 where none are computed.
        row_s: of a row of targets from then on, by all processes.
    """

    step_s: float
    wait_s: float
    start_s: float
    pool_s: float = 0.0
    row_s: float = 0.0


class _DeliveryTrials:
    """Tries ways on the same rows, which are read into memory once; use `delivery_trials`.

    Args:
        distillation: of any way.
        index: of its training set.
        storage: for what the trials write.
        verbose: show Ray's own output.
    """

    def __init__(self, distillation: Distillation, index: Index, storage: str, *, verbose: bool) -> None:
        job = distillation.student
        self.rows = _rows(index, job.batch_size)
        self._verbose = verbose
        student = job.replace(
            train=_part(job.train, index, self.rows), evaluate=None, metrics={}, storage=storage,
            epochs=-(-_MOST_ROWS // self.rows), epoch_samples=None, spares=0, probe=False,
            checkpoint_steps=_MOST_ROWS, max_loss_ratio=None,
        )  # fmt: skip
        self._distillation = distillation.replace(student=student, targets=None)

    def of(self, way: Delivery) -> DeliveryTiming:
        """Try a way. Raises TrainwrightError as its run does."""
        student = self._distillation.student.replace(name=f"rehearsal-{way}")
        tried = self._distillation.replace(way=way, student=student)
        pace = _Pace()
        if way == "offline":
            for teacher in teachers_with_layers(tried):
                stored_targets(
                    teacher, student.train, folder=tried.folder, keep=tried.keep, range_rows=max(1, self.rows // 8),
                    verbose=self._verbose, meter=pace,
                )  # fmt: skip
        ahead = _AHEAD_CHUNKS * max(_CHUNK_ROWS, student.batch_size) if way == "online" else 0
        begun = time.monotonic()
        watch = _run(compose_job(tried, verbose=self._verbose).job, ahead)
        assert watch.first_s is not None, "steps were timed"
        step_s, wait_s = watch.timed
        return DeliveryTiming(
            step_s=step_s, wait_s=wait_s, start_s=watch.first_s - begun, pool_s=pace.started_s, row_s=pace.row_s
        )  # fmt: skip


@contextmanager
def delivery_trials(distillation: Distillation, index: Index, *, verbose: bool = False) -> Iterator[_DeliveryTrials]:
    """Trials in a folder of the job's storage that is removed when they are over."""
    folder = f"rehearsals-{uuid4().hex[:8]}"
    store = open_store(distillation.student.storage)
    try:
        yield _DeliveryTrials(distillation, index, store.uri_of(folder), verbose=verbose)
    finally:
        store.delete_folder(folder)


@dataclass(kw_only=True)
class _Pace:
    """Hears how targets are computed: by one teacher after the other.

    Attributes:
        started_s: until the first rows of each, all teachers' together.
        row_s: seconds of a row from then on, likewise.
    """

    started_s: float = 0.0
    row_s: float = 0.0
    _news: list[tuple[float, int]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._news = [(time.monotonic(), 0)]
        return self

    def __exit__(self, *exc: object) -> None:
        if len(self._news) > 1:
            (begun_s, _), (first_s, _), *later = self._news
            rows = sum(count for _, count in later)
            self.started_s += first_s - begun_s
            self.row_s += (later[-1][0] - first_s) / rows if rows > 0 else 0.0

    def add(self, rows: int) -> None:
        """Rows are there."""
        self._news.append((time.monotonic(), rows))

    def note(self, text: str) -> None:
        """Nothing is said of it."""


class _Watch:
    """Hears of the steps of a run until there are enough. Its events come on another thread.

    Args:
        ahead_rows: that say nothing of the pace, nor do more seconds of steps than actors need to get ahead.
    """

    def __init__(self, ahead_rows: int) -> None:
        self._ahead_rows = ahead_rows
        self._step_s: list[float] = []
        self._wait_s: list[float] = []
        self._rows, self._seconds = 0, 0.0
        self.first_s: float | None = None

    def on(self, event: Event) -> None:
        """Take note of what steps took; those of the warm-up are left out."""
        if not isinstance(event, Steps) or not event.step:
            return
        self.first_s = self.first_s or time.monotonic() - sum(event.step_s[1:])
        for number, rows, step_s, wait_s in zip(event.step, event.samples, event.step_s, event.wait_s, strict=True):
            self._rows, self._seconds = self._rows + rows, self._seconds + step_s * (number > 1)
            if number > _WARM_STEPS and (self._rows > self._ahead_rows or self._seconds > AHEAD_S):
                self._step_s.append(step_s)
                self._wait_s.append(wait_s)

    def close(self) -> None:
        """The run has ended."""

    @property
    def enough(self) -> bool:
        """Whether the pace is known."""
        return len(self._step_s) >= STEPS and sum(self._step_s) >= SECONDS

    @property
    def timed(self) -> tuple[float, float]:
        """Mean seconds of a step, and of its waiting for data."""
        return statistics.fmean(self._step_s), statistics.fmean(self._wait_s)


def _run(job: Job, ahead_rows: int) -> _Watch:
    """Run a job, of which nothing is shown, until its pace is known."""
    prepared = prepare(job, fresh=True)
    decision = decide_plan(prepared)
    session, watch = RunController(prepared, decision, fresh=True), _Watch(ahead_rows)
    session.listen(watch)
    run, until = Run(job, session, decision), time.monotonic() + _STALL_S
    try:
        while not watch.enough:
            if run.wait(0.1):
                break
            if time.monotonic() > until:
                raise HangError(
                    f"{STEPS} steps took more than {_STALL_S:g} s", where=job.name, remedy="name a way: way="
                )
    finally:
        run.stop(now=True)
        run.wait()
    return watch


def _rows(index: Index, batch_size: int) -> int:
    """How many are tried: a few batches, and as many more as are small."""
    small = min(_ROWS, _ROWS_BYTES // max(index.row_bytes, 1))
    return min(index.rows, max(4 * batch_size, small))


def _part(data: Dataset, index: Index, rows: int) -> Dataset:
    """The first rows of a data set, in memory; transforms are applied to them as to all."""
    arrays: dict[str, Any] = data.reader(index, None).gather(np.arange(rows, dtype=np.int64))
    return Dataset(source=TableSource(arrays=arrays), transforms=data.transforms)
