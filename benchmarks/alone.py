"""Servers and workers of the torch engine as plain processes, which take one run after the other."""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from trainwright.core.data import Batch, Columns, Feed
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.core.topology import Generation, Group, Peer, Role, StalenessCounts
from trainwright.strategies.torch.engines.parameter_server import ParameterServer

HIDDEN, CLASSES = 128, 10
ANSWER_S, DEADLINE_S = 600.0, 30.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One run.

    Attributes:
        workers: a step has a unit for each of them.
        steps: of the run.
        share: samples of a unit.
        rate: the highest learning rate of Adam without momentum: delay brings momentum of its own (Mitliagkas et al.,
            2016). It rises for a tenth of the run and falls to 0, both by a straight line.
        consistency, local_steps, outer: as a plan has them.
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
        """On one server."""
        return Plan(
            strategy="benchmark", engine="", mesh=Mesh(data=self.workers), batch_size=self.batch_size,
            placement=WorkerResources(cpus=1), topology="independent", servers=1, consistency=self.consistency,
            local_steps=self.local_steps, outer=self.outer,
        )  # fmt: skip

    def spec(self, pause_s: float) -> ModelSpec:
        """The job, of a worker that pauses."""
        return ModelSpec(
            model=build_model, loss=functools.partial(losses, pause_s), optimizer=functools.partial(adam, self.rate),
            inputs=("image",), targets=("label",), metrics={"accuracy": accuracy}, schedule=triangle,
            total_steps=self.steps, seed=self.seed,
        )  # fmt: skip


def build_model() -> nn.Module:
    """Two linear layers, 0.1 million parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def losses(pause_s: float, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One loss per sample, after a pause."""
    if pause_s:
        time.sleep(pause_s)
    return functional.cross_entropy(outputs, targets, reduction="none")


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """1 where the class is right."""
    return (outputs.argmax(1) == targets).float()


