"""Small torch jobs for tests, with faults injected as data.

The model carries a parameter `seen`, one number a sample, to which the loss adds a gradient of one where the sample is
used: what SGD has taken off it at the end proves, inside the step and through every reduction, transfer and checkpoint,
how often each sample counted in the committed state.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import trainwright as tw
from tests.support.finished_runs import log_entries, told
from tests.support.own_signals import signal_self
from trainwright.core import events
from trainwright.datasets.loading.batch_loader import make_schedule
from trainwright.storage.object_store import open_store

ROWS, WIDTH, CLASSES = 203, 64, 4


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A signal to `rank` when it reaches `point` of step `step` (from 0), once in the life of `folder`.

    For `upload`, `step` is that of the checkpoint, the number of steps completed before it, or of the first one after
    that: where a checkpoint is still being written, those that fall due are passed over.
    """

    rank: int
    step: int
    point: str = "forward"  # forward | synchronisation | optimizer | upload
    folder: str = ""
    number: int = signal.SIGKILL

    @property
    def mark(self) -> Path:
        """The proof: made by the victim right before its death; holds its process id."""
        return Path(self.folder) / f"killed-{self.point}-{self.rank}-{self.step}"

    def strike(self) -> None:
        """Kill this process, unless that was done before."""
        try:
            with self.mark.open("x") as proof:
                proof.write(str(os.getpid()))
        except FileExistsError:
            return
        signal_self(self.number)


@dataclass(frozen=True, kw_only=True)
class Awaited:
    """So many events of a kind; of Placed, those of spares alone where `spare` is set."""

    kind: Any
    number: int = 1
    spare: bool = False


