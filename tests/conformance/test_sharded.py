"""Divided models: a dead rank's part from its replica, layouts through a checkpoint, and models that are not simple."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.conformance import problems, torch_case
from tests.support.conformance.cases import CASES
from tests.support.conformance.harness import Pool, World
from tests.support.conformance.problems import PROBLEMS
from tests.support.conformance.torch_case import adamw
from tests.support.conformance.unbroken_runs import PART, PROBLEM, WHOLE, assert_same, state_of, unbroken
from trainwright.core.data import Feed, StepReport
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError, UserCodeError
from trainwright.core.plan import Plan
from trainwright.core.topology import Generation, Group, Peer, StateTransfer
from trainwright.driver.rendezvous import agree_on_state

NAMED = {case.name: case for case in CASES}
TORCH = "trainwright.strategies.torch"
LAYOUTS = {
    "one": (1, NAMED["torch-one-device"]),
    "parallel": (2, NAMED["torch-data-parallel"]),
    "three": (3, NAMED["torch-sharded"]),
    "two": (2, NAMED["torch-zero-2"]),
    "summed": (2, NAMED["torch-zero-1"]),
    "hybrid": (4, NAMED["torch-hybrid-shard"]),
    "stages": (2, NAMED["torch-pipeline"]),
    "pipelines": (4, NAMED["torch-pipelines"]),
    "tensor": (2, NAMED["torch-tensor-parallel"]),
    "fsdp x tp": (4, NAMED["torch-fsdp-x-tp"]),
    "fsdp x pp": (4, NAMED["torch-fsdp-x-pp"]),
    "pp x tp": (4, NAMED["torch-pp-x-tp"]),
}


@pytest.mark.parametrize(("name", "kind"), [("torch-hybrid-shard", "shard"), ("torch-dp-x-tp", "tensor")])
def test_a_dead_ranks_part_comes_from_its_replica(pool: Pool, name: str, kind: str) -> None:
    case, workers, dead = NAMED[name], 4, 3
    whole, feeds = unbroken(pool, case, workers), case.feeds(PROBLEM, workers, range(WHOLE))
    with case.world(pool, PROBLEM, workers) as world:
        world.start(feeds[0])
        outcomes, _ = world.train_with_fault(feeds[: PART + 1], dead, "kill")
        assert outcomes[dead].dead
        tags = world.form()
        assert [(tag.step, *tag.pieces) for tag in tags] == [
            (PART, f"{kind}-0"), (PART, f"{kind}-1"), (PART, f"{kind}-0"), (None, f"{kind}-1"),
        ]  # fmt: skip
        agreement = agree_on_state(dict(enumerate(tags)))
        assert agreement is not None and agreement.moves == (StateTransfer(source=1, target=dead, piece=f"{kind}-1"),)
        assert {tag.step for tag in world.every("transfer", lambda rank: (agreement.moves,))} == {PART}
        world.warm(feeds[PART])
        world.train(feeds[PART:])
        assert_same(whole.end, state_of(case, world))


@pytest.mark.parametrize("name", ["torch-fsdp-x-tp", "torch-fsdp-x-pp", "torch-pp-x-tp"])
def test_ranks_that_form_again_go_on_with_what_they_hold(pool: Pool, name: str) -> None:
    case, workers = NAMED[name], 4
    whole, feeds = unbroken(pool, case, workers), case.feeds(PROBLEM, workers, range(WHOLE))
    with case.world(pool, PROBLEM, workers) as world:
        world.start(feeds[0])
        world.train_with_fault(feeds[: PART + 1], workers - 1, "error")
        tags = world.form()
        assert {tag.step for tag in tags} == {PART} and all(tag.sound for tag in tags)
        assert len(frozenset().union(*(tag.pieces for tag in tags))) == tags[0].total
        world.train(feeds[PART:])
        assert_same(whole.end, state_of(case, world))


@pytest.mark.parametrize(
    ("name", "alone", "parts"),
    [
        ("two", {"state"}, ["shard-0", "shard-1"]),
        ("stages", {"state"}, ["stage-0", "stage-1"]),
        ("tensor", {"state"}, ["tensor-0", "tensor-1"]),
    ],
)
def test_a_spare_that_rehearsed_alone_takes_a_part(pool: Pool, name: str, alone: set[str], parts: list[str]) -> None:
    workers, case = LAYOUTS[name]
    whole, feeds = unbroken(pool, case, workers), case.feeds(PROBLEM, workers, range(WHOLE))
    with case.world(pool, PROBLEM, workers) as world:
        spare, rehearsal = world.ranks[1], Generation(token=0, number=0)
        peer = Peer(rank=0, address=spare.call("reserve", "worker"))
        spare.call("form", Group(generation=rehearsal, rank=0, peers=(peer,)))
        assert spare.call("build", world.spec, world.plan).pieces == alone
        spare.call("warm", feeds[0][1])
        spare.call("leave")
        world.built(1)
        tags = world.form()
        assert [(tag.step, *tag.pieces) for tag in tags] == [(None, part) for part in parts]
        world.settle(0, feeds[0])
        world.train(feeds)
        assert_same(whole.end, state_of(case, world))


def test_every_layout_goes_on_from_every_other(pool: Pool) -> None:
    """Through one checkpoint after the other: 8 and 4 rows in three parts are uneven, and one part is empty."""
    order = [
        "one", "three", "stages", "two", "pipelines", "parallel", "hybrid", "stages", "tensor", "three", "fsdp x tp",
        "pp x tp", "fsdp x pp", "tensor", "fsdp x pp", "fsdp x tp", "one",
    ]  # fmt: skip
    problem = replace(PROBLEM, dropout=0.0, steps=2 * len(order))
    whole = NAMED["torch-one-device"]
    feeds = whole.feeds(problem, 1, range(problem.steps))
    with whole.world(pool, problem, 1) as world:
        world.start(feeds[0])
        expected = [report.loss for report in world.train(feeds)[0]]
    files: Mapping[str, bytes] = {}
    losses: list[float] = []
    for number, name in enumerate(order):
        workers, case = LAYOUTS[name]
        then = case.code.state(files) if files else {}
        here = case.feeds(problem, workers, range(problem.steps))[2 * number : 2 * number + 2]
        with case.world(pool, problem, workers) as world:
            world.form()
            if files:
                assert {tag.step for tag in world.every("load", lambda rank: (files,))} == {2 * number}  # noqa: B023
                assert_same(then, state_of(case, world))
            world.warm(here[0])
            losses += [report.loss for report in world.train(here)[0]]
            files = world.files()
    assert losses == pytest.approx(expected, rel=1e-9)


class Blocks(nn.Module):
    """Tied and frozen weights, a buffer, a block of its own kind of layer, and parameters that get no gradient.

    Args:
        swapped: rows with a negative first feature send the rank through the blocks, then equal, in the other order.
        wide: the types of all parameters.
    """

    def __init__(self, swapped: bool = False, wide: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.swapped = swapped
        self.lift = nn.Linear(problems.FEATURES, 5, bias=False, dtype=wide)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(5, dtype=wide), nn.Linear(5, 5, dtype=wide), nn.GELU()) for _ in range(2)
        )
        if not swapped:
            self.layers[0][1].bias.requires_grad_(False)
            self.layers[1][0].spare = nn.Parameter(torch.ones(3, dtype=wide))
        self.spare = nn.Linear(2, 2, dtype=wide)
        self.head = nn.Linear(5, problems.CLASSES, dtype=wide)
        self.back = nn.Linear(problems.FEATURES, 5, bias=False, dtype=wide)
        self.back.weight = self.lift.weight
        self.register_buffer("seen", torch.zeros((), dtype=wide))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.lift(inputs)
        for block in reversed(self.layers) if self.swapped and inputs[0, 0] < 0 else self.layers:
            hidden = hidden + block(hidden)
        if self.training:
            self.seen += 1
        outputs: Tensor = self.head(hidden + self.back(inputs))
        return outputs


def spec(model: Callable[[], nn.Module]) -> ModelSpec:
    """A job on the columns of the suite."""
    return ModelSpec(
        model=model, loss=torch_case.cross_entropy, optimizer=adamw, total_steps=20, inputs=("x",), targets=("y",),
        clip_norm=problems.CLIP,
    )  # fmt: skip


def trained(
    pool: Pool, name: str, model: Callable[[], nn.Module], **fields: Any
) -> tuple[list[StepReport], dict[str, Any]]:
    """Reports and last state of six steps of a batch that does not divide, in two micro-batches."""
    workers, case = LAYOUTS[name]
    problem = replace(PROBLEMS["ragged"], dtype=fields.pop("dtype", "float64"))
    plan: Plan = replace(case.plan(problem, workers), **fields)
    data, ids = problems.columns(problem), problems.batches(problem)
    feeds: list[list[Feed]] = [problems.feeds(problem, plan, step, ids[step], data) for step in range(6)]
    with World(pool, "torch", plan, spec(model)) as world:
        world.start(feeds[0])
        reports = world.train(feeds)
        assert all(one == reports[0] for one in reports)
        return reports[0], torch_case.state(world.files())


class Looking(Blocks):
    """Counts the forwards that find a block's parameters gathered already."""

    def __init__(self, wide: torch.dtype = torch.float64) -> None:
        super().__init__(wide=wide)
        self.register_buffer("gathered", torch.zeros((), dtype=wide))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.gathered += not isinstance(self.layers[1][1].weight, DTensor)
        return super().forward(inputs)


