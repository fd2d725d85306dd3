"""What every benchmark trains: one small network on random numbers in memory, the same for ours and for the peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    import trainwright as tw

ROWS, FEATURES, HIDDEN, CLASSES = 8192, 256, 768, 10
WIDE = 1024
BATCH_SIZE, WORKERS, THREADS = 64, 2, 1
RATE = 1e-3
OptimizerOf = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def build_model() -> nn.Module:
    """Three linear layers, 0.8 million parameters."""
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )


def build_deep() -> nn.Module:
    """Eight linear layers, 6.6 million parameters, for stages."""
    hidden = [layer for _ in range(6) for layer in (nn.ReLU(), nn.Linear(WIDE, WIDE))]
    return nn.Sequential(nn.Linear(FEATURES, WIDE), *hidden, nn.ReLU(), nn.Linear(WIDE, CLASSES))


def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One loss per sample."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def adam(parameters: Iterable[nn.Parameter], *, fused: bool | None = None) -> torch.optim.Optimizer:
    """torch's AdamW."""
    return torch.optim.AdamW(parameters, lr=RATE, fused=fused)


def data(rows: int = ROWS) -> dict[str, npt.NDArray[Any]]:
    """Columns x (rows, 256) float32 and y (rows,) int64."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, FEATURES), dtype=np.float32)
    return {"x": x, "y": x[:, :CLASSES].argmax(1).astype(np.int64)}


def batches(rows: int, rank: int, workers: int = WORKERS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A rank's share of each global batch, for ever: tensors in memory by a shuffled index, as in a loop by hand."""
    columns = data(rows)
    x, y = torch.from_numpy(columns["x"]), torch.from_numpy(columns["y"])
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(rows, generator=generator)
        for start in range(0, rows - BATCH_SIZE + 1, BATCH_SIZE):
            own = order[start + rank : start + BATCH_SIZE : workers]
            yield x[own], y[own]


def job(storage: Path | str, *, epochs: int = 1, rows: int = ROWS, **fields: Any) -> tw.Job:
    """The same as a job of trainwright, without a checkpoint but the last."""
    import trainwright as tw  # here, so that a peer's process does not pay for it

    described: dict[str, Any] = {
        "name": "benchmark",
        "model": build_model,
        "loss": losses,
        "optimizer": adam,
        "train": tw.datasets.table(data(rows)),
        "inputs": "x",
        "targets": "y",
        "batch_size": BATCH_SIZE,
        "epochs": epochs,
        "workers": WORKERS,
        "checkpoint_steps": epochs * rows,
        "storage": str(storage),
    }
    return tw.Job(**{**described, **fields})
