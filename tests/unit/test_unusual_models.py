"""Models and optimizers that are legal in torch and rare: their steps, their state, and its way to a new worker."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.serialization import safe_globals

from tests.support.rank_processes import Exchange, formed, run_ranks
from tests.support.torch_engines import Net, batch, feed, one_device, plan, saved, spec
from tests.unit.test_torch_process_groups import share
from trainwright.core.data import Feed
from trainwright.core.errors import CheckpointError, JobError
from trainwright.core.topology import StateTransfer
from trainwright.strategies.torch.checkpoint.host_state import LossScale, _description, _TensorForm
from trainwright.strategies.torch.checkpoint.safetensors_files import load_weights

SAMPLED = 31  # the first step in which gradients are measured


def halves(step: int) -> Feed:
    """Two micro-batches."""
    return feed(batch(6, first=step * 100), batch(6, first=step * 100 + 6), step=step)


def test_numbers_of_numpy_in_rates_and_state_reach_a_new_worker() -> None:
    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["seen"] = np.float64(0.25)

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(np.pi * step / 100)))

    engine = one_device(spec(optimizer=lambda parameters: Noting(parameters, lr=np.float64(0.1)), schedule=schedule))
    for step in range(2):
        engine.train_step(feed(step=step))
    file = io.BytesIO()
    torch.save(_description(engine.replica), file)
    with safe_globals([_TensorForm, LossScale]):
        said = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert said == _description(engine.replica)


def test_state_that_all_parameters_share_is_refused_and_not_lost() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            self.state["k"] = torch.tensor([1])  # type: ignore[index]

    engine = one_device(spec(optimizer=lambda parameters: Counting(parameters, lr=0.1)))
    engine.train_step(feed())
    with pytest.raises(CheckpointError, match="keeps 'k' in its state for all parameters together"):
        engine.snapshot()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.table((x[:, 0].abs() * 4).long().clamp(max=7)))
        return made


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last((x.to(torch.complex64) @ self.mix).abs())
        return made


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("model", [Sparse, Complex])
def test_gradients_of_rare_kinds_are_measured_and_clipped(model: type[nn.Module], clip_norm: float | None) -> None:
    engine = one_device(
        spec(model=model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), clip_norm=clip_norm),
        plan(accumulation=2),
    )
    for step in (0, SAMPLED, SAMPLED + 1):
        report = engine.train_step(halves(step))
        assert math.isfinite(report.loss)
        assert (report.gradient_norm is not None) == (clip_norm is not None)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_a_scripted_part_is_trained_saved_and_evaluated() -> None:
    def scripted() -> nn.Module:
        middle = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        return Net(middle=lambda: torch.jit.script(middle))

    engine, other = one_device(spec(model=scripted)), one_device(spec(model=scripted))
    before = {name: value.clone() for name, value in engine.replica.model.state_dict().items()}
    engine.warm(feed())
    assert all(torch.equal(value, before[name]) for name, value in engine.replica.model.state_dict().items())
    engine.train_step(feed())
    engine.evaluate_step(feed())
    other.load(saved(engine))
    assert [engine.train_step(feed(step=1))] == [other.train_step(feed(step=1))]
    assert saved(other).files == saved(engine).files


def test_a_wrapper_that_renames_trained_parameters_is_refused() -> None:
    def wrapped() -> nn.Module:
        model = Net()
        model.first = checkpoint_wrapper(model.first)
        return model

    with pytest.raises(JobError, match=r"'first\._checkpoint_wrapped_module\.weight' .*state_dict.*recompute=full"):
        one_device(spec(model=wrapped))


class Caching(nn.Module):
    """Makes a mask in its first forward, and a longer table."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.register_buffer("mask", None, persistent=False)
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask, self.table = torch.full((4,), 0.5), torch.arange(4.0)
        made: Tensor = self.last(x * self.mask + self.table)
        return made


def _to_a_newcomer(rank: int, world: int, exchange: Exchange) -> Any:
    engine = formed(rank, exchange, spec(model=Caching))
    if rank == 0:
        with torch.no_grad():
            engine.replica.model(torch.ones(2, 4))
        engine.replica.step = 0
    engine.transfer([StateTransfer(piece="state", source=0, target=1)])
    found = {name: value.tolist() for name, value in engine.replica.named_buffers()}
    engine.warm(share(0, rank, world))
    loss = engine.train_step(share(0, rank, world)).loss
    engine.leave()
    return found, loss


def test_buffers_that_a_forward_made_reach_a_new_worker() -> None:
    (first, one), (second, other) = run_ranks(_to_a_newcomer, 2)
    assert first == second == {"mask": [0.5] * 4, "table": [0.0, 1.0, 2.0, 3.0]}
    assert one == other


KINDS = {
    "brain": torch.tensor(1.5, dtype=torch.bfloat16),
    "turned": torch.arange(6.0, dtype=torch.float16).view(2, 3).t(),
    "empty": torch.empty(0, 3, dtype=torch.float16),
    "truth": torch.tensor([True, False, True]),
    "complex": torch.tensor([[1 + 2j], [3 - 4j]], dtype=torch.complex128),
}