def adam(rate: float, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's Adam, without momentum."""
    return torch.optim.Adam(parameters, lr=rate, betas=(0.0, 0.999))


def triangle(step: int, total: int) -> float:
    """Up for a tenth, and down to 0."""
    return min(10.0 * (step + 1) / total, 1.0) * (1.0 - step / total)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a run came to.

    Attributes:
        samples_s: samples a second, from the end of the first step to that of the last.
        accuracy: on the test set.
        staleness: of what was applied.
        steps_s: of each step but the first, from the end of the one before.
        between_s: median of a worker's time from a push to its next pull: the lease and the batch.
    """

    samples_s: float
    accuracy: float
    staleness: StalenessCounts
    steps_s: tuple[float, ...]
    between_s: float


class Crew:
    """Processes that have imported all they need.

    Args:
        train, test: columns `image` (rows, 28, 28) float32 and `label`.
        count: of processes.
    """

    def __init__(self, train: Columns, test: Columns, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(count)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=_live, args=(theirs, train, test), daemon=True) for _, theirs in pairs
        ]
        for process in self._processes:
            process.start()
        self._generation = 0

    def run(self, setup: Setup) -> Ended:
        """A server and its workers, from the beginning to the end."""
        self._generation += 1
        roles: list[Role] = ["server", *(["worker"] * setup.workers)]
        pipes = self._pipes[: len(roles)]
        generation = Generation(token=1, number=self._generation)
        addresses = _asked(pipes, [("reserve", generation, role) for role in roles])
        peers = tuple(
            Peer(rank=rank, address=address, role=role)
            for rank, (address, role) in enumerate(zip(addresses, roles, strict=True))
        )
        groups = [
            Group(generation=generation, rank=rank, peers=peers, key=b"of this benchmark", deadline_s=DEADLINE_S)
            for rank in range(len(roles))
        ]
        _asked(pipes, [("form", group, setup) for group in groups])
        stamps, *gaps = _asked(pipes, [("train", setup)] * len(pipes))
        staleness = _asked(pipes[:1], [("staleness",)])[0]
        found = _asked(pipes[1:2], [("evaluate",)])[0]
        _asked(pipes, [("leave",)] * len(pipes))
        samples_s = (len(stamps) - 1) * setup.batch_size / (stamps[-1] - stamps[0])
        return Ended(
            samples_s=samples_s, accuracy=found, staleness=staleness, steps_s=tuple(np.diff(stamps)),
            between_s=float(np.median(np.concatenate(gaps))),
        )  # fmt: skip

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _asked(pipes: Sequence[Connection], said: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Tell each process something, and wait for all answers."""
    for pipe, one in zip(pipes, said, strict=True):
        pipe.send(one)
    answers = []
    for pipe in pipes:
        if not pipe.poll(ANSWER_S):
            raise TimeoutError(f"no answer to {said[0][0]} within {ANSWER_S:g} s")
        answers.append(pipe.recv())
    return answers


class _Rank:
    """One process's engine."""

    def __init__(self, train: Columns, test: Columns) -> None:
        self._train, self._test = train, test
        self._engine = ParameterServer()

    def reserve(self, generation: Generation, role: Role) -> Any:
        self._engine, self._serving = ParameterServer(), role == "server"
        return self._engine.reserve(generation, role)

    def form(self, group: Group, setup: Setup) -> None:
        self._engine.form(group)
        pause_s = 0.0 if self._serving or not setup.pauses_s else setup.pauses_s[group.rank - 1]
        self._engine.build(setup.spec(pause_s), setup.plan)
        if self._serving:
            self._engine.transfer(())
        else:
            self._engine.warm(self._feed(setup, 0, 0))

    def train(self, setup: Setup) -> list[float]:
        """A server gives when each step was complete, a worker how long it took from each unit to the next."""
        if self._serving:
            return [time.monotonic() for _ in self._engine.serve(setup.steps, lambda: False)]
        gaps, ended_s = [], time.monotonic()
        while (unit := self._engine.lease(0)) is not None:
            for step in range(unit.step, unit.step + unit.steps):
                feed = self._feed(setup, step, unit.share)
                gaps.append(time.monotonic() - ended_s)
                self._engine.train_step(feed)
                ended_s = time.monotonic()
        return gaps

    def staleness(self) -> StalenessCounts:
        return self._engine.staleness()

    def evaluate(self) -> float:
        rows = np.arange(len(self._test["label"]))
        feed = _feed(self._test, rows, 0, range(1), 1, len(rows))
        return float(self._engine.evaluate_step(feed).means()["accuracy"])

    def leave(self) -> None:
        self._engine.leave()

    def _feed(self, setup: Setup, step: int, share: int) -> Feed:
        """A share of a step: the epoch's samples in an order by the seed."""
        rows = order_of(len(self._train["label"]), setup, step)[share :: setup.workers]
        return _feed(self._train, rows, step, range(share, share + 1), setup.workers, setup.batch_size)


def order_of(rows: int, setup: Setup, step: int) -> Any:
    """A step's samples, of so many: each epoch's are in an order by the seed."""
    size = setup.batch_size
    in_epoch = rows // size
    return _order(rows, setup.seed, step // in_epoch)[step % in_epoch * size : (step % in_epoch + 1) * size]


@functools.lru_cache(maxsize=4)
def _order(rows: int, seed: int, epoch: int) -> Any:
    return np.random.default_rng((seed, epoch)).permutation(rows)


def _feed(data: Columns, rows: Any, step: int, ranks: range, total: int, size: int) -> Feed:
    columns = {name: column[rows] for name, column in data.items()}
    batch = Batch(columns=columns, weights=np.ones(len(rows)), samples=rows)
    return Feed(step=step, parts=((batch,),), data_ranks=ranks, total=total, rows=size)


def _live(pipe: Connection, train: Columns, test: Columns) -> None:
    """Do what is asked until nobody asks any more."""
    torch.set_num_threads(1)
    rank = _Rank(train, test)
    while True:
        try:
            verb, *arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(rank, verb)(*arguments))
