"""Half precision in plans that divide the model: what is gathered in it, and how near one device the results are."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.conformance import problems, torch_case
from tests.support.conformance.cases import CASES
from tests.support.conformance.harness import Pool, World
from tests.support.conformance.language_model import Block, Language
from tests.support.conformance.problems import PROBLEMS
from tests.support.conformance.torch_case import adamw
from tests.support.conformance.unbroken_runs import assert_same
from trainwright.core.data import Feed, StepReport
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Mesh, Plan
from trainwright.driver.rendezvous import agree_on_state

NAMED = {case.name: case for case in CASES}
LAYOUTS = {
    "one": (1, NAMED["torch-one-device"]),
    "parallel": (2, NAMED["torch-data-parallel"]),
    "zero-1": (2, NAMED["torch-zero-1"]),
    "zero-2": (2, NAMED["torch-zero-2"]),
    "zero-3": (3, NAMED["torch-sharded"]),
    "hybrid": (4, NAMED["torch-hybrid-shard"]),
}
PROBLEM = replace(PROBLEMS["ragged"], dtype="float32", batch_size=25)
WIDTH = 6
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
NEAR = 1e-4 if RELEASE >= (2, 12) else 2e-3  # older kernels round sums otherwise where a weight lies elsewhere
PLACES = torch.int64 if RELEASE >= (2, 12) else torch.float32  # an older FSDP2 divides no integers
Run = tuple[list[StepReport], dict[str, Any]]

CAST = ("lift.weight", "layers.0.inner.weight", "layers.1.inner.bias", "frozen.weight", "joint", "head.weight")
READ = (
    "table.weight", "layers.0.norm.weight", "layers.1.many.weight", "layers.0.island.weight", "scale", "wide", "places",
    "tied.weight",
)  # fmt: skip


class Mixed(nn.Module):
    """A block with a layer norm, a batch norm and a product that its author keeps out of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.many = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.inner, self.island = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kinds: dict[str, torch.dtype] = {}

    def forward(self, hidden: Tensor) -> Tensor:
        self.kinds = {name: parameter.dtype for name, parameter in self.named_parameters()}
        hidden = self.many(hidden + nn.functional.gelu(self.inner(self.norm(hidden))))
        with torch.autocast(hidden.device.type, enabled=False):
            outputs: Tensor = hidden + self.island(hidden.float())
        return outputs


