"""A torch server's shard: it steps as one device does, whatever was dealt to whom, and its files fit any layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.torch_jobs import Files, adam, one_device, plan, saved, spec
from trainwright.core.asynchrony import Outer, Unit
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Plan
from trainwright.strategies.servers.bank import Push
from trainwright.strategies.torch import files, state
from trainwright.strategies.torch.bank import Bank
from trainwright.strategies.torch.exchange import Outgoing, pieces
from trainwright.strategies.torch.parts import Part
from trainwright.strategies.torch.served import Served, shards
from trainwright.strategies.torch.wireform import Form

NONE = memoryview(b"")


class Odd(nn.Module):
    """Tied, frozen and normalized; one tensor is larger than all others together."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 37, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(37, dtype=torch.float64)
        self.wide = nn.Linear(37, 37, dtype=torch.float64)
        self.again = nn.Linear(37, 37, bias=False, dtype=torch.float64)
        self.again.weight = self.wide.weight
        self.last = nn.Linear(37, 3, dtype=torch.float64)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.again(torch.tanh(self.wide(self.norm(self.first(x)))))))


def grouped(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Decays what has two dimensions; Adagrad makes its state at once."""
    flat, wide = ([each for each in parameters if (each.dim() > 1) is many] for many in (False, True))
    return torch.optim.Adagrad([{"params": flat}, {"params": wide, "weight_decay": 0.1}])


def by_tensor(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    class Normed(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for each in group["params"]:
                    each.grad = each.grad / (each.grad.norm() + 1e-12)
            super().step()

    return Normed(parameters, lr=0.1)


def banks(job: ModelSpec, how: Plan) -> list[Bank]:
    made = []
    for server in range(how.servers):
        replica = Served(job, how, f"rank {server}", Part(server=server, servers=how.servers))
        shard = shards(job, how, replica.model, "")[server]
        replica.keep({slot.name: slot.rows for slot in shard.slots})
        outer = Outer.parse(how.outer) if how.local_steps > 1 else None
        bank = Bank(replica, shard, Form(shard, how.wire), outer, "")
        bank.attach(memoryview(bytearray(shard.size_bytes)))
        made.append(bank)
    return made


def held(made: Sequence[Bank]) -> Files:
    kept = Files()
    for bank in made:
        bank._replica.step = 1
        files.write(state.Copies().of(state.held(bank._replica)), kept)
    return kept


def facts(kept: Files) -> dict[str, Any]:
    """The files, whose plain values have no order."""
    return {name: json.loads(data) if name.endswith(".json") else data for name, data in kept.files.items()}


def update(made: Sequence[Bank], gradients: Sequence[dict[str, Tensor]], weights: Sequence[float], step: int) -> None:
    """Push gradients by name, one after the other, and apply them as one update."""
    where = pieces([bank.shard for bank in made])
    for server, bank in enumerate(made):
        pushes = []
        for share, (given, weight) in enumerate(zip(gradients, weights, strict=True)):
            payload = memoryview(bytearray(bank._form.size_bytes))
            for name, gradient in given.items():
                for piece in where[name]:
                    if piece.server == server:
                        bank._form.write(payload, name, piece.of(gradient).contiguous())
            pushes.append(Push(unit=Unit(step=step, share=share), weight=weight, payload=payload, buffers=NONE))
        bank.apply(pushes, step=step, rate_factor=1.0, clip_factor=1.0)


def made_up(model: nn.Module, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(each.shape, dtype=each.dtype, generator=random)
        for name, each in model.named_parameters()
        if each.requires_grad
    }


JOBS = {
    "adam": spec(model=Odd, optimizer=adam, inexact=("batch_norm",)),
    "groups": spec(model=Odd, optimizer=grouped, inexact=("batch_norm",)),
    "whole": spec(model=Odd, optimizer=by_tensor, inexact=("batch_norm",)),
}


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("name", JOBS)
def test_shards_step_as_the_whole_does_and_their_files_fit_it(name: str, servers: int) -> None:
    job = JOBS[name]
    made, whole = banks(job, plan(servers=servers)), one_device(job)
    replica = whole._built
    for step in range(4):
        gradients = made_up(replica.model, step)
        update(made, [gradients], [3.0], step)
        for parameter, label in replica.names.items():
            parameter.grad = gradients[label].clone()
        replica.apply(step, "")
    replica.step = 1
    expected, kept = saved(whole), held(made)
    other = one_device(job)
    other.load(kept)
    assert facts(saved(other)) == facts(expected)
    cut = [slot for bank in made for slot in bank.shard.slots if slot.rows]
    assert bool(cut) == (servers > 1 and name != "whole")
    for count in {1, 2, 3}:
        moved = banks(job, plan(servers=count))
        for bank in moved:
            state.restore(bank._replica, files.read(kept, bank._replica.wanted, bank._replica.part))
        third = one_device(job)
        third.load(held(moved))
        assert facts(saved(third)) == facts(expected)


class Ears:
    """What a push needs of `Clients`: an outbox for each server, and somebody to tell."""

    def __init__(self, forms: Sequence[Form]) -> None:
        self.outbox = tuple(memoryview(bytearray(form.size_bytes)) for form in forms)

    def ready(self, server: int, offset: int, size: int) -> None:
        """Nothing leaves."""


@pytest.mark.parametrize("taken", [True, False])
def test_a_push_that_does_not_count_leaves_what_waits_as_it_was(taken: bool) -> None:
    model = nn.Linear(4, 1, bias=False)
    job, how = spec(model=lambda: model, optimizer=adam), plan(servers=1, wire="topk(0.5)")
    replica = one_device(job)._built
    held = shards(job, how, replica.model, "")
    form, (parameter,) = Form(held[0], how.wire), replica.trainable
    outgoing, ears, found = Outgoing(replica=replica, where=pieces(held), forms=[form]), Ears([form]), torch.zeros(1, 4)
    for values in ([4.0, 1.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]):
        outgoing.begin(ears)
        outgoing.put(parameter, torch.tensor([values]))
        form.fill(ears.outbox[0], "weight", found)
        outgoing.counted([taken])
    assert found.tolist() == ([[0.0, 1.0, 0.0, 2.0]] if taken else [[0.0] * 4])
