"""The torch engines beyond what the conformance suite asks of all: torch's own ways to go wrong, and its bits."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainwright.core.data import Batch, Feed, Terms, fold
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import CheckpointError, DataError, JobError, NonFiniteLoss, PeerLost, UserCodeError
from trainwright.core.group import Address, Generation, Group, Move, Peer
from trainwright.core.plan import Mesh, Placement, Plan
from trainwright.strategies.torch import batches, owns
from trainwright.strategies.torch.data_parallel import DataParallel
from trainwright.strategies.torch.files import load_weights
from trainwright.strategies.torch.group import interface_of
from trainwright.strategies.torch.one_device import OneDevice
from trainwright.strategies.torch.profile import profile_model

GENERATION = Generation(token=1, number=1)


# --- jobs ---------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two layers, with whatever a test wants in between."""

    def __init__(self, middle: Callable[[], nn.Module] = nn.Tanh, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, dtype=dtype)
        self.middle = middle()
        self.second = nn.Linear(8, 3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.middle(self.first(x)))


def double() -> nn.Module:
    return Net(dtype=torch.float64)


def batch_normed() -> nn.Module:
    return Net(middle=lambda: nn.BatchNorm1d(8))


def dropping() -> nn.Module:
    return Net(middle=lambda: nn.Dropout(0.5))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(1) == targets


def spec(**changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "optimizer": adam,
        "inputs": ("x",),
        "targets": ("y",),
        "total_steps": 100,
        "seed": 3,
    }
    return ModelSpec(**{**fields, **changes})


def plan(ranks: int = 1, **changes: Any) -> Plan:
    fields: dict[str, Any] = {"strategy": "test", "engine": "", "batch_size": 12, "placement": Placement(cpus=1)}
    return Plan(mesh=Mesh(data=ranks), **{**fields, **changes})


def batch(rows: int = 12, first: int = 0, dtype: type = np.float32, **columns: Any) -> Batch:
    random = np.random.default_rng(first)
    held = {"x": random.normal(size=(rows, 4)).astype(dtype), "y": random.integers(0, 3, rows), **columns}
    return Batch(columns=held, weights=np.ones(rows), samples=np.arange(first, first + rows))


def feed(*parts: Batch, step: int = 0, rank: int = 0, total: int = 1, **changes: Any) -> Feed:
    given = parts or (batch(first=step * 100),)
    rows = changes.pop("rows", sum(int((one.weights > 0).sum()) for one in given) * total)
    return Feed(step=step, parts=(given,), data_ranks=range(rank, rank + 1), total=total, rows=rows, **changes)


def one_device(job: ModelSpec | None = None, how: Plan | None = None) -> OneDevice:
    engine = OneDevice()
    peer = Peer(rank=0, address=engine.reserve(GENERATION, "worker"))
    engine.form(Group(generation=GENERATION, rank=0, peers=(peer,)))
    engine.build(job or spec(), how or plan())
    return engine


