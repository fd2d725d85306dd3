"""State that differs from rank to rank: it is found, or declared, saved and restored by rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.rank_processes import Exchange, formed, run_ranks
from tests.support.torch_engines import GENERATION, Files, feed, one_device, saved, spec
from trainwright.core.data import Batch, Feed
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import CheckpointError, JobError
from trainwright.core.topology import Group, Peer, StateTag, StateTransfer
from trainwright.driver.checkpointing import choose_writers
from trainwright.driver.rendezvous import agree_on_state
from trainwright.strategies.torch.engines.data_parallel import DataParallel

STREAMS, STEPS, BROKEN = 8, 12, 5


class Carried(nn.Module):
    """As word_language_model carries hidden states: a row of each stream, in buffers of which one is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(STREAMS, dtype=torch.float64))
        self.register_buffer("carried", torch.zeros(STREAMS, dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen[stream] += 1
            self.carried[stream] = 0.5 * self.carried[stream] + x[:, 0]
        return self.linear(x)[:, 0] + 0.01 * self.seen[stream] + 0.1 * self.carried[stream]


class Line(nn.Module):
    """No buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[:, 0]


class Decaying(torch.optim.SGD):
    """Halves its rate every four steps, by a count that is in no state dict."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), lr=0.1, momentum=0.9)
        self.taken = 0

    def step(self, closure: Any = None) -> None:
        super().step()
        self.taken += 1
        if self.taken % 4 == 0:
            self.param_groups[0]["lr"] *= 0.5


def scheduled(parameters: Any) -> torch.optim.Optimizer:
    rule = torch.optim.SGD(parameters, lr=0.1)
    rule.plan = torch.optim.lr_scheduler.StepLR(rule, 10, 0.5)
    return rule


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - 1) ** 2


def job(**changes: Any) -> ModelSpec:
    fields = {"model": Carried, "loss": squares, "optimizer": sgd, "inputs": ("x", "stream"), "targets": ("x",)}
    return spec(**{**fields, **changes})


LOCAL = {"local_state": ("seen", "carr*")}


def columns(step: int) -> dict[str, Any]:
    """One row of each stream."""
    return {"x": np.random.default_rng(step).normal(size=(STREAMS, 1)), "stream": np.arange(STREAMS)}


def share(step: int, rank: int, total: int) -> Feed:
    """A rank's streams, the same ones in every step."""
    rows = np.arange(STREAMS)[rank::total]
    held = {name: column[rows] for name, column in columns(step).items()}
    part = Batch(columns=held, weights=np.ones(len(rows)), samples=rows)
    return feed(part, step=step, rank=rank, total=total, rows=STREAMS)


def train(engine: DataParallel, rank: int, world: int, steps: range) -> list[float]:
    return [engine.train_step(share(step, rank, world)).loss for step in steps]


def begun(rank: int, world: int, exchange: Exchange, given: ModelSpec) -> DataParallel:
    engine = formed(rank, exchange, given)
    engine.transfer((StateTransfer(source=0, target=1, piece="state"),))
    engine.warm(share(0, rank, world))
    return engine


def problem_of(work: Any) -> str:
    with pytest.raises(JobError) as caught:
        work()
    return str(caught.value)


def plain() -> tuple[list[float], nn.Module]:
    """A loop over whole batches on one device."""
    torch.manual_seed(0)
    model = one_device(job()).replica.model
    rule, losses = sgd(model.parameters()), []
    for step in range(STEPS):
        given = {name: torch.from_numpy(column) for name, column in columns(step).items()}
        loss = squares(model(**given), given["x"]).mean()
        rule.zero_grad()
        loss.backward()
        rule.step()
        losses.append(loss.item())
    return losses, model


# --- undeclared -------------------------------------------------------------------------------------------------------


def _undeclared(rank: int, world: int, exchange: Exchange) -> Any:
    engine = begun(rank, world, exchange, job())
    engine.verify()
    train(engine, rank, world, range(3))
    first = problem_of(engine.verify)
    engine.replica.model.seen.zero_()  # now the one that is not saved differs alone
    second = problem_of(engine.verify)
    engine.replica.model.carried.zero_()
    engine.verify()
    engine.replica.optimizer.state[engine.replica.model.linear.bias]["momentum_buffer"] += rank
    third = problem_of(engine.verify)
    engine.replica.spec = replace(engine.replica.spec, inexact=("replicas",))
    engine.verify()
    engine.leave()
    return first, second, third


def test_a_buffer_that_each_rank_changes_is_found_and_named() -> None:
    for first, second, third in run_ranks(_undeclared, 2):
        assert "after step 3 ranks 0 and 1 differ in buffer 'seen'" in first and "local_state=('seen',)" in first
        assert "buffer 'carried'" in second
        assert "optimizer state 'momentum_buffer of linear.bias'" in third and "inexact=" in third


def _joined_late(rank: int, world: int, exchange: Exchange) -> Any:
    given = job(optimizer=Decaying, model=Line, inputs=("x",))
    engine = begun(rank, world, exchange, given)
    train(engine, rank, world, range(3))
    engine.verify()
    engine.leave()
    engine = formed(rank, exchange, given, engine=engine if rank == 0 else None)
    engine.transfer((StateTransfer(source=0, target=1, piece="state"),))
    engine.warm(share(3, rank, world))  # what both hold is equal: the newcomer's count is seen in no tensor yet
    train(engine, rank, world, range(3, 5))
    found = problem_of(engine.verify)
    engine.leave()
    return found


def test_rates_that_a_newcomer_has_from_elsewhere_are_found_and_named() -> None:
    for found in run_ranks(_joined_late, 2):
        assert "ranks 0 and 1 differ in parameter group '0: lr' (0.05 and 0.1)" in found and "schedule=" in found


def test_a_scheduler_of_torch_inside_the_optimizer_is_refused() -> None:
    found = problem_of(lambda: one_device(job(optimizer=scheduled)))
    assert "torch.optim.lr_scheduler" in found and "schedule=" in found


# --- declared ---------------------------------------------------------------------------------------------------------


def state_of(engine: DataParallel) -> dict[str, Any]:
    model: Any = engine.replica.model
    return {name: value.detach().numpy().copy() for name, value in (*model.named_parameters(), *model.named_buffers())}


def _declared(rank: int, world: int, exchange: Exchange) -> Any:
    """Unbroken; with a newcomer in the place of rank 1, that goes on from the checkpoint; and what tags say."""
    engine = begun(rank, world, exchange, job(**LOCAL))
    losses = train(engine, rank, world, range(BROKEN))
    files = saved(engine).files
    losses += train(engine, rank, world, range(BROKEN, STEPS))
    engine.verify()
    end = state_of(engine)
    together = Files()
    for one in exchange(files):
        together.files |= one
    engine.leave()
    engine = formed(rank, exchange, job(**LOCAL), engine=engine if rank == 0 else None)
    tags = exchange(engine._tag())
    engine.load(together)
    engine.warm(share(BROKEN, rank, world))
    again = train(engine, rank, world, range(BROKEN, STEPS))
    after = exchange(engine._tag())
    engine.leave()
    moved = exchange(_swapped(rank, exchange, engine))
    engine.leave()
    return losses, end, again, state_of(engine), files, tags, after, moved


def _swapped(rank: int, exchange: Exchange, engine: DataParallel) -> StateTag:
    """What an engine holds whose rank is the other one's from now on."""
    addresses = exchange(engine.reserve("worker"))
    peers = tuple(Peer(rank=number, address=address) for number, address in enumerate(reversed(addresses)))
    return engine.form(Group(generation=GENERATION, rank=1 - rank, peers=peers, deadline_s=20.0))


@pytest.fixture(scope="module")
def declared() -> Iterator[list[Any]]:
    yield run_ranks(_declared, 2)


def test_declared_state_gives_the_losses_of_one_device(declared: list[Any]) -> None:
    losses, model = plain()
    streams = [np.arange(STREAMS)[rank::2] for rank in range(2)]
    for (found, end, *_), own in zip(declared, streams, strict=True):
        assert found == pytest.approx(losses, rel=1e-12)
        for name in ("seen", "carried"):
            assert np.allclose(end[name][own], getattr(model, name).numpy()[own], rtol=1e-12)


def test_declared_state_is_restored_by_rank_bit_by_bit(declared: list[Any]) -> None:
    for losses, end, again, last, *_ in declared:
        assert again == losses[BROKEN:]
        assert end.keys() == last.keys() and all(np.array_equal(end[name], last[name]) for name in end)


def test_each_rank_writes_its_own_and_the_first_what_all_have(declared: list[Any]) -> None:
    first, second = (set(each[4]) for each in declared)
    assert first & second == set() and second == {"local-1-of-2.safetensors"}
    assert {"local-0-of-2.safetensors", "model.safetensors", "state.json"} <= first


def test_no_rank_can_take_over_what_another_kept(declared: list[Any]) -> None:
    """So that all go back to a copy that has it: agreement on the ranks' own states is not possible."""
    *_, tags, after, moved = declared[0]
    lost, whole, swapped = (dict(enumerate(each)) for each in (tags, after, moved))
    assert agree_on_state(lost) is None and agree_on_state(swapped) is None
    agreed = agree_on_state(whole)
    assert agreed is not None and (agreed.step, agreed.moves) == (STEPS, ())
    assert choose_writers(whole) == (0, 1)


def test_another_number_of_ranks_is_refused_and_evaluation_takes_that_of_rank_0(declared: list[Any]) -> None:
    files = Files()
    for each in declared:
        files.files |= each[4]
    engine = one_device(job(**LOCAL))
    with pytest.raises(CheckpointError, match=r"local state of 2 data ranks, and this run has 1") as caught:
        engine.load(files)
    assert "workers=2" in caught.value.remedy
    files.weights_only = True
    engine.load(files)
    assert engine.replica.model.seen.tolist() == [5.0, 0.0] * 4


def test_one_device_keeps_what_is_not_saved_too() -> None:
    engine, other = one_device(job(**LOCAL)), one_device(job(**LOCAL))
    engine.transfer(())
    for step in range(3):
        engine.train_step(share(step, 0, 1))
    other.load(saved(engine))
    assert engine.train_step(share(3, 0, 1)) == other.train_step(share(3, 0, 1))
    without, fresh = one_device(job()), one_device(job())
    without.train_step(share(0, 0, 1))
    without.load(saved(without))
    assert without.replica.model.carried.equal(fresh.replica.model.carried), "as in a new process"


def test_what_is_no_buffer_cannot_be_local() -> None:
    assert "not a buffer of the model: did you mean 'seen'?" in problem_of(
        lambda: one_device(job(local_state=("sen",)))
    )
    assert "only buffers can be local" in problem_of(lambda: one_device(job(local_state=("linear.*",))))
