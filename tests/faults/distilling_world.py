"""A distillation whose parts leave marks, stand still and die where they are told to; see test_distilling.py.

The teacher computes in float64 and says float32, so that what it says of a row is the same bits in any batch: one
unbroken run, whichever way its targets came, is what all broken ones are compared with.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import trainwright as tw
from tests.support import exactly_once_job, torch_jobs
from tests.support.processes import wait_for
from trainwright.inference import batch_inference
from trainwright.reporting.progress_bar import RowProgress

ROWS, WIDTH, CLASSES, BATCH, EPOCHS = 1200, 8, 4, 100, 2
STEPS = ROWS // BATCH * EPOCHS
ASKED = 64  # rows that the teacher is given at once, offline
NAME = "faulty"


@dataclass(frozen=True)
class Marks:
    """A folder that all processes see."""

    folder: str

    def path(self, name: str) -> Path:
        return Path(self.folder, name)

    def hold(self, name: str) -> None:
        """Stand still until the test releases it."""
        self.path(name).touch()
        wait_for(self.path(f"go-{name}").exists)

    def held(self, name: str) -> bool:
        return self.path(name).exists()

    def release(self, name: str) -> None:
        self.path(f"go-{name}").touch()

    def teachers(self) -> set[int]:
        """Processes in which the teacher was asked."""
        return {int(file.name.partition("-")[2]) for file in Path(self.folder).glob("asked-*")}

    def asked(self) -> Counter[int]:
        """How often the teacher was asked about each row."""
        return Counter(int(row) for file in Path(self.folder).glob("asked-*") for row in file.read_text().split())


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens in a teacher's process that is asked about a row: once, and not before `after` was released."""

    row: int
    how: str  # kill | stop | hold
    after: str = ""

    @property
    def name(self) -> str:
        return f"{self.how}-{self.row}"

    def strike(self, marks: Marks) -> None:
        if self.after and not marks.path(f"go-{self.after}").exists():
            return
        if self.how == "hold":
            marks.hold(self.name)
        else:
            number = signal.SIGKILL if self.how == "kill" else signal.SIGSTOP
            exactly_once_job.strike(marks.path(self.name), number)


@dataclass(frozen=True, kw_only=True)
class Script:
    """All that is to go wrong.

    Attributes:
        teacher: faults of its processes.
        student: signals to workers.
        hold: step before which the workers stand still, as `student`.
    """

    teacher: tuple[Fault, ...] = ()
    student: tuple[torch_jobs.Kill, ...] = ()
    hold: int = -1


class Big(nn.Module):
    """The teacher."""

    def __init__(self, marks: Marks, script: Script) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        shape = (WIDTH, CLASSES)
        self.weight = nn.Parameter(torch.randn(shape, generator=generator, device="cpu", dtype=torch.float64))
        self.marks, self.script = marks, script

    def forward(self, x: torch.Tensor, id: torch.Tensor) -> torch.Tensor:
        if not id.is_meta:
            rows = id.tolist()
            with self.marks.path(f"asked-{os.getpid()}").open("a") as file:
                file.write(" ".join(map(str, rows)) + "\n")
            for fault in self.script.teacher:
                if fault.row in rows:
                    fault.strike(self.marks)
        return (3 * torch.tanh(x.double() @ self.weight)).float()


class Small(nn.Module):
    """The student: counts its steps."""

    def __init__(self, marks: Marks, script: Script) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, CLASSES))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.marks, self.script = marks, script

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not x.is_meta:
            now = int(self.steps)
            self.steps += 1
            for kill in self.script.student:
                if (kill.rank, kill.step) == (torch_jobs.rank(), now):
                    kill.strike()
            if now == self.script.hold:
                self.marks.hold("student")
        return self.body(x)


@dataclass(frozen=True)
class Build:
    """() -> a model."""

    kind: type
    marks: Marks
    script: Script

    def __call__(self) -> nn.Module:
        model: nn.Module = self.kind(self.marks, self.script)
        return model


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def table() -> dict[str, np.ndarray]:
    """Rows; `id` is the row number."""
    x = np.random.default_rng(7).normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"id": np.arange(ROWS), "x": x, "y": x[:, :CLASSES].argmax(1).astype(np.int64)}


def distillation(folder: Path, way: Any, script: Script = Script(), **fields: Any) -> tw.Distillation:
    """24 steps of two workers, a checkpoint after each 5, neither spares nor keepers. Marks lie beside the runs."""
    marks = Marks(str(folder.parent))
    student = tw.Job(
        **{
            "name": NAME, "model": Build(Small, marks, script), "loss": cross_entropy, "optimizer": momentum,
            "inputs": "x", "targets": "y", "train": tw.datasets.table(table()), "batch_size": BATCH, "epochs": EPOCHS,
            "seed": 3, "workers": 2, "strategy": "data_parallel", "checkpoint_steps": 5, "storage": str(folder),
            "spares": 0, "keeper_s": 0, "hang_deadline_s": 30.0, "preflight": False, **fields,
        }
    )  # fmt: skip
    big = tw.Teacher(name="big", model=Build(Big, marks, script), inputs=("x", "id"), batch_size=ASKED)
    soft = tw.SoftLoss(alpha=0.3, temperature=3.0)
    return tw.Distillation(student=student, teachers=(big,), loss=soft, way=way, keep="fp32", cpus=0.5)


class Heard(RowProgress):
    """Leaves a mark of the process when it first hears of rows that a pool has computed."""

    mark: Path

    def add(self, rows: int) -> None:
        super().add(rows)
        self.mark.touch()


def heard(marks: Marks, pid: int | None) -> Path:
    """The mark of a driver that has heard of a batch."""
    return marks.path(f"heard-{pid}")


def drive(address: str, folder: str, way: str, script: Script) -> None:
    """A driver, as the target of a process."""
    os.environ["RAY_ADDRESS"] = address
    Heard.mark = heard(Marks(str(Path(folder).parent)), os.getpid())
    batch_inference.RowProgress = Heard  # type: ignore[misc]
    tw.distill(distillation(Path(folder), way, script))