class Files:
    """A checkpoint's files in memory."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def write(self, name: str, data: bytes | memoryview) -> None:
        self.files[name] = bytes(data)

    def names(self) -> tuple[str, ...]:
        return tuple(self.files)

    def read(self, name: str) -> bytes:
        return self.files[name]


def saved(engine: Any) -> Files:
    files = Files()
    engine.save(engine.snapshot(), files)
    return files


# --- one device: numbers ------------------------------------------------------------------------------------


def test_a_plain_loop_gives_the_same_parameters() -> None:
    engine = one_device(spec(model=double))
    torch.manual_seed(fold(3, -1))
    model = double()
    optimizer = adam(model.parameters())
    for step in range(5):
        given = batch(first=step, dtype=np.float64)
        report = engine.train_step(feed(given, step=step))
        optimizer.zero_grad()
        expected = loss(model(torch.from_numpy(given.columns["x"])), torch.from_numpy(given.columns["y"])).mean()
        expected.backward()
        optimizer.step()
        assert report.loss == pytest.approx(expected.item(), abs=1e-12)
    weights = load_weights(saved(engine))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=0.0, atol=1e-12)


def test_float32_losses_are_reported_to_1e_6() -> None:
    given = batch(1000, weights=None)
    heavy = dataclasses.replace(given, weights=np.random.default_rng(0).uniform(0.1, 10.0, 1000))
    report = one_device().train_step(feed(heavy))
    torch.manual_seed(fold(3, -1))
    outputs = Net()(torch.from_numpy(given.columns["x"])).double()
    values = loss(outputs, torch.from_numpy(given.columns["y"])).detach().numpy()
    assert report.loss == pytest.approx(float(np.average(values, weights=heavy.weights)), rel=1e-6)
    assert report.weight == pytest.approx(float(heavy.weights.sum()), rel=1e-6)


def test_values_of_weight_zero_do_not_count_even_if_they_are_not_finite() -> None:
    def masked(outputs: torch.Tensor, targets: torch.Tensor) -> Terms:
        values = loss(outputs, targets)
        broken = torch.cat((values[:6], values[6:].detach() * math.nan))
        return Terms(values=broken, weights=torch.cat((torch.ones(6), torch.zeros(6))))

    given = batch()
    half = {name: column[:6] for name, column in given.columns.items()}
    whole = one_device(spec(loss=masked)).train_step(feed(given))
    first = one_device().train_step(feed(Batch(columns=half, weights=np.ones(6), samples=given.samples[:6])))
    assert whole.weight == 6.0
    assert whole.loss == pytest.approx(first.loss, rel=1e-6)


def test_no_weight_at_all_applies_nothing_and_counts_the_step() -> None:
    engine = one_device(spec(model=lambda: Net(middle=lambda: nn.BatchNorm1d(8))))
    before = saved(engine).files["model.safetensors"]
    given = dataclasses.replace(batch(), weights=np.zeros(12))
    report = engine.train_step(feed(given, rows=12))
    assert (report.step, report.loss, report.weight) == (1, 0.0, 0.0)
    assert saved(engine).files["model.safetensors"] == before


def test_the_schedule_sets_each_groups_rate_and_never_builds_up() -> None:
    def two_groups(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters[:1], "lr": 0.4}, {"params": parameters[1:], "lr": 0.2}])

    job = spec(optimizer=two_groups, schedule=lambda step, total: (step + 1) / total, total_steps=4)
    engine = one_device(job)
    rates = [engine.train_step(feed(step=step)).learning_rate for step in (0, 1, 3)]
    assert rates == pytest.approx([0.1, 0.2, 0.4])
    assert engine._replica is not None
    assert engine._replica.optimizer.param_groups[1]["lr"] == pytest.approx(0.2)


def test_clipping_bites_after_the_weights_and_reports_the_norm_before() -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    job = spec(model=double, optimizer=sgd, clip_norm=1e-3)
    engine = one_device(job, plan(accumulation=2))
    given = batch(12, dtype=np.float64)
    heavy = dataclasses.replace(given, weights=np.full(12, 5.0))
    before = {name: value.clone() for name, value in load_weights(saved(engine)).items()}
    report = engine.train_step(feed(heavy, heavy))
    after = load_weights(saved(engine))
    moved = math.sqrt(sum(float(((after[name] - before[name]) ** 2).sum()) for name in before))
    assert report.gradient_norm is not None
    assert report.gradient_norm > 1e-3
    assert moved == pytest.approx(1e-3, rel=1e-9)


def test_bf16_computes_in_bf16_and_keeps_parameters() -> None:
    seen = []

    def noting(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(outputs.dtype)
        return loss(outputs, targets)

    engine = one_device(spec(loss=noting), plan(precision="bf16"))
    report = engine.train_step(feed())
    assert math.isfinite(report.loss)
    assert set(seen) == {torch.bfloat16}
    assert {value.dtype for value in load_weights(saved(engine)).values()} == {torch.float32}


def test_dropout_depends_on_step_micro_batch_and_rank_alone() -> None:
    def outputs_of(engine: OneDevice, given: Feed) -> float:
        return engine.train_step(given).loss

    engine = one_device(spec(model=dropping, optimizer=lambda p: torch.optim.SGD(p, lr=0.0)))
    same = batch()
    first = outputs_of(engine, feed(same))
    torch.rand(100)
    assert outputs_of(engine, feed(same)) == first
    assert outputs_of(engine, feed(same, step=1)) != first
    assert outputs_of(engine, feed(same, rank=1, total=2, rows=12)) != first


def test_a_step_of_ones_own_gets_all_columns() -> None:
    seen: dict[str, torch.Size] = {}

    def step(model: nn.Module, columns: Mapping[str, torch.Tensor]) -> Terms:
        seen.update({name: value.shape for name, value in columns.items()})
        return Terms(loss(model(columns["x"]), columns["y"]), columns["w"])

    engine = one_device(spec(loss=None, step=step, inputs=(), targets=()))
    report = engine.train_step(feed(batch(w=np.full(12, 2.0, np.float32))))
    assert set(seen) == {"x", "y", "w"}
    assert report.weight == 24.0
    assert engine.evaluate_step(feed(batch(w=np.ones(12)))).totals["loss"][1] == 12.0


def test_warm_keeps_every_bit_and_the_batch() -> None:
    def in_place(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        targets.clamp_(max=1)
        return loss(outputs, targets)

    engine = one_device(spec(model=batch_normed, loss=in_place))
    given, random = feed(), torch.get_rng_state()
    before, y = saved(engine).files, given.parts[0][0].columns["y"].copy()
    engine.warm(given)
    assert saved(engine).files == before
    assert torch.equal(torch.get_rng_state(), random)
    assert np.array_equal(given.parts[0][0].columns["y"], y)


def test_evaluation_sums_and_leaves_each_module_in_its_mode() -> None:
    def frozen() -> nn.Module:
        model = Net(middle=lambda: nn.Dropout(0.5))
        model.first.eval()
        return model

    engine = one_device(spec(model=frozen, metrics={"accuracy": accuracy}))
    parts = batch(8), batch(4, first=8)
    sums = engine.evaluate_step(feed(*parts))
    outputs = engine.predict_step(feed(*parts))["output"]
    targets = np.concatenate([part.columns["y"] for part in parts])
    assert sums.totals["accuracy"] == (float((outputs.argmax(1) == targets).sum()), 12.0)
    assert sums.totals["loss"][1] == 12.0
    assert engine._replica is not None
    assert [module.training for module in engine._replica.model.children()] == [False, True, True]


# --- one device: what goes wrong ----------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_names_step_and_samples_and_changes_nothing() -> None:
    engine = one_device(spec(model=batch_normed, loss=lambda o, t: loss(o, t.clamp(max=2)) / (t != 7).float()))
    engine.train_step(feed())
    before = saved(engine).files
    given = batch(first=40)
    given.columns["y"][[3, 5]] = 7
    with pytest.raises(NonFiniteLoss, match=r"step 1, in samples 43, 45 .*data rank 0") as raised:
        engine.train_step(feed(given, step=1))
    assert "nothing of this step was applied" in raised.value.remedy
    assert saved(engine).files == before
    assert engine.train_step(feed(step=1)).step == 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": lambda: "net"}, "model.. returned str: return a torch.nn.Module"),
        ({"model": lambda: nn.Tanh()}, "no parameter that requires a gradient"),
        ({"model": lambda: nn.LazyLinear(3)}, "has no shape yet"),
        ({"optimizer": lambda parameters: None}, "return a torch.optim.Optimizer"),
        ({"optimizer": lambda p: torch.optim.SGD([nn.Parameter(torch.ones(1))])}, "no parameter of the model"),
    ],
)
def test_build_refuses(change: Mapping[str, Any], text: str) -> None:
    with pytest.raises(JobError, match=text):
        one_device(spec(**change))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"loss": lambda o, t: loss(o, t).mean()}, 'one loss per sample: use reduction="none"'),
        ({"loss": lambda o, t: loss(o, t)[:5]}, r"shape \(5,\) for a batch of 12"),
        ({"loss": lambda o, t: loss(o, t).detach()}, "no gradient"),
        ({"loss": lambda o, t: 1.0}, "returned float"),
        ({"loss": lambda o, t: Terms(loss(o, t), torch.ones(5))}, r"weights of shape \(5,\) for values of shape"),
        ({"inputs": ("xs",)}, "column 'xs', but there is none: did you mean 'x'"),
        ({"targets": ("labels",)}, "column 'labels', but there is none"),
    ],
)
def test_a_step_refuses(change: Mapping[str, Any], text: str) -> None:
    engine = one_device(spec(**change))
    before = saved(engine).files
    for call in (engine.warm, engine.train_step):
        with pytest.raises(JobError, match=text):
            call(feed())
    assert saved(engine).files == before


def crash(*_: Any) -> Any:
    raise LookupError("crashed on purpose")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"model": crash}, r"model\(\) raised LookupError"),
        ({"optimizer": crash}, r"optimizer\(\) raised LookupError"),
        ({"loss": crash}, "loss= raised LookupError"),
        ({"step": crash, "loss": None}, "step= raised LookupError"),
        ({"schedule": crash}, "schedule= raised LookupError"),
        ({"metrics": {"odd": crash}}, "metric 'odd' raised LookupError"),
    ],
)
def test_user_code_that_raises_shows_its_own_frames(change: Mapping[str, Any], what: str) -> None:
    with pytest.raises(UserCodeError, match=what) as raised:
        engine = one_device(spec(**change))
        engine.train_step(feed())
        engine.evaluate_step(feed())
    assert raised.value.where == "rank 0"
    assert 'raise LookupError("crashed on purpose")' in raised.value.detail
    assert f"{os.sep}strategies{os.sep}torch" not in raised.value.detail
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_an_error_inside_backward_is_the_users() -> None:
    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
            return values.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            raise LookupError("no way back")

    engine = one_device(spec(loss=lambda o, t: Refusing.apply(loss(o, t))))
    with pytest.raises(UserCodeError, match="the backward pass raised LookupError: no way back"):
        engine.train_step(feed())


def test_an_error_inside_the_optimizer_leaves_an_unsound_state() -> None:
    class Half(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise LookupError("half way")

    engine = one_device(spec(optimizer=lambda parameters: Half(parameters, lr=0.1)))
    good = engine.snapshot()
    with pytest.raises(UserCodeError, match="half way"):
        engine.train_step(feed())
    assert not engine.transfer(()).sound
    assert engine.restore(good).sound


def test_batch_norm_is_refused_where_it_would_differ() -> None:
    for how in (plan(ranks=2), plan(accumulation=2)):
        with pytest.raises(JobError, match=r"'middle' is a batch norm.*GroupNorm or LayerNorm"):
            one_device(spec(model=batch_normed), how)
    accepted = one_device(spec(model=batch_normed, inexact=("batch_norm",)), plan(ranks=2))
    assert accepted.transfer(()).sound
    assert (
        one_device(spec(model=lambda: Net(middle=lambda: nn.BatchNorm1d(8).eval())), plan(ranks=2)).transfer(()).sound
    )


# --- columns to tensors -------------------------------------------------------------------------------------


def test_columns_share_memory_where_they_may() -> None:
    cpu, array = torch.device("cpu"), np.arange(6.0)
    assert np.shares_memory(batches.tensor("x", array, cpu).numpy(), array)
    array.flags.writeable = False
    assert not np.shares_memory(batches.tensor("x", array, cpu).numpy(), array)
    assert batches.tensor("x", array[::-1], cpu).tolist() == array[::-1].tolist()
    assert batches.tensor("x", array.astype(">f4"), cpu).tolist() == array.tolist()


@pytest.mark.parametrize("values", [["a", "b"], [object(), None], [b"a", b"b"], ["2020-01-01"]])
def test_columns_that_are_no_numbers_are_refused(values: list[Any]) -> None:
    dtype = "datetime64[D]" if str(values[0]).startswith("2020") else None
    with pytest.raises(DataError, match=r"(?s)column 'x' holds .*turn it into numbers"):
        batches.tensor("x", np.array(values, dtype=dtype), torch.device("cpu"))


# --- state --------------------------------------------------------------------------------------------------


def test_a_checkpoint_goes_on_bit_by_bit() -> None:
    unbroken, stopped = one_device(), one_device()
    for step in range(6):
        unbroken.train_step(feed(step=step))
    for step in range(3):
        stopped.train_step(feed(step=step))
    resumed = one_device(spec(seed=99))
    assert resumed.load(saved(stopped)).step == 3
    resumed._replica.spec = spec()  # type: ignore[union-attr]
    for step in range(3, 6):
        resumed.train_step(feed(step=step))
    assert saved(resumed).files == saved(unbroken).files


def test_a_snapshot_shares_nothing_with_the_training() -> None:
    engine = one_device()
    engine.train_step(feed())
    copy = engine.snapshot()
    files = Files()
    engine.train_step(feed(step=1))
    engine.save(copy, files)
    assert copy.step == 1
    assert copy.size_bytes > sum(value.nbytes for value in load_weights(files).values())
    assert engine.restore(copy).step == 1
    assert saved(engine).files == files.files
    engine.train_step(feed(step=1))
    again = Files()
    engine.save(copy, again)
    assert again.files == files.files


def test_settings_that_training_changed_are_saved_and_the_jobs_are_not() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1

    engine = one_device(spec(optimizer=lambda p: Counting(p, lr=0.1), schedule=lambda step, total: 0.5))
    engine.train_step(feed())
    files = saved(engine)
    assert json.loads(files.files["state.json"])["options"] == [{"count": 1}]
    other = one_device(spec(optimizer=lambda p: Counting(p, lr=0.7)))
    other.load(files)
    assert other._replica is not None
    assert other._replica.optimizer.param_groups[0]["count"] == 1
    assert other._replica.optimizer.param_groups[0]["lr"] == 0.7


class Wide(Net):
    """Other shapes and names than Net's."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(8, 5)
        self.third = nn.Linear(5, 3)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": Wide}, r"second.weight: shape \(3, 8\) of float32 in the checkpoint, shape \(5, 8\) of float32"),
        ({"model": double}, r"first.weight: shape \(8, 4\) of float32 in the checkpoint, shape \(8, 4\) of float64"),
        ({"optimizer": lambda p: torch.optim.SGD(p)}, "optimizer: Adam in the checkpoint, SGD in the job"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_whole(change: Mapping[str, Any], text: str) -> None:
    engine = one_device()
    engine.train_step(feed())
    other = one_device(spec(**change))
    before = saved(other).files
    with pytest.raises(CheckpointError, match=text) as raised:
        other.load(saved(engine))
    assert "start a run under a new name" in raised.value.remedy
    assert saved(other).files == before


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_missing_or_damaged_file_is_named(name: str) -> None:
    engine = one_device()
    files = saved(engine)
    files.files[name] = b"garbage"
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        engine.load(files)
    del files.files[name]
    with pytest.raises(CheckpointError, match=f"no {name}"):
        engine.load(files)


def test_layouts_in_memory_do_not_matter() -> None:
    def convolutional() -> nn.Module:
        layers = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten())
        return layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    engine, other = one_device(spec(model=convolutional)), one_device(spec(model=convolutional, seed=4))
    engine.train_step(feed())
    other.load(saved(engine))
    assert engine.train_step(feed(step=1)) == other.train_step(feed(step=1))