class Mixed(nn.Module):
    """A frozen base of 16 bits, a trained layer of 16 bits, and buffers of many types; zeros on later ranks."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.base, self.last = nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 3, dtype=torch.bfloat16)
        self.base.requires_grad_(False)
        for name, value in KINDS.items():
            self.register_buffer(name, torch.zeros_like(value) if rank else value.clone())

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.base(x.bfloat16()))
        return made.float()


def _mixed(rank: int, world: int, exchange: Exchange) -> Any:
    engine = formed(rank, exchange, spec(model=lambda: Mixed(rank)))
    engine.transfer([StateTransfer(piece="state", source=0, target=1)])
    found = {name: (tuple(value.shape), value.tolist()) for name, value in engine.replica.named_buffers()}
    engine.warm(share(0, rank, world))
    loss = engine.train_step(share(0, rank, world)).loss
    engine.verify()
    engine.leave()
    return found, loss


def test_tensors_of_all_types_and_of_16_bits_reach_a_new_worker() -> None:
    (first, one), (second, other) = run_ranks(_mixed, 2)
    assert first == second == {name: (tuple(value.shape), value.tolist()) for name, value in KINDS.items()}
    assert one == other


class Skipping(nn.Module):
    """Uses a layer in micro-batches of which the first row says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes = nn.Linear(4, 3, dtype=torch.float64), nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.first(x)
        return made + self.sometimes(x) if x[0, 0] > 0 else made


def _shrunk(rank: int, world: int, exchange: Exchange) -> Any:
    """Rank 0 has the shares of two data ranks, rank 1 that of the third: one micro-batch each."""
    job = spec(model=Skipping, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    engine = formed(rank, exchange, job, how=plan(ranks=3))
    engine.transfer([StateTransfer(piece="state", source=0, target=1)])

    def own(step: int, used: tuple[bool, ...]) -> Feed:
        held = range(2) if rank == 0 else range(2, 3)
        parts = [_used(step, (used[number],), number, 3).parts[0] for number in held]
        return Feed(step=step, parts=tuple(parts), data_ranks=held, total=3, rows=9)

    engine.warm(own(0, (True, True, True)))
    losses = [engine.train_step(own(step, used)).loss for step, used in enumerate(SHARES)]
    engine.verify()
    weights = {name: value.numpy() for name, value in load_weights(saved(engine)).items()}
    engine.leave()
    return losses, weights


SHARES = ((True, True, True), (True, False, True), (False, True, False), (True, False, False))


def test_a_layer_that_only_some_shares_of_a_rank_use_is_averaged() -> None:
    job = spec(model=Skipping, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    alone, expected = one_device(job, plan(accumulation=3)), []
    for step, used in enumerate(SHARES):
        parts = [_used(step, (each,), number, 3).parts[0][0] for number, each in enumerate(used)]
        expected.append(alone.train_step(feed(*parts, step=step, rows=9)).loss)
    weights = load_weights(saved(alone))
    for losses, found in run_ranks(_shrunk, 2):
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
        for name, value in weights.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-12, err_msg=name)


def _skipping(rank: int, world: int, exchange: Exchange) -> Any:
    job = spec(model=Skipping, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    engine = formed(rank, exchange, job, how=plan(ranks=world, accumulation=2))
    engine.transfer([StateTransfer(piece="state", source=0, target=1)])
    losses = []
    engine.warm(_used(0, (True, True), rank, world))
    for step, used in enumerate([(True, True), (True, False), (False, True), (False, False), (True, False)]):
        losses.append(engine.train_step(_used(step, used, rank, world)).loss)
    engine.verify()
    weights = {name: value.numpy() for name, value in load_weights(saved(engine)).items()}
    engine.leave()
    return losses, weights


def _used(step: int, used: tuple[bool, ...], rank: int, world: int) -> Feed:
    """Micro-batches of this rank; of the last rank they use the layer in the other order."""
    parts = []
    for number, each in enumerate(reversed(used) if rank and rank == world - 1 else used):
        part = batch(3, first=step * 100 + 50 * rank + number * 6, dtype=np.float64)
        part.columns["x"][:, 0] = np.abs(part.columns["x"][:, 0]) * (1 if each else -1)
        parts.append(part)
    return feed(*parts, step=step, rank=rank, total=world, rows=6 * world)


def test_a_layer_that_only_some_micro_batches_use_is_averaged() -> None:
    """The gradient is of the first micro-batch, and the reduction waits for the last one's."""
    job = spec(model=Skipping, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    alone = one_device(job, plan(accumulation=4))
    expected = []
    for step, used in enumerate([(True, True), (True, False), (False, True), (False, False), (True, False)]):
        both = [_used(step, used, rank, 2) for rank in range(2)]
        parts = [part for each in both for part in each.parts[0]]
        expected.append(alone.train_step(feed(*parts, step=step, rows=12)).loss)
    weights = load_weights(saved(alone))
    for losses, found in run_ranks(_skipping, 2):
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
        for name, value in weights.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-12, err_msg=name)
