"""The independent topology: ranks step alone against servers. Pushes count once; workers die and join as they like."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.conformance import problems, reference_case
from tests.conformance.harness import Outcome, Pool, Rank
from tests.conformance.problems import PROBLEMS
from trainwright.core.data import Feed
from trainwright.core.errors import PeerLost
from trainwright.core.group import Address, Generation, Group, Peer, Role
from trainwright.strategies.reference.model import Mlp

ENGINE = "trainwright.strategies.reference.independent:Independent"
GENERATION = Generation(token=1, number=1)
PROBLEM = replace(PROBLEMS["dividing"], steps=20)
DEADLINE_S = 10.0


class Cluster:
    """Servers that serve, and workers that come and go, all in one generation."""

    def __init__(self, pool: Pool, servers: int, problem: problems.Problem = PROBLEM, **fields: Any) -> None:
        self._pool, self.problem = pool, problem
        self.spec = replace(reference_case.spec(problem), **fields)
        self.plan = problems.plan_of(problem, ENGINE, 2, 1, "independent")
        self.servers = pool.take("reference", servers)
        self._peers = [Peer(rank=rank, address=self._reserve(one, "server"), role="server")
                       for rank, one in enumerate(self.servers)]  # fmt: skip
        for rank, one in enumerate(self.servers):
            self.enter(one, rank)
        self._files = {}
        for one in self.servers:
            self._files.update(one.call("files"))
            one.send("serve")

    def _reserve(self, one: Rank, role: Role) -> Address:
        one.call("open", ENGINE)
        return one.call("reserve", GENERATION, role)

    def enter(self, one: Rank, rank: int, peers: tuple[Peer, ...] = ()) -> None:
        group = Group(generation=GENERATION, rank=rank, peers=peers or tuple(self._peers), deadline_s=DEADLINE_S)
        one.call("form", group)
        one.call("build", self.spec, self.plan)

    def worker(self) -> Rank:
        """A newcomer: the others need not know of it."""
        (one,) = self._pool.take("reference", 1)
        address = self._reserve(one, "worker")
        rank = len(self.servers)
        self.enter(one, rank, (*self._peers, Peer(rank=rank, address=address, role="worker")))
        return one

    def feeds(self, steps: range, *, wish: bool = False) -> list[Feed]:
        """What the first of two workers is fed; `wish` in the last step."""
        data, ids = problems.columns(self.problem), problems.batches(self.problem, steps.stop)
        fed = [problems.feeds(self.problem, self.plan, step, ids[step], data)[0] for step in steps]
        return [*fed[:-1], replace(fed[-1], wish=wish)]

    def end(self, workers: list[Rank]) -> dict[str, np.ndarray]:
        """One worker wishes to stop, all leave, and the servers return by themselves. Their parameters and slots."""
        workers[0].call("train", self.feeds(range(1), wish=True))
        for one in workers:
            one.call("leave")
        outcomes = [one.outcome(2 * DEADLINE_S) for one in self.servers]
        assert outcomes == [Outcome()] * len(outcomes)
        files: dict[str, bytes] = {}
        for one in self.servers:
            files.update(one.call("files"))
            one.call("leave")
        self._pool.give_back("reference", [*workers, *self.servers])
        self.final = files
        return reference_case.state(files)

    @property
    def fresh(self) -> dict[str, np.ndarray]:
        """The servers' state before anything was pushed."""
        return reference_case.state(self._files)


@contextmanager
def cluster(pool: Pool, servers: int, problem: problems.Problem = PROBLEM, **fields: Any) -> Iterator[Cluster]:
    """Servers that are killed where the test fails. `fields` replace those of the job."""
    own = Cluster(pool, servers, problem, **fields)
    try:
        yield own
    except BaseException:
        for one in own.servers:
            one.kill()
        raise


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_one_worker_alone_is_plain_training(pool: Pool, servers: int) -> None:
    problem = replace(PROBLEM, schedule=True, clip=True, optimizer="adam")
    with cluster(pool, servers, problem) as own:
        start = {name: value for name, value in own.fresh.items() if name.startswith("model/")}
        worker = own.worker()
        feeds = own.feeds(range(PROBLEM.steps))
        reports = worker.call("train", feeds)
        state = _without_last_step(own, worker)
    ids = [problems.rows_of(feed) for feed in feeds]
    losses, _, parameters = reference_case.by_hand(problem, start, ids, problems.columns(problem))
    assert [report.loss for report in reports] == pytest.approx(losses, rel=1e-9)
    for name, value in parameters.items():
        assert np.allclose(state[name], value, rtol=1e-9, atol=1e-9), name


