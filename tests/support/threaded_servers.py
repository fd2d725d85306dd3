"""Servers and workers of the reference engine, each call in a thread of one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from tests.support.conformance import problems, reference_case
from tests.support.conformance.problems import PROBLEMS, Problem
from tests.support.reference import state as states
from tests.support.reference.independent import Independent
from trainwright.core.data import Feed, StepReport
from trainwright.core.topology import Generation, Group, Peer, StateTag, WorkUnit
from trainwright.strategies.ps.server_roles import LeadServer

FIRST, KEY = Generation(token=1, number=1), b"the key of the first"
SHARES, STEPS = 3, 12
Arrays = Mapping[str, Any]


class Cluster:
    """Servers and workers of one generation, each call in a thread of its own.

    Args:
        problem: what is trained.
        servers, workers: how many.
        job, plan: fields to replace.
    """

    def __init__(
        self, problem: Problem, servers: int, workers: int, job: Mapping[str, Any] | None = None, **plan: Any
    ) -> None:
        self.problem, self.pool = problem, ThreadPoolExecutor(32)
        self.spec = replace(reference_case.spec(problem), **(job or {}))
        own = problems.plan_of(problem, "", SHARES, 1, "independent")
        self.plan = replace(own, servers=servers, **{"consistency": "sync", **plan})
        self.deadline_s = 20.0
        self.first = 0  # step of the last segment
        self.servers = [Independent(host="127.0.0.1") for _ in range(servers)]
        self.peers = tuple(
            Peer(rank=rank, address=one.reserve("server"), role="server") for rank, one in enumerate(self.servers)
        )
        self.workers: list[Independent] = []
        self.every(self.servers, lambda one: one.form(self._group(self.servers.index(one), self.peers)))
        self.every(self.servers, lambda one: one.build(self.spec, self.plan))
        self.every(self.servers, lambda one: one.transfer(()))
        self.start = self.parameters()
        for _ in range(workers):
            self.join()

    def join(self) -> Independent:
        """A newcomer; nobody else needs to know of it."""
        one, rank = Independent(host="127.0.0.1"), len(self.servers) + len(self.workers)
        peer = Peer(rank=rank, address=one.reserve("worker"))
        others = [replace(peer, rank=other) for other in range(len(self.servers), rank)]
        one.form(self._group(rank, (*self.peers, *others, peer)))
        one.build(self.spec, self.plan)
        self.workers.append(one)
        return one

    def _group(self, rank: int, peers: tuple[Peer, ...]) -> Group:
        return Group(generation=FIRST, rank=rank, peers=peers, key=KEY, deadline_s=self.deadline_s)

    def feed(self, step: int, share: int) -> Feed:
        ids = problems.batches(self.problem, step + 1)[step]
        return problems.feeds(self.problem, self.plan, step, ids, problems.columns(self.problem))[share]

    def serve(
        self, until: int = STEPS, stop_requested: Callable[[], bool] = lambda: False
    ) -> list[Future[list[StepReport]]]:
        """Servers that let steps be taken, from when this returns."""
        self.first = self.servers[0].state.step or 0
        serving = [self.pool.submit(lambda one=one: list(one.serve(until, stop_requested))) for one in self.servers]
        lead = self.servers[0].server
        assert isinstance(lead, LeadServer)
        while not lead.serving and lead.step <= self.first and not serving[0].done():
            time.sleep(0.001)
        return serving

    def work(self, one: Independent, units: int = 10**6) -> Future[list[WorkUnit]]:
        """So many units, or all there are."""
        first = self.first
        return self.pool.submit(lambda: list(self._work(one, units, first)))

    def _work(self, one: Independent, units: int, first: int) -> Iterator[WorkUnit]:
        while units and (unit := one.lease(first)) is not None:
            for step in range(unit.step, unit.step + unit.steps):
                one.train_step(self.feed(step, unit.share))
            units -= 1
            yield unit

    def run(self, until: int = STEPS, stop_requested: Callable[[], bool] = lambda: False) -> list[StepReport]:
        """A segment of all servers and workers; its reports."""
        serving = self.serve(until, stop_requested)
        working = [self.work(one) for one in self.workers]
        for one in working:
            one.result(30.0)
        return self.reports(serving)

    def reports(self, serving: list[Future[list[StepReport]]]) -> list[StepReport]:
        found = [one.result(30.0) for one in serving]
        assert not any(found[1:]), "those are the first server's to give"
        return found[0]

    def state(self) -> states.ReferenceState:
        """What the servers hold together."""
        return states.merge_states(one.snapshot().state for one in self.servers)

    def parameters(self) -> Arrays:
        return {f"model/{name}": value.copy() for name, value in self.state().parameters.items()}

    def by_hand(self) -> tuple[list[float], list[float], Arrays]:
        """Losses, norms and parameters of a loop on one device."""
        ids = problems.batches(self.problem, STEPS)
        return reference_case.by_hand(self.problem, self.start, ids, problems.columns(self.problem))

    def tags(self) -> list[StateTag]:
        return [one._tag() for one in self.servers]

    def every(self, engines: list[Independent], call: Callable[[Independent], Any]) -> None:
        for future in [self.pool.submit(call, one) for one in engines]:
            future.result(30.0)

    def close(self) -> None:
        self.every([*self.workers, *self.servers], lambda one: one.leave())
        self.pool.shutdown()


@contextmanager
def cluster(problem: Problem | str, servers: int, workers: int, **more: Any) -> Iterator[Cluster]:
    own = Cluster(PROBLEMS[problem] if isinstance(problem, str) else problem, servers, workers, **more)
    try:
        yield own
    finally:
        own.close()


def assert_close(found: Arrays, wanted: Arrays) -> None:
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-12, err_msg=name)


class Files:
    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files = files or {}

    weights_only = False

    def names(self) -> tuple[str, ...]:
        return tuple(self.files)

    def read(self, name: str) -> bytes:
        return self.files[name]

    def stream(self, name: str) -> Iterator[memoryview]:
        yield memoryview(self.read(name))

    def write(self, name: str, *pieces: bytes) -> None:
        self.files[name] = b"".join(pieces)
