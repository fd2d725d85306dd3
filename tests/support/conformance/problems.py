"""What is trained in the suite: small problems with exact answers, and an independent deal of their rows to ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainwright.core.data import Batch, Columns, Feed
from trainwright.core.plan import Mesh, Plan, WorkerResources

Ids = npt.NDArray[np.int64]
FEATURES, HIDDEN, CLASSES = 6, 8, 4
RATE, CLIP = 0.1, 0.05


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One training problem.

    Attributes:
        batch_size: global.
        rows: of the data set; an epoch's last batch is short where `batch_size` does not divide it.
        accumulation: micro-batches of a data rank.
        loss: `cross_entropy` of target `y`; `weighted`: the same as Terms with the weights of column `w`;
            `tokens`: squared error to column `t`, (rows, k), as Terms with the weights of column `m`.
        optimizer: `sgd` with momentum 0.9, `plain` without, or `adam`, at RATE; of TensorFlow `averaged`, whose
            weights become their moving averages after the last step.
        inputs: `x`, or `x` and `z`, which the model joins.
        silent: batches of each epoch in which all weights are 0 (`weighted` only).
        zero_rank_of: with n, every row at a position p = 1 (mod n) of its batch has weight 0 (`weighted` only).
        flat: the model returns rows * classes rows.
    """

    name: str
    batch_size: int = 24
    rows: int = 120
    accumulation: int = 1
    loss: str = "cross_entropy"
    optimizer: str = "sgd"
    inputs: tuple[str, ...] = ("x",)
    clip: bool = False
    schedule: bool = False
    dropout: float = 0.0
    silent: tuple[int, ...] = ()
    zero_rank_of: int = 0
    dtype: str = "float64"
    flat: bool = False
    seed: int = 7
    steps: int = 50

    @property
    def features(self) -> int:
        """Features of the joined inputs."""
        return FEATURES * len(self.inputs)

    @property
    def targets(self) -> tuple[str, ...]:
        """Target columns."""
        return {"cross_entropy": ("y",), "weighted": ("y", "w"), "tokens": ("t", "m")}[self.loss]


PROBLEMS = {
    problem.name: problem
    for problem in (
        Problem(name="dividing"),
        Problem(name="ragged", batch_size=23, rows=100, accumulation=2, inputs=("x", "z")),
        Problem(name="empty_shares", batch_size=3, rows=31, accumulation=2, optimizer="adam"),
        Problem(name="weights", batch_size=22, rows=101, accumulation=2, loss="weighted", optimizer="adam"),
        Problem(name="clip", batch_size=23, accumulation=3, clip=True),
        Problem(name="schedule", batch_size=13, rows=50, optimizer="adam", schedule=True, inputs=("x", "z")),
        Problem(name="tokens", batch_size=14, rows=60, loss="tokens", accumulation=2),
        Problem(name="silent_step", loss="weighted", optimizer="adam", silent=(1, 3), clip=True),
    )
}


def schedule(step: int, total: int) -> float:
    """Up over the first ten steps, then down to a tenth."""
    return min((step + 1) / 10, 1.0 - 0.9 * step / total)


def batches(problem: Problem, steps: int | None = None) -> list[Ids]:
    """The rows of each global batch, epoch after epoch."""
    ids: list[Ids] = []
    while len(ids) < (problem.steps if steps is None else steps):
        ids.extend(np.arange(start, min(start + problem.batch_size, problem.rows))
                   for start in range(0, problem.rows, problem.batch_size))  # fmt: skip
    return ids[: problem.steps if steps is None else steps]


def columns(problem: Problem) -> Columns:
    """The data set."""
    random = np.random.default_rng(11)
    rows, dtype = problem.rows, np.dtype(problem.dtype)
    y = random.integers(0, CLASSES, rows)
    x = random.normal(size=(rows, FEATURES)) + np.eye(CLASSES, FEATURES)[y]
    weights = random.uniform(0.0, 3.0, rows) * (random.random(rows) > 0.2)
    for batch in _epoch(problem):
        if problem.zero_rank_of:
            weights[batch[1 :: problem.zero_rank_of]] = 0.0
    for silent in problem.silent:
        weights[_epoch(problem)[silent]] = 0.0
    return {
        "x": x.astype(dtype),
        "z": random.normal(size=(rows, FEATURES)).astype(dtype),
        "y": y,
        "w": weights.astype(dtype),
        "t": random.normal(size=(rows, CLASSES)).astype(dtype),
        "m": (random.random((rows, CLASSES)) > 0.4).astype(dtype),
    }


def plan_of(problem: Problem, engine: str, workers: int, devices: int, topology: str) -> Plan:
    """The plan of a case."""
    return Plan(
        strategy="conformance",
        engine=engine,
        mesh=Mesh(data=workers * devices),
        batch_size=problem.batch_size,
        placement=WorkerResources(cpus=1),
        accumulation=problem.accumulation,
        devices_per_worker=devices,
        topology=topology,  # type: ignore[arg-type]
    )


def feeds(problem: Problem, plan: Plan, step: int, ids: Ids, data: Columns) -> list[Feed]:
    """Each worker's feed of one global batch, or each share's: the row at position i goes to data rank i mod n."""
    total = plan.mesh.data_ranks
    answer = []
    alone = plan.topology == "independent"  # who leases a share is fed it
    for worker in range(plan.workers if alone else plan.processes):
        ranks = range(worker, worker + 1) if alone else plan.feed_of(worker).data_ranks
        parts = tuple(tuple(_part(ids, rank, total, plan.accumulation, data)) for rank in ranks)
        answer.append(Feed(step=step, parts=parts, data_ranks=ranks, total=total, rows=len(ids)))
    return answer


def rows_of(feed: Feed) -> Ids:
    """Row numbers of a feed in the order in which an engine goes through them."""
    return np.concatenate([batch.samples for part in feed.parts for batch in part])


def _part(ids: Ids, rank: int, total: int, accumulation: int, data: Columns) -> Iterator[Batch]:
    """The micro-batches of one data rank; an empty one repeats a real row with weight 0."""
    for share in np.array_split(ids[rank::total], accumulation):
        filled = share if len(share) else ids[:1]
        weights = np.full(len(filled), 1.0 if len(share) else 0.0)
        yield Batch(columns=_take(data, filled), weights=weights, samples=filled.astype(np.int64))


def _take(data: Columns, ids: Ids) -> Mapping[str, npt.NDArray[np.generic]]:
    return {name: array[ids] for name, array in data.items()}


def _epoch(problem: Problem) -> list[Ids]:
    return batches(problem, -(-problem.rows // problem.batch_size))
