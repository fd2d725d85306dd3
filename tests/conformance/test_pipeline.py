"""Models in stages: every schedule, models that are not simple, the death of a first stage, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support import processes
from tests.support.conformance import problems, torch_case
from tests.support.conformance.cases import CASES
from tests.support.conformance.harness import SOON_S, Pool, World
from tests.support.conformance.problems import CLASSES, FEATURES, PROBLEMS
from tests.support.conformance.staged_model import WIDTH, Deep, cross_entropy, plan, spec, trained
from tests.support.conformance.unbroken_runs import PART, PROBLEM, WHOLE, assert_same, state_of, unbroken
from trainwright.core.data import StepReport
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError, PeerLost, UserCodeError
from trainwright.core.plan import Plan
from trainwright.driver.rendezvous import agree_on_state
from trainwright.strategies.torch.distributed.process_group import ProcessGroupHandle

NAMED = {case.name: case for case in CASES}
SENT_S = 8.0  # within which a stage has sent what it has to send


LAYOUTS = {
    "two": plan(2, schedule="1f1b", cuts=("blocks.2",)),
    "three": plan(3, schedule="gpipe", cuts=("blocks.1.lift", "blocks.3")),
    "twice": plan(2, 2, schedule="1f1b", cuts=("blocks.1",)),
    "interleaved": plan(2, schedule="interleaved", chunks=2, cuts=("blocks.0.back", "blocks.2", "head")),
    "zero-bubble": plan(3, schedule="zero_bubble", cuts=("blocks.1", "blocks.2.norm"), accumulation=2),
    "folded": plan(2, schedule="zbv", chunks=2, cuts=("blocks.0.back", "blocks.2", "head")),
    "folded-three": plan(
        3, schedule="zbv", chunks=2, cuts=("blocks.0", "blocks.1", "blocks.2", "blocks.3.back", "head"), accumulation=2
    ),
    "folded-twice": plan(2, 2, schedule="zbv", chunks=2, cuts=("blocks.1", "blocks.2", "blocks.3")),
    "folded-four": plan(
        4,
        schedule="zbv",
        chunks=2,
        cuts=("blocks.0", "blocks.0.back", "blocks.1", "blocks.1.back", "blocks.2", "blocks.3", "head"),
        accumulation=2,
    ),
    "no-schedule": plan(2, cuts=("blocks.2",)),
}


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Callable[[int], tuple[list[StepReport], dict[str, Any]]]:
    """What one device does, in so many micro-batches."""
    return functools.cache(lambda accumulation: trained(pool, plan(accumulation=accumulation), spec()))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_model_that_is_not_simple_is_that_of_one_device(pool: Pool, name: str, alone: Any) -> None:
    reports, state = trained(pool, LAYOUTS[name], spec())
    expected, whole = alone(LAYOUTS[name].accumulation)
    assert [report.loss for report in reports] == pytest.approx([report.loss for report in expected], rel=1e-9)
    norms = [report.gradient_norm for report in expected]
    assert [report.gradient_norm for report in reports] == pytest.approx(norms, rel=1e-9)
    assert state.keys() == whole.keys()
    for key in state.keys() - {"state.json"}:
        assert np.allclose(state[key], whole[key], rtol=1e-9, atol=1e-9), key


def mean_cross_entropy(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets).mean()


def test_a_mean_over_rows_in_stages_is_that_of_one_device(pool: Pool, alone: Any) -> None:
    """Two replicas of two stages, with micro-batches of other sizes, and a short batch."""
    reports, state = trained(pool, LAYOUTS["twice"], spec(loss=mean_cross_entropy))
    expected, whole = alone(LAYOUTS["twice"].accumulation)
    assert [report.loss for report in reports] == pytest.approx([report.loss for report in expected], rel=1e-9)
    for key in state.keys() - {"state.json"}:
        assert np.allclose(state[key], whole[key], rtol=1e-9, atol=1e-9), key


def test_bfloat16_is_near_one_device(pool: Pool) -> None:
    job = spec(functools.partial(Deep, torch.float32), sample=functools.partial(torch_case.sample, SINGLE))
    layouts = [replace(LAYOUTS[name], precision="bf16") for name in ("two", "folded")]
    expected, _ = trained(pool, plan(precision="bf16"), job, "float32")
    plain, _ = trained(pool, plan(), job, "float32")
    for layout in layouts:
        found, _ = trained(pool, layout, job, "float32")
        assert [report.loss for report in found] == pytest.approx([report.loss for report in expected], rel=1e-2)
        assert [report.loss for report in found] != pytest.approx([report.loss for report in plain], rel=1e-6)


def test_the_stage_that_ends_a_fold_evaluates_and_predicts(pool: Pool) -> None:
    problem = PROBLEMS["ragged"]
    data, (ids, *_) = problems.columns(problem), problems.batches(problem)
    found = []
    for layout in (plan(), LAYOUTS["folded"]):
        feeds = problems.feeds(problem, layout, 0, ids, data)
        with World(pool, "torch", layout, spec()) as world:
            world.start(feeds)
            world.train([feeds])
            sums = world.every("evaluate", lambda rank, given=feeds: ([given[rank]],))
            found.append((sums[0], world.every("predict", lambda rank, given=feeds: (given[rank],))))
            assert all(not one.totals for one in sums[1:])
    (sums, (outputs,)), (theirs, (ends, other)) = found
    assert theirs.totals["loss"] == pytest.approx(sums.totals["loss"], rel=1e-9) and not other
    assert np.allclose(ends["logits"], outputs["logits"], rtol=1e-9)


class Changing(nn.Sequential):
    """A cut before its second layer is before a change in place."""

    def __init__(self) -> None:
        wide = torch.float64
        super().__init__(nn.Linear(FEATURES, 4, dtype=wide), nn.ReLU(inplace=True), nn.Linear(4, CLASSES, dtype=wide))


class Viewing(Changing):
    """Of what it changes there it also needs a view."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self[0](inputs)
        rows = hidden.view(-1, 4)
        outputs: Tensor = self[2](self[1](hidden) + rows)
        return outputs


