"""A torch server's shard: it steps as one device does, whatever was dealt to whom, and its files fit any layout."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.support.parameter_server_jobs import JOBS, facts
from tests.support.torch_engines import Files, adam, one_device, plan, saved, spec
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Plan
from trainwright.core.topology import WorkUnit
from trainwright.strategies.ps.parameter_shards import GradientPush
from trainwright.strategies.torch.checkpoint import host_state, safetensors_files
from trainwright.strategies.torch.ps.gradient_compression import GradientLayout
from trainwright.strategies.torch.ps.parameter_worker import GradientSender, tensor_pieces
from trainwright.strategies.torch.ps.shard_store import TorchShardStore, server_shards

NONE = memoryview(b"")


def banks(job: ModelSpec, how: Plan) -> list[TorchShardStore]:
    made = []
    for server in range(how.servers):
        bank = TorchShardStore(job, how, server, f"rank {server}")
        bank.attach(memoryview(bytearray(bank.shard.size_bytes)))
        made.append(bank)
    return made


def held(made: Sequence[TorchShardStore]) -> Files:
    kept = Files()
    for bank in made:
        bank.replica.step = 1
        safetensors_files.write(host_state.HostStateCopier().of(host_state.state_of(bank.replica)), kept)
    return kept


def update(
    made: Sequence[TorchShardStore], gradients: Sequence[dict[str, Tensor]], weights: Sequence[float], step: int
) -> None:
    """Push gradients by name, one after the other, and apply them as one update."""
    where = tensor_pieces([bank.shard for bank in made])
    for server, bank in enumerate(made):
        pushes = []
        for share, (given, weight) in enumerate(zip(gradients, weights, strict=True)):
            payload = memoryview(bytearray(bank.form.size_bytes))
            for name, gradient in given.items():
                for piece in where[name]:
                    if piece.server == server:
                        bank.form.write(payload, name, piece.of(gradient).contiguous())
            pushes.append(
                GradientPush(unit=WorkUnit(step=step, share=share), weight=weight, payload=payload, buffers=NONE)
            )
        bank.apply(pushes, step=step, rate_factor=1.0, clip_factor=1.0)


def made_up(model: nn.Module, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(each.shape, dtype=each.dtype, generator=random)
        for name, each in model.named_parameters()
        if each.requires_grad
    }


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("name", JOBS)
def test_shards_step_as_the_whole_does_and_their_files_fit_it(name: str, servers: int) -> None:
    job = JOBS[name]
    made, whole = banks(job, plan(servers=servers)), one_device(job)
    replica = whole.replica
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
            host_state.restore(bank.replica, safetensors_files.read(kept, bank.replica.wanted, bank.replica.part))
        third = one_device(job)
        third.load(held(moved))
        assert facts(saved(third)) == facts(expected)


class Ears:
    """What a push needs of `Clients`: an outbox for each server, and somebody to tell."""

    def __init__(self, forms: Sequence[GradientLayout]) -> None:
        self.outbox = tuple(memoryview(bytearray(form.size_bytes)) for form in forms)

    def ready(self, server: int, offset: int, size: int) -> None:
        """Nothing leaves."""


@pytest.mark.parametrize("taken", [True, False])
def test_a_push_that_does_not_count_leaves_what_waits_as_it_was(taken: bool) -> None:
    model = nn.Linear(4, 1, bias=False)
    job, how = spec(model=lambda: model, optimizer=adam), plan(servers=1, wire="topk(0.5)")
    replica = one_device(job).replica
    held = server_shards(job, how, replica.model, "")
    form, (parameter,) = GradientLayout(held[0], how.wire), replica.trainable
    outgoing, ears, found = (
        GradientSender(replica=replica, where=tensor_pieces(held), forms=[form]),
        Ears([form]),
        torch.zeros(1, 4),
    )
    for values in ([4.0, 1.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]):
        outgoing.begin(ears)
        outgoing.put(parameter, torch.tensor([values]))
        form.fill(ears.outbox[0], "weight", found)
        outgoing.counted([taken])
    assert found.tolist() == ([[0.0, 1.0, 0.0, 2.0]] if taken else [[0.0] * 4])
