"""Work orders of a small table job."""

from __future__ import annotations

from typing import Any

import numpy as np

import trainwright as tw
from trainwright.core.plan import Mesh, Placement, Plan
from trainwright.strategies.data_parallel import ENGINES
from trainwright.worker.job_pickle import pack
from trainwright.worker.worker_config import WorkOrder


def order_of(job: tw.Job) -> WorkOrder:
    plan = Plan(strategy="s", engine=ENGINES["reference"], mesh=Mesh(), batch_size=2, placement=Placement(cpus=1))
    return WorkOrder(job=pack(job), plan=plan, storage="memory://away", run="run", train=job.train.index())


def table_job(**fields: Any) -> tw.Job:
    data = tw.datasets.table({"x": np.zeros((4, 2), np.float32), "y": np.zeros(4, np.int64)})
    return tw.Job(
        name="run", model=object, optimizer=lambda parameters: None, loss=lambda outputs, targets: outputs,
        inputs="x", targets="y", train=data, batch_size=2, **fields,
    )  # fmt: skip
