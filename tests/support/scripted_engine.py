"""An engine whose answers a test scripts, and workers that run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import trainwright as tw
from tests.support.work_orders import order_of
from trainwright.core.plan import Plan
from trainwright.core.topology import Address, Capabilities, Generation, Group, Peer, Role, StateTag
from trainwright.driver.messages import ReserveRequest, RestorePlan, SkippedBatch
from trainwright.storage.object_store import Store
from trainwright.worker.worker import Worker
from trainwright.worker.worker_config import WorkerConfig

FIRST = Generation(token=1, number=1)
PEER = Peer(rank=0, address=Address(host="127.0.0.1", port=1))


class ScriptedEngine:
    """An engine that trains nothing; a test sets the methods that it needs, such as `train_step`, on the class."""

    capabilities = Capabilities()

    def reserve(self, role: Role) -> Address:
        return PEER.address

    def form(self, group: Group) -> StateTag:
        return StateTag(step=None)

    def prefetcher(self) -> None:
        """Nothing is copied ahead."""

    def build(self, *_: Any) -> StateTag:
        return StateTag(step=None)

    def warm(self, *_: Any) -> None:
        pass

    def transfer(self, *_: Any) -> StateTag:
        return StateTag(step=0)

    def verify(self) -> None:
        pass

    def peak_memory(self) -> None:
        """It has no device."""

    def interrupt(self, *_: Any) -> bool:
        return True

    def leave(self) -> None:
        pass


def scripted(order: WorkerConfig, **changes: Any) -> WorkerConfig:
    """Return the order with the scripted engine in its plan, and other changes of the plan."""
    engine = f"{ScriptedEngine.__module__}:{ScriptedEngine.__name__}"
    return replace(order, plan=replace(order.plan, engine=engine, **changes))


def scripted_worker(monkeypatch: pytest.MonkeyPatch, job: tw.Job, **changes: Any) -> Worker:
    """Return a worker of a table job on the scripted engine, whose store is never asked whether files exist."""
    monkeypatch.setattr(Store, "exists", lambda self, path: False)
    order = scripted(order_of(job), **changes)
    return Worker(replace(order, evaluate=job.evaluate.index()) if job.evaluate is not None else order)


def join(worker: Worker, plan: Plan | None = None, *, rank: int = 0, size: int = 1) -> None:
    """Have a worker reserve and form a group of some size."""
    worker.reserve(ReserveRequest(generation=FIRST, plan=plan))
    peers = tuple(replace(PEER, rank=number) for number in range(size))
    worker.form(Group(generation=FIRST, rank=rank, peers=peers))


def restore(worker: Worker, step: int = 0, passing: Sequence[SkippedBatch] = ()) -> None:
    """Bring a worker that has joined to a step."""
    worker.restore(RestorePlan(step=step, source="initial", passing=tuple(passing)))
