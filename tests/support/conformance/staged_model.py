"""A model that is not simple, in stages: the jobs, plans and runs that tests of pipelines share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.conformance import problems, torch_case
from tests.support.conformance.harness import Pool, World
from tests.support.conformance.problems import CLASSES, FEATURES, PROBLEMS
from tests.support.conformance.torch_case import adamw
from trainwright.core.data import Feed, StepReport
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Mesh, Plan, WorkerResources

PIPELINE = "trainwright.strategies.torch.engines.pipeline:Pipeline"
ONE_DEVICE = "trainwright.strategies.torch.engines.base:OneDevice"
WIDTH = 5


class Block(nn.Module):
    """A residual block with a parameter of its own, that returns a pair and takes a mask by name."""

    def __init__(self, wide: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5, dtype=wide))
        self.norm = nn.LayerNorm(WIDTH, dtype=wide)
        self.lift, self.back = (nn.Linear(WIDTH, WIDTH, dtype=wide) for _ in range(2))

    def forward(self, hidden: Tensor, *, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        inner = torch.tanh(self.lift(self.norm(hidden)))
        return hidden + self.scale * self.back(inner) * mask, {"inner": inner}


class Deep(nn.Module):
    """Tied, frozen and unused parameters, one used between modules, a buffer that counts, a value that skips stages.

    Args:
        wide: the type of all parameters.
    """

    def __init__(self, wide: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH, bias=False, dtype=wide)
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH, dtype=wide))
        self.blocks = nn.ModuleList(Block(wide) for _ in range(4))
        self.blocks[1].lift.bias.requires_grad_(False)
        self.again = nn.Linear(FEATURES, WIDTH, bias=False, dtype=wide)
        self.again.weight = self.first.weight
        self.unused = nn.Linear(2, 2, dtype=wide)
        self.head = nn.Linear(WIDTH, CLASSES, dtype=wide)
        self.register_buffer("seen", torch.zeros((), dtype=wide))

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        hidden = early = self.first(inputs) + self.shift
        mask = (torch.arange(WIDTH, device=inputs.device) > 0).to(hidden.dtype)
        for block in self.blocks:
            hidden, others = block(hidden, mask=mask)
            hidden = hidden + 0.1 * others["inner"].detach()
        if self.training:
            self.seen += 1
        return {"logits": self.head(hidden + early + self.again(inputs))}


def cross_entropy(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs["logits"].double(), targets, reduction="none")


def spec(model: Callable[[], nn.Module] = Deep, **fields: Any) -> ModelSpec:
    """A job on the columns of the suite."""
    return ModelSpec(
        **{
            "model": model, "loss": cross_entropy, "optimizer": adamw, "total_steps": 20, "inputs": ("x",),
            "targets": ("y",), "clip_norm": problems.CLIP, "seed": 3,
            "sample": functools.partial(torch_case.sample, PROBLEMS["ragged"]),
            **fields,
        }
    )  # fmt: skip


def plan(stages: int = 1, data: int = 1, **choices: Any) -> Plan:
    """Of so many stages, with four micro-batches."""
    return Plan(
        **{
            "strategy": "conformance", "engine": PIPELINE if stages > 1 else ONE_DEVICE, "batch_size": 23,
            "mesh": Mesh(pipeline=stages, data=data), "placement": WorkerResources(cpus=1), "accumulation": 4,
            **choices,
        }
    )  # fmt: skip


def trained(
    pool: Pool, layout: Plan, job: ModelSpec, dtype: str = "float64"
) -> tuple[list[StepReport], dict[str, Any]]:
    """Reports and last state of six steps of a batch that does not divide."""
    problem = replace(PROBLEMS["ragged"], dtype=dtype)
    data, ids = problems.columns(problem), problems.batches(problem)
    feeds: list[list[Feed]] = [problems.feeds(problem, layout, step, ids[step], data) for step in range(6)]
    with World(pool, "torch", layout, job) as world:
        world.start(feeds[0])
        reports = world.train(feeds)
        assert all(one == reports[0] for one in reports)
        return reports[0], torch_case.state(world.files())


Steps = list[list[Feed]]


def streamed(steps: Steps, drains: Collection[int] = (), wishes: Collection[int] = ()) -> Steps:
    """The same with each step told of the one after it, but before the last and before drains; some wish to stop."""
    followed = [
        [replace(feed, following=after if after.step not in drains else None) for feed, after in zip(*two, strict=True)]
        for two in itertools.pairwise(steps)
    ]
    return [[replace(feed, stop_requested=feed.step in wishes) for feed in feeds] for feeds in (*followed, steps[-1])]