@pytest.mark.parametrize(("name", "found"), [("summed", 6), ("two", 0)])
def test_zero_1_gathers_once_a_step(pool: Pool, name: str, found: int) -> None:
    _, state = trained(pool, name, Looking)
    assert state["model.safetensors/gathered"] == found, "of twelve: two micro-batches in each of six steps"


@pytest.mark.parametrize("name", ["three", "hybrid", "summed"])
def test_tied_frozen_and_unused_parameters_are_those_of_one_device(pool: Pool, name: str) -> None:
    reports, state = trained(pool, name, Blocks)
    expected, whole = trained(pool, "one", Blocks)
    assert [report.loss for report in reports] == pytest.approx([report.loss for report in expected], rel=1e-9)
    norms = [report.gradient_norm for report in expected]
    assert [report.gradient_norm for report in reports] == pytest.approx(norms, rel=1e-9)
    assert state.keys() == whole.keys(), "an unused parameter has optimizer state"
    for key in state.keys() - {"state.json"}:
        assert np.allclose(state[key], whole[key], rtol=1e-9, atol=1e-9), key
    assert np.array_equal(state["model.safetensors/lift.weight"], state["model.safetensors/back.weight"])
    assert np.array_equal(state["model.safetensors/spare.weight"], whole["model.safetensors/spare.weight"])


