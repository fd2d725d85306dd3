"""Choose how the training rows reach the workers, where the job leaves it open: by the time that transforms take."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from trainwright.core import formatting
from trainwright.core.errors import DataError, UserCodeError
from trainwright.core.job import Job
from trainwright.datasets.data_source import Arrays, Rows
from trainwright.datasets.dataset import Dataset, Index
from trainwright.datasets.ops.row_transforms import Counters
from trainwright.planning.decision import Decision
from trainwright.strategies.search.plan_ranking import estimate_of, is_asynchronous

_ROWS, _BYTES = 64, 64 * 2**20  # that are read to be timed, at most; one row at least
_TIMED_S = 0.2
_SLOWER = 1.25  # times as long as a step: from then on steps wait a fifth of their time for their rows
_GAIN = 1.5  # times as quick, at least: rows through the object store are copied twice more


def deliver_by_measuring(decision: Decision, job: Job, train: Index) -> Decision:
    """Return a decision whose rows Ray Data delivers, where workers could not transform them in time and others can.

    Rows are transformed here, for 0.2 s, where the cluster has CPUs enough beside the workers. Each worker transforms
    in one thread.
    """
    data, plan, cpus = job.train, decision.chosen, int(decision.data_cpus)
    open_to = job.data.delivery == "auto" and decision.delivery == "direct" and not (train.in_order or data.stateful)
    if not (open_to and data.transforms) or is_asynchronous(plan) or cpus < _GAIN * plan.workers:
        return decision
    row_s, step_s = _transform_s(data, train), estimate_of(plan).step_s
    own_s = row_s * plan.batch_size / plan.mesh.data_ranks
    if own_s < _SLOWER * step_s:
        return decision
    note = (
        f"train= is delivered by Ray Data: transforming the rows of a step takes a worker "
        f"{formatting.duration(own_s)}, a step {formatting.duration(step_s)}, and {cpus} CPUs are free; "
        "delivery='direct' leaves it to the workers"
    )
    return replace(decision, delivery="ray_data", chosen=plan.noted(note))


def _transform_s(data: Dataset, index: Index) -> float:
    """Return the seconds that a CPU takes to transform a row; 0 where these rows cannot be read or transformed."""
    rows = np.arange(max(min(_ROWS, index.rows, _BYTES // max(index.row_bytes, 1)), 1))
    try:
        arrays = data.reader(index, None).gather(rows, 0)
        first_s = _timed(data, arrays, rows[:1])  # opens what the transforms need
        first_s = min(first_s, _timed(data, arrays, rows[:1]))
        count = int(min(len(rows), max(_TIMED_S / max(first_s, 1e-9), 1)))
        return _timed(data, arrays, rows[:count]) / count
    except (DataError, UserCodeError):  # the workers tell of such rows, or skip them, as the job says
        return 0.0


def _timed(data: Dataset, arrays: Arrays, rows: Rows) -> float:
    given = {name: array[: len(rows)].copy() for name, array in arrays.items()}  # functions may change them in place
    begun = time.perf_counter()
    data.transform(given, rows, Counters(seed=0, epoch=0), None)
    return time.perf_counter() - begun
