"""Pipelines that do not drain: each step's gradient is taken at the weights that the last update started from."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.conformance import problems, torch_case
from tests.support.conformance.harness import Pool, World
from tests.support.conformance.problems import PROBLEMS, Problem
from tests.support.conformance.staged_model import Deep, Steps, plan, spec, streamed
from tests.support.conformance.unbroken_runs import assert_same
from trainwright.core.data import Feed, StepReport, zero_weight
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Mesh, Plan
from trainwright.strategies.torch.engines.pipeline import Pipeline

SILENT = 3
STREAM: dict[str, Any] = {"schedule": "pipedream"}
TWO = plan(2, cuts=("blocks.2",), **STREAM)


def steps_of(layout: Plan, problem: Problem, steps: range) -> Steps:
    """For each step, each rank's feed."""
    data, ids = problems.columns(problem), problems.batches(problem, steps.stop)
    return [problems.feeds(problem, layout, step, ids[step], data) for step in steps]


def silent(steps: Steps) -> Steps:
    """With a step that is not applied."""
    return [[zero_weight(feed) if feed.step == SILENT else feed for feed in feeds] for feeds in steps]


def delayed(
    job: ModelSpec, start: Mapping[str, Any], steps: Sequence[Feed]
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and last state of W(k + 1) = W(k) + update(gradient at W(k - 1)) on one device, in plain torch."""
    newest = job.model()
    newest.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in start.items()})
    before = copy.deepcopy(newest)
    trained = [each for each in newest.parameters() if each.requires_grad]
    stale = [each for each in before.parameters() if each.requires_grad]
    rule, losses, norms = job.optimizer(trained), list[float](), list[float]()  # type: ignore[misc]
    for feed in steps:
        if feed.step == SILENT:
            _renew(stale, trained)
            losses.append(0.0)
            norms.append(0.0)
            continue
        before.zero_grad()
        parts = [_terms(job, before, batch) for batch in feed.parts[0]]
        weight = sum(float(weights.sum()) for _, weights in parts)
        loss = sum((values * weights).sum() for values, weights in parts) / weight
        loss.backward()
        given = [each.grad for each in stale if each.grad is not None]
        norm = float(torch.sqrt(sum((each**2).sum() for each in given)))
        norms.append(norm)
        losses.append(loss.item())
        if job.clip_norm is not None:
            for each in given:
                each.mul_(min(1.0, job.clip_norm / (norm + 1e-6)))
        for own, old in zip(trained, stale, strict=True):
            own.grad = old.grad
        _renew(stale, trained)
        rule.step()
        newest.zero_grad()
    return losses, norms, before.state_dict() | dict(newest.named_parameters(remove_duplicate=False))


def _renew(stale: Sequence[Tensor], newest: Sequence[Tensor]) -> None:
    """A step is over: the newest weights become those before."""
    with torch.no_grad():
        for old, own in zip(stale, newest, strict=True):
            old.copy_(own)


def _terms(job: ModelSpec, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    columns = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in batch.columns.items()}
    targets = tuple(columns[name] for name in job.targets)
    outputs = model(*(columns[name] for name in job.inputs))
    found = job.loss(outputs, targets if len(targets) > 1 else targets[0])  # type: ignore[misc]
    values, weights = found if isinstance(found, tuple) else (found, torch.ones_like(found))
    return values, weights * torch.from_numpy(batch.weights)


RAGGED = replace(PROBLEMS["ragged"], inputs=("x",))
HALVES: dict[str, Any] = {"cuts": ("second",), **STREAM}
CASES: dict[str, tuple[Plan, ModelSpec, Problem, int]] = {
    "replicas, weights": (plan(2, 2, **HALVES), torch_case.spec(PROBLEMS["weights"]), PROBLEMS["weights"], 50),
    "clipped": (plan(2, **HALVES), torch_case.spec(PROBLEMS["clip"]), PROBLEMS["clip"], 50),
    "empty shares": (plan(2, **HALVES), torch_case.spec(PROBLEMS["empty_shares"]), PROBLEMS["empty_shares"], 50),
    "tied, frozen and unused parameters": (TWO, spec(), RAGGED, 8),
    "four stages": (plan(4, cuts=("blocks.0.back", "blocks.2", "head"), **STREAM), spec(clip_norm=None), RAGGED, 8),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_one_step_stale_and_nothing_else_differs_from_one_device(pool: Pool, name: str) -> None:
    layout, job, problem, count = CASES[name]
    alone = [feed for (feed,) in silent(steps_of(plan(accumulation=4 * layout.mesh.data), problem, range(count)))]
    steps = streamed(silent(steps_of(layout, problem, range(count))), drains=(count // 2,))
    with World(pool, "torch", layout, job) as world:
        world.start(steps[0])
        start = _parameters(world)
        reports = world.train(steps)
        assert all(each == reports[0] for each in reports)
        found = _parameters(world)
    losses, norms, expected = delayed(job, start, alone)
    assert [report.loss for report in reports[0]] == pytest.approx(losses, rel=1e-9)
    if job.clip_norm is not None:
        assert [report.gradient_norm or 0.0 for report in reports[0]] == pytest.approx(norms, rel=1e-9)
    for key, value in found.items():
        assert np.allclose(value, expected[key].detach().numpy(), rtol=1e-9, atol=1e-9), key
    if count == 50:
        assert np.mean(losses[-10:]) < np.mean(losses[:10])


def _parameters(world: World) -> dict[str, Any]:
    """Parameters and buffers by name."""
    prefix = "model.safetensors/"
    state = torch_case.state(world.files())
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


class Drawing(Deep):
    """With dropout before and behind each cut, and statistics of what comes by."""

    def __init__(self) -> None:
        super().__init__()
        self.drops = nn.ModuleList(nn.Dropout(0.2) for _ in range(4))
        self.register_buffer("mean", torch.zeros(5, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        hidden = self.first(inputs) + self.shift
        if self.training:
            self.mean.mul_(0.9).add_(hidden.detach().mean(0))
        for block, drop in zip(self.blocks, self.drops, strict=True):
            hidden = drop(block(hidden, mask=torch.ones_like(self.shift))[0])
        return {"logits": self.head(hidden + self.again(inputs))}


def run(
    pool: Pool, layout: Plan, job: ModelSpec, segments: Sequence[Steps], state: Mapping[str, bytes] | None = None
) -> tuple[list[StepReport], list[dict[str, bytes]]]:
    """Reports of all steps, and the files after each segment."""
    reports, files = list[StepReport](), list[dict[str, bytes]]()
    with World(pool, "torch", layout, job) as world:
        world.form()
        if state is None:
            world.settle(0, segments[0][0])
        else:
            world.every("load", lambda rank: (state,))
            world.warm(segments[0][0])
        for steps in segments:
            reports += world.train(steps)[0]
            files.append(dict(world.files()))
    return reports, files


@pytest.mark.parametrize("how", ["none", "full"])
def test_neither_a_drain_nor_a_wish_nor_a_checkpoint_changes_a_bit(pool: Pool, how: str) -> None:
    layout = replace(TWO, recompute=how)
    job, steps = spec(Drawing, clip_norm=None), steps_of(layout, RAGGED, range(8))
    reports, (end,) = run(pool, layout, job, [streamed(steps)])
    told = streamed(steps, drains=(2,), wishes=(3, 6))  # the first wish ends the segment that its step is in
    others, (half, whole) = run(pool, layout, job, [told[:4], told[4:]])
    assert [each.loss for each in others] == [each.loss for each in reports]
    assert [each.step for each in others if each.stop_requested] == [4, 7]
    assert_same(torch_case.state(end), torch_case.state(whole))
    restored, (last,) = run(pool, layout, job, [streamed(steps[4:])], half)
    assert restored == reports[4:]
    assert_same(torch_case.state(end), torch_case.state(last))


def test_a_step_that_is_passed_by_changes_no_other(pool: Pool) -> None:
    """What was begun of the step after it is dropped, on all ranks alike; the weights stay as they are."""
    job, steps = spec(Drawing), steps_of(TWO, RAGGED, range(6))
    bad = [[_spoilt(feed) if feed.step == 3 else feed for feed in feeds] for feeds in steps]
    found = []
    for given in (
        streamed(bad),
        [[zero_weight(feed) if feed.step == 3 else feed for feed in feeds] for feeds in steps],
    ):
        with World(pool, "torch", TWO, job) as world:
            world.start(given[0])
            reports = world.every("train_past", lambda rank, given=given: ([feeds[rank] for feeds in given],))
            found.append((reports[0], torch_case.state(world.files())))
    assert found[0][0] == found[1][0] and found[0][0][3].weight == 0.0
    assert_same(found[0][1], found[1][1])


def _spoilt(feed: Feed) -> Feed:
    """With a sample that is not finite."""
    (first, *others), *rest = feed.parts
    x = first.columns["x"].copy()
    x[0] = np.nan
    return replace(feed, parts=((replace(first, columns={**first.columns, "x": x}), *others), *rest))


def test_a_state_goes_to_other_layouts_and_comes_from_them(pool: Pool) -> None:
    job, layouts = spec(), (TWO, plan(), plan(2, schedule="1f1b", cuts=("blocks.1",)))
    stale, plain, other = (steps_of(layout, RAGGED, range(6)) for layout in layouts)
    _, (files,) = run(pool, layouts[0], job, [streamed(stale[:3])])
    expected, (whole,) = run(pool, layouts[1], job, [plain[3:]], files)
    found, (parts,) = run(pool, layouts[2], job, [other[3:]], files)
    assert [each.loss for each in found] == pytest.approx([each.loss for each in expected], rel=1e-9)
    assert not any("weights_before" in name for name in torch_case.state(parts))
    again, _ = run(pool, layouts[0], job, [streamed(steps_of(TWO, RAGGED, range(6, 9)))], whole)
    plainly, _ = run(pool, layouts[1], job, [steps_of(plan(), RAGGED, range(6, 9))], whole)
    assert again[0].loss == pytest.approx(plainly[0].loss, rel=1e-9)
    assert again[1].loss != pytest.approx(plainly[1].loss, rel=1e-6)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (replace(TWO, accumulation=1), "1 micro-batches for the 2 stages"),
        (replace(TWO, mesh=Mesh(pipeline=2, shard=2), zero=1), "keeps two versions of a stage's weights"),
    ],
)
def test_what_cannot_go_without_a_drain_is_refused_before_a_step(layout: Plan, words: str) -> None:
    (found,) = Pipeline()._problems(spec(), layout)
    assert words in found
