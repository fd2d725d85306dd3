"""Steps that freeze a part of the model for a while, as a GAN's do, equal a plain loop on any ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.rank_processes import Exchange, formed, run_ranks
from tests.support.torch_engines import feed, plan, spec
from trainwright.core.data import Batch, Feed, fold_seed, zero_weight
from trainwright.core.plan import Mesh
from trainwright.strategies.torch.engines.data_parallel import DataParallel
from trainwright.strategies.torch.engines.fsdp import Sharded

STEPS = 7


class Both(nn.Module):
    """A generator and what judges it."""

    def __init__(self) -> None:
        super().__init__()
        widths = {"dtype": torch.float64}
        self.G = nn.Sequential(nn.Linear(4, 4, **widths), nn.ReLU(), nn.Linear(4, 4, **widths), nn.ReLU())
        self.D = nn.Sequential(nn.Linear(4, 4, **widths), nn.Tanh(), nn.Linear(4, 4, **widths))


def turns(model: nn.Module, columns: Any) -> Tensor:
    x = columns["x"]
    if not int(columns["turn"][0]):
        return (model.D(x).sum(1) - 1) ** 2
    for parameter in model.D.parameters():
        parameter.requires_grad_(False)
    loss = (model.D(model.G(x)).sum(1) + 1) ** 2
    for parameter in model.D.parameters():
        parameter.requires_grad_(True)
    return loss


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def shares(step: int, rank: int, of: int) -> Feed:
    columns = {"x": np.random.default_rng(step).normal(size=(8, 4)), "turn": np.full(8, (step + 1) // 2 % 2)}
    own = np.arange(8)[rank::of]
    given = Batch(columns={name: each[own] for name, each in columns.items()}, weights=np.ones(len(own)), samples=own)
    return feed(given, step=step, rank=rank, total=of, rows=8)


def plain() -> list[float]:
    torch.manual_seed(fold_seed(3, -1))
    model, losses = Both(), []
    optimizer = adam(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        columns = {name: torch.from_numpy(each) for name, each in shares(step, 0, 1).parts[0][0].columns.items()}
        loss = turns(model, columns).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _trained(rank: int, world: int, exchange: Exchange) -> Any:
    job = spec(model=Both, loss=None, step=turns, optimizer=adam, inputs=(), targets=())
    sharded = replace(plan(), mesh=Mesh(shard=world))
    found = {}
    for name, how in (
        ("data_parallel", plan(world)),
        ("zero=2", replace(sharded, zero=2)),
        ("zero=3", replace(sharded, zero=3)),
    ):
        for first in (0, 1):  # whose turn it is in the throwaway step
            engine = formed(
                rank, exchange, job, engine=DataParallel() if name == "data_parallel" else Sharded(), how=how
            )
            engine.warm(zero_weight(shares(first, rank, world)))
            found[name, first] = [engine.train_step(shares(step, rank, world)).loss for step in range(STEPS)]
            engine.leave()
    return found


def test_a_part_that_a_step_freezes_for_a_while_is_trained_as_in_a_plain_loop() -> None:
    for found in run_ranks(_trained, 2):
        for how, losses in found.items():
            assert losses == pytest.approx(plain(), rel=1e-12), how