def test_what_is_changed_in_place_behind_a_cut(pool: Pool) -> None:
    layout = plan(2, schedule="zero_bubble", cuts=("1",))
    found, _ = trained(pool, layout, spec(Changing, loss=torch_case.cross_entropy))
    expected, _ = trained(pool, plan(), spec(Changing, loss=torch_case.cross_entropy))
    assert [report.loss for report in found] == pytest.approx([report.loss for report in expected], rel=1e-9)
    world = World(pool, "torch", layout, spec(Viewing, loss=torch_case.cross_entropy))
    try:
        with pytest.raises(JobError, match="changes a value in place, and two views"):
            world.form()
    finally:
        world.close(failed=True)


SINGLE = replace(PROBLEMS["ragged"], dtype="float32")


def test_a_stage_without_a_loss_dies_and_its_replica_gives_its_state(pool: Pool) -> None:
    case, workers, dead = NAMED["torch-pipelines"], 4, 0
    whole, feeds = unbroken(pool, case, workers), case.feeds(PROBLEM, workers, range(WHOLE))
    with case.world(pool, PROBLEM, workers) as world:
        world.start(feeds[0])
        world.train(feeds[:PART])
        outcomes, spent_s = world.train_with_fault(feeds[PART : PART + 1], dead, "gone")
        assert outcomes[dead].dead and spent_s < 15.0
        assert all(isinstance(one.error, PeerLost) for rank, one in enumerate(outcomes) if rank != dead), outcomes
        tags = world.form()
        agreement = agree_on_state(dict(enumerate(tags)))
        assert agreement is not None and {(move.source, move.target) for move in agreement.moves} == {(1, 0)}
        assert {tag.step for tag in world.every("transfer", lambda rank: (agreement.moves,))} == {PART}
        world.warm(feeds[PART])
        world.train(feeds[PART:])
        assert_same(whole.end, state_of(case, world))


def looking(inputs: Tensor) -> Tensor:
    return inputs * 2 if inputs.sum() > 0 else inputs


