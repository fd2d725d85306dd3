"""Run a parameter server and its workers, of the torch engine, as local processes without Ray.

The same processes serve one run after another.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from processes import start_processes
from torch import nn
from torch.nn import functional

from trainwright.core.data import Batch, Columns, Feed
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.core.topology import Generation, Group, Peer, Role, StalenessCounts
from trainwright.strategies.torch.engines.parameter_server import ParameterServer

HIDDEN, CLASSES = 128, 10
DEADLINE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of one run.

    Attributes:
        workers: of the run; a step has a unit of work for each of them.
        steps: of the run.
        share: samples of a unit.
        rate: the highest learning rate. It rises linearly for a tenth of the run, then falls linearly to 0. Adam has no
            momentum, because delayed gradients add momentum (Mitliagkas et al., 2016).
        seed: of the model and of the order of samples.
        consistency, local_steps, outer: as in a plan.
        pauses_s: by worker, how long each unit waits in place of a device's work; none by default.
    """

    workers: int
    steps: int
    share: int
    rate: float = 1e-3
    seed: int = 0
    consistency: str = "sync"
    local_steps: int = 1
    outer: str = ""
    pauses_s: tuple[float, ...] = ()

    @property
    def batch_size(self) -> int:
        """Samples of a step."""
        return self.share * self.workers

    @property
    def plan(self) -> Plan:
        """Return the plan, with one server."""
        return Plan(
            strategy="benchmark", engine="", mesh=Mesh(data=self.workers), batch_size=self.batch_size,
            placement=WorkerResources(cpus=1), topology="independent", servers=1, consistency=self.consistency,
            local_steps=self.local_steps, outer=self.outer,
        )  # fmt: skip

    def spec(self, pause_s: float) -> ModelSpec:
        """Return the model specification of a worker which pauses in each unit."""
        return ModelSpec(
            model=build_model, loss=partial(losses, pause_s), optimizer=partial(adam, self.rate),
            inputs=("image",), targets=("label",), metrics={"accuracy": accuracy}, schedule=triangular_schedule,
            total_steps=self.steps, seed=self.seed,
        )  # fmt: skip


def build_model() -> nn.Module:
    """Return two linear layers, 0.1 million parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def losses(pause_s: float, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of each sample, after a pause."""
    if pause_s:
        time.sleep(pause_s)
    return functional.cross_entropy(outputs, targets, reduction="none")


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return 1 for each sample whose class is predicted correctly, else 0."""
    return (outputs.argmax(1) == targets).float()


def adam(rate: float, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's Adam without momentum."""
    return torch.optim.Adam(parameters, lr=rate, betas=(0.0, 0.999))


def triangular_schedule(step: int, total: int) -> float:
    """Return the factor of the learning rate: it rises for a tenth of the run, then falls to 0."""
    return min(10.0 * (step + 1) / total, 1.0) * (1.0 - step / total)


@dataclass(frozen=True, kw_only=True)
class RunMeasurement:
    """Measurements of one run.

    Attributes:
        samples_s: samples a second, from the end of the first step to that of the last.
        accuracy: on the test set.
        staleness: of the updates that the server applied.
        steps_s: of each step but the first, from the end of the previous step.
        between_s: median of a worker's time from a push to its next pull: the lease and the batch.
    """

    samples_s: float
    accuracy: float
    staleness: StalenessCounts
    steps_s: tuple[float, ...]
    between_s: float


RunServers = Callable[[RunSettings], RunMeasurement]


@contextlib.contextmanager
def server_processes(train: Columns, test: Columns, count: int) -> Iterator[RunServers]:
    """Start processes, and yield a function that does a run with them and measures it.

    Args:
        train, test: columns `image` (rows, 28, 28) float32 and `label`.
        count: of processes; the first is the server, the others are workers.
    """
    numbers = itertools.count(1)
    with start_processes(*[partial(_serve, train, test)] * count) as pipes:
        yield lambda settings: _run(pipes[: 1 + settings.workers], settings, next(numbers))