# --- several ranks ------------------------------------------------------------------------------------------

Exchange = Callable[[Any], list[Any]]
Scenario = Callable[[int, int, Exchange], Any]


def _rank(scenario: Scenario, rank: int, world: int, pipe: Connection) -> None:
    def exchange(value: Any) -> list[Any]:
        pipe.send(("exchange", value))
        answer: list[Any] = pipe.recv()
        return answer

    pipe.send(("result", scenario(rank, world, exchange)))


def run_ranks(scenario: Scenario, world: int) -> list[Any]:
    """Results of a scenario on each rank; None for one that died. `exchange` gathers a value from all ranks alive."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])  # what the first optimizer would import
    pipes, processes, results = {}, [], [None] * world
    for rank in range(world):
        pipes[rank], theirs = context.Pipe()
        processes.append(context.Process(target=_rank, args=(scenario, rank, world, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
    try:
        while pipes:
            values: list[Any] = [None] * world
            for rank, pipe in list(pipes.items()):
                assert pipe.poll(90.0), f"rank {rank} did not answer"
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    del pipes[rank]
                    continue
                if kind == "result":
                    results[rank] = value
                    del pipes[rank]
                values[rank] = value
            for pipe in pipes.values():
                pipe.send(values)
    finally:
        for process in processes:
            process.join(5.0)
            process.kill()
    return results


def formed(
    rank: int, exchange: Exchange, job: ModelSpec, *, engine: DataParallel | None = None, ranks: Sequence[int] = ()
) -> DataParallel:
    """An engine in a group of the ranks alive."""
    engine = engine or DataParallel()
    addresses = [address for address in exchange(engine.reserve(GENERATION, "worker")) if isinstance(address, Address)]
    peers = tuple(Peer(rank=number, address=address) for number, address in enumerate(addresses))
    place = ranks.index(rank) if ranks else rank
    engine.form(Group(generation=GENERATION, rank=place, peers=peers, deadline_s=20.0))
    if engine._replica is None:
        engine.build(job, plan(ranks=len(peers)))
    return engine


def share(step: int, rank: int, total: int, dtype: type = np.float32) -> Feed:
    """The ranks' shares of one global batch of 12."""
    whole = batch(12, first=step * 100, dtype=dtype)
    rows = np.arange(12)[rank::total]
    part = Batch(
        columns={name: column[rows] for name, column in whole.columns.items()},
        weights=np.ones(len(rows)),
        samples=whole.samples[rows],
    )
    return feed(part, step=step, rank=rank, total=total, rows=12)