class Looking(nn.Sequential):
    """It looks at values."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(looking(inputs))
        return outputs


def straight(kind: type[nn.Sequential] = nn.Sequential) -> nn.Module:
    """A row of layers."""
    return kind(
        nn.Linear(FEATURES, 4, dtype=torch.float64),
        nn.Tanh(),
        nn.Linear(4, CLASSES, dtype=torch.float64),
        nn.Identity(),
    )


@pytest.mark.parametrize(
    ("layout", "job", "words"),
    [
        (plan(2, schedule="1f1b", cuts=("blocks.7",)), spec(), "no module 'blocks.7'"),
        (plan(2, schedule="1f1b", cuts=("unused",)), spec(), "does not call that module"),
        (plan(3, schedule="1f1b", cuts=("blocks.2", "blocks.1")), spec(), "it is called before the cut ahead of it"),
        (plan(2, schedule="1f1b", cuts=("3",)), spec(straight), "stage 1 has no parameter to train"),
        (
            plan(2, schedule="1f1b", cuts=("2",)),
            spec(functools.partial(straight, Looking)),
            "read values of its inputs",
        ),
        (plan(2, schedule="1f1b"), spec(), "0 cuts for 2 sections"),
        (plan(2, schedule="1f1b", cuts=("2",)), spec(loss=None, step=cross_entropy), "give the job inputs="),
    ],
)
def test_what_cannot_be_cut_is_refused_before_a_step(pool: Pool, layout: Plan, job: ModelSpec, words: str) -> None:
    world = World(pool, "torch", layout, job)
    try:
        with pytest.raises(JobError, match=words):
            world.form()
    finally:
        world.close(failed=True)


def test_inputs_of_another_shape_are_told(pool: Pool) -> None:
    layout = LAYOUTS["two"]
    data = problems.columns(PROBLEMS["ragged"])
    narrow = {**data, "x": data["x"][:, :-1]}
    ids = problems.batches(PROBLEMS["ragged"])
    good, bad = (problems.feeds(PROBLEMS["ragged"], layout, 0, ids[0], one) for one in (data, narrow))
    with World(pool, "torch", layout, spec()) as world:
        world.start(good)
        for rank, feed in zip(world.ranks, bad, strict=True):
            rank.send("train", [feed])
        first, second = (rank.outcome() for rank in world.ranks)
        assert isinstance(first.error, JobError) and "inputs of one shape" in str(first.error)
        assert isinstance(second.error, PeerLost)


class Torn(torch.autograd.Function):
    """Its backward raises, and this rank leaves the group as soon as the other stage has sent all it has to send."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, folder: str) -> Tensor:
        ctx.folder = Path(folder)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        leave, folder = ProcessGroupHandle.leave, ctx.folder

        def late(membership: ProcessGroupHandle) -> None:
            ProcessGroupHandle.leave = leave  # type: ignore[method-assign]
            (folder / "raised").touch()
            processes.wait_for((folder / "sent").exists)
            leave(membership)

        ProcessGroupHandle.leave = late  # type: ignore[method-assign]
        raise ZeroDivisionError("torn on purpose")


class Tearing(nn.Module):
    """Stages of which the first goes wrong."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.first = nn.Linear(FEATURES, WIDTH, dtype=torch.float64)
        self.second = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(Torn.apply(self.first(inputs), self.folder))  # type: ignore[no-untyped-call]
        return outputs


def awaiting(folder: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss; of the second micro-batch it is known only when the other stage has raised."""
    if (Path(folder) / "begun").exists():
        processes.wait_for((Path(folder) / "raised").exists)
    (Path(folder) / "begun").touch()
    return torch_case.cross_entropy(outputs, targets)


def test_an_error_is_told_at_once_although_messages_are_on_their_way(pool: Pool, tmp_path: Path) -> None:
    """gloo reads no further than a message whose buffer is gone, and the reduction behind it would wait for ever."""
    layout = plan(2, schedule="1f1b", cuts=("second",), accumulation=2)
    loss = functools.partial(awaiting, str(tmp_path))
    model = functools.partial(Tearing, str(tmp_path))
    torn = spec(model, loss=loss, inexact=("batch_loss",))  # not compared, since it counts its calls
    feeds = problems.feeds(PROBLEM, layout, 0, problems.batches(PROBLEM)[0], problems.columns(PROBLEM))
    world = World(pool, "torch", layout, torn)
    try:
        world.form(own_s={1: SENT_S})
        world.settle(0, None)
        for rank, feed in zip(world.ranks, feeds, strict=True):
            rank.send("warm", feed)
        world.ranks[1].outcome()  # it has sent all, and waited for the other in vain
        (tmp_path / "sent").touch()
        error = world.ranks[0].outcome(SOON_S).error
    finally:
        world.close(failed=True)
    assert isinstance(error, UserCodeError) and "torn on purpose" in str(error), error