@pytest.mark.parametrize("servers", [1, 2])
def test_every_push_of_every_worker_is_applied_once(pool: Pool, servers: int) -> None:
    """Adam counts the updates on each server."""
    with cluster(pool, servers, replace(PROBLEM, optimizer="adam")) as own:
        workers = [own.worker() for _ in range(3)]
        for one in workers:
            one.send("train", own.feeds(range(PROBLEM.steps)))
        for one in workers:
            assert len(one.outcome().value) == PROBLEM.steps
        own.end(workers)
    for data in own.final.values():
        assert reference_case.state({"": data})["optimizer/count"] == 3 * PROBLEM.steps + 1


def test_a_killed_worker_disturbs_nobody_and_another_joins(pool: Pool) -> None:
    with cluster(pool, 2, replace(PROBLEM, optimizer="adam")) as own:
        steady, doomed = own.worker(), own.worker()
        steady.send("train", own.feeds(range(30)))
        doomed.send("train", own.feeds(range(6)), "kill")
        assert doomed.outcome().dead
        doomed.kill()
        newcomer = own.worker()
        assert len(newcomer.call("train", own.feeds(range(4)))) == 4
        assert len(steady.outcome().value) == 30
        own.end([steady, newcomer])
    counts = {int(reference_case.state({"": data})["optimizer/count"]) for data in own.final.values()}
    assert counts == {30 + 5 + 4 + 1}, "the killed worker's last step was not pushed, all others once"


def test_workers_converge_on_a_convex_problem(pool: Pool) -> None:
    """Least squares with a linear model: pushes in any order end at the one minimum."""
    problem = replace(PROBLEM, loss="tokens", batch_size=60, rows=60, steps=1000)
    data = problems.columns(problem)
    with cluster(pool, 2, problem, model=functools.partial(Mlp, (problems.FEATURES, problems.CLASSES))) as own:
        own.plan = problems.plan_of(problem, ENGINE, 1, 1, "independent")
        workers = [own.worker() for _ in range(2)]
        for one in workers:
            one.send("train", own.feeds(range(problem.steps)))
        for one in workers:
            assert len(one.outcome().value) == problem.steps
        state = own.end(workers)
    inputs = np.hstack([data["x"], np.ones((60, 1))])
    for column in range(problems.CLASSES):
        kept = data["m"][:, column] > 0
        best = np.linalg.lstsq(inputs[kept], data["t"][kept, column], rcond=None)[0]
        found = [*state["model/layers.0.weight"][:, column], state["model/layers.0.bias"][column]]
        assert np.allclose(found, best, atol=1e-6)


def test_servers_are_not_spared(pool: Pool) -> None:
    """A dead server ends the workers' steps with PeerLost, soon."""
    own = Cluster(pool, 2)
    worker = own.worker()
    worker.call("train", own.feeds(range(2)))
    own.servers[1].kill()
    worker.send("train", own.feeds(range(2)))
    assert isinstance(worker.outcome(2 * DEADLINE_S).error, PeerLost)
    worker.kill()
    own.servers[0].kill()


def test_a_server_without_workers_returns_at_its_deadline(pool: Pool) -> None:
    (server,) = pool.take("reference", 1)
    server.call("open", ENGINE)
    address = server.call("reserve", GENERATION, "server")
    peers = (Peer(rank=0, address=address, role="server"),)
    server.call("form", Group(generation=GENERATION, rank=0, peers=peers, deadline_s=0.5))
    server.send("serve")
    assert server.outcome(DEADLINE_S) == Outcome()
    server.call("leave")
    pool.give_back("reference", [server])


def _without_last_step(own: Cluster, worker: Rank) -> dict[str, np.ndarray]:
    """End with a wish in a step of weight 0, which pushes the wish and nothing else."""
    (last,) = own.feeds(range(1), wish=True)
    mute = tuple(tuple(replace(batch, weights=np.zeros(batch.rows)) for batch in part) for part in last.parts)
    own.feeds = lambda *_, **__: [replace(last, parts=mute)]  # type: ignore[method-assign]
    return own.end([worker])
