"""Work orders of a small table job."""

from __future__ import annotations

from typing import Any

import numpy as np

import trainwright as tw
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.worker.worker_config import WorkerConfig, pickle_job


def order_of(job: tw.Job) -> WorkerConfig:
    engine = "tests.support.reference.collective:Reference"
    plan = Plan(strategy="s", engine=engine, mesh=Mesh(), batch_size=2, placement=WorkerResources(cpus=1))
    return WorkerConfig(job=pickle_job(job), plan=plan, storage="memory://away", run="run", train=job.train.index())


def table_job(**fields: Any) -> tw.Job:
    data = tw.datasets.table({"x": np.zeros((4, 2), np.float32), "y": np.zeros(4, np.int64)})
    return tw.Job(
        name="run", model=object, optimizer=lambda parameters: None, loss=lambda outputs, targets: outputs,
        inputs="x", targets="y", train=data, **{"batch_size": 2, **fields},
    )  # fmt: skip