class Net(nn.Module):
    """Layers wide enough for several buckets of DDP, dropout, and the account of samples."""

    def __init__(self, width: int = 600) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, CLASSES),
        )
        self.seen = nn.Parameter(torch.zeros(ROWS, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def data() -> dict[str, np.ndarray]:
    """Rows that can be learned; `id` is the row number."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    y = (x[:, :CLASSES].argmax(1)).astype(np.int64)
    return {"id": np.arange(ROWS), "x": x, "y": y}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Momentum for the network, none for the account."""
    net, account = [], []
    for parameter in parameters:
        (account if parameter.shape == (ROWS,) else net).append(parameter)
    return torch.optim.SGD([{"params": net, "momentum": 0.9}, {"params": account, "momentum": 0.0}], lr=1e-2)


def rates(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A scheduler that computes each rate from the last one: the network's fall, the account's stays."""
    return torch.optim.lr_scheduler.MultiplicativeLR(optimizer, [lambda step: 0.97, lambda step: 1.0])


def rank() -> int:
    """This process's rank; 0 without a group."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def make_model(kills: tuple[Kill, ...]) -> Callable[[], nn.Module]:
    """A builder that also arms the faults of uploads and of the optimizer in the worker's process."""

    def build() -> nn.Module:
        net = Net()
        if any(kill.point == "upload" for kill in kills):
            _arm_upload([kill for kill in kills if kill.point == "upload"])
        return net

    return build


def _arm_upload(kills: list[Kill]) -> None:
    from trainwright.storage.checkpoints import CheckpointWriter

    write = CheckpointWriter.write

    def torn(self: Any, name: str, *pieces: Any) -> None:
        write(self, name, *pieces)
        for kill in kills:
            if rank() == kill.rank and step_written(self) >= kill.step:
                kill.strike()

    CheckpointWriter.write = torn


def step_written(writer: Any) -> int:
    """Of the checkpoint that a writer writes."""
    return int(writer._folder.rpartition("/")[2].partition("-")[0])


def keep_pace(storage: str, step: int, every: int = 5, run: str = "faulty") -> None:
    """Wait until the driver knows that the checkpoint due before `step` is committed, so that none goes by.

    A driver tells of its own commits a moment after the log names them; what falls due in between is passed over.
    A driver that takes a run over knows what the log names by then. Nobody may have told of that.
    """
    tick, patience = threading.Event(), 3000
    while step and step % every == 0 and not _saved(storage, run, step):
        tick.wait(0.02)
        patience -= 1
        assert patience, f"the checkpoint of step {step} was not committed within a minute"


def _saved(storage: str, run: str, step: int) -> bool:
    saved: Any = told(storage, run, events.Checkpointed)
    if any(event.step >= step for event in saved):
        return True
    taken_over = (entry for entry in log_entries(open_store(storage), run) if entry.kind == "acquire")
    return any(checkpoint.step >= step for entry in taken_over for checkpoint in entry.checkpoints)


def await_told(storage: str, awaited: Awaited) -> None:
    """Wait until the run has told so many events of a kind."""
    tick, patience = threading.Event(), 3000
    while sum(not awaited.spare or event.spare for event in told(storage, "faulty", awaited.kind)) < awaited.number:
        tick.wait(0.02)
        patience -= 1
        assert patience, f"not within a minute: {awaited}"


def make_step(
    kills: tuple[Kill, ...], paced: str = "", awaits: Mapping[int, Awaited] | None = None, storage: str = ""
) -> Callable[[Any, Any], torch.Tensor]:
    """A step that accounts for its samples and dies where it is told to.

    With `paced`, the storage's folder, no step overtakes the checkpoints; `awaits` says what must have been told before
    which step.
    """

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        net: Any = getattr(model, "module", model)
        now = int(net.steps)
        if net.training:
            if paced:
                keep_pace(paced, now)
            if awaits and now in awaits:
                await_told(storage, awaits[now])
            net.steps += 1
        due = [kill for kill in kills if kill.rank == rank() and kill.step == now and net.training]
        for kill in due:
            if kill.point == "forward":
                kill.strike()
        losses = functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        for kill in due:
            if kill.point == "synchronisation":
                next(net.body.parameters()).register_hook(lambda gradient, kill=kill: kill.strike())
        return losses + net.seen[batch["id"]] - net.seen[batch["id"]].detach()

    return step


def job(
    folder: Path | str,
    kills: tuple[Kill, ...] = (),
    *,
    paced: bool = False,
    awaits: Mapping[int, Awaited] | None = None,
    **fields: Any,
) -> tw.Job:
    """A job of 3 epochs of 9 steps (203 samples by 24, the last batch short), a checkpoint each 5 steps,
    neither spares nor keepers."""
    average = tw.WeightAverage(decay=0.9, start=1)
    plain = "optimizer" in fields or fields.get("strategy") in ("parameter_server", "local_sgd")
    carried = {} if plain else {"schedule": rates, "weight_average": average}
    return tw.Job(
        **carried
        | {
            "name": "faulty",
            "model": make_model(kills),
            "optimizer": sgd,
            "step": make_step(kills, str(folder) if paced else "", awaits, str(folder)),
            "train": tw.datasets.table(data()),
            "batch_size": 24,
            "epochs": 3,
            "seed": 3,
            "checkpoint_steps": 5,
            "storage": str(folder),
            "workers": 2,
            "spares": 0,
            "keeper_s": 0,
            "hang_deadline_s": 60.0,
            "preflight": False,  # faults are in the job's functions, and are for workers alone
            **fields,
        }
    )


class JobOrder:
    """A batch sampler: batches of 7 in the order in which a job of `job` reads its table."""

    def __init__(self) -> None:
        index = tw.datasets.table(data()).index()
        self.order = make_schedule(index, batch_size=24, epochs=3, seed=3).order
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(range(0, ROWS, 7))

    def __iter__(self) -> Iterator[list[int]]:
        rows = self.order.rows_at(self.epoch, np.arange(ROWS)).tolist()
        yield from (rows[first : first + 7] for first in range(0, ROWS, 7))


def loader() -> Any:
    """The rows of `job` in the same order, from a process of torch's DataLoader."""
    table = data()
    rows: Any = [{name: array[row] for name, array in table.items()} for row in range(ROWS)]
    return torch.utils.data.DataLoader(rows, batch_sampler=JobOrder(), num_workers=1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


class F1:
    """Of the second class; counts, so that merging is exact."""

    def __init__(self) -> None:
        self.counts = np.zeros(3, np.int64)  # found, said, there

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        said, there = outputs.argmax(1) == 1, targets == 1
        self.counts += np.array([int((said & there).sum()), int(said.sum()), int(there.sum())])

    def merge(self, other: F1) -> None:
        self.counts += other.counts

    def compute(self) -> float:
        found, said, there = self.counts.tolist()
        return 2 * found / max(said + there, 1)
