"""Batch norm on several ranks: one set of running statistics, and with `sync` that of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.rank_processes import Exchange, formed, run_ranks
from tests.support.torch_engines import GENERATION, Files, accuracy, feed, loss, one_device, plan, saved, spec
from trainwright.core.data import Batch, Feed, MetricSums
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.plan import Mesh
from trainwright.core.topology import Group, Peer, StateTransfer
from trainwright.strategies.torch.engines.fsdp import Sharded

SIZES = (12, 7, 12, 4, 12)  # rows of each step's batch
SMALL = (12, 7, 2, 12)  # one row is too few for a rank alone, and the last of three ranks has none of 2
LOCAL = {"inexact": ("batch_norm",)}


class Images(nn.Module):
    """Every kind of batch norm in a row, as in a small resnet: with and without weights, and a cumulative mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 2, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(4, 4, 2), nn.BatchNorm2d(4, affine=False), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.stem(x.view(-1, 1, 2, 2))))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def job(**changes: Any) -> ModelSpec:
    return spec(**{"model": Images, "optimizer": sgd, "metrics": {"accuracy": accuracy}, **changes})


def rows(step: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch whose rows differ in size, so that shares differ in their statistics."""
    random = np.random.default_rng(step)
    return random.normal(size=(size, 4)) * np.exp(random.normal(size=(size, 1))), random.integers(0, 3, size)


def share(step: int, size: int, rank: int, total: int) -> Feed:
    x, y = rows(step, size)
    own = np.arange(size)[rank::total]
    real, chosen = len(own), own if len(own) else np.zeros(1, np.int64)
    part = Batch(
        columns={"x": x[chosen], "y": y[chosen]}, weights=np.ones(real) if real else np.zeros(1), samples=chosen
    )
    return feed(part, step=step, rank=rank, total=total, rows=size)


def train(engine: Any, rank: int, world: int, sizes: tuple[int, ...], first: int = 0) -> list[float]:
    return [engine.train_step(share(first + at, size, rank, world)).loss for at, size in enumerate(sizes)]


def evaluated(engine: Any, rank: int, world: int) -> MetricSums:
    return engine.evaluate_step(share(99, 25, rank, world))


def plain(
    sizes: tuple[int, ...], update: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
) -> tuple[list[float], nn.Module]:
    """A loop on one device, with the loss that `update` computes of each batch."""
    model = one_device(job()).replica.model
    rule, losses = sgd(model.parameters()), []
    for step, size in enumerate(sizes):
        x, y = (torch.from_numpy(each) for each in rows(step, size))
        found = update(model, x, y)
        rule.zero_grad()
        found.backward()
        rule.step()
        losses.append(found.item())
    return losses, model


def whole(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return loss(model(x), y).mean()


def by_shares(world: int, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Each share normalized by its own statistics; running ones are the shares' mean, weighted by rows."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    before = [{name: value.clone() for name, value in norm.named_buffers()} for norm in norms]
    sums: list[dict[str, Any]] = [{} for _ in norms]
    losses = []
    for rank in range(world):
        own = slice(rank, None, world)
        if not len(x[own]):
            continue
        for norm, kept in zip(norms, before, strict=True):
            for name, value in kept.items():
                setattr(norm, name, value.clone())
        losses.append(loss(model(x[own]), y[own]))
        for norm, found in zip(norms, sums, strict=True):
            for name, value in norm.named_buffers():
                found[name] = found.get(name, 0.0) + value.double() * len(x[own])
    for norm, found in zip(norms, sums, strict=True):
        for name, value in found.items():
            setattr(norm, name, (value / len(x)).to(getattr(norm, name).dtype))
    return torch.cat(losses).mean()


def state_of(engine: Any) -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in engine.replica.model.state_dict().items()}


def assert_near(found: dict[str, np.ndarray], model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        assert np.allclose(found[name], value.numpy(), rtol=1e-9, atol=1e-11), name


# --- each rank its own share ------------------------------------------------------------------------------------------


def _local(rank: int, world: int, exchange: Exchange) -> Any:
    """Unbroken, and with a newcomer in the place of rank 0 after three steps."""
    results = []
    for broken in (False, True):
        engine = formed(rank, exchange, job(**LOCAL))
        engine.transfer((StateTransfer(source=0, target=1, piece="state"),))
        engine.warm(share(0, SIZES[0], rank, world))
        losses = train(engine, rank, world, SIZES[:3])
        if broken:
            engine.leave()
            engine = formed(rank, exchange, job(**LOCAL), engine=engine if rank else None)
            engine.transfer((StateTransfer(source=1, target=0, piece="state"),))
            engine.warm(share(3, SIZES[3], rank, world))
        losses += train(engine, rank, world, SIZES[3:], first=3)
        engine.verify()
        results.append((losses, state_of(engine), evaluated(engine, rank, world), saved(engine).files))
        engine.leave()
    return results


@pytest.fixture(scope="module")
def local() -> list[Any]:
    return run_ranks(_local, 2)


def test_running_statistics_are_those_of_all_ranks(local: list[Any]) -> None:
    losses, model = plain(SIZES, partial(by_shares, 2))
    for (found, state, *_), _ in local:
        assert found == pytest.approx(losses, rel=1e-12)
        assert_near(state, model)


def test_an_evaluation_on_two_ranks_is_that_of_the_model_that_is_saved(local: list[Any]) -> None:
    together = local[0][0][2] + local[1][0][2]
    files = Files()
    files.files |= local[0][0][3]
    alone = one_device(job())
    alone.load(files)
    expected = evaluated(alone, 0, 1).means()
    assert together.means() == pytest.approx(expected, rel=1e-12)


def test_a_newcomer_changes_no_statistics_and_no_evaluation(local: list[Any]) -> None:
    for unbroken, broken in local:
        assert unbroken[0] == broken[0] and unbroken[2] == broken[2]
        assert all(np.array_equal(unbroken[1][name], broken[1][name]) for name in unbroken[1])


def _sharded(rank: int, world: int, exchange: Exchange) -> Any:
    """Each shard's statistics are of its own rows too; one that changes a buffer by itself is found."""
    engine = Sharded()
    addresses = exchange(engine.reserve("worker"))
    peers = tuple(Peer(rank=number, address=address) for number, address in enumerate(addresses))
    engine.form(Group(generation=GENERATION, rank=rank, peers=peers, deadline_s=20.0))
    engine.build(job(**LOCAL), replace(plan(), mesh=Mesh(shard=world), zero=3))
    engine.transfer(())
    engine.warm(share(0, SIZES[0], rank, world))
    losses = train(engine, rank, world, SIZES)
    engine.verify()
    buffers = {name: value.numpy().copy() for name, value in engine.replica.model.named_buffers()}
    engine.replica.norms[1].running_var += rank
    with pytest.raises(JobError) as caught:
        engine.verify()
    engine.leave()
    return losses, buffers, str(caught.value)


def test_shards_have_one_set_of_running_statistics() -> None:
    losses, model = plain(SIZES, partial(by_shares, 2))
    for found, buffers, text in run_ranks(_sharded, 2):
        assert found == pytest.approx(losses, rel=1e-9)
        for name, value in model.named_buffers():
            assert np.allclose(buffers[name], value.numpy(), rtol=1e-9), name
        assert "after step 5 ranks 0 and 1 differ in buffer 'middle.1.running_var'" in text


# --- together ---------------------------------------------------------------------------------------------------------


PARTS = ("stem", "middle", "head")


def in_turns(model: Any, batch: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in PARTS:
        yield name, loss(model(batch["x"]), batch["y"])


lbfgs = partial(torch.optim.LBFGS, lr=0.1, max_iter=2)
STEPS: dict[str, dict[str, Any]] = {
    "one backward": {},
    "several optimizers": {
        "optimizer": dict.fromkeys(PARTS, sgd), "step": in_turns, "loss": None, "inputs": (), "targets": (),
        "metrics": {},
    },
    "closure": {"optimizer": lbfgs},
}  # fmt: skip


def plain_custom(name: str) -> tuple[list[float], nn.Module]:
    """A loop on one device whose steps are not one backward and one update."""
    model = one_device(job()).replica.model
    losses, whole_rule = [], lbfgs(model.parameters())
    rules = [sgd(getattr(model, part).parameters()) for part in PARTS]
    for step, size in enumerate(SMALL):
        x, y = (torch.from_numpy(each) for each in rows(step, size))

        def backward(x: torch.Tensor = x, y: torch.Tensor = y) -> Any:
            model.zero_grad()
            found = whole(model, x, y)
            found.backward()
            return found

        if name == "closure":
            losses.append(whole_rule.step(backward).item())
            continue
        losses.append(0.0)
        for rule in rules:
            losses[-1] += backward().item()
            rule.step()
    return losses, model


def _together(rank: int, world: int, exchange: Exchange) -> Any:
    found = {}
    for name, changes in STEPS.items():
        engine = formed(rank, exchange, job(batch_norm="sync", **changes))
        engine.transfer((StateTransfer(source=0, target=1, piece="state"),))
        engine.warm(share(0, SIZES[0], rank, world))
        losses = train(engine, rank, world, SMALL)
        engine.verify()
        found[name] = losses, state_of(engine), evaluated(engine, rank, world)
        engine.leave()
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_synchronized_batch_norm_is_that_of_one_device(world: int) -> None:
    results = run_ranks(_together, world)
    for name in STEPS:
        losses, model = plain(SMALL, whole) if name == "one backward" else plain_custom(name)
        for found, state, _ in (result[name] for result in results):
            assert found == pytest.approx(losses, rel=1e-10), name
            assert_near(state, model)
            assert all(np.array_equal(state[each], results[0][name][1][each]) for each in state), "bitwise alike"


def test_batch_norm_is_refused_where_it_would_differ() -> None:
    for changes, how, words in (
        ({}, plan(ranks=2), 'set batch_norm="sync"'),
        ({"batch_norm": "sync"}, plan(ranks=2, accumulation=2), "set accumulation=1"),
        ({"batch_norm": "sync", "compile": "inductor"}, plan(ranks=2), 'not tested with compile="inductor"'),
        ({"batch_norm": "sync", "model": Own}, plan(ranks=2), "module 'norm' has a forward of its own"),
        ({"batch_norm": "sync", "model": Unkept}, plan(ranks=2), "module 'norm' keeps no running statistics"),
    ):
        with pytest.raises(JobError) as caught:
            one_device(job(**changes), how)
        assert words in str(caught.value)


class _Doubled(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 3), _Doubled(3)


class Unkept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)