class Precise(nn.Module):
    """Parameters of all kinds: of products, tables, norms, frozen ones, wide ones, integers, tied ones.

    `narrow` records in training which of CAST and READ are of 16 bits, and of which type the running means are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(problems.FEATURES, WIDTH)
        self.table = nn.Embedding(5, WIDTH)
        self.tied = nn.Linear(WIDTH, 5, bias=False)
        self.layers = nn.ModuleList(Mixed() for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.joint = nn.Parameter(torch.linspace(-1.0, 1.0, 2 * WIDTH * WIDTH).view(2 * WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.wide = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64), requires_grad=False)
        self.places = nn.Parameter(torch.arange(5, dtype=PLACES), requires_grad=False)
        self.head = nn.Linear(WIDTH, problems.CLASSES)
        self.tied.weight = self.table.weight
        self.register_buffer("narrow", torch.zeros(len(CAST) + len(READ)))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.lift(inputs)
        looked_up = self.table(self.places[(inputs[:, 0] > 0).long()].long())
        hidden = hidden + looked_up * self.scale + self.tied(hidden) @ self.places[:, None].float()
        hidden = (hidden * self.wide).float()
        for layer in self.layers:
            hidden = layer(hidden)
        first, second = self.joint.chunk(2)
        hidden = nn.functional.linear(hidden, first) + nn.functional.linear(hidden, second) + self.frozen(hidden)
        outputs: Tensor = self.head(hidden)
        if self.training:
            kinds = {name: each.dtype for name, each in self.named_parameters(remove_duplicate=False)}
            for number, layer in enumerate(self.layers):
                kinds |= {f"layers.{number}.{name}": kind for name, kind in layer.kinds.items()}
            self.narrow.copy_(torch.tensor([kinds[name].itemsize == 2 for name in (*CAST, *READ)]))
            assert self.layers[0].many.running_mean.dtype == torch.float32
        return outputs


def spec(model: Callable[[], nn.Module] = Precise, **fields: Any) -> ModelSpec:
    given: dict[str, Any] = {
        "model": model, "loss": torch_case.cross_entropy, "optimizer": adamw, "total_steps": 20, "inputs": ("x",),
        "targets": ("y",), "inexact": ("batch_norm",), "sample": functools.partial(torch_case.sample, PROBLEM),
    }  # fmt: skip
    return ModelSpec(**{**given, **fields})


def trained(pool: Pool, name: str, job: ModelSpec, workers: int = 0, **fields: Any) -> Run:
    """Reports and last state of six steps in half precision, of batches in uneven parts."""
    usual, case = LAYOUTS[name]
    return steps(pool, replace(case.plan(PROBLEM, workers or usual), **{"precision": "bf16", **fields}), job)


def steps(pool: Pool, plan: Plan, job: ModelSpec) -> Run:
    """Reports and last state of six steps."""
    feeds = feeds_of(plan)
    with World(pool, "torch", plan, job) as world:
        world.start(feeds[0])
        reports = world.train(feeds)
        assert all(one == reports[0] for one in reports)
        return reports[0], torch_case.state(world.files())


def feeds_of(plan: Plan) -> list[list[Feed]]:
    data, ids = problems.columns(PROBLEM), problems.batches(PROBLEM)
    return [problems.feeds(PROBLEM, plan, step, ids[step], data) for step in range(6)]


@functools.cache
def in_replicas(pool: Pool, workers: int, **fields: Any) -> Run:
    """The same in whole replicas, which compute under autocast with parameters in single precision."""
    return trained(pool, "parallel", spec(), workers, **fields)


def narrow(run: Run) -> tuple[list[bool], dict[str, Any]]:
    """Which parameters were of 16 bits, and the rest of the state."""
    rest = dict(run[1])
    return rest.pop("model.safetensors/narrow").astype(bool).tolist(), rest


def assert_near(found: Run, expected: Run, rel: float) -> None:
    """Losses relative to each other, and all of the state relative to its largest number; the root of squares."""
    assert [one.loss for one in found[0]] == pytest.approx([one.loss for one in expected[0]], rel=rel)
    state, whole = narrow(found)[1], narrow(expected)[1]
    assert state.keys() == whole.keys()
    for key in state.keys() - {"state.json"}:
        assert state[key].dtype == whole[key].dtype, key
        values, others = (np.sqrt(each[key]) if key.endswith("_sq") else each[key] for each in (state, whole))
        assert np.allclose(values, others, rtol=0, atol=rel * (np.abs(others).max() + 1e-6)), key


@pytest.mark.parametrize(("name", "precision"), [
    ("zero-1", "bf16"), ("zero-2", "bf16"), ("zero-3", "bf16"), ("hybrid", "bf16"), ("zero-1", "fp16"),
])  # fmt: skip
def test_what_autocast_only_casts_is_gathered_in_half_precision(pool: Pool, name: str, precision: str) -> None:
    expected = in_replicas(pool, LAYOUTS[name][0], precision=precision)
    found = trained(pool, name, spec(), precision=precision)
    (kinds, state), (plain, whole) = narrow(found), narrow(expected)
    assert (kinds, any(plain)) == ([True] * len(CAST) + [False] * len(READ), False)
    assert_near(found, expected, NEAR)
    if name == "zero-1":  # it adds up gradients in the same order
        assert_same(state, whole)


class Sometimes(Precise):
    """Uses a layer only where the first row of a micro-batch says so."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least
        self.spare = nn.Linear(problems.FEATURES, problems.CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return outputs + self.spare(inputs) if inputs[0, 0] > self.least else outputs


def test_ranks_that_see_different_casts_gather_alike(pool: Pool) -> None:
    feeds = feeds_of(LAYOUTS["zero-2"][1].plan(PROBLEM, 2))[0]
    firsts = [float(feed.parts[0][0].columns["x"][0, 0]) for feed in feeds]
    job = spec(functools.partial(Sometimes, sum(firsts) / 2), optimizer=plain_descent)
    assert_near(trained(pool, "zero-2", job), trained(pool, "parallel", job), 1e-5)


def test_with_the_state_in_host_memory(pool: Pool) -> None:
    found, expected = trained(pool, "zero-2", spec(), offload=True), trained(pool, "zero-2", spec())
    assert narrow(found)[0] == [True] * len(CAST) + [False] * len(READ)
    assert_same(found[1], expected[1])


def of_ones_own(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """A step that differentiates on the way: by a penalty on the slope of the outputs."""
    inputs = batch["x"].clone().requires_grad_()
    outputs = model(inputs)
    (slope,) = torch.autograd.grad(outputs.float().sum(), inputs, create_graph=False, retain_graph=True)
    return torch_case.cross_entropy(outputs, batch["y"]) * (1.0 + slope.square().mean(1))


def test_a_step_of_ones_own(pool: Pool) -> None:
    job = spec(loss=None, step=of_ones_own)
    found, expected = (trained(pool, name, job) for name in ("zero-2", "parallel"))
    assert narrow(found)[0] == [True] * len(CAST) + [False] * len(READ)
    assert_near(found, expected, 1e-4)


@pytest.mark.parametrize("name", ["zero-1", "hybrid"])
def test_gradients_are_rounded_where_the_plan_says_so(pool: Pool, name: str) -> None:
    """Each rank's by up to 2^-9 of itself, so that the losses of six steps are within a hundredth."""
    expected = trained(pool, name, spec(optimizer=plain_descent))
    found = trained(pool, name, spec(optimizer=plain_descent), wire="bf16")
    assert narrow(found)[0] == narrow(expected)[0]
    assert [one.loss for one in found[0]] == pytest.approx([one.loss for one in expected[0]], rel=1e-2)
    assert found[0][1].loss != expected[0][1].loss
    assert found[1]["model.safetensors/scale"].dtype == np.float32


def plain_descent(parameters: Any) -> torch.optim.Optimizer:
    """Proportional to gradients, as Adam's first steps are not."""
    return torch.optim.SGD(parameters, lr=0.05)


def test_a_killed_rank_and_another_layout_go_on_with_the_same_bits(pool: Pool) -> None:
    workers, case = LAYOUTS["hybrid"]
    plan = replace(case.plan(PROBLEM, workers), precision="bf16")
    feeds, dead = feeds_of(plan), workers - 1
    with World(pool, "torch", plan, spec()) as world:
        world.start(feeds[0])
        outcomes, _ = world.train_with_fault(feeds[:4], dead, "kill")
        assert outcomes[dead].dead
        agreement = agree_on_state(dict(enumerate(world.form())))
        assert agreement is not None and [move.target for move in agreement.moves] == [dead]
        assert {tag.step for tag in world.every("transfer", lambda rank: (agreement.moves,))} == {3}
        world.warm(feeds[3])
        reports, files = world.train(feeds[3:])[0], world.files()
    expected, whole = trained(pool, "hybrid", spec())
    assert [one.loss for one in reports] == [one.loss for one in expected[3:]]
    assert_same(torch_case.state(files), whole)
    other = replace(LAYOUTS["zero-1"][1].plan(PROBLEM, 2), precision="bf16")
    with World(pool, "torch", other, spec()) as world:
        world.form()
        world.every("load", lambda rank: (files,))
        state = torch_case.state(world.files())
        assert {key: value for key, value in state.items() if key != "state.json"}.keys() < whole.keys()
        assert_same({**state, "state.json": whole["state.json"]}, whole)
        world.warm(feeds_of(other)[0])
        assert math.isfinite(world.train(feeds_of(other)[:1])[0][0].loss)


class Noting(Block):
    """A block that notes whether the weights of a product and of a norm are of 16 bits."""

    narrow: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        self.narrow.copy_(torch.tensor([each.weight.itemsize == 2 for each in (self.gate, self.norm)]))
        return super().forward(hidden)


def language() -> Language:
    """In single precision, with blocks that note their types."""
    model = Language().float()
    for block in model.blocks:
        block.__class__ = Noting
        block.register_buffer("narrow", torch.zeros(2))
    return model


DIVIDED: Mapping[str, tuple[Mesh, int, str]] = {  # the mesh, what is sharded, the schedule
    "dp": (Mesh(data=2), 0, ""),
    "fsdp": (Mesh(shard=2), 1, ""),
    "dp x pp": (Mesh(data=2, pipeline=2), 0, "1f1b"),
    "fsdp x pp": (Mesh(shard=2, pipeline=2), 1, "1f1b"),
    "dp x tp": (Mesh(data=2, tensor=2), 0, ""),
    "fsdp x tp": (Mesh(shard=2, tensor=2), 1, ""),
}


def divided(pool: Pool, name: str, **fields: Any) -> Run:
    """A language model in parts of layers or stages."""
    mesh, zero, schedule = DIVIDED[name]
    replicas = "tensor_parallel:TensorParallel" if mesh.tensor > 1 else "data_parallel:DataParallel"
    engine = "pipeline:Pipeline" if schedule else "fsdp:Sharded" if zero else replicas
    plan = problems.plan_of(PROBLEM, f"trainwright.strategies.torch.engines.{engine}", mesh.size, 1, "collective")
    plan = replace(plan, mesh=mesh, zero=zero, schedule=schedule, precision="bf16")
    plan = replace(plan, cuts=("blocks.1",) if schedule else (), **fields)
    return steps(pool, plan, spec(language, clip_norm=None))


@pytest.mark.parametrize(("name", "recompute"), [("fsdp x pp", "none"), ("fsdp x tp", "none"), ("fsdp", "full")])
def test_divided_layers_and_stages_are_gathered_in_half_precision_and_are_those_of_replicas(
    pool: Pool, name: str, recompute: str
) -> None:
    """Bit by bit: the gradients of two shares are added up in single precision in the same order."""
    found, expected = divided(pool, name, recompute=recompute), divided(pool, name.replace("fsdp", "dp"))
    for number in range(2):
        for run, wanted in ((found, [1.0, 0.0]), (expected, [0.0, 0.0])):
            assert run[1].pop(f"model.safetensors/blocks.{number}.narrow").tolist() == wanted
    assert [one.loss for one in found[0]] == pytest.approx([one.loss for one in expected[0]], rel=1e-6)
    assert_same(found[1], expected[1])