def some_unused() -> nn.Module:
    model = double()
    model.never = nn.Linear(2, 2, dtype=torch.float64)
    model.frozen = nn.Linear(2, 2).requires_grad_(False)
    return model


def _unused_and_repeat(rank: int, world: int, exchange: Exchange) -> Any:
    job = spec(model=some_unused, clip_norm=0.1)
    engine = formed(rank, exchange, job)
    answers = []
    for seed_run in range(2):
        if seed_run:
            engine.leave()
            engine = formed(rank, exchange, job)
        engine.warm(share(0, rank, world, np.float64))
        reports = [engine.train_step(share(step, rank, world, np.float64)) for step in range(4)]
        answers.append((reports, saved(engine).files))
    engine.leave()
    return answers


def test_ranks_agree_with_one_device_and_runs_repeat_bit_by_bit() -> None:
    results = run_ranks(_unused_and_repeat, 3)
    alone = one_device(spec(model=some_unused, clip_norm=0.1))
    expected = [alone.train_step(share(step, 0, 1, np.float64)) for step in range(4)]
    first, second = results[0]
    assert first == second
    assert all(result == results[0] for result in results)
    for report, wanted in zip(first[0], expected, strict=True):
        assert report.loss == pytest.approx(wanted.loss, abs=1e-12)
        assert report.gradient_norm == pytest.approx(wanted.gradient_norm, abs=1e-12)
        assert report.weight == 12.0
    files = Files()
    files.files = first[1]
    for name, value in load_weights(saved(alone)).items():
        torch.testing.assert_close(load_weights(files)[name], value, rtol=0.0, atol=1e-12)


