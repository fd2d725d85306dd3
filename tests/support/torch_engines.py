"""Jobs, feeds and engines for the tests of the torch engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from trainwright.core.data import Batch, Feed
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.core.topology import Generation, Group, Peer
from trainwright.strategies.torch.engines.base import OneDevice

GENERATION = Generation(token=1, number=1)


class Net(nn.Module):
    """Two layers, with whatever a test wants in between."""

    def __init__(self, middle: Callable[[], nn.Module] = nn.Tanh, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, dtype=dtype)
        self.middle = middle()
        self.second = nn.Linear(8, 3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.middle(self.first(x)))


def double() -> nn.Module:
    return Net(dtype=torch.float64)


def batch_normed() -> nn.Module:
    return Net(middle=lambda: nn.BatchNorm1d(8))


def dropping() -> nn.Module:
    return Net(middle=lambda: nn.Dropout(0.5))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(1) == targets


def spec(**changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "optimizer": adam,
        "inputs": ("x",),
        "targets": ("y",),
        "total_steps": 100,
        "seed": 3,
    }
    return ModelSpec(**{**fields, **changes})


def plan(ranks: int = 1, **changes: Any) -> Plan:
    fields: dict[str, Any] = {"strategy": "test", "engine": "", "batch_size": 12, "placement": WorkerResources(cpus=1)}
    return Plan(**{"mesh": Mesh(data=ranks), **fields, **changes})


def batch(rows: int = 12, first: int = 0, dtype: type = np.float32, **columns: Any) -> Batch:
    random = np.random.default_rng(first)
    held = {"x": random.normal(size=(rows, 4)).astype(dtype), "y": random.integers(0, 3, rows), **columns}
    return Batch(columns=held, weights=np.ones(rows), samples=np.arange(first, first + rows))


def feed(*parts: Batch, step: int = 0, rank: int = 0, total: int = 1, **changes: Any) -> Feed:
    given = parts or (batch(first=step * 100),)
    rows = changes.pop("rows", sum(int((one.weights > 0).sum()) for one in given) * total)
    return Feed(step=step, parts=(given,), data_ranks=range(rank, rank + 1), total=total, rows=rows, **changes)


def one_device(job: ModelSpec | None = None, how: Plan | None = None) -> OneDevice:
    engine = OneDevice()
    peer = Peer(rank=0, address=engine.reserve("worker"))
    engine.form(Group(generation=GENERATION, rank=0, peers=(peer,)))
    engine.build(job or spec(), how or plan())
    return engine


class Files:
    """A checkpoint's files in memory."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def write(self, name: str, *pieces: bytes | memoryview) -> None:
        self.files[name] = b"".join(pieces)

    weights_only = False

    def names(self) -> tuple[str, ...]:
        return tuple(self.files)

    def read(self, name: str) -> bytes:
        return self.files[name]

    def stream(self, name: str) -> Iterator[memoryview]:
        yield memoryview(self.read(name))


def saved(engine: Any) -> Files:
    files = Files()
    engine.save(engine.snapshot(), files)
    return files


class Chosen(Net):
    """Uses its second layer in some batches only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) if bool((x[0, 0] < 50).item()) else self.first(x)[:, :3]


class Weighing(Net):
    """Uses its second layer if its first one's parameters say so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.first.weight.sum().item() < 50 else self.first(x)[:, :3]


def crash(*_: Any) -> Any:
    raise LookupError("crashed on purpose")