def _run(pipes: Sequence[Connection], settings: RunSettings, number: int) -> RunMeasurement:
    """Run a server and its workers from the first step to the last, and measure the run."""
    roles: list[Role] = ["server", *(["worker"] * settings.workers)]
    addresses = _request(pipes, [("reserve", role) for role in roles])
    peers = tuple(
        Peer(rank=rank, address=address, role=role)
        for rank, (address, role) in enumerate(zip(addresses, roles, strict=True))
    )
    groups = [
        Group(
            generation=Generation(token=1, number=number), rank=rank, peers=peers, key=b"of this benchmark",
            deadline_s=DEADLINE_S,
        )
        for rank in range(len(roles))
    ]  # fmt: skip
    _request(pipes, [("form", group, settings) for group in groups])
    stamps, *gaps = _request(pipes, [("train", settings)] * len(pipes))
    staleness = _request(pipes[:1], [("staleness",)])[0]
    accuracy = _request(pipes[1:2], [("evaluate",)])[0]
    _request(pipes, [("leave",)] * len(pipes))
    return RunMeasurement(
        samples_s=(len(stamps) - 1) * settings.batch_size / (stamps[-1] - stamps[0]), accuracy=accuracy,
        staleness=staleness, steps_s=tuple(np.diff(stamps)), between_s=float(np.median(np.concatenate(gaps))),
    )  # fmt: skip


def _request(pipes: Sequence[Connection], requests: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Send each process the name of a method of `_EngineProcess` with its arguments, and return the replies of all."""
    for pipe, request in zip(pipes, requests, strict=True):
        pipe.send(request)
    return [pipe.recv() for pipe in pipes]


class _EngineProcess:
    """The engine of one process, and the requests that it serves."""

    def __init__(self, train: Columns, test: Columns) -> None:
        self._train, self._test = train, test
        self._engine = ParameterServer()

    def reserve(self, role: Role) -> Any:
        self._engine, self._is_server = ParameterServer(), role == "server"
        return self._engine.reserve(role)

    def form(self, group: Group, settings: RunSettings) -> None:
        self._engine.form(group)
        pause_s = 0.0 if self._is_server or not settings.pauses_s else settings.pauses_s[group.rank - 1]
        self._engine.build(settings.spec(pause_s), settings.plan)
        if self._is_server:
            self._engine.transfer(())
        else:
            self._engine.warm(self._make_unit_feed(settings, 0, 0))

    def train(self, settings: RunSettings) -> list[float]:
        """Train. A server returns when each step was complete, a worker the seconds from each unit to the next."""
        if self._is_server:
            return [time.monotonic() for _ in self._engine.serve(settings.steps, lambda: False)]
        gaps, ended_s = [], time.monotonic()
        while (unit := self._engine.lease(0)) is not None:
            for step in range(unit.step, unit.step + unit.steps):
                feed = self._make_unit_feed(settings, step, unit.share)
                gaps.append(time.monotonic() - ended_s)
                self._engine.train_step(feed)
                ended_s = time.monotonic()
        return gaps

    def staleness(self) -> StalenessCounts:
        return self._engine.staleness()

    def evaluate(self) -> float:
        rows = np.arange(len(self._test["label"]))
        feed = _make_feed(self._test, rows, 0, range(1), 1, len(rows))
        return float(self._engine.evaluate_step(feed).means()["accuracy"])

    def leave(self) -> None:
        self._engine.leave()

    def _make_unit_feed(self, settings: RunSettings, step: int, share: int) -> Feed:
        """Return the samples of one unit of a step."""
        rows = select_samples(len(self._train["label"]), settings, step)[share :: settings.workers]
        return _make_feed(self._train, rows, step, range(share, share + 1), settings.workers, settings.batch_size)


def select_samples(rows: int, settings: RunSettings, step: int) -> Any:
    """Return the row numbers of a step's samples, in the epoch's random order.

    Args:
        rows: of the data set.
        settings: of the run; its seed decides the order.
        step: from 0.
    """
    size = settings.batch_size
    in_epoch = rows // size
    return _shuffle_epoch(rows, settings.seed, step // in_epoch)[step % in_epoch * size : (step % in_epoch + 1) * size]


@functools.lru_cache(maxsize=4)
def _shuffle_epoch(rows: int, seed: int, epoch: int) -> Any:
    return np.random.default_rng((seed, epoch)).permutation(rows)


def _make_feed(data: Columns, rows: Any, step: int, ranks: range, total: int, size: int) -> Feed:
    columns = {name: column[rows] for name, column in data.items()}
    batch = Batch(columns=columns, weights=np.ones(len(rows)), samples=rows)
    return Feed(step=step, parts=((batch,),), data_ranks=ranks, total=total, rows=size)


def _serve(train: Columns, test: Columns, pipe: Connection) -> None:
    """Serve requests until the pipe is closed."""
    torch.set_num_threads(1)
    process = _EngineProcess(train, test)
    while True:
        method, *arguments = pipe.recv()
        pipe.send(getattr(process, method)(*arguments))