def _reduced_per_step(rank: int, world: int, exchange: Exchange) -> Any:
    engine = formed(rank, exchange, spec(model=double))
    engine.warm(share(0, rank, world, np.float64))
    engine.train_step(share(0, rank, world, np.float64))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        report = engine.train_step(dataclasses.replace(share(1, rank, world, np.float64), wish=rank == 1))
    engine.leave()
    names = [event.name for event in profile.events() if event.name.startswith("gloo:")]
    return names, report.wish


def test_weights_losses_and_wish_need_no_collective_of_their_own() -> None:
    for names, wish in run_ranks(_reduced_per_step, 2):
        assert names == ["gloo:all_reduce"]
        assert wish


def _not_finite(rank: int, world: int, exchange: Exchange) -> Any:
    engine = formed(rank, exchange, spec())
    engine.warm(share(0, rank, world))
    before = saved(engine).files
    given = share(0, rank, world)
    if rank == 1:
        given.parts[0][0].columns["x"][2] = np.nan
    try:
        engine.train_step(given)
    except NonFiniteLoss as error:
        kept = saved(engine).files == before
        later = engine.train_step(share(0, rank, world)).loss
        engine.leave()
        return str(error), kept, later
    return None


def test_every_rank_hears_of_a_loss_that_is_not_finite_in_the_same_step() -> None:
    (healthy, kept, loss_0), (ill, also_kept, loss_1) = run_ranks(_not_finite, 2)
    assert "step 0, on another data rank" in healthy
    assert "step 0, in samples 5 (rank 1, data rank 1)" in ill
    assert kept
    assert also_kept
    assert loss_0 == loss_1
    assert math.isfinite(loss_0)


