"""The job of the exactly-once proof: every row is accounted for inside the training step.

20,000 rows; a filter and a one-to-many function make 20,000 again, each with an `id` of its own; then a heavy
transform on Ray Data, and one on an actor; or a Ray Dataset does all of that. The model's parameter `seen` takes a
gradient of one for each id that a step uses, so that what SGD has taken off it at the end says how often each id
counted in the committed state.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import nn

import trainwright as tw
from tests.support import torch_jobs
from tests.support.own_signals import signal_self
from trainwright.datasets import Dataset

ROWS, IDS, BATCH, SEED, RATE = 100_000, 100_000, 2000, 5, 1e-2
HELD_S = 100.0  # at most


class Account(nn.Module):
    """One number for each id, and how many steps were taken."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(IDS, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.seen[ids]


def kept(row: dict[str, Any]) -> bool:
    """Half of the rows."""
    return int(row["row"]) % 2 == 1


def twice(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Two ids of each row that is left: all of 0..IDS - 1 together."""
    yield {"id": row["row"] - 1}
    yield {"id": row["row"]}


class Doubler:
    """Stands for a model on an actor."""

    def __init__(self, marks: str, fatal: int) -> None:
        self.marks, self.fatal, self.factor = marks, fatal, 2

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        if self.fatal in columns["id"]:
            strike(Path(self.marks) / f"actor-{self.fatal}", signal.SIGKILL)
        return {"id": columns["id"], "double": columns["id"] * self.factor}


def dataset(marks: str, fatal: int) -> Dataset:
    """The data; the process of Ray Data's pool that first meets the id `fatal` is killed, and so is the actor."""

    def heavy(columns: dict[str, Any]) -> dict[str, Any]:
        if fatal in columns["id"]:
            strike(Path(marks) / f"pool-{fatal}", signal.SIGKILL)
        return columns

    rows = tw.datasets.table({"row": np.arange(ROWS)}).filter(kept).flat_map(twice)
    given = {"marks": marks, "fatal": fatal}
    return rows.map_batches(heavy, cpus=0.5).map_batches(Doubler, cpus=0.25, fn_constructor_kwargs=given)


def streamed(marks: str, fatal: int) -> Dataset:
    """The same ids from a Ray Dataset."""

    def heavy(columns: dict[str, Any]) -> dict[str, Any]:
        if fatal in columns["id"]:
            strike(Path(marks) / f"pool-{fatal}", signal.SIGKILL)
        return columns

    rows = ray.data.range(ROWS, override_num_blocks=20).rename_columns({"id": "row"})
    ids = rows.filter(kept).flat_map(twice).map_batches(heavy, num_cpus=0.5)
    given = {"marks": marks, "fatal": fatal}
    pool = ray.data.ActorPoolStrategy(size=1)
    return tw.datasets.from_ray(ids.map_batches(Doubler, num_cpus=0.25, compute=pool, fn_constructor_kwargs=given))


def strike(mark: Path, number: int) -> None:
    """Kill this process, once in the life of the mark, which is the proof."""
    try:
        with mark.open("x") as proof:
            proof.write(str(os.getpid()))
    except FileExistsError:
        return
    signal_self(number)


def released(marks: str, step: int) -> Path:
    """The file that those who are held at a step wait for."""
    return Path(marks) / f"go-{step}"


def make_step(kills: tuple[torch_jobs.Kill, ...], marks: str, held: int, storage: str) -> Any:
    """A step that accounts for its ids, dies where it is told to, and waits at one step until it is released.

    No step overtakes the checkpoints, so that none of them is passed over.
    """

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        account: Any = getattr(model, "module", model)
        now = int(account.steps)
        if account.training:
            torch_jobs.keep_pace(storage, now)
            account.steps += 1
        for kill in kills:
            if kill.rank == torch_jobs.rank() and kill.step == now and account.training:
                kill.strike()
        for _ in range(int(HELD_S / 0.05)) if now == held and account.training else ():
            if released(marks, held).exists():
                break
            threading.Event().wait(0.05)
        assert bool((batch["double"] == 2 * batch["id"]).all()), "columns of different rows"
        values = model(batch["id"])
        return values - values.detach()

    return step


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain descent: what is taken off a parameter is RATE times the sum of its gradients."""
    return torch.optim.SGD(parameters, lr=RATE)


def job(
    folder: str, marks: str, *, kills: tuple[torch_jobs.Kill, ...] = (), fatal: int = -1, held: int = -1,
    source: Callable[[str, int], Dataset] = dataset, **fields: Any,
) -> tw.Job:  # fmt: skip
    """One pass: 50 steps of 400 ids, a checkpoint after each 5; all wait at step `held` until it is `released`."""
    return tw.Job(
        **{
            "name": "faulty",
            "model": Account,
            "optimizer": sgd,
            "step": make_step(kills, marks, held, folder),
            "train": source(marks, fatal),
            "batch_size": BATCH,
            "seed": SEED,
            "checkpoint_steps": 5,
            "storage": folder,
            "workers": 2,
            "hang_deadline_s": 120.0,
            "preflight": False,  # faults are in the job's functions, and are for workers alone
            **fields,
        }
    )
