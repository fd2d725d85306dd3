"""The engine of parameter servers, with servers and workers in one process: what travels, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.unit.test_torch_bank import JOBS, Odd, facts
from tests.unit.torch_jobs import (
    GENERATION,
    Chosen,
    Files,
    accuracy,
    adam,
    batch,
    double,
    feed,
    loss,
    one_device,
    plan,
    spec,
)  # fmt: skip
from trainwright.core.data import Feed, StepReport
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.group import Group, Peer, Role
from trainwright.core.plan import Plan
from trainwright.strategies.torch.parameter_server import ParameterServer


class Party:
    """Servers, and one worker that computes all shares of each step."""

    def __init__(self, how: Plan) -> None:
        self.engines = [ParameterServer() for _ in range(how.servers + 1)]
        self.servers, self.worker = self.engines[:-1], self.engines[-1]

    def start(self, job: ModelSpec, how: Plan) -> None:
        roles: list[Role] = ["server"] * how.servers + ["worker"]
        peers = tuple(
            Peer(rank=rank, address=engine.reserve(GENERATION, role), role=role)
            for rank, (engine, role) in enumerate(zip(self.engines, roles, strict=True))
        )
        for rank, engine in enumerate(self.engines):
            engine.form(Group(generation=GENERATION, rank=rank, peers=peers, deadline_s=10.0))
        for engine in self.engines:
            engine.build(job, how)
        for server in self.servers:
            server.transfer(())

    def run(self, feeds: list[Feed]) -> tuple[list[StepReport], list[StepReport]]:
        """Train on one feed for each unit; the first server's reports, and the worker's."""
        told: dict[int, list[StepReport]] = {}
        until = feeds[-1].step + 1

        def serve(number: int) -> None:
            told[number] = list(self.servers[number].serve(until, lambda: False))

        threads = [threading.Thread(target=serve, args=(number,)) for number in range(len(self.servers))]
        for thread in threads:
            thread.start()
        own = []
        by_unit = {(one.step, one.data_ranks[0]): one for one in feeds}
        while (unit := self.worker.lease()) is not None:
            own += [
                self.worker.train_step(by_unit[step, unit.share]) for step in range(unit.step, unit.step + unit.steps)
            ]
        for thread in threads:
            thread.join()
        return told[0], own

    @property
    def files(self) -> Files:
        """A checkpoint."""
        kept = Files()
        for server in self.servers:
            server.save(server.snapshot(), kept)
        return kept


@contextmanager
def party(job: ModelSpec, how: Plan) -> Iterator[Party]:
    own = Party(how)
    try:
        own.start(job, how)
        yield own
    finally:
        for engine in reversed(own.engines):
            engine.leave()


def sync(servers: int = 2, **changes: Any) -> Plan:
    return plan(servers=servers, topology="independent", consistency="sync", **changes)


@pytest.mark.parametrize("name", ["adam", "groups", "whole"])
def test_tied_frozen_and_normalized_layers_train_and_evaluate_as_on_one_device(name: str) -> None:
    job = replace(JOBS[name], metrics={"accuracy": accuracy})
    feeds = [feed(batch(dtype=np.float64, first=100 * step), step=step) for step in range(5)]
    alone = one_device(job)
    expected = [alone.train_step(one) for one in feeds]
    with party(job, sync()) as own:
        reports, _ = own.run(feeds)
        assert [one.loss for one in reports] == pytest.approx([one.loss for one in expected], rel=1e-12)
        other = one_device(job)
        other.load(own.files)
        wholes = alone._built.model.state_dict()
        for label, found in other._built.model.state_dict().items():
            assert torch.allclose(found.double(), wholes[label].double(), rtol=1e-12, atol=1e-14)
        assert own.worker.evaluate_step(feeds[0]) == other.evaluate_step(feeds[0])
        assert np.array_equal(own.worker.predict_step(feeds[0])["output"], other.predict_step(feeds[0])["output"])
        again = own.run([replace(one, step=one.step + 5) for one in feeds])[0]
        assert [one.step for one in again] == [*range(6, 11)]


def test_a_parameter_without_a_gradient_is_pushed_as_zeros() -> None:
    rows = batch(dtype=np.float32)
    rows.columns["x"][0, 0] = 100.0  # type: ignore[index]
    with party(spec(model=Chosen), sync()) as own:
        before = own.files
        own.run([feed(rows)])
        first, after = facts(before), facts(own.files)
        assert first["model.server-0-of-2.safetensors"] != after["model.server-0-of-2.safetensors"]
        other, fresh = one_device(spec(model=Chosen)), one_device(spec(model=Chosen))
        other.load(own.files)
        assert torch.equal(other._built.model.second.weight, fresh._built.model.second.weight)
        assert not torch.equal(other._built.model.first.weight, fresh._built.model.first.weight)


def too_large_at_first(outputs: Tensor, targets: Tensor) -> Tensor:
    return 300.0 * loss(outputs.float(), targets)


def test_half_precision_scales_on_each_worker_and_a_unit_that_overflows_is_pushed_without_weight() -> None:
    job, feeds = spec(loss=too_large_at_first), [feed(step=step) for step in range(12)]
    with party(job, sync(precision="fp16")) as own:
        told, mine = own.run(feeds)
        over = [one.overflowed for one in mine]
        assert over[:3] == [True] * 3 and over.count(False) >= 4
        assert [one.weight == 0 for one in told] == over
        whole = one_device(job)
        expected = [whole.train_step(one).loss for one, large in zip(feeds, over, strict=True) if not large]
        assert [one.loss for one in told if one.weight] == pytest.approx(expected, rel=2e-2)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.long()).sum(1)


@pytest.mark.parametrize(
    ("job", "how", "said"),
    [
        (spec(model=Words), sync(), "'table.weight' has sparse gradients"),
        (spec(model=double), sync(wire="fp16"), "is of float64, of which wire='fp16' has no form"),
        (spec(), sync(40), "18 of 40 servers would hold nothing"),
        (replace(JOBS["whole"], inexact=("batch_norm",)), sync(9), "number by number"),
        (spec(model=Odd), replace(sync(), accumulation=2), "batch norm"),
    ],
    ids=["sparse", "wire", "servers", "whole", "batch norm"],
)
def test_what_cannot_be_is_refused_when_it_is_built(job: ModelSpec, how: Plan, said: str) -> None:
    with pytest.raises(JobError, match=said), party(job, how):
        pass


def test_local_steps_of_one_worker_are_plain_training() -> None:
    """The mean of one worker's differences is that difference; its optimizer goes on where it was."""
    job = spec(model=double, optimizer=adam)
    feeds = [feed(batch(dtype=np.float64, first=100 * step), step=step) for step in range(6)]
    alone = one_device(job)
    losses = [alone.train_step(one).loss for one in feeds]
    with party(job, sync(local_steps=3, outer="average")) as own:
        reports, _ = own.run(feeds)
        assert [one.loss for one in reports] == pytest.approx(losses, rel=1e-9)
        other = one_device(job)
        other.load(own.files)
        assert [one.loss for one in reports] == pytest.approx(losses, rel=1e-9)
        for found, whole in zip(other._built.trainable, alone._built.trainable, strict=True):
            assert torch.allclose(found, whole, rtol=1e-9, atol=1e-12)