def test_bfloat16_is_near_one_device(pool: Pool) -> None:
    model = functools.partial(Blocks, wide=torch.float32)
    found, state = trained(pool, "two", model, precision="bf16", dtype="float32")
    expected, _ = trained(pool, "one", model, precision="bf16", dtype="float32")
    plain, _ = trained(pool, "one", model, dtype="float32")
    assert [report.loss for report in found] == pytest.approx([report.loss for report in expected], rel=1e-2)
    assert [report.loss for report in found] != pytest.approx([report.loss for report in plain], rel=1e-6)
    assert state["model.safetensors/lift.weight"].dtype == np.float32


def test_ranks_that_run_blocks_in_another_order_are_told_before_anything_is_applied(pool: Pool) -> None:
    workers, case = LAYOUTS["two"]
    plan = case.plan(PROBLEMS["dividing"], workers)
    rows = problems.columns(PROBLEMS["dividing"])["x"][:, 0]
    feeds = problems.feeds(PROBLEMS["dividing"], plan, 0, np.argsort(rows), problems.columns(PROBLEMS["dividing"]))
    signs = [feed.parts[0][0].columns["x"][0, 0] < 0 for feed in feeds]
    feeds[1] = replace(feeds[1], parts=(tuple(reversed_rows(batch) for batch in feeds[1].parts[0]),))
    assert signs == [True, True] and feeds[1].parts[0][0].columns["x"][0, 0] > 0
    with World(pool, "torch", plan, spec(functools.partial(Blocks, swapped=True))) as world:
        world.start()
        before = torch_case.parameters(world.files())
        for rank, feed in zip(world.ranks, feeds, strict=True):
            rank.send("train", [feed])
        outcomes = [rank.outcome() for rank in world.ranks]
        assert all(isinstance(one.error, JobError) for one in outcomes), outcomes
        assert all("different blocks" in str(one.error) for one in outcomes)
        assert_same(before, torch_case.parameters(world.files()))


def of_the_head(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """A step that does not call the model itself."""
    outputs: Tensor = model.head(batch["x"][:, :5])
    return torch_case.cross_entropy(outputs, batch["y"])


def test_a_parameter_that_is_used_while_it_is_divided_is_told(pool: Pool) -> None:
    workers, case = LAYOUTS["two"]
    feeds = case.feeds(PROBLEMS["dividing"], workers, range(1))
    job = replace(spec(Blocks), loss=None, step=of_the_head)
    with World(pool, "torch", case.plan(PROBLEMS["dividing"], workers), job) as world:
        world.form()
        with pytest.raises(UserCodeError, match="call the model itself"):
            world.warm(feeds[0])


def reversed_rows(batch: Any) -> Any:
    """The last row first."""
    columns = {name: array[::-1].copy() for name, array in batch.columns.items()}
    return replace(batch, columns=columns, samples=batch.samples[::-1].copy())


def test_a_group_that_the_parts_do_not_divide_is_refused(pool: Pool) -> None:
    case = NAMED["torch-hybrid-shard"]
    plan = replace(case.plan(PROBLEM, 4), mesh=replace(case.plan(PROBLEM, 4).mesh, data=3, shard=1))
    wrong = replace(plan, mesh=replace(plan.mesh, data=1, shard=2))
    world = World(pool, "torch", plan, case.code.spec(PROBLEM))
    world.plan = wrong
    try:
        with pytest.raises(JobError, match="3 ranks cannot hold a model in 2 parts"):
            world.form()
    finally:
        world.close(failed=True)
