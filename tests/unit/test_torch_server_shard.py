"""A torch server's shard: it steps as one device does, whatever was dealt to whom, and its files fit any layout."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.parameter_server_jobs import JOBS, facts
from tests.support.torch_engines import Files, adam, one_device, plan, saved, spec
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Plan
from trainwright.core.topology import Consistency, WorkUnit
from trainwright.strategies.ps.lease_table import ClosedRound, Grant, LeaseTable
from trainwright.strategies.ps.parameter_shards import GradientPush
from trainwright.strategies.ps.update_applier import UpdateAdmission
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
        outgoing.counted([taken], Grant(WorkUnit(0, 0), 0, 0))
    assert found.tolist() == ([[0.0, 1.0, 0.0, 2.0]] if taken else [[0.0] * 4])


SHARES, ROUNDS, SERVERS = 4, 8, 2
WIDE = nn.Linear(4, 6, bias=False)


class Pusher:
    """A worker: it pushes to one server after the other while others do, and settles as it pulls."""

    def __init__(self, forms: Sequence[GradientLayout], outgoing: GradientSender) -> None:
        self.ears, self.outgoing = Ears(forms), outgoing
        self.grant: Grant | None = None
        self.by: list[bool] = []
        self.have = [0] * SERVERS


class Rounds:
    """A book and two servers' gates, with workers that take turns as a random generator wants it."""

    def __init__(self, seed: int, backup: int, workers: int) -> None:
        job, how = spec(model=lambda: WIDE, optimizer=adam), plan(servers=SERVERS, wire="topk(0.3)")
        replica = one_device(job).replica
        held = server_shards(job, how, replica.model, "")
        (self.parameter,), consistency = replica.trainable, Consistency.parse(f"sync(backup={backup})")
        self.random, self.forms = random.Random(seed), [GradientLayout(shard, how.wire) for shard in held]
        self.book = LeaseTable(shares=SHARES, start=0, consistency=consistency)
        self.book.extend(ROUNDS)
        self.gates: list[UpdateAdmission[Tensor]] = [
            UpdateAdmission(shares=SHARES, consistency=consistency) for _ in range(SERVERS)
        ]
        self.mail: list[list[ClosedRound]] = [[] for _ in range(SERVERS)]
        self.applied = torch.zeros(6, 4)
        self.left_out = 0
        self.workers = [
            Pusher(
                self.forms,
                GradientSender(replica=replica, where=tensor_pieces(held), forms=self.forms, leaves_out=True),
            )
            for _ in range(workers)
        ]

    def turn(self, number: int) -> None:
        """The next that one worker does."""
        worker = self.workers[number]
        if worker.grant is None:
            worker.grant = self.book.lease(str(number), number, 0.0)
            if worker.grant is not None:
                self.pull(number)
                worker.outgoing.begin(worker.ears)  # type: ignore[arg-type]
                worker.outgoing.put(self.parameter, gradient(worker.grant.unit))
        elif len(worker.by) < SERVERS:
            worker.by.append(self.offer(number, len(worker.by), worker.grant))
        else:
            worker.outgoing.counted(worker.by, worker.grant)
            self.book.done(str(number), worker.grant.unit, worker.grant.at, 0.0)
            worker.grant, worker.by = None, []
            for closing in self.book.closings():
                for mail in self.mail:
                    mail.append(closing)

    def offer(self, number: int, server: int, grant: Grant) -> bool:
        gate, rows = self.gates[server], torch.zeros(3, 4)
        kept = gate.offer(str(number), grant.unit, grant.at, grant.needs) == "keep"
        if kept:
            self.forms[server].fill(self.workers[number].ears.outbox[server], "weight", rows)
            gate.keep(str(number), grant.unit, grant.at, grant.needs, rows)
        return kept

    def hear(self, server: int) -> None:
        """What the first server said of closed rounds is applied."""
        for closing in self.mail[server]:
            self.gates[server].close(closing)
        self.mail[server].clear()
        while (update := self.gates[server].due()) is not None:
            self.applied[3 * server :][:3] += sum(update.pushes)
            self.gates[server].applied(update)

    def pull(self, number: int) -> None:
        worker, found = self.workers[number], []
        for server, gate in enumerate(self.gates):
            self.hear(server)
            found += [(server, *one) for one in gate.left_out(str(number), worker.have[server])]
        self.left_out += len(found)
        worker.have = [gate.version for gate in self.gates]
        worker.outgoing.settle(found, worker.have)


def gradient(unit: WorkUnit) -> Tensor:
    """Whole numbers, whose sums are exact."""
    return torch.from_numpy(np.random.default_rng(unit.step * SHARES + unit.share).integers(-99, 99, (6, 4))).float()


def test_with_backup_workers_nothing_of_a_gradient_is_lost_or_counts_twice() -> None:
    """What was applied and what waits at the workers is the sum of each unit's gradient, once."""
    whole = sum(gradient(WorkUnit(step, share)) for step in range(ROUNDS) for share in range(SHARES))
    left_out = 0
    for seed in range(40):
        own = Rounds(seed, backup=1 + seed % 2, workers=2 + seed % 4)
        while not own.book.over or any(worker.grant for worker in own.workers):
            own.turn(own.random.randrange(len(own.workers)))
            own.hear(own.random.randrange(SERVERS))
        for number in range(len(own.workers)):
            own.pull(number)
        waiting = [
            torch.cat([worker.outgoing._kept.get((server, "weight"), torch.zeros(3, 4)) for server in range(SERVERS)])
            for worker in own.workers
        ]
        assert torch.equal(own.applied + sum(waiting), whole)
        assert not any(worker.outgoing._doubted for worker in own.workers)
        left_out += own.left_out
    assert left_out > 20, "a test of what is left out"
