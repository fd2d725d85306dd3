"""What a worker process is given to begin with."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.core.data import Batch
from trainwright.core.plan import Plan
from trainwright.datasets.dataset import Index
from trainwright.datasets.loading.loader import Fetcher


@dataclass(frozen=True, kw_only=True)
class WorkOrder:
    """All that a fresh process needs to take part.

    Attributes:
        job: the pickled job.
        run: name of the run in the store at `storage`.
        train: index of the training set, made once by the driver.
        evaluate: index of the evaluation set.
        outputs: names of the model's outputs that `predict` gives; empty gives all.
        identity: of job, data and plan: a driver takes over processes of its own alone.
        preemption_s: that a process lives on after a preemption notice.
        fetcher: delivers heavy transforms through Ray Data; None when the workers read for themselves.
        row: one of the training set, where a worker should not open what computes it.
    """

    job: bytes
    plan: Plan
    storage: str
    run: str
    train: Index
    evaluate: Index | None = None
    outputs: tuple[str, ...] = ()
    identity: str = ""
    preemption_s: float = 25.0
    fetcher: Fetcher | None = None
    evaluate_fetcher: Fetcher | None = None
    row: Batch | None = None
