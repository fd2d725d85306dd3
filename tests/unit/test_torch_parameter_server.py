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

import trainwright as tw
from tests.support.parameter_server_jobs import JOBS, Odd, facts
from tests.support.torch_engines import (
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
from trainwright.core.data import Feed, StepReport, zero_weight
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError, NonFiniteLoss
from trainwright.core.plan import Mesh, Plan
from trainwright.core.topology import Group, Peer, Role
from trainwright.strategies.torch.engines.parameter_server import ParameterServer


class Party:
    """Servers, and one worker that computes all shares of each step."""

    def __init__(self, how: Plan) -> None:
        self.engines = [ParameterServer() for _ in range(how.servers + 1)]
        self.servers, self.worker = self.engines[:-1], self.engines[-1]

    def start(self, job: ModelSpec, how: Plan) -> None:
        roles: list[Role] = ["server"] * how.servers + ["worker"]
        peers = tuple(
            Peer(rank=rank, address=engine.reserve(role), role=role)
            for rank, (engine, role) in enumerate(zip(self.engines, roles, strict=True))
        )
        for rank, engine in enumerate(self.engines):
            engine.form(Group(generation=GENERATION, rank=rank, peers=peers, key=b"theirs", deadline_s=10.0))
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
        while (unit := self.worker.lease(feeds[0].step)) is not None:
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
        wholes = alone.replica.model.state_dict()
        for label, found in other.replica.model.state_dict().items():
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
        assert torch.equal(other.replica.model.second.weight, fresh.replica.model.second.weight)
        assert not torch.equal(other.replica.model.first.weight, fresh.replica.model.first.weight)


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


class Blocks(nn.Module):
    """Some of what each kind of computing again looks for: blocks, and attention in them; dropout too."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, dtype=dtype)
        blocks = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True, dtype=dtype) for _ in range(3)]
        self.blocks, self.last = nn.ModuleList(blocks), nn.Linear(8, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).unsqueeze(1)
        for block in self.blocks:
            hidden = block(hidden)
        outputs: Tensor = self.last(hidden[:, 0])
        return outputs


def single() -> nn.Module:
    return Blocks(torch.float32)


WIDE = spec(model=Blocks, clip_norm=0.5)
CHOICES: dict[str, tuple[ModelSpec, dict[str, Any], float]] = {
    "plain": (WIDE, {}, 1e-9),
    "computed again in full": (WIDE, {"recompute": "full"}, 1e-9),
    "scores computed again": (WIDE, {"recompute": "selective"}, 1e-9),
    "micro-batches": (WIDE, {"accumulation": 2}, 1e-9),
    "micro-batches in bf16": (spec(model=single), {"accumulation": 2, "precision": "bf16"}, 1e-5),
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_a_plan_chooses_beside_its_layout_gives_what_one_device_gives(name: str) -> None:
    """With dropout, since both compute the same micro-batches; of units of unequal rows."""
    job, choice, tolerance = CHOICES[name]
    dtype = np.float32 if choice.get("precision") else np.float64
    count = choice.get("accumulation", 1)
    parts = [[batch(7 - part, 100 * step + 50 * part, dtype) for part in range(count)] for step in range(3)]
    feeds = [feed(*some, step=step) for step, some in enumerate(parts)]
    alone = one_device(job, plan(**choice))
    losses = [alone.train_step(one).loss for one in feeds]
    with party(job, sync(**choice)) as own:
        reports, _ = own.run(feeds)
        other = one_device(job, plan(**choice))
        other.load(own.files)
    assert [one.loss for one in reports] == pytest.approx(losses, rel=tolerance)
    wholes = alone.replica.model.state_dict()
    for label, found in other.replica.model.state_dict().items():
        assert torch.allclose(found, wholes[label], rtol=tolerance, atol=tolerance), label


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
        (spec(model=double), sync(wire="fp16"), "is of float64, which wire='fp16' cannot encode"),
        (spec(), sync(40), "18 of 40 servers would hold nothing"),
        (replace(JOBS["whole"], inexact=("batch_norm",)), sync(9), "number by number"),
        (spec(model=Odd), replace(sync(), accumulation=2), "batch norm"),
    ],
    ids=["sparse", "wire", "servers", "whole", "batch norm"],
)
def test_what_cannot_be_is_refused_when_it_is_built(job: ModelSpec, how: Plan, said: str) -> None:
    with pytest.raises(JobError, match=said), party(job, how):
        pass


def logging_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = loss(outputs, targets)
    tw.log("first", outputs[:, 0])
    tw.log("half", losses.mean() / 2)
    return losses


def test_logged_values_of_all_workers_are_added_up_by_the_first_server() -> None:
    job, parts = spec(model=double, optimizer=adam, loss=logging_loss), (12, 5)
    batches = [[batch(rows, 100 * step + rows, np.float64) for rows in parts] for step in range(3)]
    alone = one_device(job)
    expected = [alone.train_step(feed(*both, step=step)).logged.means() for step, both in enumerate(batches)]
    feeds = [
        feed(one, step=step, rank=rank, total=2, rows=sum(parts))
        for step, both in enumerate(batches)
        for rank, one in enumerate(both)
    ]
    with party(job, replace(sync(), mesh=Mesh(data=2))) as own:
        reports, _ = own.run(feeds)
    for report, means in zip(reports, expected, strict=True):
        assert report.logged.means() == pytest.approx(means, rel=1e-12)


def test_local_steps_of_one_worker_are_plain_training() -> None:
    """The mean of one worker's differences is that difference; its optimizer goes on where it was."""
    job = spec(model=double, optimizer=adam, loss=logging_loss)
    feeds = [feed(batch(dtype=np.float64, first=100 * step), step=step) for step in range(6)]
    alone = one_device(job)
    expected = [alone.train_step(one) for one in feeds]
    losses = [one.loss for one in expected]
    with party(job, sync(local_steps=3, outer="average")) as own:
        reports, _ = own.run(feeds)
        for one, same in zip(reports, expected, strict=True):
            assert one.logged.means() == pytest.approx(same.logged.means(), rel=1e-9) and len(one.logged.totals) == 2
        other = one_device(job)
        other.load(own.files)
        assert [one.loss for one in reports] == pytest.approx(losses, rel=1e-9)
        for found, whole in zip(other.replica.trainable, alone.replica.trainable, strict=True):
            assert torch.allclose(found, whole, rtol=1e-9, atol=1e-12)


class Counting(nn.Module):
    """A buffer that is replaced, and not written into, says how often the module ran, and counts."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, dtype=torch.float64)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count = self.count + 1
        return self.layer(x) / (1 + self.count)


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


@pytest.mark.parametrize("changes", [{}, {"local_steps": 2, "outer": "average"}], ids=["steps", "local steps"])
def test_each_unit_begins_at_what_the_servers_hold_also_where_one_worker_computes_several(changes: Any) -> None:
    """What one unit did to the worker's parameters and buffers is none of the next one's that nothing came between."""
    job, local = spec(model=Counting, optimizer=plain), changes.get("local_steps", 1)
    feeds = [
        feed(batch(rows, 100 * step + 50 * rank, np.float64), step=step, rank=rank, total=2)
        for step in range(4)
        for rank, rows in enumerate((12, 5))
    ]
    model = one_device(job).replica.model
    for first in range(0, 4, local):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        ends, weights = [], []
        for rank in range(2):
            model.load_state_dict(before)
            mine = [one for one in feeds if one.data_ranks[0] == rank and first <= one.step < first + local]
            optimizer = plain(model.parameters())
            for one in mine:
                held = one.parts[0][0]
                optimizer.zero_grad()
                loss(model(torch.from_numpy(held.columns["x"])), torch.from_numpy(held.columns["y"])).mean().backward()
                optimizer.step()
            ends.append({name: value.clone() for name, value in model.state_dict().items()})
            weights.append(sum(one.parts[0][0].rows for one in mine))
        mean = {name: (weights[0] * ends[0][name] + weights[1] * ends[1][name]) / sum(weights) for name in before}
        model.load_state_dict({**mean, "count": ends[0]["count"]})
    with party(job, replace(sync(**changes), mesh=Mesh(data=2))) as own:
        own.run(feeds)
        other = one_device(job)
        other.load(own.files)
        for name, found in other.replica.model.state_dict().items():
            assert torch.allclose(found, model.state_dict()[name], rtol=1e-10, atol=1e-12), name
        assert own.worker.evaluate_step(feeds[0]) == other.evaluate_step(feeds[0])


def test_what_a_push_leaves_over_is_not_spoilt_by_a_batch_that_is_passed_by() -> None:
    bad = batch(first=100)
    bad.columns["x"][:] = np.nan  # type: ignore[index]
    feeds = [feed(bad, step=1) if step == 1 else feed(step=step) for step in range(4)]
    with party(spec(guard=True), sync(wire="topk(0.1)")) as own:
        train = own.worker.train_step

        def passing(given: Feed) -> StepReport:
            try:
                return train(given)
            except NonFiniteLoss:
                return train(zero_weight(given))

        own.worker.train_step = passing  # type: ignore[method-assign]
        told, _ = own.run(feeds)
        assert [one.weight > 0 for one in told] == [True, False, True, True]
        assert np.isfinite([one.loss for one in told]).all()
        assert np.isfinite(own.worker.evaluate_step(feeds[0]).means()["loss"])