def _victim(rank: int, world: int, exchange: Exchange) -> Any:
    """The last rank kills itself in the loss of step 3; the others go on without it, and a fresh engine joins."""
    dying = []

    def deadly(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if dying and rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(outputs, targets)

    engine = formed(rank, exchange, spec(loss=deadly))
    engine.warm(share(0, rank, world))
    for step in range(3):
        engine.train_step(share(step, rank, world))
    before = saved(engine).files
    dying.append(True)
    begun = time.monotonic()
    try:
        engine.train_step(share(3, rank, world))
    except PeerLost as error:
        engine.leave()
        engine.leave()
        noticed, text = time.monotonic() - begun, str(error)
    tag, kept = engine.transfer(()), saved(engine).files == before
    if rank == 0:
        engine = DataParallel()  # as a newcomer would stand
    survivors = list(range(world - 1))
    engine = formed(rank, exchange, spec(loss=deadly, seed=5), engine=engine, ranks=survivors)
    moved = engine.transfer([Move(source=1, target=0, piece="state")])
    equal = saved(engine).files == before
    engine.warm(share(3, rank, world - 1))
    losses = [engine.train_step(share(step, rank, world - 1)).loss for step in range(3, 6)]
    last = saved(engine).files
    engine.leave()
    return noticed, text, tag, kept, moved, equal, losses, last


def test_survivors_notice_at_once_and_go_on_with_a_newcomer() -> None:
    *survivors, dead = run_ranks(_victim, 3)
    assert dead is None
    for noticed, text, tag, kept, moved, equal, _, _ in survivors:
        assert noticed < 10.0
        assert "another rank went away" in text
        assert (tag.step, tag.sound, kept) == (3, True, True)
        assert (moved.step, moved.sound, equal) == (3, True, True)
    assert survivors[0][6:] == survivors[1][6:]


def _user_error(rank: int, world: int, exchange: Exchange) -> Any:
    broken = []

    def breaking(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return crash() if broken and rank == 0 else loss(outputs, targets)

    engine = formed(rank, exchange, spec(loss=breaking))
    engine.warm(share(0, rank, world))
    broken.append(True)
    begun = time.monotonic()
    try:
        engine.train_step(share(0, rank, world))
    except (UserCodeError, PeerLost) as error:
        engine.leave()
        return type(error).__name__, time.monotonic() - begun
    return None


def test_a_user_error_on_one_rank_frees_the_others_at_once() -> None:
    results = run_ranks(_user_error, 3)
    assert [kind for kind, _ in results] == ["UserCodeError", "PeerLost", "PeerLost"]
    assert max(seconds for _, seconds in results) < 10.0


class Chosen(Net):
    """Uses its second layer in some batches only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) if bool((x[0, 0] < 50).item()) else self.first(x)[:, :3]


def _sometimes_unused(rank: int, world: int, exchange: Exchange) -> Any:
    engine = formed(rank, exchange, spec(model=Chosen))
    engine.warm(share(0, rank, world))
    given = share(0, rank, world)
    given.parts[0][0].columns["x"][0] = 99.0
    try:
        engine.train_step(given)
    except JobError as error:
        engine.leave()
        return str(error)
    return None


def test_a_parameter_that_is_sometimes_unused_is_refused_before_anything_is_applied() -> None:
    for text in run_ranks(_sometimes_unused, 2):
        assert "'second.weight' got no gradient in this batch but did in others" in text


def _unequal(rank: int, world: int, exchange: Exchange) -> Any:
    def unseeded() -> nn.Module:
        model = Net()
        nn.init.constant_(model.first.bias, float(rank))
        return model

    engine = formed(rank, exchange, spec(model=unseeded))
    try:
        engine.warm(share(0, rank, world))
    except JobError as error:
        engine.leave()
        return str(error)
    return None


def test_ranks_that_built_different_models_are_refused() -> None:
    for text in run_ranks(_unequal, 2):
        assert "ranks 0 and 1 hold different parameters" in text


def _alone(rank: int, world: int, exchange: Exchange) -> Any:
    engine = DataParallel()
    addresses = exchange(engine.reserve(GENERATION, "worker"))
    if rank == 1:
        return None
    peers = tuple(Peer(rank=number, address=address) for number, address in enumerate(addresses))
    begun = time.monotonic()
    try:
        engine.form(Group(generation=GENERATION, rank=0, peers=peers, deadline_s=2.0))
    except PeerLost as error:
        return str(error), time.monotonic() - begun
    return None


def test_a_group_that_does_not_form_says_so_by_its_deadline() -> None:
    text, seconds = run_ranks(_alone, 2)[0]
    assert "the group of 2 did not form within 2 s" in text
    assert seconds < 20.0


def test_reserved_ports_differ_and_the_loopback_interface_is_known() -> None:
    engines = [DataParallel() for _ in range(3)]
    ports = {engine.reserve(GENERATION, "worker").port for engine in engines}
    for engine in engines:
        engine.leave()
    assert len(ports) == 3
    assert interface_of("127.0.0.1") in ("lo", None)


# --- profiles -----------------------------------------------------------------------------------------------


def test_a_profile_counts_each_layer_for_one_sample() -> None:
    profile = profile_model(Net, {"x": np.zeros((2, 4), np.float32)}, ("x",))
    costs = {layer.name: layer for layer in profile.layers}
    assert set(costs) == {"first", "second"}
    assert (costs["first"].parameters, costs["first"].flops) == (40, 2 * 4 * 8)
    assert (costs["second"].parameter_bytes, costs["second"].output_bytes) == (27 * 4, 3 * 4)
    assert profile.inexact == ()
    assert profile_model(batch_normed, {"x": np.zeros((2, 4), np.float32)}, ("x",)).inexact == ("batch_norm",)


def test_a_profile_gives_operations_outside_layers_to_the_module_that_does_them() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).sum() * (x @ x.T)

    costs = {layer.name: layer.flops for layer in profile_model(Attending, {"x": np.ones((1, 4))}, ("x",)).layers}
    assert costs == {"Attending": 2.0 * 4, "inner": 2.0 * 16}


def test_a_model_that_cannot_be_traced_is_estimated(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="trainwright.strategies.torch.profile"):
        profile = profile_model(Chosen, {"x": np.zeros((1, 4), np.float32)}, ("x",))
    assert profile.flops == 2.0 * profile.parameters == 2.0 * 67
    assert "operations are estimated from parameters" in caplog.text


def test_owns_knows_modules_by_their_class() -> None:
    assert owns(Net())
    assert not owns(object())
    assert not owns(Net)


def test_importing_the_engines_imports_neither_ray_nor_tensorflow() -> None:
    code = (
        "import sys; import trainwright.strategies.torch as t; print('torch' in sys.modules);"
        "import trainwright.strategies.torch.data_parallel, trainwright.strategies.torch.one_device;"
        "print([name for name in ('ray', 'tensorflow', 'keras') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.split("\n")[:2] == ["False", "[]"]


def test_seeds_of_different_counters_differ() -> None:
    seeds = {fold(3, step, micro, rank, 0) for step, micro, rank in itertools.product(range(4), repeat=3)}
    assert len(seeds) == 64
